"""Wrappers that add a schedule to a callback. All of them are based on `Scheduled`."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from fluxcb._calls import entry_point
from fluxcb._declare.access import dotted, normalise, writes
from fluxcb._declare.callback import Callback, unwrap
from fluxcb._declare.dispatch import handler_at
from fluxcb._declare.events import (
    BUILTIN_EVENTS,
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
from fluxcb._declare.handlers import Handler
from fluxcb._declare.phases import Phase
from fluxcb._declare.proxy import ProxyCallback
from fluxcb._declare.schedules import EveryEpochs, EverySeconds, EverySteps, Predicate, Schedule, Switched
from fluxcb._errors import DeclarationError
from fluxcb._tracebacks import warn_user
from fluxcb._typing import StatePath

__all__ = [
    "BY_SWITCHING",
    "OnSchedule",
    "Scheduled",
    "Switchable",
    "check_event",
    "every",
    "refuse_gaps",
    "refuse_ineffective",
    "refuse_traced_only",
    "switchable",
    "throttle",
    "throttled_by",
    "warn_about_traced",
    "when",
]

_BEGINS: Mapping[type[Event], type[Event]] = {StepEnd: StepBegin, EpochEnd: EpochBegin}
_ENDS: Mapping[type[Event], type[Event]] = {begin: end for end, begin in _BEGINS.items()}

BY_SWITCHING = (
    "To switch it on and off, write `switchable(callback)` and call `learner.callbacks.enable` and `disable`."
)
"""The advice of `warn_about_traced` for wrappers with a predicate."""

_TRAINED_WITH = {("step", name) for name in ("batch", "loss", "grads", "skip", "hold", "stop")}


class Scheduled(ProxyCallback):
    """A callback whose handlers run only when a schedule is due. Subclasses return the schedule in `schedule_for`."""

    def schedule_for(self, event: type[Event], phase: type[Phase]) -> Schedule | None:
        """Return the schedule of the handler of a moment, or None if the handler always runs."""
        raise NotImplementedError

    def handlers(self) -> list[Handler]:
        """Return the wrapped callback's handlers, each with an additional schedule."""
        schedule = _ByMoment(self)
        return [replace(handler, when=(*handler.when, schedule)) for handler in super().handlers()]


@dataclass(frozen=True)
class _ByMoment(Schedule):
    """Placeholder for a wrapper's schedule until the moment is known, because a handler may run at several."""

    wrapper: Scheduled

    def for_moment(self, event: type[Event], phase: type[Phase]) -> Schedule | None:
        """Return the wrapper's schedule for a moment."""
        return self.wrapper.schedule_for(event, phase)


class OnSchedule(Scheduled):
    """A callback with a schedule. `every`, `throttle` and `when` return it.

    Args:
        callback: The callback.
        schedule: When the callback is due.
        event: Schedule only the handlers of this event. None schedules all host handlers, including Trigger.
        traced: Whether to also schedule traced handlers (with a `lax.cond` on `progress`).

    Raises:
        DeclarationError: `callback` is not a callback, or traced handlers cannot use the schedule.
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
                why="the compiled step has the step and epoch numbers, but cannot read a clock or call Python",
                fix="use `steps=` or `epochs=` for traced handlers",
            )
        self.schedule = schedule
        self.event = event
        self.traced = traced
        self._pairs: dict[tuple[type[Event], type[Phase]], tuple[Predicate, Predicate]] = {}
        self._answers: dict[str, dict[tuple[int, ...], bool]] = {}  # results of the predicate at EpochBegin, by phase

    def schedule_for(self, event: type[Event], phase: type[Phase]) -> Schedule | None:
        """Return the schedule if it applies at this moment, else None."""
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
        """Return the wrapped callback's state, and a predicate's results for the epochs that have begun."""
        state = super().state_dict()
        if not isinstance(self.schedule, Predicate):
            return state
        answers = {
            phase: [[*moment, answer] for moment, answer in results.items()] for phase, results in self._answers.items()
        }
        return {"callback": state, "answers": answers}

    def load_state_dict(self, state: dict[str, Any]) -> str | None:
        """Restore the wrapped callback's state and the predicate's results for the epochs that have begun."""
        if not isinstance(self.schedule, Predicate):
            return super().load_state_dict(state)
        note = super().load_state_dict(state["callback"])
        for phase, results in state["answers"].items():
            answers = self._answers.setdefault(phase, {})
            answers.clear()
            answers.update({(*moment,): answer for *moment, answer in results})
        return note

    def _handles(self, *events: type[Event], phase: type[Phase]) -> bool:
        handlers, cls = self.callback.handlers(), type(self.callback)
        return all(handler_at(handlers, event, phase, cls) is not None for event in events)

    @property
    def ineffective(self) -> bool:
        """Whether the callback has handlers, and none of them gets the schedule."""
        entries = self.callback.handlers()
        # A handler of a base class, such as `HostEvent`, handles the events that are derived from it.
        events = (*BUILTIN_EVENTS, self.event or Trigger)
        handled = ((entry.event, *(e for e in events if issubclass(e, entry.event))) for entry in entries)
        return bool(entries) and not any(map(self._applies, itertools.chain.from_iterable(handled)))

    def _applies(self, event: type[Event]) -> bool:
        if self.event is not None:
            return issubclass(event, self.event)
        if issubclass(event, TracedEvent):
            return self.traced
        if issubclass(event, FitBegin | FitStopping | FitEnd):
            return False  # handlers that set up or clean up are never skipped
        if isinstance(self.schedule, EverySteps | EverySeconds):
            return not issubclass(event, EpochBegin | EpochEnd)
        return True

    def __repr__(self) -> str:
        event = f", {self.event.__name__}" if self.event is not None else ""
        return f"{self.callback!r} at {self.schedule!r}{event}"


def _of(phase: type[Phase]) -> str:
    return f"{phase.__module__}.{phase.__qualname__}"


@entry_point
def every(
    callback: Callback,
    *,
    steps: int | None = None,
    epochs: int | None = None,
    seconds: float | None = None,
    traced: bool = False,
) -> OnSchedule:
    """Run a callback once in a given number of steps, epochs or seconds.

    The callback then receives Trigger at the end of each period instead of at the end of each epoch.

    Args:
        callback: The callback.
        steps: Period (steps), counted over the whole training. At StepBegin, the steps that have begun are counted,
            including cancelled steps.
        epochs: Period (epochs).
        seconds: Period (seconds).
        traced: Whether to also schedule traced handlers. Otherwise, they run at every step.

    Raises:
        DeclarationError: Not exactly one period is given, the period is not positive, the callback has only traced
            handlers and `traced=True` is missing, none of its handlers gets the schedule, or the callback, such as
            `Metrics`, needs every step.

    Warns:
        UserWarning: A traced handler that changes the training still runs at every step.
    """
    periods = {k: v for k, v in {"steps": steps, "epochs": epochs, "seconds": seconds}.items() if v is not None}
    if len(periods) != 1:
        raise DeclarationError(
            f"`every` takes exactly one of steps, epochs and seconds; got {', '.join(periods) or 'none'}.",
            fix="write e.g. `every(Recorder(), steps=100)`",
        )
    schedule: Schedule
    if steps is not None:
        schedule = EverySteps(steps)
    elif epochs is not None:
        schedule = EveryEpochs(epochs)
    else:
        schedule = EverySeconds(periods["seconds"])
    wrapped = OnSchedule(callback, schedule, traced=traced)
    if epochs is None:
        refuse_gaps("every", callback)
    if not traced:
        refuse_traced_only("every", callback)
        warn_about_traced("every", callback, "To schedule it as well, write `traced=True` with `steps=` or `epochs=`.")
    refuse_ineffective("every", wrapped)
    return wrapped


@entry_point
def throttle(
    callback: Callback, event: type[Event], *, freq: int | None = None, seconds: float | None = None
) -> OnSchedule:
    """Run the handlers of one event only every `freq`-th time, or at most once in `seconds`.

    Args:
        callback: The callback.
        event: The event class. The callback's handlers of other events do not change.
        freq: Period, in epochs for EpochBegin, EpochEnd and Trigger, in steps for all other events. At StepBegin, the
            steps that have begun are counted, including cancelled steps.
        seconds: Period (seconds).

    Raises:
        DeclarationError: `event` is not an event class, not exactly one period is given, the period is not positive,
            the callback has no handler of the event, or the callback needs every step.
    """
    example = "throttle(Recorder(), StepEnd, freq=10)"
    check_event(event, example)
    if (freq is None) == (seconds is None):
        raise DeclarationError("`throttle` takes exactly one of freq and seconds.", fix=f"write e.g. `{example}`")
    schedule = EverySeconds(seconds or 0.0) if freq is None else throttled_by(freq, event)
    wrapped = OnSchedule(callback, schedule, event=event)
    if not issubclass(event, EpochBegin | EpochEnd | Trigger):
        refuse_gaps("throttle", callback)
    if not issubclass(event, TracedEvent):
        refuse_traced_only("throttle", callback)
    refuse_ineffective("throttle", wrapped)
    return wrapped


def check_event(event: Any, example: str) -> None:
    """Check that a value is an event class.

    Args:
        event: The value.
        example: A call with an event, for the message.

    Raises:
        DeclarationError: The value is not an event class.
    """
    if not (isinstance(event, type) and issubclass(event, HostEvent | TracedEvent)):
        name = example.partition("(")[0]
        raise DeclarationError(f"`{name}` takes an event class, not {event!r}.", fix=f"write e.g. `{example}`")


def throttled_by(freq: int, event: type[Event]) -> EverySteps | EveryEpochs:
    """Return the schedule that makes an event due every `freq`-th time."""
    return EveryEpochs(freq) if issubclass(event, EpochBegin | EpochEnd | Trigger) else EverySteps(freq)


@entry_point
def when(callback: Callback, predicate: Callable[[Any], bool]) -> OnSchedule:
    """Run a callback's host handlers only while a predicate of the learner is true.

    If a callback has handlers for both StepBegin and StepEnd, or for both EpochBegin and EpochEnd, the predicate is
    called at the first event, and its result is used for both.

    Args:
        callback: The callback.
        predicate: `predicate(learner) -> bool`. It may read the state that the callback may read.

    Raises:
        DeclarationError: The predicate is not callable, or the callback has no host handlers except those of FitBegin,
            FitStopping and FitEnd, or the callback needs every step.

    Warns:
        UserWarning: A traced handler that changes the training still runs at every step.
    """
    wrapped = OnSchedule(callback, Predicate(predicate))
    refuse_gaps("when", callback)
    refuse_traced_only("when", callback)
    warn_about_traced("when", callback, BY_SWITCHING)
    refuse_ineffective("when", wrapped)
    return wrapped


class Switchable(Scheduled):
    """A callback whose traced handlers `learner.callbacks.disable` can switch off; `switchable` returns it."""

    def schedule_for(self, event: type[Event], phase: type[Phase]) -> Schedule | None:
        """Return the schedule of traced handlers. Host handlers are disabled without one."""
        return Switched() if issubclass(event, TracedEvent) else None

    def __repr__(self) -> str:
        return f"switchable({self.callback!r})"


@entry_point
def switchable(callback: Callback) -> Switchable:
    """Let `learner.callbacks.disable` switch off the traced handlers of a callback.

    The compiled step then contains a condition around each traced handler of the callback, which reads a flag on the
    device. Switching the callback therefore needs no compilation. A callback without traced handlers can be disabled
    without this wrapper.

    Args:
        callback: The callback.

    Raises:
        DeclarationError: `callback` is not a callback.
    """
    if not isinstance(callback, Callback):
        raise DeclarationError(
            f"`switchable` wraps a callback instance, not {callback!r}.",
            fix="pass e.g. `switchable(ClipGradients(1.0))`",
        )
    return Switchable(callback)


def refuse_gaps(wrapper: str, callback: Callback) -> None:
    """Raise an error for a callback that needs every step, because a wrapper would skip some.

    Raises:
        DeclarationError: The callback needs every step.
    """
    if unwrap(callback).needs_every_step:
        raise DeclarationError(
            f"`{wrapper}` would skip steps of {callback!r}.",
            why="it stores a value of each step, and the values of skipped steps would be lost",
            fix=[
                f"pass the callback without `{wrapper}`",
                "to skip whole epochs, write `every(callback, epochs=...)`",
            ],
        )


def refuse_traced_only(wrapper: str, callback: Callback) -> None:
    """Raise an error for a callback with traced handlers only, on which a wrapper of host handlers has no effect.

    Raises:
        DeclarationError: All of the callback's handlers are traced.
    """
    entries = callback.handlers()
    if entries and all(entry.traced for entry in entries):
        raise DeclarationError(
            f"{callback!r} has no host handlers, but `{wrapper}` schedules only host handlers.",
            why="traced handlers are compiled into the step, and run at every step unless `traced=True` schedules them",
            fix="write `every(callback, steps=..., traced=True)` or `every(callback, epochs=..., traced=True)`",
        )


def warn_about_traced(wrapper: str, callback: Callback, advice: str) -> None:
    """Warn about a traced handler that changes the training, and that a wrapper of host handlers does not schedule.

    Args:
        wrapper: The name of the wrapper.
        callback: The wrapped callback.
        advice: How the handler can be scheduled as well, for the message.
    """
    for entry in callback.handlers():
        if not entry.traced:
            continue
        declared = callback.stateaccess() if entry.access is None else entry.access
        access = normalise(declared, owner=f"{type(callback).__name__}.stateaccess", where="")
        paths = [dotted(path) for path, permission in access.items() if writes(permission) and _trains(path)]
        if paths:
            warn_user(
                f"`{wrapper}` schedules only the host handlers of {callback!r}. Its traced handler `{entry.name}` "
                f"writes `{paths[0]}`, and runs at every step. {advice}",
                UserWarning,
            )
            return


def _trains(path: StatePath) -> bool:
    """Return whether what a traced handler writes to a path changes the parameters."""
    return path[0] in ("params", "opt_state", "hyperparams", "model_state") or path in _TRAINED_WITH


def refuse_ineffective(wrapper: str, wrapped: OnSchedule) -> None:
    """Raise an error for a wrapper that changes nothing, because the callback has no handler that it schedules.

    Raises:
        DeclarationError: No handler of the wrapped callback gets the schedule.
    """
    if not wrapped.ineffective:
        return
    callback, event = wrapped.callback, wrapped.event
    handled = dict.fromkeys(entry.event for entry in callback.handlers())
    names = ", ".join(cls.__name__ for cls in handled)
    if event is not None:
        problem = f"{callback!r} has no handler of {event.__name__}, so `{wrapper}` has no effect on it."
        fix = [f"name an event that the callback handles: `{wrapper}(callback, {next(iter(handled)).__name__}, ...)`"]
    else:
        problem = f"{callback!r} has no handler that `{wrapper}` schedules, so `{wrapper}` has no effect on it."
        by_epoch = any(issubclass(cls, EpochBegin | EpochEnd) for cls in handled)
        fix = [f"write `{wrapper}(callback, epochs=...)`, which also schedules EpochBegin and EpochEnd"] * by_epoch
        if wrapper == "every" and any(entry.traced for entry in callback.handlers()):
            fix.insert(0, "write `every(callback, steps=..., traced=True)`, which schedules its traced handlers")
    raise DeclarationError(problem, why=f"it handles {names}", fix=[*fix, f"pass the callback without `{wrapper}`"])
