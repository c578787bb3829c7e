"""Writing events as JSON in Chrome's Trace Event Format, for chrome://tracing and Perfetto."""

from __future__ import annotations

import gzip
import json
import os
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fluxcb._errors import DeclarationError

__all__ = ["WIDTH", "Kind", "check_writable", "save"]

WIDTH = 6
"""Number of values per event: its kind, begin (s), end (s), and three more."""

_CHUNK = 10_000  # events that are converted at a time, so that a full timeline does not double its memory


@dataclass(frozen=True, eq=False)
class Kind:
    """The properties that all events of one kind share.

    Attributes:
        letter: The field `ph` of the format: `X` for a span, `i` for an instant, and `s`, `t`, `f` for the begin, a
            step, and the end of an arrow.
        track: Number of the track.
        name: The name that the viewer shows.
        category: The category that the viewer filters by.
        facts: The arguments that all events of the kind share.
        numbers: Names of the arguments that differ, at most three. For an arrow, the first is its number.
    """

    letter: str
    track: int
    name: str
    category: str
    facts: Mapping[str, Any]
    numbers: tuple[str, ...]


def save(
    path: Path, kinds: Sequence[Kind], events: array[float], *, origin: float, tracks: Mapping[int, str], dropped: int
) -> None:
    """Write a file atomically: if writing fails, a previous file stays.

    Args:
        path: The file; compressed if it ends in `.gz`.
        kinds: The kinds, by the first number of an event.
        events: The events, `WIDTH` numbers each.
        origin: The time that is 0 in the file (s).
        tracks: Names of the tracks.
        dropped: Number of events that were not kept.

    Raises:
        OSError: The file cannot be written.
    """
    # In the same folder, because `os.replace` is atomic only within a file system.
    temporary = _beside(path)
    try:
        with (
            gzip.open(temporary, "wt", compresslevel=6, encoding="utf-8")
            if path.suffix == ".gz"
            else open(temporary, "w", encoding="utf-8") as file
        ):
            file.writelines(_text(kinds, events, origin, tracks, dropped))
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def check_writable(path: Path) -> None:
    """Check that a file can be written, before the training runs.

    Raises:
        DeclarationError: The file cannot be written.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(None, "it is a folder")
        if "\0" in str(path):  # for which `touch` would raise a ValueError
            raise OSError(None, "no file's name has a null character")
        # Creating a file is the only reliable test, for example on network file systems.
        probe = _beside(path)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise DeclarationError(
            f"The trace cannot be written to `{path}`: {error.strerror}.",
            why="the file is written when the `with` block ends, after all of the training",
            fix='name a file in a folder that exists and may be written to, such as "trace.json" or "trace.json.gz"',
        ) from error


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def _text(
    kinds: Sequence[Kind], events: array[float], origin: float, tracks: Mapping[int, str], dropped: int
) -> Iterator[str]:
    # Written as text, because a million dicts for `json.dump` would take gigabytes.
    yield f'{{"displayTimeUnit":"ms","otherData":{_json({"dropped_events": dropped})},"traceEvents":[\n'
    yield _json({"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "fluxcb"}})
    # Viewers show these names instead of the numbers.
    for track, name in tracks.items():
        for what, value in (("name", name), ("sort_index", track)):
            named = {"name": f"thread_{what}", "ph": "M", "pid": 1, "tid": track, "args": {what: value}}
            yield ",\n" + _json(named)
    # All events of a kind begin with the same text, which is made once per kind.
    heads = [_head(kind) for kind in kinds]
    shared = [[_json(kind.facts)[1:-1]] if kind.facts else [] for kind in kinds]
    for number, began, ended, *numbers in _sorted(kinds, events, origin):
        kind = kinds[number]
        yield f',\n{{{heads[number]},"ts":{_microseconds(began)}'
        if kind.letter in "stf":
            yield f',"id":{numbers[0]}}}'
            continue
        if kind.letter == "X":
            yield f',"dur":{_microseconds(ended - began)}'
        arguments = [f'"{name}":{value}' for name, value in zip(kind.numbers, numbers, strict=False)]
        yield f',"args":{{{",".join(shared[number] + arguments)}}}}}'
    yield "\n]}\n"


def _head(kind: Kind) -> str:
    # `s: t` draws an instant on its own track only. `bp: e` ties the end of an arrow to the span around it.
    scope = {"i": {"s": "t"}, "f": {"bp": "e"}}.get(kind.letter, {})
    fields = {"name": kind.name, "cat": kind.category, "ph": kind.letter, "pid": 1, "tid": kind.track, **scope}
    return _json(fields)[1:-1]


def _sorted(kinds: Sequence[Kind], events: array[float], origin: float) -> Iterator[list[int]]:
    """Yield the events with times in nanoseconds, sorted by time, and an enclosing span before the spans inside it."""
    rows = np.asarray(events).reshape(-1, WIDTH)
    began, ended = (np.rint((rows[:, column] - origin) * 1e9) for column in (1, 2))
    # At the same time, an arrow begins before it continues. Of spans with the same times, the outer one was recorded
    # later, when it ended.
    rank = np.array(["Xistf".index(kind.letter) for kind in kinds], np.int64)[rows[:, 0].astype(np.int64)]
    order = np.lexsort((-np.arange(len(rows)), rank, -ended, began))
    for start in range(0, len(rows), _CHUNK):
        chosen = order[start : start + _CHUNK]
        chunk = rows[chosen].astype(np.int64)
        chunk[:, 1], chunk[:, 2] = began[chosen], ended[chosen]
        yield from chunk.tolist()


def _microseconds(nanoseconds: int) -> str:
    # In integers, because rounding could make a span end after the span around it.
    return f"{nanoseconds // 1000}.{nanoseconds % 1000:03d}"


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
