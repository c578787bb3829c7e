"""Whether what JSON files hold is what it must be: who changes a file can change its checksum, too."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath
from typing import Any

__all__ = ["ARRAYS", "HOST", "TREES", "wrong_field", "wrong_in_host"]

HOST, ARRAYS = "host", "host_arrays"
"""Names of the parts of a checkpoint that are no pytrees of the carry."""

TREES = ("params", "model_state", "opt_state", "cbstate", ARRAYS)

_ARRAY = re.compile(r"[\w<>]+\[(\d{1,18}(, \d{1,18})*)?\]", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}")


def wrong_field(content: Any) -> str | None:
    """Return the name of a manifest's field that is missing, unknown, or not what it must be, or None."""
    return _wrong(content, _FIELDS)


def wrong_in_host(content: Any) -> str | None:
    """Return the same of the host's state, as far as it is every run's."""
    # Checkpoints of versions that did not count cancelled steps do not have these counters.
    return _wrong({"cancelled": [0, 0], **content} if isinstance(content, dict) else content, _HOST)


def _wrong(content: Any, expected: Mapping[str, Callable[[Any], bool]]) -> str | None:
    if not isinstance(content, dict):
        return "the whole"
    wrong = [name for name, fits in expected.items() if name not in content or not fits(content[name])]
    wrong += [name for name in content if name not in expected]
    return wrong[0] if wrong else None


def _is(*kinds: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kinds) and not isinstance(value, bool)


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def _counter(value: Any) -> bool:
    return _count(value) and value < 2**31  # as the carry holds it


def _mapping(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, dict) and all(map(fits, value.values()))


def _position(value: Any) -> bool:
    return value is None or (
        isinstance(value, list) and len(value) == 3 and isinstance(value[0], str) and all(map(_counter, value[1:]))
    )


def _cancelled(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_count, value))


def _per_tree(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: _mapping(fits)(value) and set(value) == set(TREES)


def _array(value: Any) -> bool:
    return isinstance(value, str) and _ARRAY.fullmatch(value) is not None


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _record(fields: Mapping[str, Callable[[Any], bool]]) -> Callable[[Any], bool]:
    return lambda value: _wrong(value, fields) is None


def _inside(name: str) -> bool:
    """Tell whether a file's name leads to no place outside the folder that it is in."""
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and str(path) == name


def _sum(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and _count(value[0])
        and isinstance(value[1], str)
        and _DIGEST.fullmatch(value[1]) is not None
    )


_ended = _is(str, type(None))

_FIELDS: Mapping[str, Callable[[Any], bool]] = {
    "run": _is(str),
    "step": _counter,
    "epoch": _counter,
    "at": _position,
    "ended": _ended,
    "value": _is(int, float, type(None)),
    "average": _is(str, type(None)),
    "trees": _per_tree(_mapping(_array)),
    "sequences": _per_tree(_texts),
    "about": _record(
        {
            "callbacks": _mapping(_is(str)),
            "data": _mapping(_record({"batches": _is(int, type(None))})),
            "programs": _mapping(_is(str)),
            "versions": _mapping(_is(str)),
            "devices": _is(list),
        }
    ),
    "files": lambda value: _mapping(_sum)(value) and all(map(_inside, value)),
    "format": _count,
}

_HOST: Mapping[str, Callable[[Any], bool]] = {
    "progress": _record({"step": _counter, "epoch": _counter, "step_in_epoch": _counter}),
    "cancelled": _cancelled,
    "at": _position,
    "fit": _record(
        {
            "epoch": _counter,
            "step": _counter,
            "ended": _ended,
            "rewinds": _counter,
            "rewound_to": lambda value: value is None or _counter(value),
        }
    ),
    "key": _is(dict),
    "cbstate": _is(dict),
    "callbacks": _is(dict),
    "data": _is(dict),
}
