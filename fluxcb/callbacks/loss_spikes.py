"""`LossSpikeGuard`: leave out the updates of steps whose loss stands out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fluxcb._declare.access import Append, Read, Write
from fluxcb._declare.callback import Callback
from fluxcb._declare.control import RewindFitting
from fluxcb._declare.dispatch import Entry
from fluxcb._declare.events import BackwardEnd, Event, StepEnd
from fluxcb._declare.handlers import on
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._declare.schedules import AtWindowEnds, Schedule, positive
from fluxcb._errors import DeclarationError
from fluxcb.callbacks.arguments import number_above

__all__ = ["LossSpikeGuard"]

_NORMAL = 1.4826  # median absolute deviation of a normal distribution, times this, is its standard deviation


class LossSpikeGuard(Callback):
    """Skip the update of a step whose loss is far above the recent ones.

    A loss is a spike if `loss > median + threshold * 1.4826 * mad`, with the median and the median absolute deviation
    of the last `window` finite losses, and if it is NaN. Both stay what they are while less than half of the losses
    are spikes. Spikes enter the window, too: a loss that stays high is the new normal after half a window of skipped
    steps. Until the window is full, and where more than half of it is one value, nothing but NaN is a spike.

    A loss that stays high although updates are skipped says that the parameters have gone astray before. With
    `rewind_after`, the run then goes back to the newest checkpoint from before the first of these spikes, and on from
    there with other batches (`fluxcb.RewindFitting`).

    Args:
        threshold: Standard deviations above the median, above 0.
        window: Losses to compare with (steps), at least 3.
        rewind_after: Spikes in a row after which the run goes back, at most half of `window`; None for never.
        rewinds: How often the run may go back, before that ends the fit; `learner.stop_reason` tells.

    Access:
        step.loss: Read.
        step.skip: Append.
        step.stop: Append (traced), Read (host); with `rewind_after`.
        cbstate.loss_spikes: Write. `losses` (float32[window], a ring), `seen`, `skipped` and `in_a_row` (int32[]).
        control: Append; with `rewind_after`.

    Runs:
        BackwardEnd x AbstractTrainingPhase (traced).
        StepEnd x AbstractTrainingPhase (host, at the ends of windows); with `rewind_after`.

    Cost:
        Two sorts of `window` numbers, inside the step. Bounds no window: the device stops by itself.

    Raises:
        DeclarationError: `threshold` is not a number above 0, `window` no whole number of at least 3, `rewind_after`
            more than half of it or not positive, `rewinds` not positive.

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
        The Hampel identifier: Davies and Gather (1993), The Identification of Multiple Outliers. Skipping the batches
        around spikes: Chowdhery et al. (2022), PaLM, section 5.1, arXiv:2204.02311.
    """

    def __init__(
        self, threshold: float = 6.0, *, window: int = 100, rewind_after: int | None = None, rewinds: int = 3
    ) -> None:
        self.threshold = number_above(0, threshold, "`threshold` of LossSpikeGuard")
        if isinstance(window, bool) or not isinstance(window, int) or window < 3:
            raise DeclarationError(
                f"`window` of LossSpikeGuard (steps) must be a whole number of at least 3, not {window!r}.",
                why="of two losses nobody can tell which stands out",
                fix="give e.g. `window=100`",
            )
        self.window = window
        if (
            rewind_after is not None
            and positive(rewind_after, "`rewind_after` of LossSpikeGuard (steps)") > window // 2
        ):
            raise DeclarationError(
                f"`rewind_after` of LossSpikeGuard is {rewind_after} steps, more than half of its `window`, {window}.",
                why="a loss that is high for half a window is what others are compared with: no spike any more",
                fix=f"give at most {window // 2}, or a longer window",
            )
        self.rewind_after = rewind_after
        self.rewinds = positive(rewinds, "`rewinds` of LossSpikeGuard")

    def stateaccess(self) -> Mapping[str, Any]:
        """Return what it reads and writes; see the class."""
        access = {"step": {"loss": Read(), "skip": Append()}, "cbstate": {"loss_spikes": Write()}}
        if self.rewind_after is None:
            return access
        return {**access, "step": {**access["step"], "stop": Append()}, "control": Append()}

    def handlers(self) -> list[Entry]:
        """Return the handlers: that of StepEnd where the run may go back."""
        found = super().handlers()
        return found if self.rewind_after is not None else [entry for entry in found if entry.event is not StepEnd]

    def entry_for(self, event: type[Event], phase: type[Phase]) -> tuple[Callback, Entry, tuple[Schedule, ...]] | None:
        """Return who handles a moment: StepEnd where the run may go back."""
        found = super().entry_for(event, phase)
        return None if found is not None and found[1] not in self.handlers() else found

    def init(self, learner: Any) -> None:
        """Create `cbstate.loss_spikes`."""
        import jax.numpy as jnp

        if "loss_spikes" not in learner.cbstate:
            counts = {name: jnp.zeros((), jnp.int32) for name in ("seen", "skipped", "in_a_row")}
            learner.cbstate.loss_spikes = {"losses": jnp.zeros(self.window, jnp.float32), **counts}

    @on(BackwardEnd, AbstractTrainingPhase)
    def judge(self, event: Event, phase: Phase, learner: Any) -> None:
        """Skip the update if the loss is a spike, and remember the loss."""
        import jax.numpy as jnp

        held, loss = learner.cbstate.loss_spikes, learner.step.loss.astype(jnp.float32)
        losses, seen = held["losses"], held["seen"]
        median = jnp.median(losses)
        deviation = _NORMAL * jnp.median(jnp.abs(losses - median))
        bound = jnp.where((seen >= self.window) & (deviation > 0), median + self.threshold * deviation, jnp.inf)
        spike = ~(loss <= bound)  # so that NaN is one
        finite = jnp.isfinite(loss)
        in_a_row = jnp.where(spike, held["in_a_row"] + 1, 0)
        learner.cbstate.loss_spikes = {
            "losses": jnp.where(finite, losses.at[seen % self.window].set(loss), losses),
            "seen": seen + finite,
            "skipped": held["skipped"] + spike,
            "in_a_row": in_a_row,
        }
        learner.step.skip = spike
        if self.rewind_after is not None:
            learner.step.stop = in_a_row >= self.rewind_after

    @on(
        StepEnd,
        AbstractTrainingPhase,
        access={"step": {"stop": Read()}, "cbstate": {"loss_spikes": Read()}, "control": Append()},
        when=AtWindowEnds(),  # a step that was stopped is the last of its window
    )
    def go_back(self, event: Event, phase: Phase, learner: Any) -> None:
        """Go back after too many spikes in a row (others may stop the window, too)."""
        if self.rewind_after is None or not learner.step.stop:
            return
        if learner.cbstate.loss_spikes["in_a_row"] >= self.rewind_after:
            step = learner.progress.step
            reason = f"the loss stood out at {self.rewind_after} steps in a row, up to step {step}"
            raise RewindFitting(reason, step - self.rewind_after, self.rewinds)

    def __repr__(self) -> str:
        back = f", rewind_after={self.rewind_after}" if self.rewind_after is not None else ""
        return f"LossSpikeGuard({self.threshold}, window={self.window}{back})"
