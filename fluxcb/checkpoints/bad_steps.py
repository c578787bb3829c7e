"""The file of a run's skipped steps, in the directory of the run."""

from __future__ import annotations

import json
import math
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fluxcb._errors import CheckpointError

__all__ = ["BAD_STEPS", "batch_checksum", "read_bad_steps", "text_of_record", "write_bad_steps"]

BAD_STEPS = "bad_steps.jsonl"
"""The name of the file: one JSON object for each skipped step, in the order in which they were recorded."""

_FIELDS = {
    **dict.fromkeys(("number", "step", "epoch", "step_in_epoch", "checksum"), int),
    "phase": str,
    "key": list,
    "by": dict,
}


def text_of_record(record: Mapping[str, Any]) -> str:
    """Return a record as one line of JSON. NaN and infinity become strings, because JSON has no such numbers."""
    return json.dumps(_jsonable(record), allow_nan=False)


def write_bad_steps(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    """Replace the file by one with these records, completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.new")
    new.write_text("".join(f"{text_of_record(record)}\n" for record in records), encoding="utf-8")
    os.replace(new, path)


def read_bad_steps(path: Path) -> list[dict[str, Any]]:
    """Return the records in the file; none if there is no file.

    Raises:
        CheckpointError: The file has a line that is not a record.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    except FileNotFoundError:
        return []
    except UnicodeDecodeError:
        lines = ["?\n"]
    records = []
    for number, line in enumerate(lines, 1):
        if not line.endswith("\n"):  # the process was killed while it wrote the last line
            continue
        record = _parsed(line)
        if record is None:
            raise CheckpointError(
                f"Line {number} of {path} is not a record of a skipped step.",
                why="the file says which batches a run leaves out, and which steps can be replayed",
                fix="restore the file, or delete the line",
            )
        records.append(record)
    return records


def batch_checksum(leaves: Iterable[Any]) -> int:
    """Return the CRC-32 of the arrays of a batch, with their dtypes and shapes."""
    import numpy as np

    checksum = 0
    for leaf in leaves:
        array = np.ascontiguousarray(leaf)
        for part in (f"{array.dtype}{array.shape}".encode(), array.tobytes()):
            checksum = zlib.crc32(part, checksum)
    return checksum


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
        if not all(type(record[name]) is kind for name, kind in _FIELDS.items()):
            return None
        data, undone = record["data"], record["undone"]
        if undone is not None:
            record["undone"] = {"to": int(undone["to"]), "records": int(undone["records"])}
        if data is not None:
            record["data"] = {"source": str(data["source"]), "pass": int(data["pass"]), "batch": int(data["batch"])}
        by = {writer: dict(_numbers(values)) for writer, values in record["by"].items()}
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return {**record, "by": by}


def _numbers(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in values.items():
        yield name, float(value) if isinstance(value, str) else value


def _jsonable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _jsonable(item) for name, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value
