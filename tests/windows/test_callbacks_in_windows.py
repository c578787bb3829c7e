"""Built-in callbacks do not depend on windows, and read values only when due."""

import io
import re
import sys
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb.callbacks as library
from fluxcb import Append, Callback, Learner, Read, Write, every, on
from fluxcb.callbacks import Metric, Metrics, Recorder, SmoothLoss
from fluxcb.events import StepEnd, UpdateEnd
from fluxcb.phases import AbstractTrainingPhase, TrainingPhase
from fluxcb.stopping import Threshold
from fluxcb.testing import EventLog, testlearner
from tests.contract.every_callback import FakeGPU, Idle, SkipsSteps, max_saver
from tests.shared_programs import shared_programs

STEPS, EPOCHS = 37, 2


class Losses(Callback):
    def stateaccess(self):
        return {"cbstate": {"losses": Append()}}

    def init(self, learner):
        if "losses" not in learner.cbstate:
            learner.cbstate.losses = []


def note_loss(learner):
    learner.cbstate.losses.append(float(learner.step.loss))


def losses():
    return library.CustomCallback(
        note_loss, StepEnd, access={"step": {"loss": Read()}, "cbstate": {"losses": Append()}}
    )


def note_weight(learner):
    learner.cbstate.losses.append(float(learner.params["w"]))


def sync(learner):
    learner.cbstate.target = learner.params


SYNC = {"params": Read(), "cbstate": {"target": Write()}}


class LogsLoss(Callback):
    def stateaccess(self):
        return {"step": {"loss": Read()}, "cbstate": {"monitors": Append()}}

    @on
    def log(self, event: StepEnd, phase: TrainingPhase, learner):
        learner.cbstate.monitors.put_scalar("loss", learner.step.loss)


@pytest.fixture(scope="module", autouse=True)
def _shared():
    with shared_programs():
        yield


@pytest.fixture(autouse=True)
def _gpu(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeGPU)


def of_images(*callbacks, batches, validation_batches, steps_per_call):
    """Return a Learner that classifies which of three bands of an image is the brightest."""
    rng = np.random.default_rng(0)

    def make(count):
        classes = rng.integers(0, 3, (count, 8))
        images = rng.normal(size=(count, 8, 6, 6, 1)) + 2 * (np.arange(6) // 2 == classes[..., None])[..., None, None]
        return list(zip(images.astype(np.float32), classes, strict=True))

    return Learner(
        (lambda key, xs: {"w": jnp.zeros((36, 3))}, lambda params, xs: xs.reshape(len(xs), -1) @ params["w"]),
        lambda outputs, ys: optax.softmax_cross_entropy_with_integer_labels(outputs, ys).mean(),
        optax.sgd(0.1),
        data=(make(batches), make(validation_batches)),
        callbacks=callbacks,
        default_callbacks=False,
        steps_per_call=steps_per_call,
    )


LEARNERS = dict.fromkeys(("CutMix", "LabelSmoothing", "MixUp"), of_images)  # they mix images, or classes
VALIDATION = [(np.ones((8, 1), np.float32), np.ones((8, 1), np.float32))]


class ByEpoch(library.HyperParamSetter):
    def next_value(self, learner):
        return 0.1 / (1 + learner.progress.epoch)


FOLDER = TemporaryDirectory()


def squares():
    return library.Traces({"square": lambda learner: learner.step.loss**2}, access={"step": {"loss": Read()}})


# Per callback: instances, whether they read step values, and how often they read the carry in an epoch at most: what a
# fit reads at its begin is shared by its epochs. An epoch of 296 steps has one read of `Metrics` every 256 steps, one
# at its end, and one at the end of its validation.
BUILT_IN = {
    "Checkpointer": (lambda file: [library.Checkpointer(mkdtemp(dir=FOLDER.name))], False, 0),
    "Checkpointer, of steps": (lambda file: [library.Checkpointer(mkdtemp(dir=FOLDER.name), steps=40)], False, 0),
    "ClipGradients": (lambda file: [library.ClipGradients(0.5)], False, 0),
    "CustomCallback": (lambda file: [Losses(), losses()], True, 0),
    "DumpArrays": (lambda file: [every(library.DumpArrays("step.loss", mkdtemp(dir=FOLDER.name)), steps=40)], True, 0),
    "DumpImages": (
        lambda file: [
            every(library.DumpImages("step.outputs", mkdtemp(dir=FOLDER.name), keep=1), steps=40),
            library.Monitors(),
        ],
        True,
        0,
    ),
    "LogHistograms": (lambda file: [library.LogHistograms(freq=40), library.Monitors()], False, 7),
    "LogHyperParams": (lambda file: [library.LogHyperParams(), library.Monitors()], True, 0),
    "LogMetrics": (lambda file: [Metrics(), library.LogMetrics(), library.Monitors()], True, 3),
    "LogSummaries": (lambda file: [library.LogSummaries("step.loss", 10), library.Monitors()], True, 1),
    "LogTraces": (lambda file: [squares(), library.LogTraces(), library.Monitors()], True, 0),
    "LogVisualization": (
        lambda file: [
            library.LogVisualization(lambda ys: np.clip(ys, 0, 1), "step.ys", freq=40),
            library.Monitors(),
        ],
        True,
        0,
    ),
    "Freeze": (lambda file: [library.Freeze("b", steps=20)], False, 0),
    "HumanHyperParamSetter": (
        lambda file: [library.HumanHyperParamSetter(library.LearningRate, "a file that is not there")],
        False,
        0,
    ),
    "HyperParamSetter": (lambda file: [ByEpoch(library.LearningRate)], False, 0),
    "HyperParamSetterWithFunc": (
        lambda file: [library.HyperParamSetterWithFunc(library.LearningRate, lambda epoch, current: 0.9 * current)],
        False,
        2,
    ),
    "Metrics": (
        lambda file: [Metrics(SmoothLoss(), Metric(lambda outputs, ys: outputs.mean(), name="mean"))],
        False,
        3,
    ),
    "MaxSaver": (lambda file: [Metrics(), max_saver(mkdtemp(dir=FOLDER.name))], False, 3),
    "MinSaver": (lambda file: [Metrics(), library.MinSaver(mkdtemp(dir=FOLDER.name))], False, 3),
    "ModelSaver": (lambda file: [library.ModelSaver(mkdtemp(dir=FOLDER.name))], False, 0),
    "FitSummary": (lambda file: [library.FitSummary(file)], False, 0),
    "MetricsPrinter": (lambda file: [Metrics(), library.MetricsPrinter(file)], False, 3),
    "ModelSummary": (lambda file: [library.ModelSummary(file)], False, 1),
    "MovingAverage": (lambda file: [library.MovingAverage("step.loss"), library.Monitors()], False, 1),
    "ParameterEMA": (lambda file: [library.ParameterEMA(0.9)], False, 2),
    "PrintArrays": (lambda file: [every(library.PrintArrays("step.loss", file), steps=40)], True, 0),
    "ProcessArrays": (lambda file: [library.ProcessArrays("step.loss", float)], True, 0),
    "ProgressBar": (lambda file: [library.ProgressBar(file, interval=1e9)], False, 2),  # the last loss of both phases
    "ProgressBar, always": (lambda file: [library.ProgressBar(file, interval=1e-9)], True, 0),
    "Recorder": (lambda file: [Recorder()], False, 0),
    "ScheduledHyperParamSetter": (
        lambda file: [library.ScheduledHyperParamSetter(library.LearningRate, [(0, 0.1), (2, 0.01)], "linear")],
        False,
        0,
    ),
    "ScheduledHyperParamSetter, of steps": (
        lambda file: [
            library.ScheduledHyperParamSetter(library.LearningRate, [(5, 0.1), (50, 0.01)], "linear", step_based=True)
        ],
        False,
        0,
    ),
    "Scheduler": (
        lambda file: [library.Scheduler({library.LearningRate: optax.cosine_decay_schedule(0.2, 80, alpha=0.1)})],
        False,
        0,
    ),
    "SimpleMovingAverage": (
        lambda file: [library.SimpleMovingAverage("step.loss", 10), library.Monitors()],
        True,
        0,
    ),
    "StatMonitorParamSetter": (
        lambda file: [
            Metrics(),
            library.StatMonitorParamSetter(library.LearningRate, "loss", lambda rate: rate / 2, 0, 1),
        ],
        False,
        4,
    ),
    "StopOnNaNLoss": (lambda file: [library.StopOnNaNLoss()], False, 0),
    "ToDevice": (lambda file: [library.ToDevice(jax.devices()[0])], False, 0),
    "Traces": (lambda file: [squares()], True, 0),
    "the default ones": (lambda file: [*quiet_defaults(file)], False, 5),
    # Inside the compiled step.
    # It reads two numbers when the fit of two epochs ends.
    "AccumulateGradients": (lambda file: [library.AccumulateGradients(3)], False, 1),
    "CheckNumerics": (lambda file: [library.CheckNumerics()], False, 0),
    "CheckNumerics, at triggers": (lambda file: [library.CheckNumerics("trigger")], False, 1),
    "CheckReplicas": (lambda file: [library.CheckReplicas()], False, 5),  # three trees, at FitBegin and per epoch
    "CutMix": (lambda file: [library.CutMix()], False, 0),
    "DynamicLossScale": (lambda file: [library.DynamicLossScale(period=5)], False, 0),
    "GradientNoise": (lambda file: [library.GradientNoise(0.3)], False, 0),
    "LabelSmoothing": (lambda file: [library.LabelSmoothing()], False, 0),
    "BadSteps": (lambda file: [SkipsSteps(), library.BadSteps()], True, 0),
    "LossSpikeGuard": (lambda file: [library.LossSpikeGuard(0.5, window=3)], False, 0),
    "MixUp": (lambda file: [library.MixUp()], False, 0),
    "MixUp, of numbers": (lambda file: [library.MixUp()], False, 0),
    "SkipNonFinite": (lambda file: [library.SkipNonFinite()], False, 0),
    # A validation epoch reads the average, and the parameters to put them back.
    "StochasticWeightAveraging": (lambda file: [library.StochasticWeightAveraging(3, every=2)], False, 2),
    "StochasticWeightAveraging, not validated": (
        lambda file: [library.StochasticWeightAveraging(3, every=2, validate=False)],
        False,
        0,
    ),
    # Around functions and other callbacks.
    "CallbackFactory": (
        lambda file: [
            Losses(),
            library.CallbackFactory(
                before_train=note_weight,
                trigger=note_weight,
                access={"params": Read(), "cbstate": {"losses": Append()}},
            ),
        ],
        False,
        2,
    ),
    "ConditionalCallback": (
        lambda file: [Losses(), library.ConditionalCallback(losses(), library.FrequencyThrottle(3, StepEnd))],
        True,
        0,
    ),
    "EnableCallbackIf": (
        lambda file: [Losses(), library.EnableCallbackIf(losses(), lambda learner: learner.progress.step % 3 == 1)],
        True,
        0,
    ),
    "HookToCallback": (
        lambda file: [
            library.HookToCallback(lambda step, values: print(step, float(values["loss"]), file=file), ["loss"])
        ],
        True,
        0,
    ),
    "PeriodicCallback": (
        lambda file: [Losses(), library.PeriodicCallback(losses(), every_k_steps=3, every_k_epochs=2)],
        True,
        0,
    ),
    # 592 steps have 24 times 24 of them, besides the ends of two epochs and the begin.
    "PeriodicTrigger": (
        lambda file: [
            library.PeriodicTrigger(
                library.RunFunction(sync, run_before=False, init=sync, access=SYNC),
                every_k_steps=24,
                every_k_epochs=1,
                before_train=True,
            )
        ],
        False,
        14,
    ),
    "ProxyCallback": (lambda file: [Losses(), library.ProxyCallback(losses())], True, 0),
    "RunFunction": (lambda file: [library.RunFunction(sync, init=sync, access=SYNC)], False, 2),
    "RunFunction, of updates": (
        lambda file: [
            library.RunFunction(
                sync, run_before=False, run_as_trigger=False, run_step=UpdateEnd, init=sync, access=SYNC
            )
        ],
        False,
        0,
    ),
    # Between epochs.
    "EarlyStopping": (lambda file: [Metrics(), library.EarlyStopping(Threshold(1.0))], False, 3),
    "InferenceRunner": (
        lambda file: [library.InferenceRunner(VALIDATION, library.ScalarStats("loss")), library.Monitors()],
        False,
        2,
    ),
    "DataParallelInferenceRunner": (
        lambda file: [library.DataParallelInferenceRunner(VALIDATION, library.ScalarStats("loss")), library.Monitors()],
        False,
        2,
    ),
    "InjectShell": (lambda file: [library.InjectShell(Path(FOLDER.name) / "a file that is not there")], False, 0),
    "ReduceLROnPlateau": (  # no epoch is better by so much
        lambda file: [Metrics(), library.ReduceLROnPlateau(0.5, patience=0, threshold=1e6)],
        False,
        4,
    ),
    "SanityCheck": (lambda file: [library.SanityCheck()], False, 3),  # per fit, five
    # Clocks, threads, processes and the machine.
    "Debugger": (lambda file: [library.Debugger()], True, 0),
    "DeviceMemoryTracker": (
        lambda file: [library.DeviceMemoryTracker([FakeGPU]), library.Monitors()],
        False,
        0,
    ),
    "EstimatedTimeLeft": (lambda file: [library.EstimatedTimeLeft(file=file)], False, 0),
    "GPUUtilizationTracker": (lambda file: [library.GPUUtilizationTracker([0]), library.Monitors()], False, 0),
    "GarbageCollect": (lambda file: [library.GarbageCollect(40)], False, 0),
    "HostMemoryTracker": (lambda file: [library.HostMemoryTracker(), library.Monitors()], False, 0),
    "Monitors": (lambda file: [library.Monitors()], False, 0),
    "Profiler": (lambda file: [library.Profiler(mkdtemp(dir=FOLDER.name), steps=(2, 3))], False, 2),
    "SendMonitorData": (
        lambda file: [
            LogsLoss(),
            library.SendMonitorData(lambda record: print(record, file=file), "loss"),
            library.Monitors(),
        ],
        True,
        0,
    ),
    "SendStat": (
        lambda file: [LogsLoss(), library.SendStat(["true", "{loss}"], "loss"), library.Monitors()],
        True,
        0,
    ),
    "StartProcOrThread": (lambda file: [library.StartProcOrThread(Idle)], False, 0),
    "StepTimeout": (lambda file: [library.StepTimeout(3600, file=file)], False, 0),
    "StopAfter": (lambda file: [library.StopAfter(3600)], False, 0),
    "ControlFile": (lambda file: [library.ControlFile(FOLDER.name)], False, 0),
    "ThroughputTracker": (lambda file: [library.ThroughputTracker(), library.Monitors()], False, 0),
}

# What these put into `cbstate.monitors` is measured, and differs between any two runs; when they put it does not.
MEASURED = {
    "HostMemoryTracker",  # the memory that is free, and that of this process
    "ThroughputTracker",  # a clock
}


def quiet_defaults(file):
    made = {
        library.ProgressBar: lambda: library.ProgressBar(file, 1e9),
        library.MetricsPrinter: lambda: library.MetricsPrinter(file),
    }
    return [made.get(type(callback), type(callback))() for callback in library.default_callbacks()]


def test_every_built_in_callback_is_covered():
    named = {name: getattr(library, name) for name in library.__all__}
    found = {name for name, value in named.items() if isinstance(value, type) and issubclass(value, Callback)}
    assert found == {name for name in BUILT_IN if name.isidentifier()}


@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_callback_does_not_depend_on_windows(name, same, tell, keep):
    def run(length):
        file, log = io.StringIO(), EventLog()
        kept = keep("step.loss", "step.grads", "params", phase=AbstractTrainingPhase)
        callbacks = BUILT_IN[name][0](file)
        build = LEARNERS.get(name, testlearner)
        learner = build(log, *callbacks, kept, batches=STEPS, validation_batches=3, steps_per_call=length)
        learner.fit(EPOCHS)
        learner.fit(steps=20)
        printed = re.sub(
            r"[\d,]+ steps/s|[\d.]+ s\n|\([\d.]+ s\)|[\de.-]+ seconds?\n", "?", file.getvalue()
        )  # what a clock said
        told = tell(learner, log, kept)
        if name in MEASURED:
            monitors = learner.cbstate["monitors"]
            steps = {put: [step for step, _ in monitors.history(put)] for put in monitors}
            told["cbstate"] = {**learner.cbstate, "monitors": steps}
        return told, printed

    same(run, (7, "auto"))


@pytest.mark.parametrize("length", [1, 50])
@pytest.mark.parametrize("name", BUILT_IN)
def test_built_in_callback_reads_only_when_due(name, length, windows):
    make, reads_rows, each_epoch = BUILT_IN[name]

    def reads(steps):
        windows.clear()
        build = LEARNERS.get(name, testlearner)
        learner = build(*make(io.StringIO()), batches=steps, validation_batches=3, steps_per_call=length)
        before = learner._state.meter.reads
        learner.fit(EPOCHS)
        return learner._state.meter.reads - before, len(windows)

    count, used = reads(8 * STEPS)
    assert used < EPOCHS * 8 * STEPS / 16
    # The rows of a window come in one read; how many of its steps ran stands there, too, so they always come.
    rows = used if reads_rows or length > 1 else 0
    assert count <= rows + EPOCHS * each_epoch


@pytest.mark.parametrize("length", [1, 50])
def test_large_values_are_read_once_per_window(length, keep, windows):
    kept = keep("step.loss", "step.outputs", phase=AbstractTrainingPhase)
    learner = testlearner(kept, batches=200, batch_size=100, validation_batches=0, steps_per_call=length)
    before = learner._state.meter.reads
    learner.fit(1)
    assert len(kept.seen) == 200
    assert learner._state.meter.reads - before == 2 * len(windows) < 20  # the rows and the outputs
