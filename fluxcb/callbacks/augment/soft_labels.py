"""Functions for mixed labels.

Floating-point labels are mixed as arrays. Class indices cannot be mixed, so the losses for them are mixed instead.
"""

from __future__ import annotations

from typing import Any

__all__ = ["all_float", "blended", "is_float", "shown"]


def is_float(array: Any) -> bool:
    """Return whether an array has a floating-point dtype, so that it can be mixed."""
    import jax.numpy as jnp

    return jnp.issubdtype(array.dtype, jnp.floating)


def all_float(tree: Any) -> bool:
    """Return whether all arrays of a pytree have floating-point dtypes."""
    import jax

    return all(is_float(leaf) for leaf in jax.tree.leaves(tree))


def blended(weight: Any, one: Any, other: Any) -> Any:
    """Return `weight * one + (1 - weight) * other`, in the dtype of `one`."""
    return (weight * one + (1 - weight) * other).astype(one.dtype)


def shown(array: Any) -> str:
    """Return the dtype and shape of an array, for messages."""
    return f"{array.dtype}[{', '.join(map(str, array.shape))}]"
