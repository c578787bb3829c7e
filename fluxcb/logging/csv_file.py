"""`CSVBackend`: a table with one row per step and one column per name."""

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
from fluxcb.logging.record_file import RecordFile, locations
from fluxcb.logging.rows import COUNTERS, Rows

__all__ = ["CSVBackend"]

# The characters that start a formula in a spreadsheet, and the character that escapes them.
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "'")


class CSVBackend(LoggerBackend):
    """Write values to a table with the columns `step`, `epoch` and `time`, and one column per name.

    A new name adds a column at the end, for which the whole file is rewritten and replaced. Usually all names appear in
    the first epochs, while the file is small. If names keep appearing later, `JSONLinesBackend` is cheaper. Otherwise,
    rows are appended. If a name is logged twice within a step, its values are in separate rows. NaN and infinities are
    written as `nan`, `inf` and `-inf`. Names that begin with `=`, `+`, `-`, `@` or `'` get a leading `'`, because
    spreadsheets would run them as formulas.

    A resumed run restores the rows and columns of its checkpoint, and appends to them. If
    a new run finds a file that has rows, it first renames this file, for example to `log-1.csv`.

    Args:
        path: The file.
        append: Whether a new run may append to a file that has rows.

    Raises:
        DeclarationError: The file cannot be written, or an existing file is not such a table.

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
        self._restored: tuple[int, list[str]] | None = None

    def output_locations(self) -> Iterable[Path | str]:
        """Return the path of the file."""
        return locations(self._file.path, self._file.previous)

    def open(self, *, resumes: bool) -> None:
        """Open the file and read its columns; see `LoggerBackend`."""
        self._file.open(resumes=resumes)
        lines = [] if self._file.starts_anew else _lines(self._file.path)
        self._columns = _cells(lines[0]) if lines else []
        self._count = max(len(lines) - 1, 0)
        if lines and tuple(self._columns[: len(COUNTERS)]) != COUNTERS:
            self._file.close()
            raise DeclarationError(
                f"{self.name}: the columns of {self._file.path} are {', '.join(self._columns[:5])}.",
                why=f"a table of this backend begins with {', '.join(COUNTERS)}",
                fix="use another file",
            )
        restored, self._restored = self._restored, None
        if restored is None or restored == (self._count, self._columns):
            return
        count, columns = restored
        if count > self._count or columns != self._columns[: len(columns)]:
            self._file.warn_of_change()
        elif count == 0:
            self._replace([], [])
        else:
            rows = [_cells(line) for line in lines[1 : count + 1]]
            self._replace(columns, [row[: len(columns)] for row in rows])

    def log(self, name: str, loggable: Loggable, *, step: int, epoch: int, seconds: float) -> None:
        """Add a value to the row of its step."""
        if isinstance(loggable, Value):
            self._rows.add(_title(name), loggable.data, step=step, epoch=epoch, seconds=seconds)

    def flush(self) -> None:
        """Append the rows to the file in one write. If there are new names, rewrite the file."""
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
        self._file.require_in_place()
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
        """Return the number of rows and the columns, or that the first row has not been written."""
        if self._file.starts_anew:
            return {"starts_anew": True}
        return {"rows": self._count, "columns": list(self._columns)} if self._file.is_open else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Store the number of rows and the columns that the next `open` restores."""
        self._file.starts_anew = state.get("starts_anew", False)
        self._restored = (int(state["rows"]), list(state["columns"])) if "rows" in state else None


def _title(name: str) -> str:
    """Return the title of a column, escaped so that a spreadsheet does not run it as a formula."""
    return f"'{name}" if name.startswith(_FORMULA) else name


def _lines(path: Path) -> list[str]:
    # Names have no line breaks and values are numbers, so each line is a row.
    return path.read_text(encoding="utf-8").splitlines()


def _cells(line: str) -> list[str]:
    return next(csv.reader([line]))


def _text(rows: list[list[Any]]) -> bytes:
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(rows)
    return out.getvalue().encode()
