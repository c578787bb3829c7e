"""Checks for the arguments of callbacks.

Each function returns the argument, or raises a DeclarationError that contains the expected and the actual value and a
fix. The parameter `what` names the argument and its owner, and the unit of a number: "`timeout` of `SendStat`
(seconds)". The parameter `example` is a correct example for the fix.
"""

from __future__ import annotations

import inspect
import math
import operator
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from fluxcb._declare.signatures import accepts, runs_later
from fluxcb._errors import DeclarationError, nearest
from fluxcb._paths import fix_of_path, why_impossible

__all__ = [
    "at_most_one",
    "choice",
    "file_path",
    "finite_number",
    "flag",
    "function_of",
    "name_of",
    "nonempty_text",
    "require",
    "result_of",
    "whole_number",
]

Choice = TypeVar("Choice", bound="str | None")


def require(fits: bool, value: Any, what: str, expected: str, example: str, why: str = "") -> None:
    """Raise an error about an argument unless a condition is true.

    Use this function for conditions that no other function in this module checks.

    Args:
        fits: The condition.
        value: The argument.
        what: The name of the argument and its owner.
        expected: What the argument must be, with an article.
        example: Correct code.
        why: The reason, if it is not obvious.

    Raises:
        DeclarationError: `fits` is false.
    """
    if not fits:
        raise DeclarationError(f"{what} must be {expected}, not {value!r}.", why=why, fix=f"write e.g. `{example}`")


def finite_number(
    value: Any, what: str, *, above: float | None = None, least: float | None = None, below: float | None = None
) -> float:
    """Check that an argument is a finite number within bounds, and return it.

    Args:
        value: The argument.
        what: The name of the argument, its owner, and its unit.
        above: Exclusive lower bound.
        least: Inclusive lower bound.
        below: Exclusive upper bound.

    Raises:
        DeclarationError: `value` is not such a number.
    """
    # bool is a subclass of int, but passing True as a number is most likely a mistake.
    fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    fits = fits and (above is None or value > above) and (least is None or value >= least)
    if fits and (below is None or value < below):
        return value
    bounds = {"above": above, "of at least": least, "below": below}
    within = " and ".join(f"{word} {bound}" for word, bound in bounds.items() if bound is not None)
    kind = f"number {within}".rstrip()
    raise DeclarationError(f"{what} must be a {kind}, not {value!r}.", fix=f"give a finite {kind}")


def whole_number(value: Any, what: str, least: int, why: str = "") -> int:
    """Check that an argument is an integer of at least `least`, and return it as an int; see `finite_number`."""
    try:
        # `__index__` accepts NumPy integers, but not floats such as 3.0. That of a tracer raises a TypeError.
        number = None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = None
    if number is None or number < least:
        kind = f"a whole number of at least {least}"
        raise DeclarationError(f"{what} must be {kind}, not {value!r}.", why=why, fix=f"give {kind}")
    return number


def flag(value: Any, what: str) -> bool:
    """Check that an argument is a bool, and return it."""
    # Other values are refused because a misplaced argument, such as a path, would count as true.
    if not isinstance(value, bool):
        raise DeclarationError(f"{what} must be True or False, not {value!r}.", fix="pass True or False")
    return value


def choice(value: Any, options: Sequence[Choice], what: str) -> Choice:
    """Check that an argument is one of several options, and return it.

    Args:
        value: The argument.
        options: The strings, and possibly None. The first one is suggested if no string is similar to `value`.
        what: The name of the argument and its owner.

    Raises:
        DeclarationError: `value` is not one of the options. The most similar string is suggested.
    """
    for option in options:  # not `in`, because comparing an array with a string is not a bool
        if value is option or (isinstance(value, str) and value == option):
            return option
    known = [option for option in options if option is not None]
    near = nearest(value, known) if isinstance(value, str) else ""
    expected = " or ".join("None" if option is None else f'"{option}"' for option in options)
    hint = f" Did you mean `{near}`?" if near else ""
    raise DeclarationError(f"{what} must be {expected}, not {value!r}.{hint}", fix=f'write `"{near or known[0]}"`')


def nonempty_text(value: Any, what: str, expected: str, example: str) -> str:
    """Check that an argument is a string that is not blank, and return it; see `require`."""
    require(isinstance(value, str) and bool(value.strip()), value, what, expected, example)
    return value


def file_path(value: Any, what: str, example: str) -> Path:
    """Check that an argument can be the path of a file, and return it as a `Path`.

    Args:
        value: The argument.
        what: The name of the argument and its owner.
        example: Correct code.

    Raises:
        DeclarationError: `value` is not a path, cannot be the path of a file, or is the path of a folder.
    """
    require(isinstance(value, str | os.PathLike) and bool(os.fspath(value)), value, what, "a path", example)
    path = Path(value)
    if why := why_impossible(path):
        raise DeclarationError(f"{what} cannot be {str(value)!r}: {why}.", fix=fix_of_path(path, "use another path"))
    if path.is_dir():
        raise DeclarationError(f"{what} is a folder: {path}.", fix="name a file in it")
    return path


def run_folder(folder: Any, owner: str) -> Path:
    """Check that an argument can be the path of the directory of a run, and return its absolute path.

    Args:
        folder: The argument.
        owner: The name of the callback.

    Raises:
        DeclarationError: `folder` is not a path, or cannot be the path of a directory.
    """
    if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):
        raise DeclarationError(f"`{owner}` takes a directory, not {folder!r}.", fix=f'write e.g. `{owner}("runs/1")`')
    path = Path(folder).absolute()
    if why := why_impossible(path):
        raise DeclarationError(
            f"`{owner}` cannot write to {str(path)!r}: {why}.",
            fix=fix_of_path(path, f'use another directory, e.g. `{owner}("runs/1")`'),
        )
    return path


def function_of(function: Any, what: str, *parameters: str, example: str = "", other: str = "") -> Any:
    """Check that an argument is a function with the given number of parameters, and return it.

    Generators and coroutine functions are refused, because calling them does not run their body.

    Args:
        function: The argument.
        what: The name of the argument and its owner.
        *parameters: The parameters of the function, in words: "learner", "current value".
        example: Correct code.
        other: Alternative to a function that the caller accepts, such as "a number or ".

    Raises:
        DeclarationError: `function` is something else.
    """
    kind = f"{other}a function of " + (" and ".join(f"the {parameter}" for parameter in parameters) or "no arguments")
    names = ", ".join(parameter.replace(" ", "_") for parameter in parameters)
    if not callable(function) or isinstance(function, type):
        example = example or f"lambda {names}: ..."
        raise DeclarationError(f"{what} must be {kind}, not {function!r}.", fix=f"write e.g. `{example}`")
    called = name_of(function)
    if later := runs_later(function):
        raise DeclarationError(
            f"{what} must run when it is called; `{called}` is {later}.",
            why="calling it would return immediately, without running its body",
            fix=f"write `def {called}({names}):`, without `async` and `yield`",
        )
    if not accepts(function, len(parameters)):
        raise DeclarationError(
            f"{what} must be {kind}; `{called}` takes {inspect.signature(function)}.",
            fix=f"write `def {called}({names}):`" if called.isidentifier() else f"write `lambda {names}: ...`",
        )
    return function


def at_most_one(owner: str, example: str, **arguments: Any) -> None:
    """Check that at most one of several arguments is not None.

    Args:
        owner: The name of the class or function that has the arguments.
        example: Correct code.
        **arguments: The arguments by name.

    Raises:
        DeclarationError: More than one of the arguments is not None.
    """
    names = [name for name, value in arguments.items() if value is not None]
    if len(names) > 1:
        raise DeclarationError(
            f"`{owner}` was given {' and '.join(names)}, but takes only one of them.",
            fix=f"write e.g. `{example}`",
        )


def result_of(function: Any, value: Any) -> Any:
    """Return the value that a handler should return after it has called a function.

    A handler must return None, so a value that a function returns is an error. A lambda, however, always returns the
    value of its expression, which is usually not intended as a result. The value of a lambda is therefore dropped.

    Args:
        function: The function.
        value: The value that the function returned.
    """
    return None if name_of(function) == "<lambda>" else value


def name_of(function: Any) -> str:
    """Return the name of a function or a callable object for messages."""
    return getattr(function, "__name__", type(function).__name__)
