"""Traced checks for NaN and infinity."""

from __future__ import annotations

from typing import Any

__all__ = ["all_finite", "finite_leaves"]


def finite_leaves(tree: Any) -> Any:
    """Return whether all elements of each leaf of a pytree are finite, as bool[leaves]; traced."""
    import jax
    import jax.numpy as jnp

    return jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(tree)])


def all_finite(tree: Any) -> Any:
    """Return whether all elements of a pytree are finite, as bool[]; traced."""
    import jax.numpy as jnp

    return jnp.all(finite_leaves(tree))
