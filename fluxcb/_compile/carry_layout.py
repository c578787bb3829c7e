"""The form in which programs take the carry: its small arrays are combined into one vector per dtype.

Calling a program costs a microsecond for each input and output array (jax 0.10.2, CPU), and most arrays of a carry are
small: biases, scales, counts, and the optimizer's averages of each. The step itself uses the separate arrays. It splits
and joins the vectors within its loop, so that all programs still have the same body.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fluxcb._compile.arrays import is_key, packs, signature_of
from fluxcb._typing import PyTree

__all__ = ["CarryLayout"]

# The carry of a small model with Adam has 15 arrays, of which 5 remain. This reduced a step from 52 to 36 us, and from
# 64 to 44 us with the default callbacks (jax 0.10.2, best of eleven runs each).
_SMALL_BYTES = 4096  # copying a larger array takes longer than passing it separately
_WORTHWHILE = 3  # minimum reduction of the number of arrays


@dataclass(frozen=True)
class CarryLayout:
    """The assignment of the arrays of a carry to vectors.

    Attributes:
        signature: Structure, shapes and dtypes of the carry; see `signature_of`.
        vectors: For each array, the dtype of its vector, or "" if it is separate. Separate arrays follow the vectors.
    """

    signature: tuple[Any, tuple[tuple[tuple[int, ...], Any], ...]]
    vectors: tuple[str, ...]

    @classmethod
    def of(cls, carry: PyTree) -> CarryLayout | None:
        """Return the layout of a carry, or None if combining arrays is not worthwhile.

        The benefit was measured on CPU only. Arrays that are committed to one or several devices remain separate,
        because a vector has only one sharding.
        """
        leaves = jax.tree.leaves(carry)
        if any(leaf.committed or next(iter(leaf.devices())).platform != "cpu" for leaf in leaves):
            return None
        small = [str(leaf.dtype) if _is_small(leaf) else "" for leaf in leaves]
        counts = Counter(small)
        vectors = tuple(dtype if counts[dtype] > 1 else "" for dtype in small)
        saved = sum(map(bool, vectors)) - len({*vectors} - {""})
        return cls(signature_of(carry), vectors) if saved >= _WORTHWHILE else None

    # -- in a program -----------------------------------------------------------------------

    def join(self, carry: PyTree) -> list[Any]:
        """Return the arrays that hold a carry of tracers."""
        return self._together(jax.tree.leaves(carry), jnp.concatenate)

    def split(self, arrays: Sequence[Any], indices: PyTree | None = None) -> PyTree:
        """Return the carry of tracers in some arrays, or the part of it that has these indices."""
        return jax.tree.map(functools.partial(self._leaf, arrays), self.indices if indices is None else indices)

    # -- on the host ------------------------------------------------------------------------

    def pack(self, carry: PyTree) -> list[jax.Array]:
        """Return the arrays that hold a carry. They are built in host memory, so no program is compiled.

        Raises:
            TypeError: The carry does not match this layout, or is on another device.
        """
        if CarryLayout.of(carry) != self:
            raise TypeError("the carry differs from the layout in structure, shapes, dtypes or device")
        # A compiled program would take longer at the first call than many copies through host memory.
        leaves = [np.asarray(x) if name else x for x, name in zip(jax.tree.leaves(carry), self.vectors, strict=True)]
        arrays, count = self._together(leaves, np.concatenate), len(self._names)
        # One call for all vectors: between two programs, JAX's Python code is not in the CPU caches, and each call of
        # `device_put` takes 0.1 to 0.45 ms instead of 35 us.
        return [*jax.device_put(arrays[:count]), *arrays[count:]]

    def unpack(self, arrays: Sequence[jax.Array]) -> PyTree:
        """Return the carry in some arrays after waiting for them. Its small arrays are copies."""
        return self.part(arrays, self.indices)

    def part(self, arrays: Sequence[jax.Array | None], indices: PyTree) -> PyTree:
        """Return a part of the carry in some arrays after waiting for them.

        Args:
            arrays: The arrays that hold the carry. They may be None if they have no values of the part.
            indices: The part of `indices`.
        """
        leaves, structure = jax.tree.flatten(indices)
        # The program that `keep` has compiled is faster than a copy through host memory.
        if len(leaves) == 1 and leaves[0] in self._cut_out_before:  # its program is already compiled
            return structure.unflatten([self._extract_one(arrays, leaves[0])])
        needed = {self._places[index][0] for index in leaves}
        count = len(self._names)
        on_host = [np.array(x) if at < count and at in needed else x for at, x in enumerate(arrays)]
        # `jnp.asarray` compiles a program for each shape.
        small = iter(jax.device_put([self._leaf(on_host, index) for index in leaves if self.vectors[index]]))
        return structure.unflatten(
            next(small) if self.vectors[at] else _on_device(self._leaf(on_host, at)) for at in leaves
        )

    def extract(self, arrays: Sequence[jax.Array], indices: PyTree) -> PyTree:
        """Return a part of the carry in some arrays without waiting for them.

        A single program takes all small arrays out of their vectors. It is compiled at the first call (30 ms).

        Args:
            arrays: The arrays that hold the carry.
            indices: The part of `indices`.
        """
        leaves, structure = jax.tree.flatten(indices)
        small = [index for index in leaves if self.vectors[index]]
        places = tuple((*self._places[index], self.signature[1][index][0]) for index in small)
        extracted = dict(zip(small, _cut_out_all(arrays[: len(self._names)], places), strict=True))
        return structure.unflatten(
            extracted[at] if self.vectors[at] else _on_device(self._leaf(arrays, at)) for at in leaves
        )

    def keep(self, arrays: Sequence[jax.Array], parts: Sequence[PyTree]) -> list[Callable[[], PyTree]]:
        """Copy parts of the carry in some arrays without waiting for them.

        A part that consists of one array is taken out by its own program. This call costs an eighth of a copy through
        host memory, which would block Python at each step (0.06 instead of 0.45 ms; warm, 6 instead of 35 us). One
        program for each of many arrays would take seconds to compile.

        Args:
            arrays: The arrays that hold the carry.
            parts: These parts of `indices`.

        Returns:
            For each part, a function that returns it and may wait for it.
        """
        split = [jax.tree.flatten(part) for part in parts]
        # The call of the next program donates the vectors, so they are copied before it.
        copied = self.copy(arrays, [indices for indices, _ in split if len(indices) > 1])

        def reader_of(indices: list[int], structure: Any) -> Callable[[], PyTree]:
            part = structure.unflatten(indices)
            if len(indices) > 1:
                # The function is cached, because several handlers may read the same part.
                return functools.cache(functools.partial(self.part, copied, part))
            extracted = [self._extract_one(arrays, index) for index in indices]
            return functools.partial(structure.unflatten, extracted)

        return [reader_of(*of) for of in split]

    def _extract_one(self, arrays: Sequence[Any], index: int) -> jax.Array:
        at, start = self._places[index]
        if not self.vectors[index]:
            return _copied(arrays[at])
        self._cut_out_before.add(index)
        return _cut_out(arrays[at], start, self.signature[1][index][0])

    def copy(self, arrays: Sequence[jax.Array], indices: PyTree, *, small: bool = True) -> list[jax.Array | None]:
        """Copy the arrays that hold a part of the carry without waiting for them.

        Args:
            arrays: The arrays that hold the carry.
            indices: The part of `indices`.
            small: Whether to also copy the vectors.

        Returns:
            The copies, with None for arrays that have no values of the part.
        """
        needed = {self._places[index][0] for index in jax.tree.leaves(indices)}
        count = len(self._names)
        return [
            None if at not in needed else array if at < count and not small else _copied(array)
            for at, array in enumerate(arrays)
        ]

    @functools.cached_property
    def indices(self) -> PyTree:
        """The carry with the index of each array in place of the array."""
        return jax.tree.unflatten(self.signature[0], range(len(self.vectors)))

    def discard(self, part: PyTree, indices: PyTree) -> None:
        """Delete the small arrays that `part` created, as a call deletes the arrays that are donated to it."""
        for leaf, index in zip(jax.tree.leaves(part), jax.tree.leaves(indices), strict=True):
            if self.vectors[index]:
                # Otherwise, code that keeps a borrowed array beyond the call would work for small arrays only.
                leaf.delete()

    def replaced(self, arrays: Sequence[Any], index: int, value: np.ndarray) -> list[Any]:
        """Return the arrays that hold a carry, with another value for one array.

        The new value, or the vector that holds it, stays in host memory until the next call, because `device_put` would
        take 0.1 ms. The first of the arrays is always a JAX array.
        """
        at, start = self._places[index]
        if self.vectors[index]:
            vector = np.array(arrays[at])  # a copy, because JAX arrays are immutable
            vector[start : start + value.size] = value.reshape(-1)
            value = vector
        return [*arrays[:at], value if at else jax.device_put(value), *arrays[at + 1 :]]

    @functools.cached_property
    def _cut_out_before(self) -> set[int]:
        """Indices of the small arrays for which `_cut_out` has been compiled."""
        return set()

    # -- positions --------------------------------------------------------------------------

    @functools.cached_property
    def _names(self) -> list[str]:
        # Sorted, because the order of a set of strings differs between processes.
        return sorted({*self.vectors} - {""})

    @functools.cached_property
    def _places(self) -> list[tuple[int, int]]:
        """For each array of the carry, the index of the array that holds it, and its start in this array."""
        ends = dict.fromkeys(self._names, 0)
        at, places = len(ends), []
        for (shape, _), name in zip(self.signature[1], self.vectors, strict=True):
            if name:
                places.append((self._names.index(name), ends[name]))
                ends[name] += math.prod(shape)
            else:
                places.append((at, 0))
                at += 1
        return places

    def _leaf(self, arrays: Sequence[Any], index: int) -> Any:
        at, start = self._places[index]
        if not self.vectors[index]:
            return arrays[at]
        shape = self.signature[1][index][0]
        return arrays[at][start : start + math.prod(shape)].reshape(shape)

    def _together(self, leaves: Sequence[Any], concatenate: Callable[[list[Any]], Any]) -> list[Any]:
        parts: dict[str, list[Any]] = {name: [] for name in self._names}
        separate = []
        for leaf, name in zip(leaves, self.vectors, strict=True):
            if name:
                parts[name].append(leaf.reshape(-1))
            else:
                separate.append(leaf)
        return [*map(concatenate, parts.values()), *separate]


_copied = jax.jit(jnp.copy)  # a quarter of the cost of `copy_tree`, for arrays that are not committed to a device


@functools.partial(jax.jit, static_argnums=(1, 2))
def _cut_out(vector: jax.Array, start: int, shape: tuple[int, ...]) -> jax.Array:
    return jnp.copy(vector[start : start + math.prod(shape)].reshape(shape))


@functools.partial(jax.jit, static_argnums=1)
def _cut_out_all(vectors: list[jax.Array], places: tuple[tuple[int, int, tuple[int, ...]], ...]) -> list[jax.Array]:
    return [vectors[at][start : start + math.prod(shape)].reshape(shape) for at, start, shape in places]


def _on_device(x: Any) -> Any:
    """Return an array as a JAX array, also if `CarryLayout.replaced` left it in host memory."""
    return jax.device_put(x) if isinstance(x, np.ndarray) else x


def _is_small(leaf: jax.Array) -> bool:
    return not is_key(leaf) and leaf.nbytes <= _SMALL_BYTES and packs(leaf.dtype)
