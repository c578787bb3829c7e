"""A method that is written like a handler but lacks `@on` is refused; helpers and overrides are left alone."""

from __future__ import annotations

from typing import Any

import pytest

from fluxcb import Callback, DeclarationError, on
from fluxcb.callbacks import ProxyCallback
from fluxcb.events import EpochEnd, Event, HostEvent, StepBegin, StepEnd
from fluxcb.phases import AbstractTrainingPhase, Phase, TrainingPhase

WHY = "  why:   the engine calls only methods that are marked, so this method would never run\n"


def told(name: str, events: str, mark: str, parameter: str = "event") -> str:
    method = name.split(".")[1]
    return (
        f"`{name}` is written like a handler of {events}, but it is not marked with `@on`.\n"
        f"  where: {name}  <@{mark}>\n{WHY}"
        f"  fix:   put `@on` above `def {method}`\n"
        f"     or: annotate the parameter as `{parameter}: Event` if other code calls this method"
    )


def test_a_handler_without_on(refused: Any) -> None:
    with refused(DeclarationError, told("Printer.show", "StepEnd", "plain")):

        class Printer(Callback):
            def show(self, event: StepEnd, phase: TrainingPhase, learner: Any) -> None: ...  # plain


def test_a_union_of_events_of_which_one_is_local(refused: Any) -> None:
    class Mine(HostEvent):
        pass

    with refused(DeclarationError, told("Printer.show", "Mine | StepEnd", "union", "moment")):

        class Printer(Callback):
            def show(self, moment: Mine | StepEnd, phase: Any, learner: Any) -> None: ...  # union


def test_a_quoted_annotation(refused: Any) -> None:
    with refused(DeclarationError, told("Printer.show", "StepEnd", "quoted")):

        class Printer(Callback):
            def show(self, event: "StepEnd", phase, learner): ...  # noqa: UP037  # quoted


def test_a_handler_without_on_and_without_a_learner(refused: Any) -> None:
    with refused(DeclarationError, told("Printer.show", "StepEnd", "short")):

        class Printer(Callback):
            def show(self, event: StepEnd, phase: TrainingPhase) -> None: ...  # short


def test_a_builtin_of_the_same_name_is_no_call_of_the_method(refused: Any) -> None:
    with refused(DeclarationError, told("Printer.print", "StepEnd", "builtin")):

        class Printer(Callback):
            @on
            def other(self, event: EpochEnd, phase: Phase, learner: Any) -> None:
                print(learner.other.print)

            def print(self, event: StepEnd, phase: Phase, learner: Any) -> None: ...  # builtin


def test_the_first_fix_works() -> None:
    class Printer(Callback):
        @on
        def show(self, event: StepEnd, phase: TrainingPhase, learner: Any) -> None: ...

    assert [entry.title() for entry in Printer().handlers()] == ["(StepEnd, TrainingPhase)"]


def test_the_second_fix_works() -> None:
    class Printer(Callback):
        def show(self, event: Event, phase: TrainingPhase, learner: Any) -> None: ...

    assert Printer().handlers() == []


def test_helpers_that_a_method_calls() -> None:
    class Base(Callback):
        @on
        def begin(self, event: StepBegin, phase: Phase, learner: Any) -> None:
            self.direct(event, phase, learner)

        def direct(self, event: StepBegin, phase: Phase, learner: Any) -> None:
            for call in [lambda: self.nested(event, phase, learner), self.inherited]:
                call()

        def nested(self, event: StepBegin, phase: Phase, learner: Any) -> None: ...

    class Sub(Base):
        def inherited(self, event: StepBegin, phase: Phase, learner: Any) -> None: ...

    assert [entry.name for entry in Sub().handlers()] == ["begin"]


def test_an_undecorated_override_is_a_handler() -> None:
    class Base(Callback):
        @on
        def show(self, event: StepEnd, phase: Phase, learner: Any) -> None: ...

    class Sub(Base):
        def show(self, event: StepEnd, phase: Phase, learner: Any) -> None: ...

    assert Sub.on.lookup(StepEnd, TrainingPhase) is Base.on.lookup(StepEnd, TrainingPhase)


def test_a_class_that_chooses_its_handlers_itself() -> None:
    class Chooses(ProxyCallback):
        def handlers(self) -> list[Any]:
            return []

        def begin(self, event: StepEnd, phase: Phase, learner: Any) -> None: ...

    assert Chooses.on.entries == {}


@pytest.mark.parametrize("annotation", ["Event", "Any", "type[StepEnd]", "'NoSuchName'", "StepEnd | None", "str"])
def test_annotations_that_name_no_event(annotation: str) -> None:
    namespace: dict[str, Any] = dict(globals())
    exec(  # the annotation is the parameter of this test
        "from __future__ import annotations\n"
        "class Helps(Callback):\n"
        f"    def show(self, event: {annotation}, phase: AbstractTrainingPhase, learner): ...\n",
        namespace,
    )
    assert namespace["Helps"]().handlers() == []


def test_a_method_with_another_signature() -> None:
    class Helps(Callback):
        def note(self, event: StepEnd, learner: Any) -> None: ...

        def add(self, event: StepEnd, name: Any, learner: Any, value: float) -> None: ...

        def of(self, phase: AbstractTrainingPhase, learner: Any) -> None: ...

        @staticmethod
        def plain(event: StepEnd, phase: Phase, learner: Any) -> None: ...

    assert Helps().handlers() == []
