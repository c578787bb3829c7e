"""Exceptions that came from outside, such as those of signal handlers, and a temporary handler of Ctrl-C."""

from __future__ import annotations

import contextlib
import functools
import signal
import threading
from collections.abc import Iterator
from types import CodeType
from typing import Any

__all__ = ["ctrl_c_handled_by", "is_interruption"]


def is_interruption(error: BaseException) -> bool:
    """Return whether an exception came from outside: Ctrl-C, `sys.exit`, or one that a signal handler raised.

    Such an exception does not belong to the step during which it arrived, and repeating the step does not repeat it.
    """
    if not isinstance(error, Exception):
        return True
    found = (_code_of(signal.getsignal(number)) for number in signal.valid_signals())
    handlers = {code for code in found if code is not None}
    seen: set[int] = set()
    errors: list[BaseException | None] = [error]
    while errors:  # code between the handler and this frame may have raised another exception instead
        at = errors.pop()
        if at is None or id(at) in seen:
            continue
        seen.add(id(at))
        traceback = at.__traceback__
        while traceback is not None:
            if traceback.tb_frame.f_code in handlers:
                return True
            traceback = traceback.tb_next
        errors += [at.__cause__, at.__context__]
    return False


def _code_of(handler: Any) -> CodeType | None:
    """Return the code that runs when a signal handler is called, or None if it is not written in Python."""
    while isinstance(handler, functools.partial):
        handler = handler.func
    handler = getattr(handler, "__func__", handler)  # of a bound method
    function = handler if hasattr(handler, "__code__") else vars(type(handler)).get("__call__")
    return getattr(function, "__code__", None)


@contextlib.contextmanager
def ctrl_c_handled_by(handler: Any) -> Iterator[None]:
    """Use another signal handler for Ctrl-C. In a thread, nothing changes.

    Args:
        handler: A handler, as for `signal.signal`.
    """
    if threading.current_thread() is not threading.main_thread():  # other threads cannot set signal handlers
        yield
        return
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
