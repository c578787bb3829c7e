"""Functions for callbacks that send statistics: their names, their latest values, and warnings without repetition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fluxcb._errors import DeclarationError, did_you_mean
from fluxcb._tracebacks import warn_user
from fluxcb.callbacks.arguments import require
from fluxcb.logging.loggables import Text

__all__ = ["latest_of", "statistic_names", "warn_once"]


def statistic_names(names: str | Sequence[str], owner: str) -> tuple[str, ...]:
    """Return one name or several names of statistics as a tuple.

    Args:
        names: The argument of a callback.
        owner: Name of the callback, for the message.

    Raises:
        DeclarationError: There are no names, an item is not a name, or a name appears twice.
    """
    checked = (names,) if isinstance(names, str) else tuple(names) if isinstance(names, Sequence) else ()
    fits = bool(checked) and all(isinstance(name, str) and name for name in checked)
    require(fits, names, f"`names` of `{owner}`", "the names of logged values", '["validation/loss", "accuracy"]')
    if len(set(checked)) < len(checked):
        duplicate = next(name for name in checked if checked.count(name) > 1)
        raise DeclarationError(f"`names` of `{owner}` contains {duplicate!r} twice.", fix="name it once")
    return checked


def latest_of(monitors: Any, names: Sequence[str]) -> tuple[dict[str, float | str], str]:
    """Return the latest values of statistics.

    Returns:
        The values (numbers and texts), keyed by name, and an empty string. If a value is not available, no values and
        the reason.
    """
    values: dict[str, float | str] = {}
    for name in names:
        if name not in monitors:
            return {}, f"no value has been logged under `{name}`.{did_you_mean(name, monitors.names())}"
        value = monitors.latest(name)
        if isinstance(value, Text):
            value = value.data
        if not isinstance(value, float | str):  # a view has the `__class__` of its target
            return {}, f"`{name}` is a `{value.__class__.__name__}`, and only numbers and texts can be sent."
        values[name] = value
    return values, ""


def warn_once(warned: set[str], owner: object, text: str) -> None:
    """Issue a warning, unless the same text was issued before.

    Args:
        warned: The texts of earlier warnings; the new one is added.
        owner: The callback.
        text: The text of the warning.
    """
    if text not in warned:
        warned.add(text)
        warn_user(f"{owner!r}: {text}", UserWarning)
