"""Feeding: a data source as a stream of batches that never loses one."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from fluxcb._compile.arrays import batch_spec, describe, spec_of
from fluxcb._compile.leaves import check_leaves, is_suspect
from fluxcb._errors import DataError, FluxcbError
from fluxcb._typing import Batch, PyTree
from fluxcb.data.sources import MappedSource, PlacedSource

__all__ = ["Feed", "batch_differences", "expected_steps", "give_back", "pull"]


class Feed:
    """The batches of one data source, epoch after epoch.

    Numpy batches go to the device without a copy and are read later. A source that may reuse its
    buffers is therefore copied; lists, tuples and sources with `fresh_batches = True` are not.

    Args:
        source: Anything that yields batches when iterated.
        name: What messages call it, e.g. `data.training`.

    Attributes:
        marks_positions: Whether to ask iterators that know their position for it before each window.

    Raises:
        DataError: The source cannot be iterated.
    """

    def __init__(self, source: Any, name: str) -> None:
        self.source = source
        self.name = name
        innermost = source
        while isinstance(innermost, MappedSource | PlacedSource):  # these do not make an iterator repeatable
            innermost = innermost.source
        self._innermost = innermost
        self._spec: PyTree | None = None
        self._one_shot = isinstance(innermost, Iterator)
        self._used_up = False
        self._iterator: Iterator[Batch] | None = None
        self._passes = 0
        self._pulled = 0
        self._waiting: deque[Batch] = deque()
        self._failure: BaseException | None = None
        self._taken = 0  # batches ever pulled
        self._marks: deque[_Mark] = deque()
        self._ahead_of_epochs, self._stays, self._over = 0, False, False
        self.marks_positions = False
        in_memory = isinstance(source, Sequence)
        self._copies = not (in_memory or getattr(source, "fresh_batches", False))
        if not hasattr(source, "__iter__") or isinstance(source, type | str | bytes):
            raise DataError(
                f"`{name}` is {type(source).__name__}, which "
                + ("yields no batches." if isinstance(source, str | bytes) else "cannot be iterated."),
                fix="give a list of batches, a Grain dataset, or `fluxcb.data.ArrayLoader((xs, ys), batch_size=32)`",
            )
        if in_memory and len(source) == 0:
            raise _empty(name)

    def spec(self) -> PyTree:
        """Return the shapes of a batch: from the source's own spec, its first item, or a batch that is kept."""
        if self._spec is None:
            self._spec = self._find_spec()
        return self._spec

    def _find_spec(self) -> PyTree:
        spec = getattr(self.source, "element_spec", None)
        if spec is not None:
            self._check(spec)
            return spec
        batch = self.source[0] if isinstance(self.source, Sequence) else self.peek()
        if batch is None:
            raise self._is_none()
        self._check(batch)
        return spec_of(batch)

    def _check(self, batch: Batch) -> None:
        check_leaves(batch, f"A batch of `{self.name}`", "batch", DataError, lists=False)

    def take_over(self, other: Feed) -> None:
        """Go on where another feed of the same one-shot iterator stands, with what it pulled and did not consume."""
        if self._one_shot and self._innermost is other._innermost:
            self._waiting.extend(other._waiting)

    def peek(self) -> Batch:
        """Return the next batch without consuming it."""
        if not self._waiting:
            if self._iterator is None:
                self._begin_pass()
            batch = self._pull()
            if batch is None:
                raise _empty(self.name)
            self._waiting.append(batch)
        return self._waiting[0]

    def begin_epoch(self, epoch: int, *, goes_on: bool) -> None:
        """Start an epoch.

        Args:
            epoch: Its number, which shuffling sources are told.
            goes_on: Whether the stream runs on from epoch to epoch (`steps_per_epoch`).

        Raises:
            DataError: A one-shot iterator is used up.
        """
        number = epoch + self._ahead_of_epochs
        begun_by_peeking = 0 < len(self._waiting) == self._pulled and self._passes == number
        stays, self._stays = self._stays or goes_on or self._one_shot or begun_by_peeking, False
        if self._iterator is not None and stays and not self._used_up:
            return
        if self._used_up and self._waiting:  # handed back by a window that was stopped
            return
        if not self._one_shot:
            self._waiting.clear()
        self._begin_pass(number)

    def _begin_pass(self, epoch: int | None = None) -> Iterator[Batch]:
        if self._used_up:
            raise DataError(
                f"`{self.name}` is a one-shot iterator ({type(self.source).__name__}), and it is used up.",
                why="an epoch iterates its data source again, and an iterator yields nothing the second time",
                fix="give something that can be iterated again: a list, a dataset, a class with `__iter__`",
            )
        self._passes = epoch if epoch is not None else self._passes + 1
        self._failure = None  # that of an earlier pass
        set_epoch = getattr(self.source, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(self._passes)
        self._pulled = len(self._waiting)
        self._add_mark(self._taken - len(self._waiting), 0, None)
        resident = getattr(self.source, "resident", False) is True and hasattr(self.source, "iter_rows")
        iterator = self._iterator = self.source.iter_rows() if resident else iter(self.source)
        return iterator

    def next(self, *, goes_on: bool) -> Batch | None:
        """Return the next batch, or None at the end of the epoch's data.

        Raises:
            DataError: The source has no batches at all.
        """
        if self._over and not goes_on:
            return None
        if self._waiting:
            return self._waiting.popleft()
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure
        try:
            batch = self._pull()
            if batch is None and goes_on and not self._one_shot:
                self._begin_pass()
                batch = self._pull()
        except BaseException as error:
            if not isinstance(error, FluxcbError):
                error.add_note(f"raised by `{self.name}`, when a batch was pulled from it")
            raise
        return batch

    def _pull(self) -> Batch | None:
        iterator = self._iterator or self._begin_pass()
        try:
            batch = next(iterator)
        except StopIteration:
            if self._pulled == 0:
                raise _empty(self.name) from None
            self._used_up = self._one_shot
            return None
        if batch is None:
            raise self._is_none()
        if is_suspect(batch):
            self._check(batch)
        self._pulled += 1
        self._taken += 1
        return _copied(batch) if self._copies else batch

    def _is_none(self) -> DataError:
        return DataError(
            f"`{self.name}` yields None, which is no batch.",
            why="a batch is a pytree of arrays",
            fix="leave out what has no batch; an iterator ends by StopIteration",
        )

    def end_epoch(self, *, goes_on: bool) -> None:
        """Note that the epoch is over; unless the stream goes on, the rest of the pass is dropped."""
        over, self._over = self._over, False
        if not (goes_on or self._one_shot or over):
            self._iterator = self._failure = None
            self._waiting.clear()

    def keep_on(self, epoch: int, *, at_hand: bool, over: bool) -> None:
        """Go on with the pass at hand, or the next one, though epochs are counted from an earlier one again.

        Args:
            epoch: The number of the last epoch, as it is counted now.
            at_hand: Whether that is to be gone on with.
            over: Whether all its batches are left out, as the pass at hand is a later one's.
        """
        if self._iterator is not None and not self._one_shot:
            try:
                batch = self.next(goes_on=False)
            except Exception as error:
                self.fail_later(error)
            else:
                if batch is None:
                    self._iterator = None
                else:
                    self.push_back([batch])
        self._over = at_hand and (over or self._iterator is None)
        following = self._passes + (self._iterator is None)
        self._ahead_of_epochs = following - (epoch if at_hand and not self._over else epoch + 1)
        self._stays = not at_hand or self._over

    # -- positions --------------------------------------------------------------------------

    def mark(self) -> None:
        """Note where the source stands, if its iterator can tell; asked before a window's batches are pulled."""
        iterator: Any = self._iterator
        if not self.marks_positions or not hasattr(iterator, "get_state"):
            return
        self._add_mark(self._taken, self._pulled, iterator.get_state())

    def _add_mark(self, taken: int, pulled: int, state: Any) -> None:
        consumed = self._taken - len(self._waiting)
        while len(self._marks) > 1 and self._marks[1].taken <= consumed:
            self._marks.popleft()
        self._marks.append(_Mark(taken, self._passes, pulled, state))

    def position(self) -> dict[str, Any]:
        """Return which batch comes next, as `go_to` takes it.

        Returns:
            `open`: whether a pass is at hand. `pass`: its number. `consumed`: batches of it that steps have seen.
            `state`, `ahead`: what the source's iterator said of itself, and how many batches behind that the next is.
            `total`: batches that were ever consumed. `rewound`: see `keep_on`.
        """
        consumed = self._taken - len(self._waiting)
        position = {"open": self._iterator is not None, "pass": self._passes, "consumed": 0, "total": consumed}
        position |= {"state": None, "ahead": 0, "rewound": [self._ahead_of_epochs, self._stays, self._over]}
        for mark in self._marks:
            if mark.taken > consumed:
                break
            position |= {"pass": mark.number, "consumed": mark.pulled + consumed - mark.taken}
            if mark.state is not None:
                position |= {"state": mark.state, "ahead": consumed - mark.taken}
            elif mark.pulled == 0:
                position |= {"state": None, "ahead": 0}
        return position

    def go_to(self, position: Mapping[str, Any]) -> int:
        """Go to where another feed of the same source was.

        Args:
            position: What `position` returned there.

        Returns:
            How many batches had to be pulled and thrown away on the way.

        Raises:
            DataError: The source ends before that.
        """
        self._over = False  # on the way
        replayed = self._go_on(position) if self._one_shot else self._begin_again(position)
        self._ahead_of_epochs, self._stays, self._over = position["rewound"]
        return replayed

    def _begin_again(self, position: Mapping[str, Any]) -> int:
        self._waiting.clear()
        self._marks.clear()
        self._iterator, self._used_up, self._failure = None, False, None
        self._passes, self._taken = position["pass"], position["total"] - position["consumed"]
        if not position["open"]:
            return 0
        iterator = self._begin_pass(position["pass"])
        return self._skip(iterator, position, position["consumed"])

    def _go_on(self, position: Mapping[str, Any]) -> int:
        """Go on with a one-shot iterator, of which nothing has been consumed but what was looked at."""
        iterator = self._iterator or self._begin_pass(position["pass"])
        if position["state"] is not None:
            self._waiting.clear()
        replayed = self._skip(iterator, position, position["total"] - self._taken + len(self._waiting))
        self._passes = position["pass"]
        return replayed

    def _skip(self, iterator: Any, position: Mapping[str, Any], count: int) -> int:
        if position["state"] is not None and hasattr(iterator, "set_state"):
            iterator.set_state(position["state"])
            count = position["ahead"]
            self._taken = position["total"] - count
            self._pulled = position["consumed"] - count
            self._add_mark(self._taken, self._pulled, position["state"])
        if count < 0:
            raise DataError(
                f"`{self.name}` is a one-shot iterator ({type(self.source).__name__}), and {-count} batches further "
                "than the checkpoint.",
                why="an iterator cannot go back",
                fix="give something that can be iterated again, or a Grain iterator, which knows its position",
            )
        for done in range(count):
            if self.next(goes_on=False) is None:
                raise DataError(
                    f"`{self.name}` ends after {done} of the {count} batches that the checkpoint has seen of it.",
                    why="the data goes on behind them",
                    fix="give the data that the run began with",
                )
        # What lies in memory, or behind a position that the source knows, costs next to nothing.
        return 0 if isinstance(self.source, Sequence) or position["state"] is not None else count

    @property
    def waiting(self) -> bool:
        """Whether batches were put back."""
        return bool(self._waiting)

    def fail_later(self, error: BaseException) -> None:
        """Raise what the source raised when the batches before it are spent."""
        self._failure = error

    def push_back(self, batches: Sequence[Batch]) -> None:
        """Put batches that were pulled but not consumed back at the head."""
        self._waiting.extendleft(reversed(batches))


@dataclass(frozen=True)
class _Mark:
    """Where a source stood.

    Attributes:
        taken: How many batches had ever been pulled.
        number: Number of the pass.
        pulled: How many of them were of this pass.
        state: What its iterator said of itself, or None.
    """

    taken: int
    number: int
    pulled: int
    state: Any


def _empty(name: str) -> DataError:
    return DataError(
        f"`{name}` yields no batches.",
        why="an epoch without a step has no loss and no metrics",
        fix="check its length and filters; with `drop_last=True`, the batch size may exceed the data",
    )


def _copied(batch: Batch) -> Batch:
    return jax.tree.map(lambda x: x.copy() if isinstance(x, np.ndarray) else x, batch)


def batch_differences(expected: PyTree, batch: Batch) -> tuple[list[str], bool]:
    """Compare a batch with the one the step was compiled for.

    Returns:
        How it differs, one line a leaf, and whether it is the same but for a shorter leading axis.
    """
    want, want_structure = jax.tree_util.tree_flatten_with_path(expected)
    have, have_structure = jax.tree_util.tree_flatten_with_path(batch_spec(batch))
    if want_structure != have_structure:
        return [f"its structure is {have_structure}", f"the step was compiled for {want_structure}"], False
    lines, shorter = [], True
    for (path, a), (_, b) in zip(want, have, strict=True):
        if (a.shape, a.dtype) == (b.shape, b.dtype):
            shorter &= a.ndim == 0
            continue
        lines.append(f"{jax.tree_util.keystr(path) or 'it'}: {describe(a)} became {describe(b)}")
        same_rest = a.dtype == b.dtype and a.ndim == b.ndim > 0 and a.shape[1:] == b.shape[1:]
        shorter &= same_rest and b.shape[0] < a.shape[0]
    return lines, shorter and bool(lines)


def pull(feed: Feed, length: int, goes_on: bool, *, seconds: float) -> list[Batch]:
    """Pull a window's batches: `length` of them, or as many as come in some seconds (s).

    Raises:
        Exception: What the source raised, once the batches before it are spent; until then it is kept.
    """
    batches: list[Batch] = []
    feed.mark()
    until = time.perf_counter() + seconds
    try:
        while len(batches) < length:
            batch = feed.next(goes_on=goes_on)
            if batch is None:
                break
            batches.append(batch)
            if time.perf_counter() > until:
                break
    except Exception as error:
        if not batches:
            raise
        feed.fail_later(error)
    except BaseException:
        feed.push_back(batches)
        raise
    return batches


def give_back(feed: Feed | None, batches: list[Batch]) -> None:
    """Put batches that were not consumed back, unless the step was run by hand."""
    if feed is not None and batches:
        feed.push_back(batches)


def expected_steps(feed: Feed, limit: int | None, goes_on: bool) -> int:
    """Return how many steps an epoch will have, 0 where that is not known."""
    try:
        length = len(feed.source)
    except TypeError:
        length = 0
    if goes_on and limit is not None:
        return limit
    return min(length, limit) if limit is not None and length else length or limit or 0
