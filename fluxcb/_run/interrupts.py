"""Ctrl-C: the first one asks the loop to end after the window at hand, the second stops at once."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Interrupt", "caught_interrupts"]


class Interrupt:
    """Whether Ctrl-C was pressed."""

    __slots__ = ("requested",)

    def __init__(self) -> None:
        self.requested = False


@contextmanager
def caught_interrupts() -> Iterator[Interrupt]:
    """Turn the first SIGINT into a flag while a fit runs.

    An interrupt that flew through a donated step would lose the train state. Outside the main
    thread, or where somebody else handles SIGINT, nothing is changed.
    """
    interrupt = Interrupt()
    mine = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if not mine:
        yield interrupt
        return

    def handle(signum: int, frame: Any) -> None:
        del signum, frame
        if interrupt.requested:
            raise KeyboardInterrupt
        interrupt.requested = True

    signal.signal(signal.SIGINT, handle)
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
