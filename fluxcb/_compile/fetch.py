"""Fetch: the values that are transferred from the device with a window of steps, and their packing.

All small values that are needed for each step are packed into one row of 32-bit words per step, so a whole window
is one array and one transfer. Each larger value has its own buffer. Values for the end of a window are not stacked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fluxcb._compile.arrays import is_key, nbytes_of, packs
from fluxcb._declare.access import dotted
from fluxcb._errors import TraceError
from fluxcb._typing import PyTree, StatePath

__all__ = ["Fetch", "empty_buffers", "join_rows", "store"]

# Each array that a program returns costs 0.6 us, and each kernel in a step about 0.5 us (jax 0.10.2, CPU). Therefore,
# all small values share one array.
_HEAD = 2  # words at the start of a row: 1 if the step ran, and 1 if it stopped the window

_JOINED = 32  # `_stacked` is compiled for a multiple of this number of rows, so that it fits windows of all lengths

_PACKED_BYTES = 256  # a larger leaf has its own buffer, because copying it word by word costs more than a transfer


@dataclass(frozen=True)
class _Leaf:
    """The position of one leaf of a value: `words` words of the row from `start` on, or buffer number `buffer`."""

    shape: tuple[int, ...]
    dtype: Any
    start: int = 0
    words: int = 0
    buffer: int = -1


@dataclass(frozen=True, eq=False)
class Fetch:
    """The values that leave the device, by path.

    Args:
        each: Specs of the values that are fetched for each step: step values, and small parts of the carry after the
            step.
        last: Specs of the values that are fetched for the last step of a window.

    Attributes:
        row: Number of words in the row of each step (int32[row]).
        buffers: Specs of the additional buffers, with one entry per step.
    """

    each: Mapping[StatePath, PyTree]
    last: Mapping[StatePath, PyTree]
    row: int = field(init=False)
    buffers: tuple[jax.ShapeDtypeStruct, ...] = field(init=False)
    _places: Mapping[StatePath, tuple[Any, tuple[_Leaf, ...]]] = field(init=False)

    def __post_init__(self) -> None:
        start, buffers = _HEAD, []
        places: dict[StatePath, tuple[Any, tuple[_Leaf, ...]]] = {}
        for path, spec in self.each.items():
            leaves, structure = jax.tree.flatten(spec)
            packed_leaves = []
            for leaf in leaves:
                _refuse_key(path, leaf)
                words = _words(leaf)
                if words is None:
                    packed_leaves.append(_Leaf(leaf.shape, leaf.dtype, buffer=len(buffers)))
                    buffers.append(leaf)
                else:
                    packed_leaves.append(_Leaf(leaf.shape, leaf.dtype, start, words))
                    start += words
            places[path] = structure, tuple(packed_leaves)
        for path, spec in self.last.items():
            for leaf in jax.tree.leaves(spec):
                _refuse_key(path, leaf)
        for name, value in (("row", start), ("buffers", tuple(buffers)), ("_places", places)):
            object.__setattr__(self, name, value)

    @property
    def bytes_each(self) -> int:
        """Number of bytes that are fetched for each step."""
        return 4 * self.row + sum(nbytes_of(spec) for spec in self.buffers)

    def covering(self, path: StatePath) -> StatePath | None:
        """Return the fetched path that equals or contains a path, or None."""
        for end in range(len(path), 0, -1):
            if path[:end] in self._places or path[:end] in self.last:
                return path[:end]
        return None

    # -- on the device --------------------------------------------------------------------------

    def pack(self, value_at: Callable[[StatePath], PyTree], ran: Any, stopped: Any) -> tuple[Any, list[Any]]:
        """Return a step's row and its entries in the buffers.

        Args:
            value_at: Returns the value at a path.
            ran: Whether the step ran (bool[]).
            stopped: Whether it stopped the window (bool[] or int32[]).
        """
        # The host reads from these words how many steps of the window ran, without another transfer.
        words = [jnp.asarray(ran, jnp.int32).reshape(1), jnp.asarray(stopped, jnp.int32).reshape(1)]
        entries: list[Any] = []
        for path, (_, leaves) in self._places.items():
            for leaf, value in zip(leaves, jax.tree.leaves(value_at(path)), strict=True):
                # A Python number that a handler has assigned is a literal of the step, which is no array (jax 0.10.2).
                array = jnp.asarray(value, leaf.dtype)
                if leaf.buffer >= 0:
                    entries.append(array)
                else:
                    words.append(_as_words(array))
        return jnp.concatenate(words), entries

    # -- on the host ----------------------------------------------------------------------------

    def columns(
        self, path: StatePath, rows: np.ndarray, buffer: Callable[[int], Sequence[Any]]
    ) -> tuple[Any, list[Any]]:
        """Return a value for all steps: its structure, and its leaves with the steps as their leading axis.

        Args:
            path: A path of `each`.
            rows: The rows, int32[steps, row].
            buffer: Returns the entries of a buffer, one per step.
        """
        structure, leaves = self._places[path]
        return structure, [
            buffer(leaf.buffer)
            if leaf.buffer >= 0
            else _from_words(rows[:, leaf.start : leaf.start + leaf.words], leaf.shape, leaf.dtype)
            for leaf in leaves
        ]


def empty_buffers(fetch: Fetch, length: int) -> tuple[Any, list[Any]]:
    """Return zeros of the shapes of the rows and buffers of `length` steps."""
    return jnp.zeros((length, fetch.row), jnp.int32), [jnp.zeros((length, *s.shape), s.dtype) for s in fetch.buffers]


def store(stored: tuple[Any, list[Any]], i: Any, packed: tuple[Any, list[Any]]) -> tuple[Any, list[Any]]:
    """Return rows and buffers with those of step `i` written."""

    def put(buffer: Any, value: Any) -> Any:  # unlike `.at[i].set`, without checking the index: two kernels fewer
        return jax.lax.dynamic_update_index_in_dim(buffer, value, i, 0)

    return put(stored[0], packed[0]), [put(buffer, value) for buffer, value in zip(stored[1], packed[1], strict=True)]


def _refuse_key(path: StatePath, leaf: Any) -> None:
    if is_key(leaf):
        raise TraceError(
            f"`{dotted(path)}` holds a typed random key, which cannot be fetched.",
            why="a host handler declares `Read()` on it",
            fix="fetch `jax.random.key_data(key)`",
        )


def _words(leaf: Any) -> int | None:
    """Return the number of words in the row that a leaf needs, or None if it has its own buffer."""
    if nbytes_of(leaf) > _PACKED_BYTES or not packs(leaf.dtype):
        return None
    # Each element of a narrower dtype takes a whole word, so that packing needs only one conversion.
    return math.prod(leaf.shape) * max(1, leaf.dtype.itemsize // 4)


_UNSIGNED = {1: np.uint8, 2: np.uint16}


def _as_words(value: Any) -> Any:
    """Return the bits of an array as int32[n]. Each element of a narrower dtype takes a word."""
    flat = value.reshape(-1)
    size = flat.dtype.itemsize
    # `bitcast_convert_type` does not accept bools (jax 0.10.2).
    if jnp.issubdtype(flat.dtype, jnp.bool_):
        return flat.astype(jnp.int32)
    if size < 4:
        return jax.lax.bitcast_convert_type(flat, _UNSIGNED[size]).astype(jnp.int32)
    return jax.lax.bitcast_convert_type(flat, jnp.int32).reshape(-1)


def _from_words(words: np.ndarray, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return the read-only arrays from which `_as_words` made words, with the steps as their leading axis."""
    size = np.dtype(dtype).itemsize
    if np.issubdtype(dtype, np.bool_):
        values = words != 0
    elif size < 4:
        values = words.astype(_UNSIGNED[size]).view(dtype)
    elif words.shape[1] == 1 and size == 4:  # the usual scalar: a view
        values = words.view(dtype)
    else:
        values = np.ascontiguousarray(words).view(dtype)
    values = values.reshape(len(words), *shape)
    # All readers of a step share the array.
    values.flags.writeable = False
    return values


def join_rows(rows: Sequence[jax.Array]) -> jax.Array:
    """Return the rows that single-step calls have returned as one array, without waiting for them.

    The array has additional rows at the end. Its transfer to the host replaces one for each step. On an H200, reading
    the losses of all steps at the end of an epoch takes a hand-written loop 0.3 ms per step, as long as the step of the
    64-64-10 network.
    """
    return _stacked([*rows, *[rows[-1]] * (-len(rows) % _JOINED)])


@jax.jit
def _stacked(rows: list[jax.Array]) -> jax.Array:
    return jnp.stack(rows)
