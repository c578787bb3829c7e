"""Shapes in place of arrays. A Learner keeps the structure of a model, but not its initial arrays."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

__all__ = ["shape_of"]


def shape_of(leaf: Any) -> Any:
    """Return the shape and dtype of an array, and anything else unchanged."""
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, jax.Array | np.ndarray) else leaf
