"""The arrays of a snapshot: copying the train state to the host, and placing it on the devices again."""

from __future__ import annotations

import mmap
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fluxcb._compile.arrays import is_key
from fluxcb._compile.placement import distributed_copy
from fluxcb._typing import PyTree

__all__ = ["host_copies", "placed_like"]

_LARGE = 1 << 17
"""Size from which a copy has its own pages (bytes). Smaller arrays would waste pages, and are too many for mappings."""


def host_copies(tree: PyTree) -> PyTree:
    """Return copies of a pytree's arrays in host memory. Each process copies its own shards only."""

    def host_copy(leaf: Any) -> Any:
        # The next step donates the live arrays, so the snapshot needs copies.
        if is_key(leaf):
            return jnp.copy(leaf)
        return np.array(leaf) if leaf.is_fully_addressable else _shards_on_host(leaf)

    if jax.process_count() > 1:
        # Delete the copies of the previous snapshot (see `_in_own_pages`). Otherwise, they would exist until the first
        # array of this snapshot has been copied.
        jax.device_put(np.zeros((), np.float32), jax.local_devices()[0])
    copies = jax.tree.map(host_copy, tree)
    return jax.block_until_ready(copies)


def _shards_on_host(leaf: Any) -> Any:
    """Return a copy of an array of several processes, whose shards lie in the memory of their hosts."""
    kind = "pinned_host"

    # Shard by shard: `device_put` of the whole array would be a collective.
    def on_host(shard: Any) -> Any:
        place = jax.sharding.SingleDeviceSharding(shard.device, memory_kind=kind)
        data = shard.data
        if shard.device.platform == "cpu" and data.nbytes >= _LARGE:
            # XLA would allocate from the heap, which keeps the memory of an array after the save. `device_put` does not
            # copy these pages, because they are aligned.
            data = _in_own_pages(np.asarray(data))
        return jax.device_put(data, place)

    shards = [on_host(shard) for shard in leaf.addressable_shards]
    return jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding.with_memory_kind(kind), shards)


def _in_own_pages(array: np.ndarray) -> np.ndarray:
    """Return a copy whose memory returns to the operating system when the copy is deleted.

    JAX deletes an array that it has not copied at its next transfer to a device, or at the next garbage collection.
    """
    copy = np.ndarray(array.shape, array.dtype, buffer=mmap.mmap(-1, array.nbytes))
    np.copyto(copy, array)
    return copy


def placed_like(now: PyTree, then: PyTree, adopt: bool) -> PyTree:
    """Return the arrays of `then` with the placement of `now`: copies, unless they are in place and `adopt` is set."""

    def placed(old: Any, new: Any) -> Any:
        if is_key(old):
            data = placed(jax.random.key_data(old), jax.random.key_data(new) if is_key(new) else new)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(old))
        if adopt and isinstance(new, jax.Array) and new.sharding == old.sharding:
            return new
        if len(old.sharding.device_set) > 1:
            # Each process places its own shards. `device_put` would copy the whole array to one device, and gather it
            # from all processes to compare the copies.
            return distributed_copy(new, old.sharding)
        # `device_put` and `jnp.asarray` can alias their argument, even with `may_alias=False` under a sharding (jax
        # 0.10 to 0.12), and donation would then destroy the caller's arrays.
        new = jnp.array(new, copy=True)
        return jax.device_put(new, old.sharding) if old.committed else new

    return jax.tree.map(placed, now, then)
