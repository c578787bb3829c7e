"""The protected learner: `dir`, membership tests, deletion, and permissions."""

import jax.numpy as jnp
import pytest

from fluxcb import AccessError, Append, Callback, Read, Write, on
from fluxcb.events import ComputeEnd, EpochEnd, StepEnd
from fluxcb.phases import AbstractTrainingPhase
from fluxcb.testing import testlearner


def asked(event, access, function):
    """Call a function with the protected learner in a handler of an event, and return its result."""
    answers = []

    class Asks(Callback):
        def stateaccess(self):
            return access

        def init(self, learner):
            if "cbstate" in access and "average" not in learner.cbstate:
                learner.cbstate.average.w = jnp.zeros(())
                learner.cbstate.average.b = jnp.zeros(())

        @on(event, AbstractTrainingPhase)
        def ask(self, event, phase, learner):
            answers.append(function(learner))

    testlearner(Asks(), batches=1, validation_batches=0).fit(1)
    assert answers  # a traced handler runs when the step is traced, and a step may be traced twice
    return answers[-1]


ACCESS = {
    "step": {"loss": Read()},
    "params": {"w": Read()},
    "cbstate": {"average": {"w": Write(), "b": Write()}},
    "hyperparams": Read(),
    "loss_fn": Read(),
}


@pytest.mark.parametrize("event", [StepEnd, ComputeEnd])
def test_dir_lists_declared_names(event):
    seen = ["cbstate", "hyperparams", "key", "loss_fn", "params", "progress", "step"]
    assert asked(event, ACCESS, list) == seen
    names = [*seen, "opt_state", "model", "x", "control"]
    assert asked(event, ACCESS, lambda learner: [name for name in names if name in learner]) == seen
    assert asked(event, {}, list) == ["key", "progress"]


@pytest.mark.parametrize("event", [StepEnd, ComputeEnd])
def test_dir_lists_declared_parts(event):
    assert asked(event, ACCESS, lambda learner: list(learner.params)) == ["w"]
    assert asked(event, ACCESS, lambda learner: ("w" in learner.params, "b" in learner.params)) == (True, False)
    assert asked(event, ACCESS, lambda learner: sorted(learner.cbstate.average)) == ["b", "w"]
    assert asked(event, ACCESS, lambda learner: list(learner.hyperparams)) == ["learning_rate"]
    assert asked(event, ACCESS, lambda learner: "step" in learner.progress)


def test_wildcard_access_lists_all_names():
    assert asked(EpochEnd, {"*": Read()}, list) == [
        *("callbacks", "cbstate", "data", "evaluation", "hyperparams", "key", "loss_fn", "model", "model_state"),
        *("opt_state", "optimizer", "params", "progress", "snapshots", "step"),
    ]


class Deletes(Callback):
    def __init__(self, function, access):
        self.function, self.access = function, access

    def stateaccess(self):
        return self.access

    def init(self, learner):
        if "cbstate" in self.access:
            learner.cbstate.table = jnp.zeros(())


class DeletesOnTheHost(Deletes):
    @on
    def delete(self, event: StepEnd, phase: AbstractTrainingPhase, learner):
        self.function(learner)


class DeletesInTheStep(Deletes):
    @on
    def delete(self, event: ComputeEnd, phase: AbstractTrainingPhase, learner):
        self.function(learner)


def by_item(learner):
    del learner.cbstate["table"]


def by_name(learner):
    del learner.cbstate.table


def at_the_root(learner):
    del learner["cbstate"]


@pytest.mark.parametrize("function", [by_item, by_name])
@pytest.mark.parametrize("kind", [DeletesOnTheHost, DeletesInTheStep])
@pytest.mark.parametrize("access", [{"cbstate": {"table": Write()}}, {"cbstate": Write()}])
def test_deleting_items_raises(kind, function, access):
    callback = kind(function, access)
    with pytest.raises(AccessError) as raised:
        testlearner(callback).fit(1)
    assert str(raised.value).splitlines()[0] == (
        f"{kind.__name__}() deletes `cbstate.table`; state of the Learner cannot be deleted."
    )
    assert raised.value.fix == ("assign a new value instead",)


def test_deleting_from_learner_raises():
    with pytest.raises(AccessError, match=r"deletes `cbstate`; state of the Learner cannot be deleted\."):
        testlearner(DeletesOnTheHost(at_the_root, {})).fit(1)


class Controls(Callback):
    def __init__(self, function, access):
        self.function, self.access = function, access

    def stateaccess(self):
        return self.access


class ControlsOnTheHost(Controls):
    @on
    def control(self, event: StepEnd, phase: AbstractTrainingPhase, learner):
        self.function(learner)


class ControlsInTheStep(Controls):
    @on
    def control(self, event: ComputeEnd, phase: AbstractTrainingPhase, learner):
        self.function(learner)


def reads_control(learner):
    learner.control.stop()


def writes_control(learner):
    learner.control = "stop"


@pytest.mark.parametrize(("function", "verb"), [(reads_control, "reads"), (writes_control, "writes")])
@pytest.mark.parametrize("kind", [ControlsOnTheHost, ControlsInTheStep])
@pytest.mark.parametrize("access", [{}, {"control": Append()}, {"*": Read()}])
def test_reading_or_writing_control_raises(kind, function, verb, access):
    with pytest.raises(AccessError) as raised:
        testlearner(kind(function, access)).fit(1)
    error = raised.value
    assert error.what == f"{kind.__name__}() {verb} `control`, which is a permission and has no value."
    assert error.why == '`"control": Append()` lets host handlers of StepBegin and StepEnd raise a Cancel'
    assert error.fix == (
        "raise CancelStep, CancelEpoch or CancelFitting in a host handler",
        "write `learner.step.skip` or `learner.step.stop` in a traced handler",
    )
