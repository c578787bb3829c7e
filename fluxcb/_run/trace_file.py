"""Trace files: events as JSON in Chrome's Trace Event Format, for chrome://tracing and Perfetto."""

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
"""Numbers of an event: its kind, begin (s), end (s), and three more."""

_CHUNK = 10_000


@dataclass(frozen=True, eq=False)
class Kind:
    """What the events of one kind share.

    Attributes:
        letter: The format's `ph`: `X` for a span, `i` for an instant, `s`, `t` and `f` for an arrow.
        track: Number of the track.
        name: What the viewer shows.
        category: What the viewer filters by.
        facts: The arguments that all of them share.
        numbers: Names of the arguments that differ, three at most; of an arrow, the first is its number.
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
    """Write a file whole, or leave what was there.

    Args:
        path: The file; compressed if it ends in `.gz`.
        kinds: What the first number of an event refers to.
        events: The events, `WIDTH` numbers each.
        origin: What is 0 in the file (s).
        tracks: Names of the tracks.
        dropped: How many events are missing.

    Raises:
        OSError: It cannot be written.
    """
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
    """Check that a file can be written, before something is done for it.

    Raises:
        DeclarationError: It cannot.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(None, "it is a folder")
        if "\0" in str(path):
            raise OSError(None, "no file's name has a null character")
        probe = _beside(path)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise DeclarationError(
            f"The trace cannot be written to `{path}`: {error.strerror}.",
            why="it is written when the context is left, and a training for nothing would be a pity",
            fix='name a file in a folder that exists and may be written to, such as "trace.json" or "trace.json.gz"',
        ) from error


def _beside(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def _text(
    kinds: Sequence[Kind], events: array[float], origin: float, tracks: Mapping[int, str], dropped: int
) -> Iterator[str]:
    yield f'{{"displayTimeUnit":"ms","otherData":{_json({"dropped_events": dropped})},"traceEvents":[\n'
    yield _json({"name": "process_name", "ph": "M", "pid": 1, "args": {"name": "fluxcb"}})
    for track, name in tracks.items():
        for what, value in (("name", name), ("sort_index", track)):
            named = {"name": f"thread_{what}", "ph": "M", "pid": 1, "tid": track, "args": {what: value}}
            yield ",\n" + _json(named)
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
    scope = {"i": {"s": "t"}, "f": {"bp": "e"}}.get(kind.letter, {})
    fields = {"name": kind.name, "cat": kind.category, "ph": kind.letter, "pid": 1, "tid": kind.track, **scope}
    return _json(fields)[1:-1]


def _sorted(kinds: Sequence[Kind], events: array[float], origin: float) -> Iterator[list[int]]:
    """Yield the events with times in whole nanoseconds, sorted by time, what encloses before what is enclosed."""
    rows = np.asarray(events).reshape(-1, WIDTH)
    began, ended = (np.rint((rows[:, column] - origin) * 1e9) for column in (1, 2))
    # An arrow begins before it goes on. Spans of the same time: the outer one was recorded later, when it ended.
    rank = np.array(["Xistf".index(kind.letter) for kind in kinds], np.int64)[rows[:, 0].astype(np.int64)]
    order = np.lexsort((-np.arange(len(rows)), rank, -ended, began))
    for start in range(0, len(rows), _CHUNK):
        chosen = order[start : start + _CHUNK]
        chunk = rows[chosen].astype(np.int64)
        chunk[:, 1], chunk[:, 2] = began[chosen], ended[chosen]
        yield from chunk.tolist()


def _microseconds(nanoseconds: int) -> str:
    # By whole numbers, so that no rounding lets a span end after the one around it.
    return f"{nanoseconds // 1000}.{nanoseconds % 1000:03d}"


def _json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))
