"""Wrappers: they say *when*, callbacks say *what*. One mechanism, `Scheduled`, behind all spellings."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from fluxcb._declare.callback import Callback
from fluxcb._declare.dispatch import Entry
from fluxcb._declare.events import (
    EpochBegin,
    EpochEnd,
    Event,
    FitBegin,
    FitEnd,
    FitStopping,
    HostEvent,
    StepBegin,
    StepEnd,
    TracedEvent,
    Trigger,
)
from fluxcb._declare.phases import Phase
from fluxcb._declare.proxy import ProxyCallback
from fluxcb._declare.schedules import EveryEpochs, EverySeconds, EverySteps, Predicate, Schedule
from fluxcb._errors import DeclarationError

__all__ = ["OnSchedule", "Scheduled", "every", "refuse_traced_only", "throttle", "throttled_by", "when"]

_BEGINS: Mapping[type[Event], type[Event]] = {StepEnd: StepBegin, EpochEnd: EpochBegin}
_ENDS: Mapping[type[Event], type[Event]] = {begin: end for end, begin in _BEGINS.items()}


class Scheduled(ProxyCallback):
    """A callback whose handlers run only when something is due; subclasses say in `schedule_for` when that is."""

    def schedule_for(self, event: type[Event], phase: type[Phase]) -> Schedule | None:
        """Return what the handler of a moment waits for, or None where it always runs."""
        raise NotImplementedError

    def entry_for(self, event: type[Event], phase: type[Phase]) -> tuple[Callback, Entry, tuple[Schedule, ...]] | None:
        """Return the wrapped callback's answer, with a schedule added where there is one."""
        found = super().entry_for(event, phase)
        schedule = self.schedule_for(event, phase) if found is not None else None
        if found is None or schedule is None:
            return found
        owner, entry, schedules = found
        return owner, replace(entry, when=None), (*schedules, schedule)


class OnSchedule(Scheduled):
    """A callback on one schedule; made by `every`, `throttle` and `when`.

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
        super().__init__(callback)
        if (traced or (event is not None and issubclass(event, TracedEvent))) and not isinstance(
            schedule, EverySteps | EveryEpochs
        ):
            raise DeclarationError(
                f"Traced handlers of {callback!r} cannot be scheduled by {schedule!r}.",
                why="the compiled step knows step and epoch numbers, but no clock and no Python",
                fix="use `steps=` or `epochs=` for traced handlers",
            )
        self.schedule = schedule
        self.event = event
        self.traced = traced
        self._pairs: dict[tuple[type[Event], type[Phase]], tuple[Predicate, Predicate]] = {}
        self._answers: dict[str, dict[tuple[int, ...], bool]] = {}  # what was answered at EpochBegin, by phase

    def schedule_for(self, event: type[Event], phase: type[Phase]) -> Schedule | None:
        """Return the schedule where it applies."""
        if not self._applies(event):
            return None
        begin = _BEGINS.get(event, event)
        end = _ENDS.get(begin)
        if isinstance(self.schedule, Predicate) and end is not None and self._handles(begin, end, phase=phase):
            if (begin, phase) not in self._pairs:
                held = {} if begin is StepBegin else self._answers.setdefault(_of(phase), {})
                self._pairs[begin, phase] = self.schedule.pair(held, by_step=begin is StepBegin)
            return self._pairs[begin, phase][event is end]
        return self.schedule

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped callback's state; of a predicate, the answers for epochs that have begun, too."""
        state = super().state_dict()
        if not isinstance(self.schedule, Predicate):
            return state
        held = {phase: [[*moment, answer] for moment, answer in held.items()] for phase, held in self._answers.items()}
        return {"callback": state, "answers": held}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hand the state to the wrapped callback; an epoch that is gone on with ends as it has begun."""
        if not isinstance(self.schedule, Predicate):
            super().load_state_dict(state)
            return
        super().load_state_dict(state["callback"])
        for phase, held in state["answers"].items():
            answers = self._answers.setdefault(phase, {})
            answers.clear()
            answers.update({(*moment,): answer for *moment, answer in held})

    def _handles(self, *events: type[Event], phase: type[Phase]) -> bool:
        return all(self.callback.entry_for(event, phase) is not None for event in events)

    def _applies(self, event: type[Event]) -> bool:
        if self.event is not None:
            return issubclass(event, self.event)
        if issubclass(event, TracedEvent):
            return self.traced
        if issubclass(event, FitBegin | FitStopping | FitEnd):
            return False  # setting up and tidying away are never skipped
        if isinstance(self.schedule, EverySteps | EverySeconds):
            return not issubclass(event, EpochBegin | EpochEnd)
        return True

    def __repr__(self) -> str:
        event = f", {self.event.__name__}" if self.event is not None else ""
        return f"{self.callback!r} at {self.schedule!r}{event}"


def _of(phase: type[Phase]) -> str:
    return f"{phase.__module__}.{phase.__qualname__}"


def every(
    callback: Callback,
    *,
    steps: int | None = None,
    epochs: int | None = None,
    seconds: float | None = None,
    traced: bool = False,
) -> OnSchedule:
    """Run a callback every so many steps, epochs or seconds.

    With a period, a callback gets its Trigger at the period's end, and no longer at each epoch's.

    Args:
        callback: The callback.
        steps: Period (steps), counted over the whole training. At StepBegin, the steps that have begun are counted,
            including cancelled steps.
        epochs: Period (epochs).
        seconds: Period (seconds).
        traced: Schedule traced handlers, too; otherwise they run at every step.

    Raises:
        DeclarationError: Not exactly one period, one that is not positive, or a callback with traced handlers only and
            no `traced=True`.
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
    wrapped = OnSchedule(callback, schedule, traced=traced)
    if not traced:
        refuse_traced_only("every", callback)
    return wrapped


def throttle(
    callback: Callback, event: type[Event], *, freq: int | None = None, seconds: float | None = None
) -> OnSchedule:
    """Run the handlers of one event only every `freq`-th time, or at most every `seconds`.

    Args:
        callback: The callback.
        event: The event class; the callback's other handlers are left alone.
        freq: Period, in epochs for EpochBegin, EpochEnd and Trigger, in steps for all others. At StepBegin, the steps
            that have begun are counted, including cancelled steps.
        seconds: Period (seconds).

    Raises:
        DeclarationError: No event class, not exactly one period, one that is not positive, or a host event for a
            callback with traced handlers only.
    """
    example = "write e.g. `throttle(Recorder(), StepEnd, freq=10)`"
    if not (isinstance(event, type) and issubclass(event, HostEvent | TracedEvent)):
        raise DeclarationError(f"`throttle` takes an event class, not {event!r}.", fix=example)
    if (freq is None) == (seconds is None):
        raise DeclarationError("`throttle` takes exactly one of freq and seconds.", fix=example)
    schedule = EverySeconds(seconds or 0.0) if freq is None else throttled_by(freq, event)
    wrapped = OnSchedule(callback, schedule, event=event)
    if not issubclass(event, TracedEvent):
        refuse_traced_only("throttle", callback)
    return wrapped


def throttled_by(freq: int, event: type[Event]) -> EverySteps | EveryEpochs:
    """Return the schedule of an event that is to come every `freq`-th time only."""
    return EveryEpochs(freq) if issubclass(event, EpochBegin | EpochEnd | Trigger) else EverySteps(freq)


def when(callback: Callback, predicate: Callable[[Any], bool]) -> OnSchedule:
    """Run a callback's host handlers only while a predicate of the learner holds.

    Where a callback has handlers for both StepBegin and StepEnd, or EpochBegin and EpochEnd, the predicate is asked at
    the first, and the answer holds for both.

    Args:
        callback: The callback.
        predicate: `predicate(learner) -> bool`; sees what the callback may see.

    Raises:
        DeclarationError: The predicate is not callable, or the callback has traced handlers only.
    """
    wrapped = OnSchedule(callback, Predicate(predicate))
    refuse_traced_only("when", callback)
    return wrapped


def refuse_traced_only(who: str, callback: Callback) -> None:
    """Refuse a callback that has only handlers which a wrapper leaves alone: it would do nothing.

    Raises:
        DeclarationError: All of the callback's handlers are traced.
    """
    entries = callback.handlers()
    if entries and all(entry.traced for entry in entries):
        raise DeclarationError(
            f"{callback!r} has no host handlers, and `{who}` schedules no others.",
            why="traced handlers are compiled into the step, and run at every step unless `traced=True` schedules them",
            fix="write `every(callback, steps=..., traced=True)` or `every(callback, epochs=..., traced=True)`",
        )
