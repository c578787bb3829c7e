"""Checks which of a callback's own fields `load_state_dict(state_dict())` restores."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from fluxcb._declare.callback import Callback, unwrap
from fluxcb._tools.comparing import same, snapshot

__all__ = ["Restored", "changed", "fields", "restored"]


@dataclass
class Restored:
    """The result of saving a callback and restoring another one from its state.

    Attributes:
        error: The exception that `load_state_dict` raised, or None.
        faithful: Whether the `state_dict` of the restored callback equals the state that it was restored from.
        lost: The fields that were not restored, by name.
    """

    error: Exception | None = None
    faithful: bool = True
    lost: list[str] = field(default_factory=list)


def fields(callback: Callback, selects: Callable[[Any], bool] = lambda value: True) -> dict[str, Any]:
    """Return copies of the callback's own fields whose values satisfy `wanted`, without the fields of wrappers."""
    own = vars(unwrap(callback)).items()
    return {name: snapshot(value) for name, value in own if not name.startswith("_fluxcb") and selects(value)}


def changed(callback: Callback, before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Return the fields whose values have changed, with their old values, which may come from the class."""
    first = {name: before.get(name, getattr(type(unwrap(callback)), name, None)) for name in after}
    return {name: first[name] for name, value in after.items() if not same(first[name], value)}


def restored(callback: Callback, other: Callback, names: Iterable[str], after: dict[str, Any]) -> Restored:
    """Save a callback, restore another one from its state, and compare the two.

    Args:
        callback: The trained callback.
        other: A new callback of the same kind.
        names: The fields to compare.
        after: The fields of the trained callback.
    """
    saved = snapshot(callback.state_dict())
    try:
        other.load_state_dict(snapshot(saved))
    except Exception as error:
        return Restored(error, faithful=False)
    now = vars(unwrap(other))
    lost = [name for name in names if not same(now.get(name), after[name])]
    return Restored(None, same(saved, other.state_dict()), lost)
