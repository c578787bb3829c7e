"""Fixtures that check that an invalid input raises an error with a fix, and leaves nothing behind."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fluxcb import FluxcbError
from fluxcb.testing import EventLog, testlearner

EPOCH_OF_ONE_STEP = ["FitBegin", "EpochBegin", "StepBegin", "StepEnd", "EpochEnd", "Trigger", "FitStopping", "FitEnd"]

Told = Callable[[Callable[[], Any], type[FluxcbError], str], None]
Refuses = Callable[[Callable[[EventLog], Any], type[FluxcbError], str], None]


def contents(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


def refusal(make: Callable[[], Any]) -> tuple[type[BaseException], str]:
    """Return the type and the text of the raised error, without references that keep a Learner alive."""
    try:
        make()
    except Exception as error:
        return type(error), str(error)
    pytest.fail("it was accepted")


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Told:
    """`told(make, Kind, first)`: `make()` raises an error of exactly this kind that begins with this line.

    The text contains a fix, and no thread or file is left. Files that `make` needs are in `tmp_path`, which contains
    the working directory.
    """
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)

    def check(make: Callable[[], Any], kind: type[FluxcbError], first: str) -> None:
        files, threads = contents(tmp_path), threading.enumerate()
        found, text = refusal(make)
        assert text.splitlines()[0] == first
        assert found is kind
        assert text.count("\n  fix:   ") == 1
        assert contents(tmp_path) == files
        assert threading.enumerate() == threads

    return check


@pytest.fixture
def refuses(told: Told) -> Refuses:
    """`refuses(make, Kind, first)`: like `told`, and the callback `log` that `make(log)` uses can be used again."""

    def check(make: Callable[[EventLog], Any], kind: type[FluxcbError], first: str) -> None:
        log = EventLog()
        told(lambda: make(log), kind, first)
        log.entries.clear()
        testlearner(log, batches=1, validation_batches=0).fit(1)
        assert log.names() == EPOCH_OF_ONE_STEP

    return check
