"""Hyperparameters that a callback sets at each step, so that what another callback sets before has no effect."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from fluxcb._check.conflict_errors import ordering
from fluxcb._check.ordering import Ordering, moment_name
from fluxcb._declare.access import overlap, writes
from fluxcb._declare.callback import unwrap
from fluxcb._declare.declared import Declared, Moment
from fluxcb._declare.phases import Phase
from fluxcb._errors import ConflictError
from fluxcb._typing import StatePath

__all__ = ["overwritten_hyperparams", "overwritten_in_step", "scheduled_twice"]


def overwritten_hyperparams(declared: Sequence[Declared], phases: Sequence[type[Phase]]) -> Iterator[ConflictError]:
    """Yield a problem for each callback that sets, between the steps, a hyperparameter that each step sets again."""
    trained = [phase for phase in phases if phase.trains]
    for scheduler in declared:
        for name in getattr(unwrap(scheduler.callback), "scheduled_hyperparams", ()):
            for other in declared:
                if other is not scheduler and (found := _setting(other, name, trained)):
                    yield _overwritten(scheduler, other, name, *found)


def scheduled_twice(declared: Sequence[Declared]) -> dict[tuple[int, int], ConflictError]:
    """Return a problem for each pair of callbacks that set one hyperparameter at each step, by their positions.

    A wrapped callback may be disabled while the other one runs, so it is left out.
    """
    problems = {}
    for (one, names), (other, others) in itertools.combinations(_always(declared), 2):
        for name in sorted(names & others)[:1]:
            problems[one.position, other.position] = ConflictError(
                f"{one.label} and {other.label} both set `hyperparams.{name}` at every step.",
                why="the value of the first one would never have an effect, so no order would help",
                fix=[
                    "if one schedule follows the other, use a single callback with both: "
                    "`optax.join_schedules([first, second], [steps])`",
                    "leave one of the two out of the callbacks list",
                ],
            )
    return problems


def overwritten_in_step(graph: Ordering) -> Iterator[ConflictError]:
    """Yield a problem for each callback that sets a hyperparameter in the step, before a schedule sets it again.

    A pair without a known order already has a problem, which suggests the order that works.
    """
    unordered = {frozenset((c.a.declared.position, c.b.declared.position)) for c in graph.conflicts}
    always = _always(graph.declared)
    set_by = {scheduler.position: names for scheduler, names in always}
    for (scheduler, names), other in itertools.product(always, graph.declared):
        if frozenset((other.position, scheduler.position)) in unordered:
            continue
        # `scheduled_twice` reports what both set at every step.
        for name in sorted(names - set_by.get(other.position, set())):
            moment = _overwritten_at(graph, other, scheduler, ("hyperparams", name))
            if moment is not None:
                yield ConflictError(
                    f"{scheduler.label} sets `hyperparams.{name}` at every step, so the value that {other.label} sets "
                    f"before it at {moment_name(moment)} has no effect.",
                    where=[scheduler.where, other.where],
                    why="`in_order`, `runafter` or `resolveconflict` states this order, and the last value counts",
                    fix=f"state the other order: {ordering(scheduler, other)}",
                )


def _overwritten_at(graph: Ordering, other: Declared, scheduler: Declared, path: StatePath) -> Moment | None:
    """Return where a callback sets a value for the last time in a step, if the other one sets it later."""
    for phase in (phase for phase in graph.phases if phase.trains):
        last = {
            handler.declared.position: (position, moment)
            for position, (moment, handler) in enumerate(
                (moment, handler) for moment in graph.moments if moment[1] is phase for handler in graph.orders[moment]
            )
            if handler.traced and any(writes(p) and overlap(written, path) for written, p in handler.access.items())
        }
        found, own = (last.get(declared.position) for declared in (other, scheduler))
        if found is not None and own is not None and found[0] < own[0]:
            return found[1]
    return None


def _always(declared: Sequence[Declared]) -> list[tuple[Declared, set[str]]]:
    """Return the callbacks that set hyperparameters at every step, with their names. A wrapped one may be disabled."""
    names: list[tuple[Declared, set[str]]] = [
        (d, set(getattr(d.callback, "scheduled_hyperparams", ()))) for d in declared
    ]
    return [(d, of) for d, of in names if of and unwrap(d.callback) is d.callback]


def _setting(declared: Declared, name: str, phases: Sequence[type[Phase]]) -> tuple[str, str] | None:
    """Return the event and the place of the first host handler that may set a hyperparameter.

    Returns None if there is none, or if a traced handler of the callback sets it in each step as well.
    """
    found = [
        handler
        for handler in declared.handlers
        if any(issubclass(phase, handler.phase) for phase in phases)
        for path, permission in declared.access_of(handler).items()
        if path[0] == "hyperparams" and writes(permission) and overlap(path, ("hyperparams", name))
    ]
    if not found or any(handler.traced for handler in found):
        return None
    return found[0].event.__name__, declared.place_of(found[0])


def _overwritten(scheduler: Declared, other: Declared, name: str, event: str, where: str) -> ConflictError:
    kind = scheduler.cls.__name__
    return ConflictError(
        f"{scheduler.label} sets `hyperparams.{name}` at every step, so the value that {other.label} sets at {event} "
        "has no effect.",
        where=[scheduler.where, where],
        why="each step sets the hyperparameter again before its update, so no order would help",
        fix=[
            "leave one of the two out of the callbacks list",
            "for a warm-up, write `ScheduledHyperParamSetter(LearningRate, [(0, 0.0), (500, 0.1)], "
            '"linear", step_based=True)`, which sets nothing after its last step'
            if other.is_shipped
            else f"set it in a handler of ForwardBegin, which is traced, and let `{other.cls.__name__}.runafter()` "
            f"return `({kind},)`",
        ],
    )
