"""A step that uses the initial parameters, which are constants, is a warning."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from fluxcb import Callback, Learner, Write, on
from fluxcb.callbacks import Metric, Metrics
from fluxcb.events import BackwardBegin
from fluxcb.phases import TrainingPhase

XS = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)
YS = np.ones((8, 2), np.float32)


def mse(outputs, ys):
    return jnp.mean((outputs - ys) ** 2)


def norm(model):
    return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))


class Adds(Callback):
    """A traced handler that adds a value to the loss."""

    def __init__(self, function):
        self.function = function

    def stateaccess(self):
        return {"step": {"loss": Write()}}

    @on
    def add(self, event: BackwardBegin, phase: TrainingPhase, learner):
        learner.step.loss = learner.step.loss + self.function()


def of_loss(model):
    return (lambda outputs, ys: mse(outputs, ys) + norm(model)), ()


def of_compiled_function_of_metric(model):
    compiled = jax.jit(lambda: norm(model))
    return mse, (Metrics(Metric(lambda outputs, ys: compiled(), name="norm")),)


def of_traced_handler(model):
    return mse, (Adds(lambda: norm(model)),)


def trained(model, loss_fn, *callbacks):
    learner = Learner(
        model, loss_fn, optax.sgd(0.1), data=[(XS, YS)], callbacks=callbacks, key=0, default_callbacks=False
    )
    learner.fit(1)
    return learner


def module():
    return nnx.Linear(4, 2, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("make", [of_loss, of_compiled_function_of_metric, of_traced_handler])
def test_initial_parameters_of_module_are_a_warning_once(make):
    model = module()
    loss_fn, callbacks = make(model)
    with pytest.warns(UserWarning, match="initial parameters") as caught:
        trained(model, loss_fn, *callbacks)
    assert [str(warning.message) for warning in caught] == [
        "The step of TrainingPhase uses initial parameters (`bias`, `kernel`) as constants, which get no gradient and "
        "never change, because fluxcb trains copies of them. The loss function, a metric, or a traced handler finds "
        "them in a variable. To use the trained parameters, write `def loss_fn(model, batch):`. If the initial ones "
        "are intended, use copies: `jax.tree.map(jnp.copy, module)`."
    ]
    # The suggested copies.
    loss_fn, callbacks = make(jax.tree.map(jnp.copy, model))
    trained(model, loss_fn, *callbacks)


def test_suggested_loss_function_has_the_gradient():
    model = module()
    before = jax.tree.map(np.asarray, (model.kernel[...], model.bias[...]))

    def loss(parts):
        kernel, bias = parts
        return jnp.mean((XS @ kernel + bias - YS) ** 2) + jnp.sum(kernel**2) + jnp.sum(bias**2)

    expected = jax.tree.map(lambda value, slope: value - 0.1 * slope, before, jax.grad(loss)(before))
    found = trained(model, lambda model, batch: mse(model(batch[0]), batch[1]) + norm(model)).model
    np.testing.assert_allclose(found.kernel[...], expected[0], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found.bias[...], expected[1], rtol=1e-6, atol=1e-6)


def test_settings_of_module_are_no_warning():
    model = module()
    trained(model, lambda outputs, ys: mse(outputs, ys) / model.out_features)


def test_initial_parameters_of_loss_function_are_a_warning():
    params = {"w": jnp.ones(())}

    def fitted(decay):
        learner = Learner.from_loss(
            params,
            lambda params, batch: jnp.mean(params["w"] * batch) + decay(params),
            optax.sgd(0.5),
            data=[np.full(2, 0.25, np.float32)],
            default_callbacks=False,
        )
        learner.fit(1)
        return float(learner.params["w"])

    with pytest.warns(UserWarning, match=r"of LossTrainingPhase uses initial parameters \(`w`\)") as caught:
        assert fitted(lambda _: 0.5 * params["w"] ** 2) == 1 - 0.5 * 0.25
    assert "To use the trained parameters, use the first argument of the loss function." in str(caught[0].message)
    assert "`jax.tree.map(jnp.copy, params)`" in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fitted(lambda given: 0.5 * given["w"] ** 2) == 1 - 0.5 * (0.25 + 1)
        copies = jax.tree.map(jnp.copy, params)
        assert fitted(lambda _: 0.5 * copies["w"] ** 2) == 1 - 0.5 * 0.25


def test_edited_module_is_a_warning_once():
    model = module()
    learner = trained(model, mse)
    nnx.update(model, {"kernel": jnp.full((4, 2), 7.0)})
    with pytest.warns(UserWarning, match="has other parameters") as caught:
        learner.fit(1)
    assert [str(warning.message) for warning in caught] == [
        "The module `Linear` has other parameters than when it was passed to the Learner, and the Learner trains a "
        "copy without them. To train them, assign the module: `learner.model = module`."
    ]
    learner.fit(1)
    # The fix.
    learner.model = model
    np.testing.assert_array_equal(learner.params["kernel"], np.full((4, 2), 7.0, np.float32))
    learner.fit(1)


class Normalizing(nnx.Module):
    def __init__(self):
        self.linear, self.norm = module(), nnx.BatchNorm(2, rngs=nnx.Rngs(1))
        self.dropout = nnx.Dropout(0.5, rngs=nnx.Rngs(2))

    def __call__(self, xs):
        return self.dropout(self.norm(self.linear(xs)))


def test_calls_of_module_are_no_warning():
    """They change its running averages and its random streams."""
    model = Normalizing()
    learner = trained(model, mse)
    before = np.asarray(model.norm.mean[...])
    model(XS)
    assert not np.array_equal(before, model.norm.mean[...])
    learner.fit(1)
