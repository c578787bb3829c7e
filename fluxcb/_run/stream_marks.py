"""The recorded positions of a data source, from which the position in a checkpoint is computed; batches left out."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from fluxcb._typing import Batch

__all__ = ["LeftOut", "Mark", "StreamMarks"]


@dataclass(frozen=True)
class Mark:
    """A position of a source.

    Attributes:
        total_pulled: Batches pulled in all passes.
        number: Number of the pass.
        pulled: Batches pulled in this pass.
        state: The state of its iterator, or None.
    """

    total_pulled: int
    number: int
    pulled: int
    state: Any


class StreamMarks:
    """The marks that a checkpoint may still need, oldest first.

    When a checkpoint is saved, the iterator is ahead of the steps, so asking it for its state then would be too late.
    Its states are therefore recorded as marks while batches are pulled.
    """

    def __init__(self, marks: Iterable[Mark] = ()) -> None:
        self._marks = deque(marks)

    def copy(self) -> StreamMarks:
        """Return a copy that later marks do not change."""
        return StreamMarks(self._marks)

    def clear(self) -> None:
        """Drop all marks."""
        self._marks.clear()

    def add(self, mark: Mark, consumed: int) -> None:
        """Add a mark.

        Args:
            mark: The mark.
            consumed: Batches that steps have used in all passes.
        """
        # Marks before the next unconsumed batch are no longer needed.
        while len(self._marks) > 1 and self._marks[1].total_pulled <= consumed:
            self._marks.popleft()
        self._marks.append(mark)

    def position(self, consumed: int) -> dict[str, Any]:
        """Return the entries of `BatchStream.position` that follow from the marks; empty if there is no mark.

        Args:
            consumed: Batches that steps have used in all passes.
        """
        position: dict[str, Any] = {}
        # The last mark at or before the next batch gives the shortest way to it.
        for mark in self._marks:
            if mark.total_pulled > consumed:
                break
            position |= {"pass": mark.number, "consumed": mark.pulled + consumed - mark.total_pulled}
            if mark.state is not None:
                position |= {"state": mark.state, "ahead": consumed - mark.total_pulled}
            elif mark.pulled == 0:  # a new pass began, so the state of the previous one leads nowhere
                position |= {"state": None, "ahead": 0}
        return position


class LeftOut:
    """The batches that a stream leaves out.

    Args:
        positions: See Attributes.

    Attributes:
        positions: Pairs of the number of a pass and the position of a batch in it.
        recent: The batches that were left out since the start of the last two windows, by their number over all passes.
            If the batches around one of them return to the stream, it must return as well. Otherwise, the positions
            would be wrong.
    """

    def __init__(self, positions: Iterable[tuple[int, int]] = ()) -> None:
        self.positions = frozenset(positions)
        self.recent: dict[int, Batch] = {}

    def count(self, number: int) -> int:
        """Return the number of batches of a pass that are left out."""
        return sum(pair[0] == number for pair in self.positions)

    def forget(self, *, before: int) -> None:
        """Forget the batches before a number."""
        for number in [number for number in self.recent if number < before]:
            del self.recent[number]

    def number(self, first: int, steps: int) -> int:
        """Return the number over all passes of the batch after `steps` others, counted from `first`."""
        number = first - 1
        for _ in range(steps + 1):
            number += 1
            while number in self.recent:  # a batch that was left out has a number, but no step
                number += 1
        return number
