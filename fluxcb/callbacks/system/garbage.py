"""`GarbageCollect`: run the garbage collector of Python periodically."""

from __future__ import annotations

import gc

from fluxcb._declare.callback import Callback
from fluxcb._declare.events import EpochEnd, Event, StepEnd
from fluxcb._declare.handlers import Handler
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._declare.schedules import EveryEpochs, EverySteps
from fluxcb.callbacks.arguments import at_most_one

__all__ = ["GarbageCollect"]


class GarbageCollect(Callback):
    """Run the garbage collector of Python every few training steps or epochs.

    This is useful if a data loader creates reference cycles that hold a lot of memory. If you call `gc.disable()`
    before the fit, the collector runs at no other time. In a multi-host run, all processes then collect at the same
    steps instead of waiting for each other.

    Args:
        steps: Period (steps). The default is 100 steps if there is no other period.
        epochs: Period (epochs). The collector runs when an epoch ends.

    Access:
        None.

    Runs:
        StepEnd x AbstractTrainingPhase (host, every `steps`), or EpochEnd x AbstractTrainingPhase (host, every
        `epochs`).

    Cost:
        A full collection each time, which takes tens of milliseconds if there are many objects. Does not shorten
        windows.

    Raises:
        DeclarationError: Both periods are given, or a period is not a positive integer.

    Example:
        >>> from fluxcb.callbacks import GarbageCollect
        >>> GarbageCollect(), GarbageCollect(epochs=1)
        (GarbageCollect(steps=100), GarbageCollect(epochs=1))

    Source:
        FluxTraining.jl, `GarbageCollect`.
    """

    def __init__(self, steps: int | None = None, *, epochs: int | None = None) -> None:
        at_most_one("GarbageCollect", "GarbageCollect(100)", steps=steps, epochs=epochs)
        if epochs is not None:
            self._handler = Handler(EpochEnd, AbstractTrainingPhase, "collect", when=EveryEpochs(epochs))
        else:
            steps = 100 if steps is None else steps
            self._handler = Handler(StepEnd, AbstractTrainingPhase, "collect", when=EverySteps(steps))
        self._period = f"epochs={epochs}" if epochs is not None else f"steps={steps}"

    def collect(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Run a full collection."""
        gc.collect()

    def handlers(self) -> list[Handler]:
        """Return the handler for the given period."""
        return [*super().handlers(), self._handler]

    def __repr__(self) -> str:
        return f"GarbageCollect({self._period})"
