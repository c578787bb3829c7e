"""`ConditionalCallback`: a callback under a condition of one's own, or under one of FluxTraining.jl's two throttles."""

from __future__ import annotations

from typing import Any

from fluxcb._declare.callback import Callback
from fluxcb._declare.events import Event, FitBegin, FitEnd, FitStopping, HostEvent, TracedEvent
from fluxcb._declare.phases import Phase
from fluxcb._declare.schedules import EverySeconds, Predicate, Schedule
from fluxcb._declare.wrappers import Scheduled, throttled_by
from fluxcb._errors import DeclarationError

__all__ = ["CallbackCondition", "ConditionalCallback", "FrequencyThrottle", "TimeThrottle"]


class CallbackCondition:
    """Base class of conditions for `ConditionalCallback`: derive, and define `shouldrun`.

    A condition is asked before each host handler, those of FitBegin, FitStopping and FitEnd excepted: setting up and
    tidying away are never skipped. It should depend on what it is given and on nothing else: one that counts how often
    it is asked counts handlers, not steps.

    Example:
        >>> from fluxcb.callbacks import CallbackCondition
        >>> class AfterWarmup(CallbackCondition):
        ...     def shouldrun(self, event, phase, learner):
        ...         return learner.progress.epoch > 2

    Source:
        FluxTraining.jl, `CallbackCondition`; there, `shouldrun` gets instances of event and phase, and no learner.
    """

    def shouldrun(self, event: type[Event], phase: type[Phase], learner: Any) -> bool:
        """Tell whether the handler of a moment should run.

        Args:
            event: The event's class.
            phase: The phase's class.
            learner: The callback's own protected learner.
        """
        raise NotImplementedError

    def schedule(self, event: type[Event], phase: type[Phase]) -> Schedule | None:
        """Return the condition of a moment as a schedule, or None if the handler always runs."""
        if issubclass(event, TracedEvent | FitBegin | FitStopping | FitEnd):
            return None
        return Predicate(lambda learner: self.shouldrun(event, phase, learner))

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class _Throttle(CallbackCondition):
    """A schedule for the handlers of one event."""

    def __init__(self, event: type[Event], schedule: Schedule) -> None:
        self.event, self._schedule = event, schedule

    def shouldrun(self, event: type[Event], phase: type[Phase], learner: Any) -> bool:
        """Return True: what is throttled is scheduled."""
        return True

    def schedule(self, event: type[Event], phase: type[Phase]) -> Schedule | None:
        """Return the period for handlers of the event."""
        return self._schedule if issubclass(event, self.event) else None


def _check_event(event: Any, example: str) -> None:
    if not (isinstance(event, type) and issubclass(event, HostEvent | TracedEvent)):
        name = example.partition("(")[0]
        raise DeclarationError(f"`{name}` takes an event class, not {event!r}.", fix=f"write e.g. `{example}`")


class FrequencyThrottle(_Throttle):
    """The condition that an event comes the `freq`-th time, and the 2 `freq`-th, and so on.

    `ConditionalCallback(callback, FrequencyThrottle(10, StepEnd))` is `throttle(callback, StepEnd, freq=10)`.

    Args:
        freq: Period, in epochs for EpochBegin, EpochEnd and Trigger, in steps for all others.
        event: The event class; the callback's other handlers are left alone.

    Raises:
        DeclarationError: `freq` is no whole number of at least 1, or there is no such event.

    Example:
        >>> from fluxcb.callbacks import ConditionalCallback, CustomCallback, FrequencyThrottle
        >>> from fluxcb.events import StepEnd
        >>> from fluxcb.testing import testlearner
        >>> show = CustomCallback(lambda learner: print("step", learner.progress.step), StepEnd, name="show")
        >>> history = testlearner(ConditionalCallback(show, FrequencyThrottle(3, StepEnd)), validation_batches=0).fit(2)
        step 3
        step 6

    Source:
        FluxTraining.jl, `FrequencyThrottle`; there, calls are counted, from the first one, which runs. Here step and
        epoch numbers count, so that runs are the same after a resume.
    """

    def __init__(self, freq: int, event: type[Event]) -> None:
        _check_event(event, "FrequencyThrottle(10, StepEnd)")
        super().__init__(event, throttled_by(freq, event))
        self.freq = freq

    def __repr__(self) -> str:
        return f"FrequencyThrottle({self.freq}, {self.event.__name__})"


class TimeThrottle(_Throttle):
    """The condition that `seconds` have passed since the event's handler ran, or since the start.

    `ConditionalCallback(callback, TimeThrottle(60, StepEnd))` is `throttle(callback, StepEnd, seconds=60)`.

    Args:
        seconds: Period (seconds, > 0).
        event: The host event's class; the callback's other handlers are left alone.

    Raises:
        DeclarationError: `seconds` is no number above 0, or there is no such host event.

    Example:
        >>> from fluxcb.callbacks import ConditionalCallback, Recorder, TimeThrottle
        >>> from fluxcb.events import StepEnd
        >>> ConditionalCallback(Recorder(), TimeThrottle(60, StepEnd))
        ConditionalCallback(Recorder(), TimeThrottle(60, StepEnd))

    Source:
        FluxTraining.jl, `TimeThrottle`; there, the first event runs at once, and 0 seconds stand for always.
    """

    def __init__(self, seconds: float, event: type[Event]) -> None:
        _check_event(event, "TimeThrottle(60, StepEnd)")
        if issubclass(event, TracedEvent):
            raise DeclarationError(
                f"`TimeThrottle` takes a host event; {event.__name__} is traced.",
                why="the compiled step has no clock",
                fix="write `FrequencyThrottle(freq, event)`, or name a host event",
            )
        super().__init__(event, EverySeconds(seconds))
        self.seconds = seconds

    def __repr__(self) -> str:
        return f"TimeThrottle({self.seconds}, {self.event.__name__})"


class ConditionalCallback(Scheduled):
    """Run a callback's handlers only where a condition holds.

    Args:
        callback: The callback.
        condition: A `CallbackCondition`: `FrequencyThrottle`, `TimeThrottle`, or one of your own. For a mere function
            of the learner there is `fluxcb.when`.

    Access:
        The callback's; the condition may read what the callback may read.

    Runs:
        As the callback does, where the condition holds; FitBegin, FitStopping, FitEnd and traced handlers always,
        unless `FrequencyThrottle` names their event.

    Cost:
        The callback's. A condition of your own is asked at each step, so that a handler that ends windows ends one at
        each step.

    Raises:
        DeclarationError: No callback instance, or no condition.

    Example:
        >>> from fluxcb.callbacks import CallbackCondition, ConditionalCallback, CustomCallback
        >>> from fluxcb.events import StepEnd
        >>> from fluxcb.testing import testlearner
        >>> class InThirdEpoch(CallbackCondition):
        ...     def shouldrun(self, event, phase, learner):
        ...         return learner.progress.epoch == 3
        >>> show = CustomCallback(lambda learner: print("step", learner.progress.step), StepEnd, name="show")
        >>> history = testlearner(ConditionalCallback(show, InThirdEpoch()), batches=2, validation_batches=0).fit(3)
        step 5
        step 6

    Source:
        FluxTraining.jl, `ConditionalCallback`.
    """

    def __init__(self, callback: Callback, condition: CallbackCondition) -> None:
        if not isinstance(condition, CallbackCondition):
            raise DeclarationError(
                f"`ConditionalCallback` takes a `CallbackCondition`, not {condition!r}.",
                fix=[
                    "give e.g. `FrequencyThrottle(10, StepEnd)`, or derive a class from `CallbackCondition`",
                    "write `when(callback, function)` for a function of the learner",
                ],
            )
        super().__init__(callback)
        self.condition = condition

    def schedule_for(self, event: type[Event], phase: type[Phase]) -> Schedule | None:
        """Return the condition as a schedule, or None where the handler always runs."""
        return self.condition.schedule(event, phase)

    def __repr__(self) -> str:
        return f"ConditionalCallback({self.callback!r}, {self.condition!r})"
