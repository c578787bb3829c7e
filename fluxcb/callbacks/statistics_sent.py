"""What callbacks share that send statistics: the statistics' names and values, and warnings that are given once."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from fluxcb._errors import DeclarationError, did_you_mean
from fluxcb.logging.loggables import Text

__all__ = ["latest_of", "statistic_names", "warn_once"]


def statistic_names(names: str | Sequence[str], owner: str) -> tuple[str, ...]:
    """Return the names of statistics, given as one name or several.

    Raises:
        DeclarationError: They are no names, none, or one comes twice.
    """
    found = (names,) if isinstance(names, str) else tuple(names) if isinstance(names, Sequence) else ()
    if not found or not all(isinstance(name, str) and name for name in found):
        raise DeclarationError(
            f"`names` of `{owner}` must be names under which values are put, not {names!r}.",
            fix='e.g. `"validation/loss"`, or `["loss", "accuracy"]`',
        )
    if len(set(found)) < len(found):
        twice = next(name for name in found if found.count(name) > 1)
        raise DeclarationError(f"`names` of `{owner}` has {twice!r} twice.", fix="name it once")
    return found


def latest_of(monitors: Any, names: Sequence[str]) -> tuple[dict[str, float | str], str]:
    """Return the latest values by name, numbers and texts; and why one cannot be had, or an empty string."""
    values: dict[str, float | str] = {}
    for name in names:
        if name not in monitors:
            return {}, f"nothing was put under `{name}` yet.{did_you_mean(name, monitors.names())}"
        value = monitors.latest(name)
        if isinstance(value, Text):
            value = value.data
        if not isinstance(value, float | str):  # a view has the `__class__` of what it shows
            return {}, f"`{name}` is of the kind {value.__class__.__name__}, and only numbers and texts can be sent."
        values[name] = value
    return values, ""


def warn_once(said: set[str], owner: object, text: str) -> None:
    """Warn, unless the same has been said before.

    Args:
        said: What has been said, to which this is added.
        owner: The callback.
        text: What is to be said.
    """
    if text not in said:
        said.add(text)
        warnings.warn(f"{owner!r}: {text}", UserWarning, stacklevel=3)
