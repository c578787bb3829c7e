"""The buffers of windows match `jnp.asarray` of each batch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fluxcb._run.stacker import Stacker
from fluxcb._typing import Rows

RNG = np.random.default_rng(0)


def some(shape, dtype):
    return (RNG.normal(size=shape) * 1000).astype(dtype)


def batches_of(make, count=7):
    return [make(i) for i in range(count)]


SAME = {
    "float32": lambda i: some((4, 3), np.float32),
    "float64": lambda i: some((4, 3), np.float64),
    "int64, which wraps": lambda i: some((4,), np.int64) + 2**33,
    "bfloat16": lambda i: some((4, 2), jnp.bfloat16),
    "bool": lambda i: some((4,), np.float32) > 0,
    "scalars": lambda i: np.float32(i),
    "numbers": lambda i: i,
    "no elements": lambda i: np.zeros((0, 3), np.float32),
    "views": lambda i: some((8, 3), np.float32)[::2],
    "not in C order": lambda i: np.asfortranarray(some((4, 3), np.float32)),
    "JAX arrays": lambda i: jnp.asarray(some((4, 3), np.float32)),
    "one of each": lambda i: some((4, 3), np.float32) if i % 2 else jnp.asarray(some((4, 3), np.float32)),
    "two dtypes": lambda i: some((4, 3), np.float32 if i % 2 else np.float64),
    "several leaves": lambda i: {"xs": some((4, 3), np.float32), "rest": [some((4,), np.int64), i]},
}


@pytest.mark.parametrize("make", SAME.values(), ids=SAME)
def test_buffer_matches_jax_arrays(make):
    batches = batches_of(make)
    buffer, count = Stacker(batches[0], 9).stack(batches)
    assert count == len(batches)
    assert jax.tree.structure(buffer) == jax.tree.structure(batches[0])
    expected = jax.tree.map(lambda *leaves: np.stack([np.asarray(jnp.asarray(x)) for x in leaves]), *batches)
    for own, of in zip(jax.tree.leaves(buffer), jax.tree.leaves(expected), strict=True):
        assert own.shape == (9, *of.shape[1:])
        assert own.dtype == of.dtype
        np.testing.assert_array_equal(own[:count], of)


def test_buffer_holds_limited_number_of_batches():
    batches = batches_of(SAME["float32"])
    buffer, count = Stacker(batches[0], 5).stack(batches)
    assert count == 5
    np.testing.assert_array_equal(buffer, np.stack(batches[:5]))


UNLIKE = {
    "one shorter": [np.zeros((3, 2), np.float32)],
    # As many rows as two of the others have: only looked at together, they would fit.
    "one shorter, one longer": [np.zeros((3, 2), np.float32), np.zeros((5, 2), np.float32)],
    "wider": [np.zeros((4, 3), np.float32)],
    "another dtype": [np.zeros((4, 2), np.int32)],
    "another structure": [(np.zeros((4, 2), np.float32),)],
    "a list of numbers": [[1.0, 2.0]],
}


@pytest.mark.parametrize("others", UNLIKE.values(), ids=UNLIKE)
def test_buffer_ends_before_batch_of_other_shape(others):
    fitting = batches_of(lambda i: np.full((4, 2), i, np.float32), 3)
    buffer, count = Stacker(fitting[0], 9).stack([*fitting, *others, fitting[0]])
    assert count == 3
    np.testing.assert_array_equal(buffer[:3], np.stack(fitting))
    assert Stacker(fitting[0], 9).stack([*others, *fitting])[1] == 0


def test_buffers_are_aligned_for_zero_copy():
    batches = batches_of(SAME["several leaves"])
    buffer, _ = Stacker(batches[0], 9).stack(batches)
    for leaf in jax.tree.leaves(buffer):
        assert leaf.ctypes.data % 64 == 0


def test_buffers_share_no_memory():
    batches = batches_of(SAME["float32"])
    stacker = Stacker(batches[0], 9)
    first, second = stacker.stack(batches)[0], stacker.stack(batches)[0]
    assert not np.shares_memory(first, second)
    assert not any(np.shares_memory(first, batch) for batch in batches)


def test_padding_rows_of_resident_arrays_are_valid():
    arrays = (jnp.arange(12.0),)
    batches = [Rows(arrays, np.array([i, 11 - i])) for i in range(3)]
    buffer, count = Stacker(batches[0], 6).stack(batches)
    assert count == 3
    assert buffer.arrays is arrays
    np.testing.assert_array_equal(buffer.rows, [[0, 11], [1, 10], [2, 9], [0, 0], [0, 0], [0, 0]])


def test_rows_of_other_arrays_do_not_fit():
    arrays = (jnp.arange(12.0),)
    batches = [Rows(arrays, np.array([0, 1])), Rows((jnp.arange(12.0),), np.array([2, 3]))]
    assert Stacker(batches[0], 6).stack(batches)[1] == 1
