"""Stacking: the batches of a window as one buffer, which its program takes them from."""

from __future__ import annotations

import math
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

    Attributes:
        steps: Length of the buffers (steps).
        rows: Whether the batches are rows of arrays that lie on the device, so that only row numbers are stacked.
    """

    def __init__(self, example: Batch, steps: int) -> None:
        self.steps = steps
        self.rows = isinstance(example, Rows)
        if self.rows:
            self._arrays, example = example.arrays, example.rows
        leaves, self._structure = jax.tree.flatten(example)
        self._specs = [(s.shape, np.dtype(s.dtype) if not is_key(s) else s.dtype) for s in spec_of(leaves)]
        self._on_device = any(_stays_on_device(leaf) for leaf in leaves)
        self._stack = jax.jit(lambda *batches: jax.tree.map(lambda *x: jnp.stack(x), *batches))

    def stack(self, batches: Sequence[Batch]) -> tuple[Any, int]:
        """Return a buffer that begins with as many of the batches as have the right shapes, and how many these are.

        What stands behind them in the buffer is not defined; of resident arrays, it is rows that exist.
        """
        rows = [batch.rows for batch in self._of_same_arrays(batches)] if self.rows else batches
        columns, count = self._columns(rows[: self.steps])
        if not count:
            return None, 0
        if self._on_device:
            fitting = list(zip(*columns, strict=True))
            stacked = list(self._stack(*fitting, *[fitting[-1]] * (self.steps - count)))
        else:
            stacked = [self._buffer(column, *spec) for column, spec in zip(columns, self._specs, strict=True)]
        buffer = jax.tree.unflatten(self._structure, stacked)
        return (Rows(self._arrays, buffer) if self.rows else buffer), count

    def _columns(self, batches: Sequence[Any]) -> tuple[list[list[Any]], int]:
        """Return for each leaf those of the batches, up to the first batch that does not fit, and how many fit."""
        width, count = len(self._specs), len(batches)
        leaves, structure = jax.tree.flatten(tuple(batches))
        if structure == jax.tree_util.treedef_tuple([self._structure] * count):  # as it is nearly always: look at once
            columns = [leaves[at::width] for at in range(width)]
            if all(_alike(column, *spec) for column, spec in zip(columns, self._specs, strict=True)):
                return columns, count
        columns = [[] for _ in self._specs]
        for done, batch in enumerate(batches):
            leaves, structure = jax.tree.flatten(batch)
            if structure != self._structure or not self._fits(leaves):
                return columns, done
            for column, leaf in zip(columns, leaves, strict=True):
                column.append(leaf)
        return columns, count

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
        if shape and set(map(type, column)) == {np.ndarray}:
            rest = shape[1:]
            into = buffer[: len(column)].reshape(len(column) * shape[0], *rest)
            np.concatenate(column, out=into, casting="unsafe")  # elements wrap, as they do where JAX takes them
        else:
            for i, leaf in enumerate(column):
                # Numbers wrap as they do where JAX takes them; of arrays, NumPy wraps the elements itself.
                buffer[i] = leaf if shape else np.asarray(leaf).astype(dtype)
        if self.rows:
            buffer[len(column) :] = 0
        return buffer


def _alike(column: Sequence[Any], shape: tuple[int, ...], dtype: Any) -> bool:
    """Tell whether all leaves of a column are NumPy arrays of one dtype, and fit."""
    return (
        set(map(type, column)) == {np.ndarray}
        and {leaf.shape for leaf in column} == {shape}
        and len({leaf.dtype for leaf in column}) == 1
        and (column[0].dtype == dtype or _canonical(column[0]) == dtype)
    )


def _canonical(leaf: Any) -> Any:
    return spec_of(leaf).dtype


def _stays_on_device(leaf: Any) -> bool:
    """Tell whether a batch's leaf is better stacked on the device: NumPy sees CPU arrays without moving them."""
    if not isinstance(leaf, jax.Array):
        return False
    devices = leaf.devices()
    return is_key(leaf) or len(devices) > 1 or next(iter(devices)).platform != "cpu"


def _aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    size = math.prod(shape) * dtype.itemsize
    raw = np.empty(size + _ALIGNED, np.uint8)
    start = -raw.__array_interface__["data"][0] % _ALIGNED
    return raw[start : start + size].view(dtype).reshape(shape)
