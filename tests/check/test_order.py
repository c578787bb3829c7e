"""The order at each moment, the edges with their reasons, and the precedence of order statements."""

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
from fluxcb._check.preflight import checked_graph
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
    """Handle all host events with the given access."""

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
def test_writer_runs_before_reader(written: Any, read: Any, paths: str) -> None:
    what, _, other = paths.partition(" ")
    reason = f"Writer writes `{what}`, Reader reads " + (f"`{other}`" if other else "it")
    graph = checked_graph([Reader(read), Writer(written)], PHASES)
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
def test_independent_callbacks_have_no_order(written: Any, read: Any) -> None:
    creator = Host({"cbstate": {"b": Append(), "a": {"y": Append()}}}, "creator")
    creator.handlers = list  # type: ignore[method-assign]  # it runs at no moment
    graph = checked_graph([Reader(read), Writer(written), creator], PHASES)
    assert names(graph) == "Reader Writer"
    assert edges(graph) == {}


def test_setters_that_read_metrics_and_append_logs_form_no_cycle() -> None:
    """Both read one metric by name and append to the hub. If whole hubs were ordered, each would wait for the other."""
    one = Host({"cbstate": {"hub": {"loss": Read()}, "log": Append()}}, "one")
    other = Host({"cbstate": {"hub": {"accuracy": Read()}, "log": Append()}}, "other")
    metrics = Host({"cbstate": {"hub": {"loss": Write(), "accuracy": Write()}}}, "metrics")
    whole = Host({"cbstate": {"hub": Read()}}, "whole")
    hub = [Host({"cbstate": {"hub": Append()}}, f"hub{i}") for i in range(2)]
    for one_first in (True, False):
        setters = [one, other] if one_first else [other, one]
        graph = checked_graph([whole, *setters, metrics], PHASES)
        assert names(graph) == " ".join(["metrics", "whole", *map(repr, setters)])
    named = [Host({"cbstate": {"hub": {name: Append()}, "seen": Read()}}, name) for name in ("loss", "accuracy")]
    seen = Host({"cbstate": {"seen": Write(), "hub": {"loss": Read(previous=True)}}}, "seen")
    graph = checked_graph([whole, *named, *hub, seen], PHASES)
    assert names(graph) == "hub0 hub1 seen loss accuracy whole"


def test_edge_lists_each_reason_and_moment_once() -> None:
    class Partial(Callback):
        def stateaccess(self) -> Any:
            return {"cbstate": {"a": Write(), "b": Write()}}

        @on(access={"cbstate": {"a": Write()}})
        def at_step_end(self, event: StepEnd, phase, learner) -> None: ...

        @on(access={"cbstate": {"b": Write()}})
        def at_epoch_end(self, event: EpochEnd, phase: AbstractTrainingPhase, learner) -> None: ...

    graph = checked_graph([Reader({"cbstate": {"a": Read(), "b": Read()}}), Partial()], PHASES)
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


def test_each_moment_has_its_own_order() -> None:
    class AtStep(Host):
        @on
        def run(self, event: StepEnd, phase: TrainingPhase, learner) -> None: ...

    graph = checked_graph(
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


def test_runafter_takes_precedence_over_access() -> None:
    graph = checked_graph([AfterReader(WRITES), Reader(READS)], PHASES)
    assert names(graph) == "Reader AfterReader"
    assert edges(graph) == {"Reader -> AfterReader": ["AfterReader.runafter names Reader"]}


def test_runafter_resolves_conflict_and_includes_subclasses() -> None:
    class Sub(Reader): ...

    class AfterHost(Host):
        def runafter(self) -> Any:
            return (Host,)

    graph = checked_graph([AfterReader(WRITES), Sub(WRITES)], PHASES)
    assert edges(graph) == {"Sub -> AfterReader": ["AfterReader.runafter names Reader"]}
    graph = checked_graph([AfterHost(WRITES), every(Sub(WRITES), steps=3)], PHASES)
    assert names(graph) == "Sub at EverySteps(steps=3) AfterHost"
    assert edges(graph) == {"Sub at EverySteps(steps=3) -> AfterHost": ["AfterHost.runafter names Host"]}


def test_runafter_with_absent_class_has_no_effect() -> None:
    graph = checked_graph([AfterReader(WRITES), Host(READS)], PHASES)
    assert edges(graph) == {"AfterReader -> Host": ["AfterReader writes `cbstate.a`, Host reads it"]}


def test_in_order_resolves_conflict_and_takes_precedence_over_access() -> None:
    one, two, three = (Host(WRITES, name) for name in ("one", "two", "three"))
    reader = Reader(READS)
    graph = checked_graph([in_order(three, one, two), in_order(reader, three, one, two)], PHASES)
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
def test_transitive_order_resolves_conflict(turned: bool) -> None:
    reader, after, last = Reader(WRITES), AfterReader(READS), AfterAfterReader(WRITES)
    graph = checked_graph([last, after, reader] if turned else [reader, after, last], PHASES)
    assert names(graph) == "Reader AfterReader AfterAfterReader"
    assert edges(graph) == {
        "Reader -> AfterReader": ["AfterReader.runafter names Reader"],
        "AfterReader -> AfterAfterReader": ["AfterAfterReader.runafter names AfterReader"],
    }


@pytest.mark.parametrize("shuffled", list(itertools.permutations(range(4))))
def test_order_statements_of_all_kinds_combine(shuffled: tuple[int, ...]) -> None:
    first, reader, after, last = First(WRITES), Reader(), AfterReader(), Host(WRITES, "last")
    listed = [[first, reader, after, last][i] for i in shuffled]
    graph = checked_graph([*listed, in_order(after, last)], PHASES)
    assert names(graph) == "First Reader AfterReader last"
    assert "First -> last" not in edges(graph)


def test_order_by_access_does_not_resolve_conflict() -> None:
    both = {"a": Write(), "b": Write()}
    one, two = Host({"cbstate": both}, "one"), Host({"cbstate": {"b": Read(), "c": Write()}}, "two")
    three = Host({"cbstate": {"a": Write(), "c": Read()}}, "three")
    with pytest.raises(ConflictError) as error:
        checked_graph([one, two, three], PHASES)
    assert error.value.what == "one and three both write `cbstate.a` and no order is declared."
    assert names(checked_graph([one, two, three, in_order(one, three)], PHASES)) == "one two three"


def test_only_callbacks_at_same_moment_order_two_writers() -> None:
    class AtStepEnd(Callback):
        @on
        def run(self, event: StepEnd, phase, learner) -> None: ...

        def __repr__(self) -> str:
            return "between"

    one, between, two = Host(WRITES, "one"), AtStepEnd(), Host(WRITES, "two")
    with pytest.raises(ConflictError) as error:
        checked_graph([in_order(one, between), in_order(between, two)], (TrainingPhase,))
    assert error.value.what == "one and two both write `cbstate.a` and no order is declared."
    assert error.value.why == (
        "both run at FitBegin x TrainingPhase, EpochBegin x TrainingPhase, StepBegin x TrainingPhase and 4 more, "
        "and the result depends on which one is last"
    )
    assert names(checked_graph([in_order(one, between, two)], PHASES)) == "one between two"


def test_edge_lists_both_order_statements() -> None:
    one, two = Reader(WRITES), AfterReader(WRITES)
    graph = checked_graph([in_order(one, two)], PHASES)
    assert edges(graph) == {"Reader -> AfterReader": ["AfterReader.runafter names Reader", "in_order"]}


# --- resolutions ------------------------------------------------------------------------------------------------------


class Settling(Host):
    """Return the given resolution."""

    def __init__(self, access: Any, name: str, answer: Any) -> None:
        super().__init__(access, name)
        self.answer = answer

    def resolveconflict(self, other: Callback) -> Any:
        return self.answer(self, other)


def test_either_callback_may_resolve_and_wrappers_forward_resolution() -> None:
    def self_first(me: Any, other: Any) -> RunFirst:
        return RunFirst(me)

    def other_first(me: Any, other: Any) -> RunFirst:
        return RunFirst(other)

    for answer, order in ((self_first, "settling plain"), (other_first, "plain settling")):
        for wrap in (lambda cb: cb, lambda cb: every(cb, epochs=1)):
            for turn in (1, -1):
                plain, settling = Host(WRITES, "plain"), Settling(WRITES, "settling", answer)
                graph = checked_graph([wrap(plain), wrap(settling)][::turn], PHASES)
                assert names(graph).replace(" at EveryEpochs(epochs=1)", "") == order


def test_resolution_may_name_wrapper_as_first() -> None:
    inner = Host(WRITES, "inner")
    wrapped = every(inner, epochs=1)
    graph = checked_graph([Settling(WRITES, "settling", lambda me, other: RunFirst(wrapped)), wrapped], PHASES)
    assert edges(graph) == {
        "inner at EveryEpochs(epochs=1) -> settling": [
            "Settling.resolveconflict returns RunFirst(inner at EveryEpochs(epochs=1))"
        ]
    }


def test_resolution_may_name_class_of_exactly_one_callback() -> None:
    graph = checked_graph([Settling(WRITES, "settling", lambda me, other: RunFirst(Writer)), Writer(WRITES)], PHASES)
    assert edges(graph) == {"Writer -> settling": ["Settling.resolveconflict returns RunFirst(Writer)"]}


def test_no_conflict_keeps_list_order() -> None:
    for other in (WRITES, READS):
        for turn in (1, -1):
            listed = [Settling(WRITES, "free", lambda me, other: NoConflict()), Host(other, "other")][::turn]
            graph = checked_graph(listed, PHASES)
            assert graph.order(StepEnd, TrainingPhase) == listed
            assert edges(graph) == {}


def test_resolution_takes_precedence_over_access() -> None:
    settling = Settling(READS, "reader", lambda me, other: RunFirst(me))
    graph = checked_graph([Writer(WRITES), settling], PHASES)
    assert edges(graph) == {"reader -> Writer": ["Settling.resolveconflict returns RunFirst(reader)"]}


def test_registered_resolutions_apply_to_subclasses_and_most_specific_wins() -> None:
    class SubWriter(Writer): ...

    @resolveconflict.register(Writer, Reader)
    def _(writer: Writer, reader: Reader) -> RunFirst:
        assert (isinstance(writer, Writer), isinstance(reader, Reader)) == (True, True)
        return RunFirst(reader)

    try:
        for writer, turn in itertools.product((Writer, SubWriter), (1, -1)):
            graph = checked_graph([writer(WRITES), Reader(WRITES)][::turn], PHASES)
            assert edges(graph) == {
                f"Reader -> {writer.__name__}": ["resolveconflict.register returns RunFirst(Reader)"]
            }

        @resolveconflict.register(Reader, SubWriter)
        def _(reader: Reader, writer: SubWriter) -> RunFirst:
            return RunFirst(writer)

        try:
            for turn in (1, -1):
                graph = checked_graph([SubWriter(WRITES), Reader(WRITES)][::turn], PHASES)
                assert edges(graph) == {"SubWriter -> Reader": ["resolveconflict.register returns RunFirst(SubWriter)"]}
        finally:
            resolveconflict.unregister(Reader, SubWriter)
    finally:
        resolveconflict.unregister(Writer, Reader)


@pytest.mark.parametrize("module", ["__main__", "a_script", "zoo"])
def test_traced_handlers_have_the_same_order_in_a_script_and_in_an_imported_module(module: str) -> None:
    def made(name: str, module: str) -> Callback:
        @on
        def act(self: Any, event: UpdateEnd, phase: AbstractTrainingPhase, learner: Any) -> None: ...

        return type(name, (Callback,), {"act": act, "__module__": module})()

    first, last = made("Average", "fluxcb.callbacks"), made("Stop", "fluxcb.callbacks")
    between = made("Measure", module)
    graph = checked_graph([last, between, first], PHASES)
    assert list(graph.order(UpdateEnd, TrainingPhase)) == [first, between, last]
