"""Averaged parameters whose model also has batch statistics."""

import warnings

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fluxcb
from fluxcb import every
from fluxcb.callbacks import ParameterEMA, StochasticWeightAveraging, StopOnNaNLoss

RNG = np.random.default_rng(0)
BATCHES = [(xs, 3 * xs) for xs in RNG.normal(1.0, 2.0, size=(3, 8, 1)).astype(np.float32)]
MOMENTUM = 0.9


class OfNNX(nnx.Module):
    def __init__(self, running=False):
        self.first, self.last = nnx.Linear(1, 4, rngs=nnx.Rngs(0)), nnx.Linear(4, 1, rngs=nnx.Rngs(1))
        self.norm, self.running = nnx.BatchNorm(4, momentum=MOMENTUM, rngs=nnx.Rngs(2)), running

    def __call__(self, xs):
        hidden = self.first(xs)
        return self.last(self.norm(hidden, use_running_average=True) if self.running else self.norm(hidden))


class OfLinen(flax.linen.Module):
    running: bool = False

    @flax.linen.compact
    def __call__(self, xs, train=False):
        hidden = flax.linen.Dense(4, name="first")(xs)
        running = self.running or not train
        hidden = flax.linen.BatchNorm(use_running_average=running, momentum=MOMENTUM, name="norm")(hidden)
        return flax.linen.Dense(1, name="last")(hidden)


def learner_of(model, *callbacks, optimizer=None):
    return fluxcb.Learner(
        model,
        lambda outputs, ys: jnp.mean((outputs - ys) ** 2),
        optimizer or optax.sgd(0.1),
        data=BATCHES,
        callbacks=callbacks,
        default_callbacks=False,
    )


@pytest.mark.parametrize(("kind", "path"), [(OfNNX, "norm.mean"), (OfLinen, "batch_stats.norm.mean")])
@pytest.mark.parametrize("guards", [(), (StopOnNaNLoss,)])
@pytest.mark.parametrize("wrapped", [False, True])
def test_batch_statistics_that_the_average_does_not_fit_are_a_warning(kind, path, guards, wrapped):
    average = StochasticWeightAveraging(2, every=3)
    with pytest.warns(UserWarning, match="averages the parameters") as record:
        learner_of(kind(), *(guard() for guard in guards), every(average, epochs=1) if wrapped else average)
    [text] = [str(warning.message) for warning in record]
    assert text.partition(" averages ")[2] == (
        f"the parameters, but not the model state that the training changes: `model_state.{path}`. Batch statistics of "
        "the trained parameters do not fit the average, so validation and `learner.model` give worse results than the "
        "average can. Write `StochasticWeightAveraging(2, every=3, validate=False)` to use the trained parameters "
        "there. After the training, recompute the statistics for the average, as in "
        "docs/how-to/average-the-parameters.md."
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        learner_of(kind(), StochasticWeightAveraging(2, every=3, validate=False)).fit(1)


@pytest.mark.parametrize("kind", [OfNNX, OfLinen])
def test_other_averages_and_model_state_that_stays_are_no_warning(kind):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        learner_of(kind(), ParameterEMA(0.9)).fit(1)
        learner_of(kind(running=True), StochasticWeightAveraging(1)).fit(1)
        learner_of(nnx.Linear(1, 1, rngs=nnx.Rngs(0)), StochasticWeightAveraging(1)).fit(1)


@pytest.mark.parametrize("kind", [OfNNX, OfLinen])
def test_statistics_recomputed_without_updates_are_those_of_the_average(kind):
    learner = learner_of(kind(), StochasticWeightAveraging(2, validate=False))
    learner.fit(2)
    average = learner.cbstate["swa"]["params"]
    # as in docs/how-to/average-the-parameters.md
    statistics = learner_of(kind(), optimizer=optax.set_to_zero())
    statistics.params = average
    statistics.fit(steps=7)
    learner.params, learner.model_state = statistics.params, statistics.model_state

    jax.tree.map(np.testing.assert_array_equal, learner.params, average)
    kernel, bias = (np.float64(average["first"][name]) for name in ("kernel", "bias"))
    mean, var = np.zeros(4), np.ones(4)
    for step in range(7):
        hidden = BATCHES[step % 3][0] @ kernel + bias
        mean = MOMENTUM * mean + (1 - MOMENTUM) * hidden.mean(axis=0)
        var = MOMENTUM * var + (1 - MOMENTUM) * hidden.var(axis=0)
    state = learner.model_state["batch_stats"] if kind is OfLinen else learner.model_state
    np.testing.assert_allclose(state["norm"]["mean"], mean, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(state["norm"]["var"], var, rtol=1e-4)

    # `predict` uses the average with these statistics.
    scale, shift = (np.float64(average["norm"][name]) for name in ("scale", "bias"))
    xs = BATCHES[0][0]
    hidden = (xs @ kernel + bias - mean) / np.sqrt(var + 1e-5) * scale + shift
    expected = hidden @ np.float64(average["last"]["kernel"]) + np.float64(average["last"]["bias"])
    np.testing.assert_allclose(learner.predict(xs), expected, rtol=1e-3, atol=1e-4)
