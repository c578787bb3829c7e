"""Moments: only there do callbacks meet; what decides between those without an order; and who initialises first."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from fluxcb import (
    Callback,
    Read,
    Write,
    on,
)
from fluxcb._check.graph import CallbackGraph
from fluxcb._check.preflight import build_graph
from fluxcb.events import (
    EpochBegin,
    EpochEnd,
    FitBegin,
    HostEvent,
    LossBegin,
    StepBegin,
    StepEnd,
    TracedEvent,
    UpdateEnd,
)
from fluxcb.phases import AbstractTrainingPhase, Phase, TrainingPhase, ValidationPhase

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


WRITES, READS = {"cbstate": {"a": Write()}}, {"cbstate": {"a": Read()}}


# --- moments ----------------------------------------------------------------------------------------------------------


class Recorder(Callback):
    def stateaccess(self) -> Any:
        return {"cbstate": {"history": Write()}, "step": Read()}

    @on
    def run(self, event: EpochBegin | StepEnd | EpochEnd, phase: Phase, learner) -> None: ...


class ToDevice(Callback):
    def stateaccess(self) -> Any:
        return {"model": Write(), "params": Write(), "step": Write(), "optimizer": Read()}

    @on
    def run(self, event: EpochBegin | StepBegin, phase: Phase, learner) -> None: ...


class Scheduler(Callback):
    def stateaccess(self) -> Any:
        return {
            "data": Read(),
            "cbstate": {"hyperparams": Write(), "history": Read()},
            "optimizer": Write(),
        }

    @on
    def run(self, event: StepBegin, phase: AbstractTrainingPhase, learner) -> None: ...


@pytest.mark.parametrize("classes", list(itertools.permutations([Recorder, ToDevice, Scheduler])))
def test_the_known_false_cycle_is_none(classes: Any) -> None:
    """FluxTraining.jl's issue 122: Recorder -> ToGPU -> Scheduler -> Recorder, of which no two edges share a moment."""
    graph = build_graph([cls() for cls in classes], PHASES)
    assert edges(graph) == {
        "ToDevice() -> Recorder()": ["ToDevice writes `step`, Recorder reads it"],
        "Scheduler() -> ToDevice()": ["Scheduler writes `optimizer`, ToDevice reads it"],
    }
    assert names(graph, EpochBegin) == "ToDevice() Recorder()"
    assert names(graph, StepBegin) == "Scheduler() ToDevice()"
    assert names(graph, StepBegin, ValidationPhase) == "ToDevice()"
    assert names(graph, StepEnd) == names(graph, EpochEnd) == "Recorder()"


def test_writers_that_never_meet_do_not_conflict() -> None:
    class InTraining(Host):
        @on
        def run(self, event: HostEvent, phase: TrainingPhase, learner) -> None: ...

    class InValidation(Host):
        @on
        def run(self, event: HostEvent, phase: ValidationPhase, learner) -> None: ...

    assert edges(build_graph([InTraining(WRITES), InValidation(WRITES)], PHASES)) == {}


def test_an_event_of_ones_own_is_a_moment_when_a_handler_names_it_or_it_is_asked_for() -> None:
    class Draw(HostEvent): ...

    class Drawer(Host):
        @on
        def run(self, event: Draw, phase, learner) -> None: ...

    graph = build_graph([Drawer(), Reader()], PHASES)
    assert (Draw, TrainingPhase) in graph.orders

    class DrawMore(Draw): ...

    assert (DrawMore, TrainingPhase) not in graph.orders
    assert names(graph, DrawMore) == "Drawer Reader"
    assert (DrawMore, TrainingPhase) in graph.orders
    assert graph.order(LossBegin, TrainingPhase) == []


# --- ties -------------------------------------------------------------------------------------------------------------


class Traced(Host):
    @on
    def run(self, event: TracedEvent, phase, learner) -> None: ...


class Alpha(Traced): ...


class Beta(Traced): ...


class Gamma(Traced): ...


def test_host_ties_go_by_the_list_and_traced_ties_by_class_name_then_the_list() -> None:
    hosts = [Host(name=name) for name in "cab"]
    assert names(build_graph(hosts, PHASES)) == "c a b"
    for order in itertools.permutations([Gamma(), Alpha(), Beta()]):
        assert names(build_graph(order, PHASES), LossBegin) == "Alpha Beta Gamma"
    graph = build_graph([Beta(name="b1"), Alpha(name="a1"), Beta(name="b2"), Alpha(name="a2")], PHASES)
    assert names(graph, LossBegin) == "a1 a2 b1 b2"


def test_a_tie_is_broken_only_among_those_that_may_run_next() -> None:
    graph = build_graph([Reader(READS), Host(name="free"), Writer(WRITES)], PHASES)
    assert names(graph) == "free Writer Reader"
    graph = build_graph([Alpha({"params": Read()}), Gamma({"params": Write()}), Beta()], PHASES)
    assert names(graph, UpdateEnd) == "Beta Gamma Alpha"


# --- init -------------------------------------------------------------------------------------------------------------


def test_creators_initialise_before_readers_even_if_they_never_meet() -> None:
    class AtFitBegin(Reader):
        run = None  # type: ignore[assignment]

        @on
        def begin(self, event: FitBegin, phase, learner) -> None: ...

    class AtStepEnd(Writer):
        run = None  # type: ignore[assignment]

        @on
        def end(self, event: StepEnd, phase, learner) -> None: ...

    graph = build_graph([AtFitBegin(READS), AtStepEnd(WRITES)], PHASES)
    assert edges(graph) == {}
    assert [d.label for d in graph.init_order()] == ["AtStepEnd", "AtFitBegin"]


def test_a_loop_over_several_moments_keeps_those_behind_it_waiting() -> None:
    class Ping(Callback):
        def stateaccess(self) -> Any:
            return {"cbstate": {"ping": Write(), "pong": Read(), "a": Write()}}

        @on(access={"cbstate": {"ping": Write(), "a": Write()}})
        def write(self, event: StepBegin, phase, learner) -> None: ...

        @on(access={"cbstate": {"pong": Read()}})
        def read(self, event: StepEnd, phase, learner) -> None: ...

    class Pong(Callback):
        def stateaccess(self) -> Any:
            return {"cbstate": {"ping": Read(), "pong": Write()}}

        @on(access={"cbstate": {"ping": Read()}})
        def read(self, event: StepBegin, phase, learner) -> None: ...

        @on(access={"cbstate": {"pong": Write()}})
        def write(self, event: StepEnd, phase, learner) -> None: ...

    graph = build_graph([Reader(READS), Pong(), Ping()], PHASES)
    assert set(graph.edges) == {(2, 1), (1, 2), (2, 0)}
    assert [d.label for d in graph.init_order()] == ["Pong()", "Ping()", "Reader"]
