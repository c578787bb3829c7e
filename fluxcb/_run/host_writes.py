"""Host writes in several processes: all processes continue with the values that process 0 has written."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils

from fluxcb._compile.arrays import is_key
from fluxcb._declare.access import Access, dotted, writes
from fluxcb._declare.collectives import CollectiveCalls
from fluxcb._errors import FluxcbError
from fluxcb._run.host_backend import HostBackend
from fluxcb._run.train_state import TrainState
from fluxcb._typing import PyTree, StatePath

__all__ = ["HostWrites", "may_write_carry"]

_ROOTS = ("params", "model_state", "opt_state")


def may_write_carry(access: Access, entries: Collection[str]) -> bool:
    """Return whether a handler may write a part of the carry.

    Args:
        access: What the handler has declared.
        entries: The `cbstate` entries that may be in the carry; see `traced_entries`.
    """
    for path, permission in access.items():
        if writes(permission):
            if path[0] in (*_ROOTS, "hyperparams", "*"):
                return True
            # `*` among the entries: a traced handler declares all of `cbstate`, so each entry may be in the carry.
            if path[0] == "cbstate" and entries and (len(path) == 1 or path[1] in entries or "*" in entries):
                return True
    return False


class HostWrites:
    """Sends what one host handler has written from process 0 to the other processes.

    Args:
        backend: Where the handler writes.
        access: What the handler has declared.
        train: The train state.
        where: The handler's location, for messages.
        calls: Makes calls in which all processes take part.
    """

    def __init__(
        self, backend: HostBackend, access: Access, train: TrainState, where: str, calls: CollectiveCalls
    ) -> None:
        self._backend, self._access, self._train = backend, access, train
        self._where, self._calls = where, calls

    def agree(self, *, failed: bool = False) -> None:
        """Replace what any process has written by the value of process 0. All processes have to call it.

        Args:
            failed: Whether the handler has raised an error in this process. Nothing is sent if it did in any process.

        Raises:
            FluxcbError: The processes have written different parts, and process 0 cannot send its values.
        """
        refusal = self._calls.collective(lambda: self._exchange(failed=failed))
        if refusal is not None:
            raise refusal

    def _exchange(self, *, failed: bool) -> FluxcbError | None:
        """Return an error that all processes raise, or None."""
        if not self._train.alive:
            return None
        parts = self._parts()
        if not parts:  # none of the entries that the handler may write is in the carry
            return None
        replaced = self._backend.replaced
        rows = _gather(np.array([failed, *(part in replaced for part in parts)], np.uint8))
        # Later calls of the callback's handlers must not send these writes again.
        replaced.clear()
        # All processes have the same rows, so either all return here or none does.
        if rows[:, 0].any():
            return None
        written = [(part, rows[:, i]) for i, part in enumerate(parts, 1) if rows[:, i].any()]
        if not written:
            return None
        return self._send([part for part, _ in written], [by.astype(bool).tolist() for _, by in written])

    def _parts(self) -> list[StatePath]:
        """Return the parts that the handler may replace, in an order that is the same in all processes."""
        entries, names = sorted(self._train.carried_entries), self._train.hyperparams.names
        return list(
            dict.fromkeys(
                part
                for path, permission in self._access.items()
                if writes(permission)
                for part in _parts_of(path, entries, names)
            )
        )

    def _send(self, parts: Sequence[StatePath], by: Sequence[Sequence[bool]]) -> FluxcbError | None:
        train = self._train
        values = [_value(train, part) for part in parts]
        # Process 0 has only a part of an array that is spread over processes, so every process keeps its own shards.
        spread = np.array([_is_spread(leaf) for value in values for leaf in jax.tree.leaves(value)], bool)
        everywhere = _gather(spread.astype(np.uint8)).astype(bool)
        leaves: list[np.ndarray] = []
        position = 0
        for part, value, writers in zip(parts, values, by, strict=True):
            count = len(jax.tree.leaves(value))
            of_part = everywhere[:, position : position + count]
            position += count
            # Each process can keep its shards only if all have written the part, with the same arrays spread.
            if of_part.any() and not (all(writers) and (of_part == of_part[0]).all()):
                return self._refusal(part, writers)
            leaves += [_data(leaf) for leaf in jax.tree.leaves(value) if not _is_spread(leaf)]
        received = iter(_from_process_0(leaves))
        for part, value in zip(parts, values, strict=True):
            new = jax.tree.map(lambda leaf: leaf if _is_spread(leaf) else _like(leaf, next(received)), value)
            self._backend.replace_part(part, new)
        # `replace_part` has recorded the received values as writes of the handler.
        self._backend.replaced.clear()
        return None

    def _refusal(self, part: StatePath, writers: Sequence[bool]) -> FluxcbError:
        numbers = ", ".join(str(process) for process, wrote in enumerate(writers) if wrote)
        only = "" if all(writers) else " only"
        return FluxcbError(
            f"`{dotted(part)}` was written by process {numbers}{only}, "
            "and its arrays are spread over several processes.",
            where=self._where,
            why="process 0 has only a part of such an array, and cannot send it to the other processes",
            fix="write arrays with the same sharding in all processes, or write them in a traced handler",
        )


def _gather(row: np.ndarray) -> np.ndarray:
    """Return the rows of all processes."""
    return np.asarray(multihost_utils.process_allgather(row))


def _parts_of(path: StatePath, entries: Sequence[str], hyperparams: Sequence[str]) -> Iterator[StatePath]:
    """Iterate over the parts of the carry at a path: roots, and single hyperparameters."""
    first = path[0]
    if first == "*":
        yield from ((root,) for root in _ROOTS)
    elif first in _ROOTS:
        yield (first,)
    if first in ("hyperparams", "*"):
        yield from (("hyperparams", name) for name in (path[1:2] or hyperparams))
    if first in ("cbstate", "*"):
        yield from (("cbstate", name) for name in entries if path[1:2] in ((), (name,)))


def _value(train: TrainState, part: StatePath) -> PyTree:
    if part[0] == "hyperparams":
        return train.hyperparams.get(train.live(("opt_state",)), part[1])
    return train.live(part)


def _is_spread(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated)


def _data(leaf: Any) -> np.ndarray:
    # NumPy has no typed keys.
    return np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)


def _like(leaf: Any, data: np.ndarray) -> Any:
    # All processes place it alike, uncommitted: the programs that they compile next must be the same.
    if is_key(leaf):
        return jax.random.wrap_key_data(jnp.array(data), impl=jax.random.key_impl(leaf))
    return jnp.array(data)


def _from_process_0(arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the arrays of process 0, bit for bit, by one collective."""
    if not arrays:
        return []
    # As bytes: `broadcast_one_to_all` adds the zeros of the other processes (jax 0.10), which turns -0.0 into 0.0. One
    # buffer needs only one collective.
    data = np.frombuffer(b"".join(array.tobytes() for array in arrays), np.uint8)
    received = np.asarray(multihost_utils.broadcast_one_to_all(data)).tobytes()
    found, position = [], 0
    for array in arrays:
        part = received[position : position + array.nbytes]
        found.append(np.frombuffer(part, array.dtype).reshape(array.shape))
        position += array.nbytes
    return found
