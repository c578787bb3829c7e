"""`LossSpikeGuard`: leave out the updates of steps whose loss stands out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fluxcb._declare.access import Append, Read, Write
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import BackwardEnd, Event
from fluxcb._declare.handlers import on
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
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

    Args:
        threshold: Standard deviations above the median, above 0.
        window: Losses to compare with (steps), at least 3.

    Access:
        step.loss: Read.
        step.skip: Append.
        cbstate.loss_spikes: Write. `losses` (float32[window], a ring), `seen` and `skipped` (int32[]).

    Runs:
        BackwardEnd x AbstractTrainingPhase (traced).

    Cost:
        Two sorts of `window` numbers, inside the step. Fetches nothing, and bounds no window.

    Raises:
        DeclarationError: `threshold` is not a number above 0, or `window` no whole number of at least 3.

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
        >>> learner.fit(1)
        >>> learner.cbstate["loss_spikes"]["skipped"].item(), f"{learner.params['w']:.3f}"
        (1, '0.949')

    Source:
        The Hampel identifier: Davies and Gather (1993), The Identification of Multiple Outliers. Skipping the batches
        around spikes: Chowdhery et al. (2022), PaLM, section 5.1, arXiv:2204.02311.
    """

    def __init__(self, threshold: float = 6.0, *, window: int = 100) -> None:
        self.threshold = number_above(0, threshold, "`threshold` of LossSpikeGuard")
        if isinstance(window, bool) or not isinstance(window, int) or window < 3:
            raise DeclarationError(
                f"`window` of LossSpikeGuard (steps) must be a whole number of at least 3, not {window!r}.",
                why="of two losses nobody can tell which stands out",
                fix="give e.g. `window=100`",
            )
        self.window = window

    def stateaccess(self) -> Mapping[str, Any]:
        """Return what it reads and writes; see the class."""
        return {"step": {"loss": Read(), "skip": Append()}, "cbstate": {"loss_spikes": Write()}}

    def init(self, learner: Any) -> None:
        """Create `cbstate.loss_spikes`."""
        import jax.numpy as jnp

        if "loss_spikes" not in learner.cbstate:
            counts = {name: jnp.zeros((), jnp.int32) for name in ("seen", "skipped")}
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
        learner.cbstate.loss_spikes = {
            "losses": jnp.where(finite, losses.at[seen % self.window].set(loss), losses),
            "seen": seen + finite,
            "skipped": held["skipped"] + spike,
        }
        learner.step.skip = spike

    def __repr__(self) -> str:
        return f"LossSpikeGuard({self.threshold}, window={self.window})"
