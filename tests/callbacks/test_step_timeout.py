"""StepTimeout: what it reports about a hang, when it does not report, and how it ends a training."""

import gc
import io
import itertools
import linecache
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fluxcb import Callback, DeclarationError, FluxcbError, Learner, ThreadExecutor, every, on
from fluxcb.callbacks import CustomCallback, StepTimeout
from fluxcb.callbacks.system import hanging
from fluxcb.events import EpochEnd, StepBegin, StepEnd, Trigger
from fluxcb.phases import TrainingPhase, ValidationPhase
from fluxcb.testing import testlearner

ROOT = Path(__file__).resolve().parents[2]
XS = np.linspace(-1, 1, 8, dtype=np.float32)[:, None]


def watchdogs():
    return [thread.name for thread in threading.enumerate() if thread.name == "fluxcb-step-timeout"]


@pytest.fixture(autouse=True)
def _no_thread_is_left():
    yield
    assert watchdogs() == []


class Clock:
    """The clock of `StepTimeout`. Time passes only while something hangs, so the speed of the machine has no effect."""

    def __init__(self):
        self.now, self.looks = 0.0, 0

    def __call__(self):
        self.looks += threading.current_thread().name == "fluxcb-step-timeout"
        return self.now

    def hang(self, seconds=0.5, until=None):
        """Let time pass.

        Args:
            seconds: How much.
            until: Returns whether the watchdog has done what the test expects. By default, wait until the watchdog has
                read the clock several times.
        """
        looks = self.looks
        self.now += seconds
        while not (until() if until is not None else self.looks >= looks + 4):
            time.sleep(0.001)

    def hang_until_alarm(self, file):
        """Let time pass, and wait for another alarm."""
        count = len(alarms(file))
        self.hang(until=lambda: len(alarms(file)) > count)


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("fluxcb.callbacks.system.step_timeout.monotonic", clock)
    return clock


def alarms(file):
    """Return the first two lines of each alarm."""
    return re.findall(r"^fluxcb: .*: no.*\n.*$", file.getvalue(), re.MULTILINE)


def at(step, act):
    """Return a handler that calls a function after a step."""
    return lambda learner: act() if learner.progress.step == step else None


# --- what hangs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("executor", [None, ThreadExecutor(2)], ids=["serial", "threads"])
def test_a_hanging_handler_is_named_with_its_moment(executor, clock):
    file = io.StringIO()

    def wait_for_the_end_of_the_alarm(learner):
        while "training continues" not in file.getvalue():
            time.sleep(0.001)

    callbacks = [
        CustomCallback(at(3, lambda: clock.hang_until_alarm(file)), StepEnd, name="slow"),
        CustomCallback(lambda learner: None, StepEnd, name="fast"),
        CustomCallback(wait_for_the_end_of_the_alarm, EpochEnd, phase=TrainingPhase),
    ]
    given = {} if executor is None else {"executor": executor}
    testlearner(StepTimeout(0.1, file=file), *callbacks, **given).fit(1)
    assert alarms(file) == [
        "fluxcb: StepTimeout(0.1): no step of TrainingPhase finished for 0.5 s (limit 0.1 s), "
        "in epoch 1, after step 3.\n"
        f"  where: the handler {callbacks[0]!r}.run at StepEnd x TrainingPhase"
    ]
    assert "clock.hang_until_alarm(file)" in file.getvalue()  # the stack
    assert "Thread MainThread (most recent call last):" in file.getvalue()
    assert "\nfluxcb: StepTimeout(0.1): training continues after 0.5 s.\n" in file.getvalue()


def test_a_nested_handler_is_named(clock):
    file = io.StringIO()

    class Validates(Callback):
        main_thread = True

        def __init__(self, learner=None):
            self.learner = learner

        @on
        def validate(self, event: Trigger, phase: TrainingPhase, learner):
            self.learner.run_epoch(ValidationPhase())

    class Slow(Callback):
        @on
        def sleep(self, event: EpochEnd, phase: ValidationPhase, learner):
            if learner.progress.epoch == 1:
                clock.hang_until_alarm(file)

    validates = Validates()
    learner = testlearner(StepTimeout(60, between=0.1, file=file), validates, Slow())
    validates.learner = learner
    learner.fit(1)
    assert [alarm.partition("  where: ")[2] for alarm in alarms(file)] == [
        "the handler Slow().sleep at EpochEnd x ValidationPhase",  # of the fit's own validation
        "the handler Validates().validate at Trigger x TrainingPhase, inside it Slow().sleep at "
        "EpochEnd x ValidationPhase",
    ]


class SlowData:
    """Hangs before its fourth batch."""

    def __init__(self, hang):
        self.hang = hang

    def __len__(self):
        return 4

    def __iter__(self):
        for number in range(4):
            if number == 3:
                self.hang()
            yield XS, XS


def test_hanging_data_are_named(clock):
    file = io.StringIO()
    data = SlowData(lambda: clock.hang_until_alarm(file))
    testlearner(StepTimeout(0.1, file=file), data=data, steps_per_call=1).fit(1)
    (alarm,) = alarms(file)
    assert re.search(rf"  where: the data: SlowData\.__iter__ in {re.escape(__file__)}, line \d+$", alarm)


def test_data_without_python_code_are_recognized(clock):
    file = io.StringIO()
    batches = queue.Queue()

    def put_after_alarm(batch):
        clock.hang_until_alarm(file)
        batches.put(batch)

    def third(batch):
        threading.Thread(target=put_after_alarm, args=[batch]).start()
        return batch

    class FromQueue:
        def __len__(self):
            return 4

        def __iter__(self):
            batch = XS, XS
            return itertools.chain([batch] * 2, map(third, [batch]), iter(batches.get, None))

    testlearner(StepTimeout(0.1, file=file), data=FromQueue(), steps_per_call=1).fit(steps=4, steps_per_epoch=4)
    (alarm,) = alarms(file)
    assert "  where: the data" in alarm


def slow_step(hang):
    """Return a Learner whose fourth training step hangs on the device."""

    def wait(x):
        if float(x) > 2.5:
            hang()
        return np.float32(0)

    def loss(params, batch, key):
        waited = jax.pure_callback(wait, jax.ShapeDtypeStruct((), jnp.float32), jax.lax.stop_gradient(batch[0]))
        return params["w"] * (jnp.mean(batch) + waited)  # so that the update hangs on it

    import optax

    def make(*callbacks, **kwargs):
        return Learner.from_loss(
            {"w": jnp.ones(())},
            loss,
            optax.sgd(0.1),
            data=[jnp.full(2, float(n)) for n in range(4)],
            callbacks=callbacks,
            default_callbacks=False,
            **kwargs,
        )

    return make


def test_a_hanging_device_is_named(clock):
    file = io.StringIO()
    slow_step(lambda: clock.hang_until_alarm(file))(StepTimeout(0.1, file=file), steps_per_call=1).fit(1)
    (alarm, *_) = alarms(file)
    assert alarm.endswith("  where: the device")


# --- no false alarms ------------------------------------------------------------------------------------------------


def slow_to_trace(hang):
    def apply(params, xs):
        hang()
        return xs @ params["w"]

    import optax

    return Learner(
        (lambda key, xs: {"w": jnp.zeros((1, 1))}, apply),
        lambda outputs, ys: jnp.mean((outputs - ys) ** 2),
        optax.sgd(0.1),
        data=[(XS, XS)] * 3 + [(XS[:5], XS[:5])],  # the last one is of another shape
        default_callbacks=False,
    )


def test_compiling_does_not_count(clock):
    file = io.StringIO()
    traced = []

    def hang(clock):
        if watchdogs():  # not while the Learner is built
            traced.append(1)
            clock.hang(0.3)

    # Of a method, fluxcb does not compare the variables, which change here while the step is traced.
    learner = slow_to_trace(types.MethodType(hang, clock))
    learner.callbacks.set([StepTimeout(0.1, file=file)])
    learner.fit(2)
    assert traced
    assert file.getvalue() == ""


def test_compiling_has_its_own_limit(clock):
    file = io.StringIO()

    class SlowFirst(SlowData):
        element_spec = (jax.ShapeDtypeStruct(XS.shape, XS.dtype),) * 2  # so that the construction takes no batch

        def __iter__(self):
            self.hang()
            yield XS, XS

    data = SlowFirst(lambda: clock.hang_until_alarm(file))
    testlearner(StepTimeout(60, first=0.1, file=file), data=data, steps_per_call=1).fit(1)
    (alarm,) = alarms(file)
    assert "no step of TrainingPhase finished for 0.5 s (limit 0.1 s), in epoch 1, after step 0." in alarm


def test_the_time_between_epochs_has_no_limit_by_default(clock):
    file = io.StringIO()

    def save(learner):
        clock.now += 0.5
        time.sleep(0.1)  # gives the watchdog a chance to look

    testlearner(StepTimeout(0.1, file=file), CustomCallback(save, Trigger)).fit(1)
    assert alarms(file) == []


def test_the_time_between_epochs_can_have_a_limit(clock):
    file = io.StringIO()
    save = CustomCallback(lambda learner: clock.hang_until_alarm(file), Trigger, name="save")
    testlearner(StepTimeout(60, between=0.1, file=file), save).fit(1)
    (alarm,) = alarms(file)
    assert "no progress between epochs for 0.5 s (limit 0.1 s)" in alarm


def test_many_short_steps_give_no_alarm(clock):
    file = io.StringIO()
    each = CustomCallback(lambda learner: clock.hang(0.02), StepEnd, phase=TrainingPhase, name="each")
    testlearner(StepTimeout(0.05, file=file), each, batches=8, steps_per_call=8).fit(1)
    assert file.getvalue() == ""


def test_a_trigger_within_an_epoch_counts_as_part_of_a_step(clock):
    file = io.StringIO()
    save = every(CustomCallback(lambda learner: clock.hang_until_alarm(file), Trigger, name="save"), steps=2)
    testlearner(StepTimeout(0.1, file=file), save).fit(1)
    assert len(alarms(file)) == 2


# --- loops, errors, files -------------------------------------------------------------------------------------------


def test_a_hand_written_loop_is_monitored(clock):
    file = io.StringIO()
    slow = CustomCallback(at(2, lambda: clock.hang_until_alarm(file)), StepEnd, name="slow")
    learner = testlearner(StepTimeout(0.1, file=file), slow)
    learner.run_epoch(TrainingPhase())
    assert len(alarms(file)) == 1
    assert watchdogs() == []
    learner.run_step(TrainingPhase(), (XS, XS))
    assert watchdogs() == []


def test_an_error_ends_the_monitoring():
    def fail(learner):
        assert watchdogs()
        raise RuntimeError("no")

    learner = testlearner(StepTimeout(60), CustomCallback(fail, StepBegin, name="fail"))
    with pytest.raises(RuntimeError, match="no"):
        learner.fit(1)
    assert watchdogs() == []


def hang_for_two_looks(clock):
    """Let time pass until the alarm has read the clock."""
    looks = clock.looks
    clock.hang(until=lambda: clock.looks >= looks + 2)


def test_a_closed_file_does_not_end_the_monitoring(clock, capsys):
    file = io.StringIO()
    file.close()
    slow = CustomCallback(at(2, lambda: hang_for_two_looks(clock)), StepEnd, name="slow")
    testlearner(StepTimeout(0.1, file=file), slow).fit(1)
    assert capsys.readouterr().err == ""


def test_reports_go_to_standard_error_by_default(clock, capsys):
    slow = CustomCallback(at(2, lambda: hang_for_two_looks(clock)), StepEnd, name="slow")
    testlearner(StepTimeout(0.1), slow).fit(1)
    assert "no step of TrainingPhase finished for 0.5 s" in capsys.readouterr().err


# --- abort ----------------------------------------------------------------------------------------------------------


def test_abort_interrupts_a_handler(clock):
    file = io.StringIO()
    ended = []

    class Slow(Callback):
        @on
        def sleep(self, event: StepEnd, phase: TrainingPhase, learner):
            if learner.progress.step == 2:
                clock.now += 60
                time.sleep(600)

        @on
        def end(self, event: EpochEnd, phase: TrainingPhase, learner):
            ended.append("epoch")

    learner = testlearner(StepTimeout(30, action="abort", file=file), Slow(), steps_per_call=1)
    with pytest.raises(KeyboardInterrupt) as caught:
        learner.fit(5)
    place, *others = caught.value.__notes__
    assert place.startswith("raised by Slow() in Slow.sleep")
    assert others == [
        "and at FitEnd: FluxcbError: StepTimeout(30) aborted this fit.\n"
        "  where: the handler Slow().sleep at StepEnd x TrainingPhase, epoch 1, after step 2\n"
        "  why:   no step finished within the time limit"
    ]
    assert ended == []
    learner.callbacks.remove(next(iter(learner.callbacks)))
    assert watchdogs() == []


def test_abort_ends_the_fit_with_a_reason_if_the_step_finishes_meanwhile(clock, monkeypatch):
    """The first interrupt asks the loop to end; it does before the second one."""
    sent, send = [], signal.pthread_kill

    def interrupt(thread, number):
        send(thread, number)
        sent.append(number)

    monkeypatch.setattr(signal, "pthread_kill", interrupt)
    learner = testlearner(
        StepTimeout(30, action="abort", file=io.StringIO()),
        CustomCallback(at(2, lambda: clock.hang(60, until=lambda: sent)), StepEnd, name="slow"),
        steps_per_call=1,
    )
    with pytest.raises((KeyboardInterrupt, FluxcbError)):
        learner.fit(5)
    assert learner.step < 20


PROGRAM = """
import os
from fluxcb.callbacks import CustomCallback, StepTimeout
from fluxcb.callbacks.system import step_timeout
from fluxcb.events import StepEnd
from fluxcb.testing import testlearner

# The clock stands still until the C function runs: an earlier interrupt would reach Python and end the fit.
step_timeout.monotonic = lambda: 60.0 if os.path.exists("in_c_function") else 0.0

def hang(learner):
    if learner.progress.step == 2:
        os.system("touch in_c_function; sleep 3600")  # a C function that ignores Ctrl-C

testlearner(StepTimeout(0.5, action="abort"), CustomCallback(hang, StepEnd, name="hang")).fit(1)
"""


def test_abort_ends_the_process_that_cannot_be_interrupted(tmp_path):
    said = tmp_path / "said"
    with said.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            cwd=tmp_path,
            stderr=file,
            start_new_session=True,
        )
    try:
        assert process.wait() == 1
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # what it waited for is there still
    assert ".run at StepEnd x TrainingPhase" in said.read_text()
    assert said.read_text().endswith(
        "fluxcb: StepTimeout(0.5): the training cannot be interrupted, so the process exits.\n"
    )


# --- arguments ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        (
            (0,),
            {},
            "`seconds` of `StepTimeout` must be a number above 0, not 0.\n  fix:   give a finite number above 0",
        ),
        (
            ("60",),
            {},
            "`seconds` of `StepTimeout` must be a number above 0, not '60'.\n  fix:   give a finite number above 0",
        ),
        (
            (60,),
            {"first": -1},
            "`first` of `StepTimeout` (seconds) must be a number above 0, not -1.\n"
            "  fix:   give a finite number above 0",
        ),
        (
            (60,),
            {"between": True},
            "`between` of `StepTimeout` (seconds) must be a number above 0, not True.\n"
            "  fix:   give a finite number above 0",
        ),
        (
            (60,),
            {"action": "raise"},
            '`action` of `StepTimeout` must be "warn" or "abort", not \'raise\'.\n  fix:   write `"warn"`',
        ),
    ],
)
def test_step_timeout_rejects_invalid_arguments(arguments, options, text, refused):
    with refused(DeclarationError, text):
        StepTimeout(*arguments, **options)


def test_no_garbage_is_collected_while_the_frames_of_a_thread_are_read():
    collected_in = []

    def record(phase, info):
        frame = sys._getframe(1)
        collected_in.append(linecache.getline(frame.f_code.co_filename, frame.f_lineno))

    def walk(depth):
        return walk(depth - 1) if depth else hanging.what_runs(threading.get_ident(), StepTimeout(1))

    thresholds = gc.get_threshold()
    gc.callbacks.append(record)
    gc.set_threshold(1)
    try:
        walk(100)
    finally:
        gc.set_threshold(*thresholds)
        gc.callbacks.remove(record)
    assert collected_in  # at other lines, so the threshold works
    assert [line for line in collected_in if "f_back" in line or "f_locals" in line] == []
    assert gc.isenabled()
