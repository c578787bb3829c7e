"""Schedules, compared with counting, and the wrappers that apply them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxcb import (
    Callback,
    EveryEpochs,
    EverySeconds,
    EverySteps,
    NoConflict,
    Predicate,
    Read,
    every,
    on,
    throttle,
    when,
)
from fluxcb._declare.callback import unwrap
from fluxcb._declare.declared import BoundHandler, declare
from fluxcb._declare.events import BUILTIN_EVENTS
from fluxcb._declare.schedules import Always, Periodic, Schedule, StepsOrEpochs
from fluxcb._declare.wrappers import OnSchedule
from fluxcb._errors import DeclarationError
from fluxcb.events import (
    BackwardEnd,
    EpochBegin,
    EpochEnd,
    Event,
    FitBegin,
    FitEnd,
    HostEvent,
    StepBegin,
    StepEnd,
    TracedEvent,
    Trigger,
    UpdateEnd,
)
from fluxcb.phases import TrainingPhase

PERIODS = st.integers(1, 50)
NUMBERS = st.integers(0, 1000)


# --- when ------------------------------------------------------------------------------------------------------------


@given(PERIODS, NUMBERS)
def test_steps_are_due_once_per_period(period: int, step: int) -> None:
    schedule = EverySteps(period)
    due = [number for number in range(1, step + 2 * period + 1) if schedule.due(number, 1, None)]
    assert due == list(range(period, step + 2 * period + 1, period))
    assert schedule.next_due(step, 1) == next(number for number in due if number > step)


@given(PERIODS, NUMBERS, NUMBERS)
def test_epochs_are_due_once_per_period_at_all_their_steps(period: int, step: int, epoch: int) -> None:
    schedule = EveryEpochs(period)
    assert [n for n in range(epoch + 1) if schedule.due(step, n, None)] == list(range(period, epoch + 1, period))
    assert schedule.next_due(step, epoch) == (step + 1 if epoch in range(period, epoch + 1, period) else None)


def test_always_and_predicates_are_evaluated_at_every_step() -> None:
    asked: list[Any] = []
    predicate = Predicate(lambda learner: asked.append(learner) or len(asked) > 1)
    assert [predicate.due(1, 1, "a"), predicate.due(2, 1, "b")] == [False, True]
    assert asked == ["a", "b"]
    assert predicate.next_due(7, 1) == Always().next_due(7, 1) == 8
    assert Always().due(0, 0, None) is True


def test_seconds_are_due_after_period_since_last_run(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([100.0, 101.0, 102.0, 103.5, 104.0, 110.0, 111.9, 111.9, 112.0])
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    schedule = EverySeconds(2)
    assert [schedule.due(step, 1, None) for step in range(7)] == [False, False, True, False, True, True, False]
    assert [schedule.next_due(3, 1), schedule.next_due(3, 1)] == [None, 4]  # before it strikes, and after
    assert schedule == EverySeconds(2)
    assert repr(schedule) == "EverySeconds(seconds=2)"


def triggers(schedule: Schedule, steps_in_epoch: int, epochs: int) -> list[int]:
    """Return the numbers of finished steps at which a loop emits Trigger, after a step or after an epoch."""
    found = []
    for step in range(1, steps_in_epoch * epochs + 1):
        epoch = (step - 1) // steps_in_epoch + 1
        inside = schedule.after_epoch() is not schedule
        if inside and schedule.due(step, epoch, None):
            found.append(step)
        after = schedule.after_epoch()
        if step % steps_in_epoch == 0 and after is not None and after.due(step, epoch, None):
            found.append(step)
    return found


@given(PERIODS, PERIODS, st.integers(1, 7), st.integers(1, 12))
def test_two_trigger_periods_are_combined(steps: int, epochs: int, length: int, trained: int) -> None:
    by_steps = set(range(steps, length * trained + 1, steps))
    by_epochs = {epoch * length for epoch in range(epochs, trained + 1, epochs)}
    assert triggers(StepsOrEpochs(steps, epochs), length, trained) == sorted(by_steps | by_epochs)
    assert triggers(EverySteps(steps), length, trained) == sorted(by_steps)
    assert triggers(EveryEpochs(epochs), length, trained) == sorted(by_epochs)
    assert triggers(EverySeconds(1e9), length, trained) == []
    assert triggers(Periodic(), length, trained) == []


class Fit:
    """A learner with a known last epoch."""

    def __init__(self, epochs: int) -> None:
        self.progress = self
        self.epochs = epochs


@given(st.none() | PERIODS, st.none() | PERIODS, st.integers(0, 60), st.integers(1, 9), st.integers(0, 9))
def test_periods_with_last_epoch(steps: int | None, epochs: int | None, step: int, epoch: int, last: int) -> None:
    schedule, fit = Periodic(steps, epochs), Fit(last)
    by_steps = steps is not None and step in range(0, step + 1, steps)
    by_epochs = epochs is not None and (epoch in range(epochs, epoch + 1, epochs) or epoch == last)
    assert schedule.due(step, epoch, fit) == (by_steps or by_epochs)
    due = [number for number in range(step + 1, step + 60) if schedule.due(number, epoch, fit)]
    nearest = schedule.next_due(step, epoch)
    assert not due or (nearest is not None and nearest <= due[0])
    assert nearest == (None if steps is None and epochs is None else step + 1 if epochs is not None else due[0])


def test_no_epoch_period_is_due_before_first_epoch() -> None:
    assert Periodic(None, 1).due(0, 0, Fit(0)) is False


def test_end_event_uses_decision_of_begin_event() -> None:
    answers = iter([True, False, False, True, True, False])
    begin, end = Predicate(lambda learner: next(answers)).pair({}, by_step=True)
    assert [begin.due(1, 1, None), end.due(1, 1, None)] == [True, True]
    assert [begin.due(2, 1, None), end.due(2, 1, None)] == [False, False]
    assert end.due(3, 1, None) is False  # nobody was asked at this begin
    assert begin.due(3, 1, None) is True  # a begin that is repeated is asked again
    assert begin.due(3, 1, None) is True
    assert end.due(3, 2, None) is False  # the step of that number in another epoch, where steps count per epoch
    begin, end = Predicate(lambda learner: learner).pair({}, by_step=False)
    assert [begin.due(0, 1, True), end.due(8, 1, False), end.due(8, 2, False)] == [True, True, False]
    assert begin == Predicate(begin.function) == end
    assert begin != Predicate(callable)


def test_each_handler_has_own_clock_and_shared_counts() -> None:
    clock = EverySeconds(2)
    assert clock.for_handler() is not clock
    assert clock.for_handler() == clock
    for counted in (EverySteps(2), EveryEpochs(2), Always(), Predicate(callable)):
        assert counted.for_handler() is counted


def test_custom_schedule_must_define_due() -> None:
    with pytest.raises(TypeError, match=r"^Schedule does not define when it is due$"):
        Schedule().due(1, 1, None)
    assert Schedule().next_due(1, 1) == 2


@pytest.mark.parametrize("period", [0, -1, 1.5, 2.0, True, "3", None, math.nan])
@pytest.mark.parametrize(("kind", "unit"), [(EverySteps, "steps"), (EveryEpochs, "epochs")])
def test_periods_are_positive_integers(kind: Any, unit: str, period: Any, refused: Any) -> None:
    with refused(
        DeclarationError,
        f"The period of `{kind.__name__}` ({unit}) must be a whole number of at least 1, not {period!r}.\n"
        "  why:   periods and counts are whole numbers of steps or epochs\n"
        "  fix:   pass a positive int",
    ):
        kind(period)


@pytest.mark.parametrize("period", [0, 0.0, -1.5, True, "3", None, math.nan, math.inf])
def test_seconds_are_positive(period: Any, refused: Any) -> None:
    with refused(
        DeclarationError,
        f"The period of `EverySeconds` (seconds) must be a number above 0, not {period!r}.\n"
        "  fix:   pass a positive number of seconds",
    ):
        EverySeconds(period)


def test_predicate_must_be_function(refused: Any) -> None:
    with refused(
        DeclarationError,
        "`when` takes a function of the learner, not 3.\n"
        "  fix:   write `when(callback, lambda learner: learner.progress.epoch > 3)`",
    ):
        when(Everything(), 3)  # type: ignore[arg-type]


# --- wrappers ---------------------------------------------------------------------------------------------------------


class Everything(Callback):
    """Implement every declaration, and handle every event."""

    name = "everything"

    def __init__(self) -> None:
        self.said: list[Any] = []

    def stateaccess(self) -> Any:
        return {"params": Read()}

    def runafter(self) -> Any:
        return (OnSchedule,)

    def resolveconflict(self, other: Callback) -> Any:
        self.said.append(other)
        return NoConflict()

    def init(self, learner: Any) -> None:
        self.said.append(learner)

    def state_dict(self) -> dict[str, Any]:
        return {"said": list(self.said)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.said = state["said"]

    @on
    def host(self, event: HostEvent, phase, learner) -> None: ...

    @on(when=EverySteps(7))
    def step_end(self, event: StepEnd, phase, learner) -> None: ...

    @on
    def traced(self, event: TracedEvent, phase, learner) -> None: ...


@pytest.mark.parametrize(
    "wrap",
    [
        lambda cb: every(cb, steps=3),
        lambda cb: every(cb, seconds=0.5),
        lambda cb: throttle(cb, StepEnd, freq=2),
        lambda cb: when(cb, lambda learner: True),
        lambda cb: every(every(cb, steps=3), epochs=2),
    ],
)
def test_wrappers_forward_declarations_and_state(wrap: Any) -> None:
    inner = Everything()
    wrapped = wrap(inner)
    other = Everything()
    assert isinstance(wrapped, OnSchedule)
    assert unwrap(wrapped) is inner
    assert wrapped.name == "everything"
    assert wrapped.stateaccess() == inner.stateaccess()
    assert wrapped.runafter() == (OnSchedule,)
    assert wrapped.resolveconflict(other) == NoConflict()
    wrapped.init("learner")
    loaded = {"said": ["loaded"]}
    if isinstance(wrapped.schedule, Predicate):  # it has answers of its own to keep, none here
        assert wrapped.state_dict() == {"callback": {"said": [other, "learner"]}, "answers": {}}
        loaded = {"callback": loaded, "answers": {}}
    else:
        assert wrapped.state_dict() == {"said": [other, "learner"]}
    wrapped.load_state_dict(loaded)
    assert inner.said == ["loaded"]
    assert [replace(handler, when=(), owner=None) for handler in wrapped.handlers()] == [
        replace(handler, when=()) for handler in inner.handlers()
    ]
    assert {handler.owner for handler in wrapped.handlers()} == {inner}


def handler_of(callback: Callback, event: type[Event]) -> BoundHandler | None:
    [declared], _ = declare([callback])
    return declared.handler(event, TrainingPhase)


def scheduled(callback: Callback) -> dict[str, Any]:
    found = {event.__name__: handler_of(callback, event) for event in BUILTIN_EVENTS}
    return {name: handler.schedules for name, handler in found.items() if handler is not None and handler.schedules}


SEVEN = EverySteps(7)


def test_step_period_does_not_schedule_other_handlers() -> None:
    by = EverySteps(3)
    assert scheduled(every(Everything(), steps=3)) == {"StepBegin": (by,), "StepEnd": (SEVEN, by), "Trigger": (by,)}
    clock = EverySeconds(3)
    assert scheduled(every(Everything(), seconds=3)) == {
        "StepBegin": (clock,),
        "StepEnd": (SEVEN, clock),
        "Trigger": (clock,),
    }


def test_epoch_period_and_predicate_schedule_epoch_events() -> None:
    for wrapped in (every(Everything(), epochs=2), when(Everything(), callable)):
        by = wrapped.schedule
        assert scheduled(wrapped) == {
            "EpochBegin": (by,),
            "StepBegin": (by,),
            "StepEnd": (SEVEN, by),
            "EpochEnd": (by,),
            "Trigger": (by,),
        }


def test_traced_true_schedules_traced_handlers() -> None:
    by = EverySteps(3)
    traced = {e.__name__: (by,) for e in BUILTIN_EVENTS if issubclass(e, TracedEvent)}
    assert scheduled(every(Everything(), steps=3, traced=True)) == {
        "StepBegin": (by,),
        **traced,
        "StepEnd": (SEVEN, by),
        "Trigger": (by,),
    }


@pytest.mark.parametrize(
    ("event", "schedule", "touched"),
    [
        (StepEnd, EverySteps(4), {"StepEnd": (SEVEN, EverySteps(4))}),
        (StepBegin, EverySteps(4), {"StepBegin": (EverySteps(4),), "StepEnd": (SEVEN,)}),
        (EpochBegin, EveryEpochs(4), {"EpochBegin": (EveryEpochs(4),), "StepEnd": (SEVEN,)}),
        (EpochEnd, EveryEpochs(4), {"EpochEnd": (EveryEpochs(4),), "StepEnd": (SEVEN,)}),
        (Trigger, EveryEpochs(4), {"StepEnd": (SEVEN,), "Trigger": (EveryEpochs(4),)}),
        (BackwardEnd, EverySteps(4), {"BackwardEnd": (EverySteps(4),), "StepEnd": (SEVEN,)}),
        (FitEnd, EverySteps(4), {"StepEnd": (SEVEN,), "FitEnd": (EverySteps(4),)}),
    ],
)
def test_throttle_schedules_only_its_event(event: type[Event], schedule: Any, touched: Any) -> None:
    wrapped = throttle(Everything(), event, freq=4)
    assert wrapped.schedule == schedule
    assert scheduled(wrapped) == touched


def test_nested_wrappers_combine_and_have_repr() -> None:
    wrapped = throttle(every(Everything(), epochs=2), StepBegin, freq=4)
    assert scheduled(wrapped)["StepBegin"] == (EveryEpochs(2), EverySteps(4))
    assert repr(wrapped) == "Everything() at EveryEpochs(epochs=2) at EverySteps(steps=4), StepBegin"
    found = handler_of(wrapped, StepEnd)
    assert found is not None
    assert found.function == unwrap(wrapped).step_end  # type: ignore[attr-defined]  # a method of Everything
    assert (found.name, found.schedules) == ("step_end", (SEVEN, EveryEpochs(2)))


def test_wrapping_adds_no_handlers() -> None:
    class Quiet(Callback):
        @on
        def run(self, event: StepEnd, phase, learner) -> None: ...

    assert handler_of(every(Quiet(), steps=2), FitBegin) is None


EVERY = "  fix:   write e.g. `every(Recorder(), steps=100)`"
THROTTLE = "  fix:   write e.g. `throttle(Recorder(), StepEnd, freq=10)`"
CLOCKLESS = (
    "  why:   the compiled step has the step and epoch numbers, but cannot read a clock or call Python\n"
    "  fix:   use `steps=` or `epochs=` for traced handlers"
)


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: every(Everything()), f"`every` takes exactly one of steps, epochs and seconds; got none.\n{EVERY}"),
        (
            lambda: every(Everything(), steps=1, seconds=2),
            f"`every` takes exactly one of steps, epochs and seconds; got steps, seconds.\n{EVERY}",
        ),
        (lambda: throttle(Everything(), StepEnd), f"`throttle` takes exactly one of freq and seconds.\n{THROTTLE}"),
        (
            lambda: throttle(Everything(), StepEnd, freq=1, seconds=1),
            f"`throttle` takes exactly one of freq and seconds.\n{THROTTLE}",
        ),
        (
            lambda: throttle(Everything(), TrainingPhase, freq=1),  # type: ignore[arg-type]
            f"`throttle` takes an event class, not {TrainingPhase!r}.\n{THROTTLE}",
        ),
        (
            lambda: throttle(Everything(), StepEnd(), freq=1),  # type: ignore[arg-type]
            f"`throttle` takes an event class, not StepEnd.\n{THROTTLE}",
        ),
        (
            lambda: every(Everything, steps=1),  # type: ignore[arg-type]
            f"A schedule wraps a callback instance, not {Everything!r}.\n"
            "  fix:   pass e.g. `every(Recorder(), steps=10)`",
        ),
        (
            lambda: every(Everything(), seconds=2, traced=True),
            f"Traced handlers of Everything() cannot be scheduled by EverySeconds(seconds=2).\n{CLOCKLESS}",
        ),
        (
            lambda: throttle(Everything(), UpdateEnd, seconds=2),
            f"Traced handlers of Everything() cannot be scheduled by EverySeconds(seconds=2).\n{CLOCKLESS}",
        ),
        (
            lambda: throttle(Everything(), EpochEnd, freq=0),
            "The period of `EveryEpochs` (epochs) must be a whole number of at least 1, not 0.\n"
            "  why:   periods and counts are whole numbers of steps or epochs\n  fix:   pass a positive int",
        ),
    ],
)
def test_invalid_wrapper_arguments_raise(build: Any, text: str, refused: Any) -> None:
    with refused(DeclarationError, text):
        build()


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        (Always(), "always"),
        (EverySteps(100), "every 100 steps"),
        (EverySteps(1), "every step"),
        (EveryEpochs(2), "every 2 epochs"),
        (EverySeconds(0.1), "every 0.1 seconds"),
        (StepsOrEpochs(500, 1), "every 500 steps and every epoch"),
        (StepsOrEpochs(500, 3).after_epoch(), "every 3 epochs but not after every 500 steps"),
        (Periodic(steps=10), "every 10 steps"),
        (Periodic(epochs=5), "every 5 epochs and in the fit's last epoch"),
        (Periodic(), "never"),
        (Predicate(math.isnan), "while `isnan` holds"),
    ],
)
def test_str_of_schedules(schedule: Schedule, text: str) -> None:
    assert str(schedule) == text
