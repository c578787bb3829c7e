"""`CSVBackend`: a table with a row per step and a column per name."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fluxcb._errors import DeclarationError
from fluxcb.logging.backend import LoggerBackend
from fluxcb.logging.loggables import Loggable, Value
from fluxcb.logging.record_file import RecordFile
from fluxcb.logging.rows import COUNTERS, Rows

__all__ = ["CSVBackend"]


class CSVBackend(LoggerBackend):
    """Write a table of the values: columns `step`, `epoch`, `time`, and one per name in the order of appearance.

    A name that is new gives the file another column: the file is written anew beside the old one, which it then
    replaces. Names usually all appear in the first epochs, while the file is small; where they do not,
    `JSONLinesBackend` is cheaper. Otherwise rows are appended. Values that come again within a step get a row of their
    own; NaN and infinities are `nan`, `inf` and `-inf`.

    A run that resumes has the rows and columns that were there when its checkpoint was written, and appends to them. A
    new run does not write to a file that has rows.

    Args:
        path: The file.
        append: Whether a new run may append to a file that has rows.

    Raises:
        DeclarationError: It cannot be written there; or, when it is opened, it is no such table, or one of another run.

    Example:
        >>> from pathlib import Path
        >>> with CSVBackend("log.csv") as backend:
        ...     backend.log("loss", Value(0.5), step=1, epoch=1, seconds=9.0)
        ...     backend.flush()
        ...     backend.log("lr", Value(0.1), step=2, epoch=1, seconds=9.5)
        >>> print(Path("log.csv").read_text().rstrip())
        step,epoch,time,loss,lr
        1,1,9.0,0.5,
        2,1,9.5,,0.1
    """

    loggables = (Value,)

    def __init__(self, path: str | os.PathLike[str], *, append: bool = False) -> None:
        self.name = f"CSVBackend({str(path)!r})"
        self._file = RecordFile(path, owner=self.name, append=append)
        self._rows = Rows()
        self._columns: list[str] = []
        self._count = 0
        self._kept: tuple[int, list[str]] | None = None

    def output_locations(self) -> Iterable[Path | str]:
        """Return the file."""
        return (self._file.path,)

    def open(self, *, resumes: bool) -> None:
        """Open the file, and read what it has; see `LoggerBackend`."""
        self._file.open(resumes=resumes)
        lines = _lines(self._file.path)
        self._columns = _cells(lines[0]) if lines else []
        self._count = max(len(lines) - 1, 0)
        if lines and tuple(self._columns[: len(COUNTERS)]) != COUNTERS:
            self._file.close()
            raise DeclarationError(
                f"{self.name}: the columns of {self._file.path} are {', '.join(self._columns[:5])}.",
                why=f"a table of this backend begins with {', '.join(COUNTERS)}",
                fix="name another file",
            )
        kept, self._kept = self._kept, None
        if kept is None or kept == (self._count, self._columns):
            return
        count, columns = kept
        if count > self._count or columns != self._columns[: len(columns)]:
            self._file.warn_of_change()
        elif count == 0:
            self._replace([], [])
        else:
            rows = [_cells(line) for line in lines[1 : count + 1]]
            self._replace(columns, [row[: len(columns)] for row in rows])

    def log(self, name: str, loggable: Loggable, *, step: int, epoch: int, seconds: float) -> None:
        """Add a value to its step's row."""
        if isinstance(loggable, Value):
            self._rows.add(name, loggable.data, step=step, epoch=epoch, seconds=seconds)

    def flush(self) -> None:
        """Append the rows to the file, in one write; with new names, write the file anew."""
        rows = self._rows.take()
        if not rows:
            return
        columns = list(dict.fromkeys([*(self._columns or COUNTERS), *(name for row in rows for name in row)]))
        if self._columns and columns != self._columns:
            old = [_cells(line) for line in _lines(self._file.path)[1:]]
            self._replace(columns, [[*row, *[""] * (len(columns) - len(row))] for row in old])
        head = [] if self._columns else [columns]
        self._file.write(_text([*head, *([row.get(name, "") for name in columns] for row in rows)]))
        self._columns, self._count = columns, self._count + len(rows)

    def _replace(self, columns: list[str], rows: list[list[str]]) -> None:
        path = self._file.path
        fresh = path.with_name(f".{path.name}.{os.getpid()}.new")
        try:
            fresh.write_bytes(_text([columns, *rows]) if columns else b"")
            os.replace(fresh, path)
        finally:
            fresh.unlink(missing_ok=True)
        self._file.close()
        self._file.open(resumes=True)
        self._columns, self._count = columns, len(rows)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def state_dict(self) -> dict[str, Any]:
        """Return how many rows and which columns the table has."""
        return {"rows": self._count, "columns": list(self._columns)} if self._file.is_open else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Remember what the table is to be cut back to."""
        self._kept = (int(state["rows"]), list(state["columns"])) if state else None


def _lines(path: Path) -> list[str]:
    # Names have no line breaks, and values are numbers, so a line is a row.
    return path.read_text(encoding="utf-8").splitlines()


def _cells(line: str) -> list[str]:
    return next(csv.reader([line]))


def _text(rows: list[list[Any]]) -> bytes:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue().encode()
