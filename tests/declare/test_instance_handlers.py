"""Handlers of an instance: `Handler` objects, overrides of `handlers`, and wrappers that replace handlers."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import fluxcb
from fluxcb import AmbiguityError, Callback, DeclarationError, EverySteps, Handler, Predicate, Read, every, on
from fluxcb._declare.declared import BoundHandler, declare
from fluxcb._declare.dispatch import handler_at
from fluxcb._declare.proxy import in_place_of
from fluxcb.callbacks import PeriodicTrigger, ProxyCallback
from fluxcb.events import EpochEnd, Event, FitBegin, HostEvent, StepBegin, StepEnd, Trigger
from fluxcb.phases import AbstractTrainingPhase, AbstractValidationPhase, Phase, TrainingPhase, ValidationPhase
from fluxcb.testing import testlearner

EVENTS = (HostEvent, StepBegin, StepEnd, EpochEnd, Trigger, FitBegin)
PHASES = (Phase, AbstractTrainingPhase, AbstractValidationPhase, TrainingPhase, ValidationPhase)
MOMENTS = [(event, phase) for event in EVENTS[1:] for phase in PHASES[3:]]


class Chooses(Callback):
    """Have the given handlers in addition to the marked ones."""

    def __init__(self, *chosen: Handler) -> None:
        self.chosen = chosen
        self.said: list[str] = []
        self.asked = 0

    def handlers(self) -> list[Handler]:
        self.asked += 1
        return [*super().handlers(), *self.chosen]

    def run(self, event: Event, phase: Phase, learner: Any) -> None:
        self.said.append(f"run at {type(event).__name__} x {type(phase).__name__}")

    def other(self, event: Event, phase: Phase, learner: Any) -> None:
        self.said.append(f"other at {type(event).__name__} x {type(phase).__name__}")


def at(callback: Callback, event: type[Event], phase: type[Phase]) -> BoundHandler | None:
    [declared], _ = declare([callback])
    return declared.handler(event, phase)


# --- the record -------------------------------------------------------------------------------------------------------


def test_handlers_compare_by_value() -> None:
    handler = Handler(StepEnd, TrainingPhase, "run", access={"step": {"loss": Read()}}, when=EverySteps(3))
    assert handler == Handler(StepEnd, TrainingPhase, "run", {"step": {"loss": Read()}}, (EverySteps(3),))
    assert (handler.when, handler.owner, handler.function, handler.traced) == ((EverySteps(3),), None, None, False)
    assert handler.title() == "(StepEnd, TrainingPhase)"
    assert replace(handler, when=()).when == ()
    assert replace(handler, event=Event).event is HostEvent  # as in `@on`
    with pytest.raises(FrozenInstanceError):
        handler.name = "other"  # type: ignore[misc]


def test_invalid_handler_arguments_raise() -> None:
    with pytest.raises(DeclarationError) as error:
        Handler("StepEnd", Phase, "run")  # type: ignore[arg-type]
    assert str(error.value) == (
        "A handler's event must be a subclass of `Event`, not 'StepEnd'.\n"
        "  where: the handler `run`\n"
        "  fix:   name one of `fluxcb.events`, or a class derived from `fluxcb.events.Event`"
    )
    with pytest.raises(DeclarationError) as error:
        Handler(StepEnd, Phase, "run", when=10)  # type: ignore[arg-type]
    assert str(error.value) == (
        "`when` of a handler must be a schedule, not 10.\n"
        "  where: the handler `run`\n"
        "  fix:   write `when=EverySteps(10)`"
    )
    with pytest.raises(DeclarationError) as error:
        Handler(StepEnd, Phase, "run", access=[Read()])  # type: ignore[arg-type]
    assert str(error.value) == (
        "`access` of a handler must be a mapping, not [Read()].\n"
        "  where: the handler `run`\n"
        '  fix:   write e.g. `access={"step": {"loss": Read()}}`'
    )


# --- overrides of `handlers` ------------------------------------------------------------------------------------------


def test_instance_has_handlers_that_it_returns() -> None:
    callback = Chooses(Handler(StepEnd, Phase, "run"), Handler(StepEnd, TrainingPhase, "other"))
    testlearner(callback, batches=1, validation_batches=1).fit(1)
    assert callback.said == ["other at StepEnd x TrainingPhase", "run at StepEnd x ValidationPhase"]


def test_handlers_method_is_called_once() -> None:
    callback = Chooses(Handler(StepEnd, Phase, "run"))
    fluxcb.check([callback])
    assert callback.asked == 1
    callback.asked = 0
    learner = testlearner(callback)
    built = callback.asked
    learner.fit(2)
    assert (built, callback.asked) == (1, 1)


def test_handler_may_have_own_access_and_schedule() -> None:
    class Narrow(Chooses):
        def stateaccess(self) -> Any:
            return {"step": {"loss": Read()}, "params": Read()}

    callback = Narrow(Handler(StepEnd, Phase, "run", access={"params": Read()}, when=EverySteps(2)))
    found = at(callback, StepEnd, TrainingPhase)
    assert found is not None
    assert (found.access, found.schedules) == ({("params",): Read()}, (EverySteps(2),))
    testlearner(callback, batches=4, validation_batches=0).fit(1)
    assert callback.said == ["run at StepEnd x TrainingPhase"] * 2


def test_two_equally_specific_handlers_raise() -> None:
    callback = Chooses(Handler(HostEvent, TrainingPhase, "run"), Handler(StepEnd, Phase, "other"))
    with pytest.raises(AmbiguityError) as error:
        fluxcb.check([callback])
    assert str(error.value).splitlines()[0] == (
        "`Chooses` has two handlers that fit (StepEnd, TrainingPhase) equally well: "
        "`run` (HostEvent, TrainingPhase) and `other` (StepEnd, Phase)."
    )


def test_same_method_may_match_twice() -> None:
    callback = Chooses(Handler(HostEvent, TrainingPhase, "run"), Handler(StepEnd, Phase, "run"))
    assert at(callback, StepEnd, TrainingPhase) is not None


@pytest.mark.parametrize(("returned", "said"), [(None, "None"), ([StepEnd], f"one with {StepEnd!r}")])
def test_handlers_must_return_handler_objects(returned: Any, said: str) -> None:
    class Wrong(Callback):
        def handlers(self) -> Any:
            return returned

    with pytest.raises(DeclarationError) as error:
        fluxcb.check([Wrong()])
    lines = str(error.value).splitlines()
    assert lines[0] == f"`Wrong.handlers` must return a list of `Handler`, not {said}."
    assert lines[1].startswith("  where: Wrong.handlers  tests/declare/test_instance_handlers.py:")
    assert lines[2:] == ['  fix:   return e.g. `[*super().handlers(), Handler(StepEnd, TrainingPhase, "method")]`']


def test_unknown_method_raises() -> None:
    with pytest.raises(DeclarationError) as error:
        fluxcb.check([Chooses(Handler(StepEnd, Phase, "runn"))])
    lines = str(error.value).splitlines()
    assert lines[0] == (
        "`Chooses.handlers` names the method `runn`, which `Chooses` does not have. Did you mean `run`?"
    )
    assert lines[2:] == ["  fix:   define `def runn(self, event, phase, learner):`"]


# --- wrappers ---------------------------------------------------------------------------------------------------------


def test_wrapper_adds_schedule_to_instance_handlers() -> None:
    callback = Chooses(Handler(StepEnd, Phase, "run", when=EverySteps(2)))
    found = at(every(every(callback, steps=3), epochs=1), StepEnd, TrainingPhase)
    assert found is not None
    assert found.function == callback.run
    assert [str(schedule) for schedule in found.schedules] == ["every 2 steps", "every 3 steps", "every epoch"]


def test_wrapper_may_change_handlers_of_wrapped_callback() -> None:
    class InTraining(ProxyCallback):
        def handlers(self) -> list[Handler]:
            return [replace(handler, phase=AbstractTrainingPhase) for handler in super().handlers()]

    callback = Chooses(Handler(StepEnd, Phase, "run"))
    testlearner(InTraining(callback), batches=1, validation_batches=1).fit(1)
    assert callback.said == ["run at StepEnd x TrainingPhase"]


def test_callback_that_holds_callback_is_not_wrapper() -> None:
    class Holds(Chooses):
        def __init__(self, callback: Callback) -> None:
            super().__init__(Handler(StepEnd, Phase, "run"))
            self.callback = callback

    outer, inner = Holds(Chooses()), Chooses(Handler(StepEnd, Phase, "other"))
    outer.callback = inner
    found = at(outer, StepEnd, TrainingPhase)
    assert found is not None
    assert found.function == outer.run


def test_forward_runs_most_specific_handler() -> None:
    class Twice(ProxyCallback):
        @on
        def again(self, event: StepEnd, phase: TrainingPhase, learner: Any) -> None:
            self.forward(event, phase, learner)
            self.forward(event, phase, learner)
            self.forward(Trigger(), phase, learner)

    callback = Chooses(Handler(HostEvent, Phase, "run"), Handler(StepEnd, Phase, "other"))
    testlearner(Twice(callback), batches=1, validation_batches=0).fit(1)
    said = [line for line in callback.said if "StepEnd" in line]
    assert said == ["other at StepEnd x TrainingPhase"] * 2


def test_before_train_replaces_handler_of_all_events() -> None:
    callback = Chooses(Handler(HostEvent, TrainingPhase, "run", when=Predicate(lambda learner: False)))
    wrapped = PeriodicTrigger(callback, every_k_steps=2, before_train=True)
    begin, trigger = at(wrapped, FitBegin, TrainingPhase), at(wrapped, Trigger, TrainingPhase)
    assert begin is not None
    assert trigger is not None
    assert (begin.function, begin.schedules) == (wrapped.begin, ())
    assert (trigger.function, trigger.schedules) == (callback.run, (EverySteps(2),))


PAIRS = st.tuples(st.sampled_from(EVENTS), st.sampled_from(PHASES))


def most_specific(handlers: list[Handler], event: type[Event], phase: type[Phase]) -> list[Handler]:
    """Return the handlers that match a moment and are not more general than another match."""
    fitting = [h for h in handlers if event in subclasses(h.event) and phase in subclasses(h.phase)]
    return [
        h
        for h in fitting
        if all(o is h or not (o.event in subclasses(h.event) and o.phase in subclasses(h.phase)) for o in fitting)
    ]


def subclasses(cls: type) -> set[type]:
    return {cls}.union(*map(subclasses, cls.__subclasses__()))


@given(st.lists(PAIRS, max_size=5, unique=True), st.lists(PAIRS, max_size=4, unique=True))
def test_own_handlers_replace_wrapped_handlers_of_same_moment(wrapped: list[Any], own: list[Any]) -> None:
    inner = [Handler(*pair, "inner", when=EverySteps(i + 1)) for i, pair in enumerate(wrapped)]
    outer = [Handler(*pair, "outer", when=EverySteps(i + 100)) for i, pair in enumerate(own)]
    both = in_place_of(inner, outer, ProxyCallback)
    for event, phase in MOMENTS:
        first, mine = most_specific(inner, event, phase), most_specific(outer, event, phase)
        if len(first) > 1 or len(mine) > 1:  # ambiguous; here both have one name, so that it is no error
            continue
        found = handler_at(both, event, phase, ProxyCallback)
        shown = None if found is None else (found.name, found.when)
        if mine:
            assert shown == ("outer", (*(when for h in first for when in h.when), *mine[0].when))
        else:
            assert shown == (("inner", first[0].when) if first else None)
