"""Warnings about 64-bit integers that JAX would change when it converts a batch to 32 bits."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb.data import ArrayLoader

IDS = np.arange(32)


def loss_fn(params, batch):
    return jnp.mean((params["w"] - batch["x"]) ** 2)


def learner(data):
    return fluxcb.Learner.from_loss({"w": jnp.zeros(())}, loss_fn, optax.sgd(0.1), data=data, default_callbacks=False)


def batch(ids):
    return {"x": np.ones(len(ids), np.float32), "id": ids}


def as_generator_function(ids):
    def batches():
        yield batch(ids)

    return batches


@pytest.mark.parametrize(
    "data", [lambda ids: ArrayLoader(batch(ids), 8), lambda ids: [batch(ids)], as_generator_function]
)
@pytest.mark.parametrize(
    ("ids", "value", "becomes"),
    [
        (IDS + 2**40, 2**40 + 31, 31),
        (IDS - 2**31 - 5, -(2**31) - 5, 2**31 - 5),
        (IDS.astype(np.uint64) + 2**32, 2**32 + 31, 31),
    ],
)
def test_integers_that_do_not_fit_in_32_bits_are_a_warning(data, ids, value, becomes):
    with pytest.warns(UserWarning, match="32 bits") as caught:
        learner(data(ids)).fit(1)
    assert [str(warning.message) for warning in caught] == [
        f"Integers in `data.training` do not fit in the 32 bits to which JAX converts them: {value} in "
        f"`batch['id']` becomes {becomes}. Map them to small numbers, for example with "
        f"`np.unique(values, return_inverse=True)[1]`, or write "
        f'`jax.config.update("jax_enable_x64", True)` at the start of the program.'
    ]
    assert int(jnp.asarray(np.array([value], ids.dtype))[0]) == becomes  # what JAX itself makes of the value
    learner(data(np.unique(ids, return_inverse=True)[1])).fit(1)


@pytest.mark.parametrize("ids", [IDS, IDS.astype(np.int32), IDS.astype(np.uint32) + 2**31 + 5, IDS[:0]])
def test_integers_that_fit_give_no_warning(ids):
    learner([{"x": np.ones(4, np.float32), "id": ids}]).fit(1)


def test_integers_that_keep_64_bits_give_no_warning():
    with jax.enable_x64(True):
        learner([batch(IDS + 2**40)]).fit(1)
