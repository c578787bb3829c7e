"""Loops, several problems in one error, and problems met later: whole messages."""

from __future__ import annotations

from typing import Any

import pytest

from fluxcb import (
    Callback,
    NotDefined,
    Read,
    RunFirst,
    Write,
    in_order,
    on,
)
from fluxcb._check.preflight import build_graph
from fluxcb._errors import CheckError, ConflictError, CycleError
from fluxcb.events import BackwardEnd, HostEvent, StepBegin, StepEnd
from fluxcb.phases import AbstractTrainingPhase, Phase, TrainingPhase, ValidationPhase

PHASES = (TrainingPhase, ValidationPhase)


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


class Answering(Everywhere):
    def __init__(self, access: Any, answer: Any) -> None:
        super().__init__(access)
        self.answer = answer

    def resolveconflict(self, other: Callback) -> Any:
        return self.answer(self, other)


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
        "  where: Decay.stateaccess  <@access>\n"
        "  fix:   name one of batch, grads, hold, loss, outputs, skip, stop, updates, xs, ys\n\n"
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
        "     or: make `Decay.runafter()` return `(WarmUp,)`\n\n"
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
            "     or: make `AlsoLate.runafter()` return `(Late,)`",
        ):
            graph.handlers(BackwardEnd, PhaseOfOnesOwn)
    assert (graph.edges, graph.problems, graph.orders) == (edges, [], {})


def test_a_loop_first_met_later_is_told_each_time() -> None:
    graph = build_graph([wants("Chicken", "chicken", "egg"), wants("Egg", "egg", "chicken")], [])
    for phase in (TrainingPhase, TrainingPhase, ValidationPhase):
        with pytest.raises(CycleError, match=f"at StepEnd x {phase.__name__} no order"):
            graph.order(StepEnd, phase)
    assert graph.edges == {}
