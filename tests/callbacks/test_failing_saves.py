"""A save that fails in the background raises its error at the next event, names the step, and is never lost."""

import errno
import logging
import os
import signal
import threading
from concurrent.futures import wait

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fluxcb import Append, Callback, CancelFitting, CheckpointError, Learner, on
from fluxcb.callbacks import Checkpointer, CustomCallback, Metrics, MinSaver
from fluxcb.checkpoints.failures import fix_of, quiet_orbax
from fluxcb.checkpoints.run_folder import entries_of
from fluxcb.checkpoints.saving import make_manifest
from fluxcb.checkpoints.verification import verify_checkpoint
from fluxcb.events import FitEnd, StepEnd
from fluxcb.phases import TrainingPhase


class Disk:
    """A disk that fails for the saves of some steps: at once, or when it is told to."""

    def __init__(self, monkeypatch, folder, *steps):
        self.folder, self.steps = str(folder), steps
        self.goes_on = threading.Event()
        self.goes_on.set()
        monkeypatch.setattr("fluxcb.checkpoints.saving.make_manifest", self)

    def __call__(self, snapshot, run, value, folder):
        if snapshot.step in self.steps and str(folder).startswith(self.folder):
            assert self.goes_on.wait(600)
            raise OSError(errno.EIO, "as ordered")
        return make_manifest(snapshot, run, value, folder)


def message(folder, step):
    return f"Cannot write the checkpoint of step {step} to {folder}: {os.strerror(errno.EIO)}."


def training(*callbacks, batches=4):
    return Learner.from_loss(
        {"w": jnp.zeros(())},
        lambda params, batch, key: -params["w"] + 0 * jnp.sum(batch),
        optax.sgd(1.0),
        data=[np.zeros(1, np.float32)] * batches,
        callbacks=callbacks,
        default_callbacks=False,
        steps_per_call=1,
    )


class Bounds(Callback):
    """Call something after each step, before the next is run: so it is certain when what happens."""

    def __init__(self, act):
        self.act = act

    def stateaccess(self):
        return {"control": Append()}

    @on(StepEnd, TrainingPhase)
    def look(self, event, phase, learner):
        self.act(learner.progress.step)


def there(folder):
    return [verify_checkpoint(entry.path).step for entry in entries_of(folder)]


def failed(disk, saver):
    """Let the save at hand fail, and return when it has."""
    disk.goes_on.set()
    wait([saver._pending], 60)


def test_the_error_is_raised_at_the_next_event(tmp_path, monkeypatch):
    disk = Disk(monkeypatch, tmp_path, 3)
    disk.goes_on.clear()
    saver, ended = Checkpointer(tmp_path, steps=3), []
    learner = training(
        Bounds(lambda step: failed(disk, saver) if step == 4 else None),  # behind the saver
        saver,
        CustomCallback(lambda learner: ended.append(learner.progress.step), FitEnd),
        batches=9,
    )
    with pytest.raises(CheckpointError) as raised:
        learner.fit(steps=9)
    assert raised.value.what == message(tmp_path, 3)
    assert raised.value.why == "older checkpoints are unchanged"
    assert (learner.step, ended, there(tmp_path)) == (5, [5], [0])
    note = raised.value.__notes__[0]
    assert note.startswith(f"raised by {saver!r} in SnapshotSaver.check  ")
    assert ", at StepEnd x LossTrainingPhase, epoch 1, step 5 (5 in this epoch)" in note


def test_the_next_fit_saves_again_without_the_error(tmp_path, monkeypatch):
    disk = Disk(monkeypatch, tmp_path, 2)
    learner = training(Checkpointer(tmp_path, steps=2))
    with pytest.raises(CheckpointError):
        learner.fit(steps=2)
    disk.steps = ()
    learner.fit(steps=2)
    assert (learner.step, learner.stop_reason, there(tmp_path)) == (4, None, [0, 4, 4])


def test_the_fix_continues_from_the_newest_checkpoint(tmp_path, monkeypatch):
    disk = Disk(monkeypatch, tmp_path, 4)
    with pytest.raises(CheckpointError) as raised:
        training(Checkpointer(tmp_path, steps=2)).fit(steps=4)
    fix = "continue later from the newest checkpoint: `learner.fit(..., resume=True)`"
    assert raised.value.fix == ("free some space, or use another directory", fix)
    disk.steps = ()
    learner = training(Checkpointer(tmp_path, steps=2))
    learner.fit(steps=6, resume=True)
    assert (learner.step, there(tmp_path)) == (6, [4, 6, 6])  # three are kept


def test_the_fix_of_a_saver_without_a_checkpointer_is_to_restore(tmp_path, monkeypatch):
    def made():
        return training(Metrics(), MinSaver(tmp_path, "training/loss"))

    folder = tmp_path / "min-training-loss"
    disk = Disk(monkeypatch, folder, 8)
    with pytest.raises(CheckpointError) as raised:
        made().fit(3)
    call = f"learner.restore({str(folder)!r})"
    fix = (
        "continue later from the newest checkpoint: if it has a `Checkpointer`, `learner.fit(..., resume=True)`; "
        f"otherwise, call `{call}` before `fit`, with the argument "
        '`allow=("callbacks",)` if the list of callbacks has changed'
    )
    assert raised.value.fix == ("free some space, or use another directory", fix)
    disk.steps = ()
    learner = made()
    learner.restore(str(folder))
    assert learner.step == 4
    learner.fit(2)
    assert (learner.step, there(folder)) == (12, [12])


def test_without_a_checkpoint_the_fix_does_not_promise_to_continue(tmp_path, monkeypatch):
    Disk(monkeypatch, tmp_path, 4)
    with pytest.raises(CheckpointError) as raised:
        training(Metrics(), MinSaver(tmp_path, "training/loss")).fit(1)
    assert raised.value.fix == ("free some space, or use another directory",)


def nothing(step):
    pass


def cancel(step):
    if step == 3:
        raise CancelFitting("enough")


def terminate(step):
    if step == 3:
        signal.raise_signal(signal.SIGTERM)


@pytest.mark.filterwarnings("ignore:SIGTERM ended the fit:RuntimeWarning")
@pytest.mark.parametrize(("act", "steps", "last"), [(nothing, 2, 2), (cancel, 8, 3), (terminate, 8, 3)])
def test_the_error_is_raised_if_the_fit_ends_right_away(tmp_path, monkeypatch, default_handlers, act, steps, last):
    Disk(monkeypatch, tmp_path, last)
    learner = training(Bounds(act), Checkpointer(tmp_path, epochs=100))
    with pytest.raises(CheckpointError) as raised:
        learner.fit(steps=steps)
    assert raised.value.what == message(tmp_path, last)
    assert (learner.stop_reason or "").startswith(f"CheckpointError: {message(tmp_path, last)}")
    assert (learner.step, there(tmp_path)) == (last, [0])


@pytest.fixture
def default_handlers():
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def fail(step):
    if step == 3:
        raise ValueError("the user's own")


def press(step):
    if step == 3:
        signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(("act", "kind", "step"), [(fail, ValueError, 2), (press, KeyboardInterrupt, 3)])
def test_the_error_is_a_note_of_another_exception(tmp_path, monkeypatch, default_handlers, act, kind, step):
    disk = Disk(monkeypatch, tmp_path, step)
    disk.goes_on.clear()
    learner = training(
        CustomCallback(lambda learner: disk.goes_on.set(), FitEnd),
        Bounds(act),
        Checkpointer(tmp_path, steps=2 if act is fail else 100),
    )
    with pytest.raises(kind) as raised:
        learner.fit(steps=8)
    (note,) = [note for note in raised.value.__notes__ if note.startswith("and at FitEnd")]
    assert note.startswith(f"and at FitEnd: CheckpointError: {message(tmp_path, step)}")
    assert there(tmp_path) == [0]


def test_a_failing_saver_does_not_prevent_another_from_saving(tmp_path, monkeypatch):
    Disk(monkeypatch, tmp_path / "one", 4)
    savers = [Checkpointer(tmp_path / name, steps=4, keep_last=9) for name in ("one", "two")]
    learner = training(*savers)
    with pytest.raises(CheckpointError) as raised:
        learner.fit(steps=8)
    assert raised.value.what == message(tmp_path / "one", 4)
    last = learner.step
    assert 4 <= last <= 8  # at the next event at which the thread had failed
    assert there(tmp_path / "one") == [0]
    assert there(tmp_path / "two")[:2] == [0, 4]


def test_waiting_for_a_failed_save_does_not_prevent_another_saver_from_saving(tmp_path, monkeypatch):
    disk = Disk(monkeypatch, tmp_path / "one", 4)
    disk.goes_on.clear()
    savers = [Checkpointer(tmp_path / name, steps=4, keep_last=9) for name in ("one", "two")]
    learner = training(
        Bounds(lambda step: threading.Timer(0.2, disk.goes_on.set).start() if step == 8 else None), *savers
    )
    with pytest.raises(CheckpointError) as raised:
        learner.fit(steps=12)  # the save of step 8 waits for that of step 4
    assert raised.value.what == message(tmp_path / "one", 4)
    assert learner.step == 8
    assert (there(tmp_path / "one"), there(tmp_path / "two")) == ([0], [0, 4, 8])


def test_all_failing_savers_are_reported(tmp_path, monkeypatch):
    disk = Disk(monkeypatch, tmp_path, 2)
    disk.goes_on.clear()
    savers = [Checkpointer(tmp_path / name, steps=100) for name in ("one", "two")]
    learner = training(CustomCallback(lambda learner: disk.goes_on.set(), FitEnd), *savers)
    with pytest.raises(ExceptionGroup) as raised:
        learner.fit(steps=2)
    assert [str(error).splitlines()[0] for error in raised.value.exceptions] == [
        message(tmp_path / "one", 2),
        message(tmp_path / "two", 2),
    ]


def test_outside_a_fit_the_error_is_raised_immediately(tmp_path, monkeypatch):
    Disk(monkeypatch, tmp_path, 0)
    learner = training(Checkpointer(tmp_path))
    with pytest.raises(CheckpointError) as raised:
        learner.trigger()
    assert raised.value.what == message(tmp_path, 0)
    assert os.listdir(tmp_path) == ["fluxcb.lock"]


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (OSError(errno.ENOSPC, "full"), "free some space, or use another directory"),
        (
            OSError(errno.EMFILE, "files"),
            "raise the limit of open files of the process: `ulimit -n 4096` before the program starts",
        ),
        (ValueError("os_error_code='13'"), "make the directory writable, or use another directory"),
    ],
)
def test_fix_follows_from_the_cause(tmp_path, error, fix):
    assert fix_of(error, tmp_path) == fix


def test_fix_of_a_renamed_directory_works(tmp_path):
    folder, other = tmp_path / "run", tmp_path / "other"
    moves = Bounds(lambda step: folder.rename(other) if step == 2 else None)
    with pytest.raises(CheckpointError) as raised:
        training(Checkpointer(folder, steps=3), moves).fit(steps=4)
    fix = f"if the directory was moved or renamed, move it back to {folder}; otherwise, use another directory"
    assert raised.value.fix == (fix,)
    other.rename(folder)
    learner = training(Checkpointer(folder, steps=3))
    learner.fit(steps=4, resume=True, allow=("callbacks",))  # without `moves`
    assert learner.step == 4


def test_fix_of_a_directory_in_place_of_the_lock_works(tmp_path):
    (tmp_path / "fluxcb.lock").mkdir()
    with pytest.raises(CheckpointError) as raised:
        training(Checkpointer(tmp_path)).fit(1)
    lock = tmp_path / "fluxcb.lock"
    assert raised.value.fix == (f"delete the directory {str(lock)!r}, where fluxcb writes a file",)
    lock.rmdir()
    training(Checkpointer(tmp_path)).fit(1)


def test_log_records_of_orbax_are_dropped_while_a_checkpoint_is_written(caplog, monkeypatch):
    logger = logging.getLogger("absl")
    monkeypatch.setattr(logger, "propagate", False)

    def log():
        for path in ("/lib/orbax/checkpoint/future.py", "/lib/other.py"):
            logger.handle(logger.makeRecord("absl", logging.ERROR, path, 1, path, (), None))

    logger.addHandler(caplog.handler)
    try:
        with quiet_orbax():
            log()
        assert [record.message for record in caplog.records] == ["/lib/other.py"]
        log()
        assert len(caplog.records) == 3
    finally:
        logger.removeHandler(caplog.handler)
