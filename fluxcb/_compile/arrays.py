"""Functions on pytrees of arrays: specs, copies, and differences between two trees."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fluxcb._traced_values import describe, shapes
from fluxcb._typing import Batch, PyTree, Rows

__all__ = [
    "batch_differences",
    "batch_spec",
    "copy_tree",
    "differences",
    "is_key",
    "leading_axis",
    "leaves_of",
    "nbytes_of",
    "own_copy",
    "packs",
    "placed_as",
    "process_nbytes_of",
    "signature_of",
    "spec_of",
    "to_host",
    "with_numbers_as",
]


# Up to this size (bytes), memory that JAX cannot donate costs less than a second `device_put`.
_SMALL_BYTES = 65536


def is_key(x: Any) -> bool:
    """Return whether an array (or its spec) holds typed random keys."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def copy_tree(tree: PyTree) -> PyTree:
    """Copy every leaf onto the device, so that donation cannot invalidate the original.

    `device_put` and `jnp.asarray` may alias, even with `may_alias=False` under a sharding (jax 0.10 to 0.12).
    """
    return jax.tree.map(lambda x: jnp.copy(x) if is_key(x) else jnp.array(x, copy=True), tree)


def own_copy(tree: PyTree) -> PyTree:
    """Copy every leaf as `copy_tree` does, and wait for the copy. Arrays in host memory are copied there.

    This needs no program, whereas `copy_tree` compiles one for each shape.
    """
    leaves, structure = jax.tree.flatten(tree)
    on_host = [_lies_on_host(leaf) for leaf in leaves]
    # A single call for all arrays, because a call of `device_put` costs more than copying the data.
    host_leaves = itertools.compress(leaves, on_host)
    copies = iter(jax.device_put([_copied(leaf) for leaf in host_leaves]))
    return structure.unflatten(
        next(copies) if is_on_host else copy_tree(leaf) for leaf, is_on_host in zip(leaves, on_host, strict=True)
    )


def _copied(x: Any) -> Any:
    """Return a copy of an array that is in host memory.

    JAX uses the memory of a NumPy array without copying it, and cannot donate this memory. A program to which the array
    is donated would need the same amount again. For a small array this does not matter, and this copy is cheaper.
    """
    if x.nbytes <= _SMALL_BYTES:
        return np.array(x)
    copy = jax.device_put(jax.device_put(x), may_alias=False)
    return copy.block_until_ready() if isinstance(x, np.ndarray) else copy  # the owner may change it afterwards


def _lies_on_host(x: Any) -> bool:
    if isinstance(x, np.ndarray):
        return x.dtype.isnative  # JAX refuses the others
    # A copy through NumPy would lose the type of a key, the weak type, or the device that the user has chosen.
    return isinstance(x, jax.Array) and not (is_key(x) or x.weak_type or x.committed) and _on_cpu(x)


def _on_cpu(x: jax.Array) -> bool:
    return next(iter(x.devices())).platform == "cpu"


def spec_of(tree: PyTree) -> PyTree:
    """Return the `ShapeDtypeStruct`s of a pytree of arrays, NumPy arrays or numbers, with the dtypes that JAX uses."""

    def spec(x: Any) -> jax.ShapeDtypeStruct:
        if isinstance(x, jax.ShapeDtypeStruct):
            return x
        if isinstance(x, jax.Array):
            return jax.ShapeDtypeStruct(x.shape, x.dtype)
        x = np.asarray(x)
        # JAX converts 64-bit values to 32 bits unless `jax_enable_x64` is set.
        return jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype))

    return jax.tree.map(spec, tree)


def batch_spec(batch: Batch) -> PyTree:
    """Return the specs of a batch. Rows of arrays on the device have the specs of the batch that they form."""
    if isinstance(batch, Rows):
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct((*batch.rows.shape, *a.shape[1:]), a.dtype), batch.arrays)
    return spec_of(batch)


def signature_of(tree: PyTree) -> Any:
    """Return a hashable key of the structure, shapes and dtypes of a pytree of arrays or specs."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def leading_axis(batch: Batch) -> int:
    """Return the number of examples in a batch (or its specs): the leading axis of its first array, or 1."""
    leaves = jax.tree.leaves(batch_spec(batch))
    return leaves[0].shape[0] if leaves and leaves[0].shape else 1


def leaves_of(value: Any) -> list[Any]:
    """Return the leaves of anything a user keeps; an iterator is one leaf, and keys need not be sortable."""
    try:
        return jax.tree.leaves(
            value, is_leaf=lambda node: isinstance(node, Iterator)
        )  # JAX deprecates iterators as implicit leaves
    except ValueError:
        parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
        return [leaf for part in parts for leaf in leaves_of(part)]


def nbytes_of(tree: PyTree) -> int:
    """Return the size of a pytree of arrays or specs (bytes). Random keys count as their data."""

    def size(x: Any) -> int:
        if is_key(x):
            # `eval_shape` computes nothing, and accepts specs as well as arrays.
            x = jax.eval_shape(jax.random.key_data, x)
        return math.prod(x.shape) * np.dtype(x.dtype).itemsize

    return sum(size(leaf) for leaf in jax.tree.leaves(tree))


def process_nbytes_of(tree: PyTree) -> int:
    """Return the size of a pytree of arrays in one process (bytes).

    For a sharded array, this is the size of the shards on the devices of the process. If the processes have different
    numbers of devices, the result is the largest of these sizes, so it is the same in all processes.
    """

    def size(x: Any) -> int:
        sharding = getattr(x, "sharding", None)
        if sharding is None:  # a NumPy array
            return nbytes_of(spec_of(x))
        shards = max(Counter(device.process_index for device in sharding.device_set).values())
        return shards * nbytes_of(jax.ShapeDtypeStruct(sharding.shard_shape(x.shape), x.dtype))

    return sum(size(leaf) for leaf in jax.tree.leaves(tree))


def to_host(value: PyTree) -> PyTree:
    """Return a pytree of arrays as read-only NumPy arrays, with scalars as NumPy scalars."""

    def move(x: Any) -> Any:
        if is_key(x) or not hasattr(x, "dtype"):
            return x
        array = np.asarray(x)
        if array.ndim == 0:
            return array[()]
        # `np.asarray` may return the argument itself. A view leaves the flag of the user's array unchanged.
        array = array.view()
        array.flags.writeable = False
        return array

    if hasattr(value, "dtype"):  # the common case, without the cost of a tree
        return move(value)
    return jax.tree.map(move, value)


def packs(dtype: Any) -> bool:
    """Return whether a dtype is real and its values occupy whole bytes."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return False
    # NumPy reports an item size of 1 for int4 and similar dtypes, although XLA packs several of them into a byte.
    return dtype.itemsize in (1, 2, 4, 8) and not str(dtype).startswith(("int4", "uint4", "int2", "uint2", "float4"))


def differences(old: PyTree, new: PyTree) -> list[str]:
    """Return the differences of a new pytree from an old one in structure, shape or dtype, one line per leaf."""
    old_leaves, old_structure = jax.tree_util.tree_flatten_with_path(old)
    new_leaves, new_structure = jax.tree_util.tree_flatten_with_path(new)
    if old_structure != new_structure:
        # One line instead of one for each array, if one of the two is not a container.
        if new is None or not all(path for path, _ in (*old_leaves, *new_leaves)):
            return [f"expected {_outline(old)}, got {_outline(new)}"]
        old_paths = {jax.tree_util.keystr(p): x for p, x in old_leaves}
        new_paths = {jax.tree_util.keystr(p): x for p, x in new_leaves}
        lines = [f"{p} is missing" for p in old_paths if p not in new_paths]
        lines += [f"{p} is new: {describe(new_paths[p])}" for p in new_paths if p not in old_paths]
        # A list and a tuple have equal paths, so the paths do not show every difference.
        return lines or [f"the containers differ: expected {old_structure}, got {new_structure}"]
    return [
        _difference(path, a, b)
        for (path, a), (_, b) in zip(old_leaves, new_leaves, strict=True)
        if (a.shape, a.dtype) != (jnp.shape(b), getattr(b, "dtype", None))
    ]


def _difference(path: Any, expected: Any, got: Any) -> str:
    place = f"{jax.tree_util.keystr(path)}: " if path else ""
    return f"{place}expected {describe(expected)}, got {describe(got)}"


def _outline(tree: PyTree) -> str:
    """Return the shapes of a small pytree, or the paths of the first arrays of a large one."""
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
    return describe(tree) if len(paths) < 4 else f"a pytree with {', '.join(paths[:3])}, ..."


def batch_differences(expected: PyTree, batch: Batch) -> tuple[list[str], bool]:
    """Compare a batch with the one the step was compiled for.

    Returns:
        The differences, one line for each leaf, and whether the batch only has a shorter leading axis.
    """
    want, want_structure = jax.tree_util.tree_flatten_with_path(expected)
    have, have_structure = jax.tree_util.tree_flatten_with_path(batch_spec(batch))
    if want_structure != have_structure:
        then, now = shapes(expected), shapes(batch_spec(batch))
        # The containers of some batches, such as a list and a class of the user, can look the same.
        if then == now:
            then, now = str(want_structure), str(have_structure)
        return [f"expected {then}, got {now}"], False
    lines, shorter = [], True
    for (path, a), (_, b) in zip(want, have, strict=True):
        if (a.shape, a.dtype) == (b.shape, b.dtype):
            # An array that kept its length shows that the batch is not merely shorter.
            shorter &= a.ndim == 0
            continue
        lines.append(_difference(path, a, b))
        same_rest = a.dtype == b.dtype and a.ndim == b.ndim > 0 and a.shape[1:] == b.shape[1:]
        shorter &= same_rest and b.shape[0] < a.shape[0]
    return lines, shorter and bool(lines)


def with_numbers_as(old: PyTree, new: PyTree) -> PyTree:
    """Return a new pytree whose Python numbers are arrays of the old one's dtypes, if the structures are the same."""
    if jax.tree.structure(old) != jax.tree.structure(new):
        return new
    return jax.tree.map(lambda o, n: np.asarray(n, o.dtype) if isinstance(n, bool | int | float) else n, old, new)


def placed_as(old: PyTree, new: PyTree) -> PyTree:
    """Return copies of arrays on the devices of others of the same structure, shapes and dtypes."""

    def unplaced(o: Any, n: Any) -> Any:
        # Otherwise, the step would be compiled again for an array that the user has committed to a device.
        moves = isinstance(n, jax.Array) and n.committed and not (o.committed or is_key(n))
        return np.asarray(n) if moves else n

    copies = own_copy(jax.tree.map(unplaced, old, new))
    # Uncommitted arrays stay uncommitted, because committing them would also cause a compilation.
    return jax.tree.map(lambda o, n: jax.device_put(n, o.sharding) if o.committed else n, old, copies)
