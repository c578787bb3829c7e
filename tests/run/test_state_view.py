"""`learner.cbstate` and `learner.hyperparams` outside handlers: reading works, and writing raises an error."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fluxcb
from fluxcb import AccessError, Callback, Read, Write, on
from fluxcb.callbacks import CustomCallback, Metrics, Monitors, ParameterEMA, Recorder
from fluxcb.events import EpochEnd, FitBegin
from fluxcb.phases import TrainingPhase
from fluxcb.testing import testlearner


@pytest.fixture(scope="module")
def learner():
    learner = testlearner(Recorder(), Metrics(), Monitors(), ParameterEMA(), Entries())
    learner.fit(1)
    learner.cbstate.monitors.put_scalar("loss", 3)
    return learner


class Entries(Callback):
    """Have entries of many kinds, and read all of them in both ways."""

    def stateaccess(self):
        return {"cbstate": {**dict.fromkeys(("numbers", "text", "nothing", "array"), Write()), "keys": Write()}}

    def init(self, learner):
        shared = learner.cbstate
        shared.numbers, shared.text, shared.nothing = [1, 2, 3], "x" * 100, None
        shared["keys"], shared.array = 4, np.zeros((3, 2), np.float32)


def test_entries_are_readable_by_name_and_attribute(learner):
    for part in (learner.cbstate, learner.hyperparams):
        for name in part:
            if name != "keys":
                assert jax.tree.all(jax.tree.map(lambda a, b: a is b, part[name], getattr(part, name)))
    assert learner.hyperparams.learning_rate == learner.hyperparams["learning_rate"] == float(np.float32(0.1))
    assert learner.cbstate["keys"] == 4  # a method of mappings has the name as an attribute
    assert "history" in dir(learner.cbstate)


def test_entries_by_phase_and_name_are_readable_by_attribute(learner):
    shared = learner.cbstate
    assert shared.history.training is shared["history"]["training"]
    assert shared.history.training.steps == 4
    assert shared.metrics_epoch.validation.loss is shared["metrics_epoch"]["validation"]["loss"]
    assert shared.metrics_step.training.loss is shared["metrics_step"]["training"]["loss"]
    assert shared.monitors.loss.latest() == shared["monitors"]["loss"].latest() == 3.0


def test_handlers_can_read_entries_by_attribute():
    seen = []

    def look(learner):
        shared = learner.cbstate
        seen.append(
            (shared.history.training.steps, shared["history"]["training"].steps, shared.history.validation.steps)
        )
        seen.append(shared.metrics_epoch.training.loss == shared["metrics_epoch"]["training"]["loss"])
        seen.append(learner.hyperparams.learning_rate == learner.hyperparams["learning_rate"])

    access = {"cbstate": {"history": Read(), "metrics_epoch": Read()}, "hyperparams": Read()}
    testlearner(CustomCallback(look, EpochEnd, TrainingPhase, access=access), Recorder(), Metrics()).fit(1)
    assert seen == [(4, 4, 0), True, True]


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (lambda learner: learner.cbstate.histroy, "`learner.cbstate` has no `histroy`. Did you mean `history`?"),
        (
            lambda learner: learner.cbstate.swa,
            "`learner.cbstate` has no `swa`. `StochasticWeightAveraging` creates it if it is among the callbacks.",
        ),
        (lambda learner: learner.hyperparams.rate, "`learner.hyperparams` has no `rate`."),
        (lambda learner: learner.cbstate.history.trainin, "ByPhase has no `trainin`. Did you mean `training`?"),
        (lambda learner: learner.cbstate.metrics_epoch.training.lss, "EpochValues has no `lss`. Did you mean `loss`?"),
        (lambda learner: learner.cbstate.metrics_step.training.lss, "StepValues has no `lss`. Did you mean `loss`?"),
        (lambda learner: learner.cbstate.monitors.lss, "`learner.cbstate.monitors` has no `lss`. Did you mean `loss`?"),
    ],
)
def test_missing_name_raises(learner, read, text):
    with pytest.raises(AttributeError) as error:
        read(learner)
    assert str(error.value) == text
    with pytest.raises(KeyError, match="has no"):
        learner.cbstate["histroy"]


def test_view_is_mapping(learner):
    rates = learner.hyperparams
    assert dict(rates) == rates == {"learning_rate": rates.learning_rate} == {**rates}
    assert (len(rates), "learning_rate" in rates, rates.get("x", 3)) == (1, True, 3)
    assert list(rates.items()) == list(zip(rates.keys(), rates.values(), strict=True))
    assert copy.deepcopy(rates) == pickle.loads(pickle.dumps(rates)) == rates
    for entry in ("history", "metrics_epoch", "metrics_step"):
        held = learner.cbstate[entry]
        assert copy.deepcopy(held) == pickle.loads(pickle.dumps(held)) == held


ASSIGN = {
    "an attribute": lambda part, name: setattr(part, name, 1),
    "an item": lambda part, name: part.__setitem__(name, 1),
    "a deleted attribute": lambda part, name: delattr(part, name),
    "a deleted item": lambda part, name: part.__delitem__(name),
}


@pytest.mark.parametrize("way", ASSIGN)
def test_writing_raises(learner, way, refused):
    with refused(
        AccessError,
        "`learner.cbstate` is read-only outside handlers, so `x` cannot be changed there.\n"
        "  why:   it is a new mapping each time it is read, so the change would be lost\n"
        '  fix:   assign `learner.cbstate.x` in a handler, and add `{"cbstate": {"x": Write()}}` to `stateaccess`',
    ):
        ASSIGN[way](learner.cbstate, "x")


def test_suggested_fixes_work():
    class Creates(Callback):
        def stateaccess(self):
            return {"cbstate": {"x": Write()}}

        def init(self, learner):
            learner.cbstate.x = 0

        @on
        def assign(self, event: FitBegin, phase, learner):
            learner.cbstate.x = 1

    def function(learner):
        learner.hyperparams.learning_rate = 0.5

    learner = testlearner(Creates())
    learner.callbacks.add(CustomCallback(function, FitBegin, access={"hyperparams": {"learning_rate": Write()}}))
    learner.fit(1)
    assert (learner.cbstate.x, learner.hyperparams.learning_rate) == (1, 0.5)


def test_repr_shows_entries():
    expected = """{
    'metrics_epoch': ByPhase with training, validation,
    'metrics_step': ByPhase with training,
    'monitors': empty MonitorHub,
    'history': ByPhase with training, validation,
    'numbers': list of 3,
    'text': str of 100 characters,
    'nothing': None,
    'keys': 4,
    'array': float32[3, 2],
    'ema': dict with params, updates,
    'metrics_now': dict with float32,
}"""
    learner = testlearner(Recorder(), Metrics(), Monitors(), ParameterEMA(), Entries())
    learner.fit(1)
    assert set(repr(learner.cbstate).splitlines()) == set(expected.splitlines())
    assert repr(testlearner().hyperparams) == "{'learning_rate': 0.10000000149011612}"


def test_long_list_of_names_is_truncated():
    class Wide(Callback):
        def stateaccess(self):
            return {"cbstate": {"wide": Write(), "scalar": Write()}}

        def init(self, learner):
            learner.cbstate.wide = {f"n{i}": jnp.zeros(()) for i in range(9)}
            learner.cbstate.scalar = jnp.zeros((), jnp.int32)

    shown = repr(testlearner(Wide()).cbstate)
    assert shown == "{'wide': dict with n0, n1, n2, n3, n4, n5, 3 more, 'scalar': int32[]}"


def test_hook_has_same_view():
    with fluxcb.callbacks_as_hook([Metrics()], {"loss": 0.0}) as hook:
        hook.after_step(1, {"loss": 3.0})
        hook.after_epoch()
    assert hook.cbstate.metrics_epoch.training.loss == [(1, 3.0)]
