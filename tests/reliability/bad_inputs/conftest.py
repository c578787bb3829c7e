"""What every bad input must leave behind: an error that tells the cure, and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fluxcb import FluxcbError
from fluxcb.testing import EventLog, testlearner

EPOCH_OF_ONE_STEP = ["FitBegin", "EpochBegin", "StepBegin", "StepEnd", "EpochEnd", "Trigger", "FitEnd"]

Refuses = Callable[[Callable[[EventLog], Any], type[FluxcbError], str], None]


def contents(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


def refusal(make: Callable[[EventLog], Any], log: EventLog) -> tuple[type[BaseException], str]:
    """Return kind and text of what is raised, and nothing that would keep a Learner alive: an error holds frames."""
    try:
        make(log)
    except Exception as error:
        return type(error), str(error)
    pytest.fail("it was accepted")


@pytest.fixture
def refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Refuses:
    """`refuses(make, Kind, first)`: `make(log)` raises an error of just this kind, whose text begins with this line.

    The text tells a cure, no thread and no file is left, and `log`, which `make` may give to a Learner, can be given to
    a good one at once. Files that `make` needs lie beside the working directory, in `tmp_path`.
    """
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)

    def check(make: Callable[[EventLog], Any], kind: type[FluxcbError], first: str) -> None:
        log = EventLog()
        files, threads = contents(tmp_path), threading.enumerate()
        found, text = refusal(make, log)
        assert text.splitlines()[0] == first
        assert found is kind
        assert text.count("\n  fix:   ") == 1
        assert contents(tmp_path) == files
        assert threading.enumerate() == threads
        log.entries.clear()
        testlearner(log, batches=1, validation_batches=0).fit(1)
        assert log.names() == EPOCH_OF_ONE_STEP

    return check
