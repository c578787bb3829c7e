"""The train states of all members in joint arrays, which have the members as their leading axis."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fluxcb._compile.arrays import is_key, signature_of
from fluxcb._run.train_state import TrainState
from fluxcb._typing import PyTree

__all__ = ["JointCarry", "RowLayout", "at_least_two"]


@dataclass(frozen=True, eq=False)
class RowArrays:
    """The carry of one member: a row of the joint arrays, and what has been written since they were computed.

    Attributes:
        joint: The joint arrays, one for each leaf of the carry.
        row: The member's index on their leading axis.
        written: New values of leaves, by index.
    """

    joint: Sequence[jax.Array]
    row: int
    written: Mapping[int, Any] = field(default_factory=dict)

    def __getitem__(self, index: int) -> jax.Array:
        # `TrainState.some_array` reads the devices of an array, waits for it, and asks whether it was donated.
        return self.joint[index]


class RowLayout:
    """The layout of a member's carry: row number `row` of the joint arrays.

    It has the interface of `CarryLayout`, so that the `TrainState` of a member works as it does alone. Whatever it
    returns is a copy. A member's writes are kept in `RowArrays` until the next joint call, so that a new learning rate
    or new counters do not copy the parameters.

    Args:
        carry: The carry of the member.
        row: The row.
        joint: The list that the first call of `JointCarry.lend` fills.

    Attributes:
        signature: Structure, shapes and dtypes of the carry; see `signature_of`.
        indices: The carry with the index of each array in place of the array.
        row: See the argument.
    """

    def __init__(self, carry: PyTree, row: int, joint: list[jax.Array]) -> None:
        self.signature = signature_of(carry)
        self.indices = jax.tree.unflatten(self.signature[0], range(len(self.signature[1])))
        self.row = row
        self._joint = joint
        self._unpacked: tuple[RowArrays, list[Any]] | None = None

    def pack(self, carry: PyTree) -> RowArrays:
        """Return the arrays that hold a carry.

        Raises:
            TypeError: The carry does not match this layout.
        """
        if signature_of(carry) != self.signature:
            raise TypeError("the carry differs from the layout in structure, shapes or dtypes")
        leaves = jax.tree.leaves(carry)
        if self._unpacked is None:
            return RowArrays(self._joint, self.row, dict(enumerate(leaves)))
        arrays, before = self._unpacked
        # A handler that has written one part of the carry leaves the other arrays as they were.
        changed = {i: new for i, (old, new) in enumerate(zip(before, leaves, strict=True)) if new is not old}
        return RowArrays(arrays.joint, self.row, {**arrays.written, **changed})

    def forget(self) -> None:
        """Forget the copies of `unpack`, which belong to arrays that were donated."""
        self._unpacked = None

    def unpack(self, arrays: RowArrays) -> PyTree:
        """Return a copy of the carry after waiting for it."""
        carry = self.part(arrays, self.indices)
        self._unpacked = arrays, jax.tree.leaves(carry)
        return carry

    def part(self, arrays: RowArrays, indices: PyTree) -> PyTree:
        """Return a copy of a part of the carry after waiting for it.

        Args:
            arrays: The arrays that hold the carry.
            indices: The part of `indices`.
        """
        leaves, structure = jax.tree.flatten(indices)
        return structure.unflatten(_copies([_leaf(arrays, index) for index in leaves]))

    def extract(self, arrays: RowArrays, indices: PyTree) -> PyTree:
        """Return a copy of a part of the carry, like `part`."""
        return self.part(arrays, indices)

    def copy(self, arrays: RowArrays, indices: PyTree, *, small: bool = True) -> RowArrays:
        """Return arrays from which `part` returns a copy, as it always does."""
        return arrays

    def keep(self, arrays: RowArrays, parts: Sequence[PyTree]) -> list[Callable[[], PyTree]]:
        """Copy parts of the carry without waiting for them.

        Returns:
            For each part, a function that returns it and may wait for it.
        """
        needed = sorted({index for part in parts for index in jax.tree.leaves(part)})
        rows = dict(zip(needed, _rows([arrays.joint[index] for index in needed], arrays.row), strict=True))
        rows.update({index: value for index, value in arrays.written.items() if index in rows})
        return [functools.partial(jax.tree.map, rows.__getitem__, part) for part in parts]

    def replaced(self, arrays: RowArrays, index: int, value: Any) -> RowArrays:
        """Return the arrays that hold a carry, with another value for one array."""
        return RowArrays(arrays.joint, arrays.row, {**arrays.written, index: value})

    def discard(self, part: PyTree, indices: PyTree) -> None:
        """Delete the copies that `part` created, as a call deletes the arrays that are donated to it."""
        for leaf in jax.tree.leaves(part):
            if isinstance(leaf, jax.Array):
                leaf.delete()


@jax.jit
def _rows(arrays: list[jax.Array], row: Any) -> list[jax.Array]:
    return [jnp.copy(jax.lax.dynamic_index_in_dim(array, row, keepdims=False)) for array in arrays]


def _leaf(arrays: RowArrays, index: int) -> Any:
    """Return a leaf as a view of host memory, or as an array on the device."""
    if index in arrays.written:
        return arrays.written[index]
    array = arrays.joint[index]
    return np.asarray(array)[arrays.row] if _on_host(array) else array[arrays.row]


def _copies(leaves: list[Any]) -> list[jax.Array]:
    # NumPy's copies need no program, and JAX would compile one for each shape.
    return jax.device_put(
        [leaf.copy() if isinstance(leaf, jax.Array) and not _on_host(leaf) else np.array(leaf) for leaf in leaves]
    )


def _on_host(array: Any) -> bool:
    return not is_key(array) and (
        isinstance(array, np.ndarray | np.generic) or next(iter(array.devices())).platform == "cpu"
    )


class JointCarry:
    """The joint arrays of several train states.

    The train states lend their carry to it for every joint call, and take it back. In between, each of them holds a row
    (`RowArrays`), and copies only what a handler reads.

    Args:
        trains: The train states of the members, in order.

    Attributes:
        structure: The structure of the carry.
        arrays: The joint arrays after the last `lend` or `take_back`.
        members: The member of each row. Rows of members that have ended stay until `compact`.
    """

    def __init__(self, trains: Sequence[TrainState]) -> None:
        self._trains = dict(enumerate(trains))
        self._layouts: dict[int, RowLayout] = {}
        self.structure = jax.tree.structure(trains[0].carry)
        self.arrays: list[Any] = []
        self.members: list[int] = []

    @property
    def attached(self) -> list[int]:
        """The members that have not ended."""
        return list(self._trains)

    def row_of(self, member: int) -> int:
        """Return the row of a member."""
        return self._layouts[member].row

    def lend(self) -> list[Any]:
        """Return the joint arrays with everything that the members have written; a program may donate them."""
        if not self.members:
            self.members = at_least_two(self.attached)
            self._layouts = {
                member: RowLayout(train.carry, row, self.arrays)
                for row, (member, train) in enumerate(self._trains.items())
            }
        layouts: dict[int, Any] = self._layouts  # they have the interface of `CarryLayout`
        rows: list[Any] = [train.lend(layouts[member]) for member, train in self._trains.items()]
        for index in range(self.structure.num_leaves):
            written = {of.row: of.written[index] for of in rows if index in of.written}
            if not self.arrays[index:]:  # the first call, for which every member has written all arrays
                self.arrays.append(_stacked(at_least_two(list(written.values()))))
            elif written:
                self.arrays[index] = _with_rows(self.arrays[index], written)
        return self.arrays

    def compact(self) -> list[Any]:
        """Remove the rows of members that have ended from the joint arrays that `lend` returned."""
        rows = [self.row_of(member) for member in self.attached]
        self.members = at_least_two(self.attached)
        for row, member in enumerate(self.attached):
            self._layouts[member].row = row
        # A new list, because the train states refer to the rows of the old one until the next `take_back`.
        self.arrays = [_taken(array, at_least_two(rows)) for array in self.arrays]
        return self.arrays

    def take_back(self, arrays: list[Any]) -> None:
        """Return to each train state its row of the arrays that a program returned."""
        self.arrays = arrays
        for member, train in self._trains.items():
            layout: Any = self._layouts[member]
            train.take_back(RowArrays(arrays, layout.row), layout)
            layout.forget()

    def release(self, member: int) -> None:
        """Give a train state its carry as separate arrays. Its row stays in the joint arrays, and is not read again."""
        train = self._trains.pop(member)
        if train.alive:
            train.carry = train.carry  # reading it copies the row

    def lose(self, error: BaseException) -> None:
        """Mark all train states as lost, because a call failed to which the arrays were donated."""
        for train in self._trains.values():
            train.lose(error)


def at_least_two(rows: list[Any]) -> list[Any]:
    """Return a list of rows, with a copy of the only one if there is one."""
    # XLA removes an axis of length 1, and may then compute other bits. The last member of a population must not depend
    # on how many have ended before.
    return rows * 2 if len(rows) == 1 else rows


def _taken(array: jax.Array, rows: list[int]) -> jax.Array:
    if _on_host(array):
        return jax.device_put(np.asarray(array)[rows])
    return array[np.array(rows)]


def _stacked(rows: list[Any]) -> jax.Array:
    if all(map(_on_host, rows)):
        return jax.device_put(np.stack([np.asarray(row) for row in rows]))
    return jnp.stack(rows)


def _with_rows(array: jax.Array, written: Mapping[int, Any]) -> jax.Array:
    if _on_host(array):
        copy = np.array(array)
        for row, value in written.items():
            copy[row] = np.asarray(value)
        return jax.device_put(copy)
    for row, value in written.items():
        array = array.at[row].set(value)
    return array
