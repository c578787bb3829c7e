"""Wrappers: they say *when*, callbacks say *what*. One mechanism, `Scheduled`, behind three spellings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from fluxcb._declare.callback import Callback
from fluxcb._declare.dispatch import Entry
from fluxcb._declare.events import EpochBegin, EpochEnd, Event, FitBegin, FitEnd, HostEvent, TracedEvent, Trigger
from fluxcb._declare.phases import Phase
from fluxcb._declare.resolution import Resolution
from fluxcb._declare.schedules import EveryEpochs, EverySeconds, EverySteps, Predicate, Schedule
from fluxcb._errors import DeclarationError

__all__ = ["Scheduled", "every", "throttle", "when"]


class Scheduled(Callback):
    """A callback whose handlers run only when a schedule is due; made by `every`, `throttle` and `when`.

    Every declaration, and the saved state, is the wrapped callback's own.

    Args:
        callback: The callback.
        schedule: When it is due.
        event: Schedule handlers of this event only; None schedules host handlers and Trigger.
        traced: Schedule traced handlers, too (a `lax.cond` on `progress`).

    Raises:
        DeclarationError: No callback, or a schedule that traced handlers cannot follow.
    """

    def __init__(
        self, callback: Callback, schedule: Schedule, *, event: type[Event] | None = None, traced: bool = False
    ) -> None:
        if not isinstance(callback, Callback):
            raise DeclarationError(
                f"A schedule wraps a callback instance, not {callback!r}.",
                fix="pass e.g. `every(Recorder(), steps=10)`",
            )
        if (traced or (event is not None and issubclass(event, TracedEvent))) and not isinstance(
            schedule, EverySteps | EveryEpochs
        ):
            raise DeclarationError(
                f"Traced handlers of {callback!r} cannot be scheduled by {schedule!r}.",
                why="the compiled step knows step and epoch numbers, but no clock and no Python",
                fix="use `steps=` or `epochs=` for traced handlers",
            )
        self.callback = callback
        self.schedule = schedule
        self.event = event
        self.traced = traced
        self.name = callback.name

    def stateaccess(self) -> Mapping[str, Any]:
        """Return the wrapped callback's access."""
        return self.callback.stateaccess()

    def runafter(self) -> tuple[type[Callback], ...]:
        """Return what the wrapped callback runs after."""
        return self.callback.runafter()

    def resolveconflict(self, other: Callback) -> Resolution:
        """Ask the wrapped callback."""
        return self.callback.resolveconflict(other)

    def init(self, learner: Any) -> None:
        """Set up the wrapped callback."""
        self.callback.init(learner)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped callback's state."""
        return self.callback.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hand the state to the wrapped callback."""
        self.callback.load_state_dict(state)

    def handlers(self) -> list[Entry]:
        """Return the wrapped callback's handlers."""
        return self.callback.handlers()

    def entry_for(self, event: type[Event], phase: type[Phase]) -> tuple[Callback, Entry, tuple[Schedule, ...]] | None:
        """Return the wrapped callback's answer, with this schedule added where it applies."""
        found = self.callback.entry_for(event, phase)
        if found is None or not self._applies(event):
            return found
        owner, entry, schedules = found
        return owner, replace(entry, when=None), (*schedules, self.schedule)

    def _applies(self, event: type[Event]) -> bool:
        if self.event is not None:
            return issubclass(event, self.event)
        if issubclass(event, TracedEvent):
            return self.traced
        if issubclass(event, FitBegin | FitEnd):
            return False  # setting up and tidying away are never skipped
        if isinstance(self.schedule, EverySteps | EverySeconds):
            return not issubclass(event, EpochBegin | EpochEnd)
        return True

    def __repr__(self) -> str:
        event = f", {self.event.__name__}" if self.event is not None else ""
        return f"{self.callback!r} at {self.schedule!r}{event}"


def every(
    callback: Callback,
    *,
    steps: int | None = None,
    epochs: int | None = None,
    seconds: float | None = None,
    traced: bool = False,
) -> Scheduled:
    """Run a callback every so many steps, epochs or seconds.

    With a period, a callback gets its Trigger at the period's end, and no longer at each epoch's.

    Args:
        callback: The callback.
        steps: Period (steps), counted over the whole training.
        epochs: Period (epochs).
        seconds: Period (seconds).
        traced: Schedule traced handlers, too; otherwise they run at every step.

    Raises:
        DeclarationError: Not exactly one period, or one that is not positive.
    """
    given = {k: v for k, v in {"steps": steps, "epochs": epochs, "seconds": seconds}.items() if v is not None}
    if len(given) != 1:
        raise DeclarationError(
            f"`every` takes exactly one of steps, epochs and seconds; got {', '.join(given) or 'none'}.",
            fix="write e.g. `every(Recorder(), steps=100)`",
        )
    schedule: Schedule
    if steps is not None:
        schedule = EverySteps(steps)
    elif epochs is not None:
        schedule = EveryEpochs(epochs)
    else:
        schedule = EverySeconds(given["seconds"])
    return Scheduled(callback, schedule, traced=traced)


def throttle(
    callback: Callback, event: type[Event], *, freq: int | None = None, seconds: float | None = None
) -> Scheduled:
    """Run the handlers of one event only every `freq`-th time, or at most every `seconds`.

    Args:
        callback: The callback.
        event: The event class; the callback's other handlers are left alone.
        freq: Period, in epochs for EpochBegin, EpochEnd and Trigger, in steps for all others.
        seconds: Period (seconds).

    Raises:
        DeclarationError: No event class, not exactly one period, or one that is not positive.
    """
    example = "write e.g. `throttle(Recorder(), StepEnd, freq=10)`"
    if not (isinstance(event, type) and issubclass(event, HostEvent | TracedEvent)):
        raise DeclarationError(f"`throttle` takes an event class, not {event!r}.", fix=example)
    if (freq is None) == (seconds is None):
        raise DeclarationError("`throttle` takes exactly one of freq and seconds.", fix=example)
    schedule: Schedule
    if freq is None:
        schedule = EverySeconds(seconds or 0.0)
    elif issubclass(event, EpochBegin | EpochEnd | Trigger):
        schedule = EveryEpochs(freq)
    else:
        schedule = EverySteps(freq)
    return Scheduled(callback, schedule, event=event)


def when(callback: Callback, predicate: Callable[[Any], bool]) -> Scheduled:
    """Run a callback's host handlers only while a predicate of the learner holds.

    Args:
        callback: The callback.
        predicate: `predicate(learner) -> bool`; sees what the callback may see.

    Raises:
        DeclarationError: The predicate is not callable.
    """
    return Scheduled(callback, Predicate(predicate))
