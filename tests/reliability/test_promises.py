"""The guarantees of docs/reference/checkpoints.md for one run in one process; see the table on that page."""

import json
import math
import os
import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import Append, Callback, CancelFitting, DeclarationError, Read, ResumeError, Write, on
from fluxcb.callbacks import Checkpointer, Recorder
from fluxcb.checkpoints import ResumeWarning, load_params
from fluxcb.checkpoints.run_folder import entries_of
from fluxcb.events import EpochBegin, FitBegin, FitEnd, FitStopping, StepEnd, Trigger
from fluxcb.phases import AbstractTrainingPhase, TrainingPhase
from tests.changed_callbacks import changes_arguments
from tests.reliability.forged_checkpoints import manifest_of, set_manifest

BATCHES = 4  # an epoch


def counting(*callbacks: Callback, batches: int = BATCHES, first: Any = 0.0, **options: Any) -> fluxcb.Learner:
    """Return a Learner whose parameter counts its steps."""
    return fluxcb.Learner.from_loss(
        {"w": jnp.float32(first)},
        lambda params, batch, key: -jnp.sum(params["w"]) + 0 * jnp.sum(batch),
        optax.sgd(1.0),
        data=[np.zeros(1, np.float32)] * batches,
        callbacks=callbacks,
        default_callbacks=False,
        **options,
    )


def steps_in(folder: Path) -> list[int]:
    return [entry.step for entry in entries_of(folder)]


class At(Callback):
    """Call a function at the end of one step."""

    def __init__(self, step: int, act: Any) -> None:
        self.step, self.act = step, act

    def stateaccess(self):
        return {"control": Append()}

    @on
    def look(self, event: StepEnd, phase: TrainingPhase, learner):
        if learner.progress.step == self.step:
            self.act()


class Log(Callback):
    """Record the events of a fit, except those of steps."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    @on
    def see(self, event: FitBegin | EpochBegin | FitStopping | FitEnd, phase: AbstractTrainingPhase, learner):
        self.seen.append(type(event).__name__)
        if isinstance(event, FitBegin):
            self.seen.append(f"resumes={event.resumes}")

    def state_dict(self):
        return {}  # a resumed run records its own events


def fail() -> None:
    raise OSError("no power")


def cancel() -> None:
    raise CancelFitting("good enough")


# --- when a run is saved ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("period", "saved"),
    [
        ({}, [0, 4, 8, 12]),
        ({"epochs": 2}, [0, 8, 12]),
        ({"steps": 5}, [0, 5, 10, 12]),
        ({"seconds": 1e9}, [0, 12]),
    ],
)
def test_start_periods_and_end_are_saved(tmp_path, period, saved):
    counting(Checkpointer(tmp_path, keep_last=9, **period)).fit(3)
    assert steps_in(tmp_path) == saved


@changes_arguments("callbacks.At.step")
def test_exception_saves_nothing_and_run_resumes_from_previous_checkpoint(tmp_path):
    log = Log()
    with pytest.raises(OSError, match="no power"):
        counting(Checkpointer(tmp_path), At(6, fail), log).fit(3)
    assert steps_in(tmp_path) == [0, 4]
    assert log.seen == ["FitBegin", "resumes=False", "EpochBegin", "EpochBegin", "FitEnd"]
    again = counting(Checkpointer(tmp_path), At(-1, fail), Log())
    again.fit(3, resume=True)
    assert float(again.params["w"]) == again.step == 12


class Spoil(Callback):
    """Make the parameter NaN during one epoch."""

    def stateaccess(self):
        return {"params": Write()}

    @on
    def spoil(self, event: StepEnd, phase: TrainingPhase, learner):
        step = learner.progress.step
        learner.params = {"w": jnp.float32(math.nan if 5 <= step <= 8 else step)}


def test_non_finite_parameters_are_not_saved(tmp_path):
    with pytest.warns(UserWarning, match="does not save the state after step 8: some parameters are NaN or infinite"):
        counting(Spoil(), Checkpointer(tmp_path)).fit(3)
    assert steps_in(tmp_path) == [0, 4, 12]


def test_all_files_are_on_disk_before_checkpoint_gets_its_name(tmp_path, monkeypatch):
    synced: list[Any] = []  # the inodes of files and folders, and the names that checkpoints get
    fsync, rename = os.fsync, os.rename

    def record_sync(handle):
        fsync(handle)
        synced.append(os.fstat(handle).st_ino)

    def record_rename(source, target, *args, **kwargs):
        rename(source, target, *args, **kwargs)
        synced.append(str(target))

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "rename", record_rename)
    counting(Checkpointer(tmp_path)).fit(1)
    folder = tmp_path / "4"
    named = synced.index(str(folder))
    files = {path.stat().st_ino for path in (folder, *folder.rglob("*"))}
    assert files - set(synced[:named]) == set()
    assert tmp_path.stat().st_ino in synced[named:]


# --- what a run is continued with -------------------------------------------------------------------------------------


def test_finished_run_continues_with_new_epoch(tmp_path):
    counting(Checkpointer(tmp_path), Log()).fit(steps=6, resume=True)  # two steps into the second epoch
    log = Log()
    learner = counting(Checkpointer(tmp_path), log)
    learner.fit(steps=11, resume=True)
    assert log.seen == ["FitBegin", "resumes=True", "EpochBegin", "EpochBegin", "FitStopping", "FitEnd"]
    assert (learner.step, learner.epoch, float(learner.params["w"])) == (11, 4, 11)


@changes_arguments("callbacks.At.step")
def test_run_resumed_within_epoch_has_no_epoch_begin(tmp_path):
    with pytest.raises(OSError, match="no power"):
        counting(Checkpointer(tmp_path, steps=3), At(4, fail), Log()).fit(1)
    log = Log()
    counting(Checkpointer(tmp_path, steps=3), At(-1, fail), log).fit(1, resume=True)
    assert log.seen == ["FitBegin", "resumes=True", "FitStopping", "FitEnd"]


def test_cancelled_run_is_done_and_can_be_restored_and_trained_further(tmp_path):
    first = counting(Checkpointer(tmp_path), At(6, cancel))
    first.fit(3)
    again = counting(Checkpointer(tmp_path), At(6, cancel))
    again.fit(3, resume=True)
    assert [(run.step, run.stop_reason) for run in (first, again)] == [(6, "good enough")] * 2
    assert steps_in(tmp_path)[-1] == 6
    again.restore(tmp_path)
    again.fit(1)
    assert (again.stop_reason, float(again.params["w"])) == (None, again.step)
    assert again.step > 6


def test_run_restored_at_earlier_step_renames_later_checkpoints(tmp_path):
    counting(Checkpointer(tmp_path, keep_last=9)).fit(3)
    learner = counting(Checkpointer(tmp_path, keep_last=9))
    learner.restore(tmp_path / "4")
    learner.fit(1)
    folders = sorted(path.name for path in tmp_path.iterdir() if path.is_dir())
    assert folders == ["0", "4", "8", "8.1", "superseded-12"]
    assert float(load_params(tmp_path)["w"]) == 8


@pytest.mark.parametrize(
    ("changed", "allow", "difference"),
    [
        (
            lambda folder: counting(Checkpointer(folder), Recorder()),
            "callbacks",
            "callbacks: Recorder (fluxcb.callbacks.Recorder) is new",
        ),
        (
            lambda folder: counting(Checkpointer(folder), batches=5),
            "data",
            "data: training was 4 batches, and is 5 batches now",
        ),
        (
            lambda folder: counting(Checkpointer(folder), first=np.zeros(3)),
            None,
            "params: w was float32[], and is float32[3] now",
        ),
    ],
    ids=["callbacks", "data", "shapes"],
)
def test_changed_run_raises_unless_change_is_allowed(tmp_path, changed, allow, difference):
    counting(Checkpointer(tmp_path)).fit(1)
    learner = changed(tmp_path)
    for attempt in (lambda: learner.fit(2, resume=True), lambda: learner.restore(tmp_path)):
        with pytest.raises(ResumeError) as raised:
            attempt()
        assert f"  where: {difference}\n  why: " in str(raised.value)
    assert learner.step == 0
    if allow:
        learner.restore(tmp_path, allow=(allow,))
        learner.fit(1)
        assert float(learner.params["w"]) == learner.step > 4


@pytest.mark.parametrize(
    ("field", "name", "value"),
    [("versions", "jax", "0.0.1"), ("versions", "numpy", "1.0"), ("programs", "training", "?")],
)
def test_changes_that_may_affect_last_bits_warn(tmp_path, field, name, value):
    counting(Checkpointer(tmp_path)).fit(1)
    content = manifest_of(tmp_path / "4")
    content["about"][field][name] = value
    set_manifest(tmp_path / "4", json.dumps(content))
    learner = counting(Checkpointer(tmp_path))
    with pytest.warns(ResumeWarning, match=f"{name}.*{value.replace('?', '[?]')}") as told:
        learner.restore(tmp_path / "4")
    assert len(told) == 1
    assert float(learner.params["w"]) == learner.step == 4


# --- what a checkpoint can hold ---------------------------------------------------------------------------------------


class Holds(Callback):
    def state_dict(self):
        return {"file": object()}

    def load_state_dict(self, state):
        pass


def test_unsavable_state_raises_at_first_save_and_names_field(tmp_path):
    learner = counting(Holds(), Checkpointer(tmp_path))
    with pytest.raises(DeclarationError) as raised:
        learner.fit(1)
    message = r"the state of Holds\(\)\['file'\] is object <object object at \w+>, which a checkpoint cannot hold\."
    assert re.fullmatch(message, raised.value.what)
    assert learner.step == 0


def test_tuples_are_read_as_lists_without_like(tmp_path):
    params = {"pair": (jnp.zeros(2), [jnp.ones(1)])}
    learner = fluxcb.Learner.from_loss(
        params,
        lambda params, batch, key: jnp.sum(params["pair"][0]) * 0,
        optax.sgd(1.0),
        data=[np.zeros(1, np.float32)],
        callbacks=[Checkpointer(tmp_path)],
        default_callbacks=False,
    )
    learner.fit(1)
    assert np.shape(load_params(tmp_path)["pair"][1][0]) == (1,)
    assert type(load_params(tmp_path)["pair"]) is list
    assert type(load_params(tmp_path, like=params)["pair"]) is tuple


class Mirror(Callback):
    """Keep snapshots without copying them."""

    def __init__(self) -> None:
        self.taken: list[tuple[int, Any, Any]] = []

    def stateaccess(self):
        return {"*": Read()}

    @on
    def ask(self, event: Trigger | FitStopping, phase: AbstractTrainingPhase, learner):
        learner.snapshots.request(self.take)

    def take(self, snapshot):
        self.taken.append((snapshot.step, snapshot.trees["params"]["w"], snapshot.host["callbacks"]))


class Counts(Callback):
    """Count the moments at which snapshots are requested."""

    def __init__(self) -> None:
        self.count = 0

    @on
    def add(self, event: Trigger | FitStopping, phase: AbstractTrainingPhase, learner):
        self.count += 1

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


@pytest.mark.parametrize("order", [1, -1])
def test_snapshot_is_taken_after_all_handlers_and_never_changes(order):
    mirror = Mirror()
    counting(*[mirror, Counts()][::order]).fit(2)
    assert [(step, float(w), callbacks["Counts"]) for step, w, callbacks in mirror.taken] == [
        (4, 4.0, {"count": 1}),
        (8, 8.0, {"count": 2}),
        (8, 8.0, {"count": 3}),
    ]
