"""An entry of `cbstate` that two callbacks create, and that may be meant as two entries."""

import pytest

from fluxcb import Callback, Read, Write, in_order, on
from fluxcb.callbacks import Metrics
from fluxcb.events import EpochEnd, StepEnd
from fluxcb.phases import TrainingPhase, ValidationPhase
from fluxcb.testing import testlearner


class BestTrain(Callback):
    def stateaccess(self):
        return {"step": {"loss": Read()}, "cbstate": {"best": Write()}}

    def init(self, learner):
        if "best" not in learner.cbstate:
            learner.cbstate.best = float("inf")

    @on
    def compare(self, event: StepEnd, phase: TrainingPhase, learner):
        learner.cbstate.best = min(learner.cbstate.best, float(learner.step.loss))


class BestValid(Callback):
    def stateaccess(self):
        return {"cbstate": {"best": Write(), "metrics_epoch": {"validation": {"loss": Read()}}}}

    def init(self, learner):
        if "best" not in learner.cbstate:
            learner.cbstate.best = float("inf")

    @on
    def compare(self, event: EpochEnd, phase: ValidationPhase, learner):
        learner.cbstate.best = min(learner.cbstate.best, learner.cbstate.metrics_epoch["validation"]["loss"][-1][1])


def test_entry_that_two_callbacks_create_is_a_warning():
    with pytest.warns(UserWarning, match="both create") as caught:
        testlearner(Metrics(), BestTrain(), BestValid())
    assert [str(warning.message) for warning in caught] == [
        "BestTrain() and BestValid() both create and write `cbstate.best`, and share its value. If that is intended, "
        "return `(BestTrain,)` from `BestValid.runafter()`. Otherwise, give one of the entries another name."
    ]


class Intended(BestValid):
    def runafter(self):
        return (BestTrain,)


class OtherName(BestValid):
    """Each callback has an entry of its own."""

    def stateaccess(self):
        return {"cbstate": {"best_validation": Write(), "metrics_epoch": {"validation": {"loss": Read()}}}}

    def init(self, learner):
        learner.cbstate.best_validation = float("inf")

    @on
    def compare(self, event: EpochEnd, phase: ValidationPhase, learner):
        cbstate = learner.cbstate
        cbstate.best_validation = min(cbstate.best_validation, cbstate.metrics_epoch["validation"]["loss"][-1][1])


class Resets(Callback):
    """Writes an entry that another callback creates."""

    def stateaccess(self):
        return {"cbstate": {"best": Write(), "resets": Write()}}

    def init(self, learner):
        learner.cbstate.resets = 0

    @on
    def reset(self, event: EpochEnd, phase: TrainingPhase, learner):
        learner.cbstate.best, learner.cbstate.resets = float("inf"), learner.cbstate.resets + 1


class AtSteps(BestTrain):
    """Writes at the same moment, in a declared order."""


def test_fixes_and_other_shared_entries_give_no_warning():
    assert testlearner(Metrics(), BestTrain(), Intended()).cbstate["best"] == float("inf")
    learner = testlearner(Metrics(), BestTrain(), OtherName())
    learner.fit(2)
    losses = learner.history["validation/loss"]
    assert learner.cbstate["best_validation"] == min(losses)
    testlearner(BestTrain(), Resets()).fit(1)
    testlearner(in_order(BestTrain(), AtSteps())).fit(1)
