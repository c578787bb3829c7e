"""Signals: the first asks the loop to end after the window at hand, the second stops at once."""

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
    """What was asked for from outside.

    Attributes:
        requested: Whether the fit is to end.
        preempted: Whether SIGTERM asked for it, and not Ctrl-C.
    """

    __slots__ = ("preempted", "requested")

    def __init__(self) -> None:
        self.requested = self.preempted = False

    @property
    def reason(self) -> str:
        """What asked for it, as `learner.stop_reason` says it."""
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
        if interrupt.requested:
            if signum == signal.SIGINT:
                raise KeyboardInterrupt
            signal.signal(signum, signal.SIG_DFL)
            os.kill(os.getpid(), signum)
        interrupt.requested = True
        interrupt.preempted = signum == signal.SIGTERM

    for number in mine:
        signal.signal(number, handle)
    try:
        yield interrupt
    finally:
        for number, default in mine.items():
            signal.signal(number, default)
