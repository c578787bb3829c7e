"""Restoring: what of a callback's own fields survives `load_state_dict(state_dict())`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from fluxcb._declare.callback import Callback, unwrap
from fluxcb._tools.comparing import same, snapshot

__all__ = ["Restored", "changed", "fields", "restored"]


@dataclass
class Restored:
    """What came of saving a callback and restoring another from it.

    Attributes:
        error: What `load_state_dict` raised, or None.
        faithful: Whether the other's `state_dict` gives again what it was given.
        lost: The fields that the other has not got, by name.
    """

    error: Exception | None = None
    faithful: bool = True
    lost: list[str] = field(default_factory=list)


def fields(callback: Callback, wanted: Callable[[Any], bool] = lambda value: True) -> dict[str, Any]:
    """Return copies of those of a callback's own fields whose values are wanted, wrappers taken off."""
    held = vars(unwrap(callback)).items()
    return {name: snapshot(value) for name, value in held if not name.startswith("_fluxcb") and wanted(value)}


def changed(callback: Callback, before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return the fields whose values have changed, each with the value it had; one that the class gave counts."""
    first = {name: before.get(name, getattr(type(unwrap(callback)), name, None)) for name in after}
    return {name: first[name] for name, value in after.items() if not same(first[name], value)}


def restored(callback: Callback, other: Callback, names: Iterable[str], after: dict[str, Any]) -> Restored:
    """Save a callback, restore another one from that, and compare.

    Args:
        callback: The callback, trained.
        other: A new one of its kind.
        names: The fields to look at.
        after: The fields of the trained one.
    """
    saved = snapshot(callback.state_dict())
    try:
        other.load_state_dict(snapshot(saved))
    except Exception as error:
        return Restored(error, faithful=False)
    now = vars(unwrap(other))
    lost = [name for name in names if not same(now.get(name), after[name])]
    return Restored(None, same(saved, other.state_dict()), lost)
