"""The descriptions of handler schedules in the list of callbacks."""

from dataclasses import dataclass

from fluxcb import Callback, EverySteps, Predicate, on
from fluxcb._declare.schedules import Schedule
from fluxcb._tools.catalogue import listed, runs_of
from fluxcb.events import EpochEnd, FitEnd, StepEnd, Trigger, UpdateEnd
from fluxcb.phases import Phase, TrainingPhase


@dataclass(frozen=True)
class AtFirst(Schedule):
    """A custom schedule without fields."""

    def due(self, step, epoch, learner):
        return step == 1


@dataclass(frozen=True)
class AtStep(Schedule):
    """A custom schedule that describes itself."""

    where: str
    number: int

    def __str__(self):
        return f"at step {self.number}"


def late(learner):
    return learner.progress.epoch > 3


class Runs(Callback):
    @on(StepEnd, TrainingPhase, when=EverySteps(10))
    def steps(self, event, phase, learner): ...

    @on(EpochEnd, TrainingPhase, when=Predicate(late))
    def epochs(self, event, phase, learner): ...

    @on(Trigger, TrainingPhase, when=AtFirst())
    def first(self, event, phase, learner): ...

    @on(FitEnd, Phase, when=AtStep("here", 7))
    def seventh(self, event, phase, learner): ...

    @on(UpdateEnd, TrainingPhase)
    def traced(self, event, phase, learner): ...


def test_schedules_are_described_in_words():
    assert set(runs_of(Runs())) == {
        "StepEnd x TrainingPhase (host, every 10 steps)",
        "EpochEnd x TrainingPhase (host, while `late` holds)",
        "Trigger x TrainingPhase (host, AtFirst())",
        "FitEnd x Phase (host, at step 7)",
        "UpdateEnd x TrainingPhase (traced)",
    }


def test_every_built_in_schedule_has_description():
    told = [run for callback in listed() for run in callback.runs]
    assert told
    assert [run for run in told if run.count("(") != 1] == []
