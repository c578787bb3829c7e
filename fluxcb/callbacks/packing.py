"""Packing: many small arrays as few vectors, because each leaf of the carry costs time at every step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fluxcb._errors import DeclarationError

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

        with_paths, self._structure = jax.tree_util.tree_flatten_with_path(template)
        self._names = [jax.tree_util.keystr(path) for path, _ in with_paths]
        leaves = [leaf if hasattr(leaf, "dtype") else np.float32(leaf) for _, leaf in with_paths]
        self._shapes = [np.shape(leaf) for leaf in leaves]
        self._dtypes = [str(jax.dtypes.canonicalize_dtype(leaf.dtype)) for leaf in leaves]
        self._starts: list[int] = []
        self.sizes: dict[str, int] = {}
        for shape, dtype in zip(self._shapes, self._dtypes, strict=True):
            self._starts.append(self.sizes.get(dtype, 0))
            self.sizes[dtype] = self.sizes.get(dtype, 0) + int(np.prod(shape, dtype=int))

    def pack(self, tree: Any) -> dict[str, Any]:
        """Return the vectors of a pytree.

        Raises:
            DeclarationError: Its structure or a shape is not the template's.
        """
        import jax
        import jax.numpy as jnp

        leaves, structure = jax.tree.flatten(tree)
        if structure != self._structure:
            raise DeclarationError(
                f"A metric's state changed its structure: {self._structure} became {structure}.",
                why="it rides in the carry of a compiled step, which keeps its structure",
                fix="return from `update` what `init` returned, with other values",
            )
        parts: dict[str, list[Any]] = {dtype: [] for dtype in self.sizes}
        for leaf, shape, dtype, name in zip(leaves, self._shapes, self._dtypes, self._names, strict=True):
            if jnp.shape(leaf) != shape:
                raise DeclarationError(
                    f"A metric's state changed its shape: {name} was {shape} and became {jnp.shape(leaf)}.",
                    why="it rides in the carry of a compiled step, which keeps its shapes",
                    fix="return from `update` what `init` returned, with other values",
                )
            parts[dtype].append(jnp.asarray(leaf, dtype).reshape(-1))
        return {dtype: jnp.concatenate(vectors) for dtype, vectors in parts.items()}

    def unpack(self, vectors: Mapping[str, Any]) -> Any:
        """Return the pytree that lies in these vectors (JAX or numpy arrays)."""
        import jax
        import numpy as np

        leaves = []
        for shape, dtype, start in zip(self._shapes, self._dtypes, self._starts, strict=True):
            size = int(np.prod(shape, dtype=int))
            leaves.append(vectors[dtype][start : start + size].reshape(shape))
        return jax.tree.unflatten(self._structure, leaves)
