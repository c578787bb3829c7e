"""Variables of an NNX module that evaluation reads and changes are a warning."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fluxcb

XS = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
YS = np.zeros((4, 2), np.float32)


class Hidden(nnx.Variable):
    pass


class Memory(nnx.Module):
    """A recurrent module: the hidden state is a linear function of the inputs, plus half of the earlier state."""

    kind = Hidden

    def __init__(self):
        self.linear = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
        self.h = self.kind(jnp.ones((4, 2)))

    def __call__(self, xs):
        self.start()
        self.advance(xs)
        return self.linear(xs) + self.h[...]

    def start(self):
        pass

    def advance(self, xs):
        self.h[...] = self.linear(xs) + 0.5 * self.h[...]


class InCache(Memory):
    kind = nnx.Cache


class Jitted(Memory):
    def advance(self, xs):
        nnx.jit(Memory.advance)(self, xs)


class Replaces(Memory):
    def advance(self, xs):
        self.h = Hidden(self.linear(xs) + 0.5 * self.h[...])


class InPart(Memory):
    def advance(self, xs):
        self.h[0] = self.linear(xs)[0]


class Inner(nnx.Module):
    def __init__(self):
        self.cells = nnx.List([Memory()])

    def __call__(self, xs):
        return self.cells[0](xs)


class Resets(Memory):
    def start(self):
        self.h[...] = jnp.zeros((4, 2), "float32")


class AsStatistic(Memory):
    kind = nnx.BatchStat


class ReadsOnly(Memory):
    def advance(self, xs):
        pass

    def __call__(self, xs):
        return nnx.jit(lambda module, xs: module.linear(xs) + module.h[...])(self, xs)


class WritesTheSame(Memory):
    def advance(self, xs):
        self.h[...] = self.h[...]


class Intermediate(Memory):
    kind = nnx.Intermediate


def mse(outputs, ys):
    return jnp.mean((outputs - ys) ** 2)


def mse_of_model(model, batch):
    return mse(model(batch[0]), batch[1])


def learner(module, loss_fn=mse):
    data = [(XS, YS)]
    return fluxcb.Learner(module, loss_fn, optax.sgd(0.1), data=(data, data * 2), default_callbacks=False)


def fitted(module, loss_fn=mse):
    trained = learner(module, loss_fn)
    trained.fit(1)
    trained.evaluate([(XS, YS)])
    return trained


def message(name, attribute):
    return (
        f"The NNX module `{name}` changes its variable `{attribute}` in evaluation, where fluxcb drops the new value: "
        "each batch starts with the value of the training. For a state of one call, set it at the beginning of the "
        f"call: `self.{attribute}[...] = jnp.zeros((4, 2), 'float32')`. If each batch should start with the value of "
        "the training, make the variable an `nnx.BatchStat`. To keep the value from batch to batch, call "
        "`learner.model` in a loop of your own."
    )


@pytest.mark.parametrize("loss_fn", [mse, mse_of_model])
@pytest.mark.parametrize("kind", [Memory, InCache, Jitted, Replaces, InPart, Inner])
def test_state_that_evaluation_changes_is_a_warning_once(kind, loss_fn):
    with pytest.warns(UserWarning, match="in evaluation") as caught:
        fitted(kind(), loss_fn)
    assert [str(warning.message) for warning in caught] == [
        message(kind.__name__, "cells[0].h" if kind is Inner else "h")
    ]


@pytest.mark.parametrize("loss_fn", [mse, mse_of_model])
@pytest.mark.parametrize("kind", [Resets, AsStatistic, ReadsOnly, WritesTheSame, Intermediate])
def test_state_that_is_reset_dropped_on_purpose_or_unchanged_is_no_warning(kind, loss_fn):
    fitted(kind(), loss_fn)


def test_evaluation_starts_with_the_state_of_the_training_and_a_loop_keeps_it():
    with pytest.warns(UserWarning, match="in evaluation"):
        trained = fitted(Memory())
    h, (w, b) = (
        np.asarray(trained.model_state["h"]),
        (np.asarray(trained.params["linear"][n]) for n in ("kernel", "bias")),
    )
    linear = XS @ w + b
    first = linear + 0.5 * h
    assert trained.evaluate([(XS, YS)] * 2)["loss"] == pytest.approx(np.mean((linear + first) ** 2), rel=1e-5)
    model = trained.model
    np.testing.assert_allclose(model(XS), linear + first, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(model(XS), linear + linear + 0.5 * first, rtol=1e-5, atol=1e-6)
    assert jax.tree.all(jax.tree.map(np.array_equal, {"h": h}, trained.model_state))
