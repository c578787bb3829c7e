"""Numbers that callbacks are given: what is outside its range is refused when the callback is made."""

from __future__ import annotations

import math
from typing import Any

from fluxcb._errors import DeclarationError

__all__ = ["number_above", "number_between", "number_from"]


def number_above(bound: float, value: Any, what: str) -> float:
    """Return a finite number above a bound.

    Args:
        bound: The bound, itself not allowed.
        value: What was given.
        what: The argument's name and owner, for the message.

    Raises:
        DeclarationError: It is something else.
    """
    fits = _is_finite(value) and value > bound
    return _checked(value, fits, what, f"a number above {bound}", f"a finite number above {bound}")


def number_from(least: float, value: Any, what: str) -> float:
    """Return a finite number of at least `least`; see `number_above`."""
    fits = _is_finite(value) and value >= least
    return _checked(value, fits, what, f"a number of at least {least}", f"{least} or a larger, finite number")


def number_between(least: float, below: float, value: Any, what: str) -> float:
    """Return a number of at least `least` and below `below`; see `number_above`."""
    fits = _is_finite(value) and least <= value < below
    return _checked(value, fits, what, f"at least {least} and below {below}", "a number in this range")


def _checked(value: Any, fits: bool, what: str, expected: str, fix: str) -> float:
    if not fits:
        raise DeclarationError(f"{what} must be {expected}, not {value!r}.", fix=f"give {fix}")
    return value


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
