"""Conflicts and loops: whole messages, with the lines that declare them and the edits that cure them."""

from __future__ import annotations

from typing import Any

import pytest

from fluxcb import (
    Append,
    Callback,
    NoConflict,
    NotDefined,
    RunFirst,
    Unresolvable,
    Write,
    every,
    on,
    resolveconflict,
)
from fluxcb._check.preflight import build_graph
from fluxcb._errors import CheckError, ConflictError
from fluxcb.events import EpochEnd, FitBegin, HostEvent, StepBegin, StepEnd
from fluxcb.phases import AbstractTrainingPhase, Phase, TrainingPhase, ValidationPhase

PHASES = (TrainingPhase, ValidationPhase)
APPEND = "     or: declare `Append()` in both, if they only add what does not depend on order"


class Base(Callback):
    def __init__(self, access: Any) -> None:
        self.access = access

    def stateaccess(self) -> Any:  # access
        return self.access

    def __repr__(self) -> str:
        return type(self).__name__


class WarmUp(Base):
    @on  # warm
    def run(self, event: StepBegin, phase: TrainingPhase, learner) -> None: ...


class Decay(Base):
    @on
    def run(self, event: StepBegin | StepEnd, phase: AbstractTrainingPhase, learner) -> None: ...


class Everywhere(Base):
    @on
    def run(self, event: HostEvent, phase: Phase, learner) -> None: ...


class AlsoEverywhere(Everywhere): ...


LR = {"hyperparams": {"lr": Write()}}


# --- conflicts --------------------------------------------------------------------------------------------------------


def test_two_writers_without_an_order(refused: Any) -> None:
    with refused(
        ConflictError,
        "WarmUp and Decay both write `hyperparams.lr` and no order is declared.\n"
        "  where: WarmUp.stateaccess  <@access>\n"
        "         Decay.stateaccess  <@access>\n"
        "  why:   at StepBegin x TrainingPhase both run, and the result depends on which is last\n"
        "  fix:   put them in the list as `in_order(WarmUp, Decay)`\n"
        "     or: make `Decay.runafter()` return `(WarmUp,)`",
    ):
        build_graph([WarmUp(LR), Decay(LR)], PHASES)


def test_two_instances_of_one_class(refused: Any) -> None:
    with refused(
        ConflictError,
        "WarmUp and WarmUp #2 both write `hyperparams.lr` and no order is declared.\n"
        "  where: WarmUp.stateaccess  <@access>\n"
        "  why:   at StepBegin x TrainingPhase both run, and the result depends on which is last\n"
        "  fix:   assign the two to variables, and put them in the list as `in_order(first, second)`",
    ):
        build_graph([WarmUp(LR), WarmUp(LR)], PHASES)


def test_many_moments_are_counted(refused: Any) -> None:
    with refused(
        ConflictError,
        "Everywhere and AlsoEverywhere at EverySteps(steps=2) both write `params` and `cbstate.a.b` "
        "and no order is declared.\n"
        "  where: Everywhere.stateaccess  <@access>\n"
        "         AlsoEverywhere.stateaccess  <@access>\n"
        "  why:   at FitBegin x TrainingPhase, EpochBegin x TrainingPhase, StepBegin x TrainingPhase and 9 more "
        "both run, and the result depends on which is last\n"
        "  fix:   assign the two to variables, and put them in the list as `in_order(first, second)`\n"
        "     or: make `AlsoEverywhere.runafter()` return `(Everywhere,)`",
    ):
        build_graph(
            [
                Everywhere({"params": Write(), "cbstate": {"a": Append()}}),
                every(AlsoEverywhere({"params": Write(), "cbstate": {"a": {"b": Write()}}}), steps=2),
            ],
            PHASES,
        )


def test_the_class_to_change_is_the_users_own(refused: Any) -> None:
    built_in = type("BuiltIn", (Everywhere,), {"__module__": "fluxcb.callbacks.built_in"})
    for one, other in ((Everywhere(LR), built_in(LR)), (built_in(LR), Everywhere(LR))):
        with refused(
            ConflictError,
            f"{one} and {other} both write `hyperparams.lr` and no order is declared.\n"
            f"  where: {one}.stateaccess  <@access>\n"
            f"         {other}.stateaccess  <@access>\n"
            "  why:   at FitBegin x TrainingPhase, EpochBegin x TrainingPhase, StepBegin x TrainingPhase and 9 more "
            "both run, and the result depends on which is last\n"
            f"  fix:   put them in the list as `in_order({one}, {other})`\n"
            "     or: make `Everywhere.runafter()` return `(BuiltIn,)`",
        ):
            build_graph([one, other], PHASES)


def conflicting(one: Any, other: Any) -> bool:
    try:
        build_graph([Everywhere(one), AlsoEverywhere(other)], PHASES)
    except ConflictError:
        return True
    return False


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ({"cbstate": {"log": Append()}}, {"cbstate": {"log": Append()}}, False),
        ({"cbstate": {"log": Append()}}, {"cbstate": Append()}, False),
        ({"cbstate": {"log": Append()}}, {"cbstate": {"log": Write()}}, True),
        ({"cbstate": {"log": Write()}}, {"cbstate": {"log": {"x": Append()}}}, True),
        ({"cbstate": Append()}, {"cbstate": {"log": Write()}}, True),
        ({"cbstate": {"a": Write()}}, {"cbstate": {"b": Write()}}, False),
        ({"hyperparams": {"lr": Write()}}, {"hyperparams": {"decay": Write()}}, False),
        ({"hyperparams": {"lr": Write()}}, {"opt_state": Write()}, True),
        ({"model": Write()}, {"params": Write()}, True),
        ({"model": Write()}, {"opt_state": Write()}, False),
        ({"control": Append()}, {"control": Append()}, False),
        ({"control": Write()}, {"control": Write()}, False),
    ],
)
def test_who_conflicts(one: Any, other: Any, expected: bool) -> None:
    assert conflicting(one, other) is expected
    assert conflicting(other, one) is expected


class Narrow(Callback):
    """Writes `a` at StepEnd and `b` at EpochEnd."""

    def stateaccess(self) -> Any:
        return {"cbstate": Write()}

    @on(access={"cbstate": {"a": Write()}})  # narrow-a
    def at_step(self, event: StepEnd, phase, learner) -> None: ...

    @on(access={"cbstate": {"b": Write()}})
    def at_epoch(self, event: EpochEnd, phase, learner) -> None: ...

    def __repr__(self) -> str:
        return type(self).__name__


class NarrowToo(Narrow):
    @on(access={"cbstate": {"a": Write()}})  # narrow-too-a
    def at_step(self, event: StepEnd, phase: TrainingPhase, learner) -> None: ...

    @on(access={"cbstate": {"c": Write()}})
    def at_epoch(self, event: EpochEnd, phase, learner) -> None: ...


def test_only_the_moments_at_which_both_write_it_are_named(refused: Any) -> None:
    """The pair also meets at EpochEnd of both phases, with handlers that do not conflict."""
    with refused(
        ConflictError,
        "Narrow and NarrowToo both write `cbstate.a` and no order is declared.\n"
        "  where: Narrow.at_step  <@narrow-a>\n"
        "         NarrowToo.at_step  <@narrow-too-a>\n"
        "  why:   at StepEnd x TrainingPhase both run, and the result depends on which is last\n"
        "  fix:   put them in the list as `in_order(Narrow, NarrowToo)`\n"
        "     or: make `NarrowToo.runafter()` return `(Narrow,)`\n"
        f"{APPEND}",
    ):
        build_graph([Narrow(), NarrowToo()], PHASES)


def test_different_paths_at_different_moments_are_different_problems() -> None:
    class Second(Narrow): ...

    with pytest.raises(CheckError) as caught:
        build_graph([Narrow(), Second()], PHASES)
    assert [(type(p), p.what, p.why) for p in caught.value.problems] == [
        (
            ConflictError,
            f"Narrow and Second both write `cbstate.{name}` and no order is declared.",
            f"at {event} x TrainingPhase, {event} x ValidationPhase both run, and the result depends on which is last",
        )
        for event, name in (("StepEnd", "a"), ("EpochEnd", "b"))
    ]


# --- resolutions ------------------------------------------------------------------------------------------------------


class Answering(Everywhere):
    def __init__(self, access: Any, answer: Any) -> None:
        super().__init__(access)
        self.answer = answer

    def resolveconflict(self, other: Callback) -> Any:
        return self.answer(self, other)


class Other(Answering): ...


def test_unresolvable(refused: Any) -> None:
    with refused(
        ConflictError,
        "Everywhere and Answering can never be used together.\n"
        "  where: Answering.resolveconflict returns Unresolvable()\n"
        "  fix:   remove one of the two from the callbacks list",
    ):
        build_graph([Everywhere({}), Answering({}, lambda me, other: Unresolvable())], PHASES)


@pytest.mark.parametrize(
    ("one", "other", "said", "also_said"),
    [
        (lambda me, it: RunFirst(me), lambda me, it: RunFirst(me), "Answering first", "Other first"),
        (lambda me, it: RunFirst(it), lambda me, it: NoConflict(), "Other first", "any order is fine"),
    ],
)
def test_answers_that_differ(one: Any, other: Any, said: str, also_said: str, refused: Any) -> None:
    with refused(
        ConflictError,
        "Answering and Other are resolved in different ways.\n"
        f"  where: Answering.resolveconflict: {said}\n"
        f"         Other.resolveconflict: {also_said}\n"
        "  why:   an order can only be derived when everybody who answers says the same\n"
        "  fix:   make the answers agree, or return `NotDefined()` from one of them",
    ):
        build_graph([Answering(LR, one), Other(LR, other)], PHASES)


def test_answers_that_agree_are_told_in_one_way_whatever_the_list() -> None:
    one, other = Answering(LR, lambda me, other: RunFirst(other)), Other(LR, lambda me, other: RunFirst(me))
    for listed in ([one, other], [other, one]):
        graph = build_graph(listed, PHASES)
        (edge,) = graph.edges.values()
        assert edge.reasons == [
            "Answering.resolveconflict says RunFirst(Other) and Other.resolveconflict says RunFirst(Other)"
        ]
    assert list(map(repr, graph.order(FitBegin, TrainingPhase))) == ["Other", "Answering"]


def test_the_registry_and_a_method_that_differ(refused: Any) -> None:
    @resolveconflict.register(Answering, WarmUp)
    def _(one: Answering, other: WarmUp) -> RunFirst:
        return RunFirst(one)

    try:
        with refused(
            ConflictError,
            "WarmUp and Answering are resolved in different ways.\n"
            "  where: Answering.resolveconflict: WarmUp first\n"
            "         resolveconflict.register: Answering first\n"
            "  why:   an order can only be derived when everybody who answers says the same\n"
            "  fix:   make the answers agree, or return `NotDefined()` from one of them",
        ):
            build_graph([WarmUp(LR), Answering(LR, lambda me, other: RunFirst(other))], PHASES)
    finally:
        resolveconflict.unregister(Answering, WarmUp)


def test_a_registered_answer_that_depends_on_the_list_is_told_to(refused: Any) -> None:
    """Two of one class are an (A, B) and a (B, A): "the first" is not one of them."""

    @resolveconflict.register(WarmUp, WarmUp)
    def _(one: WarmUp, other: WarmUp) -> RunFirst:
        return RunFirst(one)

    try:
        with refused(
            ConflictError,
            "WarmUp and WarmUp #2 are resolved in different ways.\n"
            "  where: resolveconflict.register: WarmUp first\n"
            "         resolveconflict.register: WarmUp #2 first\n"
            "  why:   an order can only be derived when everybody who answers says the same\n"
            "  fix:   make the answers agree, or return `NotDefined()` from one of them",
        ):
            build_graph([WarmUp(LR), WarmUp(LR)], PHASES)
    finally:
        resolveconflict.unregister(WarmUp, WarmUp)


class Stranger(Callback):
    def __repr__(self) -> str:
        return "stranger"


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        (lambda me, other: None, "None"),
        (lambda me, other: RunFirst(Stranger()), "RunFirst(callback=stranger)"),
        (lambda me, other: RunFirst, repr(RunFirst)),
        (lambda me, other: me, "Answering"),
    ],
)
def test_an_answer_that_is_none(answer: Any, shown: str, refused: Any) -> None:
    with refused(
        CheckError,
        f"`Answering.resolveconflict` answered {shown} for WarmUp and Answering.\n"
        "  fix:   return NotDefined(), Unresolvable(), NoConflict(), or RunFirst(one of the two callbacks)",
    ):
        build_graph([WarmUp(LR), Answering(LR, answer)], PHASES)


def test_a_class_that_both_are_of_says_nothing_of_who_is_first() -> None:
    def answer(me: Any, other: Any) -> RunFirst:
        return RunFirst(Answering)

    with pytest.raises(CheckError) as caught:
        build_graph([Answering(LR, answer), Answering(LR, answer)], PHASES)
    assert caught.value.what == (
        f"`Answering.resolveconflict` answered RunFirst(callback={Answering!r}) for Answering and Answering #2."
    )


def test_not_defined_leaves_the_conflict() -> None:
    with pytest.raises(ConflictError, match=r"^WarmUp and Answering both write"):
        build_graph([WarmUp(LR), Answering(LR, lambda me, other: NotDefined())], PHASES)
