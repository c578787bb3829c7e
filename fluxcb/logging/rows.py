"""Logged values as table rows, one row per step."""

from __future__ import annotations

from typing import Any

__all__ = ["COUNTERS", "Rows"]

COUNTERS = ("step", "epoch", "time")
"""The columns of a row besides values. These names cannot be used for values."""


class Rows:
    """Collect values as rows, one per step and epoch. A repeated name in the same step starts another row.

    Example:
        >>> rows = Rows()
        >>> for step, name, value in [(1, "a", 0.5), (1, "b", 2.0), (1, "a", 0.6), (2, "a", 0.7)]:
        ...     rows.add(name, value, step=step, epoch=1, seconds=9.0)
        >>> for row in rows.take():
        ...     print(row)
        {'step': 1, 'epoch': 1, 'time': 9.0, 'a': 0.5, 'b': 2.0}
        {'step': 1, 'epoch': 1, 'time': 9.0, 'a': 0.6}
        {'step': 2, 'epoch': 1, 'time': 9.0, 'a': 0.7}
    """

    def __init__(self) -> None:
        self._rows: list[dict[str, Any]] = []

    def add(self, name: str, value: Any, *, step: int, epoch: int, seconds: float) -> None:
        """Add a value to the last row, or to a new one."""
        row = self._rows[-1] if self._rows else None
        if row is None or row["step"] != step or row["epoch"] != epoch or name in row:
            row = {"step": step, "epoch": epoch, "time": seconds}
            self._rows.append(row)
        row[name] = value

    def take(self) -> list[dict[str, Any]]:
        """Return the rows and remove them from this object."""
        rows, self._rows = self._rows, []
        return rows
