"""A list of two pairs of arrays is two batches; a warning says so if it may be meant as two data sources."""

import warnings

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb

MODEL = (lambda key, xs: {"w": jnp.zeros((1, 1))}, lambda params, xs: xs @ params["w"])


def pair(count):
    xs = np.linspace(-1, 1, count, dtype=np.float32)[:, None]
    return xs, (xs[:, 0] > 0).astype(np.int32)


def learner(data):
    def loss_fn(outputs, ys):
        return jnp.mean((outputs[:, 0] - ys) ** 2)

    return fluxcb.Learner(MODEL, loss_fn, optax.sgd(0.1), data=data, default_callbacks=False)


def test_two_long_pairs_of_different_lengths_are_a_warning_whose_fix_works():
    with pytest.warns(UserWarning, match="trains on two batches of 300 and 100 examples"):
        trained = learner([pair(300), pair(100)])
    trained.fit(1)
    assert trained.step == 2
    training, validation = (fluxcb.data.ArrayLoader(pair(count), batch_size=32) for count in (300, 100))
    assert learner((training, validation)).fit(1).stop_reason is None


@pytest.mark.parametrize(
    "data", [[pair(300), pair(300)], [pair(32), pair(8)], [pair(300), pair(300), pair(100)]], ids=["same", "short", "3"]
)
def test_batches_give_no_warning(data):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        learner(data).fit(1)
