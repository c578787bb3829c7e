"""Ctrl-C and SIGTERM, in a separate process."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fluxcb.callbacks import CustomCallback, FitSummary
from fluxcb.events import EpochBegin, FitEnd, FitStopping
from fluxcb.testing import testlearner

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import os, signal, sys, time
from fluxcb import Append, Callback, on
from fluxcb._run import program_runner
from fluxcb.events import FitEnd, HostEvent, StepBegin, StepEnd
from fluxcb.phases import TrainingPhase
from fluxcb.testing import EventLog, testlearner

class Presses(Callback):
    def __init__(self, times, signal):
        self.times, self.signal = times, signal

    def stateaccess(self):
        return {"control": Append()} if BOUNDS else {}

    @on
    def press(self, event: StepEnd, phase: TrainingPhase, learner):
        if learner.progress.step == 3:
            for _ in range(self.times):
                os.kill(os.getpid(), self.signal)
                time.sleep(0.05)

class Last(Callback):
    @on
    def end(self, event: FitEnd, phase, learner):
        print("FitEnd", learner.progress.step, flush=True)

program_runner.WINDOW_SECONDS = 1e9  # however slow the machine is
MODE, BOUNDS, SIGNAL = sys.argv[1], sys.argv[2] == "bounds", getattr(signal, sys.argv[3])
before = signal.getsignal(SIGNAL)
log = EventLog()
learner = testlearner(Presses(2 if MODE == "twice" else 1, SIGNAL), Last(), log, batches=50)
try:
    learner.fit(5)
    print("returned", learner.step, learner.stop_reason, flush=True)
except KeyboardInterrupt:
    print("KeyboardInterrupt", learner.step, learner.stop_reason, flush=True)
print(log.names().count("StepEnd"), *log.names()[-3:], log.names("validation"), flush=True)
print(int(learner.state["counters"][0]) == learner.step)
print(signal.getsignal(SIGNAL) is before)
learner.fit(steps=1)
print("fits again", learner.stop_reason)
"""


def run(mode, bounds, signal="SIGINT", code=0):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    program = [sys.executable, "-c", PROGRAM, mode, bounds, signal]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr
    return done.stdout.splitlines()


def test_first_ctrl_c_ends_window_runs_fit_end_and_raises():
    assert run("once", "bounds") == [
        "FitEnd 3",
        "KeyboardInterrupt 3 KeyboardInterrupt",
        "3 FitStopping EpochEnd FitEnd []",
        "True",
        "True",
        "FitEnd 4",
        "fits again None",
    ]


def test_interrupted_window_is_replayed_completely():
    # The press comes in the middle of a window; its steps, and those of the next, which runs already, are all told.
    first, second, third, *_ = run("once", "free")
    steps = int(first.removeprefix("FitEnd "))
    assert steps > 3
    assert second == f"KeyboardInterrupt {steps} KeyboardInterrupt"
    assert third.startswith(f"{steps} FitStopping EpochEnd FitEnd [")


def test_second_ctrl_c_stops_immediately():
    first, second, third, *rest = run("twice", "bounds")
    assert first == "FitEnd 3"
    assert second == "KeyboardInterrupt 3 KeyboardInterrupt"
    # It flew through the handler of step 3, which may cancel and so runs behind the log; FitEnd still ran.
    assert third == "3 StepBegin StepEnd FitEnd []"
    assert rest == ["True", "True", "FitEnd 4", "fits again None"]


def test_sigterm_ends_window_and_fit_returns():
    assert run("once", "bounds", "SIGTERM") == [
        "FitEnd 3",
        "returned 3 preempted",
        "3 FitStopping EpochEnd FitEnd []",
        "True",
        "True",
        "FitEnd 4",
        "fits again None",
    ]


def test_second_sigterm_ends_process():
    assert run("twice", "bounds", "SIGTERM", code=-signal.SIGTERM) == []


def test_user_sigint_handler_is_kept():
    mine = lambda signum, frame: None  # noqa: E731
    before = signal.signal(signal.SIGINT, mine)
    try:
        learner = testlearner(batches=1)
        learner.fit(1)
        assert signal.getsignal(signal.SIGINT) is mine
    finally:
        signal.signal(signal.SIGINT, before)


def test_fit_in_another_thread_ignores_signals():
    learner = testlearner(batches=2)
    failures = []

    def work():
        try:
            learner.fit(2)
        except BaseException as error:
            failures.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert failures == []
    assert learner.step == 4


def test_fit_summary_reports_sigterm_instead_of_a_warning(capsys):
    def terminate(learner):
        signal.raise_signal(signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        learner = testlearner(CustomCallback(terminate, EpochBegin, name="terminate"), FitSummary(), batches=1)
        learner.fit(1)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert "Training was interrupted" in capsys.readouterr().out


@pytest.mark.parametrize("event", [FitStopping, FitEnd])
def test_sigterm_during_last_handlers_is_not_lost(event):
    def terminate(learner):
        if learner.progress.epoch == 1:
            signal.raise_signal(signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        learner = testlearner(CustomCallback(terminate, event), batches=1)
        with pytest.warns(RuntimeWarning, match=r"^SIGTERM ended the fit after epoch 1, step 1, and the program"):
            learner.fit(1)
        assert learner.stop_reason == "preempted"
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        learner.fit(1)
        assert learner.stop_reason is None
    finally:
        signal.signal(signal.SIGTERM, before)
