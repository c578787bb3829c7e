"""Stacking: the batches of a window as one buffer, which its program takes them from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fluxcb._compile.arrays import is_key, spec_of
from fluxcb._typing import Batch, Rows

__all__ = ["Stacker"]

_ALIGNED = 64  # bytes; JAX takes a NumPy array of this alignment on CPU without copying it


class Stacker:
    """Puts batches of one shape into buffers of one length.

    NumPy batches are copied into a new NumPy buffer, which the call of the program takes to the device. Batches that
    are on a device already are stacked there, by a small compiled function.

    Args:
        example: A batch.
        steps: Length of the buffers (steps).
    """

    def __init__(self, example: Batch, steps: int) -> None:
        self.steps = steps
        self._rows = isinstance(example, Rows)
        if self._rows:
            self._arrays, example = example.arrays, example.rows
        leaves, self._structure = jax.tree.flatten(example)
        self._specs = [(s.shape, np.dtype(s.dtype) if not is_key(s) else s.dtype) for s in spec_of(leaves)]
        self._on_device = any(_stays_on_device(leaf) for leaf in leaves)
        self._stack = jax.jit(lambda *batches: jax.tree.map(lambda *x: jnp.stack(x), *batches))

    def stack(self, batches: Sequence[Batch]) -> tuple[Any, int]:
        """Return a buffer that begins with as many of the batches as have the right shapes, and how many these are.

        What stands behind them in the buffer is not defined; of resident arrays, it is rows that exist.
        """
        rows = [batch.rows for batch in self._of_same_arrays(batches)] if self._rows else batches
        fitting = []
        for batch in rows[: self.steps]:
            leaves, structure = jax.tree.flatten(batch)
            if structure != self._structure or not self._fits(leaves):
                break
            fitting.append(leaves)
        if not fitting:
            return None, 0
        if self._on_device:
            stacked = list(self._stack(*fitting, *[fitting[-1]] * (self.steps - len(fitting))))
        else:
            columns = zip(*fitting, strict=True)
            stacked = [self._buffer(column, *spec) for column, spec in zip(columns, self._specs, strict=True)]
        buffer = jax.tree.unflatten(self._structure, stacked)
        return (Rows(self._arrays, buffer) if self._rows else buffer), len(fitting)

    def _of_same_arrays(self, batches: Sequence[Batch]) -> list[Rows]:
        same = []
        for batch in batches:
            if not isinstance(batch, Rows) or batch.arrays is not self._arrays:
                break
            same.append(batch)
        return same

    def _fits(self, leaves: list[Any]) -> bool:
        for leaf, (shape, dtype) in zip(leaves, self._specs, strict=True):
            if getattr(leaf, "shape", ()) != shape:
                return False
            held = getattr(leaf, "dtype", None)
            if held is not dtype and _canonical(leaf) != dtype:
                return False
        return True

    def _buffer(self, column: Sequence[Any], shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        buffer = _aligned((self.steps, *shape), dtype)
        for i, leaf in enumerate(column):
            # Numbers wrap as they do where JAX takes them; of arrays, NumPy wraps the elements itself.
            buffer[i] = leaf if shape else np.asarray(leaf).astype(dtype)
        if self._rows:
            buffer[len(column) :] = 0
        return buffer


def _canonical(leaf: Any) -> Any:
    return spec_of(leaf).dtype


def _stays_on_device(leaf: Any) -> bool:
    """Tell whether a batch's leaf is better stacked on the device: NumPy sees CPU arrays without moving them."""
    if not isinstance(leaf, jax.Array):
        return False
    devices = leaf.devices()
    return is_key(leaf) or len(devices) > 1 or next(iter(devices)).platform != "cpu"


def _aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    raw = np.empty(size + _ALIGNED, np.uint8)
    start = -raw.ctypes.data % _ALIGNED
    return raw[start : start + size].view(dtype).reshape(shape)
