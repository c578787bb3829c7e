"""The objects in `cbstate` on the host, and their parts by name.

A hub, such as `Monitors`, is an object with its own checks. It returns its parts from the method `cbstate_part`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fluxcb._compile.carry_paths import names_in
from fluxcb._typing import StatePath

__all__ = ["is_hub", "object_at", "part_names", "shared_part"]


def is_hub(value: Any) -> bool:
    """Return whether an object returns its parts from a method."""
    # The class decides, because a hub may answer any name through `__getattr__`.
    return hasattr(type(value), "cbstate_part")


def shared_part(value: Any, name: str, *, writable: bool) -> Any:
    """Return the part of a shared object that a path names.

    Raises:
        KeyError, AttributeError: There is no such part.
    """
    if isinstance(value, Mapping):
        return value[name]
    return value.cbstate_part(name, writable=writable) if is_hub(value) else getattr(value, name)


def part_names(value: Any) -> list[str]:
    """Return the names of the parts of a shared object."""
    return list(value) if is_hub(value) else list(names_in(value))


def object_at(cbstate: Mapping[str, Any], path: StatePath) -> Any:
    """Return the shared object at a path below `cbstate`, or an empty mapping if there is none."""
    value: Any = cbstate
    try:
        for part in path[1:]:
            value = shared_part(value, part, writable=False)
    except (KeyError, AttributeError):
        return {}
    return value
