"""The carry as programs take it: its small arrays lie together, in one vector per dtype.

Calling a program costs a microsecond for each array that goes in and comes out (jax 0.10.2, CPU), and most arrays of a
carry are small: biases, scales, counts, and the optimizer's averages of each. The step itself sees them as they are: it
takes them from the vectors and puts them back, within its loop, so that all programs have the same body still.
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

_SMALL_BYTES = 4096  # copying a larger array takes longer than handing it over
_WORTHWHILE = 3  # arrays fewer


@dataclass(frozen=True)
class CarryLayout:
    """Which arrays of a carry lie in which vector.

    Attributes:
        signature: Structure, shapes and dtypes of the carry; see `signature_of`.
        vectors: Per array the dtype of its vector, or "" where it lies by itself, behind all vectors.
    """

    signature: tuple[Any, tuple[tuple[tuple[int, ...], Any], ...]]
    vectors: tuple[str, ...]

    @classmethod
    def of(cls, carry: PyTree) -> CarryLayout | None:
        """Return the layout of a carry, or None where it is better left as it is.

        Only on CPU the difference was measured. Arrays that are committed to a device, or to several, stay by
        themselves: in a vector they would have to have one sharding.
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
        """Return the arrays in which a carry of tracers lies."""
        return self._together(jax.tree.leaves(carry), jnp.concatenate)

    def split(self, arrays: Sequence[Any], indices: PyTree | None = None) -> PyTree:
        """Return the carry of tracers that lies in some arrays, or the part of it that has these indices."""
        return jax.tree.map(functools.partial(self._leaf, arrays), self.indices if indices is None else indices)

    # -- on the host ------------------------------------------------------------------------

    def pack(self, carry: PyTree) -> list[jax.Array]:
        """Return the arrays in which a carry lies, through the host's memory: no program is compiled for it.

        Raises:
            TypeError: It is not the carry of this layout, or lies elsewhere.
        """
        if CarryLayout.of(carry) != self:
            raise TypeError("the carry has another structure, other shapes or dtypes, or lies elsewhere")
        leaves = [np.asarray(x) if name else x for x, name in zip(jax.tree.leaves(carry), self.vectors, strict=True)]
        arrays, count = self._together(leaves, np.concatenate), len(self._names)
        return [*jax.device_put(arrays[:count]), *arrays[count:]]

    def unpack(self, arrays: Sequence[jax.Array]) -> PyTree:
        """Return the carry that lies in some arrays, once these are computed; its small arrays are copies."""
        return self.part(arrays, self.indices)

    def part(self, arrays: Sequence[jax.Array | None], indices: PyTree) -> PyTree:
        """Return a part of the carry that lies in some arrays, once these are computed.

        Args:
            arrays: The arrays in which the carry lies; None where nothing of the part does.
            indices: That part of `indices`.
        """
        leaves, structure = jax.tree.flatten(indices)
        if len(leaves) == 1 and leaves[0] in self._cut_out_before:  # the program is there
            return structure.unflatten([self._taken(arrays, leaves[0])])
        wanted = {self._places[index][0] for index in leaves}
        count = len(self._names)
        on_host = [np.array(x) if at < count and at in wanted else x for at, x in enumerate(arrays)]
        # `jnp.asarray` compiles a program for each shape.
        small = iter(jax.device_put([self._leaf(on_host, index) for index in leaves if self.vectors[index]]))
        return structure.unflatten(next(small) if self.vectors[at] else self._leaf(on_host, at) for at in leaves)

    def keep(self, arrays: Sequence[jax.Array], parts: Sequence[PyTree]) -> list[Callable[[], PyTree]]:
        """Copy parts of the carry that lies in some arrays, without waiting for them.

        A part that is one array is taken out by a program of its own. That one call costs an eighth of the way over the
        host's memory, which is Python that nothing else runs at each step (0.06 instead of 0.45 ms; warm, 6 instead of
        35 us), but compiling as many as there are arrays would take seconds.

        Args:
            arrays: The arrays in which the carry lies.
            parts: These parts of `indices`.

        Returns:
            For each part what returns it, and may wait.
        """
        split = [jax.tree.flatten(part) for part in parts]
        copied = self.copy(arrays, [indices for indices, _ in split if len(indices) > 1])

        def kept(indices: list[int], structure: Any) -> Callable[[], PyTree]:
            part = structure.unflatten(indices)
            if len(indices) > 1:
                return functools.cache(functools.partial(self.part, copied, part))
            taken = [self._taken(arrays, index) for index in indices]
            return functools.partial(structure.unflatten, taken)

        return [kept(*of) for of in split]

    def _taken(self, arrays: Sequence[Any], index: int) -> jax.Array:
        at, start = self._places[index]
        if not self.vectors[index]:
            return _copied(arrays[at])
        self._cut_out_before.add(index)
        return _cut_out(arrays[at], start, self.signature[1][index][0])

    def copy(self, arrays: Sequence[jax.Array], indices: PyTree, *, small: bool = True) -> list[jax.Array | None]:
        """Copy the arrays in which a part of the carry lies, without waiting for them.

        Args:
            arrays: The arrays in which the carry lies.
            indices: That part of `indices`.
            small: Whether to copy the vectors, too, which `part` does not hand out.

        Returns:
            Such arrays, with None for those in which nothing of the part lies.
        """
        wanted = {self._places[index][0] for index in jax.tree.leaves(indices)}
        count = len(self._names)
        return [
            None if at not in wanted else array if at < count and not small else _copied(array)
            for at, array in enumerate(arrays)
        ]

    @functools.cached_property
    def indices(self) -> PyTree:
        """The carry with the index of each array in place of the array."""
        return jax.tree.unflatten(self.signature[0], range(len(self.vectors)))

    def discard(self, part: PyTree, indices: PyTree) -> None:
        """Delete the small arrays that `part` made, as a call deletes what is donated to it."""
        for leaf, index in zip(jax.tree.leaves(part), jax.tree.leaves(indices), strict=True):
            if self.vectors[index]:
                leaf.delete()

    def replaced(self, arrays: Sequence[Any], index: int, value: np.ndarray) -> list[Any]:
        """Return the arrays in which a carry lies with another value for one array of it, through the host's memory.

        A vector stays there until the next call takes it along, which `device_put` would need 0.1 ms for; but the first
        of the arrays is a JAX array always.
        """
        at, start = self._places[index]
        if not self.vectors[index]:
            return [*arrays[:at], jax.device_put(value), *arrays[at + 1 :]]
        vector = np.array(arrays[at])
        vector[start : start + value.size] = value.reshape(-1)
        return [*arrays[:at], vector if at else jax.device_put(vector), *arrays[at + 1 :]]

    @functools.cached_property
    def _cut_out_before(self) -> set[int]:
        """Indices of the small arrays for which `_cut_out` has been compiled."""
        return set()

    # -- where they lie ---------------------------------------------------------------------

    @functools.cached_property
    def _names(self) -> list[str]:
        return sorted({*self.vectors} - {""})

    @functools.cached_property
    def _places(self) -> list[tuple[int, int]]:
        """Per array of the carry, the index of the array in which it lies, and where it begins there."""
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
        beside = []
        for leaf, name in zip(leaves, self.vectors, strict=True):
            if name:
                parts[name].append(leaf.reshape(-1))
            else:
                beside.append(leaf)
        return [*map(concatenate, parts.values()), *beside]


_copied = jax.jit(jnp.copy)  # at a quarter of what `copy_tree` costs, for arrays that are not committed anywhere


@functools.partial(jax.jit, static_argnums=(1, 2))
def _cut_out(vector: jax.Array, start: int, shape: tuple[int, ...]) -> jax.Array:
    return jnp.copy(vector[start : start + math.prod(shape)].reshape(shape))


def _is_small(leaf: jax.Array) -> bool:
    return not is_key(leaf) and leaf.nbytes <= _SMALL_BYTES and packs(leaf.dtype)
