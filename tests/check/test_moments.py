"""Moments: callbacks interact only at common moments. Also ties in the order, and the order of initialization."""

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
from fluxcb._check.preflight import checked_graph
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
def test_edges_at_different_moments_do_not_form_cycle(classes: Any) -> None:
    """Issue 122 of FluxTraining.jl: Recorder -> ToGPU -> Scheduler -> Recorder, where no two edges share a moment."""
    graph = checked_graph([cls() for cls in classes], PHASES)
    assert edges(graph) == {
        "ToDevice() -> Recorder()": ["ToDevice writes `step`, Recorder reads it"],
        "Scheduler() -> ToDevice()": ["Scheduler writes `optimizer`, ToDevice reads it"],
    }
    assert names(graph, EpochBegin) == "ToDevice() Recorder()"
    assert names(graph, StepBegin) == "Scheduler() ToDevice()"
    assert names(graph, StepBegin, ValidationPhase) == "ToDevice()"
    assert names(graph, StepEnd) == names(graph, EpochEnd) == "Recorder()"


def test_writers_without_common_moment_do_not_conflict() -> None:
    class InTraining(Host):
        @on
        def run(self, event: HostEvent, phase: TrainingPhase, learner) -> None: ...

    class InValidation(Host):
        @on
        def run(self, event: HostEvent, phase: ValidationPhase, learner) -> None: ...

    assert edges(checked_graph([InTraining(WRITES), InValidation(WRITES)], PHASES)) == {}


def test_custom_event_is_moment_if_handled_or_requested() -> None:
    class Draw(HostEvent): ...

    class Drawer(Host):
        @on
        def run(self, event: Draw, phase, learner) -> None: ...

    graph = checked_graph([Drawer(), Reader()], PHASES)
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


def test_ties_follow_list_on_host_and_class_name_in_traced_events() -> None:
    hosts = [Host(name=name) for name in "cab"]
    assert names(checked_graph(hosts, PHASES)) == "c a b"
    for order in itertools.permutations([Gamma(), Alpha(), Beta()]):
        assert names(checked_graph(order, PHASES), LossBegin) == "Alpha Beta Gamma"
    graph = checked_graph([Beta(name="b1"), Alpha(name="a1"), Beta(name="b2"), Alpha(name="a2")], PHASES)
    assert names(graph, LossBegin) == "a1 a2 b1 b2"


def test_tie_breaking_considers_only_ready_callbacks() -> None:
    graph = checked_graph([Reader(READS), Host(name="free"), Writer(WRITES)], PHASES)
    assert names(graph) == "free Writer Reader"
    graph = checked_graph([Alpha({"params": Read()}), Gamma({"params": Write()}), Beta()], PHASES)
    assert names(graph, UpdateEnd) == "Beta Gamma Alpha"


# --- init -------------------------------------------------------------------------------------------------------------


def test_creators_initialize_before_readers_without_common_moment() -> None:
    class AtFitBegin(Reader):
        run = None  # type: ignore[assignment]

        @on
        def begin(self, event: FitBegin, phase, learner) -> None: ...

    class AtStepEnd(Writer):
        run = None  # type: ignore[assignment]

        @on
        def end(self, event: StepEnd, phase, learner) -> None: ...

    graph = checked_graph([AtFitBegin(READS), AtStepEnd(WRITES)], PHASES)
    assert edges(graph) == {}
    assert [d.label for d in graph.init_order()] == ["AtStepEnd", "AtFitBegin"]


def test_callbacks_after_cycle_wait_for_it() -> None:
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

    graph = checked_graph([Reader(READS), Pong(), Ping()], PHASES)
    assert set(graph.edges) == {(2, 1), (1, 2), (2, 0)}
    assert [d.label for d in graph.init_order()] == ["Pong()", "Ping()", "Reader"]
