"""Functions that callbacks are given: what cannot be called with a learner is refused when the callback is made."""

from __future__ import annotations

import inspect
from typing import Any

from fluxcb._declare.signatures import accepts, runs_later
from fluxcb._errors import DeclarationError

__all__ = ["function_of_learner", "name_of"]


def function_of_learner(function: Any, what: str) -> str:
    """Return the name of a function that takes one argument, the learner.

    Args:
        function: What was given.
        what: The argument's name and owner, for the message.

    Raises:
        DeclarationError: It is something else.
    """
    if not callable(function) or isinstance(function, type):
        raise DeclarationError(
            f"{what} must be a function of the learner, not {function!r}.",
            fix="write e.g. `lambda learner: ...`",
        )
    if later := runs_later(function):
        raise DeclarationError(
            f"{what} must run when it is called; `{name_of(function)}` is {later}.",
            why="its call would return at once, and nothing would ever run its body",
            fix=f"write `def {name_of(function)}(learner):`, without `async` and `yield`",
        )
    if not accepts(function, 1):
        raise DeclarationError(
            f"{what} must take one argument, the learner; `{name_of(function)}` takes {inspect.signature(function)}.",
            fix="write `def fn(learner):`",
        )
    return name_of(function)


def name_of(function: Any) -> str:
    """Return what messages call a function or an object that is called."""
    return getattr(function, "__name__", type(function).__name__)
