"""What every bad input must leave behind: an error that tells the cure, and nothing else."""

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
    """Return kind and text of what is raised, and nothing that would keep a Learner alive: an error holds frames."""
    try:
        make()
    except Exception as error:
        return type(error), str(error)
    pytest.fail("it was accepted")


@pytest.fixture
def told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Told:
    """`told(make, Kind, first)`: `make()` raises an error of just this kind, whose text begins with this line.

    The text tells a cure, and no thread and no file is left. Files that `make` needs lie in `tmp_path`, beside the
    working directory.
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
    """`refuses(make, Kind, first)`: as `told`, and `log`, which `make(log)` gives to a Learner, is free afterwards."""

    def check(make: Callable[[EventLog], Any], kind: type[FluxcbError], first: str) -> None:
        log = EventLog()
        told(lambda: make(log), kind, first)
        log.entries.clear()
        testlearner(log, batches=1, validation_batches=0).fit(1)
        assert log.names() == EPOCH_OF_ONE_STEP

    return check
