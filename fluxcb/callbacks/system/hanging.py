"""Determine from the stack of a training thread whether it runs a handler, fetches data, compiles, or waits."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Iterator
from types import FrameType

from fluxcb._declare.callback import Callback

__all__ = ["COMPILING", "innermost_of_fluxcb", "is_in", "stacks", "what_runs"]

COMPILING = "a step is traced or compiled"

# The modules that fetch batches, and those that trace and compile. There is no public interface for this, so a test
# checks the names. A wrong name would make an alarm report "the device".
_DATA = frozenset({"fluxcb._run.batch_stream"})
_COMPILES = frozenset({"fluxcb._run.programs", "fluxcb._run.learner_core"})


def what_runs(thread: int, own: Callback) -> str:
    """Return a description of what a training is doing.

    Args:
        thread: The `ident` of the thread that called `fit`.
        own: The callback to ignore: the one that calls this function.
    """
    frames = sys._current_frames()
    found = _handlers(frames.get(thread), own)
    for ident, frame in () if found else frames.items():  # handlers may run on threads (`ThreadExecutor`)
        found = found or (_handlers(frame, own) if ident != thread else [])
    if found:
        return f"the handler {', inside it '.join(found)}"
    return _without_handler(frames.get(thread))


def stacks() -> str:
    """Return the stacks of all other threads, formatted as in a traceback."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            lines = "".join(traceback.format_stack(frame))
            parts.append(f"Thread {names.get(ident, ident)} (most recent call last):\n{lines}")
    return "\n".join(parts)


def innermost_of_fluxcb(thread: int) -> FrameType | None:
    """Return the innermost frame of a thread that belongs to fluxcb."""
    frame = sys._current_frames().get(thread)
    while frame is not None and str(frame.f_globals.get("__name__", "")).partition(".")[0] != "fluxcb":
        frame = frame.f_back
    return frame


def is_in(thread: int, call: FrameType | None) -> bool:
    """Return whether a frame is still on the stack of a thread."""
    return call is not None and any(frame is call for frame in _outermost_first(sys._current_frames().get(thread)))


def _outermost_first(frame: FrameType | None) -> Iterator[FrameType]:
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return reversed(frames)


def _handlers(frame: FrameType | None, own: Callback) -> list[str]:
    """Return the handlers on a stack, outermost first."""
    found = []
    for called in _outermost_first(frame):
        code = called.f_code
        if code.co_argcount != 4:  # a handler takes self, event, phase and learner
            continue
        arguments = [called.f_locals.get(name) for name in code.co_varnames[:3]]
        callback, event, phase = arguments
        if not isinstance(callback, Callback) or callback is own:
            continue
        if any(entry.name == code.co_name for entry in callback.handlers()):
            found.append(f"{callback!r}.{code.co_name} at {event!r} x {type(phase).__name__}")
    return found


def _without_handler(frame: FrameType | None) -> str:
    """Return what a stack is doing if it contains no handler."""
    inside = data = False
    for called in _outermost_first(frame):
        module = str(called.f_globals.get("__name__", ""))
        if module.partition(".")[0] == "fluxcb":
            inside = True
            if module in _COMPILES:
                return COMPILING
            data = data or module in _DATA
        elif data:
            return f"the data: {called.f_code.co_qualname} in {called.f_code.co_filename}, line {called.f_lineno}"
    return "the data" if data else "the device" if inside else "code outside `fit`"
