"""Trainings that are interrupted at some of their events and resumed with new objects, and their results."""

import os
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fluxcb import Callback, Learner, on
from fluxcb._declare.callback import unwrap
from fluxcb._tools.comparing import same, snapshot
from fluxcb._tools.resume_proof import state_of
from fluxcb.callbacks import Checkpointer
from fluxcb.callbacks.saving.snapshot_saver import SnapshotSaver
from fluxcb.events import HostEvent
from fluxcb.logging import hub
from fluxcb.logging.backend_group import BackendGroup
from fluxcb.phases import Phase
from tests.shared_programs import shared_programs

Make = Callable[[Path], Learner]
"""Builds the Learner of a run in a directory, with a Checkpointer."""


class AtEvents(Callback):
    """Count the host events, and call a function at each of them."""

    name = "interruption"
    main_thread = True

    def __init__(self, act: Callable[[int, str], None] = lambda number, moment: None) -> None:
        self.act = act
        self.moments: list[str] = []

    @on(HostEvent, Phase)
    def count(self, event, phase, learner):
        self.moments.append(f"{type(event).__name__} {type(phase).name} {learner.progress.step}")
        self.act(len(self.moments) - 1, self.moments[-1])

    def state_dict(self):
        return {}  # a resumed run records its own events


class Interrupted:
    """A training without interruption, and the same training with interruptions.

    Args:
        make: Builds the Learner.
        fit: The arguments of `fit`.
        folder: The folder of the run's directory, which is always the same, and of its copies.
        keep: The moments at which to keep the files that a kill would leave on disk.

    Attributes:
        moments: The moments of the training: event, phase, and finished training steps.
        expected: The result without interruption.
        told: The warnings of the resumed trainings.
    """

    def __init__(
        self, make: Make, fit: Mapping[str, Any], folder: Path, keep: Callable[[int, str], bool] = lambda n, m: True
    ) -> None:
        self._make, self._fit = make, fit
        self._run, self._folder = folder / "run", folder
        self.told: list[str] = []
        self._left: dict[int, Path] = {}
        self._results: dict[Path, list[str] | None] = {}
        last: dict[Path, bytes] = {}

        def copy(number: int, moment: str) -> None:
            if keep(number, moment):
                saver.wait()  # kills inside of saves are those of test_kills.py
                held = {path: path.read_bytes() for path in sorted(self._run.rglob("*")) if path.is_file()}
                if held != last:
                    last.clear()
                    last.update(held)
                    self._results[shutil.copytree(self._run, folder / f"{number}")] = None
                self._left[number] = next(reversed(self._results))

        with spared() as self._programs:
            learner, probe = self._prepared(copy)
            saver = next(found for c in learner.callbacks if isinstance(found := unwrap(c), Checkpointer))
            learner.fit(**fit)
        self.moments = probe.moments
        self.expected = outcome(learner, self._run)

    def _prepared(self, act: Any = lambda number, moment: None, left: Path | None = None) -> tuple[Learner, AtEvents]:
        """Return a Learner for the directory of the run, with the given files in it, or none."""
        shutil.rmtree(self._run, ignore_errors=True)
        if left is None:
            self._run.mkdir()
        else:
            shutil.copytree(left, self._run)
        return self._built(act)

    def _built(self, act: Any = lambda number, moment: None) -> tuple[Learner, AtEvents]:
        learner, probe = self._make(self._run), AtEvents()
        probe.act = act  # not an argument, because a resumed run would report another one
        learner.callbacks.add(probe)
        return learner, probe

    def killed_at(self, number: int) -> list[str]:
        """Return the differences if the training is killed at a moment and resumed."""
        left = self._left[number]
        found = self._results[left]
        if found is None:  # or it is as it was at the moment before
            with spared(self._programs):
                found = self._results[left] = self._resumed(self._prepared(left=left)[0])
        return found

    def preempted_at(self, number: int) -> list[str]:
        """Return the differences if the training gets SIGTERM at a moment and is resumed."""

        def preempt(now: int, moment: str) -> None:
            if now == number:
                assert moment == self.moments[number]
                assert callable(signal.getsignal(signal.SIGTERM))
                signal.raise_signal(signal.SIGTERM)

        with spared(self._programs):
            learner, _ = self._prepared(preempt)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="SIGTERM ended the fit")  # of Learners without FitSummary
                learner.fit(**self._fit)
            assert learner.stop_reason == "preempted"
            return self._resumed(self._built()[0])

    def _resumed(self, learner: Learner) -> list[str]:
        with warnings.catch_warnings(record=True) as told:
            warnings.filterwarnings("always", message="The run resumes from")  # plain iterables are read again
            learner.fit(**self._fit, resume=True)
        self.told += [str(warning.message) for warning in told]
        return differing(self.expected, outcome(learner, self._run))


# --- what is compared -------------------------------------------------------------------------------------------------


def outcome(learner: Learner, run: Path) -> dict[str, Any]:
    """Return the complete state of a Learner and its callbacks, and the logs in the directory of the run, by name."""
    found = state_of(learner)
    found |= {path.name: path.read_text() for path in run.glob("log.*")}
    for declared in learner.callbacks.graph.declared:
        callback = unwrap(declared.callback)
        if not isinstance(callback, SnapshotSaver | AtEvents):
            held = {name: snapshot(value) for name, value in vars(callback).items() if _is_state(name, value)}
            found |= {f"{declared.name}.{name}": value for name, value in held.items()}
    return found


def _is_state(name: str, value: Any) -> bool:
    return not name.startswith("_fluxcb") and not isinstance(value, BackendGroup)  # open files; the logs are compared


def differing(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Return the differences, with both values."""
    return [
        f"{name}: {expected.get(name, 'nothing')!r} became {found.get(name, 'nothing')!r}"[:200]
        for name in {**expected, **found}
        if name not in expected or name not in found or not same(expected[name], found[name])
    ]


# --- what is spared ---------------------------------------------------------------------------------------------------


@contextmanager
def spared(kept: dict[Any, Any] | None = None) -> Iterator[dict[Any, Any]]:
    """Let equal Learners share their compiled programs, and save without waiting for the disk.

    The clock of logs stands still, so that logs are identical.
    """
    with shared_programs(kept) as kept, pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda handle: None)  # nobody cuts the power
        patch.setattr(hub, "time", SimpleNamespace(time=lambda: 1.5e9))
        yield kept
