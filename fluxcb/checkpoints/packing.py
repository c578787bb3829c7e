"""The host's arrays as one: orbax takes about a millisecond for each array, and leaves some of it in memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import jax.numpy as jnp
import numpy as np

__all__ = ["PACKED", "packed", "unpacked"]

PACKED = "packed"
"""The name of that one array."""


def packed(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the bytes of arrays, one behind the other, as uint8[n]."""
    return np.frombuffer(b"".join(arrays[name].tobytes() for name in _in_order(arrays)), np.uint8)


def unpacked(data: np.ndarray, texts: Mapping[str, str]) -> dict[str, np.ndarray] | None:
    """Return the arrays again, or None if they are not those of the texts.

    Args:
        data: What `packed` returned.
        texts: What manifests say of each: `float32[3, 4]`.
    """
    arrays, at, held = {}, 0, data.tobytes()
    for name in _in_order(texts):
        dtype, _, shape = texts[name][:-1].partition("[")
        sizes = [int(size) for size in shape.split(", ")] if shape else []
        try:
            kind, count = jnp.dtype(dtype), math.prod(sizes)
        except TypeError:
            return None
        end = at + count * kind.itemsize
        if end > len(held):
            return None
        arrays[name] = np.frombuffer(held[at:end], kind).reshape(sizes)
        at = end
    return arrays if at == len(held) else None


def _in_order(names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: (len(name), name))
