"""Curves of runs on disk, read from the files that a training has written."""

from __future__ import annotations

import contextlib
import csv
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fluxcb._errors import DataError
from fluxcb.callbacks.system.run_control import ANSWERS, COMMANDS
from fluxcb.plots.panel import LARGEST

__all__ = ["Curves", "read_run"]

Curves = dict[str, list[tuple[float, float]]]
"""Points `(step, value)` by name. If a run only counts epochs, the epoch is used as the step."""

_FILES = ("history.json", "*.jsonl", "*.csv")
_COUNTERS = ("step", "global_step", "epoch")
_NO_VALUES = (*_COUNTERS, "time", "wall_time", "seconds")


def read_run(path: Path) -> Curves:
    """Read the curves of a run.

    Args:
        path: The run's folder, which contains `history.json`, JSON lines or CSV, or the path of such a file.
            `history.json` is a file that `fluxcb demo` writes, or the JSON of `History.to_dict()`. Each line or row has
            a counter (`step` or `epoch`) and values by name. The keys of nested mappings are joined by `/`.
            Values that are NaN or infinite are kept.

    Raises:
        DataError: There is no such file, or it contains nothing that can be drawn.
    """
    if not path.exists():
        raise DataError(f"There is no run at {path}.", fix="name a run's folder, e.g. the one that `fluxcb demo` wrote")
    files = [path] if path.is_file() else [file for pattern in _FILES for file in sorted(path.glob(pattern))]
    files = [file for file in files if file.name not in (COMMANDS, ANSWERS)]  # those of `ControlFile` are no curves
    if not files:
        raise DataError(
            f"The folder {path} contains no run.",
            why=f"a run contains one of the files {', '.join(_FILES)}",
            fix="name the folder in which a `JSONLinesBackend` or `CSVBackend` writes; checkpoints contain no curves",
        )
    curves: Curves = {}
    for file in files:
        for name, points in _read(file).items():
            curves.setdefault(name, points)
    if not curves:
        raise DataError(
            f"{', '.join(str(file) for file in files)} has no values to draw.",
            why="a value is a number in a record with a `step` or an `epoch`",
        )
    return curves


def _read(file: Path) -> Curves:
    try:
        if file.suffix == ".csv":
            with file.open(encoding="utf-8", newline="") as lines:
                return _from_rows(csv.DictReader(lines))
        text = file.read_text(encoding="utf-8")
        if file.suffix != ".json":
            return _from_rows(_parsed(text))
        return _from_history(json.loads(text))
    except (ValueError, RecursionError, csv.Error) as error:
        raise DataError(f"{file} cannot be read: {error}.", fix="name a file of JSON, JSON lines or CSV") from error


def _parsed(text: str) -> Iterator[Any]:
    """Yield the rows of JSON lines, without the last line if a killed run has written only a part of it."""
    *lines, last = text.split("\n")  # JSON texts may contain other line separators, such as U+2028
    for line in lines:
        if line.strip():
            yield json.loads(line)
    with contextlib.suppress(ValueError):
        yield json.loads(last)


def _from_history(content: Any) -> Curves:
    """Read one JSON document: columns with `steps` and rows in `epochs`, a `History`, or a list of rows."""
    if isinstance(content, list):
        return _from_rows(content)
    if not isinstance(content, Mapping):
        return {}
    if "per_epoch" in content:
        try:
            return _from_to_dict(content)
        except (LookupError, TypeError, AttributeError) as error:
            raise ValueError("its `per_epoch` and `per_step` are not those of `History.to_dict`") from error
    steps, rows = content.get("steps", []), content.get("epochs", [])
    curves: Curves = {}
    for name, values in content.items():
        if name not in ("steps", "epochs") and isinstance(values, list) and len(values) == len(steps):
            curves[f"training/{name}"] = _points(zip(steps, values, strict=True))
    per_epoch = len(steps) / len(rows) if steps and rows else 1.0
    for name, points in _from_rows(rows).items():
        curves.setdefault(name, [(epoch * per_epoch, value) for epoch, value in points])
    return {name: points for name, points in curves.items() if points}


def _from_to_dict(content: Mapping[str, Any]) -> Curves:
    """Read the result of `History.to_dict`; all epochs are assumed to have the same number of steps."""
    epochs, steps = _counter(content.get("epoch")), _counter(content.get("step"))
    per_epoch = steps / epochs if steps and epochs else 1.0
    curves: Curves = {}
    for part, counter, between, scale in (
        ("per_epoch", "epochs", "/", per_epoch),
        ("per_step", "steps", "/step/", 1.0),
    ):
        for phase, metrics in content[part].items():
            for name, columns in metrics.items():
                pairs = zip(columns[counter], columns["values"], strict=True)
                curves[f"{phase}{between}{name}"] = [(number * scale, value) for number, value in _points(pairs)]
    return {name: points for name, points in curves.items() if points}


def _from_rows(rows: Iterable[Any]) -> Curves:
    found: dict[str, list[tuple[Any, Any]]] = {}
    for row in rows:
        flat = dict(_flat(row)) if isinstance(row, Mapping) else {}
        counter = next((flat[name] for name in _COUNTERS if _counter(flat.get(name)) is not None), None)
        for name, value in flat.items():
            if name not in _NO_VALUES and counter is not None:
                found.setdefault(name, []).append((counter, value))
    curves = {name: _points(pairs) for name, pairs in found.items()}
    return {name: points for name, points in curves.items() if points}


def _flat(row: Mapping[Any, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}", value


def _points(pairs: Iterable[tuple[Any, Any]]) -> list[tuple[float, float]]:
    numbers = ((_counter(x), _number(y)) for x, y in pairs)
    return [(x, y) for x, y in numbers if x is not None and y is not None]


def _number(value: Any) -> float | None:
    """Return a value as a number, or None if it is none or its magnitude is too large. CSV has text only.

    NaN and infinity are numbers here, because a chart without them would look like that of a healthy run.
    """
    if isinstance(value, bool):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):  # an integer may be too large for a float
        return None
    return number if abs(number) <= LARGEST or not math.isfinite(number) else None


def _counter(value: Any) -> float | None:
    """Return a value as a finite number, or None."""
    number = _number(value)
    return number if number is not None and math.isfinite(number) else None
