"""Deadlines: handlers that only read can run while training goes on, until an event that waits for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from fluxcb._declare.access import Access, dotted, writes
from fluxcb._declare.events import EpochBegin, EpochEnd, Event, FitEnd, FitStopping, StepBegin, TracedEvent, Trigger
from fluxcb._declare.handlers import Handler
from fluxcb._declare.phases import Phase
from fluxcb._errors import DeclarationError

if TYPE_CHECKING:
    from fluxcb._declare.declared import Declared

__all__ = ["check_deadlines", "is_deadline"]

_ENDS = (EpochBegin, EpochEnd, Trigger, FitStopping, FitEnd)
# These events are emitted with the first training phase, whichever phase the handler has run in.
_OF_THE_FIT = (Trigger, FitStopping, FitEnd)
# Values that can be copied. The others are objects of the engine and of the user.
_COPIED = ("step", "params", "model_state", "opt_state", "hyperparams", "cbstate", "progress", "key")


def is_deadline(deadline: type[Event], of: type[Phase], event: type[Event], phase: type[Phase]) -> bool:
    """Return whether an event has to wait for a handler.

    Args:
        deadline: The deadline of the handler.
        of: The phase in which it was called.
        event: The event.
        phase: The phase of the event.
    """
    return issubclass(event, deadline) and (issubclass(event, _OF_THE_FIT) or phase is of)


def check_deadlines(declared: Declared) -> None:
    """Check the handlers of a callback that have a deadline.

    Raises:
        DeclarationError: One of them cannot run while training goes on, or its deadline is not an event that waits.
    """
    for handler in declared.handlers:
        if handler.deadline is not None:
            _check(declared, handler, handler.deadline)


def _check(declared: Declared, handler: Handler, deadline: Any) -> None:
    where = declared.place_of(handler)
    owner = f"`{declared.cls.__name__}.{handler.name}`"
    if issubclass(handler.event, TracedEvent | StepBegin | FitEnd):
        why = {
            TracedEvent: "a traced handler is part of the compiled step",
            StepBegin: "the step begins after the handlers of StepBegin have run",
            FitEnd: "no event follows FitEnd",
        }
        raise DeclarationError(
            f"{owner} has a deadline, but handles {handler.event.__name__}.",
            where=where,
            why=next(text for event, text in why.items() if issubclass(handler.event, event)),
            fix="leave out `deadline`, or handle another host event, e.g. EpochEnd",
        )
    names = ", ".join(event.__name__ for event in _ENDS)
    if not (isinstance(deadline, type) and (deadline in _ENDS or deadline is handler.event)):
        raise DeclarationError(
            f"The deadline of {owner} is {deadline!r}, not an event that can wait for it.",
            where=where,
            why=f"these events can wait: {names}, and the event of the handler",
            fix="write e.g. `deadline=FitEnd`",
        )
    for path, problem in _problems(declared.access_of(handler)):
        raise DeclarationError(
            f"{owner} has a deadline, but {problem} `{path}`.",
            where=[where, declared.where],
            why="it runs while training goes on, with a copy of the values that it declares to read",
            fix=[
                "leave out `deadline`",
                'narrow the access of this handler to what it reads: `@on(..., access={"params": Read()})`',
            ],
        )


def _problems(access: Access) -> Iterator[tuple[str, str]]:
    for path, permission in access.items():
        if writes(permission):
            yield dotted(path), "writes"
        elif getattr(permission, "borrow", False):
            yield dotted(path), "borrows the live arrays of"
        elif path[0] not in _COPIED:
            yield dotted(path), "reads more than values:"
