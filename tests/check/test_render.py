"""The graph as text, whole."""

from __future__ import annotations

from typing import Any

from fluxcb import Callback, EverySteps, Read, Write, every, in_order, on
from fluxcb._check.preflight import build_graph
from fluxcb._check.render import explain
from fluxcb.events import BackwardEnd, EpochEnd, HostEvent, StepEnd
from fluxcb.phases import Phase, TrainingPhase, ValidationPhase


class Draw(HostEvent):
    """An event of the user's own."""


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


def test_explain_tells_per_moment_who_runs_in_which_order_and_why() -> None:
    first, second = every(Printer("a"), epochs=2), Printer("b")
    graph = build_graph([first, second, Recorder(), Clip(), in_order(second, first)], (TrainingPhase, ValidationPhase))
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
  2. Clip().count"""
    )


def test_nothing_is_explained_in_no_lines() -> None:
    graph = build_graph([], (TrainingPhase,))
    assert explain(graph) == ""
