"""`SkipNonFinite`, which skips updates whose loss or gradients are not finite, up to a limit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fluxcb._declare.access import Append, Read, Write
from fluxcb._declare.callback import Callback
from fluxcb._declare.control import CancelFitting, RewindFitting
from fluxcb._declare.events import BackwardEnd, Event, StepEnd
from fluxcb._declare.handlers import on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._declare.resolution import Resolution, RunFirst, Unresolvable
from fluxcb._declare.schedules import AtWindowEnds, positive
from fluxcb._tracebacks import warn_user
from fluxcb.callbacks.gradients.finite import all_finite
from fluxcb.callbacks.gradients.step_writers import writes_step
from fluxcb.callbacks.stopping.nan_loss import DIVERGED, StopOnNaNLoss

__all__ = ["SkipNonFinite"]


class SkipNonFinite(StopOnNaNLoss):
    """Skip updates whose loss or gradients are NaN or infinite; rewind or end the fit after `limit` in a row.

    It replaces the default callback `StopOnNaNLoss`, which ends the fit at the first loss that is not finite. Gradients
    are checked before any other callback changes them. Overflows that `DynamicLossScale` causes also count.

    With `rewinds`, the run rewinds to the newest checkpoint from before these steps, and continues with other batches
    (`fluxcb.RewindFitting`). This helps if the parameters themselves have diverged.

    Args:
        limit: Number of consecutive skipped steps at which to rewind or to end the fit, at least 1.
        rewinds: Maximum number of rewinds. After these, `limit` consecutive skipped steps end the fit, and
            `learner.stop_reason` contains the reason.

    Access:
        step.loss, step.earlier_losses, step.grads: Read.
        step.skip: Append.
        step.stop: Append (traced), Read (host).
        step.non_finite: Write (traced). Whether the loss or a gradient of this step was not finite, and the counts
            before the step.
        cbstate.non_finite: Write (traced), Read (host). The total number of `skipped` steps, and those `in_a_row`,
            int32[] each.
        control: Append.

    Runs:
        BackwardEnd x AbstractTrainingPhase (traced).
        StepEnd x AbstractTrainingPhase (host, at the ends of windows).

    Cost:
        One pass over the gradients inside the step. Fetches two counts per step. Does not shorten windows: the device
        itself decides when to stop, and the host checks once per window.

    Raises:
        DeclarationError: `limit` is not an integer of at least 1, or `rewinds` is not an integer of at least 0.

    Warns:
        RuntimeWarning: The callback ends the fit.

    Example:
        >>> import jax.numpy as jnp, optax, fluxcb
        >>> from fluxcb.callbacks import SkipNonFinite
        >>> learner = fluxcb.Learner.from_loss(
        ...     {"w": jnp.ones(())},
        ...     lambda params, batch, key: jnp.mean(params["w"] * batch),
        ...     optax.sgd(0.1),
        ...     data=[jnp.ones(2), jnp.array([1.0, jnp.nan]), jnp.ones(2)],
        ...     callbacks=[SkipNonFinite()],
        ...     default_callbacks=False,
        ... )
        >>> history = learner.fit(2)
        >>> learner.cbstate["non_finite"]["skipped"].item(), f"{learner.params['w']:.1f}"
        (2, '0.6')

    Source:
        `optax.apply_if_finite`, which applies the update after a number of consecutive errors instead of stopping.
    """

    def __init__(self, limit: int = 10, *, rewinds: int = 0) -> None:
        self.limit = positive(limit, "`limit` of SkipNonFinite (steps)")
        self.rewinds = positive(rewinds, "`rewinds` of SkipNonFinite") if rewinds != 0 else 0

    def stateaccess(self) -> Mapping[str, Any]:
        """Return the paths that the callback reads and writes."""
        read = {name: Read() for name in ("loss", "earlier_losses", "grads")}
        step = {**read, "skip": Append(), "stop": Append(), "non_finite": Write()}
        return {"step": step, "cbstate": {"non_finite": Write()}, "control": Append()}

    def resolveconflict(self, other: Callback) -> Resolution:
        """Run before callbacks that write the gradients, and refuse `StopOnNaNLoss` itself."""
        # Element-wise clipping, for example, would hide an infinite gradient. `StopOnNaNLoss` would end the fit at the
        # first step that this callback skips.
        if type(other) is StopOnNaNLoss:
            return Unresolvable()
        return RunFirst(self) if writes_step(other, "grads") else super().resolveconflict(other)

    def init(self, learner: LearnerView) -> None:
        """Create `cbstate.non_finite`."""
        import jax.numpy as jnp

        if "non_finite" not in learner.cbstate:
            learner.cbstate.non_finite = {name: jnp.zeros((), jnp.int32) for name in ("skipped", "in_a_row")}

    @on(
        BackwardEnd,
        AbstractTrainingPhase,
        access={
            "step": {
                "loss": Read(),
                "earlier_losses": Read(),
                "grads": Read(),
                "skip": Append(),
                "stop": Append(),
                "non_finite": Write(),
            },
            "cbstate": {"non_finite": Write()},
        },
    )
    def mark(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Skip the update if a loss or a gradient is not finite, and stop the window at the limit."""
        import jax.numpy as jnp

        bad = ~all_finite((learner.step.earlier_losses, learner.step.loss, learner.step.grads))
        old = learner.cbstate.non_finite
        if "non_finite" in learner.step:  # the phase has emitted BackwardEnd before, for another loss of this step
            # Count from the counts before the step, so that a step with several losses counts once.
            bad, old = bad | learner.step["non_finite"]["found"], learner.step["non_finite"]["before"]
        learner.step["non_finite"] = {"found": bad, "before": old}
        in_a_row = jnp.where(bad, old["in_a_row"] + 1, 0)
        learner.cbstate.non_finite = {"skipped": old["skipped"] + bad.astype(jnp.int32), "in_a_row": in_a_row}
        learner.step.skip = bad
        learner.step.stop = in_a_row >= self.limit

    @on(
        StepEnd,
        AbstractTrainingPhase,
        access={"step": {"stop": Read()}, "cbstate": {"non_finite": Read()}, "control": Append()},
        when=AtWindowEnds(),  # `step.stop` ends the window, so no stopped step is missed
    )
    def cancel(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Rewind or end the fit after `limit` consecutive skipped steps."""
        step = learner.progress.step
        # Another callback may also have set `step.stop`, so the count decides.
        if learner.step.stop and learner.cbstate.non_finite["in_a_row"] >= self.limit:
            reason = f"loss or gradients were not finite at {self.limit} steps in a row, up to step {step}"
            if self.rewinds:
                raise RewindFitting(reason, step - self.limit, self.rewinds)
            warn_user(f"Training stopped: {reason}.", RuntimeWarning)
            raise CancelFitting(reason, advice=DIVERGED)

    def __repr__(self) -> str:
        return f"SkipNonFinite({self.limit})"
