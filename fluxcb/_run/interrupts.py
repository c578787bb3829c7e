"""Ending a fit between two steps: after a signal, or because a handler pauses the fit."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["PREEMPTED", "Interrupt", "caught_interrupts"]

PREEMPTED = "preempted"
"""`learner.stop_reason` after SIGTERM ended a fit."""

# The handlers with which Python starts. Only these are replaced during a fit.
_DEFAULTS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


class Interrupt:
    """A request to end the fit, from a signal or from a handler.

    Attributes:
        requested: Whether the fit has to end.
        preempted: Whether `fit` then returns, as after SIGTERM. Otherwise it raises, as after Ctrl-C.
        paused: The reason that a handler gave, or None.
    """

    __slots__ = ("paused", "preempted", "requested")

    def __init__(self) -> None:
        self.requested = self.preempted = False
        self.paused: str | None = None

    def pause(self, reason: str) -> None:
        """Request the end of the fit, unless a signal has already requested it."""
        if not self.requested:
            self.requested = self.preempted = True
            self.paused = reason

    @property
    def reason(self) -> str:
        """The reason of the request, in the form of `learner.stop_reason`."""
        if self.paused is not None:
            return self.paused
        return PREEMPTED if self.preempted else KeyboardInterrupt.__name__


@contextmanager
def caught_interrupts() -> Iterator[Interrupt]:
    """Turn the first SIGINT or SIGTERM into a flag while a fit runs.

    An exception inside a call that donates the carry would lose the train state. After SIGTERM, `fit` returns, so that
    the program determines its exit code. Nothing changes outside the main thread, or for a signal that has another
    handler.
    """
    interrupt = Interrupt()
    replaced: dict[signal.Signals, Any] = {}
    # Python allows signal handlers only in the main thread.
    if threading.current_thread() is threading.main_thread():
        # A handler that the user installed stays in place.
        replaced = {number: default for number, default in _DEFAULTS.items() if signal.getsignal(number) is default}

    def handle(signum: int, frame: Any) -> None:
        del frame
        # The second signal ends the program. A pause by a handler does not count as the first signal.
        if interrupt.requested and interrupt.paused is None:
            if signum == signal.SIGINT:
                raise KeyboardInterrupt
            # Python has no exception for SIGTERM, so the default action ends the process.
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        # A signal overrides the reason of a handler that paused the fit before.
        interrupt.requested, interrupt.paused = True, None
        interrupt.preempted = signum == signal.SIGTERM

    for number in replaced:
        signal.signal(number, handle)
    try:
        yield interrupt
    finally:
        for number, default in replaced.items():
            signal.signal(number, default)
