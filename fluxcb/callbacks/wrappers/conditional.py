"""`ConditionalCallback`: run a callback under a condition, such as the two throttles of FluxTraining.jl."""

from __future__ import annotations

from fluxcb._calls import Constructed
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import Event, FitBegin, FitEnd, FitStopping, TracedEvent
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import Phase
from fluxcb._declare.schedules import EverySeconds, Predicate, Schedule
from fluxcb._declare.wrappers import Scheduled, check_event, throttled_by
from fluxcb._errors import DeclarationError

__all__ = ["CallbackCondition", "ConditionalCallback", "FrequencyThrottle", "TimeThrottle"]


class CallbackCondition(Constructed):
    """Base class of conditions for `ConditionalCallback`. Subclasses implement `shouldrun`.

    The condition is evaluated before each host handler, except those of FitBegin, FitStopping and FitEnd, so that setup
    and cleanup are never skipped. It should only depend on its arguments. A condition that counts its own calls would
    count handlers, not steps.

    Example:
        >>> from fluxcb.callbacks import CallbackCondition
        >>> class AfterWarmup(CallbackCondition):
        ...     def shouldrun(self, event, phase, learner):
        ...         return learner.progress.epoch > 2

    Source:
        FluxTraining.jl, `CallbackCondition`, where `shouldrun` receives instances of the event and the phase, and no
        learner.
    """

    def shouldrun(self, event: type[Event], phase: type[Phase], learner: LearnerView) -> bool:
        """Return whether a handler should run.

        Args:
            event: The event class.
            phase: The phase class.
            learner: The Learner, with the access of the callback.
        """
        raise NotImplementedError

    def schedule(self, event: type[Event], phase: type[Phase]) -> Schedule | None:
        """Return the condition for an event and a phase as a schedule, or None if the handler always runs."""
        if issubclass(event, TracedEvent | FitBegin | FitStopping | FitEnd):
            return None
        return Predicate(lambda learner: self.shouldrun(event, phase, learner))

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"


class _Throttle(CallbackCondition):
    """A schedule for the handlers of one event."""

    def __init__(self, event: type[Event], schedule: Schedule) -> None:
        self.event, self._schedule = event, schedule

    def shouldrun(self, event: type[Event], phase: type[Phase], learner: LearnerView) -> bool:
        """Return True, because `schedule` limits the handlers of the event."""
        return True

    def schedule(self, event: type[Event], phase: type[Phase]) -> Schedule | None:
        """Return the period for handlers of the event."""
        return self._schedule if issubclass(event, self.event) else None


class FrequencyThrottle(_Throttle):
    """Run the handlers of an event at every `freq`-th step or epoch.

    `ConditionalCallback(callback, FrequencyThrottle(10, StepEnd))` is equivalent to `throttle(callback, StepEnd,
    freq=10)`.

    Args:
        freq: Period, in epochs for EpochBegin, EpochEnd and Trigger, and in steps for all other events.
        event: The event class. Handlers of other events are not affected.

    Raises:
        DeclarationError: `freq` is not a positive integer, or `event` is not an event.

    Example:
        >>> from fluxcb.callbacks import ConditionalCallback, CustomCallback, FrequencyThrottle
        >>> from fluxcb.events import StepEnd
        >>> from fluxcb.testing import testlearner
        >>> show = CustomCallback(lambda learner: print("step", learner.progress.step), StepEnd, name="show")
        >>> history = testlearner(ConditionalCallback(show, FrequencyThrottle(3, StepEnd)), validation_batches=0).fit(2)
        step 3
        step 6

    Source:
        FluxTraining.jl, `FrequencyThrottle`, which counts calls and runs at the first one. In fluxcb, step and epoch
        numbers decide, so that a resumed run behaves the same.
    """

    def __init__(self, freq: int, event: type[Event]) -> None:
        check_event(event, "FrequencyThrottle(10, StepEnd)")
        super().__init__(event, throttled_by(freq, event))
        self.freq = freq

    def __repr__(self) -> str:
        return f"FrequencyThrottle({self.freq}, {self.event.__name__})"


class TimeThrottle(_Throttle):
    """Run the handlers of an event when `seconds` have passed since their last call, or since the start.

    `ConditionalCallback(callback, TimeThrottle(60, StepEnd))` is equivalent to `throttle(callback, StepEnd,
    seconds=60)`.

    Args:
        seconds: Period (seconds, > 0).
        event: The class of a host event. Handlers of other events are not affected.

    Raises:
        DeclarationError: `seconds` is not a positive number, or `event` is not a host event.

    Example:
        >>> from fluxcb.callbacks import ConditionalCallback, Recorder, TimeThrottle
        >>> from fluxcb.events import StepEnd
        >>> ConditionalCallback(Recorder(), TimeThrottle(60, StepEnd))
        ConditionalCallback(Recorder(), TimeThrottle(60, StepEnd))

    Source:
        FluxTraining.jl, `TimeThrottle`, which runs at the first event, and always if `seconds` is 0.
    """

    def __init__(self, seconds: float, event: type[Event]) -> None:
        check_event(event, "TimeThrottle(60, StepEnd)")
        if issubclass(event, TracedEvent):
            raise DeclarationError(
                f"`TimeThrottle` requires a host event, but {event.__name__} is traced.",
                why="the compiled step cannot read the clock",
                fix="write `FrequencyThrottle(freq, event)`, or use a host event",
            )
        super().__init__(event, EverySeconds(seconds))
        self.seconds = seconds

    def __repr__(self) -> str:
        return f"TimeThrottle({self.seconds}, {self.event.__name__})"


class ConditionalCallback(Scheduled):
    """Run the handlers of a callback only while a condition is true.

    Args:
        callback: The callback.
        condition: A `CallbackCondition`: a `FrequencyThrottle`, a `TimeThrottle`, or an instance of your own subclass.
            If the condition is a function of the learner, use `fluxcb.when` instead.

    Access:
        That of the callback. The condition can read the same state.

    Runs:
        Like the callback, while the condition is true. Handlers of FitBegin, FitStopping and FitEnd and traced handlers
        always run, except for the event of a `FrequencyThrottle`.

    Cost:
        That of the callback. Your own condition is evaluated at each step. Therefore, a handler that ends windows ends
        one at each step.

    Raises:
        DeclarationError: `callback` is not a callback, or `condition` is not a `CallbackCondition`.

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
                f"`ConditionalCallback` requires a `CallbackCondition`, not {condition!r}.",
                fix=[
                    "pass e.g. `FrequencyThrottle(10, StepEnd)`, or write a subclass of `CallbackCondition`",
                    "write `when(callback, function)` for a function of the learner",
                ],
            )
        super().__init__(callback)
        self.condition = condition

    def schedule_for(self, event: type[Event], phase: type[Phase]) -> Schedule | None:
        """Return the condition as a schedule, or None if the handler always runs."""
        return self.condition.schedule(event, phase)

    def __repr__(self) -> str:
        return f"ConditionalCallback({self.callback!r}, {self.condition!r})"
