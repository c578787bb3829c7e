"""`Recorder`, which counts epochs, steps and samples of each phase."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fluxcb._calls import Constructed
from fluxcb._declare.access import Write
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import EpochBegin, EpochEnd, Event, StepEnd
from fluxcb._declare.handlers import on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.losses import TARGET_NAMES
from fluxcb._declare.phases import Phase
from fluxcb.callbacks.by_phase import ByPhase

__all__ = ["PhaseHistory", "Recorder"]

_HISTORY = {"cbstate": {"history": Write()}}


@dataclass
class PhaseHistory(Constructed):
    """The counts of one phase.

    Attributes:
        epochs: Number of epochs that have ended, including cancelled epochs.
        steps: Number of steps.
        steps_in_epoch: Number of steps since the epoch began.
        samples: Number of samples, which is the sum of the leading axes of all batches.
    """

    epochs: int = 0
    steps: int = 0
    steps_in_epoch: int = 0
    samples: int = 0


class Recorder(Callback):
    """Count epochs, steps and samples of every phase in `cbstate.history`.

    `cbstate.history[phase]` is a `PhaseHistory`, where `phase` is an instance, a class or a name. For a phase that has
    not run, all counts are 0.

    Access:
        cbstate.history: Write.

    Runs:
        EpochBegin, StepEnd, EpochEnd x Phase (host).

    Cost:
        A few Python operations per step. Fetches nothing and does not shorten windows.

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
        """Return the paths that the callback reads and writes."""
        return _HISTORY

    def init(self, learner: LearnerView) -> None:
        """Create `cbstate.history`."""
        if "history" not in learner.cbstate:
            learner.cbstate.history = ByPhase(PhaseHistory, values="cbstate.metrics_epoch")

    @on(EpochBegin, Phase, access=_HISTORY)
    def begin_epoch(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Reset the count of steps in the epoch."""
        learner.cbstate.history.entry(phase).steps_in_epoch = 0

    @on(StepEnd, Phase)
    def count_step(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Count a step and its samples."""
        history = learner.cbstate.history.entry(phase)
        history.steps += 1
        history.steps_in_epoch += 1
        history.samples += learner.progress.batch_size

    @on(EpochEnd, Phase, access=_HISTORY)
    def end_epoch(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Count the epoch."""
        learner.cbstate.history.entry(phase).epochs += 1


def leading_axis(batch: Any) -> int:
    """Return the number of samples in a batch: the leading axis of its first array that is not a scalar.

    In a mapping, entries with the name of targets, such as `y` or `labels`, come first: a batch of graphs also has
    arrays with an axis of edges. If all arrays are scalars, the batch has one sample. If there are no arrays, it has
    none.
    """
    first = batch
    while type(first) in (tuple, list) and first:  # common batches, at a hundredth of the cost of `jax.tree.leaves`
        first = first[0]
    shape = getattr(first, "shape", ())
    if not shape:
        import jax

        leaves = jax.tree.leaves(batch)
        if not leaves:
            return 0
        if isinstance(batch, Mapping):
            leaves = [*jax.tree.leaves([batch[name] for name in batch if name in TARGET_NAMES]), *leaves]
        shape = next((leaf.shape for leaf in leaves if getattr(leaf, "shape", ())), (1,))
    return int(shape[0])
