"""Handlers that are registered from outside, and ambiguous handlers."""

from __future__ import annotations

from typing import Any

from fluxcb import At, Callback, EverySteps, on
from fluxcb._check.preflight import checked_graph
from fluxcb._errors import AmbiguityError
from fluxcb.events import (
    Event,
    FitBegin,
    HostEvent,
    StepEnd,
)
from fluxcb.phases import (
    AbstractTrainingPhase,
    AbstractValidationPhase,
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
    """Record which of its handlers ran."""

    def __init__(self) -> None:
        self.said: list[str] = []


# --- registering from outside -----------------------------------------------------------------------------------------


def test_registration_reaches_subclasses_without_own_handler() -> None:
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


def test_registration_without_phase_with_access_and_schedule() -> None:
    class Root(Callback): ...

    @Root.on.register(StepEnd, access={}, when=EverySteps(3))
    def late(self: Any, event: Any, phase: Any, learner: Any) -> None: ...

    (handler,) = Root().handlers()
    assert (handler.title(), handler.access, handler.when) == ("(StepEnd, Phase)", {}, (EverySteps(3),))


def test_registering_same_pair_replaces_handler() -> None:
    class Root(Callback):
        @on
        def early(self, event: StepEnd, phase: Phase, learner: Any) -> None: ...

    @Root.on.register(StepEnd)
    def late(self: Any, event: Any, phase: Any, learner: Any) -> None: ...

    @Root.on.register(StepEnd)
    def later(self: Any, event: Any, phase: Any, learner: Any) -> None: ...

    assert handled(Root) == ["(StepEnd, Phase) later"]


def test_ambiguous_registration_changes_nothing(refused: Any) -> None:
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
        "  why:   neither handler is more specific in both event and phase, so the choice would be arbitrary\n"
        "  fix:   add a handler for `@on(StepEnd, TrainingPhase)`, which takes precedence over both",
    ):

        @Root.on.register(HostEvent, TrainingPhase)  # late
        def late(self: Any, event: Any, phase: Any, learner: Any) -> None: ...

    assert (handled(Root), handled(Sub)) == ([], ["(StepEnd, Phase) steps"])
    assert set(Root.on.registry) == {object}


# --- ambiguity --------------------------------------------------------------------------------------------------------


def test_two_equally_specific_handlers_raise_at_class_definition(refused: Any) -> None:
    with refused(
        AmbiguityError,
        "`Torn` has two handlers that fit (StepEnd, TrainingPhase) equally well: "
        "`steps` (StepEnd, Phase) and `training` (HostEvent, TrainingPhase).\n"
        "  where: Torn.steps  <@torn-steps>\n"
        "         Torn.training  <@torn-training>\n"
        "  why:   neither handler is more specific in both event and phase, so the choice would be arbitrary\n"
        "  fix:   add a handler for `@on(StepEnd, TrainingPhase)`, which takes precedence over both",
    ):

        class Torn(Callback):
            @on  # torn-steps
            def steps(self, event: StepEnd, phase: Phase, learner: Any) -> None: ...

            @on  # torn-training
            def training(self, event: Event, phase: TrainingPhase, learner: Any) -> None: ...


def test_handler_of_exact_moment_resolves_ambiguity() -> None:
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


def test_check_finds_ambiguity_from_later_phase(refused: Any) -> None:
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
        "  why:   neither handler is more specific in both event and phase, so the choice would be arbitrary\n"
        "  fix:   add a handler for `@on(StepEnd, BothPhase)`, which takes precedence over both"
    )
    checked_graph([Split()], [TrainingPhase, ValidationPhase])
    with refused(AmbiguityError, text):
        checked_graph([Split()], [BothPhase])
    with refused(AmbiguityError, text):
        Split().on(StepEnd(), BothPhase(), None)


def test_one_handler_matching_two_bases_is_not_ambiguous() -> None:
    class Once(Callback):
        @on
        def run(self, event: StepEnd, phase: TrainingPhase | ValidationPhase, learner: Any) -> None: ...

    class BothPhase(TrainingPhase, ValidationPhase): ...

    assert name_at(Once, StepEnd, BothPhase) == "run"


def test_custom_events_and_phases_dispatch_like_built_in() -> None:
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
