"""Data sources as streams of batches that never lose a batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from fluxcb._compile.leaves import is_suspect
from fluxcb._errors import FluxcbError
from fluxcb._interruptions import is_interruption
from fluxcb._run.batch_placement import BatchPlacement
from fluxcb._run.batch_specs import check_batch, find_spec
from fluxcb._run.source_contents import contents_of
from fluxcb._run.stream_errors import (
    no_batches,
    none_as_batch,
    not_iterable,
    past_position,
    too_short,
    used_up,
    warn_of_long_pass,
)
from fluxcb._run.stream_marks import LeftOut, Mark, StreamMarks
from fluxcb._typing import Batch, PyTree
from fluxcb.data.sources import FunctionSource, MappedSource, PlacedSource, length_of

__all__ = ["BatchStream"]

_UNOPENED: Iterator[Any] = iter(())
"""The iterator of a pass that has begun, before the source is iterated."""


class BatchStream:
    """The batches of one data source, epoch after epoch.

    NumPy batches are transferred without a copy and read later. The batches of a source that may reuse its buffers are
    therefore copied. Lists, tuples, and sources with `fresh_batches = True` are not copied.

    Args:
        source: An iterable of batches, or a function that returns one.
        name: The name of the source in messages, e.g. `data.training`.
        placement: Places batches on a mesh, or None.

    Attributes:
        cut_short: Whether the last epoch ended before its pass over the data was known to end, and dropped the rest.
        one_shot: Whether the source is an iterator, which yields its batches only once.
        warn_after: Number of batches of a pass after which to warn that it may never end, or None.
        reading_ahead: Whether the source is yielding a batch that is not the first of its pass.
        marks_positions: Whether to record the position of iterators with `get_state` before each window. It takes time,
            so it is on only if a callback saves checkpoints.

    Raises:
        DataError: The source cannot be iterated.
    """

    def __init__(self, source: Any, name: str, placement: BatchPlacement | None = None) -> None:
        source = FunctionSource.of(source, f"`{name}`")
        self.source = source
        self.name = name
        innermost = source
        while isinstance(innermost, MappedSource | PlacedSource):  # these do not make an iterator repeatable
            innermost = innermost.source
        self._innermost = innermost
        self._spec: PyTree | None = None
        self.one_shot = isinstance(innermost, Iterator)
        self._iterator: Iterator[Batch] | None = None
        self._passes = self._pulled = 0
        self._exhausted = self._pass_ended = self.cut_short = False
        self._buffered: deque[Batch] = deque()
        self._peeked: Any = None  # what the source's code read when the first batch was looked at
        self._failure: BaseException | None = None
        self._total_pulled = 0  # over all passes
        self._dropped = 0  # batches of this pass that the devices cannot divide
        self._marks = StreamMarks()
        # The first batches of the last two windows; the handlers of the earlier one may still have to run.
        self._window_starts = (0, 0)
        self._left_out = LeftOut()
        # State of `continue_pass`, which runs after a rewind.
        self._ahead_of_epochs, self._keeps_pass, self._skips_rest = 0, False, False
        self.marks_positions = self.reading_ahead = False
        self.warn_after: int | None = None
        in_memory = isinstance(source, Sequence)
        self._copies = not (in_memory or getattr(source, "fresh_batches", False))
        # A string is iterable, but it is never a data source.
        if not hasattr(source, "__iter__") or isinstance(source, type | str | bytes):
            raise not_iterable(name, source)
        if in_memory and len(source) == 0:
            raise no_batches(name, source)
        self._placement = placement
        # The same, expected for a whole pass.
        self._drops = placement.check_source(source) if placement is not None else 0

    def spec(self) -> PyTree:
        """Return the specs of a batch, from the source's own spec, its first item, or a batch that is buffered."""
        if self._spec is None:
            self._spec = find_spec(self.source, self.name, self.peek, self._placement)
        return self._spec

    def adopt(self, other: BatchStream) -> None:
        """Continue where another stream of the same one-shot iterator stopped, with its buffered batches."""
        # Assigning the same iterator again must not lose the batches that were pulled but not consumed.
        if self.one_shot and self._innermost is other._innermost:
            self._buffered.extend(other._buffered)

    def peek(self) -> Batch:
        """Return the next batch without consuming it."""
        if not self._buffered:
            if self._iterator is None:
                self._begin_pass()
            batch = self._pull()
            if batch is None:
                raise no_batches(self.name, self.source)
            self._buffered.append(batch)
            self._peeked = contents_of(self.source)
        return self._buffered[0]

    def begin_epoch(self, epoch: int, *, continues_stream: bool) -> None:
        """Start an epoch, before EpochBegin. `open` follows after it.

        Args:
            epoch: The number of the epoch, which is passed to `set_epoch` of shuffling sources.
            continues_stream: Whether the epoch continues the previous pass (`steps_per_epoch`).

        Raises:
            DataError: A one-shot iterator is used up.
        """
        number = epoch + self._ahead_of_epochs
        # Looking at the first batch for its shape has begun the pass. It is used, because a source may be expensive to
        # start.
        begun_by_peeking = 0 < len(self._buffered) == self._pulled and self._passes == number
        stays, self._keeps_pass = self._keeps_pass or continues_stream or self.one_shot or begun_by_peeking, False
        if self._iterator is not None and stays and not self._exhausted:
            return
        if self._exhausted and self._buffered:  # a stopped window returned these batches
            return
        # What is left of the previous pass. An iterator would not yield these batches again.
        if not self.one_shot:
            self._buffered.clear()
        self._begin_pass(number, opens=self.one_shot)

    def open(self) -> Iterator[Batch]:
        """Iterate over the source. Called after EpochBegin, whose handlers may change what the source yields."""
        peeked, self._peeked = self._peeked, None
        # The first batch was read for its shape, and the source yields others now.
        if peeked is not None and not self.one_shot and contents_of(self.source) != peeked:
            self._total_pulled -= len(self._buffered)
            self._buffered.clear()
            self._begin_pass(self._passes, opens=False)
        iterator = self._iterator
        if iterator is None or iterator is _UNOPENED:
            source: Any = self.source
            # Data on the device is passed as row numbers, and the window program gathers the rows. A program on a mesh
            # cannot read such arrays, which are on one device.
            resident = getattr(source, "resident", False) is True and hasattr(source, "iter_rows")
            iterator = self._iterator = source.iter_rows() if resident and self._placement is None else iter(source)
        return iterator

    def _begin_pass(self, epoch: int | None = None, *, opens: bool = True) -> Iterator[Batch]:
        if self._exhausted:
            raise used_up(self.name, self.source)
        self._passes = epoch if epoch is not None else self._passes + 1
        self._failure = None  # belongs to an earlier pass
        self._pass_ended, self.cut_short = False, False
        set_epoch = getattr(self.source, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(self._passes)
        self._pulled, self._dropped = len(self._buffered), 0
        self._add_mark(self._total_pulled - len(self._buffered), 0, None)
        self._iterator, self._peeked = _UNOPENED, None
        return self.open() if opens else _UNOPENED

    def leave_out(self, positions: Collection[tuple[int, int]]) -> None:
        """Leave out these batches from now on: pairs of the number of a pass and a position in it, from 0."""
        self._left_out.positions = frozenset(positions)

    def next(self, *, continues_stream: bool) -> Batch | None:
        """Return the next batch that is not left out, or None at the end of the epoch's data.

        Raises:
            DataError: The source has no batches at all, or an iterator has fewer batches than `steps_per_epoch`.
        """
        batch = self._next(continues_stream=continues_stream)
        left_out = self._left_out
        while batch is not None and left_out.positions and self._locate(self.consumed - 1) in left_out.positions:
            left_out.recent[self.consumed - 1] = batch
            batch = self._next(continues_stream=continues_stream)
        return batch

    def _next(self, *, continues_stream: bool) -> Batch | None:
        # After a rewind, the run may resume in an epoch whose data is already used up.
        if self._skips_rest and not continues_stream:
            return None
        if self._buffered:
            return self._buffered.popleft()
        # A failure is raised only after the batches that were pulled before it.
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        try:
            batch = self._pull()
            # An epoch of `steps_per_epoch` steps can need several passes over the data. For an iterator, this raises.
            if batch is None and continues_stream:
                self._begin_pass()
                batch = self._pull()
        except BaseException as error:
            self.reading_ahead = False  # a signal handler can raise between any two lines of `_read`
            if not isinstance(error, FluxcbError):  # those already name the source
                batch_number = f"batch {self._pulled + 1} of pass {self._passes} over the data"
                error.add_note(f"raised by `{self.name}`, when {batch_number} was pulled")
            raise
        return batch

    def _pull(self) -> Batch | None:
        batch = self._read()
        if self._placement is None or batch is None:
            return batch
        placed = self._placement.place(batch)
        while placed is None:  # the devices cannot divide the batch evenly, and it is left out
            self._pulled, self._total_pulled = self._pulled - 1, self._total_pulled - 1
            self._dropped += 1
            batch = self._read()
            if batch is None:
                return None
            placed = self._placement.place(batch)
        return placed

    def _read(self) -> Batch | None:
        iterator = self._iterator or self._begin_pass()
        if iterator is _UNOPENED:
            iterator = self.open()
        try:
            self.reading_ahead = self._pulled > 0
            batch = next(iterator)
        except StopIteration:
            if self._pulled == 0:
                raise no_batches(self.name, self.source) from None
            self._pass_ended = True
            # A second iteration of a used-up iterator would be an empty epoch, so `_begin_pass` refuses it.
            self._exhausted = self.one_shot
            self._drops = max(self._drops, self._dropped)  # some sizes are known only now
            return None
        finally:
            self.reading_ahead = False
        if batch is None:
            raise none_as_batch(self.name)
        # A complete check of every batch would be too slow, so only batches that fail a cheap test are checked.
        if is_suspect(batch):
            check_batch(batch, self.name, self._pulled + 1)
        self._pulled, self._total_pulled = self._pulled + 1, self._total_pulled + 1
        if self._pulled == self.warn_after:
            warn_of_long_pass(self.name, self._pulled)
        return _copy_arrays(batch) if self._copies else batch

    def end_epoch(self, *, continues_stream: bool) -> None:
        """End the epoch, and drop the rest of the pass unless the next epoch continues it."""
        over, self._skips_rest = self._skips_rest, False
        if not (continues_stream or self.one_shot or over):
            self.cut_short = self._iterator is not None and not self._pass_ended
            self._iterator = self._failure = None
            self._buffered.clear()

    def continue_pass(self, epoch: int, *, is_current: bool, over: bool) -> None:
        """Continue the current pass after a rewind has lowered the epoch counter.

        Args:
            epoch: The number of the last epoch, as it is counted after the rewind.
            is_current: Whether the run resumes within that epoch.
            over: Whether the rest of that epoch has no batches, because the current pass belongs to a later epoch.
        """
        if self._iterator is not None and not self.one_shot:
            try:
                # Pulling one batch is the only way to learn whether the pass has ended. It is put back below.
                batch = self.next(continues_stream=False)
            except Exception as error:
                if is_interruption(error):
                    raise
                self.fail_later(error)
            else:
                if batch is None:
                    self._iterator = None
                else:
                    self.push_back([batch])
        self._skips_rest = is_current and (over or self._iterator is None)
        following = self._passes + (self._iterator is None)
        # The data must not repeat, so later epochs use pass numbers that are higher than their epoch numbers.
        self._ahead_of_epochs = following - (epoch if is_current and not self._skips_rest else epoch + 1)
        self._keeps_pass = not is_current or self._skips_rest

    # -- positions --------------------------------------------------------------------------

    def mark(self) -> None:
        """Record the position of the source, if its iterator knows it. Called before a window's batches are pulled."""
        self._window_starts = self._window_starts[1], self.consumed
        self._left_out.forget(before=min(self._window_starts))
        # Sources without positions are read again from the beginning of the pass.
        iterator: Any = self.open() if self._iterator is _UNOPENED else self._iterator
        if not self.marks_positions or not hasattr(iterator, "get_state"):
            return
        self._add_mark(self._total_pulled, self._pulled, iterator.get_state())

    def _add_mark(self, total_pulled: int, pulled: int, state: Any) -> None:
        # A stop can return the batches of the last two windows.
        self._marks.add(Mark(total_pulled, self._passes, pulled, state), min(*self._window_starts, self.consumed))

    @property
    def consumed(self) -> int:
        """The number of batches that steps have used or that were left out, over all passes."""
        return self._total_pulled - len(self._buffered)

    def locate(self, first: int, steps: int) -> tuple[int, int]:
        """Return the position of a batch of one of the last two windows, in the form of `leave_out`.

        Args:
            first: The value of `consumed` before the window was pulled.
            steps: Number of steps of the window before the batch.
        """
        return self._locate(self._left_out.number(first, steps))

    def _locate(self, number: int) -> tuple[int, int]:
        position = self._marks.position(number)
        return position.get("pass", self._passes), position.get("consumed", number)

    def position(self) -> dict[str, Any]:
        """Return the position of the next batch, in the form that `seek` accepts.

        Returns:
            `open`: whether a pass has begun. `pass`: its number. `consumed`: batches of the pass that steps have used.
            `state`, `ahead`: iterator state, and batches to skip after restoring it. `total`: batches consumed in all
            passes. `rewound`: see `continue_pass`. `left_out`: see `leave_out`; missing if no batch is left out.
            `cut_short`: missing if it is False.
        """
        consumed = self.consumed
        position = {"open": self._iterator is not None, "pass": self._passes, "consumed": 0, "total": consumed}
        position |= {"state": None, "ahead": 0, "rewound": [self._ahead_of_epochs, self._keeps_pass, self._skips_rest]}
        if self._left_out.positions:  # otherwise, the format stays that of earlier versions
            position["left_out"] = sorted(map(list, self._left_out.positions))
        if self.cut_short:
            position["cut_short"] = True
        return position | self._marks.position(consumed)

    def seek(self, position: Mapping[str, Any]) -> int:
        """Move to the position of another stream of the same source.

        Args:
            position: A return value of `position`.

        Returns:
            The number of batches that had to be pulled and discarded.

        Raises:
            DataError: The source ends before the position.
        """
        self._skips_rest = False  # otherwise `_next` would yield no batches to skip
        self._window_starts = (0, 0)
        self._left_out = LeftOut((number, at) for number, at in position.get("left_out", ()))
        replayed = self._continue_iterator(position) if self.one_shot else self._restart(position)
        self._ahead_of_epochs, self._keeps_pass, self._skips_rest = position["rewound"]
        self.cut_short = position.get("cut_short", False)
        return replayed

    def make_undo(self) -> Callable[[], None]:
        """Return a function that restores the current position, for a `seek` that fails.

        A one-shot iterator is restored if it has `get_state` and `set_state`. Otherwise, the batches that it has
        yielded since are lost.
        """
        iterator: Any = self._iterator
        before = {**vars(self), "_buffered": deque(self._buffered), "_marks": self._marks.copy()}
        # Other sources are iterated again, so their old iterator can simply be put back.
        state = iterator.get_state() if self.one_shot and hasattr(iterator, "get_state") else None

        def go_back() -> None:
            vars(self).update(before)
            if state is not None:
                iterator.set_state(state)
            elif hasattr(self.source, "set_epoch"):
                self.source.set_epoch(self._passes)

        return go_back

    def _restart(self, position: Mapping[str, Any]) -> int:
        self._buffered.clear()
        self._marks.clear()
        self._iterator, self._exhausted, self._failure = None, False, None
        self._passes, self._total_pulled = position["pass"], position["total"] - position["consumed"]
        if not position["open"]:
            return 0
        iterator = self._begin_pass(position["pass"])
        return self._skip(iterator, position, position["consumed"])

    def _continue_iterator(self, position: Mapping[str, Any]) -> int:
        """Continue a one-shot iterator of which only buffered batches have been pulled."""
        iterator = self._iterator or self._begin_pass(position["pass"])
        if position["state"] is not None:
            # The state determines the next batch, so batches that were pulled before must not precede it.
            self._buffered.clear()
        replayed = self._skip(iterator, position, position["total"] - self._total_pulled + len(self._buffered))
        self._passes = position["pass"]
        return replayed

    def _skip(self, iterator: Any, position: Mapping[str, Any], count: int) -> int:
        length = length_of(self.source)
        if length is not None and count > length:  # an `ArrayLoader` would yield empty batches
            raise too_short(self.name, length, count)
        # The iterator's own state is exact and avoids pulling the skipped batches.
        if position["state"] is not None and hasattr(iterator, "set_state"):
            iterator.set_state(position["state"])
            count = position["ahead"]
            self._total_pulled = position["total"] - count
            self._pulled = position["consumed"] - count
            self._add_mark(self._total_pulled, self._pulled, position["state"])
        if count < 0:
            raise past_position(self.name, self.source, -count)
        for done in range(count):
            if self._next(continues_stream=False) is None:
                raise too_short(self.name, done, count)
        # Skipping is free for data in memory and for a source with its own position, so it is not reported.
        return 0 if isinstance(self.source, Sequence) or position["state"] is not None else count

    @property
    def batches(self) -> int | None:
        """The expected number of batches of this pass that are not dropped or left out; None if it is unknown."""
        length, left_out = length_of(self.source), self._left_out.count(self._passes)
        return None if length is None else length - self._drops - left_out

    @property
    def has_buffered(self) -> bool:
        """Whether pulled batches wait to be consumed."""
        return bool(self._buffered)

    def fail_later(self, error: BaseException) -> None:
        """Raise an error of the source after the batches that were pulled before it."""
        self._failure = error

    def push_back(self, batches: Sequence[Batch]) -> None:
        """Put batches that were pulled but not consumed back at the front."""
        for batch in reversed(batches):
            while (left_out := self._left_out.recent.pop(self.consumed - 1, None)) is not None:
                self._buffered.appendleft(left_out)
            self._buffered.appendleft(batch)


def _copy_arrays(batch: Batch) -> Batch:
    return jax.tree.map(lambda x: x.copy() if isinstance(x, np.ndarray) else x, batch)
