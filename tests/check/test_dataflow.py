"""Data flow between moments, compared with a simulation of a fit that records the writers of every value."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from fluxcb import Append, Callback, Read, Write, on
from fluxcb._check.dataflow import data_flows, first_reads, in_fit_order
from fluxcb._check.graph import CallbackGraph
from fluxcb._check.ordering import moment_name
from fluxcb._check.preflight import checked_graph, unchecked_graph
from fluxcb._declare.access import Permission
from fluxcb.callbacks import Checkpointer, FitSummary, Metrics, MetricsPrinter, Recorder
from fluxcb.events import (
    BackwardEnd,
    ComputeEnd,
    EpochBegin,
    EpochEnd,
    FitBegin,
    FitEnd,
    HostEvent,
    StepEnd,
    TracedEvent,
    Trigger,
    UpdateEnd,
)
from fluxcb.phases import AbstractTrainingPhase, TrainingPhase, ValidationPhase

PHASES = (TrainingPhase, ValidationPhase)
IN_A_FIT = [
    (FitBegin, TrainingPhase),
    (EpochBegin, TrainingPhase),
    (BackwardEnd, TrainingPhase),
    (ComputeEnd, TrainingPhase),
    (StepEnd, TrainingPhase),
    (EpochEnd, TrainingPhase),
    (EpochBegin, ValidationPhase),
    (ComputeEnd, ValidationPhase),
    (StepEnd, ValidationPhase),
    (EpochEnd, ValidationPhase),
    (Trigger, TrainingPhase),
    (FitEnd, TrainingPhase),
]
Path = tuple[str, ...]
HUB, X, Y, OTHER, STEP = ("cbstate", "a"), ("cbstate", "a", "x"), ("cbstate", "a", "y"), ("cbstate", "b"), ("step", "s")
PATHS = (HUB, X, Y, OTHER, STEP)


def nested(access: dict[Path, Permission]) -> dict[str, Any]:
    whole: dict[str, Any] = {}
    for path, permission in access.items():
        node = whole
        for name in path[:-1]:
            node = node.setdefault(name, {})
        node[path[-1]] = permission
    return whole


def callback(name: str, handlers: dict[Any, dict[Path, Permission]]) -> Callback:
    """Return a callback with a handler for each moment, each with its own access."""

    def method(name: str, moment: Any, access: dict[Path, Permission]) -> Any:
        def handler(self: Any, event: Any, phase: Any, learner: Any) -> None: ...

        handler.__name__ = name
        return on(*moment, access=nested(access))(handler)

    methods = {f"at_{i}": method(f"at_{i}", *item) for i, item in enumerate(handlers.items())}
    everything = {"cbstate": {"a": Write(), "b": Write()}, "step": {"s": Write()}}
    return type(name, (Callback,), {"stateaccess": lambda self: everything, **methods})()


permissions = st.sampled_from([Read(), Read(previous=True), Write(), Append()])
accesses = st.dictionaries(st.sampled_from(PATHS), permissions, max_size=3).filter(
    lambda access: HUB not in access or not {X, Y} & access.keys()
)
sets = st.lists(st.dictionaries(st.sampled_from(IN_A_FIT), accesses, max_size=5), min_size=2, max_size=5)

Seen = tuple[Any, Path, Any, Path]
"""A writer (its moment and callback), the written path, a reader, and the read path."""


def simulated(graph: CallbackGraph) -> list[Seen]:
    """Run one epoch. Each part of the state records who wrote its value, and each reader records what it reads."""
    parts: dict[Any, list[tuple[Any, Path, Permission]]] = {}
    seen: list[Seen] = []

    def below(path: Path, phase: Any) -> list[Any]:
        # A path that other paths begin with also has a part of its own, for what else it contains.
        return [(leaf, phase if leaf[0] == "step" else None) for leaf in PATHS if leaf[: len(path)] == path]

    for event, phase in IN_A_FIT:
        before = {part: list(writers) for part, writers in parts.items()}
        for handler in graph.orders.get((event, phase), ()):
            me = (event, phase, handler.declared.position)
            for path, permission in handler.access.items():
                if isinstance(permission, Read):
                    source = before if permission.previous else parts
                    found = {
                        (writer, wrote)
                        for part in below(path, phase)
                        for writer, wrote, by in source.get(part, ())
                        if not (isinstance(by, Append) and len(wrote) < len(path))  # it may have added another name
                    }
                    seen += [(writer, wrote, me, path) for writer, wrote in found if writer[2] != me[2]]
            for path, permission in handler.access.items():
                for part in below(path, phase):
                    if isinstance(permission, Write):
                        parts[part] = [(me, path, permission)]
                    elif isinstance(permission, Append):
                        parts.setdefault(part, []).append((me, path, permission))
    return seen


def row(handler: Any) -> Any:
    return handler.event, handler.phase, handler.declared.position


@given(sets)
def test_data_flows_match_simulation(specs: list[Any]) -> None:
    graph = unchecked_graph([callback(f"C{i}", handlers) for i, handlers in enumerate(specs)], PHASES)
    found = [(row(flow.writer), flow.written, row(flow.reader), flow.path) for flow in data_flows(graph, graph.moments)]
    # The simulation names the path of the reader; a flow names the part that both have.
    expected = {(writer, wrote, reader, max(wrote, read, key=len)) for writer, wrote, reader, read in simulated(graph)}
    assert set(found) == expected
    assert len(found) == len(expected)


@given(sets)
def test_flow_connects_each_write_with_first_read_unless_edge_exists(specs: list[Any]) -> None:
    graph = unchecked_graph([callback(f"C{i}", handlers) for i, handlers in enumerate(specs)], PHASES)
    expected = set()
    seen = simulated(graph)
    for writer, wrote, reader, _ in seen:
        same = [r for w, x, r, _ in seen if (w, x) == (writer, wrote) and r[2] == reader[2]]
        first = min(same, key=lambda r: IN_A_FIT.index(r[:2]))
        if first == reader and first[:2] != writer[:2]:
            expected.add((writer, wrote, reader))
    found = [(row(flow.writer), flow.written, row(flow.reader)) for flow in first_reads(graph, graph.moments)]
    assert set(found) == expected
    assert len(found) == len(expected)


def shown(graph: CallbackGraph, moments: Any = None) -> list[str]:
    return [
        f"{flow.writer.declared.label} {moment_name((flow.writer.event, flow.writer.phase))} -> "
        f"{flow.reader.declared.label} {moment_name((flow.reader.event, flow.reader.phase))}: {'.'.join(flow.path)}"
        for flow in first_reads(graph, moments or graph.moments)
    ]


def test_metrics_printer_is_connected_with_metrics() -> None:
    graph = checked_graph([MetricsPrinter(), Metrics()], PHASES)
    assert shown(graph) == [
        "Metrics() EpochEnd x ValidationPhase -> MetricsPrinter() Trigger x TrainingPhase: cbstate.metrics_epoch"
    ]
    of_training = [moment for moment in graph.moments if moment[1] is TrainingPhase]
    assert shown(graph, of_training) == [
        "Metrics() EpochEnd x TrainingPhase -> MetricsPrinter() Trigger x TrainingPhase: cbstate.metrics_epoch"
    ]


def test_moments_are_in_order_of_fit() -> None:
    class Later(HostEvent): ...

    class Middle(TracedEvent): ...

    class Late(TracedEvent): ...

    class Custom(AbstractTrainingPhase):
        name = "custom"
        provides = {BackwardEnd: ("grads",), Middle: ("m",)}

    moments = [*IN_A_FIT, (UpdateEnd, Custom), (Middle, Custom), (BackwardEnd, Custom), (Later, Custom)]
    graph = checked_graph([], (*PHASES, Custom))
    assert in_fit_order(graph, moments[::-1]) == [
        *IN_A_FIT[:6],
        (BackwardEnd, Custom),
        (Middle, Custom),
        (UpdateEnd, Custom),
        (Later, Custom),
        *IN_A_FIT[6:],
    ]


def test_no_flows_for_wildcard_reads_and_custom_events(tmp_path: Any) -> None:
    class Later(HostEvent): ...

    at_unknown = callback("Unknown", {(Later, TrainingPhase): {OTHER: Read()}, (StepEnd, TrainingPhase): {X: Write()}})
    writer = callback("Writer", {(EpochBegin, TrainingPhase): {OTHER: Write(), X: Write()}})
    also_unknown = callback("Also", {(Later, TrainingPhase): {Y: Write()}})
    reader = callback("Reader", {(FitEnd, TrainingPhase): {HUB: Read()}})
    graph = checked_graph([at_unknown, writer, also_unknown, reader], PHASES)
    assert [line.partition(" ")[0] for line in shown(graph)] == ["Unknown()"]
    saver = checked_graph([Checkpointer(tmp_path), FitSummary(), Recorder()], PHASES)
    assert shown(saver) == []


def test_aliases_are_same_state() -> None:
    class Sets(Callback):
        def stateaccess(self) -> Any:
            return {"hyperparams": {"learning_rate": Write()}}

        @on
        def set_it(self, event: StepEnd, phase: TrainingPhase, learner: Any) -> None: ...

    class Looks(Callback):
        def stateaccess(self) -> Any:
            return {"opt_state": Read(), "params": Read()}

        @on
        def look(self, event: EpochEnd, phase: TrainingPhase, learner: Any) -> None: ...

    assert shown(checked_graph([Looks(), Sets()], PHASES)) == [
        "Sets() StepEnd x TrainingPhase -> Looks() EpochEnd x TrainingPhase: hyperparams.learning_rate"
    ]
