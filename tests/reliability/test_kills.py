"""A run that is killed at random moments and resumed until it is done ends with the same result."""

import contextlib
import io
import json
import multiprocessing
import os
import random
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

HERE = Path(__file__).resolve().parent
LONG = int(os.environ.get("FLUXCB_LONG", "1"))
KILLS = 10 * LONG  # for each form
"""`FLUXCB_LONG=25 pytest tests/reliability/test_kills.py` is the long form: 500 kills."""

ENDED = 120


def train(folder, steps_per_call, delay):
    """Run the training in this process, which was forked from one with all imports."""
    import killed_run

    with open(os.devnull, "w") as nothing, contextlib.redirect_stdout(nothing):
        killed_run.main(str(folder), steps_per_call, str(delay))


@pytest.fixture(scope="module")
def start():
    """Return a function that starts a training in a new process without repeating the imports."""
    sys.path.insert(0, str(HERE))
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["killed_run", "orbax.checkpoint", "fluxcb.checkpoints.saving"])

    def started(folder, steps_per_call, delay):
        process = context.Process(target=train, args=(str(folder), steps_per_call, delay))
        process.start()
        return process

    yield started
    sys.path.remove(str(HERE))


def until(found, process, seconds=120):
    """Wait until a file exists or the process has ended."""
    end = time.monotonic() + seconds
    while not found.exists() and process.is_alive():
        assert time.monotonic() < end, f"{found.name} did not appear in {seconds} s"
        time.sleep(0.005)


def saving(folder):
    """Return whether a checkpoint is being written."""
    return any(name.startswith(".") for name in os.listdir(folder / "run")) if (folder / "run").exists() else False


@pytest.fixture(scope="module")
def expected(start, tmp_path_factory):
    """Return the outcome and the logs of a training that is not killed."""
    folder = tmp_path_factory.mktemp("unkilled")
    process = start(folder, "1", 0.0)
    process.join(300)
    assert process.exitcode == 0
    return json.loads((folder / "outcome.json").read_text())


@pytest.mark.parametrize("steps_per_call", ["1", "auto"])
def test_killed_and_resumed_run_matches_uninterrupted_run(start, expected, tmp_path, steps_per_call):
    seed = int(os.environ.get("FLUXCB_SEED", "20261121"))
    draw = random.Random(f"{seed} {steps_per_call}")
    delay = 0.004 if steps_per_call == "1" else 0.002
    kills = inside = rounds = 0
    folder = tmp_path / "0"
    folder.mkdir()
    while kills < KILLS or (inside == 0 and kills < 10 * KILLS):  # a slow machine may leave little time for a save
        (folder / "begun").unlink(missing_ok=True)
        process = start(folder, steps_per_call, delay)
        until(folder / "begun", process)
        aim_at_a_save = draw.random() < 0.4
        end = time.monotonic() + draw.uniform(0.0, 1.2)
        while process.is_alive() and time.monotonic() < end:
            if aim_at_a_save and saving(folder):
                time.sleep(draw.uniform(0.0, 0.05))
                break
            time.sleep(0.001)
        if process.is_alive():
            inside += saving(folder)
            process.kill()
            kills += 1
        process.join(60)
        if process.exitcode == 0:
            rounds += 1
            check(folder, expected, f"seed {seed}, after {kills} kills")
            folder = tmp_path / str(rounds)
            folder.mkdir()
    process = start(folder, steps_per_call, 0.0)
    process.join(300)
    assert process.exitcode == 0
    check(folder, expected, f"seed {seed}, after {kills} kills")
    print(f"{kills} kills, {inside} of them inside a save, {rounds + 1} trainings, seed {seed}")
    assert inside > 0, "no kill came inside a save, so nothing was shown about saves"


def check(folder, expected, told):
    """Compare the outcome of a training with the expected one."""
    found = json.loads((folder / "outcome.json").read_text())
    assert found.keys() == expected.keys(), told
    assert [name for name in expected if found[name] != expected[name]] == [], told


def test_comparison_detects_missing_key(expected, monkeypatch, tmp_path):
    """If the random key is left out of the checkpoint, the results differ."""
    monkeypatch.syspath_prepend(str(HERE))
    import killed_run

    from fluxcb._run.snapshots import Snapshots

    with contextlib.redirect_stdout(io.StringIO()):
        first = killed_run.make(tmp_path, 1)
        first.fit(3)
        restore = Snapshots.restore

        def forgetful(self, *restored, **how):
            lines = restore(self, *restored, **how)
            self._core.state.train.run_key = killed_run.jax.random.key(8)
            self._core.state.train.set_counters(self._core.state.progress)
            return lines

        monkeypatch.setattr(Snapshots, "restore", forgetful)
        second = killed_run.make(tmp_path, 1)
        second.fit(killed_run.EPOCHS, resume=True)
        found = killed_run.outcome(second, tmp_path)
    assert second.step == ENDED
    assert "params['w1']" in [name for name in expected if found[name] != expected[name]]
