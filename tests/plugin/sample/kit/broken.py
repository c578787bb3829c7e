"""Callback sets with different errors."""

from fluxcb import Callback, Read, Write, on
from fluxcb.events import BackwardEnd, EpochEnd, StepEnd
from fluxcb.phases import AbstractTrainingPhase
from kit.train import Decay, WarmUp


class Scale(Callback):
    def stateaccess(self):  # scale
        return {"step": {"grads": Write(), "norm": Read()}}

    @on
    def scale(self, event: BackwardEnd, phase: AbstractTrainingPhase, learner):
        learner.step.grads = learner.step.grads / learner.step.norm


class Norm(Callback):
    def stateaccess(self):
        return {"step": {"grads": Read(), "norm": Write()}}

    @on
    def measure(self, event: BackwardEnd, phase: AbstractTrainingPhase, learner):
        learner.step.norm = sum(abs(learner.step.grads))


class Report(Callback):
    def stateaccess(self):  # report
        return {"cbstate": {"ema": Read()}}

    @on
    def report(self, event: EpochEnd, phase: AbstractTrainingPhase, learner):
        self.show(learner)

    def show(self, learner):
        print(learner.cbstate.ema)


class Watch(Callback):
    def stateaccess(self):  # watch
        return {"step": {"loss": Read()}}

    @on
    def watch(self, event: StepEnd, phase: AbstractTrainingPhase, learner):
        step = learner.step
        self.show(step.loss, learner)

    def show(self, loss, learner):
        print(loss, learner.params)  # params


conflict = [WarmUp(), Decay()]
cycle = [Norm(), Scale()]
missing = [Report()]
undeclared = [Watch()]
