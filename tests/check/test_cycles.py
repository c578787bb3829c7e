"""Cycle errors, several problems in one error, and problems at moments that are added later: complete messages."""

from __future__ import annotations

import re
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
from fluxcb._check.preflight import checked_graph
from fluxcb._errors import CheckError, ConflictError, CycleError
from fluxcb.callbacks import CheckNumerics, ClipGradients
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

CHICKEN_OR_EGG = (
    "  fix:   put them in the list as `in_order(Chicken, Egg)`\n"
    "     or: put them in the list as `in_order(Egg, Chicken)`\n"
    "     or: in `Chicken` or `Egg`, declare `Read(previous=True)` if a value from an earlier moment is sufficient\n"
    "     or: in `Chicken` or `Egg`, narrow a handler that uses less with `@on(..., access={...})`"
)


def wants(name: str, reads: str, writes: str, **body: Any) -> Any:
    """Create an instance of a new class that reads one entry and writes another."""
    cls = type(name, (Everywhere,), body)
    return cls({"cbstate": {reads: Read(), writes: Write()}})


def test_cycle_of_two(refused: Any) -> None:
    with refused(
        CycleError,
        "2 callbacks form a cycle: Chicken -> Egg -> Chicken.\n"
        "  where: Chicken -> Egg: Chicken writes `cbstate.egg`, Egg reads it\n"
        "         Egg -> Chicken: Egg writes `cbstate.chicken`, Chicken reads it\n"
        "  why:   at FitBegin x TrainingPhase, no order satisfies all of these\n"
        f"{CHICKEN_OR_EGG}",
    ):
        checked_graph([wants("Chicken", "chicken", "egg"), wants("Egg", "egg", "chicken")], PHASES)


def test_cycle_of_five_with_five_reasons(refused: Any) -> None:
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
        "5 callbacks form a cycle: "
        "WarmUp -> Listed -> After -> Answering -> Third -> WarmUp.\n"
        "  where: WarmUp -> Listed: in_order\n"
        "         Listed -> After: After.runafter names Listed\n"
        "         After -> Answering: in_order\n"
        "         Answering -> Third: Answering.resolveconflict returns RunFirst(Answering)\n"
        "         Third -> WarmUp: Third writes `cbstate.x`, WarmUp reads it\n"
        "  why:   at StepBegin x TrainingPhase, no order satisfies all of these\n"
        "  fix:   put them in the list as `in_order(WarmUp, Third)`\n"
        "     or: swap the two in `in_order(WarmUp, Listed)`\n"
        "     or: swap the two in `in_order(After, Answering)`\n"
        "     or: remove `Listed` from `After.runafter()`\n"
        "     or: return `RunFirst` of the other callback from `Answering.resolveconflict`\n"
        "     or: in `WarmUp`, declare `Read(previous=True)` if a value from an earlier moment is sufficient\n"
        "     or: in `WarmUp` or `Third`, narrow a handler that uses less with `@on(..., access={...})`",
    ):
        checked_graph([behind, reader, third, in_order(reader, listed), in_order(after, settling)], PHASES)


def test_an_order_of_the_list_that_runafter_states_as_well_is_not_swapped(refused: Any) -> None:
    class After(Everywhere):
        def runafter(self) -> Any:
            return (WarmUp,)

    after, warm = After({}), WarmUp({})
    with refused(
        CycleError,
        "2 callbacks form a cycle: WarmUp -> After -> WarmUp.\n"
        "  where: WarmUp -> After: After.runafter names WarmUp; in_order\n"
        "         After -> WarmUp: in_order\n"
        "  why:   at StepBegin x TrainingPhase, no order satisfies all of these\n"
        "  fix:   swap the two in `in_order(After, WarmUp)`",
    ):
        checked_graph([in_order(warm, after), in_order(after, warm)], PHASES)
    checked_graph([in_order(warm, after), in_order(warm, after)], PHASES)


def test_two_cycles_at_one_moment_are_reported_with_shortest_paths() -> None:
    pairs = [("A", "a", "b"), ("B", "b", "a"), ("X", "x", "y"), ("Y", "y", "z"), ("Z", "z", "x")]
    with pytest.raises(CheckError) as caught:
        checked_graph([wants(*pair) for pair in pairs], PHASES)
    assert [p.what for p in caught.value.problems] == [
        "2 callbacks form a cycle: A -> B -> A.",
        "3 callbacks form a cycle: X -> Y -> Z -> X.",
    ]


def test_contradictory_order_statements_form_cycle(refused: Any) -> None:
    class After(Everywhere):
        def runafter(self) -> Any:
            return (WarmUp,)

    after, warm = After({}), WarmUp({})
    with refused(
        CycleError,
        "2 callbacks form a cycle: After -> WarmUp -> After.\n"
        "  where: After -> WarmUp: in_order\n"
        "         WarmUp -> After: After.runafter names WarmUp\n"
        "  why:   at StepBegin x TrainingPhase, no order satisfies all of these\n"
        "  fix:   swap the two in `in_order(After, WarmUp)`\n"
        "     or: remove `WarmUp` from `After.runafter()`",
    ):
        checked_graph([in_order(after, warm)], PHASES)


def test_fix_names_second_instances_in_words(refused: Any) -> None:
    """`WarmUp #2` is no code, so the fix does not show `in_order(After #2, WarmUp #2)`."""

    class After(Everywhere):
        def runafter(self) -> Any:
            return (WarmUp,)

    first = [in_order(WarmUp({}), After({}))]
    after, warm = After({}), WarmUp({})
    with refused(
        CycleError,
        "2 callbacks form a cycle: After #2 -> WarmUp #2 -> After #2.\n"
        "  where: After #2 -> WarmUp #2: in_order\n"
        "         WarmUp #2 -> After #2: After.runafter names WarmUp\n"
        "  why:   at StepBegin x TrainingPhase, no order satisfies all of these\n"
        "  fix:   swap After #2 and WarmUp #2 in their `in_order(...)`\n"
        "     or: remove `WarmUp` from `After.runafter()`",
    ):
        checked_graph([*first, in_order(after, warm)], PHASES)
    checked_graph([*first, in_order(warm, after)], PHASES)


def test_contradictory_in_order_names_both_statements(refused: Any) -> None:
    after, warm = Everywhere({}), WarmUp({})
    with refused(
        CycleError,
        "`in_order` states contradictory orders: Everywhere before WarmUp, and WarmUp before Everywhere.\n"
        "  why:   at StepBegin x TrainingPhase, no order satisfies both\n"
        "  fix:   keep the order that you need, and delete the other `in_order(...)`",
    ):
        checked_graph([in_order(after, warm), in_order(warm, after)], PHASES)
    checked_graph([in_order(after, warm)], PHASES)
    checked_graph([in_order(warm, after)], PHASES)


def test_cycle_of_runafter_is_fixed_in_classes(refused: Any) -> None:
    class First(Everywhere):
        def runafter(self) -> Any:
            return (Last,)

    class Last(Everywhere):
        def runafter(self) -> Any:
            return (First,)

    text = (
        "2 callbacks form a cycle: First -> Last -> First.\n"
        "  where: First -> Last: Last.runafter names First\n"
        "         Last -> First: First.runafter names Last\n"
        "  why:   at FitBegin x TrainingPhase, no order satisfies all of these\n"
        "  fix:   remove `First` from `Last.runafter()`\n"
        "     or: remove `Last` from `First.runafter()`"
    )
    with refused(CycleError, text):
        checked_graph([First({}), Last({})], PHASES)
    for cls in (First, Last):
        removed = type(cls.__name__, (cls,), {"runafter": lambda self: ()})
        checked_graph([removed({}) if cls is First else First({}), removed({}) if cls is Last else Last({})], PHASES)


def test_cycle_of_built_in_callbacks_is_fixed_with_in_order() -> None:
    """Users cannot edit the classes of built-in callbacks."""

    class Shipped(Everywhere):
        __module__ = "fluxcb.callbacks.shipped"

    def shipped(name: str, reads: str, writes: str) -> Any:
        return type(name, (Shipped,), {"__module__": Shipped.__module__})({"cbstate": {reads: Read(), writes: Write()}})

    with pytest.raises(CycleError) as raised:
        checked_graph([shipped("A", "a", "b"), shipped("B", "b", "a")], PHASES)
    assert raised.value.fix == (
        "put them in the list as `in_order(A, B)`",
        "put them in the list as `in_order(B, A)`",
    )


LOOPS = [
    [("A", "a", "b"), ("B", "b", "a")],
    [("A", "a", "b"), ("B", "b", "c"), ("C", "c", "a")],
    [("C", "c", "a"), ("B", "b", "c"), ("A", "a", "b")],
    [("A", "a", "b"), ("B", "b", "c"), ("C", "c", "d"), ("D", "d", "a")],
]


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: "-".join(name for name, *_ in loop))
def test_each_suggested_in_order_breaks_cycle(loop: Any) -> None:
    callbacks = {name: wants(name, reads, writes) for name, reads, writes in loop}
    with pytest.raises(CycleError) as raised:
        checked_graph(list(callbacks.values()), PHASES)
    lines = [line for fix in raised.value.fix for line in re.findall(r"`(in_order\(.*\))`", fix)]
    assert 1 <= len(lines) <= 2
    for line in lines:
        group = eval(line, {"in_order": in_order, **callbacks})  # noqa: S307 - of the message's own text
        checked_graph([*callbacks.values(), group], PHASES)
        rest = [callback for callback in callbacks.values() if callback not in tuple(group)]
        checked_graph([group, *rest], PHASES)


# --- several, and later -----------------------------------------------------------------------------------------------


def test_all_problems_are_reported_together(refused: Any) -> None:
    with refused(
        CheckError,
        "5 problems were found in this set of callbacks.\n\n"
        "1. UnknownStateError: Decay declares access to `step.lsos`, which no phase provides and no callback writes. "
        "Did you mean `loss`?\n"
        "  where: Base.stateaccess  <@access>\n"
        "  fix:   name one of batch, data_position, earlier_losses, grads, hold, loss, outputs, skip, skips, stop, "
        "updates, xs, ys\n\n"
        "2. CycleError: 2 callbacks form a cycle: Chicken -> Egg -> Chicken.\n"
        "  where: Chicken -> Egg: Chicken writes `cbstate.egg`, Egg reads it\n"
        "         Egg -> Chicken: Egg writes `cbstate.chicken`, Chicken reads it\n"
        "  why:   at FitBegin x TrainingPhase, no order satisfies all of these\n"
        f"{CHICKEN_OR_EGG}\n\n"
        "3. ConflictError: WarmUp and Decay both write `params` and no order is declared.\n"
        "  where: Base.stateaccess  <@access>\n"
        "  why:   both run at StepBegin x TrainingPhase, and the result depends on which one is last\n"
        "  fix:   put them in the list as `in_order(WarmUp, Decay)`\n"
        "     or: make `Decay.runafter()` return `(WarmUp,)`\n\n"
        "4. MissingStateError: WarmUp reads `cbstate.history`, which no callback creates.\n"
        "  where: Base.stateaccess  <@access>\n"
        "  why:   it would fail at the first handler that reads it\n"
        "  fix:   add `Recorder()` to the callbacks, which creates it\n\n"
        "5. MissingStateError: WarmUp uses `step.grads` at StepBegin x TrainingPhase, where it does not exist.\n"
        "  where: WarmUp.run  <@warm>\n"
        "  why:   `step.grads` does not exist yet there\n"
        "  fix:   handle StepEnd instead",
    ):
        checked_graph(
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


def test_conflict_at_moment_added_later_raises_on_every_request(refused: Any) -> None:
    class PhaseOfOnesOwn(TrainingPhase): ...

    one, other = Late({"params": Write()}), AlsoLate({"params": Write()})
    graph = checked_graph([one, other], [ValidationPhase])
    edges = dict(graph.edges)
    for _ in range(2):
        with refused(
            ConflictError,
            "Late and AlsoLate both write `params` and no order is declared.\n"
            "  where: Base.stateaccess  <@access>\n"
            "  why:   both run at BackwardEnd x PhaseOfOnesOwn, and the result depends on which one is last\n"
            "  fix:   put them in the list as `in_order(Late, AlsoLate)`\n"
            "     or: make `AlsoLate.runafter()` return `(Late,)`",
        ):
            graph.handlers(BackwardEnd, PhaseOfOnesOwn)
    assert (graph.edges, graph.problems, graph.orders) == (edges, [], {})


def test_cycle_at_moment_added_later_raises_on_every_request() -> None:
    graph = checked_graph([wants("Chicken", "chicken", "egg"), wants("Egg", "egg", "chicken")], [])
    for phase in (TrainingPhase, TrainingPhase, ValidationPhase):
        with pytest.raises(CycleError, match=f"at StepEnd x {phase.__name__}, no order"):
            graph.order(StepEnd, phase)
    assert graph.edges == {}


def test_no_fix_edits_a_class_of_the_library() -> None:
    class Scales(Callback):
        def stateaccess(self) -> Any:
            return {"step": {"grads": Write()}}

        def runafter(self) -> Any:
            return (ClipGradients,)

        @on
        def scale(self, event: BackwardEnd, phase: AbstractTrainingPhase, learner: Any) -> None: ...

    clips, checks = ClipGradients(max_norm=1.0), CheckNumerics()
    with pytest.raises(CycleError, match=r"CheckNumerics\.resolveconflict returns RunFirst") as raised:
        checked_graph([clips, in_order(Scales(), checks)], PHASES)
    assert list(raised.value.fix) == [
        "swap the two in `in_order(Scales(), CheckNumerics())`",
        "remove `ClipGradients` from `Scales.runafter()`",
    ]
    checked_graph([clips, in_order(checks, Scales())], PHASES)
