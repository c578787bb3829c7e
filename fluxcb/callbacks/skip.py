"""`SkipNonFinite`: go on where a step's loss or gradients are not finite, but not for ever."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from fluxcb._declare.access import Append, Read, Write
from fluxcb._declare.callback import Callback
from fluxcb._declare.control import CancelFitting, RewindFitting
from fluxcb._declare.events import BackwardEnd, Event, StepEnd
from fluxcb._declare.handlers import on
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._declare.resolution import Resolution, RunFirst, Unresolvable
from fluxcb._declare.schedules import AtWindowEnds, positive
from fluxcb._tracebacks import stacklevel_of_user
from fluxcb.callbacks.finite import all_finite
from fluxcb.callbacks.nan_loss import DIVERGED, StopOnNaNLoss
from fluxcb.callbacks.step_writers import writes_step

__all__ = ["SkipNonFinite"]


class SkipNonFinite(StopOnNaNLoss):
    """Skip the update where the loss or a gradient is NaN or infinite; go back or end the fit after some in a row.

    It takes the place of `StopOnNaNLoss` among the default callbacks, which ends the fit at the first. Gradients are
    judged before any other callback changes them. Overflows that `DynamicLossScale` skips count, too.

    With `rewinds`, the run goes back to the newest checkpoint from before those steps, and on from there with other
    batches (`fluxcb.RewindFitting`), as it helps where the parameters themselves have gone astray.

    Args:
        limit: Skipped steps in a row that are too many, at least 1.
        rewinds: How often the run may go back then, before such steps end the fit; `learner.stop_reason` tells.

    Access:
        step.loss, step.grads: Read.
        step.skip: Append.
        step.stop: Append (traced), Read (host).
        cbstate.non_finite: Write (traced), Read (host). `skipped`, in all, and `in_a_row`, int32[] each.
        control: Append.

    Runs:
        BackwardEnd x AbstractTrainingPhase (traced).
        StepEnd x AbstractTrainingPhase (host, at the ends of windows).

    Cost:
        One pass over the gradients. Fetches two counts a step. Bounds no window: the device stops by itself, and the
        host looks once per window.

    Raises:
        DeclarationError: `limit` is no whole number of at least 1, or `rewinds` none of at least 0.

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
        `optax.apply_if_finite`, which applies the update after so many instead of stopping.
    """

    def __init__(self, limit: int = 10, *, rewinds: int = 0) -> None:
        self.limit = positive(limit, "`limit` of SkipNonFinite (steps)")
        self.rewinds = positive(rewinds, "`rewinds` of SkipNonFinite") if rewinds != 0 else 0

    def stateaccess(self) -> Mapping[str, Any]:
        """Return what it reads and writes; see the class."""
        step = {"loss": Read(), "grads": Read(), "skip": Append(), "stop": Append()}
        return {"step": step, "cbstate": {"non_finite": Write()}, "control": Append()}

    def resolveconflict(self, other: Callback) -> Resolution:
        """Run before whoever writes the gradients, who might hide an infinity; refuse a second opinion on NaNs."""
        if type(other) is StopOnNaNLoss:
            return Unresolvable()
        return RunFirst(self) if writes_step(other, "grads") else super().resolveconflict(other)

    def init(self, learner: Any) -> None:
        """Create `cbstate.non_finite`."""
        import jax.numpy as jnp

        if "non_finite" not in learner.cbstate:
            learner.cbstate.non_finite = {name: jnp.zeros((), jnp.int32) for name in ("skipped", "in_a_row")}

    @on(
        BackwardEnd,
        AbstractTrainingPhase,
        access={
            "step": {"loss": Read(), "grads": Read(), "skip": Append(), "stop": Append()},
            "cbstate": {"non_finite": Write()},
        },
    )
    def mark(self, event: Event, phase: Phase, learner: Any) -> None:
        """Skip the update if the loss or a gradient is not finite, and stop the window at the limit."""
        import jax.numpy as jnp

        bad = ~all_finite((learner.step.loss, learner.step.grads))
        held = learner.cbstate.non_finite
        in_a_row = jnp.where(bad, held["in_a_row"] + 1, 0)
        learner.cbstate.non_finite = {"skipped": held["skipped"] + bad, "in_a_row": in_a_row}
        learner.step.skip = bad
        learner.step.stop = in_a_row >= self.limit

    @on(
        StepEnd,
        AbstractTrainingPhase,
        access={"step": {"stop": Read()}, "cbstate": {"non_finite": Read()}, "control": Append()},
        when=AtWindowEnds(),  # a step that was stopped is the last of its window
    )
    def cancel(self, event: Event, phase: Phase, learner: Any) -> None:
        """Go back, or end the fit, at the limit (others may stop the window, too)."""
        step = learner.progress.step
        if learner.step.stop and learner.cbstate.non_finite["in_a_row"] >= self.limit:
            reason = f"loss or gradients were not finite at {self.limit} steps in a row, up to step {step}"
            if self.rewinds:
                raise RewindFitting(reason, step - self.limit, self.rewinds)
            warnings.warn(f"Training stopped: {reason}.", RuntimeWarning, stacklevel=stacklevel_of_user())
            raise CancelFitting(reason, advice=DIVERGED)

    def __repr__(self) -> str:
        return f"SkipNonFinite({self.limit})"
