"""`JSONLinesBackend`: a file with one JSON object per step."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from fluxcb.logging.backend import LoggerBackend
from fluxcb.logging.loggables import Loggable, Text, Value
from fluxcb.logging.record_file import RecordFile, locations
from fluxcb.logging.rows import Rows

__all__ = ["JSONLinesBackend"]


class JSONLinesBackend(LoggerBackend):
    """Write one JSON object per step and line: `{"step": 3, "epoch": 1, "time": 1700000000.0, "loss": 0.5}`.

    The time is that of the first value in the line (Unix time, s). If a name is logged twice within a step, its values
    are in separate lines. JSON has no NaN and no infinities, so these are the strings `"NaN"`, `"Infinity"` and
    `"-Infinity"`, which `float` in Python and `Number` in JavaScript can parse.

    A resumed run removes the lines that were written after its checkpoint, including a last line that is incomplete
    because the process was killed, and then appends. If a new run finds a file that has
    lines, it first renames this file, for example to `log-1.jsonl`.

    Args:
        path: The file.
        append: Whether a new run may append to a file that has lines.

    Raises:
        DeclarationError: The file cannot be written.

    Example:
        >>> from pathlib import Path
        >>> with JSONLinesBackend("log.jsonl") as backend:
        ...     backend.log("loss", Value(0.5), step=3, epoch=1, seconds=1.5e9)
        ...     backend.log("note", Text("warm"), step=3, epoch=1, seconds=1.6e9)
        ...     backend.log("loss", Value(float("nan")), step=4, epoch=1, seconds=1.7e9)
        >>> print(Path("log.jsonl").read_text().rstrip())
        {"step": 3, "epoch": 1, "time": 1500000000.0, "loss": 0.5, "note": "warm"}
        {"step": 4, "epoch": 1, "time": 1700000000.0, "loss": "NaN"}

    Source:
        tensorpack, `JSONWriter`, which rewrites its whole file at each step, and writes NaN without quotes.
    """

    loggables = (Value, Text)

    def __init__(self, path: str | os.PathLike[str], *, append: bool = False) -> None:
        self.name = f"JSONLinesBackend({str(path)!r})"
        self._file = RecordFile(path, owner=self.name, append=append)
        self._rows = Rows()
        self._offset: int | None = None

    def output_locations(self) -> Iterable[Path | str]:
        """Return the path of the file."""
        return locations(self._file.path, self._file.previous)

    def open(self, *, resumes: bool) -> None:
        """Open the file; see `LoggerBackend`."""
        self._file.open(resumes=resumes, position=self._offset)
        self._offset = None

    def log(self, name: str, loggable: Loggable, *, step: int, epoch: int, seconds: float) -> None:
        """Add a value to the line of its step."""
        value = json_number(loggable.data) if isinstance(loggable, Value) else getattr(loggable, "data", None)
        self._rows.add(name, value, step=step, epoch=epoch, seconds=seconds)

    def flush(self) -> None:
        """Append the lines to the file in one write."""
        lines = [json.dumps(row, allow_nan=False) + "\n" for row in self._rows.take()]
        if lines:
            self._file.write("".join(lines).encode())

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def state_dict(self) -> dict[str, Any]:
        """Return the end of the lines (bytes), or that the first line has not been written."""
        if self._file.starts_anew:
            return {"starts_anew": True}
        return {"offset": self._file.position} if self._file.is_open else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Store the end of the lines, at which the next `open` truncates the file."""
        self._file.starts_anew = state.get("starts_anew", False)
        self._offset = int(state["offset"]) if "offset" in state else None


def json_number(value: float) -> float | str:
    """Return a number in a form that JSON supports."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
