"""Packing: many small arrays as few vectors, because each leaf of the carry costs time at every step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["Packing"]


class Packing:
    """How a pytree of small arrays is laid out in one vector per dtype.

    Args:
        template: A pytree of the structure, shapes and dtypes.

    Attributes:
        sizes: Length of each vector, by dtype name.
    """

    def __init__(self, template: Any) -> None:
        import jax
        import numpy as np

        leaves, self._structure = jax.tree.flatten(template)
        leaves = [leaf if hasattr(leaf, "dtype") else np.float32(leaf) for leaf in leaves]
        self._shapes = [np.shape(leaf) for leaf in leaves]
        self._dtypes = [str(jax.dtypes.canonicalize_dtype(leaf.dtype)) for leaf in leaves]
        self._starts: list[int] = []
        self.sizes: dict[str, int] = {}
        for shape, dtype in zip(self._shapes, self._dtypes, strict=True):
            self._starts.append(self.sizes.get(dtype, 0))
            self.sizes[dtype] = self.sizes.get(dtype, 0) + int(np.prod(shape, dtype=int))

    def place(self, tree: Any, vectors: Mapping[str, Any], part: int) -> dict[str, Any]:
        """Return the vectors with a pytree written into their `part`-th stretch."""
        import jax
        import jax.numpy as jnp

        placed = dict(vectors)
        for leaf, shape, dtype, start in zip(jax.tree.leaves(tree), self._shapes, self._dtypes, self._starts, strict=True):
            at = part * self.sizes[dtype] + start
            leaf = jnp.asarray(leaf, dtype).reshape(-1)
            if leaf.size <= 4:
                placed[dtype] = write_scalars(placed[dtype], at, [leaf[i] for i in range(leaf.size)])
            else:
                placed[dtype] = placed[dtype].at[at : at + leaf.size].set(leaf)
        return placed

    def unpack(self, vectors: Mapping[str, Any]) -> Any:
        """Return the pytree that lies in these vectors (JAX or numpy arrays)."""
        import jax
        import numpy as np

        leaves = []
        for shape, dtype, start in zip(self._shapes, self._dtypes, self._starts, strict=True):
            size = int(np.prod(shape, dtype=int))
            leaves.append(vectors[dtype][start : start + size].reshape(shape))
        return jax.tree.unflatten(self._structure, leaves)


def write_scalars(vector: Any, at: Any, scalars: Any) -> Any:
    """Return a short vector with scalars written from a place on.

    Selecting by index, rather than updating slices, lets XLA merge all of a step's writes into one kernel.
    """
    import jax.numpy as jnp

    index = jnp.arange(vector.shape[0])
    for offset, scalar in enumerate(scalars):
        vector = jnp.where(index == at + offset, scalar, vector)
    return vector
