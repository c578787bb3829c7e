"""Conversion of loggables to plain data and arrays for checkpoints, and back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from fluxcb._errors import DeclarationError
from fluxcb.logging.loggables import Audio, File, Graph, Histogram, Image, Loggable, Text, Value

__all__ = ["loggable_of", "loggable_state"]

_KINDS = {kind.__name__: kind for kind in (Value, Text, Graph, Image, Audio, Histogram, File)}


def loggable_state(loggable: Loggable) -> dict[str, Any] | None:
    """Return a loggable as plain data and arrays, or None if its type is not defined by fluxcb."""
    kind = type(loggable)
    if _KINDS.get(kind.__name__) is not kind:
        return None
    values = {field.name: getattr(loggable, field.name) for field in fields(loggable)}
    return {"kind": kind.__name__, **{name: str(x) if isinstance(x, Path) else x for name, x in values.items()}}


def loggable_of(state: Mapping[str, Any]) -> Loggable | None:
    """Return the loggable with this state, or None for a file that no longer exists."""
    values = dict(state)
    kind = _KINDS[values.pop("kind")]
    try:
        return kind(**values)
    except DeclarationError:
        if kind is File:
            return None
        raise
