"""`Recorder`: how many epochs, steps and samples each phase has seen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fluxcb._declare.access import Write
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import EpochBegin, EpochEnd, Event, StepEnd
from fluxcb._declare.handlers import on
from fluxcb._declare.phases import Phase
from fluxcb.callbacks.by_phase import ByPhase

__all__ = ["PhaseHistory", "Recorder"]

_HISTORY = {"cbstate": {"history": Write()}}


@dataclass
class PhaseHistory:
    """What one phase has done so far.

    Attributes:
        epochs: Epochs ended (cancelled ones too).
        steps: Steps run.
        steps_in_epoch: Steps run since the epoch began.
        samples: Samples seen: the sum of the batches' leading axes.
    """

    epochs: int = 0
    steps: int = 0
    steps_in_epoch: int = 0
    samples: int = 0


class Recorder(Callback):
    """Count epochs, steps and samples of every phase in `cbstate.history`.

    `cbstate.history[phase]` is a `PhaseHistory`; `phase` is an instance, a class or a name. A phase that has not run
    has zeros.

    Access:
        cbstate.history: Write.

    Runs:
        EpochBegin, StepEnd, EpochEnd x Phase (host).

    Cost:
        A few Python operations per step. Fetches nothing, and bounds no window.

    Example:
        >>> import jax.numpy as jnp, optax, fluxcb
        >>> from fluxcb.callbacks import Recorder
        >>> learner = fluxcb.Learner.from_loss(
        ...     {"w": jnp.ones(3)},
        ...     lambda params, batch, key: jnp.mean((batch @ params["w"]) ** 2),
        ...     optax.sgd(0.1),
        ...     data=[jnp.ones((4, 3)), jnp.ones((2, 3))],
        ...     callbacks=[Recorder()],
        ...     default_callbacks=False,
        ... )
        >>> history = learner.fit(2)
        >>> learner.cbstate["history"]["training"]
        PhaseHistory(epochs=2, steps=4, steps_in_epoch=2, samples=12)

    Source:
        FluxTraining.jl, `Recorder` and `History`.
    """

    def stateaccess(self) -> Mapping[str, Any]:
        """Return what it reads and writes; see the class."""
        return _HISTORY

    def init(self, learner: Any) -> None:
        """Create `cbstate.history`."""
        if "history" not in learner.cbstate:
            learner.cbstate.history = ByPhase(PhaseHistory)

    @on(EpochBegin, Phase, access=_HISTORY)
    def begin_epoch(self, event: Event, phase: Phase, learner: Any) -> None:
        """Start counting the epoch's steps."""
        learner.cbstate.history.entry(phase).steps_in_epoch = 0

    @on(StepEnd, Phase)
    def count_step(self, event: Event, phase: Phase, learner: Any) -> None:
        """Count a step and its samples."""
        history = learner.cbstate.history.entry(phase)
        history.steps += 1
        history.steps_in_epoch += 1
        history.samples += learner.progress.batch_size

    @on(EpochEnd, Phase, access=_HISTORY)
    def end_epoch(self, event: Event, phase: Phase, learner: Any) -> None:
        """Count the epoch."""
        learner.cbstate.history.entry(phase).epochs += 1


def leading_axis(batch: Any) -> int:
    """Return how many samples a batch has: the leading axis of its first array, 1 if that is a scalar."""
    first = batch
    while type(first) in (tuple, list) and first:  # the usual batches, at a hundredth of the cost of jax.tree
        first = first[0]
    if not hasattr(first, "shape"):
        import jax

        leaves = jax.tree.leaves(batch)
        if not leaves:
            return 0
        first = leaves[0]
    shape = getattr(first, "shape", ())
    return int(shape[0]) if shape else 1
