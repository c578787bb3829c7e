"""Custom savers: they store checkpoints in their own way, and runs resume and rewind."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import Callback, CheckpointError, Read, ResumeError, on
from fluxcb._tools.resume_proof import state_of
from fluxcb.callbacks import CustomCallback, Metrics, ParameterEMA, Recorder
from fluxcb.checkpoints import LoadedCheckpoint, ResumeWarning, RunLock, RunSaver, Snapshot, StoredCheckpoint
from fluxcb.data import ArrayLoader
from fluxcb.events import FitBegin, FitEnd, FitStopping, StepEnd, Trigger
from fluxcb.phases import AbstractTrainingPhase, TrainingPhase
from tests.changed_callbacks import changes_arguments
from tests.run.test_rewinding import Back, Passes, batches, summing

ROOT = Path(__file__).resolve().parents[2]


class Saver(Callback, RunSaver):
    """Save after every third step and when the fit stops."""

    def stateaccess(self) -> dict[str, Any]:
        return {"*": Read()}

    @on(Trigger, AbstractTrainingPhase, when=fluxcb.EverySteps(3))
    def save_on_schedule(self, event: Trigger, phase: AbstractTrainingPhase, learner: Any) -> None:
        learner.snapshots.request(self.store)

    @on(FitStopping, AbstractTrainingPhase)
    def save_at_the_end(self, event: FitStopping, phase: AbstractTrainingPhase, learner: Any) -> None:
        learner.snapshots.request(self.store)

    def store(self, snapshot: Snapshot) -> None:
        raise NotImplementedError


class MemorySaver(Saver):
    """Keep the snapshots in the given list."""

    def __init__(self, kept: list[Snapshot]) -> None:
        self.kept = kept

    def store(self, snapshot: Snapshot) -> None:
        self.kept.append(snapshot)

    def stored_checkpoints(self, last_step: int | None = None) -> Iterable[StoredCheckpoint]:
        for number, snapshot in reversed(list(enumerate(self.kept))):
            if last_step is None or snapshot.step <= last_step:
                yield LoadedCheckpoint(snapshot, f"snapshot {number}")

    def discard_after(self, checkpoint: StoredCheckpoint) -> None:
        while f"snapshot {len(self.kept) - 1}" != str(checkpoint):
            self.kept.pop()


class NpzSaver(Saver):
    """Write one flat `.npz` file for each checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def files(self) -> list[Path]:
        return sorted(self.folder.glob("*.npz"), key=lambda path: int(path.stem))

    def store(self, snapshot: Snapshot) -> None:
        content, arrays = snapshot.pack()
        self.folder.mkdir(exist_ok=True)
        np.savez(self.folder / f"{snapshot.step}.npz", json=np.array(json.dumps(content)), **arrays)

    def stored_checkpoints(self, last_step: int | None = None) -> Iterable[StoredCheckpoint]:
        for path in reversed(self.files()):
            if last_step is None or int(path.stem) <= last_step:
                with np.load(path) as held:
                    arrays = dict(held)
                content = json.loads(str(arrays.pop("json")))
                yield LoadedCheckpoint(Snapshot.unpack(content, arrays), str(path))

    def discard_after(self, checkpoint: StoredCheckpoint) -> None:
        for path in self.files():
            if int(path.stem) > checkpoint.step:
                path.unlink()


class Draws(Callback):
    """Share a random key and a bfloat16 array in `cbstate`."""

    def init(self, learner: Any) -> None:
        learner.cbstate.draws = {"key": jax.random.key(3), "half": jnp.arange(3, dtype=jnp.bfloat16)}

    def stateaccess(self) -> dict[str, Any]:
        return {"cbstate": {"draws": fluxcb.Write()}}

    @on
    def draw(self, event: StepEnd, phase: TrainingPhase, learner: Any) -> None:
        key, _ = jax.random.split(learner.cbstate.draws["key"])
        half = learner.cbstate.draws["half"] + 1
        learner.cbstate.draws = {"key": key, "half": half}


def learner_of(*callbacks: Callback) -> fluxcb.Learner:
    def init(key: Any, xs: Any) -> dict[str, Any]:
        return {"w": jax.random.normal(key, (2, 3)), "layers": [{"b.0": jnp.zeros(3, jnp.bfloat16)}], "": jnp.ones(())}

    def apply(params: Any, xs: Any) -> Any:
        return xs @ params["w"] * params[""] + params["layers"][0]["b.0"]

    xs, ys = np.arange(40, dtype=np.float32).reshape(20, 2) / 40, np.ones((20, 3), np.float32)
    return fluxcb.Learner(
        (init, apply),
        lambda outputs, ys: jnp.mean((outputs - ys) ** 2),
        optax.adam(0.1),
        data=(ArrayLoader((xs, ys), 4, shuffle=True), [(xs[:4], ys[:4])]),
        callbacks=[*callbacks, Metrics(), Recorder(), ParameterEMA(0.9), Draws()],
        default_callbacks=False,
    )


def failing_after(step: int) -> Callback:
    """Return a callback that raises after a step. As after a kill, only earlier checkpoints remain."""

    def fail(learner: Any) -> None:
        if learner.progress.step == step:
            raise ZeroDivisionError

    return CustomCallback(fail, StepEnd, access={"step": {"loss": Read()}}, name="fails")


@pytest.fixture(params=["memory", "npz"])
def make_saver(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """Return a function that creates savers with the same checkpoints, as in different processes."""
    kept: list[Snapshot] = []
    return lambda: MemorySaver(kept) if request.param == "memory" else NpzSaver(tmp_path / "own")


@pytest.mark.parametrize(("step", "resumed"), [(4, 3), (11, 9), (3, None)])
@changes_arguments("callbacks.fails")
def test_run_resumes_bit_for_bit_from_custom_saver(make_saver, step, resumed):
    straight = learner_of(failing_after(-1))
    straight.fit(4)
    with pytest.raises(ZeroDivisionError):
        learner_of(make_saver(), failing_after(step)).fit(4)
    steps = [checkpoint.step for checkpoint in make_saver().stored_checkpoints()]
    assert steps == list(range(resumed or 0, 0, -3))
    again = learner_of(make_saver(), failing_after(-1))
    again.fit(4, resume=True)
    expected, found = state_of(straight), state_of(again)
    assert again.step == 20
    assert {name for name in expected if expected[name] != found[name]} == set()
    assert expected.keys() == found.keys()


def killed_after(step: int) -> Callback:
    def kill(learner: Any) -> None:
        if learner.progress.step == step:
            os.kill(os.getpid(), signal.SIGKILL)

    return CustomCallback(kill, StepEnd, access={"step": {"loss": Read()}}, name="killed")


@changes_arguments("callbacks.killed")
def test_killed_process_resumes_bit_for_bit_from_custom_saver(tmp_path):
    straight = learner_of(killed_after(-1))
    straight.fit(4)
    program = (
        "from pathlib import Path\n"
        "from tests.run.test_own_savers import NpzSaver, killed_after, learner_of\n"
        f"learner_of(NpzSaver(Path({str(tmp_path)!r})), killed_after(11)).fit(4)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert [path.name for path in NpzSaver(tmp_path).files()] == ["3.npz", "6.npz", "9.npz"]
    again = learner_of(NpzSaver(tmp_path), killed_after(-1))
    again.fit(4, resume=True)
    assert state_of(again) == state_of(straight)


@pytest.mark.parametrize("own", [True, False], ids=["own saver", "Checkpointer"])
def test_run_rewinds_to_checkpoint_of_custom_saver(make_saver, tmp_path, own):
    savers = [make_saver()] if own else []
    learner = summing(None if own else tmp_path / "run", Passes(10), Back({8: 7}), Recorder(), *savers)
    with pytest.warns(ResumeWarning, match="The run goes back from step 8 to the checkpoint "):
        learner.fit(1)
    # Steps 7 and 8 are undone, and the data continues after their batches.
    assert batches(learner) == [0, 1, 2, 3, 4, 5, 8, 9]
    if own:
        assert [checkpoint.step for checkpoint in make_saver().stored_checkpoints()] == [8, 6, 3]


def test_rewind_deletes_newer_checkpoints(make_saver):
    steps: list[list[int]] = []

    def look(learner: Any) -> None:
        if learner.progress.step == 4:
            steps.append([checkpoint.step for checkpoint in make_saver().stored_checkpoints()])

    looks = CustomCallback(look, StepEnd, access={"step": {"loss": Read()}})
    learner = summing(None, Passes(10), Back({8: 5}), looks, make_saver())
    with pytest.warns(ResumeWarning, match="The run goes back from step 8"):
        learner.fit(1)
    assert steps == [[3], [3]]  # the checkpoint of step 6 is deleted before step 4 runs again


def test_second_rewind_uses_earlier_checkpoint(make_saver):
    learner = summing(None, Passes(10), Back({8: 7, 7: 7}), make_saver())
    with pytest.warns(ResumeWarning) as warned:
        learner.fit(1)
    assert [str(warning.message).split(" to the checkpoint ")[0] for warning in warned] == [
        "The run goes back from step 7",
        "The run goes back from step 8",
    ]
    assert batches(learner) == [0, 1, 2, 9]


class Locked(MemorySaver, RunLock):
    def __init__(self, kept: list[Snapshot], log: list[str], taken: bool = False) -> None:
        super().__init__(kept)
        self.log, self.taken = log, taken

    def lock(self) -> None:
        if self.taken:
            raise CheckpointError("Another run has the lock.", fix="wait for its end")
        self.log.append("lock")

    def unlock(self) -> None:
        self.log.append("unlock")

    def load_state_dict(self, state: Any) -> None:
        self.log.append("restore")

    def state_dict(self) -> dict[str, Any]:
        return {"some": 1}

    @on(FitBegin | FitEnd, AbstractTrainingPhase)
    def note(self, event: Any, phase: AbstractTrainingPhase, learner: Any) -> None:
        self.log.append(type(event).__name__)


def test_run_locks_before_restore_and_unlocks_after_all_handlers():
    kept: list[Snapshot] = []
    log: list[str] = []
    learner_of(Locked(kept, log)).fit(1)
    assert log == ["lock", "FitBegin", "FitEnd", "unlock"]
    log.clear()
    learner_of(Locked(kept, log)).fit(2, resume=True)
    assert log == ["lock", "restore", "FitBegin", "FitEnd", "unlock"]
    log.clear()
    taken = Locked(kept, log, taken=True)
    with pytest.raises(CheckpointError, match="Another run has the lock"):
        learner_of(taken).fit(2, resume=True)
    assert set(log) == {"unlock"}


def test_snapshot_is_packed_and_unpacked_bit_for_bit():
    half, keys = jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3), jax.random.split(jax.random.key(0), 3)
    trees = {"params": {"a.b/c": [half], "": np.float64(0.1), "n": np.zeros((0, 2), np.int8)}, "opt_state": (keys, ())}
    host = {"step": 3, "nan": float("inf")}
    snapshot = Snapshot(3, 1, trees, host, {"0": np.asarray(half)}, {"devices": []}, "ema", {"test": None})
    content, arrays = snapshot.pack()
    assert {name: (str(array.dtype), array.shape) for name, array in arrays.items()} == {
        "params/%0": ("float64", ()),
        "params/a%2Eb%2Fc.0": ("uint16", (2, 3)),
        "params/n": ("int8", (0, 2)),
        "opt_state/0": ("uint32", (3, 2)),
        "host/0": ("uint16", (2, 3)),
    }
    found = Snapshot.unpack(json.loads(json.dumps(content)), arrays)
    assert (found.step, found.epoch, found.host, found.about) == (3, 1, host, {"devices": []})
    assert (found.average, found.averages) == ("ema", {"test": None})
    assert found.arrays["0"].tobytes() == np.asarray(half).tobytes()
    assert LoadedCheckpoint(found, "x").arrays() == LoadedCheckpoint(snapshot, "x").arrays()
    read = LoadedCheckpoint(found, "x").read(trees)
    assert jax.tree.structure(read.trees) == jax.tree.structure(trees)
    assert np.asarray(read.trees["params"]["a.b/c"][0]).tobytes() == np.asarray(half).tobytes()
    assert jnp.array_equal(read.trees["opt_state"][0], keys)


def test_two_savers_raise():
    kept: list[Snapshot] = []
    learner = learner_of(MemorySaver(kept), NpzSaver(Path("unused")))
    with pytest.raises(CheckpointError) as caught:
        learner.fit(1, resume=True)
    assert str(caught.value) == (
        "`fit(resume=True)` continues the run of a Checkpointer, and this Learner has 2.\n"
        "  fix:   keep one Checkpointer in the callbacks\n"
        "     or: to continue from an existing checkpoint, call `learner.restore(path)` before `fit`"
    )


def test_other_run_raises(refused):
    kept: list[Snapshot] = []
    learner_of(MemorySaver(kept)).fit(1)
    other = fluxcb.Learner(
        (lambda key, xs: {"w": jnp.zeros((2, 3))}, lambda params, xs: xs @ params["w"]),
        lambda outputs, ys: jnp.mean((outputs - ys) ** 2),
        optax.adam(0.1),
        data=([(np.ones((4, 2), np.float32), np.ones((4, 3), np.float32))] * 5, [(np.ones((4, 2)), np.ones((4, 3)))]),
        callbacks=[MemorySaver(kept), Metrics(), Recorder(), ParameterEMA(0.9), Draws()],
        default_callbacks=False,
    )
    with pytest.raises(ResumeError) as caught:
        other.fit(1, resume=True)
    assert caught.value.what == f"snapshot {len(kept) - 1} is a checkpoint of a different run."
    assert "params: layers.0.b.0 (bfloat16[3]) is missing now" in caught.value.where
    # `learner.restore` and `load_params` cannot read the checkpoints of this saver.
    assert caught.value.fix == ("build the Learner as it was when the run began",)
