"""Which handler runs at which moment: annotations, inheritance, and overrides."""

from __future__ import annotations

import functools
from typing import Any, Union

import pytest

from fluxcb import At, Callback, EverySteps, Read, on
from fluxcb._declare.dispatch import HandlerTable
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
    UpdateEnd,
)
from fluxcb.phases import (
    AbstractTrainingPhase,
    LossTrainingPhase,
    Phase,
    TrainingPhase,
    ValidationPhase,
)

Either = Union[TrainingPhase, ValidationPhase]  # noqa: UP007 - the older spelling is read, too


def handled(cls: type[Callback]) -> list[str]:
    return [f"{entry.title()} {entry.name}" for entry in cls.on.entries.values()]


def name_at(cls: type[Callback], event: type[Event], phase: type[Phase] = TrainingPhase) -> str | None:
    entry = cls.on.lookup(event, phase)
    return None if entry is None else entry.name


class Speaking(Callback):
    """Record which of its handlers ran."""

    def __init__(self) -> None:
        self.said: list[str] = []


# --- what `@on` reads -------------------------------------------------------------------------------------------------


def test_handler_with_both_annotations_is_selected() -> None:
    class Both(Callback):
        @on
        def any_step_end(self, event: StepEnd, phase: Phase, learner: Any) -> None: ...

        @on
        def training_step_end(self, event: StepEnd, phase: TrainingPhase, learner: Any) -> None: ...

    assert handled(Both) == ["(StepEnd, Phase) any_step_end", "(StepEnd, TrainingPhase) training_step_end"]
    assert name_at(Both, StepEnd, TrainingPhase) == "training_step_end"
    assert name_at(Both, StepEnd, LossTrainingPhase) == "training_step_end"
    assert name_at(Both, StepEnd, ValidationPhase) == "any_step_end"
    assert name_at(Both, StepBegin, TrainingPhase) is None


def test_union_annotations_register_each_pair() -> None:
    class Joined(Callback):
        @on
        def run(self, event: StepBegin | StepEnd, phase: Either, learner: Any) -> None: ...

    assert handled(Joined) == [
        "(StepBegin, TrainingPhase) run",
        "(StepBegin, ValidationPhase) run",
        "(StepEnd, TrainingPhase) run",
        "(StepEnd, ValidationPhase) run",
    ]


def test_base_types_and_missing_annotations_of_phases() -> None:
    class Bare(Callback):
        @on
        def run(self, event: HostEvent, phase, learner): ...

    class Based(Callback):
        @on
        def run(self, event: Event, phase: Phase, learner: Any) -> None: ...

    class Explicit(Callback):
        @on(Event)
        def run(self, event, phase, learner): ...

    for cls in (Bare, Based, Explicit):
        assert handled(cls) == ["(HostEvent, Phase) run"]
        assert name_at(cls, FitEnd) == "run"
        assert name_at(cls, BackwardEnd) is None


def test_traced_and_host_events_select_handlers() -> None:
    class Both(Callback):
        @on
        def inside(self, event: TracedEvent, phase: Phase, learner: Any) -> None: ...

        @on
        def outside(self, event: HostEvent, phase: Phase, learner: Any) -> None: ...

    assert [(entry.name, entry.traced) for entry in Both().handlers()] == [("inside", True), ("outside", False)]
    assert (name_at(Both, UpdateEnd), name_at(Both, StepEnd)) == ("inside", "outside")


def test_local_classes_and_string_annotations_resolve() -> None:
    class Mine(HostEvent): ...

    class MyPhase(TrainingPhase): ...

    class Local(Callback):
        @on
        def run(self, event: Mine | StepEnd, phase: MyPhase, learner: Any) -> None: ...

        @on
        def quoted(self, event: "EpochEnd", phase: "MyPhase", learner: Any) -> None: ...  # noqa: UP037

    assert handled(Local) == ["(Mine, MyPhase) run", "(StepEnd, MyPhase) run", "(EpochEnd, MyPhase) quoted"]


def test_classes_of_enclosing_function_resolve() -> None:
    class Mine(HostEvent): ...

    def make() -> type[Callback]:
        class Local(Callback):
            @on
            def run(self, event: Mine, phase, learner) -> None: ...

        return Local

    assert handled(make()) == ["(Mine, Phase) run"]


def test_explicit_pair() -> None:
    class Explicit(Callback):
        @on(StepEnd, TrainingPhase)
        def one(self, event, phase, learner): ...

        @on(EpochBegin | EpochEnd)
        def two(self, event, phase: Any, learner): ...

        @on((FitBegin, FitEnd), AbstractTrainingPhase)
        def three(self, event, phase, learner): ...

    assert handled(Explicit) == [
        "(StepEnd, TrainingPhase) one",
        "(EpochBegin, Phase) two",
        "(EpochEnd, Phase) two",
        "(FitBegin, AbstractTrainingPhase) three",
        "(FitEnd, AbstractTrainingPhase) three",
    ]


def test_annotation_names_the_phase_that_the_decorator_leaves_out() -> None:
    class Mixed(Callback):
        @on(StepEnd)
        def one(self, event, phase: ValidationPhase, learner): ...

        @on(EpochEnd, when=EverySteps(2))
        def two(self, event: Event, phase: TrainingPhase | ValidationPhase, learner): ...

        @on(StepEnd, TrainingPhase)
        def three(self, event: HostEvent, phase: AbstractTrainingPhase, learner): ...

        @on(StepBegin)
        def four(self, event: StepBegin, phase: OnlyForTypeCheckers, learner): ...  # noqa: F821

    assert handled(Mixed) == [
        "(StepEnd, ValidationPhase) one",
        "(EpochEnd, TrainingPhase) two",
        "(EpochEnd, ValidationPhase) two",
        "(StepEnd, TrainingPhase) three",
        "(StepBegin, Phase) four",
    ]


def test_decorator_that_contradicts_an_annotation_raises() -> None:
    with pytest.raises(DeclarationError) as raised:

        class Phases(Callback):
            @on(EpochEnd, TrainingPhase)
            def run(self, event, phase: ValidationPhase, learner): ...

    assert "Phases.run` names TrainingPhase, but its `phase` is annotated as ValidationPhase." in str(raised.value)
    assert str(raised.value).endswith("fix:   name the same class in both, or remove the annotation of `phase`")
    with pytest.raises(
        DeclarationError, match=r"names EpochBegin, but its `event` is annotated as EpochEnd \| StepEnd."
    ):

        class Events(Callback):
            @on(EpochBegin | StepEnd, Phase)
            def run(self, event: EpochEnd | StepEnd, phase, learner): ...


def test_handler_keeps_its_access_and_schedule() -> None:
    class Narrow(Callback):
        @on(access={"step": {"loss": Read()}}, when=EverySteps(10))
        def run(self, event: StepEnd, phase, learner) -> None: ...

    narrow = Narrow()
    (handler,) = narrow.handlers()
    assert (handler.access, handler.when, handler.owner) == ({"step": {"loss": Read()}}, (EverySteps(10),), None)
    assert handler.bind(narrow) == narrow.run
    assert Narrow.on.lookup(StepEnd, TrainingPhase) is handler
    assert Narrow.on.lookup(EpochEnd, TrainingPhase) is None


# --- calling ----------------------------------------------------------------------------------------------------------


def test_calling_on_runs_most_specific_handler_if_any() -> None:
    class Talker(Speaking):
        @on
        def step(self, event: StepEnd, phase: TrainingPhase, learner: str) -> None:
            self.said.append(f"{event} {phase} {learner}")

    talker = Talker()
    talker.on(StepEnd(), TrainingPhase(), "learner")
    talker.on(StepEnd(), ValidationPhase(), "learner")
    talker.on(StepBegin(), TrainingPhase(), "learner")
    assert talker.said == ["StepEnd TrainingPhase() learner"]


def test_table_is_singledispatch_with_registry() -> None:
    class One(Callback):
        @on
        def run(self, event: StepEnd, phase: TrainingPhase, learner: Any) -> None: ...

    assert isinstance(One.on, functools.singledispatchmethod)
    assert isinstance(One.on, HandlerTable)
    assert set(One.on.registry) == {object, At[StepEnd, TrainingPhase]}
    assert One.on.dispatcher.dispatch(At[StepEnd, LossTrainingPhase]) is One.on.registry[At[StepEnd, TrainingPhase]]
    said: list[Any] = []
    One.run = lambda self, *given: said.append(given)  # type: ignore[method-assign]
    One.on.registry[At[StepEnd, TrainingPhase]](One(), 1, 2, 3)
    assert said == [(1, 2, 3)]


def test_pair_types_are_cached_and_derive_from_parents() -> None:
    pair = At[StepEnd, TrainingPhase]
    assert pair is At[StepEnd, TrainingPhase]
    assert pair.__name__ == "At[StepEnd, TrainingPhase]"
    assert (pair.event, pair.phase) == (StepEnd, TrainingPhase)
    assert pair.__bases__ == (At[HostEvent, TrainingPhase], At[StepEnd, AbstractTrainingPhase])
    assert issubclass(pair, At[Event, Phase])
    assert At[Event, Phase].__bases__ == (At,)
    assert not issubclass(pair, At[StepEnd, ValidationPhase])


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        (StepEnd, "the class `StepEnd`"),
        ((TrainingPhase, StepEnd), "the class `TrainingPhase`, the class `StepEnd`"),
        ((StepEnd, TrainingPhase()), "the class `StepEnd`, TrainingPhase()"),
        ((StepEnd, Phase, Phase), "the class `StepEnd`, the class `Phase`, the class `Phase`"),
    ],
)
def test_pairs_require_event_and_phase_classes(parts: Any, said: str, refused: Any) -> None:
    with refused(
        DeclarationError,
        f"`At` takes an event class and a phase class, not {said}.\n  fix:   write e.g. `At[StepEnd, TrainingPhase]`",
    ):
        At[parts]


# --- inheritance ------------------------------------------------------------------------------------------------------


class Base(Speaking):
    @on
    def step(self, event: StepEnd, phase: Phase, learner: Any) -> None:
        self.said.append("Base.step")

    @on
    def epoch(self, event: EpochEnd, phase: Phase, learner: Any) -> None:
        self.said.append("Base.epoch")


def test_sibling_classes_have_separate_tables() -> None:
    class Left(Base):
        @on
        def left(self, event: FitBegin, phase: Phase, learner: Any) -> None: ...

    class Right(Base):
        @on
        def right(self, event: FitEnd, phase: Phase, learner: Any) -> None: ...

    base = ["(StepEnd, Phase) step", "(EpochEnd, Phase) epoch"]
    assert handled(Base) == base
    assert handled(Left) == [*base, "(FitBegin, Phase) left"]
    assert handled(Right) == [*base, "(FitEnd, Phase) right"]
    assert handled(Callback) == []


@pytest.mark.filterwarnings("ignore:At .* instead of:UserWarning")
def test_subclass_overrides_same_pair() -> None:
    class Sub(Base):
        @on
        def other_name(self, event: StepEnd, phase: Phase, learner: Any) -> None: ...

    assert handled(Sub) == ["(StepEnd, Phase) other_name", "(EpochEnd, Phase) epoch"]


def test_marked_method_of_same_name_replaces_handler() -> None:
    class Sub(Base):
        @on
        def step(self, event: FitBegin, phase: Phase, learner: Any) -> None:
            self.said.append("Sub.step")

    assert handled(Sub) == ["(EpochEnd, Phase) epoch", "(FitBegin, Phase) step"]
    sub = Sub()
    sub.on(StepEnd(), TrainingPhase(), None)
    sub.on(FitBegin(), TrainingPhase(), None)
    assert sub.said == ["Sub.step"]


def test_unmarked_method_of_same_name_replaces_handler() -> None:
    class Sub(Base):
        def step(self, event: Any, phase: Any, learner: Any) -> None:
            self.said.append("Sub.step")
            super().step(event, phase, learner)

    assert handled(Sub) == handled(Base)
    sub = Sub()
    sub.on(StepEnd(), TrainingPhase(), None)
    assert sub.said == ["Sub.step", "Base.step"]


def test_assigning_none_removes_handler() -> None:
    class Sub(Base):
        step = None  # type: ignore[assignment]

    assert handled(Sub) == ["(EpochEnd, Phase) epoch"]


@pytest.mark.filterwarnings("ignore:At .* instead of:UserWarning")
def test_multiple_inheritance_follows_mro() -> None:
    class Left(Base):
        @on
        def left(self, event: FitBegin, phase: Phase, learner: Any) -> None: ...

    class Right(Base):
        @on
        def right_step(self, event: StepEnd, phase: Phase, learner: Any) -> None: ...

        @on
        def right(self, event: FitBegin, phase: Phase, learner: Any) -> None: ...

    class Diamond(Left, Right): ...

    # Left comes first, but what it merely inherits from Base stands behind Right.
    assert [cls.__name__ for cls in Diamond.__mro__[:4]] == ["Diamond", "Left", "Right", "Base"]
    assert name_at(Diamond, StepEnd) == "right_step"
    assert name_at(Diamond, FitBegin) == "left"
    assert name_at(Diamond, EpochEnd) == "epoch"


def test_handler_overridden_in_earlier_base_is_not_called() -> None:
    class First(Callback):
        @on
        def run(self, event: EpochEnd, phase: Phase, learner: Any) -> None: ...

    class Second(Callback):
        @on
        def run(self, event: StepEnd, phase: Phase, learner: Any) -> None: ...

    class Joined(First, Second): ...

    assert handled(Joined) == ["(EpochEnd, Phase) run"]


def test_mixin_contributes_handlers() -> None:
    class Mixin:
        @on
        def run(self, event: StepEnd, phase: Phase, learner: Any) -> None: ...

    class Mixed(Mixin, Callback): ...

    assert handled(Mixed) == ["(StepEnd, Phase) run"]
