"""What ends a fit between two steps: a handler that pauses it, and signals, of which the second stops at once."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["PREEMPTED", "Interrupt", "caught_interrupts"]

PREEMPTED = "preempted"
"""`learner.stop_reason` where SIGTERM ended a fit."""

_DEFAULTS = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


class Interrupt:
    """What was asked for from outside, or by a handler.

    Attributes:
        requested: Whether the fit is to end.
        preempted: Whether it then returns, as after SIGTERM, and does not raise, as after Ctrl-C.
        paused: What a handler said that asked for it, or None.
    """

    __slots__ = ("paused", "preempted", "requested")

    def __init__(self) -> None:
        self.requested = self.preempted = False
        self.paused: str | None = None

    def pause(self, reason: str) -> None:
        """End the fit, unless a signal ends it already."""
        if not self.requested:
            self.requested = self.preempted = True
            self.paused = reason

    @property
    def reason(self) -> str:
        """What asked for it, as `learner.stop_reason` says it."""
        if self.paused is not None:
            return self.paused
        return PREEMPTED if self.preempted else KeyboardInterrupt.__name__


@contextmanager
def caught_interrupts() -> Iterator[Interrupt]:
    """Turn the first SIGINT or SIGTERM into a flag while a fit runs.

    An interrupt that flew through a donated step would lose the train state. Outside the main
    thread, or where somebody else handles a signal, nothing is changed.
    """
    interrupt = Interrupt()
    mine: dict[signal.Signals, Any] = {}
    if threading.current_thread() is threading.main_thread():
        mine = {number: default for number, default in _DEFAULTS.items() if signal.getsignal(number) is default}

    def handle(signum: int, frame: Any) -> None:
        del frame
        if interrupt.requested and interrupt.paused is None:
            if signum == signal.SIGINT:
                raise KeyboardInterrupt
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        interrupt.requested, interrupt.paused = True, None
        interrupt.preempted = signum == signal.SIGTERM

    for number in mine:
        signal.signal(number, handle)
    try:
        yield interrupt
    finally:
        for number, default in mine.items():
            signal.signal(number, default)
