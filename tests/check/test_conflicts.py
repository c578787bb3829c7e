"""Conflicts and loops: whole messages, with the lines that declare them and the edits that cure them."""

from __future__ import annotations

from typing import Any

import pytest

from fluxcb import (
    Append,
    Callback,
    NoConflict,
    NotDefined,
    Read,
    RunFirst,
    Unresolvable,
    Write,
    every,
    in_order,
    on,
    resolveconflict,
)
from fluxcb._check.preflight import build_graph
from fluxcb._errors import CheckError, ConflictError, CycleError
from fluxcb.events import BackwardEnd, EpochEnd, FitBegin, HostEvent, StepBegin, StepEnd
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
        "     or: make `Decay.runafter()` return `(WarmUp,)`\n"
        f"{APPEND}",
    ):
        build_graph([WarmUp(LR), Decay(LR)], PHASES)


def test_two_instances_of_one_class(refused: Any) -> None:
    with refused(
        ConflictError,
        "WarmUp and WarmUp #2 both write `hyperparams.lr` and no order is declared.\n"
        "  where: WarmUp.stateaccess  <@access>\n"
        "  why:   at StepBegin x TrainingPhase both run, and the result depends on which is last\n"
        "  fix:   put them in the list as `in_order(WarmUp, WarmUp #2)`\n"
        f"{APPEND}",
    ):
        build_graph([WarmUp(LR), WarmUp(LR)], PHASES)


def test_many_moments_are_counted(refused: Any) -> None:
    with refused(
        ConflictError,
        "Everywhere and AlsoEverywhere at EverySteps(steps=2) both write `params` and `cbstate.a.b` "
        "and no order is declared.\n"
        "  where: Everywhere.stateaccess  <@access>\n"
        "         AlsoEverywhere.stateaccess  <@access>\n"
        "  why:   at FitBegin x TrainingPhase, EpochBegin x TrainingPhase, StepBegin x TrainingPhase and 8 more both run, "
        "and the result depends on which is last\n"
        "  fix:   put them in the list as `in_order(Everywhere, AlsoEverywhere at EverySteps(steps=2))`\n"
        "     or: make `AlsoEverywhere.runafter()` return `(Everywhere,)`\n"
        f"{APPEND}",
    ):
        build_graph(
            [
                Everywhere({"params": Write(), "cbstate": {"a": Append()}}),
                every(AlsoEverywhere({"params": Write(), "cbstate": {"a": {"b": Write()}}}), steps=2),
            ],
            PHASES,
        )


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


def test_answers_that_agree() -> None:
    graph = build_graph(
        [Answering(LR, lambda me, other: RunFirst(other)), Other(LR, lambda me, other: RunFirst(me))], PHASES
    )
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
    with pytest.raises(ConflictError, match="^WarmUp and Answering both write"):
        build_graph([WarmUp(LR), Answering(LR, lambda me, other: NotDefined())], PHASES)


# --- loops ------------------------------------------------------------------------------------------------------------

CURES = (
    "  fix:   declare `Read(previous=True)` in the reader that may see what an earlier moment left\n"
    "     or: narrow a handler's access with `@on(..., access={...})` to what it really touches\n"
    "     or: state the order of one pair with `in_order`, `runafter` or `resolveconflict`"
)


def wants(name: str, reads: str, writes: str, **body: Any) -> Any:
    """Make an instance of a new class that reads one entry and writes another."""
    cls = type(name, (Everywhere,), body)
    return cls({"cbstate": {reads: Read(), writes: Write()}})


def test_a_loop_of_two(refused: Any) -> None:
    with refused(
        CycleError,
        "2 callbacks must each run before the next, in a circle: Chicken -> Egg -> Chicken.\n"
        "  where: Chicken -> Egg: Chicken writes `cbstate.egg`, Egg reads it\n"
        "         Egg -> Chicken: Egg writes `cbstate.chicken`, Chicken reads it\n"
        "  why:   at FitBegin x TrainingPhase no order satisfies all of these\n"
        f"{CURES}",
    ):
        build_graph([wants("Chicken", "chicken", "egg"), wants("Egg", "egg", "chicken")], PHASES)


def test_a_loop_of_five_with_five_reasons_beside_innocents(refused: Any) -> None:
    class After(Everywhere):
        def runafter(self) -> Any:
            return (Listed,)

    class Listed(Everywhere): ...

    def first(me: Any, other: Any) -> Any:
        return RunFirst(me) if isinstance(other, Third) else NotDefined()

    class Third(Everywhere): ...

    after, listed, third = After({}), Listed({}), Third({"cbstate": {"x": Write()}})
    settling = Answering({}, first)
    reader = WarmUp({"cbstate": {"x": Read(), "free": Write()}})
    behind = Decay({"cbstate": {"free": Read()}})
    with refused(
        CycleError,
        "5 callbacks must each run before the next, in a circle: "
        "WarmUp -> Listed -> After -> Answering -> Third -> WarmUp.\n"
        "  where: WarmUp -> Listed: in_order\n"
        "         Listed -> After: After.runafter names Listed\n"
        "         After -> Answering: in_order\n"
        "         Answering -> Third: Answering.resolveconflict says RunFirst(Answering)\n"
        "         Third -> WarmUp: Third writes `cbstate.x`, WarmUp reads it\n"
        "  why:   at StepBegin x TrainingPhase no order satisfies all of these\n"
        f"{CURES}",
    ):
        build_graph([behind, reader, third, in_order(reader, listed), in_order(after, settling)], PHASES)


def test_two_loops_at_one_moment_are_two_problems_and_the_shortest_of_each_is_told() -> None:
    pairs = [("A", "a", "b"), ("B", "b", "a"), ("X", "x", "y"), ("Y", "y", "z"), ("Z", "z", "x")]
    with pytest.raises(CheckError) as caught:
        build_graph([wants(*pair) for pair in pairs], PHASES)
    assert [p.what for p in caught.value.problems] == [
        "2 callbacks must each run before the next, in a circle: A -> B -> A.",
        "3 callbacks must each run before the next, in a circle: X -> Y -> Z -> X.",
    ]


def test_statements_that_contradict_each_other_make_a_loop(refused: Any) -> None:
    class After(Everywhere):
        def runafter(self) -> Any:
            return (WarmUp,)

    after, warm = After({}), WarmUp({})
    with refused(
        CycleError,
        "2 callbacks must each run before the next, in a circle: After -> WarmUp -> After.\n"
        "  where: After -> WarmUp: in_order\n"
        "         WarmUp -> After: After.runafter names WarmUp\n"
        "  why:   at StepBegin x TrainingPhase no order satisfies all of these\n"
        f"{CURES}",
    ):
        build_graph([in_order(after, warm)], PHASES)


# --- several, and later -----------------------------------------------------------------------------------------------


def test_all_problems_are_told_together(refused: Any) -> None:
    with refused(
        CheckError,
        "5 problems were found in this set of callbacks.\n\n"
        "1. UnknownStateError: Decay declares access to `step.lsos`, which no phase provides and no callback writes. "
        "Did you mean `loss`?\n"
        "  where: Decay.stateaccess  <@access>\n\n"
        "2. CycleError: 2 callbacks must each run before the next, in a circle: Chicken -> Egg -> Chicken.\n"
        "  where: Chicken -> Egg: Chicken writes `cbstate.egg`, Egg reads it\n"
        "         Egg -> Chicken: Egg writes `cbstate.chicken`, Chicken reads it\n"
        "  why:   at FitBegin x TrainingPhase no order satisfies all of these\n"
        f"{CURES}\n\n"
        "3. ConflictError: WarmUp and Decay both write `params` and no order is declared.\n"
        "  where: WarmUp.stateaccess  <@access>\n"
        "         Decay.stateaccess  <@access>\n"
        "  why:   at StepBegin x TrainingPhase both run, and the result depends on which is last\n"
        "  fix:   put them in the list as `in_order(WarmUp, Decay)`\n"
        "     or: make `Decay.runafter()` return `(WarmUp,)`\n"
        f"{APPEND}\n\n"
        "4. MissingStateError: WarmUp reads `cbstate.history`, which no callback creates.\n"
        "  where: WarmUp.stateaccess  <@access>\n"
        "  why:   it would fail at the first handler that reads it\n"
        "  fix:   add `Recorder()` to the callbacks, which creates it\n\n"
        "5. MissingStateError: WarmUp uses `step.grads` at StepBegin x TrainingPhase, where it does not exist.\n"
        "  where: WarmUp.run  <@warm>\n"
        "  why:   `step.grads` does not exist yet there\n"
        "  fix:   handle StepEnd instead",
    ):
        build_graph(
            [
                WarmUp({"params": Write(), "cbstate": {"history": Read()}, "step": {"grads": Read()}}),
                Decay({"params": Write(), "step": {"lsos": Read()}}),
                wants("Chicken", "chicken", "egg"),
                wants("Egg", "egg", "chicken"),
            ],
            PHASES,
        )


class Late(Base):
    @on
    def run(self, event: BackwardEnd, phase: TrainingPhase, learner) -> None: ...


class AlsoLate(Late): ...


def test_a_moment_first_met_later_refuses_each_time_it_is_asked_for_and_leaves_no_trace(refused: Any) -> None:
    class PhaseOfOnesOwn(TrainingPhase): ...

    one, other = Late({"params": Write()}), AlsoLate({"params": Write()})
    graph = build_graph([one, other], [ValidationPhase])
    edges = dict(graph.edges)
    for _ in range(2):
        with refused(
            ConflictError,
            "Late and AlsoLate both write `params` and no order is declared.\n"
            "  where: Late.stateaccess  <@access>\n"
            "         AlsoLate.stateaccess  <@access>\n"
            "  why:   at BackwardEnd x PhaseOfOnesOwn both run, and the result depends on which is last\n"
            "  fix:   put them in the list as `in_order(Late, AlsoLate)`\n"
            "     or: make `AlsoLate.runafter()` return `(Late,)`\n"
            f"{APPEND}",
        ):
            graph.handlers(BackwardEnd, PhaseOfOnesOwn)
    assert (graph.edges, graph.problems, graph.orders) == (edges, [], {})


def test_a_loop_first_met_later_is_told_each_time() -> None:
    graph = build_graph([wants("Chicken", "chicken", "egg"), wants("Egg", "egg", "chicken")], [])
    for phase in (TrainingPhase, TrainingPhase, ValidationPhase):
        with pytest.raises(CycleError, match=f"at StepEnd x {phase.__name__} no order"):
            graph.order(StepEnd, phase)
    assert graph.edges == {}
