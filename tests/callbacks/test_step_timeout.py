"""StepTimeout: what it says of what hangs, when it keeps silent, and how it ends a training."""

import io
import itertools
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fluxcb import Callback, DeclarationError, FluxcbError, Learner, ThreadExecutor, every, on
from fluxcb.callbacks import CustomCallback, StepTimeout
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


def alarms(file):
    """Return the first two lines of each alarm, with its times left out."""
    text = re.sub(r"for [\d.]+ s \(", "for ... s (", file.getvalue())
    return re.findall(r"^fluxcb: .*: no.*\n.*$", text, re.MULTILINE)


def sleeps(at, seconds=0.5):
    def sleep(learner):
        if learner.progress.step == at:
            time.sleep(seconds)

    return sleep


# --- what hangs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("executor", [None, ThreadExecutor(2)], ids=["serial", "threads"])
def test_a_handler_is_named_with_its_moment(executor):
    file = io.StringIO()
    callbacks = [CustomCallback(sleeps(3), StepEnd, name="slow"), CustomCallback(sleeps(99), StepEnd, name="fast")]
    given = {} if executor is None else {"executor": executor}
    testlearner(StepTimeout(0.1, file=file), *callbacks, **given).fit(1)
    assert alarms(file) == [
        "fluxcb: StepTimeout(0.1): no step of TrainingPhase has been finished for ... s (limit 0.1 s), "
        "in epoch 1, after step 3.\n"
        f"  where: the handler {callbacks[0]!r}.run at StepEnd x TrainingPhase"
    ]
    assert "time.sleep(seconds)" in file.getvalue()  # the stack
    assert "Thread MainThread (most recent call last):" in file.getvalue()
    assert re.search(r"^fluxcb: StepTimeout\(0\.1\): it goes on, after 0\.\d+ s\.$", file.getvalue(), re.MULTILINE)


def test_a_handler_within_a_handler():
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
                time.sleep(0.5)

    validates = Validates()
    learner = testlearner(StepTimeout(60, between=0.1, file=file), validates, Slow())
    validates.learner = learner
    learner.fit(1)
    assert [alarm.partition("  where: ")[2] for alarm in alarms(file)] == [
        "the handler Slow().sleep at EpochEnd x ValidationPhase",  # of the fit's own validation
        "the handler Validates().validate at Trigger x TrainingPhase, in it Slow().sleep at EpochEnd x ValidationPhase",
    ]


class SlowData:
    """Waits before its third batch."""

    def __len__(self):
        return 4

    def __iter__(self):
        for number in range(4):
            if number == 3:
                time.sleep(0.5)
            yield XS, XS


def test_the_data_are_named():
    file = io.StringIO()
    testlearner(StepTimeout(0.1, file=file), data=SlowData(), steps_per_call=1).fit(1)
    (alarm,) = alarms(file)
    assert re.search(rf"  where: the data: SlowData\.__iter__ in {re.escape(__file__)}, line \d+$", alarm)


def test_data_without_python_code_are_data_still():
    file = io.StringIO()
    batches = queue.Queue()

    def third(batch):
        threading.Timer(0.5, batches.put, [batch]).start()
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


def slow_step(seconds):
    """Return a Learner whose fourth training step takes long on the device."""

    def wait(x):
        if float(x) > 2.5:
            time.sleep(seconds)
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


def test_the_device_is_named():
    file = io.StringIO()
    slow_step(0.6)(StepTimeout(0.1, file=file), steps_per_call=1).fit(1)
    (alarm, *_) = alarms(file)
    assert alarm.endswith("  where: the device")


# --- no false alarms ------------------------------------------------------------------------------------------------


def slow_to_trace(seconds):
    def apply(params, xs):
        time.sleep(seconds)
        return xs @ params["w"]

    import optax

    return Learner(
        (lambda key, xs: {"w": jnp.zeros((1, 1))}, apply),
        lambda outputs, ys: jnp.mean((outputs - ys) ** 2),
        optax.sgd(0.1),
        data=[(XS, XS)] * 3 + [(XS[:5], XS[:5])],  # the last one is of another shape
        default_callbacks=False,
    )


def test_compiling_does_not_count():
    file = io.StringIO()
    learner = slow_to_trace(0.3)
    learner.callbacks.set([StepTimeout(0.1, file=file)])
    learner.fit(2)
    assert file.getvalue() == ""


def test_compiling_has_its_own_limit():
    file = io.StringIO()

    class SlowFirst(SlowData):
        element_spec = (jax.ShapeDtypeStruct(XS.shape, XS.dtype),) * 2  # so that the construction takes no batch

        def __iter__(self):
            time.sleep(0.5)
            yield XS, XS

    testlearner(StepTimeout(60, first=0.1, file=file), data=SlowFirst(), steps_per_call=1).fit(1)
    (alarm,) = alarms(file)
    assert "no step of TrainingPhase has been finished for ... s (limit 0.1 s), in epoch 1, after step 0." in alarm


def test_what_happens_between_epochs_has_no_limit_or_its_own():
    for between, count in ((None, 0), (0.1, 1)):
        file = io.StringIO()
        save = CustomCallback(lambda learner: time.sleep(0.4), Trigger, name="save")
        testlearner(StepTimeout(0.1, between=between, file=file), save).fit(1)
        assert len(alarms(file)) == count
        assert all("nothing has happened between epochs" in alarm for alarm in alarms(file))


def test_many_short_steps_give_no_alarm():
    file = io.StringIO()
    each = CustomCallback(lambda learner: time.sleep(0.02), StepEnd, name="each")
    testlearner(StepTimeout(0.15, file=file), each, batches=30, steps_per_call=30).fit(1)
    assert file.getvalue() == ""


def test_a_period_within_epochs_is_a_step_still():
    file = io.StringIO()
    save = every(CustomCallback(lambda learner: time.sleep(0.4), Trigger, name="save"), steps=2)
    testlearner(StepTimeout(0.1, file=file), save).fit(1)
    assert len(alarms(file)) == 2


# --- loops, errors, files -------------------------------------------------------------------------------------------


def test_a_loop_written_by_hand():
    file = io.StringIO()
    learner = testlearner(StepTimeout(0.1, file=file), CustomCallback(sleeps(2), StepEnd, name="slow"))
    learner.run_epoch(TrainingPhase())
    assert len(alarms(file)) == 1
    assert watchdogs() == []
    learner.run_step(TrainingPhase(), (XS, XS))
    assert watchdogs() == []


def test_an_error_ends_the_watch():
    def fail(learner):
        assert watchdogs()
        raise RuntimeError("no")

    learner = testlearner(StepTimeout(60), CustomCallback(fail, StepBegin, name="fail"))
    with pytest.raises(RuntimeError, match="no"):
        learner.fit(1)
    assert watchdogs() == []


def test_a_closed_file_does_not_end_the_watch(capsys):
    file = io.StringIO()
    file.close()
    testlearner(StepTimeout(0.1, file=file), CustomCallback(sleeps(2), StepEnd, name="slow")).fit(1)
    assert capsys.readouterr().err == ""


def test_standard_error_is_where_it_is_said(capsys):
    testlearner(StepTimeout(0.1), CustomCallback(sleeps(2), StepEnd, name="slow")).fit(1)
    assert "no step of TrainingPhase has been finished for 0." in capsys.readouterr().err


# --- abort ----------------------------------------------------------------------------------------------------------


def test_abort_interrupts_a_handler():
    file = io.StringIO()
    ended = []

    class Slow(Callback):
        @on
        def sleep(self, event: StepEnd, phase: TrainingPhase, learner):
            if learner.progress.step == 2:
                time.sleep(60)

        @on
        def end(self, event: EpochEnd, phase: TrainingPhase, learner):
            ended.append("epoch")

    learner = testlearner(StepTimeout(0.2, action="abort", file=file), Slow(), steps_per_call=1)
    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt) as caught:
        learner.fit(5)
    assert time.monotonic() - began < 20
    place, *others = caught.value.__notes__
    assert place.startswith("raised by Slow() in Slow.sleep")
    assert others == [
        "and at FitEnd: FluxcbError: StepTimeout(0.2) has ended this fit.\n"
        "  where: the handler Slow().sleep at StepEnd x TrainingPhase, epoch 1, after step 2\n"
        "  why:   no step was finished for too long"
    ]
    assert ended == []
    learner.callbacks.remove(next(iter(learner.callbacks)))
    assert watchdogs() == []


def test_abort_of_what_ends_by_itself_ends_the_fit_with_its_reason():
    """The first interrupt asks the loop to end; it does before the second one."""
    learner = testlearner(
        StepTimeout(0.2, action="abort", file=io.StringIO()),
        CustomCallback(lambda learner: _busy(0.4) if learner.progress.step == 2 else None, StepEnd, name="slow"),
        steps_per_call=1,
    )
    with pytest.raises((KeyboardInterrupt, FluxcbError)):
        learner.fit(5)
    assert learner.step < 20


def _busy(seconds):
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        pass


PROGRAM = """
import os
from fluxcb.callbacks import CustomCallback, StepTimeout
from fluxcb.events import StepEnd
from fluxcb.testing import testlearner

def hang(learner):
    if learner.progress.step == 2:
        os.system("sleep 60")  # a C function that ignores Ctrl-C

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
        assert process.wait(50) == 1
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # what it waited for is there still
    assert ".run at StepEnd x TrainingPhase" in said.read_text()
    assert said.read_text().endswith("fluxcb: StepTimeout(0.5): it cannot be interrupted, so the process ends.\n")


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
            '`action` of `StepTimeout` is "warn" or "abort", not \'raise\'.\n  fix:   write `action="warn"`',
        ),
    ],
)
def test_what_step_timeout_refuses(arguments, options, text, refused):
    with refused(DeclarationError, text):
        StepTimeout(*arguments, **options)
