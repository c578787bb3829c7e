"""Writes to values of the step at events at which the step does not use them, found in the source of handlers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from fluxcb._check.source.touches import Reading, Runs, Touch
from fluxcb._declare.access import STEP_FLAGS, Append, Permission, Write, dotted, lookup, writes
from fluxcb._declare.declared import BoundHandler
from fluxcb._declare.events import BUILTIN_EVENTS, BackwardEnd, Event, StepBegin, StepEnd, TracedEvent
from fluxcb._declare.phases import Phase
from fluxcb._declare.state import available, writable_at
from fluxcb._errors import CheckError, UndeclaredAccessError
from fluxcb._typing import StatePath

__all__ = ["UnusedWrite", "unused_writes"]


@dataclass(frozen=True)
class UnusedWrite:
    """A write of a handler that the step would not use. The line raises AccessError even if the write is declared.

    Attributes:
        path: The value, such as `step.grads`.
        event: The event of the handler.
        handler: The handler.
        lines: The lines that write it.
    """

    path: StatePath
    event: type[Event]
    handler: BoundHandler
    lines: tuple[str, ...]

    @property
    def declared(self) -> bool:
        """Whether the handler's access allows the write."""
        return _declared(self.handler, self.path)

    def problem(self, where: Sequence[str], declaring: Callable[[StatePath, Permission], str]) -> CheckError:
        """Return the problem to report.

        Args:
            where: The places of the declarations.
            declaring: Returns the edit that declares a path.
        """
        path, flag = dotted(self.path), self.path in STEP_FLAGS
        # The flags can be written earlier as well, but the loss and the gradients exist only at this event.
        events = (BackwardEnd,) if flag else writable_at(self.path) or ()
        fix = []
        if events:
            allowed = " or ".join(event.__name__ for event in events)
            declare = "" if self.declared else f", and {declaring(self.path, Append() if flag else Write())}"
            fix.append(f"write it in a handler of {allowed}{declare}")
        if self.event is StepEnd and not flag:
            own = ("step", f"my_{self.path[1]}")
            fix.append(f"write to another name: `learner.{dotted(own)} = ...`, and {declaring(own, Write())}")
        if not events:
            but, why = "only the step itself writes it", "the write would have no effect"
        elif self.event is not StepEnd and BUILTIN_EVENTS.index(self.event) < BUILTIN_EVENTS.index(events[0]):
            but, why = "the step computes it later", "the step would replace the value"
        else:
            but, why = "the step has already used it", "the write would have no effect"
        return (CheckError if self.declared else UndeclaredAccessError)(
            f"{self.handler.declared.label} writes `{path}` at {self.event.__name__}, but {but}.",
            where=[*self.lines, *where],
            why=f"{why}, so the line raises AccessError",
            fix=fix or "write the values that it is computed from",
        )


def unused_writes(handlers: Iterable[tuple[BoundHandler, Reading]]) -> Iterator[UnusedWrite]:
    """Iterate over the writes of handlers that the step would not use.

    Args:
        handlers: Handlers, each with the state that it uses.
    """
    for handler, reading in handlers:
        lines: dict[StatePath, list[str]] = {}
        for touch in reading.touches:
            if _is_unused(touch, handler):
                lines.setdefault(touch.path, []).append(touch.where)
        for path, places in lines.items():
            yield UnusedWrite(path, handler.event, handler, tuple(dict.fromkeys(places)))


def _is_unused(touch: Touch, handler: BoundHandler) -> bool:
    """Return whether a use is a write that the protected learner refuses at the event of a handler."""
    path, event = touch.path, handler.event
    if touch.how != "writes" or touch.runs is not Runs.SURELY or touch.part or path[:1] != ("step",) or len(path) != 2:
        return False
    allowed = writable_at(path)
    if event is StepEnd and path in STEP_FLAGS:
        return True
    if allowed is None:
        return False
    if event is StepBegin:  # the check of events reports declared writes
        return path[1] not in ("batch", "xs", "ys") and not _declared(handler, path)
    if event is StepEnd:
        if path == ("step", "batch"):  # a host handler may replace it
            return False
        # A phase that does not compute the value leaves its name to callbacks. Abstract phases do not show which.
        return not _declared(handler, path) or path[1] in _computed(handler.phase)
    return event in BUILTIN_EVENTS and issubclass(event, TracedEvent) and not issubclass(event, allowed)


def _declared(handler: BoundHandler, path: StatePath) -> bool:
    permission = lookup(handler.access, path)
    return permission is not None and writes(permission)


def _computed(phase: type[Phase]) -> set[str]:
    return (available(StepEnd, phase) or set()) if phase.provides else set()
