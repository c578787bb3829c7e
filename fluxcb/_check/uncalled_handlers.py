"""Handlers for events that their phases do not emit, and for phases that are not those of the Learner."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import CodeType

from fluxcb._check.graph import CallbackGraph
from fluxcb._declare.declared import Declared
from fluxcb._declare.events import Event, is_concrete
from fluxcb._declare.handlers import Handler
from fluxcb._declare.phases import Phase, TrainingPhase
from fluxcb._declare.signatures import names_in
from fluxcb._declare.state import emits

__all__ = ["uncalled_handlers"]


def uncalled_handlers(graph: CallbackGraph) -> Iterator[tuple[Declared, str]]:
    """Yield each callback with a handler that is never called, such as (Trigger, ValidationPhase), and a warning."""
    for declared in graph.declared:
        for entry in declared.handlers:
            phases = [phase for phase in graph.phases if issubclass(phase, entry.phase)]
            if not phases and (text := _of_other_phase(graph, declared, entry)):
                yield declared, text
            # A handler of a base class, such as `TracedEvent`, is for whatever is emitted.
            if not is_concrete(entry.event) or any(_may_emit(entry.event, p) for p in phases):
                continue
            emitting = [phase.__name__ for phase in graph.phases if emits(entry.event, phase)]
            # Without such a phase, the callback is prepared for other Learners, which is no mistake. A Learner that
            # cannot fit has no phase that emits the events of a fit.
            if phases and (entry.traced or emitting):
                names = " and ".join(phase.__name__ for phase in phases)
                event = entry.event.__name__
                advice = (
                    f"Annotate the parameter as `phase: {emitting[0]}`, which emits it."
                    if emitting
                    else f"Call `emit({event}())` in the `step` of {names}, and add {event} to `provides`."
                )
                yield (
                    declared,
                    f"fluxcb does not call {declared.label}.{entry.name}, because {names} "
                    f"{'does' if len(phases) == 1 else 'do'} not emit {event}. {advice}",
                )


def _of_other_phase(graph: CallbackGraph, declared: Declared, entry: Handler) -> str:
    """Return the warning for a handler for `TrainingPhase`, if the Learner has only other training phases."""
    training = [phase for phase in graph.phases if phase.trains and _may_emit(entry.event, phase)]
    # `learner.run_epoch` can run an epoch of any other phase, such as that of `find_learning_rate`.
    if not training or entry.phase is not TrainingPhase:
        return ""
    # A callback may have a handler for each of several training phases, and Learners may have only some of them.
    for other in declared.handlers:
        related = issubclass(other.event, entry.event) or issubclass(entry.event, other.event)
        if related and any(issubclass(phase, other.phase) for phase in training):
            return ""
    names = " and ".join(phase.__name__ for phase in training)
    which = f"training phase of this Learner is {names}"
    if len(training) > 1:
        which = f"training phases of this Learner are {names}"
    return (
        f"fluxcb does not call {declared.label}.{entry.name}, because it is for {entry.phase.__name__}, and the "
        f"{which}. Write `AbstractTrainingPhase` instead of `{entry.phase.__name__}`, which includes all training "
        "phases."
    )


def _may_emit(event: type[Event], phase: type[Phase]) -> bool:
    """Return whether a phase declares an event, or its `step` names it: handlers run even without `provides`."""
    code = getattr(inspect.unwrap(phase.step), "__code__", None)
    return emits(event, phase) or (isinstance(code, CodeType) and event.__name__ in names_in(code))
