"""A dispatched window of steps: its batches, and the values that host handlers read from it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fluxcb._compile.arrays import to_host
from fluxcb._compile.carry_paths import below
from fluxcb._compile.fetch import Fetch, join_rows
from fluxcb._compile.program import Program
from fluxcb._compile.windows import WindowPlan
from fluxcb._declare.access import dotted
from fluxcb._run.batch_stream import BatchStream
from fluxcb._run.meter import Meter
from fluxcb._typing import Batch, PyTree, Rows, StatePath

__all__ = ["Window"]


class Window:
    """Consecutive steps that were dispatched together, and an index to the step whose handlers run.

    Args:
        batches: The batches of the steps.
        meter: Counts the transfers to the host.

    Attributes:
        length: Number of steps; smaller than dispatched if a handler stopped the window.
        plan: The bounds and fetched values; set when the window is dispatched, like `program`.
        calls: The outputs of each program call: `Outputs`, or rows alone.
        stacked: Whether the window program ran the window, as opposed to single-step calls.
        live: Whether the StepBegin handlers ran before the step.
        call_seconds: CPU time that calling the single-step program took (s).
        reached: Number of steps whose handlers have run.
        blocks: Whether the handlers of this window must run before the next window is dispatched.
        at: Index of the step whose handlers run.
        computed: Whether handlers can see the computed values (StepEnd), or only the batch (StepBegin).
        stopped: Whether a traced handler stopped the window at its last step.
        kept: Functions that return copies of parts of the carry after the window, by path.
        written: Step values that host handlers wrote at the current step.
        overwritten: Parts of the carry that a handler replaced after the window ran.
        first_step: Number of the first step, as schedules count it.
        stream: The stream of the batches, or None outside an epoch.
        first_batch: Number of batches that were taken from the stream before the window.
        began: Time of the dispatch (s, `time.perf_counter`).
        failed: The exception that dispatching one of the batches raised, and that batch, or None. The batch is
            dispatched again in its turn, which is expected to raise the exception again.
    """

    def __init__(self, batches: list[Batch], meter: Meter) -> None:
        self.batches = batches
        self._meter = meter
        self.length = len(batches)
        self.plan: WindowPlan
        self.program: Program
        self.calls: list[Any] = []
        self.live = False
        self.call_seconds = 0.0
        self.first_step = self.first_batch = 0
        self.stream: BatchStream | None = None
        self.reached = 0
        self.blocks = False
        self.at = 0
        self.computed = False
        self.stopped = False
        self.kept: Mapping[StatePath, Callable[[], PyTree]] = {}
        self.written: dict[str, Any] = {}
        self.overwritten: set[StatePath] = set()
        self.began = 0.0
        self.failed: tuple[BaseException, Batch] | None = None
        self._fetch: Fetch | None = None
        self.stacked = False
        self._rows: np.ndarray | None = None
        self._joined: jax.Array | None = None
        self._buffers: dict[int, Any] = {}
        self._columns: dict[StatePath, Any] = {}

    # -- dispatching ------------------------------------------------------------------------

    def record_program(self, program: Program) -> None:
        """Record the program that is about to be called.

        An exception of a signal handler can arrive after any line, and what the calls return cannot be read without the
        program. It is therefore recorded before the first call.
        """
        self.program, self._fetch, self.stacked = program, program.fetch, program.steps > 1

    def start_transfers(self) -> None:
        """Start moving the outputs of the calls to the host, before they are first read."""
        if self.program.on_host:  # on CPU, the values are already in host memory
            return
        outputs: Any = self.calls
        # Only in one process, because an interruption could prevent one of several processes from joining its rows.
        if self.length > 1 and not self.stacked and jax.process_count() == 1:
            self._joined = join_rows([self._rows_of(call) for call in self.calls])
            outputs = self._joined, [call[1:] for call in self.calls if not self.program.rows_only]
        for array in jax.tree.leaves(outputs):
            array.copy_to_host_async()

    def cut(self, length: int) -> list[Batch]:
        """Drop the steps after the first `length`, and return their batches."""
        rest = self.batches[length:]
        # The batches of the dropped steps return to the stream.
        del self.batches[length:]
        self.length = length
        return rest

    # -- waiting ----------------------------------------------------------------------------

    def ready(self) -> bool:
        """Return whether the window has finished on the device."""
        # All outputs of a call become ready together, so the rows of the last one are enough.
        return self._rows_of(self.calls[-1]).is_ready()

    def wait(self) -> tuple[int, bool]:
        """Wait until the window has finished on the device.

        Returns:
            The number of steps that ran, and whether the last of these stopped the window.

        Raises:
            JaxRuntimeError: The device failed.
        """
        # Each row begins with two flags: whether the step ran, and whether it stopped the window.
        rows = self._rows_of(self.calls[-1])
        rows.block_until_ready()  # unlike np.asarray, this call handles signals while it waits
        all_ran = not self.stacked and self._head(self.length - 1)[0]  # if the last step ran
        ran = self.length if all_ran else int(self.rows[: self.length, 0].sum())
        return ran, bool(ran and self._head(ran - 1)[1])

    def _rows_of(self, call: Any) -> Any:
        return call if self.program.rows_only else call.rows

    def _head(self, i: int) -> Any:
        # Each single-step call has its own row, so only this one is fetched, unless all are moved together.
        together = self.stacked or self._joined is not None
        return self.rows[i] if together else np.asarray(self._rows_of(self.calls[i]))

    @property
    def rows(self) -> np.ndarray:
        """The rows of all steps, int32[steps, words]."""
        # One transfer for all steps of the window.
        if self._rows is None:
            self._rows = self._meter.fetched("step values", self._fetch_rows)
        return self._rows

    def _fetch_rows(self) -> np.ndarray:
        joined = self._rows_of(self.calls[0]) if self.stacked else self._joined
        own = joined is None
        return np.stack([np.asarray(self._rows_of(call)) for call in self.calls]) if own else np.asarray(joined)

    # -- looking ----------------------------------------------------------------------------

    @property
    def batch(self) -> Batch:
        """The batch of the current step; rows of resident arrays are gathered at the first read."""
        batch = self.batches[self.at]
        if isinstance(batch, Rows):
            # The program gathers the rows itself, so handlers that do not read the batch cost nothing.
            rows = jnp.asarray(batch.rows)
            batch = self.batches[self.at] = jax.tree.map(lambda a: a[rows], batch.arrays)
        return batch

    @batch.setter
    def batch(self, batch: Batch) -> None:
        self.batches[self.at] = batch

    @property
    def data_position(self) -> dict[str, Any] | None:
        """The position of the current step's batch in its data source, or None outside an epoch."""
        if self.stream is None:
            return None
        number, at = self.stream.locate(self.first_batch, self.at)
        return {"source": self.stream.name.removeprefix("data."), "pass": number, "batch": at}

    @property
    def stop(self) -> bool:
        """Whether a traced handler stopped the window at the current step."""
        return self.stopped and self.at == self.length - 1

    def has(self, path: StatePath) -> StatePath | None:
        """Return the fetched path that equals or contains a path, or None."""
        # At StepBegin, handlers must not see what the step has computed, even if it has run.
        return self._fetch.covering(path) if self._fetch is not None and self.computed else None

    def value(self, path: StatePath) -> Any:
        """Return a fetched value of the current step, on the host, read-only.

        Raises:
            KeyError: It was not fetched.
        """
        # A column has the values of one path for all steps, so values are fetched and unpacked once per window.
        column = self._columns.get(path) if self.computed else None
        if column is None:
            column = self._columns[path] = self._column(path)
        if type(column) is tuple:
            structure, leaves, rest = column
            at = self.at
            return below(jax.tree.unflatten(structure, [leaf[at] for leaf in leaves]), rest)
        return column[self.at]

    def _column(self, path: StatePath) -> Any:
        fetched, fetch = self.has(path), self._fetch
        if fetched is None or fetch is None:
            raise KeyError(path)
        if fetched in fetch.last:
            # Only the last step's value was fetched, and readers are due only there.
            call = self.calls[0 if self.stacked else self.length - 1]
            last = call.last[list(fetch.last).index(fetched)]
            value = self._meter.fetched(dotted(fetched), lambda: to_host(last))
            leaves, structure = jax.tree.flatten(value)
            return structure, [_LastValue(leaf) for leaf in leaves], path[len(fetched) :]
        structure, leaves = fetch.columns(fetched, self.rows, self._buffer)
        # The common case, a single array, avoids the unflatten at each read.
        if len(leaves) == 1 and jax.tree_util.treedef_is_leaf(structure):
            if len(path) > len(fetched):  # an array has no parts
                raise KeyError(path)
            return leaves[0]
        return structure, leaves, path[len(fetched) :]

    def _buffer(self, number: int) -> Any:
        if number not in self._buffers:
            # A large value stays on the device until a handler reads it.
            self._buffers[number] = self._meter.fetched("large step values", lambda: self._fetch_buffer(number))
        return self._buffers[number]

    def _fetch_buffer(self, number: int) -> Any:
        if self.stacked:
            return _BufferEntries(to_host(self.calls[0].buffers[number]))
        return [to_host(call.buffers[number]) for call in self.calls]

    def unpacked_values(self) -> Mapping[str, PyTree]:
        """Return the values of a single step outside an epoch, on the device."""
        return self.calls[0].values

    def names(self) -> list[str]:
        """Return the names of the step's values that may be read."""
        fetched = [] if self._fetch is None or not self.computed else [*self._fetch.each, *self._fetch.last]
        return ["batch", "stop", *dict.fromkeys([*(p[1] for p in fetched if p[0] == "step"), *self.written])]


class _LastValue:
    """A value of the last step, the same for every index."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __getitem__(self, at: int) -> Any:
        return self._value


class _BufferEntries:
    """The entries of a buffer as separate copies, so that keeping one does not keep the whole buffer alive."""

    def __init__(self, buffer: np.ndarray) -> None:
        self._buffer = buffer

    def __getitem__(self, at: int) -> Any:
        entry = np.array(self._buffer[at])
        entry.flags.writeable = False
        return entry
