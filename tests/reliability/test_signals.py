"""SIGTERM and Ctrl-C at any point of the training save a checkpoint, and the run resumes from it."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fluxcb.callbacks import Checkpointer, CustomCallback
from fluxcb.checkpoints.run_folder import entries_of
from fluxcb.checkpoints.verification import verify_checkpoint
from fluxcb.events import FitBegin, FitEnd, StepEnd, Trigger
from fluxcb.phases import TrainingPhase
from fluxcb.testing import testlearner
from tests.changed_callbacks import changes_arguments

pytestmark = changes_arguments("callbacks.moments.act")

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TERM, INT = signal.SIGTERM, signal.SIGINT


@pytest.fixture(scope="module")
def signalled():
    """Return a function that trains in a new process, which gets signals where it waits for them."""
    sys.path.insert(0, str(HERE))
    import signalled_run

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["signalled_run", "orbax.checkpoint"])

    def run(folder, places, *signals, times=1, steps_per_call=1):
        process = context.Process(target=signalled_run.main, args=(str(folder), places, times, steps_per_call))
        process.start()
        assert process.pid is not None
        try:
            for number, sent in enumerate(signals, 1):
                until(folder / f"waits {number}", process)
                time.sleep(0.2 * (number > 1))  # until it waits elsewhere for what waits here
                os.kill(process.pid, sent)
                (folder / f"sent {number}").touch()
            process.join(120)
        finally:
            process.kill()
        told = folder / "told.json"
        return process.exitcode, json.loads(told.read_text()) if told.exists() else None

    yield run
    sys.path.remove(str(HERE))


def until(found, process):
    end = time.monotonic() + 120
    while not found.exists():
        assert process.is_alive(), f"the training ended before {found.name}"
        assert time.monotonic() < end, f"{found.name} did not appear"
        time.sleep(0.005)


@pytest.fixture(scope="module")
def resumed(tmp_path_factory):
    """Return a function that resumes a run and returns the differences from an uninterrupted one."""
    sys.path.insert(0, str(HERE))
    import signalled_run
    from interrupted import differing, outcome, spared

    def outcome_of(folder, *, resume):
        learner = signalled_run.make(folder)
        learner.fit(signalled_run.EPOCHS, resume=resume)
        found = outcome(learner, folder)
        return {name: value for name, value in found.items() if not name.startswith("moments.")}

    with spared():
        expected = outcome_of(tmp_path_factory.mktemp("straight"), resume=False)
        yield lambda folder: differing(expected, outcome_of(folder, resume=True))
    sys.path.remove(str(HERE))


def newest(folder):
    """Return the step of the newest checkpoint, which must be complete, and its position within an epoch."""
    entries = entries_of(folder / "run")
    manifests = [verify_checkpoint(entry.path) for entry in entries]
    assert not [name for name in os.listdir(folder / "run") if name.startswith(".")]
    at = manifests[-1].at
    return manifests[-1].step, at[:2] if at is not None else None


IN_AN_EPOCH, BETWEEN = ["FitStopping", "EpochEnd", "FitEnd"], ["FitStopping", "FitEnd"]

PLACES = {
    # Where it waits for a signal, at which step: the events that follow, or None where steps may have been dispatched.
    "FitBegin training 0": (0, ["EpochBegin", *IN_AN_EPOCH]),
    "writing 0": (0, None),
    "compiling": (1, None),
    "EpochBegin training 6": (6, IN_AN_EPOCH),
    "batch 9": (7, None),
    "StepEnd training 8": (8, IN_AN_EPOCH),
    "StepEnd training 9": (9, None),
    "deleting": (8, None),
    "StepEnd training 18": (18, IN_AN_EPOCH),
    "EpochEnd training 12": (12, ["EpochBegin", *IN_AN_EPOCH]),
    "EpochBegin validation 12": (12, IN_AN_EPOCH),
    "StepEnd validation 12": (12, None),
    "EpochEnd validation 12": (12, ["Trigger", *BETWEEN]),
    "Trigger training 12": (12, BETWEEN),
    "Trigger training 18": (18, BETWEEN),
    "FitStopping training 18": (18, ["FitEnd"]),
    "FitEnd training 18": (18, []),
}
WITH_BOTH = ("compiling", "writing 0", "StepEnd training 9", "StepEnd validation 12", "Trigger training 12")


@pytest.mark.parametrize(
    ("place", "number"),
    [(place, number) for place in PLACES for number in (TERM, INT) if number == TERM or place in WITH_BOTH],
)
def test_signal_saves_checkpoint_of_current_step(signalled, resumed, tmp_path, place, number):
    step, follow = PLACES[place]
    code, told = signalled(tmp_path, [place], number)
    if number == TERM:
        assert (code, told["reason"], told["raised"]) == (0, "preempted", "")
    else:
        assert (code, told["reason"], told["raised"]) == (130, "KeyboardInterrupt", "KeyboardInterrupt()")
    assert told["given back"]
    names = [moment.split()[0] for moment in told["moments"]]
    assert names.count("FitStopping") == names.count("FitEnd") == 1
    if follow is not None:
        assert names[told["moments"].index(place) + 1 :] == follow
        assert told["step"] == step
    else:
        assert names[-3:] == IN_AN_EPOCH or names[-2:] == BETWEEN
        # The window at hand is finished, and the next, if it runs already. The Checkpointer ends one at each 4th step.
        assert step <= told["step"] <= step + 8
    if place != "FitEnd training 18":  # whose checkpoint has been written
        assert newest(tmp_path) == (told["step"], position(told["moments"]))
    assert resumed(tmp_path) == []


def position(moments):
    """Return the phase and step at which FitStopping was emitted within an epoch, or None between two epochs."""
    before = moments[: [moment.split()[0] for moment in moments].index("FitStopping")]
    after = moments[len(before) + 1].split()
    if after[0] == "FitEnd":
        return None
    open_epochs = []
    for moment in before:
        name, phase, _ = moment.split()
        if name == "EpochBegin":
            open_epochs.append([phase, 0])
        elif name == "EpochEnd":
            open_epochs.pop()
        elif name == "StepEnd":
            open_epochs[-1][1] += 1
    (position,) = open_epochs
    return position


@pytest.mark.parametrize(
    ("places", "signals", "reason"),
    [
        (["StepEnd training 9"], (INT, INT), "KeyboardInterrupt"),
        (["StepEnd training 9"], (TERM, INT), "KeyboardInterrupt"),
        (["compiling"], (INT, INT), "KeyboardInterrupt"),
        (["FitStopping training 18"], (INT, INT), "KeyboardInterrupt"),
    ],
)
def test_second_ctrl_c_ends_fit_immediately(signalled, resumed, tmp_path, places, signals, reason):
    code, told = signalled(tmp_path, list(places), *signals, times=2)
    raised, *notes = told["raised"].splitlines()
    assert (code, told["reason"], raised) == (130, reason, "KeyboardInterrupt()")
    assert all(note.startswith("raised by AtMoments() in AtMoments.note") for note in notes)
    assert told["given back"]
    last = [moment for moment in told["moments"] if not moment.startswith("FitEnd")][-1]
    assert last == (places[0] if places != ["compiling"] else "EpochBegin training 0")
    assert told["moments"][-1].startswith("FitEnd")
    step, _ = newest(tmp_path)
    assert step == {"compiling": 0, "StepEnd training 9": 8, "FitStopping training 18": 16}[places[0]]
    assert resumed(tmp_path) == []


def test_second_ctrl_c_waits_for_last_checkpoint(signalled, resumed, tmp_path):
    code, told = signalled(tmp_path, ["StepEnd training 8", "writing 8"], INT, INT)
    assert (code, told["raised"].splitlines()[0]) == (130, "KeyboardInterrupt()")
    assert told["moments"][-1] == "FitEnd training 8"
    assert newest(tmp_path) == (8, ["training", 2])
    assert resumed(tmp_path) == []


def test_sigterm_after_ctrl_c_ends_process_and_keeps_older_checkpoints(signalled, resumed, tmp_path):
    assert signalled(tmp_path, ["StepEnd training 9"], INT, TERM, times=2) == (-TERM, None)
    assert [verify_checkpoint(entry.path).step for entry in entries_of(tmp_path / "run")] in ([0, 4], [0, 4, 8], [4, 8])
    assert resumed(tmp_path) == []


def test_comparison_detects_wrong_checkpoint(signalled, resumed, tmp_path):
    """The comparison can fail: with the parameters of another step, the results differ."""
    signalled(tmp_path, ["StepEnd training 8"], TERM)
    from fluxcb._run.snapshots import Snapshots

    with pytest.MonkeyPatch.context() as patch:
        restore = Snapshots.restore

        def forgetful(self, *restored, **how):
            told = restore(self, *restored, **how)
            self._core.state.train.carry["params"] = {
                name: leaf * 0 for name, leaf in self._core.state.train.carry["params"].items()
            }
            return told

        patch.setattr(Snapshots, "restore", forgetful)
        assert any(line.startswith("params") for line in resumed(tmp_path))


# --- exit codes, in programs of their own -----------------------------------------------------------------------------

PROGRAM = """
import os, signal, sys
from fluxcb.callbacks import Checkpointer, CustomCallback
from fluxcb.events import StepEnd
from fluxcb.testing import testlearner

press = CustomCallback(lambda learner: os.kill(os.getpid(), getattr(signal, sys.argv[1])), StepEnd)
learner = testlearner(press, Checkpointer(sys.argv[2]), batches=3)
learner.fit(1)
print(learner.stop_reason, flush=True)
sys.exit(75 if learner.stop_reason == "preempted" else 0)
"""


@pytest.mark.parametrize(("name", "code", "told"), [("SIGTERM", 75, "preempted\n"), ("SIGINT", -INT, "")])
def test_exit_code_is_that_of_program(tmp_path, name, code, told):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, name, str(tmp_path)],
        env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (code, told), done.stderr
    assert entries_of(tmp_path)[-1].step > 0


# --- in this process --------------------------------------------------------------------------------------------------


@pytest.fixture
def default_handlers():
    """Restore the default signal handlers of Python."""
    before = {number: signal.getsignal(number) for number in (INT, TERM)}
    signal.signal(INT, signal.default_int_handler)
    signal.signal(TERM, signal.SIG_DFL)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def fail():
    raise RuntimeError


def press():
    signal.raise_signal(INT)


@pytest.mark.parametrize(("act", "kind"), [(fail, RuntimeError), (press, KeyboardInterrupt), (sys.exit, SystemExit)])
@pytest.mark.parametrize("event", [FitBegin, StepEnd, Trigger, FitEnd])
def test_signal_handlers_are_restored_after_every_fit(default_handlers, event, act, kind):
    learner = testlearner(CustomCallback(lambda learner: act(), event, phase=TrainingPhase), batches=1)
    with pytest.raises(kind):
        learner.fit(1)
    assert signal.getsignal(INT) is signal.default_int_handler
    assert signal.getsignal(TERM) is signal.SIG_DFL


@pytest.mark.parametrize("number", [INT, TERM])
def test_user_signal_handlers_are_kept(default_handlers, tmp_path, number):
    came = []
    signal.signal(number, lambda number, frame: came.append(number))
    callback = CustomCallback(lambda learner: signal.raise_signal(number), StepEnd, phase=TrainingPhase)
    learner = testlearner(callback, Checkpointer(tmp_path), batches=2)
    learner.fit(1)
    assert came == [number] * 2
    assert learner.stop_reason is None


def twice():
    press()
    press()


@pytest.mark.parametrize(("act", "kind"), [(twice, KeyboardInterrupt), (sys.exit, SystemExit)])
def test_interrupted_fit_end_handler_does_not_stop_others(default_handlers, act, kind):
    ran = []
    first = CustomCallback(lambda learner: act(), FitEnd, name="first")
    second = CustomCallback(lambda learner: ran.append("second"), FitEnd, name="second")
    third = CustomCallback(lambda learner: fail(), FitEnd, name="third")
    with pytest.raises(kind) as raised:
        testlearner(first, second, third, batches=1).fit(1)
    assert ran == ["second"]
    place, other = raised.value.__notes__
    assert place.startswith("raised by CustomCallback(first, FitEnd) in CustomCallback.run")
    assert other == "and at FitEnd: RuntimeError: "


@pytest.mark.parametrize(("act", "kind"), [(twice, KeyboardInterrupt), (lambda: sys.exit(3), RuntimeError)])
def test_error_is_reported_with_interrupt_or_exit_at_fit_end(default_handlers, act, kind):
    failing = CustomCallback(lambda learner: fail(), StepEnd, name="failing")
    with pytest.raises(kind) as raised:
        testlearner(failing, CustomCallback(lambda learner: act(), FitEnd, name="last"), batches=1).fit(1)
    if kind is KeyboardInterrupt:
        assert isinstance(raised.value.__cause__, RuntimeError)
    else:
        assert raised.value.__notes__[-1] == "and at FitEnd: SystemExit: 3"
