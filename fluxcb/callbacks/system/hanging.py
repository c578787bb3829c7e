"""Determine from the stack of a training thread whether it runs a handler, fetches data, compiles, or waits."""

from __future__ import annotations

import sys
import threading
import traceback
from types import FrameType

from fluxcb._declare.callback import Callback
from fluxcb._memory import garbage_collection_paused

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
            frames = _outermost_first(frame)  # kept until the stack is formatted
            lines = "".join(traceback.format_stack(frames[-1]))
            parts.append(f"Thread {names.get(ident, ident)} (most recent call last):\n{lines}")
    return "\n".join(parts)


def innermost_of_fluxcb(thread: int) -> FrameType | None:
    """Return the innermost frame of a thread that belongs to fluxcb."""
    frames = _outermost_first(sys._current_frames().get(thread))
    return next((f for f in reversed(frames) if _module(f).partition(".")[0] == "fluxcb"), None)


def is_in(thread: int, call: FrameType | None) -> bool:
    """Return whether a frame is still on the stack of a thread."""
    return call is not None and any(frame is call for frame in _outermost_first(sys._current_frames().get(thread)))


def _outermost_first(frame: FrameType | None) -> list[FrameType]:
    # Python 3.11 may collect garbage when it creates the object of a frame or its locals. A finalizer can let the other
    # thread run, which leaves the frame, and reading it crashes the process. Python 3.12 collects between instructions.
    with garbage_collection_paused():
        frames = []
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
    frames.reverse()
    return frames


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _handlers(frame: FrameType | None, own: Callback) -> list[str]:
    """Return the handlers on a stack, outermost first."""
    found = []
    for called in _outermost_first(frame):
        code = called.f_code
        if code.co_argcount != 4:  # a handler takes self, event, phase and learner
            continue
        with garbage_collection_paused():  # see `_outermost_first`
            values = called.f_locals
        callback, event, phase = (values.get(name) for name in code.co_varnames[:3])
        if not isinstance(callback, Callback) or callback is own:
            continue
        if any(entry.name == code.co_name for entry in callback.handlers()):
            found.append(f"{callback!r}.{code.co_name} at {event!r} x {type(phase).__name__}")
    return found


def _without_handler(frame: FrameType | None) -> str:
    """Return what a stack is doing if it contains no handler."""
    inside = data = False
    for called in _outermost_first(frame):
        module = _module(called)
        if module.partition(".")[0] == "fluxcb":
            inside = True
            if module in _COMPILES:
                return COMPILING
            data = data or module in _DATA
        elif data:
            return f"the data: {called.f_code.co_qualname} in {called.f_code.co_filename}, line {called.f_lineno}"
    return "the data" if data else "the device" if inside else "code outside `fit`"
