"""The callback graph as text."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from fluxcb import Append, Callback, EverySteps, Read, Write, every, in_order, on
from fluxcb._check.preflight import checked_graph, unchecked_graph
from fluxcb._check.render import explain
from fluxcb.events import BackwardEnd, EpochEnd, HostEvent, StepEnd
from fluxcb.phases import Phase, TrainingPhase, ValidationPhase


class Draw(HostEvent):
    """A custom event."""


class Recorder(Callback):
    def stateaccess(self) -> Any:
        return {"cbstate": {"history": Write(), "epochs": Write()}, "step": {"loss": Read()}}

    @on(access={"cbstate": {"history": Write()}, "step": {"loss": Read()}})
    def record(self, event: StepEnd, phase: Phase, learner: Any) -> None: ...

    @on(access={"cbstate": {"epochs": Write()}})
    def close(self, event: EpochEnd, phase: TrainingPhase, learner: Any) -> None: ...


class Printer(Callback):
    def __init__(self, text: str = "") -> None:
        self.text = text

    def stateaccess(self) -> Any:
        return {"cbstate": {"history": Read(), "epochs": Read()}}

    def runafter(self) -> Any:
        return (Clip,)

    @on(when=EverySteps(10))
    def show(self, event: StepEnd | EpochEnd | Draw, phase: TrainingPhase, learner: Any) -> None: ...

    def __repr__(self) -> str:
        return f'Printer("{self.text}")'


class Clip(Callback):
    def stateaccess(self) -> Any:
        return {"step": {"grads": Write()}}

    @on
    def clip(self, event: BackwardEnd, phase: Phase, learner: Any) -> None: ...

    @on(access={})
    def count(self, event: StepEnd, phase: Phase, learner: Any) -> None: ...


def test_explain_lists_order_and_reasons_for_each_moment() -> None:
    first, second = every(Printer("a"), epochs=2), Printer("b")
    graph = checked_graph(
        [first, second, Recorder(), Clip(), in_order(second, first)], (TrainingPhase, ValidationPhase)
    )
    a, b = 'Printer("a") at EveryEpochs(epochs=2)', 'Printer("b")'
    assert (
        explain(graph)
        == f"""\
BackwardEnd x TrainingPhase (traced)
  1. Clip().clip
StepEnd x TrainingPhase (host)
  1. Recorder().record
  2. Clip().count
  3. {b}.show  [EverySteps(steps=10)]
       after Recorder(): Recorder writes `cbstate.history`, Printer reads it
       after Clip(): Printer.runafter names Clip
  4. {a}.show  [EverySteps(steps=10), EveryEpochs(epochs=2)]
       after Recorder(): Recorder writes `cbstate.history`, Printer reads it
       after Clip(): Printer.runafter names Clip
       after {b}: in_order
     1 and 2 need no order: they run in list order
EpochEnd x TrainingPhase (host)
  1. Recorder().close
  2. {b}.show  [EverySteps(steps=10)]
       after Recorder(): Recorder writes `cbstate.epochs`, Printer reads it
  3. {a}.show  [EverySteps(steps=10), EveryEpochs(epochs=2)]
       after Recorder(): Recorder writes `cbstate.epochs`, Printer reads it
       after {b}: in_order
Draw x TrainingPhase (host)
  1. {b}.show  [EverySteps(steps=10)]
  2. {a}.show  [EverySteps(steps=10), EveryEpochs(epochs=2)]
       after {b}: in_order
StepEnd x ValidationPhase (host)
  1. Recorder().record
  2. Clip().count
     1 and 2 need no order: they run in list order"""
    )


def test_explain_of_empty_graph() -> None:
    graph = checked_graph([], (TrainingPhase,))
    assert explain(graph) == ""


class Average(Callback):
    def stateaccess(self) -> Any:
        return {"step": {"loss": Read()}, "cbstate": {"average": Write()}}

    @on
    def average(self, event: BackwardEnd, phase: TrainingPhase, learner: Any) -> None: ...


class Stop(Callback):
    def stateaccess(self) -> Any:
        return {"control": Append(), "cbstate": {"average": Read()}}

    @on
    def stop(self, event: StepEnd, phase: TrainingPhase, learner: Any) -> None: ...


class Bell(Callback):
    @on
    def ring(self, event: StepEnd, phase: TrainingPhase, learner: Any) -> None: ...


class Whistle(Bell):
    pass


class Table(Callback):
    def stateaccess(self) -> Any:
        return {"cbstate": {"average": Read()}}

    @on
    def row(self, event: EpochEnd, phase: TrainingPhase, learner: Any) -> None: ...

    @on
    def draw(self, event: Draw, phase: TrainingPhase, learner: Any) -> None: ...


def test_explain_gives_reason_for_handlers_without_edges() -> None:
    graph = checked_graph([Stop(), Bell(), Whistle(), Table(), Clip(), Average()], (TrainingPhase,))
    assert (
        explain(graph)
        == """\
BackwardEnd x TrainingPhase (traced)
  1. Average().average
  2. Clip().clip
     1 and 2 need no order: they run in the order of their class names
StepEnd x TrainingPhase (host)
  1. Bell().ring
  2. Whistle().ring
  3. Clip().count
  4. Stop().stop
       as late as possible: a cancel skips the handlers after it
     1 to 3 need no order: they run in list order
EpochEnd x TrainingPhase (host)
  1. Table().row
       reads `cbstate.average`, which Average wrote at BackwardEnd
Draw x TrainingPhase (host)
  1. Table().draw"""
    )


def test_graph_is_printed_as_summary() -> None:
    first, second = every(Printer("a"), epochs=2), Printer("b")
    graph = checked_graph(
        [first, second, Recorder(), Clip(), in_order(second, first)], (TrainingPhase, ValidationPhase)
    )
    assert repr(graph) == "<CallbackGraph: 4 callbacks, 5 moments in 2 phases, 5 edges>"
    assert (
        str(graph)
        == """\
4 callbacks, 5 moments in 2 phases, 5 edges

TrainingPhase
  BackwardEnd  traced  1. Clip()
  StepEnd      host    1. Recorder()  2. Clip()  3. Printer("b")
                       4. Printer("a") at EveryEpochs(epochs=2)
        3 after 1: Recorder writes `cbstate.history`, Printer reads it
        3 after 2: Printer.runafter names Clip
        4 after 3: in_order
  EpochEnd     host    1. Recorder()  2. Printer("b")
                       3. Printer("a") at EveryEpochs(epochs=2)
        2 after 1: Recorder writes `cbstate.epochs`, Printer reads it
        3 after 2: in_order
  Draw         host    1. Printer("b")  2. Printer("a") at EveryEpochs(epochs=2)
        2 after 1: in_order

ValidationPhase
  StepEnd      host    1. Recorder()  2. Clip()

If no reason is given, no order is needed: host handlers run in list order,
traced handlers in the order of their class names."""
    )


def test_summary_of_empty_or_invalid_callbacks() -> None:
    assert str(checked_graph([], (TrainingPhase,))) == "0 callbacks, 0 moments in 0 phases, 0 edges"
    graph = unchecked_graph([Clip(), Clip()], (TrainingPhase,))
    assert repr(graph) == "<CallbackGraph: 2 callbacks, 2 moments in 1 phase, 0 edges, 1 problem>"


def test_explanation_is_string_with_plain_repr() -> None:
    graph = checked_graph([Recorder()], (TrainingPhase,))
    shown = graph.explain()
    assert shown == explain(graph)
    assert repr(shown) == str(shown) == explain(graph)
    assert shown.splitlines()[0] == "StepEnd x TrainingPhase (host)"
    assert pickle.loads(pickle.dumps(shown)) == shown
    assert {shown: 1}[explain(graph)] == 1


def test_the_networkx_graph_names_where_its_picture_is():
    graph = checked_graph([Recorder()], (TrainingPhase, ValidationPhase))
    drawn = graph.digraph
    with pytest.raises(AttributeError) as raised:
        drawn.render("text")
    assert str(raised.value) == (
        "A `CallbackDiGraph` has no attribute `render`.\n"
        "  fix:   for the graph of a Learner, write `learner.callbacks.graph.render`"
    )
    with pytest.raises(AttributeError, match="has no attribute 'colour'"):
        _ = drawn.colour
    assert not hasattr(drawn, "explain")
