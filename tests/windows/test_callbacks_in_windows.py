"""Every built-in callback and every schedule does the same in windows, and reads the device only when due."""

import io
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb.callbacks as library
from fluxcb import Append, Callback, Read, Write, every, on, throttle, when
from fluxcb.callbacks import Metric, Metrics, Recorder, SmoothLoss
from fluxcb.events import StepBegin, StepEnd, Trigger, UpdateEnd
from fluxcb.phases import AbstractTrainingPhase, Phase, TrainingPhase
from fluxcb.testing import EventLog, testlearner

STEPS, EPOCHS = 37, 2


class Losses(Callback):
    def stateaccess(self):
        return {"cbstate": {"losses": Append()}}

    def init(self, learner):
        if "losses" not in learner.cbstate:
            learner.cbstate.losses = []


def note_loss(learner):
    learner.cbstate.losses.append(float(learner.step.loss))


# Per callback: instances, whether they read step values, and how often they read the carry in an epoch at most.
BUILT_IN = {
    "ClipGradients": (lambda file: [library.ClipGradients(0.5)], False, 0),
    "CustomCallback": (
        lambda file: [
            Losses(),
            library.CustomCallback(
                note_loss, StepEnd, access={"step": {"loss": Read()}, "cbstate": {"losses": Append()}}
            ),
        ],
        True,
        0,
    ),
    "Metrics": (
        lambda file: [Metrics(SmoothLoss(), Metric(lambda outputs, ys: outputs.mean(), name="mean"))],
        False,
        2,
    ),
    "MetricsPrinter": (lambda file: [Metrics(), library.MetricsPrinter(file)], False, 2),
    "ModelSummary": (lambda file: [library.ModelSummary(file)], False, 1),
    "ParameterEMA": (lambda file: [library.ParameterEMA(0.9)], False, 2),
    "ProgressBar": (lambda file: [library.ProgressBar(file, interval=1e9)], False, 0),
    "ProgressBar, always": (lambda file: [library.ProgressBar(file, interval=1e-9)], True, 0),
    "Recorder": (lambda file: [Recorder()], False, 0),
    "Scheduler": (
        lambda file: [library.Scheduler({library.LearningRate: optax.cosine_decay_schedule(0.2, 80)})],
        False,
        0,
    ),
    "StopOnNaNLoss": (lambda file: [library.StopOnNaNLoss()], True, 0),
    "ToDevice": (lambda file: [library.ToDevice(jax.devices()[0])], False, 0),
    "the default ones": (lambda file: [*quiet_defaults(file)], True, 2),
}


def quiet_defaults(file):
    made = {
        library.ProgressBar: lambda: library.ProgressBar(file, 1e9),
        library.MetricsPrinter: lambda: library.MetricsPrinter(file),
    }
    return [made.get(type(callback), type(callback))() for callback in library.default_callbacks()]


def test_every_built_in_callback_is_here():
    named = {name: getattr(library, name) for name in library.__all__}
    found = {name for name, value in named.items() if isinstance(value, type) and issubclass(value, Callback)}
    assert found == {name for name in BUILT_IN if name.isidentifier()}


@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_callback_does_the_same(name, same, tell, keep):
    def run(length):
        file, log = io.StringIO(), EventLog()
        kept = keep("step.loss", "step.grads", "params", phase=AbstractTrainingPhase)
        callbacks = BUILT_IN[name][0](file)
        learner = testlearner(log, *callbacks, kept, batches=STEPS, validation_batches=3, steps_per_call=length)
        learner.fit(EPOCHS)
        learner.fit(steps=20)
        printed = re.sub(r"[\d,]+ steps/s|[\d.]+ s\n", "?", file.getvalue())  # what a clock said
        return tell(learner, log, kept), printed

    same(run, (7, "auto"))


@pytest.mark.parametrize("length", [1, 50])
@pytest.mark.parametrize("name", BUILT_IN)
def test_a_built_in_callback_reads_only_when_due(name, length, windows):
    make, reads_rows, each_epoch = BUILT_IN[name]

    def reads(steps):
        windows.clear()
        learner = testlearner(*make(io.StringIO()), batches=steps, validation_batches=3, steps_per_call=length)
        before = learner._state.meter.reads
        learner.fit(EPOCHS)
        return learner._state.meter.reads - before, len(windows)

    count, used = reads(8 * STEPS)
    assert used < EPOCHS * 8 * STEPS / 16
    # The rows of a window come in one read; how many of its steps ran stands there, too, so they always come.
    rows = used if reads_rows or length > 1 else 0
    assert count <= rows + EPOCHS * each_epoch + EPOCHS * 8 * STEPS // 256 * each_epoch


@pytest.mark.parametrize("length", [1, 50])
def test_large_values_are_read_once_a_window(length, keep, windows):
    kept = keep("step.loss", "step.outputs", phase=AbstractTrainingPhase)
    learner = testlearner(kept, batches=200, batch_size=100, validation_batches=0, steps_per_call=length)
    before = learner._state.meter.reads
    learner.fit(1)
    assert len(kept.seen) == 200
    assert learner._state.meter.reads - before == 2 * len(windows) < 20  # the rows and the outputs


# -- schedules ---------------------------------------------------------------------------------------------------------


class Journal(Callback):
    """Note in a journal shared with others what handlers saw, and when."""

    def __init__(self, journal):
        self.journal = journal

    def note(self, event, learner, *values):
        progress = learner.progress
        values = [np.array(jax.tree.leaves(value)[0]) for value in values]
        self.journal.append((event, progress.step, progress.epoch, progress.step_in_epoch, values))


SEEN = {"params": Read(), "cbstate": {"counted": Read()}}


class Everything(Journal):
    """Handlers of every kind."""

    def stateaccess(self):
        step = dict.fromkeys(("batch", "loss", "grads", "outputs"), Read())
        return {"step": step, "params": Read(), "cbstate": {"counted": Write()}}

    def init(self, learner):
        if "counted" not in learner.cbstate:
            learner.cbstate.counted = jnp.zeros(3, jnp.int32)

    @on(StepBegin, TrainingPhase, access={"step": {"batch": Read()}})
    def before(self, event, phase, learner):
        self.note("before", learner, learner.step.batch)

    @on(UpdateEnd, TrainingPhase, access={"cbstate": {"counted": Write()}})
    def count(self, event, phase, learner):
        learner.cbstate.counted = learner.cbstate.counted + jnp.array([1, 2, 3])

    @on(StepEnd, TrainingPhase, access={"step": dict.fromkeys(("loss", "grads", "outputs"), Read()), **SEEN})
    def after(self, event, phase, learner):
        step = learner.step
        self.note("after", learner, step.loss, step.grads, step.outputs, learner.params, learner.cbstate.counted)

    @on(Trigger, TrainingPhase, access=SEEN)
    def triggered(self, event, phase, learner):
        self.note("triggered", learner, learner.params, learner.cbstate.counted)


class Looks(Journal):
    """Looks at the state before a step, which therefore has to wait."""

    def stateaccess(self):
        return {"params": Read()}

    @on
    def before(self, event: StepBegin, phase: TrainingPhase, learner):
        self.note("looks", learner, learner.params)


SCHEDULES = {
    "none": lambda cb: cb,
    "steps": lambda cb: every(cb, steps=5),
    "many steps": lambda cb: every(cb, steps=24),
    "epochs": lambda cb: every(cb, epochs=2),
    "StepEnd": lambda cb: throttle(cb, StepEnd, freq=4),
    "StepBegin": lambda cb: throttle(cb, StepBegin, freq=6),
    "Trigger": lambda cb: throttle(cb, Trigger, freq=2),
    "predicate": lambda cb: when(cb, lambda learner: learner.progress.step % 7 in (2, 3)),
    "steps of epochs": lambda cb: every(every(cb, steps=3), epochs=2),
    "steps of steps": lambda cb: every(every(cb, steps=3), steps=4),
    "predicate of steps": lambda cb: when(every(cb, steps=5), lambda learner: learner.progress.epoch > 1),
    "traced steps": lambda cb: every(cb, steps=3, traced=True),
    "traced epochs": lambda cb: every(cb, epochs=2, traced=True),
    "traced UpdateEnd": lambda cb: throttle(cb, UpdateEnd, freq=4),
}


@pytest.mark.parametrize("kinds", [[Everything], [Everything, Looks]], ids=["after", "before and after"])
@pytest.mark.parametrize("batch_size", [8, 80], ids=["small", "large"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_due_at_the_same_steps(name, batch_size, kinds, same, tell):
    """Outputs of a large batch are fetched when due, those of a small one for each step."""

    def run(length):
        journal = []
        learner = testlearner(
            *(SCHEDULES[name](kind(journal)) for kind in kinds),
            batches=STEPS,
            batch_size=batch_size,
            validation_batches=0,
            steps_per_call=length,
        )
        learner.fit(EPOCHS)
        learner.fit(steps=10)
        if name == "steps" and Looks in kinds:  # before every fifth step, once
            assert [entry[1] for entry in journal if entry[0] == "looks"] == list(range(4, 84, 5))
        return tell(learner), journal

    same(run, (7, "auto"), windows_used=None if Looks in kinds else True)


class Chatty(Callback):
    """Says in a journal shared with others when it runs."""

    def __init__(self, name, journal):
        self.called, self.journal = name, journal

    @on(StepBegin | StepEnd, Phase)
    def say(self, event, phase, learner):
        self.journal.append((self.called, type(event).__name__, type(phase).name, learner.progress.step))


def test_handlers_of_several_callbacks_alternate_as_without_windows(same, tell):
    def run(length):
        journal = []
        learner = testlearner(
            Chatty("one", journal),
            every(Chatty("two", journal), steps=3),
            throttle(Chatty("three", journal), StepBegin, freq=5),
            Chatty("four", journal),
            batches=STEPS,
            steps_per_call=length,
        )
        learner.fit(EPOCHS)
        assert [step for name, *_, step in journal if name == "one"][:4] == [0, 1, 1, 2]
        return tell(learner), journal

    same(run)
