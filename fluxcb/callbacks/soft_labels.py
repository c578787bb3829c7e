"""Labels that are mixtures: of arrays where they are numbers, of losses where they are classes."""

from __future__ import annotations

from typing import Any

__all__ = ["all_float", "blended", "is_float"]


def is_float(array: Any) -> bool:
    """Tell whether an array holds floating-point numbers, so that it can be mixed."""
    import jax.numpy as jnp

    return jnp.issubdtype(array.dtype, jnp.floating)


def all_float(tree: Any) -> bool:
    """Tell whether all arrays of a pytree hold floating-point numbers."""
    import jax

    return all(is_float(leaf) for leaf in jax.tree.leaves(tree))


def blended(weight: Any, one: Any, other: Any) -> Any:
    """Return `weight * one + (1 - weight) * other`, in the dtype of `one`."""
    return (weight * one + (1 - weight) * other).astype(one.dtype)
