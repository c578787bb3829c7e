"""The order at each moment, the edges with their reasons, and what decides between callbacks that have none."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from fluxcb import (
    Append,
    Callback,
    ConflictError,
    NoConflict,
    Read,
    RunFirst,
    Write,
    every,
    in_order,
    on,
    resolveconflict,
)
from fluxcb._check.graph import CallbackGraph
from fluxcb._check.preflight import build_graph
from fluxcb.events import (
    EpochEnd,
    HostEvent,
    StepBegin,
    StepEnd,
    UpdateEnd,
)
from fluxcb.phases import AbstractTrainingPhase, TrainingPhase, ValidationPhase

PHASES = (TrainingPhase, ValidationPhase)


class Host(Callback):
    """Handles all host events with the access it is given."""

    def __init__(self, access: Any = None, name: str = "") -> None:
        self.access, self.name = access or {}, name

    def stateaccess(self) -> Any:
        return self.access

    @on
    def run(self, event: HostEvent, phase, learner) -> None: ...

    def __repr__(self) -> str:
        return self.name or type(self).__name__


class Writer(Host): ...


class Reader(Host): ...


def names(graph: CallbackGraph, event: Any = StepEnd, phase: Any = TrainingPhase) -> str:
    return " ".join(map(repr, graph.order(event, phase)))


def edges(graph: CallbackGraph) -> dict[str, list[str]]:
    label = [d.label for d in graph.declared]
    return {f"{label[i]} -> {label[j]}": edge.reasons for (i, j), edge in graph.edges.items()}


# --- reads and writes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "read", "paths"),
    [
        ({"cbstate": {"a": Write()}}, {"cbstate": {"a": Read()}}, "cbstate.a"),
        ({"cbstate": {"a": Append()}}, {"cbstate": {"a": Read()}}, "cbstate.a"),
        ({"cbstate": {"a": Write()}}, {"cbstate": Read()}, "cbstate.a"),
        ({"cbstate": {"a": Append()}}, {"cbstate": Read()}, "cbstate.a"),
        ({"cbstate": {"a": Write()}}, {"cbstate": {"a": {"b": Read()}}}, "cbstate.a.b"),
        ({"params": Write()}, {"*": Read()}, "params *"),
        ({"cbstate": {"a": {"b": Append()}}}, {"*": Read()}, "cbstate.a.b *"),
        ({"hyperparams": {"lr": Write()}}, {"opt_state": Read()}, "hyperparams.lr opt_state"),
        ({"opt_state": Write()}, {"hyperparams": {"lr": Read()}}, "opt_state hyperparams.lr"),
        ({"hyperparams": Append()}, {"opt_state": {"inner": Read()}}, "hyperparams opt_state.inner"),
        ({"params": Write()}, {"model": Read()}, "params model"),
        ({"model": Write()}, {"model_state": Read()}, "model model_state"),
    ],
)
def test_the_writer_runs_before_the_reader(written: Any, read: Any, paths: str) -> None:
    what, _, other = paths.partition(" ")
    reason = f"Writer writes `{what}`, Reader reads " + (f"`{other}`" if other else "it")
    graph = build_graph([Reader(read), Writer(written)], PHASES)
    assert names(graph) == "Writer Reader"
    assert edges(graph) == {"Writer -> Reader": [reason]}


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ({"cbstate": {"a": Write()}}, {"cbstate": {"a": Read(previous=True)}}),
        ({"params": Write()}, {"*": Read(previous=True)}),
        ({"cbstate": {"a": {"x": Write()}}}, {"cbstate": {"b": Read(previous=True)}}),
        # An Append to a whole hub may add any name, but is no promise to those who read one.
        ({"cbstate": Append()}, {"hyperparams": Read()}),
        ({"opt_state": Write()}, {"params": Read()}),
        ({"cbstate": {"a": Read()}, "params": Write()}, {"cbstate": {"a": Read()}}),
        ({"control": Append()}, {"control": Append(), "*": Read()}),
    ],
)
def test_nothing_is_ordered_where_nothing_is_waited_for(written: Any, read: Any) -> None:
    creator = Host({"cbstate": {"b": Append(), "a": {"y": Append()}}}, "creator")
    creator.entry_for = lambda event, phase: None  # type: ignore[method-assign]  # it runs at no moment
    graph = build_graph([Reader(read), Writer(written), creator], PHASES)
    assert names(graph) == "Reader Writer"
    assert edges(graph) == {}


def test_statistic_driven_setters_on_one_hub_make_no_loop() -> None:
    """Both read one metric by name and append to the hub: ordered by whole hubs, each would wait for the other."""
    one = Host({"cbstate": {"hub": {"loss": Read()}, "log": Append()}}, "one")
    other = Host({"cbstate": {"hub": {"accuracy": Read()}, "log": Append()}}, "other")
    metrics = Host({"cbstate": {"hub": {"loss": Write(), "accuracy": Write()}}}, "metrics")
    whole = Host({"cbstate": {"hub": Read()}}, "whole")
    hub = [Host({"cbstate": {"hub": Append()}}, f"hub{i}") for i in range(2)]
    for one_first in (True, False):
        setters = [one, other] if one_first else [other, one]
        graph = build_graph([whole, *setters, metrics], PHASES)
        assert names(graph) == " ".join(["metrics", "whole", *map(repr, setters)])
    named = [Host({"cbstate": {"hub": {name: Append()}, "seen": Read()}}, name) for name in ("loss", "accuracy")]
    seen = Host({"cbstate": {"seen": Write(), "hub": {"loss": Read(previous=True)}}}, "seen")
    graph = build_graph([whole, *named, *hub, seen], PHASES)
    assert names(graph) == "hub0 hub1 seen loss accuracy whole"


def test_one_edge_tells_every_reason_and_every_moment_once() -> None:
    class Partial(Callback):
        def stateaccess(self) -> Any:
            return {"cbstate": {"a": Write(), "b": Write()}}

        @on(access={"cbstate": {"a": Write()}})
        def at_step_end(self, event: StepEnd, phase, learner) -> None: ...

        @on(access={"cbstate": {"b": Write()}})
        def at_epoch_end(self, event: EpochEnd, phase: AbstractTrainingPhase, learner) -> None: ...

    graph = build_graph([Reader({"cbstate": {"a": Read(), "b": Read()}}), Partial()], PHASES)
    edge = graph.edges[1, 0]
    a, b = ("Partial writes `cbstate.a`, Reader reads it", "Partial writes `cbstate.b`, Reader reads it")
    assert edge.at == {
        (StepEnd, TrainingPhase): [a],
        (EpochEnd, TrainingPhase): [b],
        (StepEnd, ValidationPhase): [a],
    }
    assert edge.reasons == [a, b]
    digraph = graph.digraph
    assert dict(digraph.nodes(data=True)) == {
        "Reader": {"callback": graph.declared[0].callback, "position": 0},
        "Partial()": {"callback": graph.declared[1].callback, "position": 1},
    }
    assert list(digraph.edges(data=True)) == [
        (
            "Partial()",
            "Reader",
            {
                "reasons": (a, b),
                "moments": ("StepEnd x TrainingPhase", "EpochEnd x TrainingPhase", "StepEnd x ValidationPhase"),
            },
        )
    ]


def test_the_order_of_each_moment_is_its_own() -> None:
    class AtStep(Host):
        @on
        def run(self, event: StepEnd, phase: TrainingPhase, learner) -> None: ...

    graph = build_graph(
        [Reader({"cbstate": {"a": Read()}}), AtStep({"cbstate": {"a": Write()}}), Host(name="other")], PHASES
    )
    assert names(graph, StepEnd, TrainingPhase) == "AtStep Reader other"
    assert names(graph, StepEnd, ValidationPhase) == "Reader other"
    assert names(graph, StepBegin, TrainingPhase) == "Reader other"
    assert graph.order(UpdateEnd, TrainingPhase) == []


# --- what is stated ---------------------------------------------------------------------------------------------------


class AfterReader(Writer):
    def runafter(self) -> Any:
        return (Reader,)


WRITES, READS = {"cbstate": {"a": Write()}}, {"cbstate": {"a": Read()}}


def test_runafter_outweighs_reads_and_writes() -> None:
    graph = build_graph([AfterReader(WRITES), Reader(READS)], PHASES)
    assert names(graph) == "Reader AfterReader"
    assert edges(graph) == {"Reader -> AfterReader": ["AfterReader.runafter names Reader"]}


def test_runafter_settles_two_writers_and_a_base_class_stands_for_its_subclasses() -> None:
    class Sub(Reader): ...

    class AfterHost(Host):
        def runafter(self) -> Any:
            return (Host,)

    graph = build_graph([AfterReader(WRITES), Sub(WRITES)], PHASES)
    assert edges(graph) == {"Sub -> AfterReader": ["AfterReader.runafter names Reader"]}
    graph = build_graph([AfterHost(WRITES), every(Sub(WRITES), steps=3)], PHASES)
    assert names(graph) == "Sub at EverySteps(steps=3) AfterHost"
    assert edges(graph) == {"Sub at EverySteps(steps=3) -> AfterHost": ["AfterHost.runafter names Host"]}


def test_runafter_a_class_nobody_uses_means_nothing() -> None:
    graph = build_graph([AfterReader(WRITES), Host(READS)], PHASES)
    assert edges(graph) == {"AfterReader -> Host": ["AfterReader writes `cbstate.a`, Host reads it"]}


def test_in_order_settles_instances_and_outweighs_reads_and_writes() -> None:
    one, two, three = (Host(WRITES, name) for name in ("one", "two", "three"))
    reader = Reader(READS)
    graph = build_graph([in_order(three, one, two), in_order(reader, three, one, two)], PHASES)
    assert names(graph) == "Reader three one two"
    assert edges(graph) == {
        "three -> one": ["in_order"],
        "three -> two": ["in_order"],
        "one -> two": ["in_order"],
        "Reader -> three": ["in_order"],
        "Reader -> one": ["in_order"],
        "Reader -> two": ["in_order"],
    }


class AfterAfterReader(Host):
    def runafter(self) -> Any:
        return (AfterReader,)


class First(Host):
    def resolveconflict(self, other: Callback) -> Any:
        return RunFirst(self) if isinstance(other, Reader) else super().resolveconflict(other)


@pytest.mark.parametrize("turned", [False, True])
def test_an_order_that_follows_from_statements_settles_two_writers(turned: bool) -> None:
    reader, after, last = Reader(WRITES), AfterReader(READS), AfterAfterReader(WRITES)
    graph = build_graph([last, after, reader] if turned else [reader, after, last], PHASES)
    assert names(graph) == "Reader AfterReader AfterAfterReader"
    assert edges(graph) == {
        "Reader -> AfterReader": ["AfterReader.runafter names Reader"],
        "AfterReader -> AfterAfterReader": ["AfterAfterReader.runafter names AfterReader"],
    }


@pytest.mark.parametrize("shuffled", list(itertools.permutations(range(4))))
def test_statements_of_all_kinds_can_be_combined_in_any_list(shuffled: tuple[int, ...]) -> None:
    first, reader, after, last = First(WRITES), Reader(), AfterReader(), Host(WRITES, "last")
    listed = [[first, reader, after, last][i] for i in shuffled]
    graph = build_graph([*listed, in_order(after, last)], PHASES)
    assert names(graph) == "First Reader AfterReader last"
    assert "First -> last" not in edges(graph)


def test_an_order_that_only_reads_and_writes_give_settles_no_conflict() -> None:
    both = {"a": Write(), "b": Write()}
    one, two = Host({"cbstate": both}, "one"), Host({"cbstate": {"b": Read(), "c": Write()}}, "two")
    three = Host({"cbstate": {"a": Write(), "c": Read()}}, "three")
    with pytest.raises(ConflictError) as error:
        build_graph([one, two, three], PHASES)
    assert error.value.what == "one and three both write `cbstate.a` and no order is declared."
    assert names(build_graph([one, two, three, in_order(one, three)], PHASES)) == "one two three"


def test_only_callbacks_of_the_moment_can_be_between_two_writers() -> None:
    class AtStepEnd(Callback):
        @on
        def run(self, event: StepEnd, phase, learner) -> None: ...

        def __repr__(self) -> str:
            return "between"

    one, between, two = Host(WRITES, "one"), AtStepEnd(), Host(WRITES, "two")
    with pytest.raises(ConflictError) as error:
        build_graph([in_order(one, between), in_order(between, two)], (TrainingPhase,))
    assert error.value.what == "one and two both write `cbstate.a` and no order is declared."
    assert error.value.why == (
        "at FitBegin x TrainingPhase, EpochBegin x TrainingPhase, StepBegin x TrainingPhase and 4 more both run, "
        "and the result depends on which is last"
    )
    assert names(build_graph([in_order(one, between, two)], PHASES)) == "one between two"


def test_two_statements_of_one_order_are_both_told() -> None:
    one, two = Reader(WRITES), AfterReader(WRITES)
    graph = build_graph([in_order(one, two)], PHASES)
    assert edges(graph) == {"Reader -> AfterReader": ["AfterReader.runafter names Reader", "in_order"]}


# --- resolutions ------------------------------------------------------------------------------------------------------


class Settling(Host):
    """Answers what it is told to."""

    def __init__(self, access: Any, name: str, answer: Any) -> None:
        super().__init__(access, name)
        self.answer = answer

    def resolveconflict(self, other: Callback) -> Any:
        return self.answer(self, other)


def test_either_side_may_say_who_runs_first_and_wrappers_forward_the_answer() -> None:
    def self_first(me: Any, other: Any) -> RunFirst:
        return RunFirst(me)

    def other_first(me: Any, other: Any) -> RunFirst:
        return RunFirst(other)

    for answer, order in ((self_first, "settling plain"), (other_first, "plain settling")):
        for wrap in (lambda cb: cb, lambda cb: every(cb, epochs=1)):
            for turn in (1, -1):
                plain, settling = Host(WRITES, "plain"), Settling(WRITES, "settling", answer)
                graph = build_graph([wrap(plain), wrap(settling)][::turn], PHASES)
                assert names(graph).replace(" at EveryEpochs(epochs=1)", "") == order


def test_a_wrapper_may_be_named_as_the_first() -> None:
    inner = Host(WRITES, "inner")
    wrapped = every(inner, epochs=1)
    graph = build_graph([Settling(WRITES, "settling", lambda me, other: RunFirst(wrapped)), wrapped], PHASES)
    assert edges(graph) == {
        "inner at EveryEpochs(epochs=1) -> settling": [
            "Settling.resolveconflict says RunFirst(inner at EveryEpochs(epochs=1))"
        ]
    }


def test_a_class_may_be_named_as_the_first_if_only_one_of_the_two_is_of_it() -> None:
    graph = build_graph([Settling(WRITES, "settling", lambda me, other: RunFirst(Writer)), Writer(WRITES)], PHASES)
    assert edges(graph) == {"Writer -> settling": ["Settling.resolveconflict says RunFirst(Writer)"]}


def test_no_conflict_leaves_the_list_order_for_writers_and_for_readers() -> None:
    for other in (WRITES, READS):
        for turn in (1, -1):
            listed = [Settling(WRITES, "free", lambda me, other: NoConflict()), Host(other, "other")][::turn]
            graph = build_graph(listed, PHASES)
            assert graph.order(StepEnd, TrainingPhase) == listed
            assert edges(graph) == {}


def test_a_resolution_outweighs_reads_and_writes() -> None:
    settling = Settling(READS, "reader", lambda me, other: RunFirst(me))
    graph = build_graph([Writer(WRITES), settling], PHASES)
    assert edges(graph) == {"reader -> Writer": ["Settling.resolveconflict says RunFirst(reader)"]}


def test_registered_resolutions_hold_for_subclasses_in_either_order_and_the_most_specific_answers() -> None:
    class SubWriter(Writer): ...

    @resolveconflict.register(Writer, Reader)
    def _(writer: Writer, reader: Reader) -> RunFirst:
        assert (isinstance(writer, Writer), isinstance(reader, Reader)) == (True, True)
        return RunFirst(reader)

    try:
        for writer, turn in itertools.product((Writer, SubWriter), (1, -1)):
            graph = build_graph([writer(WRITES), Reader(WRITES)][::turn], PHASES)
            assert edges(graph) == {f"Reader -> {writer.__name__}": ["resolveconflict.register says RunFirst(Reader)"]}

        @resolveconflict.register(Reader, SubWriter)
        def _(reader: Reader, writer: SubWriter) -> RunFirst:
            return RunFirst(writer)

        try:
            for turn in (1, -1):
                graph = build_graph([SubWriter(WRITES), Reader(WRITES)][::turn], PHASES)
                assert edges(graph) == {"SubWriter -> Reader": ["resolveconflict.register says RunFirst(SubWriter)"]}
        finally:
            resolveconflict.unregister(Reader, SubWriter)
    finally:
        resolveconflict.unregister(Writer, Reader)
