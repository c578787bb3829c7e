"""Equality of callback graphs, and the descriptions of their differences."""

import pytest

import fluxcb
from fluxcb import in_order
from fluxcb._check.graph_diff import differences
from fluxcb.callbacks import ClipGradients, Metrics, Recorder
from fluxcb.events import FitBegin
from fluxcb.phases import TrainingPhase


def graph(*callbacks):
    return fluxcb.check(callbacks, default_callbacks=False)


def test_equal_callbacks_have_equal_graphs():
    assert graph(Recorder(), Metrics()) == graph(Recorder(), Metrics())
    assert differences(graph(Recorder()), graph(Recorder())) == []


def test_graph_is_not_equal_to_other_types():
    assert graph() != 3
    assert graph().__eq__(3) is NotImplemented


def test_graphs_are_unhashable():
    with pytest.raises(TypeError, match="unhashable"):
        hash(graph())


def test_differences_list_missing_callbacks():
    assert differences(graph(Recorder()), graph()) == [
        "callback graphs differ in 1 callback, 6 orders",
        "only left: Recorder()",
        *(
            f"only left: {event} x {phase} (Recorder())"
            for phase in ("TrainingPhase", "ValidationPhase")
            for event in ("EpochBegin", "StepEnd", "EpochEnd")
        ),
    ]


def test_differences_list_changed_order():
    left = graph(in_order(ClipGradients(1.0), ClipGradients(2.0)))
    right = graph(in_order(ClipGradients(2.0), ClipGradients(1.0)))
    assert left != right
    assert differences(left, right) == [
        "callback graphs differ in 2 edges, 1 order",
        "only left: ClipGradients(1.0) -> ClipGradients(2.0) (in_order)",
        "only right: ClipGradients(2.0) -> ClipGradients(1.0) (in_order)",
        "BackwardEnd x TrainingPhase:",
        "  left:  ClipGradients(1.0), ClipGradients(2.0)",
        "  right: ClipGradients(2.0), ClipGradients(1.0)",
    ]


def test_differences_list_changed_reasons():
    assert differences(graph(in_order(Recorder(), Metrics())), graph(Recorder(), Metrics())) == [
        "callback graphs differ in 1 edge",
        "only left: Recorder() -> Metrics() (in_order)",
    ]


def test_moments_added_later_affect_equality_only_with_handlers():
    one, other = graph(Recorder()), graph(Recorder())
    one.handlers(FitBegin, TrainingPhase)
    assert one == other
