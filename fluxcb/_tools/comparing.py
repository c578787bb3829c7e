"""Comparison of values, and copies of values for a later comparison."""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections import deque
from collections.abc import Mapping
from typing import Any

__all__ = ["differing", "is_data", "leaves", "same", "short", "snapshot"]


def snapshot(value: Any) -> Any:
    """Return a copy that does not change, or the value itself if it cannot be copied."""
    if isinstance(value, Mapping):
        return {key: snapshot(item) for key, item in value.items()}
    try:
        return copy.deepcopy(value)
    except Exception:  # consoles, locks and similar objects, which are compared by identity
        return value


def leaves(state: Any) -> list[tuple[str, Any]]:
    """Return the arrays of a train state as (name, bits)."""
    import jax
    import numpy as np

    def bits(x: Any) -> Any:
        data = jax.random.key_data(x) if jax.numpy.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        array = np.asarray(data)
        return str(array.dtype), array.shape, array.tobytes()

    return [(jax.tree_util.keystr(path), bits(x)) for path, x in jax.tree_util.tree_flatten_with_path(state)[0]]


def differing(one: list[tuple[str, Any]], other: list[tuple[str, Any]]) -> list[str] | None:
    """Return the names of the leaves in which two train states differ, or None if their structures differ."""
    if [name for name, _ in one] != [name for name, _ in other]:
        return None
    return [name for (name, a), (_, b) in zip(one, other, strict=True) if a != b]


def same(a: Any, b: Any) -> bool:
    """Return whether values are equal in a checkpoint: arrays by bits, containers and plain objects by content."""
    if a is b:
        return True
    if hasattr(a, "dtype") and hasattr(b, "dtype"):
        return leaves(a) == leaves(b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if any(isinstance(a, kind) and isinstance(b, kind) for kind in (list | tuple, deque)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    if type(a) is not type(b):
        return False
    if type(a).__eq__ is object.__eq__ and hasattr(a, "__dict__"):
        return same(vars(a), vars(b))
    return bool(a == b) or (a != a and b != b)  # NaN equals NaN here


def is_data(value: Any) -> bool:
    """Return whether a value is plain data: numbers, texts, arrays, and containers and dataclasses of these."""
    import jax
    import numpy as np

    if value is None or isinstance(value, bool | int | float | complex | str | bytes | enum.Enum):
        return True
    if isinstance(value, np.ndarray | np.generic | jax.Array):
        return True
    if isinstance(value, Mapping):
        return all(is_data(key) and is_data(item) for key, item in value.items())
    if isinstance(value, list | tuple | set | frozenset | deque):
        return all(is_data(item) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return all(is_data(getattr(value, field.name, None)) for field in dataclasses.fields(value))
    return False


def short(value: Any) -> str:
    """Return a short form of a value for messages."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
