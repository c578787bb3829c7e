"""`Packing`, which stores many small arrays in few vectors, because each leaf of the carry costs time at every step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["Packing"]


class Packing:
    """The layout of a pytree of small arrays in one vector per dtype.

    Args:
        template: A pytree with the structure, shapes and dtypes to pack. It must not contain tracers.

    Attributes:
        sizes: Length of each vector, by dtype name.
        template: The packed template, as NumPy arrays by dtype name.
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
        values: dict[str, list[Any]] = {}
        for leaf, shape, dtype in zip(leaves, self._shapes, self._dtypes, strict=True):
            # Each leaf follows the previous leaves of its dtype.
            self._starts.append(self.sizes.get(dtype, 0))
            self.sizes[dtype] = self.sizes.get(dtype, 0) + int(np.prod(shape, dtype=int))
            values.setdefault(dtype, []).append(np.asarray(leaf, jax.numpy.dtype(dtype)).reshape(-1))
        self.template = {dtype: np.concatenate(parts) for dtype, parts in values.items()}

    def pack(self, tree: Any) -> dict[str, Any]:
        """Return the vectors for a pytree, by dtype name."""
        import jax
        import jax.numpy as jnp

        parts: dict[str, list[Any]] = {dtype: [] for dtype in self.sizes}
        for leaf, dtype in zip(jax.tree.leaves(tree), self._dtypes, strict=True):
            parts[dtype].append(jnp.asarray(leaf, dtype).reshape(-1))
        return {dtype: jax.lax.concatenate(leaves, 0) for dtype, leaves in parts.items()}

    def unpack(self, vectors: Mapping[str, Any]) -> Any:
        """Return the pytree in the vectors, which are JAX or NumPy arrays."""
        import jax
        import numpy as np

        leaves = []
        for shape, dtype, start in zip(self._shapes, self._dtypes, self._starts, strict=True):
            size = int(np.prod(shape, dtype=int))
            leaves.append(vectors[dtype][start : start + size].reshape(shape))
        return jax.tree.unflatten(self._structure, leaves)
