"""Small facts about pytrees of arrays: specs, copies, and how two trees differ."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fluxcb._typing import Batch, PyTree, Rows

__all__ = [
    "batch_spec",
    "copy_tree",
    "describe",
    "differences",
    "is_key",
    "leading_axis",
    "leaves_of",
    "nbytes_of",
    "own_copy",
    "packs",
    "signature_of",
    "spec_of",
    "to_host",
]


def is_key(x: Any) -> bool:
    """Tell whether an array (or its spec) holds typed random keys."""
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def copy_tree(tree: PyTree) -> PyTree:
    """Copy every leaf onto the device; the only way that donation cannot reach the original.

    `device_put` and `jnp.asarray` alias, also with `may_alias=False` under a sharding (jax 0.10 to 0.12).
    """
    return jax.tree.map(lambda x: jnp.copy(x) if is_key(x) else jnp.array(x, copy=True), tree)


def own_copy(tree: PyTree) -> PyTree:
    """Copy every leaf as `copy_tree` does, but wait for it: through the host's memory where it lies there anyway.

    That needs no program, of which `copy_tree` compiles one for each shape.
    """
    leaves, structure = jax.tree.flatten(tree)
    on_host = [_lies_on_host(leaf) for leaf in leaves]
    # All at once: a call of `device_put` costs more than what it puts there.
    copies = iter(jax.device_put([np.array(leaf) for leaf, here in zip(leaves, on_host, strict=True) if here]))
    return structure.unflatten(
        next(copies) if here else copy_tree(leaf) for leaf, here in zip(leaves, on_host, strict=True)
    )


def _lies_on_host(x: Any) -> bool:
    if isinstance(x, np.ndarray):
        return x.dtype.isnative  # JAX refuses the others
    return isinstance(x, jax.Array) and not (is_key(x) or x.weak_type or x.committed) and _on_cpu(x)


def _on_cpu(x: jax.Array) -> bool:
    return next(iter(x.devices())).platform == "cpu"


def spec_of(tree: PyTree) -> PyTree:
    """Return the `ShapeDtypeStruct`s of a pytree of arrays, numpy arrays or numbers, dtypes as JAX will hold them."""

    def spec(x: Any) -> jax.ShapeDtypeStruct:
        if isinstance(x, jax.ShapeDtypeStruct):
            return x
        if isinstance(x, jax.Array):
            return jax.ShapeDtypeStruct(x.shape, x.dtype)
        x = np.asarray(x)
        return jax.ShapeDtypeStruct(x.shape, jax.dtypes.canonicalize_dtype(x.dtype))

    return jax.tree.map(spec, tree)


def batch_spec(batch: Batch) -> PyTree:
    """Return the specs of a batch, or of the batch that rows of resident arrays make."""
    if isinstance(batch, Rows):
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct((*batch.rows.shape, *a.shape[1:]), a.dtype), batch.arrays)
    return spec_of(batch)


def signature_of(tree: PyTree) -> Any:
    """Return a hashable key of the structure, shapes and dtypes of a pytree of arrays or specs."""
    leaves, structure = jax.tree.flatten(tree)
    return structure, tuple((leaf.shape, leaf.dtype) for leaf in leaves)


def leading_axis(batch: Batch) -> int:
    """Return how many examples a batch (or its specs) has: the leading axis of its first array, or 1."""
    leaves = jax.tree.leaves(batch_spec(batch))
    return leaves[0].shape[0] if leaves and leaves[0].shape else 1


def leaves_of(value: Any) -> list[Any]:
    """Return the leaves of anything a user keeps; an iterator is one leaf, and keys need not be sortable."""
    try:
        return jax.tree.leaves(value, is_leaf=lambda node: isinstance(node, Iterator))  # as which JAX deprecates them
    except ValueError:
        parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
        return [leaf for part in parts for leaf in leaves_of(part)]


def nbytes_of(tree: PyTree) -> int:
    """Return the bytes that a pytree of arrays or specs takes; random keys count as their data."""

    def size(x: Any) -> int:
        if is_key(x):
            x = jax.eval_shape(jax.random.key_data, x)
        return math.prod(x.shape) * np.dtype(x.dtype).itemsize

    return sum(size(leaf) for leaf in jax.tree.leaves(tree))


def to_host(value: PyTree) -> PyTree:
    """Return a pytree of arrays as read-only numpy arrays, scalars as numpy scalars."""

    def move(x: Any) -> Any:
        if is_key(x) or not hasattr(x, "dtype"):
            return x
        array = np.asarray(x)
        if array.ndim == 0:
            return array[()]
        array = array.view()
        array.flags.writeable = False
        return array

    if hasattr(value, "dtype"):  # the usual case, without the tree's cost
        return move(value)
    return jax.tree.map(move, value)


def packs(dtype: Any) -> bool:
    """Tell whether numbers of a dtype lie side by side in whole bytes, and are real."""
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return False
    return dtype.itemsize in (1, 2, 4, 8) and not str(dtype).startswith(("int4", "uint4", "int2", "uint2", "float4"))


def describe(x: Any) -> str:
    """Return `float32[32, 10]`."""
    if not hasattr(x, "dtype"):
        return f"{type(x).__name__} {x!r}"
    return f"{x.dtype}[{', '.join(map(str, x.shape))}]"


def differences(old: PyTree, new: PyTree) -> list[str]:
    """Return how a new pytree differs from the old in structure, shape or dtype; one line a leaf."""
    old_leaves, old_structure = jax.tree_util.tree_flatten_with_path(old)
    new_leaves, new_structure = jax.tree_util.tree_flatten_with_path(new)
    if old_structure != new_structure:
        old_paths = {jax.tree_util.keystr(p): x for p, x in old_leaves}
        new_paths = {jax.tree_util.keystr(p): x for p, x in new_leaves}
        lines = [f"{p or 'it'} is missing" for p in old_paths if p not in new_paths]
        lines += [f"{p or 'it'} is new: {describe(new_paths[p])}" for p in new_paths if p not in old_paths]
        return lines or [f"the containers differ: {old_structure} became {new_structure}"]
    return [
        f"{jax.tree_util.keystr(path) or 'it'}: {describe(a)} became {describe(b)}"
        for (path, a), (_, b) in zip(old_leaves, new_leaves, strict=True)
        if (a.shape, a.dtype) != (jnp.shape(b), getattr(b, "dtype", None))
    ]
