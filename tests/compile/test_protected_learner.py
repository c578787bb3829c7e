"""The protected learner: `dir`, membership tests, deletion, and permissions."""

import jax.numpy as jnp
import pytest

from fluxcb import AccessError, Append, Callback, Read, Write, on
from fluxcb.events import ComputeEnd, EpochEnd, StepEnd
from fluxcb.phases import AbstractTrainingPhase
from fluxcb.testing import testlearner


def asked(event, access, function):
    """Call a function with the protected learner in a handler of an event, and return its result."""
    answers = {}

    class Asks(Callback):
        def stateaccess(self):
            return access

        def init(self, learner):
            if "average" in access.get("cbstate", ()) and "average" not in learner.cbstate:
                learner.cbstate.average.w = jnp.zeros(())
                learner.cbstate.average.b = jnp.zeros(())

        @on(event, AbstractTrainingPhase)
        def ask(self, event, phase, learner):
            answers["last"] = function(learner)

    testlearner(Asks(), batches=1, validation_batches=0).fit(1)
    assert answers  # a traced handler runs when the step is traced, and a step may be traced twice
    return answers["last"]


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


@pytest.mark.parametrize("event", [StepEnd, ComputeEnd])
def test_dir_has_the_declared_names_and_the_methods_of_a_mapping(event):
    seen = ["cbstate", "hyperparams", "key", "loss_fn", "params", "progress", "step"]
    assert asked(event, ACCESS, dir) == seen
    methods = ["get", "items", "keys", "values"]
    assert asked(event, ACCESS, lambda learner: dir(learner.hyperparams)) == sorted(["learning_rate", *methods])
    assert asked(event, ACCESS, lambda learner: dir(learner.cbstate.average)) == sorted(["b", "w", *methods])


@pytest.mark.parametrize("event", [StepEnd, ComputeEnd])
def test_parts_are_mappings(event):
    def look(learner):
        step, rates, average = learner.step, learner.hyperparams, learner.cbstate.average
        return {
            "lengths": (len(step), len(rates), len(average), len(learner.data), len(learner)),
            "truth": (bool(step), bool(learner.data), bool(learner)),
            "keys": (list(step.keys()), sorted(average.keys()), list(learner.params.keys()), step.keys() == {"loss"}),
            "items": ([name for name, _ in rates.items()], len(average.items()), list(learner.data.items())),
            "values": len(average.values()),
            "same": (rates.get("learning_rate") is not None, average.get("w", 7) is average.w),
            "copied": (sorted(dict(average)), list({**rates}), type(dict(step))),
            "compared": (step == step, step != learner.data, learner.data == {}, learner.data != {"training": 1}),
        }

    assert asked(event, ACCESS, look) == {
        "lengths": (1, 1, 2, 0, 7),
        "truth": (True, False, True),
        "keys": (["loss"], ["b", "w"], ["w"], True),
        "items": (["learning_rate"], 2, []),
        "values": 2,
        "same": (True, True),
        "copied": (["b", "w"], ["learning_rate"], dict),
        "compared": (True, True, True, True),
    }


def test_parts_equal_a_dict_of_their_values():
    def look(learner):
        rate = float(learner.hyperparams.learning_rate)
        return learner.hyperparams == {"learning_rate": rate}, learner.hyperparams == {"learning_rate": rate + 1}

    assert asked(StepEnd, ACCESS, look) == (True, False)
    assert asked(EpochEnd, {"*": Read()}, lambda learner: (len(learner.step), dict(learner.step))) == (0, {})


def test_get_returns_the_default_for_a_declared_name_that_does_not_exist():
    assert asked(EpochEnd, {"*": Read()}, lambda learner: learner.step.get("loss")) is None
    assert asked(EpochEnd, {"*": Read()}, lambda learner: learner.step.get("loss", 3)) == 3
    optional = {"cbstate": {"log": Append(optional=True)}}
    assert asked(EpochEnd, optional, lambda learner: learner.cbstate.get("log", 3)) == 3
    for access in ({}, {"cbstate": ACCESS["cbstate"]}):
        with pytest.raises(AccessError, match=r"may not read `cbstate\.mine`: its `stateaccess` does not declare it"):
            asked(EpochEnd, access, lambda learner: learner.cbstate.get("mine", 3))


@pytest.mark.parametrize("access", [{"cbstate": Write()}, {"cbstate": {"items": Write(), "own": Write()}}])
def test_an_entry_may_have_the_name_of_a_method(access):
    seen = []

    class Names(Callback):
        def stateaccess(self):
            return access

        def init(self, learner):
            learner.cbstate.own, learner.cbstate.items = 1, [2]

        @on
        def look(self, event: EpochEnd, phase: AbstractTrainingPhase, learner):
            learner.cbstate.items.append(3)
            seen.append((learner.cbstate.items, sorted(learner.cbstate.keys()), learner.cbstate.get("items")))

    testlearner(Names(), batches=1).fit(1)
    assert seen == [([2, 3], ["items", "own"], [2, 3])]


@pytest.mark.parametrize(
    ("access", "shown"),
    [
        ({"step": {"loss": Read(), "grads": Read()}}, "<step as Asks() may see it: grads, loss>"),
        ({"step": Read()}, "<step as Asks() may see it: everything>"),
        ({}, "<step as Asks() may see it: nothing>"),
    ],
)
def test_repr_shows_what_is_declared(access, shown):
    assert asked(StepEnd, access, lambda learner: repr(learner.step)) == shown


@pytest.mark.parametrize("use", [lambda part: part[0], lambda part: 0 in part, lambda part: part.get(0)])
def test_numbers_are_no_names(use, refused):
    with pytest.raises(AccessError) as raised:
        asked(StepEnd, ACCESS, lambda learner: use(learner.step))
    assert raised.value.what == "The parts of a learner have names, and 0 is not a name."
    assert raised.value.fix == ('write e.g. `learner.step["loss"]`',)


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
