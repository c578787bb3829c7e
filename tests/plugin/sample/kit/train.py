"""Valid callback sets."""

from fluxcb import Callback, Read, Write, every, in_order, on
from fluxcb.callbacks import ClipGradients, Metrics, ParameterEMA, Recorder
from fluxcb.events import BackwardEnd, ForwardBegin, StepEnd
from fluxcb.phases import AbstractTrainingPhase


class WarmUp(Callback):
    def stateaccess(self):
        return {"hyperparams": {"learning_rate": Write()}}

    @on
    def warm_up(self, event: ForwardBegin, phase: AbstractTrainingPhase, learner):
        learner.hyperparams.learning_rate = learner.hyperparams.learning_rate * 1.01


class Decay(Callback):
    def stateaccess(self):
        return {"hyperparams": {"learning_rate": Write()}}

    @on
    def decay(self, event: ForwardBegin, phase: AbstractTrainingPhase, learner):
        learner.hyperparams.learning_rate = learner.hyperparams.learning_rate * 0.99


class GradientNorm(Callback):
    def stateaccess(self):
        return {"step": {"grads": Read(), "norm": Write()}}

    @on
    def measure(self, event: BackwardEnd, phase: AbstractTrainingPhase, learner):
        import optax

        learner.step.norm = optax.tree.norm(learner.step.grads)


class Lowest(Callback):
    def __init__(self):
        self.loss = float("inf")

    def stateaccess(self):
        return {"step": {"loss": Read()}}

    @on
    def compare(self, event: StepEnd, phase: AbstractTrainingPhase, learner):
        self.loss = min(self.loss, float(learner.step.loss))

    def state_dict(self):
        return {"loss": self.loss}

    def load_state_dict(self, state):
        self.loss = state["loss"]


callbacks = [GradientNorm(), ClipGradients(1.0), Lowest()]
two_schedules = [in_order(WarmUp(), Decay())]
scheduled = [every(Lowest(), steps=10), ParameterEMA(0.9)]


class Sets:
    small = (Recorder(),)


def make_callbacks(limit=1.0):
    return [ClipGradients(limit), Metrics()]


def make_learner():
    from fluxcb.testing import testlearner

    return testlearner(*make_callbacks(), default_callbacks=False)
