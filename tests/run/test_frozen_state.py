"""Frozen parameters whose layers also have a model state."""

import warnings

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fluxcb
from fluxcb.callbacks import Freeze, StopOnNaNLoss

XS = np.linspace(-1, 1, 8, dtype=np.float32)[:, None]


class OfNNX(nnx.Module):
    def __init__(self, running):
        self.first, self.last = nnx.Linear(1, 4, rngs=nnx.Rngs(0)), nnx.Linear(4, 1, rngs=nnx.Rngs(1))
        self.norm, self.running = nnx.BatchNorm(4, rngs=nnx.Rngs(2)), running

    def __call__(self, xs):
        hidden = self.first(xs)
        return self.last(self.norm(hidden, use_running_average=True) if self.running else self.norm(hidden))


class OfLinen(flax.linen.Module):
    running: bool

    @flax.linen.compact
    def __call__(self, xs, train=False):
        hidden = flax.linen.Dense(4)(xs)
        hidden = flax.linen.BatchNorm(use_running_average=self.running or not train, name="norm")(hidden)
        return flax.linen.Dense(1)(hidden)


def learner_of(model, *callbacks):
    return fluxcb.Learner(
        model,
        lambda outputs, ys: jnp.mean((outputs - ys) ** 2),
        optax.sgd(0.1),
        data=[(XS, 3 * XS)] * 3,
        callbacks=[Freeze("norm"), *callbacks],
        default_callbacks=False,
    )


def state_of(learner):
    return jax.tree.leaves(learner.model_state)


@pytest.mark.parametrize(("kind", "path"), [(OfNNX, "norm.mean"), (OfLinen, "batch_stats.norm.mean")])
@pytest.mark.parametrize("guards", [(), (StopOnNaNLoss,)])
def test_model_state_of_a_frozen_layer_that_changes_is_a_warning(kind, path, guards):
    learner = learner_of(kind(running=False), *(guard() for guard in guards))
    before = state_of(learner)
    with pytest.warns(UserWarning, match="changes the model state") as record:
        learner.fit(1)
    assert [str(warning.message) for warning in record] == [
        "Freeze('norm') keeps parameters constant, but the training changes the model state of the same part: "
        f"`model_state.{path}`. To keep the model state as well, call these layers in evaluation mode, for example "
        "with `use_running_average=True` for batch normalization."
    ]
    assert all(np.any(old != new) for old, new in zip(before, state_of(learner), strict=True))


@pytest.mark.parametrize("kind", [OfNNX, OfLinen])
@pytest.mark.parametrize("guards", [(), (StopOnNaNLoss,)])
def test_model_state_that_stays_is_no_warning(kind, guards):
    learner = learner_of(kind(running=True), *(guard() for guard in guards))
    before = state_of(learner)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        learner.fit(1)
    jax.tree.map(np.testing.assert_array_equal, before, state_of(learner))
