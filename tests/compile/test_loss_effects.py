"""Numbers and traced values that a loss function or a model stores while the step is traced."""

import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fluxcb
from fluxcb.callbacks import HyperParamSetterWithFunc, Metric, Metrics, ObjAttrParam
from fluxcb.events import EpochBegin
from fluxcb.phases import TrainingPhase

XS = np.arange(12, dtype=np.float32).reshape(4, 3) / 12
YS = np.ones((4, 1), np.float32)


def learner(loss_fn, model=None, *callbacks):
    if model is None:
        model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    return fluxcb.Learner(
        model, loss_fn, optax.sgd(0.1), data=[(XS, YS)] * 4, callbacks=callbacks, default_callbacks=False
    )


def mse(outputs, ys):
    return jnp.mean((outputs - ys) ** 2)


AUX = 'Return the value as aux, `return loss, {"name": value}`, which callbacks read as `step.aux`.'
METRIC = 'To record the value, compute it in a metric: `Metrics(Metric(lambda outputs, ys: ..., "name"))`.'


def stored(name, advice):
    return "^" + re.escape(
        f"The loss function has stored a traced value in the variable `{name}`. The function runs once, while the step "
        f"is traced, so `{name}` does not get the value of each step, and the stored object cannot be used after the "
        f"trace. {advice}"
    )


def test_list_of_losses_is_a_warning():
    losses = []

    def loss_fn(outputs, ys):
        loss = mse(outputs, ys)
        losses.append(loss)
        return loss

    with pytest.warns(UserWarning, match=stored("losses", METRIC)):
        learner(loss_fn)


last = None


def test_value_in_global_variable_is_a_warning():
    def loss_fn(outputs, ys):
        global last
        last = mse(outputs, ys)
        return mse(outputs, ys)

    with pytest.warns(UserWarning, match=stored("last", METRIC)):
        learner(loss_fn)


def test_value_that_the_model_stores_for_the_loss_is_a_warning():
    features = {}

    def loss_fn(model, batch):
        features["inputs"] = batch[0]
        return mse(model(features["inputs"]), batch[1])

    with pytest.warns(UserWarning, match=stored("features", AUX)):
        trained = learner(loss_fn)
    plain = learner(mse)
    trained.fit(1)
    plain.fit(1)
    jax.tree.map(np.testing.assert_array_equal, trained.params, plain.params)


def test_advice_for_stored_values():
    def with_aux(model, batch):
        loss = mse(model(batch[0]), batch[1])
        return loss, {"name": 2 * loss}

    twice = Metric(lambda aux: aux["name"], "twice", needs=("aux",))
    same = Metric(lambda outputs, ys: mse(outputs, ys), "name")
    for trained, name, factor in (
        (learner(with_aux, None, Metrics(twice)), "twice", 2),
        (learner(mse, None, Metrics(same)), "name", 1),
    ):
        series = trained.fit(1).per_step["training"]
        values, losses = (np.asarray([value for _, value in series[of]]) for of in (name, "loss"))
        np.testing.assert_allclose(values, factor * losses, rtol=1e-6)


def changed(what):
    return "^" + re.escape(
        f"The loss function changed {what}. The change happens once, while the step is traced, and not at each step. "
        "Change it in a host handler, for example of StepEnd."
    )


def test_number_in_a_dict_or_an_object_is_a_warning():
    counts, counter = {"steps": 0}, types.SimpleNamespace(steps=0)

    def in_dict(outputs, ys):
        counts["steps"] += 1
        return mse(outputs, ys)

    def in_object(outputs, ys):
        counter.steps += 1
        return mse(outputs, ys)

    for name, loss_fn in {"counts": in_dict, "counter": in_object}.items():
        with pytest.warns(UserWarning, match=changed(f"the variable `{name}`")):
            learner(loss_fn)


def test_number_that_a_called_function_changes_is_a_warning():
    calls = 0

    def count():
        nonlocal calls
        calls += 1

    def loss_fn(outputs, ys):
        count()
        return mse(outputs, ys)

    with pytest.warns(UserWarning, match=changed("a variable of the function `count`")):
        learner(loss_fn)


def test_field_of_a_callable_loss_is_a_warning():
    class Loss:
        def __init__(self):
            self.steps = 0

        def __call__(self, outputs, ys):
            self.steps += 1
            return mse(outputs, ys)

    with pytest.warns(UserWarning, match=changed("`self.steps` of Loss")):
        learner(Loss())


def test_cache_of_the_loss_is_no_warning():
    cache, sizes = {}, [1.0]

    def loss_fn(outputs, ys):
        weight = cache.setdefault(outputs.shape, 1.0)
        sizes.append(2.0)
        return weight * mse(outputs, ys)

    learner(loss_fn)  # a warning would be an error here


class Counting(nnx.Module):
    def __init__(self, variable=None):
        self.linear = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        self.calls = 2 if variable is None else variable

    def __call__(self, xs):
        if isinstance(self.calls, nnx.Variable):
            self.calls[...] += 1
        else:
            self.calls += 1
        return self.linear(xs)


def test_attribute_that_a_call_of_an_nnx_module_changes_is_a_warning():
    text = (
        "A call of the NNX module `Counting` changed its attribute `calls`. The change happens once, while the step is "
        "traced, and is lost afterwards. To change it at each step, make it a variable: write `self.calls = "
        "nnx.BatchStat(jnp.asarray(2))` in the constructor, and assign to `self.calls[...]`."
    )
    for loss_fn in (mse, lambda model, batch: mse(model(batch[0]), batch[1])):
        with pytest.warns(UserWarning, match="^" + re.escape(text)):
            learner(loss_fn, Counting())
        counted = learner(loss_fn, Counting(nnx.BatchStat(jnp.asarray(2))))
        counted.fit(1)
        assert counted.model.calls[...] == 2 + 4


def test_number_of_the_passed_nnx_module_that_a_callback_changes_is_a_warning_whose_fixes_work():
    class Scaled(nnx.Module):
        def __init__(self, scale=2.0):
            self.linear = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
            self.scale = scale

        def __call__(self, xs):
            return self.linear(xs) * self.scale

    text = (
        "The module `Scaled` has another `scale` than when it was passed to the Learner (2.0, and now 0.0), and the "
        "Learner trains a copy with the earlier value. Between two fits, assign the module: `learner.model = module`. "
        "During a fit, keep the value in a variable of the module, which is a part of `model_state` that a callback "
        "can write."
    )
    module = Scaled()
    setter = HyperParamSetterWithFunc(ObjAttrParam(module, "scale"), lambda epoch, value: 0.0)
    trained = learner(mse, module, setter)
    with pytest.warns(UserWarning, match=f"^{re.escape(text)}$"):
        trained.fit(1)
    trained.model = module
    np.testing.assert_array_equal(trained.predict(XS), np.zeros_like(YS))
    module.eval()  # fluxcb sets the mode itself
    trained.fit(1)

    class Change(fluxcb.Callback):
        def stateaccess(self):
            return {"model_state": fluxcb.Write()}

        @fluxcb.on(EpochBegin, TrainingPhase)
        def change(self, event, phase, learner):
            learner.model_state = {"scale": jnp.zeros(())}

    varied = learner(mse, Scaled(nnx.BatchStat(jnp.asarray(2.0))), Change())
    varied.fit(1)
    np.testing.assert_array_equal(varied.predict(XS), np.zeros_like(YS))


class Teacher(nnx.Module):
    def __init__(self, layer):
        self.linear = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
        self.layer = layer

    def __call__(self, xs):
        return self.layer(self.linear(xs))


@pytest.mark.parametrize(
    "layer", [lambda: nnx.Dropout(0.5, rngs=nnx.Rngs(0)), lambda: nnx.BatchNorm(1, rngs=nnx.Rngs(0))]
)
def test_teacher_in_training_mode_is_an_error_whose_fix_works(layer):
    teacher = Teacher(layer())

    def loss_fn(model, batch):
        return mse(model(batch[0]), teacher(batch[0]))

    with pytest.raises(Exception, match="trace level") as caught:
        learner(loss_fn)
    assert any("such as a teacher, call its `eval()` before you build the Learner" in n for n in caught.value.__notes__)
    teacher.eval()
    learner(loss_fn).fit(1)
