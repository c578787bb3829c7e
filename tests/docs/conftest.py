"""The clock of the examples."""

import threading
import time

import pytest


@pytest.fixture(autouse=True)
def clock_of_step_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Advance the clock of `StepTimeout` only while an example sleeps, so that slow machines cause no other reports."""
    now, looks, sleep = 0.0, 0, time.sleep

    def in_watchdog(thread: threading.Thread) -> bool:
        return thread.name == "fluxcb-step-timeout"

    def read_clock() -> float:
        nonlocal looks
        looks += in_watchdog(threading.current_thread())
        return now

    def sleep_until_watchdog_looked(seconds: float) -> None:
        nonlocal now
        now += seconds
        before = looks
        sleep(seconds)
        while seconds and looks < before + 2 and any(map(in_watchdog, threading.enumerate())):
            sleep(0.001)

    monkeypatch.setattr("fluxcb.callbacks.system.step_timeout.monotonic", read_clock)
    monkeypatch.setattr(time, "sleep", sleep_until_watchdog_looked)
