"""Loggables as plain data and arrays, and back: what of a log a checkpoint holds."""

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
    """Return a loggable as plain data and arrays, or None for one of a kind that is not fluxcb's."""
    kind = type(loggable)
    if _KINDS.get(kind.__name__) is not kind:
        return None
    held = {field.name: getattr(loggable, field.name) for field in fields(loggable)}
    return {"kind": kind.__name__, **{name: str(x) if isinstance(x, Path) else x for name, x in held.items()}}


def loggable_of(state: Mapping[str, Any]) -> Loggable | None:
    """Return the loggable of which this is the state, or None for a file that is gone."""
    held = dict(state)
    kind = _KINDS[held.pop("kind")]
    try:
        return kind(**held)
    except DeclarationError:
        if kind is File:
            return None
        raise
