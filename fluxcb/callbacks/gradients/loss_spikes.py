"""`LossSpikeGuard`, which skips updates if the loss spikes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fluxcb._declare.access import Append, Read, Write
from fluxcb._declare.callback import Callback
from fluxcb._declare.control import RewindFitting
from fluxcb._declare.events import BackwardEnd, Event, StepEnd
from fluxcb._declare.handlers import Handler, on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._declare.schedules import AtWindowEnds, positive
from fluxcb._errors import DeclarationError
from fluxcb.callbacks.arguments import finite_number, whole_number

__all__ = ["LossSpikeGuard"]

_NORMAL = 1.4826  # ratio of the standard deviation to the median absolute deviation of a normal distribution


class LossSpikeGuard(Callback):
    """Skip the update of a step whose loss is far above recent losses.

    A loss is a spike if it is NaN, or if `loss > median + threshold * 1.4826 * mad`. `median` and `mad`, the median
    absolute deviation, are those of the last `window` finite losses. They are robust: spikes hardly change them as long
    as fewer than half of the losses in the window are spikes.

    Finite spikes are also added to the window. If the loss stays high, the higher level therefore becomes normal after
    half a window of skipped steps. Only NaN counts as a spike until the window is full, and if more than half of the
    losses in it are equal.

    If the loss stays high although updates are skipped, the parameters themselves have diverged. With `rewind_after`,
    the run then rewinds to the newest checkpoint from before the first of these spikes, and continues with other
    batches (`fluxcb.RewindFitting`).

    Args:
        threshold: Number of standard deviations above the median, above 0.
        window: Number of recent losses to compare with (steps), at least 3.
        rewind_after: Number of consecutive spikes after which the run rewinds, at most half of `window`. If None, it
            never rewinds.
        rewinds: Maximum number of rewinds. After these, the next one ends the fit, and `learner.stop_reason` contains
            the reason.

    Access:
        step.loss: Read.
        step.skip: Append.
        step.loss_spike_bound: Write (traced). The loss above which the step is skipped; infinite at first.
        step.stop: Append (traced), Read (host), if `rewind_after` is given.
        cbstate.loss_spikes: Write. `losses` (float32[window], a ring buffer), `seen`, `skipped` and `in_a_row`
            (int32[]).
        control: Append, if `rewind_after` is given.

    Runs:
        BackwardEnd x AbstractTrainingPhase (traced).
        StepEnd x AbstractTrainingPhase (host, at the ends of windows), if `rewind_after` is given.

    Cost:
        Two sorts of `window` numbers inside the step. Does not shorten windows, because the device itself decides when
        to stop.

    Raises:
        DeclarationError: `threshold` is not a number above 0; `window` is not an integer of at least 3; `rewind_after`
            is not positive or is more than half of `window`; `rewinds` is not positive.

    Example:
        >>> import jax.numpy as jnp, optax, fluxcb
        >>> from fluxcb.callbacks import LossSpikeGuard
        >>> learner = fluxcb.Learner.from_loss(
        ...     {"w": jnp.ones(())},
        ...     lambda params, batch, key: jnp.mean(params["w"] * batch),
        ...     optax.sgd(0.01),
        ...     data=[jnp.float32(x) for x in (1.0, 1.1, 0.9, 1.0, 50.0, 1.1)],
        ...     callbacks=[LossSpikeGuard(6.0, window=4)],
        ...     default_callbacks=False,
        ... )
        >>> history = learner.fit(1)
        >>> learner.cbstate["loss_spikes"]["skipped"].item(), f"{learner.params['w']:.3f}"
        (1, '0.949')

    Source:
        The Hampel identifier of Davies and Gather (1993), The Identification of Multiple Outliers. Chowdhery et al.
        (2022), PaLM, section 5.1, arXiv:2204.02311, rewind and skip the batches around spikes.
    """

    def __init__(
        self, threshold: float = 6.0, *, window: int = 100, rewind_after: int | None = None, rewinds: int = 3
    ) -> None:
        self.threshold = finite_number(threshold, "`threshold` of LossSpikeGuard", above=0)
        why = "an outlier cannot be identified among fewer than three losses"
        window = whole_number(window, "`window` of LossSpikeGuard (steps)", 3, why)
        self.window = window
        if (
            rewind_after is not None
            and positive(rewind_after, "`rewind_after` of LossSpikeGuard (steps)") > window // 2
        ):
            raise DeclarationError(
                f"`rewind_after` of LossSpikeGuard is {rewind_after} steps, more than half of its `window`, {window}.",
                why="a loss that stays high for half a window becomes the median, so it is no longer a spike",
                fix=f"write `rewind_after={window // 2}`, or use a longer window",
            )
        self.rewind_after = rewind_after
        self.rewinds = positive(rewinds, "`rewinds` of LossSpikeGuard")

    def stateaccess(self) -> Mapping[str, Any]:
        """Return the paths that the callback reads and writes."""
        step = {"loss": Read(), "skip": Append(), "loss_spike_bound": Write()}
        access = {"step": step, "cbstate": {"loss_spikes": Write()}}
        if self.rewind_after is None:
            return access
        return {**access, "step": {**access["step"], "stop": Append()}, "control": Append()}

    def handlers(self) -> list[Handler]:
        """Return the handlers; the one for StepEnd only if `rewind_after` is given."""
        rewinds = self.rewind_after is not None
        return [handler for handler in super().handlers() if rewinds or handler.event is not StepEnd]

    def init(self, learner: LearnerView) -> None:
        """Create `cbstate.loss_spikes`."""
        import jax.numpy as jnp

        if "loss_spikes" not in learner.cbstate:
            counts = {name: jnp.zeros((), jnp.int32) for name in ("seen", "skipped", "in_a_row")}
            learner.cbstate.loss_spikes = {"losses": jnp.zeros(self.window, jnp.float32), **counts}

    @on(BackwardEnd, AbstractTrainingPhase)
    def judge(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Skip the update if the loss is a spike, and add the loss to the window."""
        import jax.numpy as jnp

        old, loss = learner.cbstate.loss_spikes, learner.step.loss.astype(jnp.float32)
        losses, seen = old["losses"], old["seen"]
        median = jnp.median(losses)
        deviation = _NORMAL * jnp.median(jnp.abs(losses - median))
        # The deviation is 0 if more than half of the losses are equal. Without this case, any higher loss would then
        # be a spike.
        bound = jnp.where((seen >= self.window) & (deviation > 0), median + self.threshold * deviation, jnp.inf)
        learner.step["loss_spike_bound"] = bound
        spike = ~(loss <= bound)  # not `loss > bound`, which is false for NaN
        finite = jnp.isfinite(loss)
        in_a_row = jnp.where(spike, old["in_a_row"] + 1, 0)
        learner.cbstate.loss_spikes = {
            "losses": jnp.where(finite, losses.at[seen % self.window].set(loss), losses),
            "seen": seen + finite.astype(jnp.int32),
            "skipped": old["skipped"] + spike.astype(jnp.int32),
            "in_a_row": in_a_row,
        }
        learner.step.skip = spike
        if self.rewind_after is not None:
            learner.step.stop = in_a_row >= self.rewind_after

    @on(
        StepEnd,
        AbstractTrainingPhase,
        access={"step": {"stop": Read()}, "cbstate": {"loss_spikes": Read()}, "control": Append()},
        when=AtWindowEnds(),  # `step.stop` ends the window, so no stopped step is missed
    )
    def go_back(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Rewind after `rewind_after` consecutive spikes."""
        if self.rewind_after is None or not learner.step.stop:
            return
        # Another callback may also have set `step.stop`.
        if learner.cbstate.loss_spikes["in_a_row"] >= self.rewind_after:
            step = learner.progress.step
            reason = f"the loss spiked at {self.rewind_after} steps in a row, up to step {step}"
            raise RewindFitting(reason, step - self.rewind_after, self.rewinds)

    def __repr__(self) -> str:
        back = f", rewind_after={self.rewind_after}" if self.rewind_after is not None else ""
        return f"LossSpikeGuard({self.threshold}, window={self.window}{back})"
