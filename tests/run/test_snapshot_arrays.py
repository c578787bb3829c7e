"""The copies of the train state that a snapshot of several processes holds."""

import mmap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fluxcb._run.snapshot_arrays import _LARGE, _shards_on_host

on_cpu = pytest.mark.skipif(jax.default_backend() != "cpu", reason="other devices copy to memory of their own driver")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "bool", "int8"])
@pytest.mark.parametrize("size", [0, 1, _LARGE, 3 * _LARGE + 1])
def test_copy_of_shards_keeps_values_when_array_is_deleted(size, dtype):
    array = jnp.arange(size).astype(dtype)
    expected = np.arange(size).astype(array.dtype)
    copy = _shards_on_host(array)
    array.delete()
    assert (copy.dtype, copy.sharding.memory_kind) == (expected.dtype, "pinned_host")
    np.testing.assert_array_equal(np.asarray(copy), expected)


@on_cpu
def test_large_copy_has_own_pages():
    """`device_put` must not copy the pages again; a copy by XLA begins with a header of the allocator."""
    (shard,) = _shards_on_host(jnp.ones(8 * _LARGE)).addressable_shards
    assert shard.data.unsafe_buffer_pointer() % mmap.PAGESIZE == 0


@on_cpu
def test_array_can_be_donated_after_copy():
    """A view of the array that outlives the copy would make XLA copy the array."""
    array = jnp.ones(8 * _LARGE)
    before = array.unsafe_buffer_pointer()
    copy = _shards_on_host(array)
    after = jax.jit(lambda x: x + 1, donate_argnums=0)(array)
    assert after.unsafe_buffer_pointer() == before
    assert float(copy[0]) == 1
