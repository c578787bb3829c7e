"""Trainings that are interrupted at some of their events, and gone on with by new objects; what they come to."""

import csv
import functools
import inspect
import json
import shutil
import signal
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from fluxcb import Callback, Learner, on
from fluxcb._compile import program
from fluxcb._compile import step as traced
from fluxcb._declare.callback import unwrap
from fluxcb._run import programs
from fluxcb._tools.comparing import same, snapshot
from fluxcb._tools.resume_proof import state_of
from fluxcb.callbacks import Checkpointer
from fluxcb.callbacks.snapshot_saver import SnapshotSaver
from fluxcb.events import HostEvent
from fluxcb.phases import Phase

Make = Callable[[Path], Learner]
"""Builds the Learner of a run in a directory, with a Checkpointer."""


class AtEvents(Callback):
    """Count the host events, and call something at each."""

    name = "interruption"
    main_thread = True

    def __init__(self, act: Callable[[int, str], None] = lambda number, moment: None) -> None:
        self.act = act
        self.moments: list[str] = []

    @on(HostEvent, Phase)
    def count(self, event, phase, learner):
        self.moments.append(f"{type(event).__name__} {type(phase).name} {learner.progress.step}")
        self.act(len(self.moments) - 1, self.moments[-1])


class Interrupted:
    """A training, once without an interruption, and then with.

    Args:
        make: Builds the Learner.
        fit: What `fit` is told.
        folder: Where the directories of the runs are.
        keep: At which moments it is kept what a kill would leave on disk.

    Attributes:
        moments: The moments of the training: event, phase, and finished training steps.
        expected: What it came to.
    """

    def __init__(
        self, make: Make, fit: Mapping[str, Any], folder: Path, keep: Callable[[int, str], bool] = lambda n, moment: True
    ) -> None:
        self._make, self._fit, self._folder = make, fit, folder
        self._runs = 0
        self._left: dict[int, Path] = {}
        run = self._new_folder()

        def copy(number: int, moment: str) -> None:
            if keep(number, moment):
                saver.wait()  # kills inside of saves are those of test_kills.py
                self._left[number] = self._new_folder()
                shutil.copytree(run, self._left[number], dirs_exist_ok=True)

        with shared_programs() as self._programs:
            learner, probe = self._prepared(run, copy)
            saver = next(found for c in learner.callbacks if isinstance(found := unwrap(c), Checkpointer))
            learner.fit(**fit)
        self.moments = probe.moments
        self.expected = outcome(learner, run)

    def _new_folder(self) -> Path:
        self._runs += 1
        folder = self._folder / str(self._runs)
        folder.mkdir()
        return folder

    def _prepared(self, run: Path, act: Any = lambda number, moment: None) -> tuple[Learner, AtEvents]:
        learner, probe = self._make(run), AtEvents(act)
        learner.callbacks.add(probe)
        return learner, probe

    def killed_at(self, number: int) -> list[str]:
        """Return what differs if the training is killed at a moment, and gone on with."""
        return self._resumed(self._left[number])

    def preempted_at(self, number: int) -> list[str]:
        """Return what differs if the training gets SIGTERM at a moment, and is gone on with."""
        run = self._new_folder()

        def preempt(now: int, moment: str) -> None:
            if now == number:
                assert moment == self.moments[number]
                assert callable(signal.getsignal(signal.SIGTERM))
                signal.raise_signal(signal.SIGTERM)

        with shared_programs(self._programs):
            learner, _ = self._prepared(run, preempt)
            learner.fit(**self._fit)
        assert learner.stop_reason == "preempted"
        return self._resumed(run)

    def _resumed(self, run: Path) -> list[str]:
        with shared_programs(self._programs), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The run goes on from")  # plain iterables are read again
            learner, _ = self._prepared(run)
            learner.fit(**self._fit, resume=True)
        found = outcome(learner, run)
        shutil.rmtree(run)
        return differing(self.expected, found)


# --- what is compared -------------------------------------------------------------------------------------------------


def outcome(learner: Learner, run: Path) -> dict[str, Any]:
    """Return all that a Learner and its callbacks hold, and the records of the logs in a run's directory, by name."""
    found = state_of(learner)
    for path in sorted(run.glob("*.jsonl")):
        found[path.name] = [{**json.loads(line), "time": 0} for line in path.read_text().splitlines()]
    for path in sorted(run.glob("*.csv")):
        with path.open(newline="") as file:
            found[path.name] = [{**row, "time": 0} for row in csv.DictReader(file)]
    for declared in learner.callbacks.graph.declared:
        callback = unwrap(declared.callback)
        if not isinstance(callback, SnapshotSaver | AtEvents):
            held = {name: snapshot(value) for name, value in vars(callback).items() if not name.startswith("_fluxcb")}
            found |= {f"{declared.name}.{name}": value for name, value in held.items()}
    return found


def differing(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    """Return what differs, with both values."""
    return [
        f"{name}: {expected.get(name, 'nothing')!r} became {found.get(name, 'nothing')!r}"[:200]
        for name in {**expected, **found}
        if name not in expected or name not in found or not same(expected[name], found[name])
    ]


# --- what is spared ---------------------------------------------------------------------------------------------------


@contextmanager
def shared_programs(kept: dict[Any, Any] | None = None) -> Iterator[dict[Any, Any]]:
    """Let Learners that are built alike share their compiled programs; most of a small training's time is those."""
    kept = {} if kept is None else kept
    jaxprs, of_jax = {}, traced.jaxpr_as_fun

    def jaxpr_as_fun(closed):
        function = functools.partial(of_jax(closed))
        jaxprs[function] = closed
        return function

    def compile_program(step, carry, batches, **how):
        fetch, closed = how["fetch"], jaxprs[inspect.getclosurevars(step.run).nonlocals["flat"]]
        key = (
            str(closed.jaxpr),
            *(np.asarray(const).tobytes() for const in closed.consts),
            programs.signature(carry),
            tuple(leaf.sharding for leaf in jax.tree.leaves(carry)),
            jax.tree.structure(batches),
            tuple((x.shape, str(x.dtype)) for x in jax.tree.leaves(batches)),
            (tuple(fetch.each), tuple(fetch.last), how["kind"], how.get("steps"), how.get("by_hand")),
        )
        if key not in kept:
            kept[key] = program.compile_program(step, carry, batches, **how)
        return replace(kept[key], step=step, fetch=fetch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traced, "jaxpr_as_fun", jaxpr_as_fun)
        patch.setattr(programs, "compile_program", compile_program)
        yield kept
