"""Conversion of exceptions that a check raised into problems of the callback set."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

from fluxcb._declare.signatures import shown_path
from fluxcb._errors import CheckError, FluxcbError

__all__ = ["problems_of"]

_NOT_THE_USERS = (Path(__file__).parents[1], *(Path(sysconfig.get_path(n)) for n in ("stdlib", "purelib", "platlib")))


def problems_of(error: Exception, doing: str, *, own: bool = False) -> list[FluxcbError]:
    """Return an exception as a list of problems: the problems that it holds, or itself, with the user's line.

    Args:
        error: The exception.
        doing: The action that failed, such as `Training for 2 steps`.
        own: Whether to leave fluxcb's own errors unchanged, because they describe the problem themselves.
    """
    if isinstance(error, ExceptionGroup):
        return [problem for inner in error.exceptions for problem in problems_of(inner, doing, own=own)]
    if isinstance(error, CheckError) and error.problems:
        return [problem for inner in error.problems for problem in problems_of(inner, doing, own=own)]
    if not isinstance(error, FluxcbError):
        what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        problem: FluxcbError = CheckError(f"{doing} raised {what}", where=[*_place(error), *_notes(error)])
    elif own:
        return [error]
    else:
        what = f"{doing} raised {type(error).__name__}: {error.what}"
        problem = CheckError(what, where=error.where, why=error.why, fix=error.fix)
    problem.__cause__ = error
    return [problem]


def _place(error: Exception) -> list[str]:
    """Return the user's innermost line."""
    frames = [
        f"{frame.name}  {shown_path(frame.filename)}:{frame.lineno}"
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen ")
        and not any(Path(frame.filename).is_relative_to(folder) for folder in _NOT_THE_USERS)
    ]
    return frames[-1:]


def _notes(error: Exception) -> list[str]:
    # JAX's note about hidden frames begins with a line of dashes.
    return [note for note in getattr(error, "__notes__", ()) if not note.startswith("---")]
