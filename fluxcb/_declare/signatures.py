"""What can be told of a user's function without calling it."""

from __future__ import annotations

import inspect
from typing import Any

__all__ = ["accepts", "runs_later"]


def accepts(function: Any, count: int) -> bool:
    """Tell whether something can be called with so many arguments; where nothing says what it takes, it can."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some that are written in C
        return True
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


def runs_later(function: Any) -> str:
    """Return what a function is whose call does not run its body, `a coroutine function`, or an empty string."""
    if inspect.iscoroutinefunction(function):
        return "a coroutine function"
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        return "a generator function"
    return ""
