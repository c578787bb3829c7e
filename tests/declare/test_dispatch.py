"""Which handler runs at which moment: annotations, inheritance, late registration, and what is ambiguous."""

from __future__ import annotations

import functools
from typing import Any, Union

import pytest

from fluxcb import At, Callback, EverySteps, Read, on
from fluxcb._check.preflight import build_graph
from fluxcb._declare.dispatch import HandlerTable
from fluxcb._errors import AmbiguityError, DeclarationError
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
    AbstractValidationPhase,
    LossTrainingPhase,
    Phase,
    TrainingPhase,
    ValidationPhase,
)


def handled(cls: type[Callback]) -> list[str]:
    return [f"{entry.title()} {entry.name}" for entry in cls.on.entries.values()]


def name_at(cls: type[Callback], event: type[Event], phase: type[Phase] = TrainingPhase) -> str | None:
    entry = cls.on.lookup(event, phase)
    return None if entry is None else entry.name


class Speaking(Callback):
    """Remembers which of its handlers ran."""

    def __init__(self) -> None:
        self.said: list[str] = []


# --- what `@on` reads -------------------------------------------------------------------------------------------------


def test_both_annotations_decide() -> None:
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


def test_unions_of_either_spelling_stand_for_each_of_their_pairs() -> None:
    class Joined(Callback):
        @on
        def run(
            self, event: StepBegin | StepEnd, phase: Union[TrainingPhase, ValidationPhase], learner: Any
        ) -> None: ...  # noqa: UP007

    assert handled(Joined) == [
        "(StepBegin, TrainingPhase) run",
        "(StepBegin, ValidationPhase) run",
        "(StepEnd, TrainingPhase) run",
        "(StepEnd, ValidationPhase) run",
    ]


def test_missing_annotations_mean_the_base_types_and_event_means_host_event() -> None:
    class Bare(Callback):
        @on
        def run(self, event, phase, learner): ...

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


def test_traced_handlers_name_traced_events() -> None:
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


def test_classes_of_the_function_around_a_nested_function_resolve() -> None:
    class Mine(HostEvent): ...

    def make() -> type[Callback]:
        class Local(Callback):
            @on
            def run(self, event: Mine, phase, learner) -> None: ...

        return Local

    assert handled(make()) == ["(Mine, Phase) run"]


def test_explicit_pairs_need_no_annotations_and_outweigh_them() -> None:
    class Explicit(Callback):
        @on(StepEnd, TrainingPhase)
        def one(self, event, phase, learner): ...

        @on(EpochBegin | EpochEnd)
        def two(self, event: StepBegin, phase: ValidationPhase, learner: Any) -> None: ...

        @on((FitBegin, FitEnd), AbstractTrainingPhase)
        def three(self, event, phase, learner): ...

    assert handled(Explicit) == [
        "(StepEnd, TrainingPhase) one",
        "(EpochBegin, Phase) two",
        "(EpochEnd, Phase) two",
        "(FitBegin, AbstractTrainingPhase) three",
        "(FitEnd, AbstractTrainingPhase) three",
    ]


def test_a_handler_keeps_its_own_access_and_schedule() -> None:
    class Narrow(Callback):
        @on(access={"step": {"loss": Read()}}, when=EverySteps(10))
        def run(self, event: StepEnd, phase, learner) -> None: ...

    (entry,) = Narrow().handlers()
    assert (entry.access, entry.when) == ({"step": {"loss": Read()}}, EverySteps(10))
    owner, found, schedules = Narrow().entry_for(StepEnd, TrainingPhase) or (None, None, None)
    assert (type(owner), found, schedules) == (Narrow, entry, (EverySteps(10),))
    assert Narrow().entry_for(EpochEnd, TrainingPhase) is None


# --- calling ----------------------------------------------------------------------------------------------------------


def test_calling_on_runs_the_handler_of_that_moment_or_nothing() -> None:
    class Talker(Speaking):
        @on
        def step(self, event: StepEnd, phase: TrainingPhase, learner: str) -> None:
            self.said.append(f"{event} {phase} {learner}")

    talker = Talker()
    talker.on(StepEnd(), TrainingPhase(), "learner")
    talker.on(StepEnd(), ValidationPhase(), "learner")
    talker.on(StepBegin(), TrainingPhase(), "learner")
    assert talker.said == ["StepEnd TrainingPhase() learner"]


def test_the_table_is_functools_own_and_its_registry_can_be_looked_at() -> None:
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


def test_pairs_are_types_made_once_that_derive_from_the_pairs_one_step_up() -> None:
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
def test_pairs_are_of_an_event_class_and_a_phase_class(parts: Any, said: str, refused: Any) -> None:
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


def test_siblings_have_tables_of_their_own() -> None:
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


def test_a_subclass_overrides_by_pair() -> None:
    class Sub(Base):
        @on
        def other_name(self, event: StepEnd, phase: Phase, learner: Any) -> None: ...

    assert handled(Sub) == ["(StepEnd, Phase) other_name", "(EpochEnd, Phase) epoch"]


def test_a_decorated_method_of_the_same_name_replaces_the_handler_whatever_its_pair() -> None:
    class Sub(Base):
        @on
        def step(self, event: FitBegin, phase: Phase, learner: Any) -> None:
            self.said.append("Sub.step")

    assert handled(Sub) == ["(EpochEnd, Phase) epoch", "(FitBegin, Phase) step"]
    sub = Sub()
    sub.on(StepEnd(), TrainingPhase(), None)
    sub.on(FitBegin(), TrainingPhase(), None)
    assert sub.said == ["Sub.step"]


def test_an_undecorated_method_of_the_same_name_replaces_the_handler_too() -> None:
    class Sub(Base):
        def step(self, event: Any, phase: Any, learner: Any) -> None:
            self.said.append("Sub.step")
            super().step(event, phase, learner)

    assert handled(Sub) == handled(Base)
    sub = Sub()
    sub.on(StepEnd(), TrainingPhase(), None)
    assert sub.said == ["Sub.step", "Base.step"]


def test_a_name_set_to_none_takes_the_handler_away() -> None:
    class Sub(Base):
        step = None  # type: ignore[assignment]

    assert handled(Sub) == ["(EpochEnd, Phase) epoch"]


def test_multiple_inheritance_follows_the_mro() -> None:
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


def test_a_name_redefined_by_an_earlier_base_is_not_called_for_the_later_bases_pair() -> None:
    class First(Callback):
        @on
        def run(self, event: EpochEnd, phase: Phase, learner: Any) -> None: ...

    class Second(Callback):
        @on
        def run(self, event: StepEnd, phase: Phase, learner: Any) -> None: ...

    class Joined(First, Second): ...

    assert handled(Joined) == ["(EpochEnd, Phase) run"]


def test_a_mixin_that_is_no_callback_brings_its_handlers() -> None:
    class Mixin:
        @on
        def run(self, event: StepEnd, phase: Phase, learner: Any) -> None: ...

    class Mixed(Mixin, Callback): ...

    assert handled(Mixed) == ["(StepEnd, Phase) run"]


# --- registering from outside -----------------------------------------------------------------------------------------


def test_late_registration_reaches_subclasses_but_not_those_that_know_better() -> None:
    class Root(Speaking): ...

    class Silent(Root): ...

    class Knowing(Root):
        @on
        def own(self, event: StepEnd, phase: TrainingPhase, learner: Any) -> None:
            self.said.append("own")

    @Root.on.register(StepEnd, TrainingPhase)
    def late(self: Any, event: Any, phase: Any, learner: Any) -> None:
        self.said.append("late")

    said = {}
    for cls in (Root, Silent, Knowing):
        instance = cls()
        instance.on(StepEnd(), TrainingPhase(), None)
        instance.on(StepEnd(), ValidationPhase(), None)
        said[cls.__name__] = instance.said
    assert said == {"Root": ["late"], "Silent": ["late"], "Knowing": ["own"]}
    assert handled(Speaking) == []


def test_late_registration_leaves_out_the_phase_and_takes_access_and_schedule() -> None:
    class Root(Callback): ...

    @Root.on.register(StepEnd, access={}, when=EverySteps(3))
    def late(self: Any, event: Any, phase: Any, learner: Any) -> None: ...

    (entry,) = Root().handlers()
    assert (entry.title(), entry.access, entry.when) == ("(StepEnd, Phase)", {}, EverySteps(3))


def test_registering_a_pair_again_replaces_it() -> None:
    class Root(Callback):
        @on
        def early(self, event: StepEnd, phase: Phase, learner: Any) -> None: ...

    @Root.on.register(StepEnd)
    def late(self: Any, event: Any, phase: Any, learner: Any) -> None: ...

    @Root.on.register(StepEnd)
    def later(self: Any, event: Any, phase: Any, learner: Any) -> None: ...

    assert handled(Root) == ["(StepEnd, Phase) later"]


def test_an_ambiguous_registration_changes_nothing_even_if_only_a_subclass_minds(refused: Any) -> None:
    class Root(Callback): ...

    class Sub(Root):
        @on  # sub
        def steps(self, event: StepEnd, phase: Phase, learner: Any) -> None: ...

    with refused(
        AmbiguityError,
        "`Sub` has two handlers that fit (StepEnd, TrainingPhase) equally well: "
        "`late` (HostEvent, TrainingPhase) and `steps` (StepEnd, Phase).\n"
        "  where: Sub.late  <@late>\n"
        "         Sub.steps  <@sub>\n"
        "  why:   neither is more specific in both event and phase, so which one runs would be chance\n"
        "  fix:   add a handler for `@on(StepEnd, TrainingPhase)` that says what should happen there",
    ):

        @Root.on.register(HostEvent, TrainingPhase)  # late
        def late(self: Any, event: Any, phase: Any, learner: Any) -> None: ...

    assert (handled(Root), handled(Sub)) == ([], ["(StepEnd, Phase) steps"])
    assert set(Root.on.registry) == {object}


# --- ambiguity --------------------------------------------------------------------------------------------------------


def test_two_equally_specific_handlers_are_refused_when_the_class_is_defined(refused: Any) -> None:
    with refused(
        AmbiguityError,
        "`Torn` has two handlers that fit (StepEnd, TrainingPhase) equally well: "
        "`steps` (StepEnd, Phase) and `training` (HostEvent, TrainingPhase).\n"
        "  where: Torn.steps  <@torn-steps>\n"
        "         Torn.training  <@torn-training>\n"
        "  why:   neither is more specific in both event and phase, so which one runs would be chance\n"
        "  fix:   add a handler for `@on(StepEnd, TrainingPhase)` that says what should happen there",
    ):

        class Torn(Callback):
            @on  # torn-steps
            def steps(self, event: StepEnd, phase: Phase, learner: Any) -> None: ...

            @on  # torn-training
            def training(self, event: Event, phase: TrainingPhase, learner: Any) -> None: ...


def test_a_handler_for_the_moment_itself_settles_it() -> None:
    class Settled(Callback):
        @on
        def steps(self, event: StepEnd, phase: Phase, learner: Any) -> None: ...

        @on
        def training(self, event: Event, phase: TrainingPhase, learner: Any) -> None: ...

        @on
        def both(self, event: StepEnd, phase: TrainingPhase, learner: Any) -> None: ...

    assert name_at(Settled, StepEnd, TrainingPhase) == "both"
    assert name_at(Settled, StepEnd, ValidationPhase) == "steps"
    assert name_at(Settled, FitBegin, TrainingPhase) == "training"


def test_a_phase_defined_later_can_make_a_class_ambiguous_and_the_check_finds_it(refused: Any) -> None:
    class Split(Callback):
        @on  # split-training
        def training(self, event: StepEnd, phase: AbstractTrainingPhase, learner: Any) -> None: ...

        @on  # split-validation
        def validation(self, event: StepEnd, phase: AbstractValidationPhase, learner: Any) -> None: ...

    class BothPhase(TrainingPhase, ValidationPhase): ...

    text = (
        "`Split` has two handlers that fit (StepEnd, BothPhase) equally well: "
        "`training` (StepEnd, AbstractTrainingPhase) and `validation` (StepEnd, AbstractValidationPhase).\n"
        "  where: Split.training  <@split-training>\n"
        "         Split.validation  <@split-validation>\n"
        "  why:   neither is more specific in both event and phase, so which one runs would be chance\n"
        "  fix:   add a handler for `@on(StepEnd, BothPhase)` that says what should happen there"
    )
    build_graph([Split()], [TrainingPhase, ValidationPhase])
    with refused(AmbiguityError, text):
        build_graph([Split()], [BothPhase])
    with refused(AmbiguityError, text):
        Split().on(StepEnd(), BothPhase(), None)


def test_one_handler_that_fits_a_phase_of_two_bases_twice_is_not_ambiguous() -> None:
    class Once(Callback):
        @on
        def run(self, event: StepEnd, phase: TrainingPhase | ValidationPhase, learner: Any) -> None: ...

    class BothPhase(TrainingPhase, ValidationPhase): ...

    assert name_at(Once, StepEnd, BothPhase) == "run"


def test_events_and_phases_of_ones_own_dispatch_like_the_built_in_ones() -> None:
    class DrawEvent(HostEvent): ...

    class FineDraw(DrawEvent): ...

    class GANPhase(AbstractTrainingPhase): ...

    class Drawer(Callback):
        @on
        def draw(self, event: DrawEvent, phase: GANPhase, learner: Any) -> None: ...

        @on
        def everything(self, event: Event, phase: Phase, learner: Any) -> None: ...

    assert name_at(Drawer, FineDraw, GANPhase) == "draw"
    assert name_at(Drawer, FineDraw, TrainingPhase) == "everything"
    assert At[FineDraw, GANPhase].__name__ == "At[FineDraw, GANPhase]"
