"""A window of steps that was dispatched: its batches, and what it brought back, as host handlers see it."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fluxcb._compile.arrays import to_host
from fluxcb._compile.carried import below
from fluxcb._compile.fetch import Fetch
from fluxcb._compile.program import Program
from fluxcb._compile.windows import WindowPlan
from fluxcb._declare.access import dotted
from fluxcb._run.measuring import Meter
from fluxcb._typing import Batch, PyTree, Rows, StatePath

__all__ = ["Window"]


class Window:
    """Some steps in a row, and the one of them that handlers look at.

    Args:
        batches: Their batches.
        meter: Counts how often values are brought to the host.

    Attributes:
        length: How many steps it has; fewer than were dispatched once a handler has stopped it.
        plan: What bounds it and is fetched; known once it was dispatched, as is `program`.
        calls: What each call of a program brings back: `Outputs`, or rows alone.
        stacked: Whether the window program ran it, and not single-step calls.
        live: Whether its StepBegin handlers ran before it.
        calling: CPU time that calling the single-step program took (s).
        reached: How many of its steps handlers have seen.
        blocks: Whether the next window must not begin before this one's handlers have run.
        at: Index of the step at hand.
        computed: Whether handlers may see what the step computed (StepEnd), or only its batch (StepBegin).
        stopped: Whether a traced handler stopped the window at its last step.
        kept: Return copies of parts of the carry as the window left it, by path.
        written: Step values that host handlers put there.
        overwritten: Parts of the carry that a handler has replaced since.
        began: When it was dispatched (s, of `time.perf_counter`).
    """

    def __init__(self, batches: list[Batch], meter: Meter) -> None:
        self.batches = batches
        self._meter = meter
        self.length = len(batches)
        self.plan: WindowPlan
        self.program: Program
        self.calls: list[Any] = []
        self.live = False
        self.calling = 0.0
        self.reached = 0
        self.blocks = False
        self.at = 0
        self.computed = False
        self.stopped = False
        self.kept: Mapping[StatePath, Callable[[], PyTree]] = {}
        self.written: dict[str, Any] = {}
        self.overwritten: set[StatePath] = set()
        self.began = 0.0
        self._fetch: Fetch | None = None
        self.stacked = False
        self._rows_of: Callable[[Any], Any] = _itself
        self._rows: np.ndarray | None = None
        self._buffers: dict[int, Any] = {}
        self._columns: dict[StatePath, Any] = {}

    # -- dispatching ------------------------------------------------------------------------

    def came_from(self, program: Program) -> None:
        """Note which program was called, and start moving what it brings back."""
        self.program, self._fetch, self.stacked = program, program.fetch, program.steps > 1
        self._rows_of = _itself if program.bare else operator.attrgetter("rows")
        if not program.on_host:
            for array in jax.tree.leaves(self.calls):
                array.copy_to_host_async()

    def cut(self, length: int) -> list[Batch]:
        """Drop the steps behind `length`, and return their batches."""
        rest = self.batches[length:]
        del self.batches[length:]
        self.length = length
        return rest

    # -- waiting ----------------------------------------------------------------------------

    def wait(self) -> tuple[int, bool]:
        """Wait for the window's end.

        Returns:
            How many of its steps ran, and whether the last of these stopped it.

        Raises:
            JaxRuntimeError: The device failed.
        """
        rows = self._rows_of(self.calls[-1])
        rows.block_until_ready()  # unlike np.asarray, this lets signals through
        if self.stacked:
            ran = int(self.rows[: self.length, 0].sum())
        elif np.asarray(rows)[0]:
            ran = self.length
        else:
            ran = int(self.rows[:, 0].sum())
        return ran, bool(ran and self._head(ran - 1)[1])

    def _head(self, i: int) -> Any:
        return self.rows[i] if self.stacked else np.asarray(self._rows_of(self.calls[i]))

    @property
    def rows(self) -> np.ndarray:
        """The rows of all its steps, int32[steps, words]."""
        if self._rows is None:
            self._rows = self._meter.fetched("step values", self._fetch_rows)
        return self._rows

    def _fetch_rows(self) -> np.ndarray:
        if self.stacked:
            return np.asarray(self._rows_of(self.calls[0]))
        return np.stack([np.asarray(self._rows_of(call)) for call in self.calls])

    # -- looking ----------------------------------------------------------------------------

    @property
    def batch(self) -> Batch:
        """The batch of the step at hand; rows of resident arrays are gathered when somebody looks."""
        batch = self.batches[self.at]
        if isinstance(batch, Rows):
            rows = jnp.asarray(batch.rows)
            batch = self.batches[self.at] = jax.tree.map(lambda a: a[rows], batch.arrays)
        return batch

    @batch.setter
    def batch(self, batch: Batch) -> None:
        self.batches[self.at] = batch

    @property
    def stop(self) -> bool:
        """Whether a traced handler stopped the window at the step at hand."""
        return self.stopped and self.at == self.length - 1

    def has(self, path: StatePath) -> StatePath | None:
        """Return the fetched path that a path is or lies in, or None."""
        return self._fetch.covering(path) if self._fetch is not None and self.computed else None

    def value(self, path: StatePath) -> Any:
        """Return a fetched value of the step at hand, on the host, read-only.

        Raises:
            KeyError: It was not fetched.
        """
        column = self._columns.get(path) if self.computed else None
        if column is None:
            column = self._columns[path] = self._column(path)
        if type(column) is tuple:
            structure, leaves, rest = column
            at = self.at
            return below(jax.tree.unflatten(structure, [leaf[at] for leaf in leaves]), rest)
        return column[self.at]

    def _column(self, path: StatePath) -> Any:
        held, fetch = self.has(path), self._fetch
        if held is None or fetch is None:
            raise KeyError(path)
        if held in fetch.last:
            # Only the last step's value was fetched, and readers are due only there.
            call = self.calls[0 if self.stacked else self.length - 1]
            last = call.last[list(fetch.last).index(held)]
            value = self._meter.fetched(dotted(held), lambda: to_host(last))
            leaves, structure = jax.tree.flatten(value)
            return structure, [_Last(leaf) for leaf in leaves], path[len(held) :]
        structure, leaves = fetch.columns(held, self.rows, self._buffer)
        if len(leaves) == 1 and jax.tree_util.treedef_is_leaf(structure):
            if len(path) > len(held):  # an array has no parts
                raise KeyError(path)
            return leaves[0]
        return structure, leaves, path[len(held) :]

    def _buffer(self, number: int) -> Any:
        if number not in self._buffers:
            self._buffers[number] = self._meter.fetched("large step values", lambda: self._fetch_buffer(number))
        return self._buffers[number]

    def _fetch_buffer(self, number: int) -> Any:
        if self.stacked:
            return _Entries(to_host(self.calls[0].buffers[number]))
        return [to_host(call.buffers[number]) for call in self.calls]

    def by_hand(self) -> Mapping[str, PyTree]:
        """Return the step values of a step that was run by hand, on the device."""
        return self.calls[0].values

    def names(self) -> list[str]:
        """Return the names of the step's values that may be read."""
        fetched = [] if self._fetch is None or not self.computed else [*self._fetch.each, *self._fetch.last]
        return ["batch", "stop", *dict.fromkeys([*(p[1] for p in fetched if p[0] == "step"), *self.written])]


def _itself(rows: Any) -> Any:
    return rows


class _Last:
    """A value of the last step, whatever the index."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __getitem__(self, at: int) -> Any:
        return self._value


class _Entries:
    """The entries of a buffer, each by itself: who keeps one does not keep the whole window."""

    def __init__(self, buffer: np.ndarray) -> None:
        self._buffer = buffer

    def __getitem__(self, at: int) -> Any:
        entry = np.array(self._buffer[at])
        entry.flags.writeable = False
        return entry
