"""The attributes of an object and of the objects in it, to find what has changed."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["attributes", "numbers_in"]

_MOST_ENTRIES = 1000
"""Containers with more entries, such as vocabularies, are compared as a whole."""


def attributes(value: Any) -> tuple[list[Any], list[str]]:
    """Return the attributes of an object and of the objects in it: their values, and the code that reads each.

    Private attributes are left out, because a method that only reads may fill them, such as a cache.
    """
    values: list[Any] = []
    names: list[str] = []
    # Each object is visited once, because objects can refer to each other in cycles.
    seen, found = {id(value)}, [(value, "")]
    for item, name in found:  # grows in the loop
        for child, code in _children(item):
            values.append(child)
            names.append(name + code)
            if id(child) not in seen:
                seen.add(id(child))
                found.append((child, name + code))
    return values, names


def numbers_in(module: Any) -> dict[str, int | float]:
    """Return the numbers in the attributes of a module and its layers, by the code that reads each."""
    # Booleans are modes, which fluxcb sets for each phase.
    return {
        code.removeprefix("."): value
        for value, code in zip(*attributes(module), strict=True)
        if isinstance(value, int | float) and not isinstance(value, bool)
    }


def _children(item: Any) -> Iterator[tuple[Any, str]]:
    """Yield the entries and attributes of an object, each with the code that reads it."""
    if isinstance(item, Mapping | list | tuple) and len(item) > _MOST_ENTRIES:
        return
    if isinstance(item, Mapping):
        yield from ((child, f"[{key!r}]") for key, child in item.items())
    elif isinstance(item, list | tuple):
        yield from ((child, f"[{number}]") for number, child in enumerate(item))
    if isinstance(item, type | types.FunctionType | types.ModuleType):
        return
    for key, child in getattr(item, "__dict__", {}).items():
        # A computed attribute is stored when it is first read.
        computed = isinstance(getattr(type(item), key, None), functools.cached_property)
        if not key.startswith("_") and not computed:
            yield child, f".{key}"
