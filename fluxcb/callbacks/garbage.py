"""`GarbageCollect`: run Python's garbage collector at set times."""

from __future__ import annotations

import gc
from typing import Any

from fluxcb._declare.callback import Callback
from fluxcb._declare.dispatch import Entry
from fluxcb._declare.events import EpochEnd, Event, StepEnd
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._declare.schedules import EveryEpochs, EverySteps, Schedule
from fluxcb._errors import DeclarationError

__all__ = ["GarbageCollect"]


class GarbageCollect(Callback):
    """Run Python's garbage collector every so many training steps or epochs.

    For data loaders that leave cycles behind which hold much memory. With `gc.disable()` before the fit, the collector
    runs at no other time, which keeps processes that train together from waiting for each other's collections.

    Args:
        steps: Period (steps); 100 if no period is given.
        epochs: Period (epochs), instead of steps; it runs when the epoch ends.

    Access:
        Nothing.

    Runs:
        StepEnd x AbstractTrainingPhase (host, every `steps`), or EpochEnd x AbstractTrainingPhase (host, every
        `epochs`).

    Cost:
        A full collection each time: tens of milliseconds where there are many objects. Bounds no window.

    Raises:
        DeclarationError: Both periods are given, or one that is no whole number of at least 1.

    Example:
        >>> from fluxcb.callbacks import GarbageCollect
        >>> GarbageCollect(), GarbageCollect(epochs=1)
        (GarbageCollect(steps=100), GarbageCollect(epochs=1))

    Source:
        FluxTraining.jl, `GarbageCollect`.
    """

    def __init__(self, steps: int | None = None, *, epochs: int | None = None) -> None:
        if steps is not None and epochs is not None:
            raise DeclarationError(
                "`GarbageCollect` takes one of steps and epochs, not both.", fix="write e.g. `GarbageCollect(100)`"
            )
        if epochs is not None:
            self._entry = Entry(EpochEnd, AbstractTrainingPhase, "collect", when=EveryEpochs(epochs))
        else:
            steps = 100 if steps is None else steps
            self._entry = Entry(StepEnd, AbstractTrainingPhase, "collect", when=EverySteps(steps))
        self._period = f"epochs={epochs}" if epochs is not None else f"steps={steps}"

    def collect(self, event: Event, phase: Phase, learner: Any) -> None:
        """Collect."""
        gc.collect()

    def handlers(self) -> list[Entry]:
        """Return its one handler."""
        return [*super().handlers(), self._entry]

    def entry_for(self, event: type[Event], phase: type[Phase]) -> tuple[Callback, Entry, tuple[Schedule, ...]] | None:
        """Return its one handler where it applies."""
        if issubclass(event, self._entry.event) and issubclass(phase, self._entry.phase) and self._entry.when:
            return self, self._entry, (self._entry.when,)
        return super().entry_for(event, phase)

    def __repr__(self) -> str:
        return f"GarbageCollect({self._period})"
