"""Starting a run that was killed at any operation, starting it twice, or starting it while a forked process lives."""

import contextlib
import json
import multiprocessing
import os
import re
import signal
import socket
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from fluxcb import Callback, CheckpointError, RewindFitting, callbacks_as_hook
from fluxcb.callbacks import Checkpointer, LogMetrics, Metrics, Monitors
from fluxcb.checkpoints import ResumeWarning
from fluxcb.checkpoints.run_folder import RunFolder, entries_of
from fluxcb.logging import JSONLinesBackend
from tests.changed_callbacks import changes_arguments

pytest.importorskip("tensorboardX")

pytestmark = pytest.mark.integration

HERE = Path(__file__).resolve().parent
FILES = {"dumps", "events", "log.csv", "log.jsonl", "run"}


@pytest.fixture(scope="module")
def program():
    sys.path.insert(0, str(HERE))
    import starting_run

    yield starting_run
    sys.path.remove(str(HERE))


@pytest.fixture(scope="module")
def run(program):
    """Return a function that calls a function of the program in a new process, and returns its exit code."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["starting_run", "orbax.checkpoint", "fluxcb.checkpoints.saving"])

    def run(function, *args):
        process = context.Process(target=function, args=args)
        process.start()
        process.join(120)
        assert process.exitcode is not None, "the process does not end"
        return process.exitcode

    return run


def finish(program, folder, *callbacks, **given):
    """Train to the end in this process."""
    learner = program.make(folder, *callbacks, **given)
    try:
        learner.fit(program.EPOCHS, resume=True)
    finally:
        learner.callbacks.get(Monitors).close()
    return learner


def check_files(program, folder):
    """Compare the logs and dumps with those of an uninterrupted run."""
    steps = list(range(program.STEPS + 1))
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    assert [(line["step"], line["count"]) for line in lines] == [(step, step) for step in steps]
    header, *rows = [line.split(",") for line in (folder / "log.csv").read_text().splitlines()]
    assert header == ["step", "epoch", "time", "count"]
    assert [(int(row[0]), float(row[3])) for row in rows] == [(step, step) for step in steps]
    if find_spec("tensorboard"):  # TensorBoard's own reader; the group `integrations` has it
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(folder / "events"))
        events.Reload()
        assert [(event.step, event.value) for event in events.Scalars("count")] == [(step, step) for step in steps]
    assert [path.name for path in (folder / "events").iterdir() if path.is_dir()] == []
    dumps = sorted((folder / "dumps").iterdir())
    assert [int(path.stem.removeprefix("arrays-")) for path in dumps] == steps[1:]
    assert [float(np.sum(np.load(path)["params.w"])) for path in dumps] == steps[1:]


# --- killed ---------------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_run_killed_at_any_operation_can_be_restarted(program, run, tmp_path, times):
    # The first checkpoint takes 37 operations, and the next one begins after 66.
    for operations in range(0, 56, max(1, 8 // times)):
        assert run(program.killed_at_operation, str(tmp_path), operations) == -signal.SIGKILL
        # A kill before the first checkpoint leaves nothing that a later start has to move away.
        assert {path.name for path in tmp_path.iterdir()} <= FILES
    learner = finish(program, tmp_path)
    assert learner.step == program.STEPS
    check_files(program, tmp_path)


def test_run_whose_first_save_failed_can_be_restarted(program, run, tmp_path):
    assert run(program.failing_first_save, str(tmp_path)) == 0
    assert (tmp_path / "refused.txt").read_text() == (
        f"Cannot write the checkpoint of step 0 to {tmp_path / 'run'}: File too large.\n"
        "  why:   older checkpoints are unchanged\n"
        "  fix:   raise the limit of the size of files: `ulimit -f unlimited`, or use another file system"
    )
    (tmp_path / "refused.txt").unlink()
    assert {path.name for path in tmp_path.iterdir()} <= FILES
    learner = finish(program, tmp_path)
    assert learner.step == program.STEPS
    check_files(program, tmp_path)


# --- started a second time ------------------------------------------------------------------------------------------


def refusal(folder):
    return re.compile(
        f"Another run is writing checkpoints to {re.escape(str(folder / 'run'))}: "
        f"process {os.getpid()} on {re.escape(socket.gethostname())}, since [-0-9]+ [:0-9]+\\.\n"
        "  why:   two runs in one directory would mix their checkpoints\n"
        "  fix:   use a separate directory for each run"
    )


@pytest.mark.parametrize("saves_first", [False, True])
def test_rejected_second_start_changes_no_file_of_live_run(program, run, tmp_path, saves_first):
    told = []

    def start():
        told.append(run(program.second_start, str(tmp_path)))

    finish(program, tmp_path, at_5=start, saves_first=saves_first)
    assert told == [0]
    assert refusal(tmp_path).fullmatch((tmp_path / "refused.txt").read_text())
    check_files(program, tmp_path)


def loop(folder, at_5=lambda: None):
    """Train in a hand-written loop with eight steps and a log."""
    state = {"params": {"w": np.zeros(())}}
    monitors = Monitors(JSONLinesBackend(folder / "log.jsonl"))
    callbacks = [monitors, LogMetrics(), Metrics(), Checkpointer(folder / "run", steps=3)]
    with callbacks_as_hook(
        callbacks, {"loss": np.float32(0)}, state=lambda: state, set_state=state.update, resume=True
    ) as hook:
        for step in range(hook.step + 1, 9):
            hook.after_step(step, {"loss": np.float32(step)})
            if step == 5:
                at_5()
    monitors.close()


def test_rejected_second_start_of_loop_changes_no_file_of_live_run(tmp_path):
    told = []

    def start():
        with pytest.raises(CheckpointError) as raised:
            loop(tmp_path)
        told.append(str(raised.value))

    loop(tmp_path, start)
    assert [refusal(tmp_path).fullmatch(text) is not None for text in told] == [True]
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["training/step/loss"] for line in lines] == list(range(1, 9))


class Restored(Callback):
    """Try to lock a directory whenever one of its checkpoints is restored."""

    def __init__(self, folder):
        self.folder, self.refused = RunFolder(folder), []

    def state_dict(self):
        return {"saved": True}

    def load_state_dict(self, state):
        with pytest.raises(CheckpointError) as raised:
            self.folder.lock()
        self.refused.append(str(raised.value).partition(":")[0])


@changes_arguments("callbacks.act")
def test_checkpoint_is_restored_only_under_lock(program, tmp_path):
    def go_back():
        raise RewindFitting("once", before=5, at_most=1)

    message = f"Another run is writing checkpoints to {tmp_path / 'run'}"
    first = Restored(tmp_path / "run")
    with pytest.warns(ResumeWarning, match="The run goes back from step 5"):
        finish(program, tmp_path, first, at_5=go_back)
    assert first.refused == [message]
    second = Restored(tmp_path / "run")
    finish(program, tmp_path, second)
    assert second.refused == [message]
    after = RunFolder(tmp_path / "run")
    after.lock()  # the fit has released its lock
    after.unlock()


# --- while a forked process lives -----------------------------------------------------------------------------------


@changes_arguments("callbacks.act")
def test_killed_run_can_be_restarted_while_forked_process_lives(program, run, tmp_path):
    assert run(program.killed_with_a_child, str(tmp_path)) == -signal.SIGKILL
    child = int((tmp_path / "child.txt").read_text())
    try:
        os.kill(child, 0)  # it lives
        learner = finish(program, tmp_path)
    finally:
        os.kill(child, signal.SIGKILL)
    assert learner.step == program.STEPS
    check_files(program, tmp_path)


def test_forked_process_neither_holds_nor_releases_lock(tmp_path, recwarn):
    folder, other = RunFolder(tmp_path), RunFolder(tmp_path)
    folder.lock()
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException):
            folder.unlock()
            os.write(writes, b"unlocked")
        os._exit(0)
    assert os.read(reads, 8) == b"unlocked"
    os.waitpid(child, 0)
    os.close(reads)
    os.close(writes)
    recwarn.clear()  # JAX warns of every fork
    folder.require_lock()
    with pytest.raises(CheckpointError, match=f"process {os.getpid()} on "):
        other.lock()
    folder.unlock()
    other.lock()
    other.unlock()


@pytest.mark.parametrize("written", ["", "process {dead} on {host}, since 2026-01-01 00:00:00", "no such text"])
def test_lock_error_does_not_name_ended_process(tmp_path, refused, written):
    import fcntl

    context = multiprocessing.get_context("forkserver")
    process = context.Process(target=int)
    process.start()
    process.join()
    (tmp_path / "fluxcb.lock").write_text(written.format(dead=process.pid, host=socket.gethostname()))
    text = (
        f"Another run is writing checkpoints to {tmp_path}: an unknown process.\n"
        "  why:   two runs in one directory would mix their checkpoints\n"
        "  fix:   use a separate directory for each run"
    )
    with open(tmp_path / "fluxcb.lock", "rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with refused(CheckpointError, text):
            RunFolder(tmp_path).lock()
    assert entries_of(tmp_path) == []
