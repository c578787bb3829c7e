"""Removing fluxcb's own frames from the tracebacks of exceptions, so that they show the user's code.

The environment variable `FLUXCB_TRACEBACK=full` keeps all frames.
"""

from __future__ import annotations

import contextlib
import dis
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from contextvars import ContextVar
from types import FrameType, TracebackType

from fluxcb._errors import FluxcbError

__all__ = ["VARIABLE", "calling_line", "innermost_user_frame", "remove_own_frames", "warn_user"]

VARIABLE = "FLUXCB_TRACEBACK"
_RAISE = dis.opmap["RAISE_VARARGS"]
NOTE = f"fluxcb removed its own frames from this traceback. Set {VARIABLE}=full to include them."


def remove_own_frames(error: BaseException) -> None:
    """Remove fluxcb's frames from an exception, its cause and context, and the members of an exception group."""
    _remove_frames(error, set())


_CALLER: ContextVar[tuple[FrameType, int] | None] = ContextVar("fluxcb_caller", default=None)
"""The frame and the line that called fluxcb, for warnings on threads that it has started."""


@contextlib.contextmanager
def calling_line() -> Iterator[None]:
    """Make warnings on threads that start in this context show the user's line that called fluxcb."""
    frame, _ = _user_frame(sys._getframe(1))
    token = _CALLER.set(None if frame is None else (frame, frame.f_lineno))
    try:
        yield
    finally:
        _CALLER.reset(token)


def warn_user(text: str, category: type[Warning]) -> None:
    """Give a warning that shows the user's line that called fluxcb."""
    frame, level = _user_frame(sys._getframe(1))
    caller = _CALLER.get()
    if caller is None or (frame is not None and frame.f_globals.get("__name__") != "threading"):
        warnings.warn(text, category, stacklevel=level + 1)
        return
    # The stack of a thread ends in `threading`, so no stack level leads to the line that called fluxcb.
    frame, line = caller
    module, registry = frame.f_globals.get("__name__"), frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(text, category, frame.f_code.co_filename, line, module, registry)


def _user_frame(frame: FrameType | None) -> tuple[FrameType | None, int]:
    """Return the first frame outside of fluxcb and JAX, and its stack level, counted from 1 for the given frame."""
    level = 1
    # The frames of JAX are between fluxcb and a function that is traced, and those of `abc` below a `class` statement.
    while frame is not None and (_is_own(frame) or _package(frame) in ("abc", "contextlib", "jax")):
        frame, level = frame.f_back, level + 1
    return frame, level


def innermost_user_frame(error: BaseException) -> TracebackType | None:
    """Return the last entry in the traceback of an error that is in the user's own code, or None."""
    installed = tuple(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib"))
    found, traceback = None, error.__traceback__
    while traceback is not None:
        if not _is_own(traceback.tb_frame) and not traceback.tb_frame.f_code.co_filename.startswith(installed):
            found = traceback
        traceback = traceback.tb_next
    return found


def _is_own(frame: FrameType) -> bool:
    # Compare the name of the module instead of the file, because generated code (a dataclass's `__init__`) has no file.
    return _package(frame) == "fluxcb"


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def _remove_frames(error: BaseException | None, seen: set[int]) -> None:
    if error is None or id(error) in seen:
        return
    seen.add(id(error))
    error.__traceback__ = _users(error.__traceback__, keep_last=_is_unexpected(error))
    ends_inside = error.__traceback__ is not None and _is_own(_last(error.__traceback__).tb_frame)
    if ends_inside and NOTE not in getattr(error, "__notes__", ()):
        error.add_note(NOTE)
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            _remove_frames(inner, seen)
    _remove_frames(error.__cause__, seen)
    _remove_frames(error.__context__, seen)


def _is_unexpected(error: BaseException) -> bool:
    """Return whether the line of fluxcb that raised an exception adds information to its message."""
    if not isinstance(error, Exception) or isinstance(error, FluxcbError | ExceptionGroup):
        return False
    if error.__traceback__ is None:
        return False
    last = _last(error.__traceback__)
    # A `raise` statement, as for the KeyError of a mapping, has a message of its own.
    return last.tb_frame.f_code.co_code[last.tb_lasti] != _RAISE


def _users(traceback: TracebackType | None, *, keep_last: bool) -> TracebackType | None:
    """Return a traceback without fluxcb's frames, optionally keeping the last one."""
    entries = []
    while traceback is not None:
        if not _is_own(traceback.tb_frame) or (keep_last and traceback.tb_next is None):
            entries.append(traceback)
        traceback = traceback.tb_next
    users: TracebackType | None = None
    for entry in reversed(entries):  # new entries, because nested exceptions share theirs
        users = TracebackType(users, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return users


def _last(traceback: TracebackType) -> TracebackType:
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback
