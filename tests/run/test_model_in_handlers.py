"""Handlers that use the model, the optimizer, the data or metrics in the way of other libraries."""

import re

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fluxcb
from fluxcb import AccessError, Callback, Read, Write, on
from fluxcb.callbacks import InferenceRunner, Metrics, ScalarStats
from fluxcb.events import BackwardBegin, HostEvent, Trigger
from fluxcb.phases import TrainingPhase


class Told(HostEvent):
    """An event of the user."""


XS = np.linspace(-1, 1, 8, dtype=np.float32)[:, None]
BATCHES = [(XS, 3 * XS)]


def fitted(access, act, *callbacks, model=None):
    class Acts(Callback):
        def stateaccess(self):
            return access

        @on
        def act(self, event: Trigger, phase: TrainingPhase, learner):
            act(learner)

    learner = fluxcb.Learner(
        model or nnx.Linear(1, 1, rngs=nnx.Rngs(0)),
        lambda outputs, ys: jnp.mean((outputs - ys) ** 2),
        fluxcb.inject(optax.sgd, learning_rate=0.1),
        data=(BATCHES, BATCHES),
        callbacks=[Metrics(), *callbacks, Acts()],
        default_callbacks=False,
    )
    learner.fit(1)
    return learner


PAIR = (lambda key, xs: {"w": jnp.zeros((1, 1))}, lambda params, xs: xs @ params["w"])


def fix_of(access, act, kind=AccessError, **options):
    with pytest.raises(kind) as raised:
        fitted(access, act, **options)
    fixes = raised.value.fix if kind is AccessError else raised.value.__notes__
    (fix,) = (text for text in fixes if kind is AccessError or text.startswith("fix: "))
    return fix


def test_undeclared_model_names_what_to_use_instead():
    assert fix_of({}, lambda learner: learner.model(XS)) == (
        'for the arrays, read `learner.params`, and add `{"params": Read()}` to `stateaccess`. For metrics of other '
        "data, add an `InferenceRunner` to the callbacks. `learner.model` has only shapes in handlers, so it cannot be "
        'called; for these, add `{"model": Read()}` to `stateaccess`'
    )
    seen = []
    fitted({"params": Read()}, lambda learner: seen.append(learner.params["kernel"].shape))
    fitted({"model": Read()}, lambda learner: seen.append(learner.model.kernel.shape))
    assert seen == [(1, 1), (1, 1)]
    learner = fitted({}, lambda learner: None, InferenceRunner(BATCHES, ScalarStats("loss"), name="test"))
    assert "test/loss" in learner.history


@pytest.mark.parametrize(
    "model", [nnx.Linear(1, 1, rngs=nnx.Rngs(0)), flax.linen.Dense(1), PAIR], ids=["nnx", "linen", "pair"]
)
def test_calling_the_model_in_a_handler_names_what_to_use_instead(model):
    assert fix_of({"model": Read()}, lambda learner: learner.model(XS), kind=Exception, model=model) == (
        "fix: `learner.model` has only shapes in handlers, so it cannot be called. For metrics of other data, add an "
        "`InferenceRunner` to the callbacks. For the arrays, read `learner.params`"
    )


def test_undeclared_optimizer_names_the_hyperparameter():
    def assign(learner):
        learner.optimizer.learning_rate = 0.5

    assert fix_of({}, assign) == (
        "to change the learning rate, assign `learner.hyperparams.learning_rate`, and add "
        '`{"hyperparams": {"learning_rate": Write()}}` to `stateaccess`. For the optimizer itself, whose functions do '
        'not read attributes, add `{"optimizer": Read()}` to `stateaccess`'
    )

    def mended(learner):
        learner.hyperparams.learning_rate = 0.5

    learner = fitted({"hyperparams": {"learning_rate": Write()}}, mended)
    assert learner.hyperparams["learning_rate"] == 0.5


@pytest.mark.parametrize(
    ("name", "access", "fix"),
    [
        ("data", {"data": Write()}, "`learner.data.training = ...`"),
        (
            "data",
            {},
            '`learner.data.training = ...`, and add `{"data": {"training": Write()}}` to `stateaccess`',
        ),
        ("step", {}, None),
        ("hyperparams", {"hyperparams": Write()}, "`learner.hyperparams.learning_rate = ...`"),
        ("cbstate", {"cbstate": Write()}, "`learner.cbstate.my_value = ...`"),
    ],
)
def test_a_whole_part_of_the_state_cannot_be_assigned(name, access, fix):
    with pytest.raises(AccessError, match=rf"Acts\(\) assigns `{name}` as a whole, but only its entries") as raised:
        fitted(access, lambda learner: setattr(learner, name, {}))
    declared = 'and add `{"step": {"my_value": Write()}}` to `stateaccess`'
    assert list(raised.value.fix) == [f"assign each entry, e.g. {fix or f'`learner.step.my_value = ...`, {declared}'}"]


def test_data_is_assigned_by_phase():
    def mended(learner):
        learner.data["training"] = BATCHES * 2

    learner = fitted({"data": Write()}, mended)
    learner.fit(1)
    assert learner.step == 3


def test_the_model_cannot_be_changed_in_a_handler():
    class Noisy(nnx.Module):
        def __init__(self):
            self.linear = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
            self.options = {"scales": [1.0, 2.0]}

        def __call__(self, xs):
            return self.options["scales"][0] * self.linear(xs)

    def assign(learner):
        learner.model.options["scales"][0] = 0.0

    with pytest.raises(AccessError, match=r"Acts\(\) changes `learner\.model\.options\['scales'\]\[0\]`\.") as raised:
        fitted({"model": Read()}, assign, model=Noisy())
    assert "the compiled steps use the model as it was when they were traced" in str(raised.value)
    assert raised.value.fix[1] == (
        "change it after `fit`, on `model = learner.get_model()`, and call `learner.set_model(model)`"
    )
    learner = fitted({"model": Read()}, lambda learner: learner.model.options, model=Noisy())
    assert np.any(learner.predict(XS))
    model = learner.get_model()
    model.options["scales"][0] = 0.0
    learner.set_model(model)
    assert not np.any(learner.predict(XS))
    before = learner.params
    learner.fit(1)  # all gradients are zero now
    jax.tree.map(np.testing.assert_array_equal, learner.params, before)

    def add(learner):
        learner.model.linear.training = False

    with pytest.raises(AccessError, match=r"changes `learner\.model\.linear\.training`\."):
        fitted({"model": Write()}, add, model=Noisy())


@pytest.mark.parametrize("permission", [Read(), Write()])
def test_the_optimizer_cannot_be_changed_in_a_handler(permission):
    def assign(learner):
        learner.optimizer.learning_rate = 0.5

    with pytest.raises(AccessError, match=r"Acts\(\) changes `learner\.optimizer\.learning_rate`\.") as raised:
        fitted({"optimizer": permission}, assign)
    assert list(raised.value.fix) == [
        "to change the learning rate, assign `learner.hyperparams.learning_rate`, and add "
        '`{"hyperparams": {"learning_rate": Write()}}` to `stateaccess`'
    ]


def test_traced_handlers_cannot_change_the_model_either():
    class Acts(Callback):
        def stateaccess(self):
            return {"model": Read(), "step": {"loss": Write()}}

        @on
        def act(self, event: BackwardBegin, phase: TrainingPhase, learner):
            learner.model.use_bias = False

    with pytest.raises(AccessError, match=r"Acts\(\) changes `learner\.model\.use_bias`\."):
        fluxcb.Learner(
            nnx.Linear(1, 1, rngs=nnx.Rngs(0)),
            lambda outputs, ys: jnp.mean((outputs - ys) ** 2),
            optax.sgd(0.1),
            data=BATCHES,
            callbacks=[Acts()],
            default_callbacks=False,
        )


@pytest.mark.parametrize("name", ["val_loss", "validation/loss", "valid_loss"])
def test_names_of_metrics_of_other_libraries(name):
    access = {"cbstate": {"metrics_epoch": Read()}}
    text = f'`{name}` has no entry yet. Did you mean `["validation"]["loss"]`?'
    with pytest.raises(KeyError, match=re.escape(text)):
        fitted(access, lambda learner: learner.cbstate.metrics_epoch[name])
    with pytest.raises(KeyError, match=r"`val` has no entry yet\. Did you mean `validation`\?"):
        fitted(access, lambda learner: learner.cbstate.metrics_epoch["val"]["loss"])
    with pytest.raises(KeyError, match=r"-1 is not the name of a metric\. Recorded so far: 'loss'\."):
        fitted(access, lambda learner: learner.cbstate.metrics_epoch["validation"][-1])
    seen = []
    fitted(access, lambda learner: seen.append(learner.cbstate.metrics_epoch["validation"]["loss"][-1]))
    assert [epoch for epoch, _ in seen] == [1]
    assert all(isinstance(loss, float) and not jax.numpy.isnan(loss) for _, loss in seen)


def test_callbacks_change_between_fits_only():
    assert fix_of({}, lambda learner: learner.callbacks.add(Metrics())) == (
        'to read the callbacks, add `{"callbacks": Read()}` to `stateaccess`. To add, remove or replace callbacks, '
        "call `learner.callbacks.add(...)`, for example, between two calls of `fit`"
    )
    learner = fitted({"callbacks": Read()}, lambda learner: learner.callbacks.get(Metrics))
    learner.callbacks.remove(Metrics)
    learner.callbacks.add(Metrics())
    assert isinstance(learner.callbacks.get(Metrics), Metrics)


def test_handlers_emit_by_the_learner_itself():
    fix = fix_of({}, lambda learner: learner.emit(Told()))
    assert fix == "give the callback the Learner itself, `callback.owner = learner`, and call `self.owner.emit(...)`"

    class Tells(Callback):
        @on
        def tell(self, event: Trigger, phase: TrainingPhase, learner):
            self.owner.emit(Told(), phase)

    class Hears(Callback):
        heard = 0

        @on
        def hear(self, event: Told, phase, learner):
            self.heard += 1

    tells, hears = Tells(), Hears()
    learner = fluxcb.Learner(
        nnx.Linear(1, 1, rngs=nnx.Rngs(0)),
        lambda outputs, ys: jnp.mean((outputs - ys) ** 2),
        optax.sgd(0.1),
        data=BATCHES,
        callbacks=[tells, hears],
        default_callbacks=False,
    )
    tells.owner = learner
    learner.fit(2)
    assert hears.heard == 2
