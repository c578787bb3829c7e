"""Functions that create every public callback, for tests of all callbacks."""

import io
import tempfile
import threading
import warnings
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fluxcb.callbacks as library
from fluxcb import Append, Callback, Learner, Read, Write, on
from fluxcb.events import BackwardEnd, StepEnd
from fluxcb.phases import TrainingPhase


def log_loss(learner):
    learner.cbstate.losses.append(float(learner.step.loss))


class Losses(Callback):
    def stateaccess(self):
        return {"cbstate": {"losses": Append()}}

    def init(self, learner):
        if "losses" not in learner.cbstate:
            learner.cbstate.losses = []


class SkipsSteps(Callback):
    def stateaccess(self):
        return {"step": {"skip": Append()}}

    @on
    def skip(self, event: BackwardEnd, phase: TrainingPhase, learner):
        learner.step.skip = learner.progress.step % 3 == 2


def logging_losses():
    return library.CustomCallback(log_loss, StepEnd, access={"step": {"loss": Read()}, "cbstate": {"losses": Append()}})


def mean_output(outputs, ys):
    return outputs.mean()


def max_saver(folder):
    """Return a `MaxSaver` that watches the loss, which all Learners of these tests have."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # it keeps the worst loss
        return library.MaxSaver(folder, "loss")


def noted(learner):
    learner.cbstate.losses.append(float(learner.params["w"]))


def sync(learner):
    learner.cbstate.target = learner.params


SYNC = {"params": Read(), "cbstate": {"target": Write()}}


class Idle(threading.Thread):
    def __init__(self):
        super().__init__()
        self.stop = threading.Event().set


def of_images(*callbacks, default_callbacks):
    """Return a Learner that classifies which of three bands of an image is the brightest."""
    rng = np.random.default_rng(0)
    classes = rng.integers(0, 3, (4, 8))
    images = rng.normal(size=(4, 8, 6, 6, 1)) + 2 * (np.arange(6) // 2 == classes[..., None])[..., None, None]
    return Learner(
        (lambda key, xs: {"w": jnp.zeros((36, 3))}, lambda params, xs: xs.reshape(len(xs), -1) @ params["w"]),
        lambda outputs, ys: optax.softmax_cross_entropy_with_integer_labels(outputs, ys).mean(),
        optax.sgd(0.1),
        data=list(zip(images.astype(np.float32), classes, strict=True)),
        callbacks=callbacks,
        default_callbacks=default_callbacks,
    )


class ByEpoch(library.HyperParamSetter):
    def next_value(self, learner):
        return 0.1 / (1 + learner.progress.epoch)


FOLDER = tempfile.TemporaryDirectory()


def by_hand():
    file = Path(FOLDER.name) / "hyper.txt"
    file.write_text("learning_rate: 0.05")
    return file


class FakeGPU:
    """Fake a GPU of JAX and the NVIDIA library, for machines without a GPU."""

    platform, id = "gpu", 0
    NVMLError = type("NVMLError", (Exception,), {})

    @staticmethod
    def memory_stats():
        return {"peak_bytes_in_use": 12_500_000}

    @staticmethod
    def nvmlInit():  # noqa: N802 - its names
        pass

    nvmlShutdown = nvmlInit  # noqa: N815

    @staticmethod
    def nvmlDeviceGetHandleByIndex(index):  # noqa: N802
        return index

    @staticmethod
    def nvmlDeviceGetUtilizationRates(handle):  # noqa: N802
        return SimpleNamespace(gpu=50)


class LogsLoss(Callback):
    def stateaccess(self):
        return {"step": {"loss": Read()}, "cbstate": {"monitors": Append()}}

    @on
    def log(self, event: StepEnd, phase: TrainingPhase, learner):
        learner.cbstate.monitors.put_scalar("loss", learner.step.loss)


def folder():
    return tempfile.mkdtemp(dir=FOLDER.name)


def squares():
    return library.Traces({"square": lambda learner: learner.step.loss**2}, access={"step": {"loss": Read()}})


VALIDATION = [(np.ones((8, 1), np.float32), np.ones((8, 1), np.float32))]

# What cannot be made without arguments, or needs company; the others are found by themselves.
HOW = {
    "AccumulateGradients": {"make": lambda: library.AccumulateGradients(3)},
    "Checkpointer": {
        "make": lambda: library.Checkpointer(folder(), steps=3, keep_last=2),
        "handles": ["_files"],  # what is in the directory
    },
    "ClipGradients": {"make": lambda: library.ClipGradients(0.5)},
    "CustomCallback": {
        "make": logging_losses,
        "needs": [Losses],
    },
    "CutMix": {"learner": of_images},
    "Freeze": {"make": lambda: library.Freeze("b", epochs=1)},
    "HumanHyperParamSetter": {"make": lambda: library.HumanHyperParamSetter(library.LearningRate, by_hand())},
    "HyperParamSetter": {"make": lambda: ByEpoch(library.LearningRate)},
    "HyperParamSetterWithFunc": {
        "make": lambda: library.HyperParamSetterWithFunc(library.LearningRate, lambda epoch, current: current / 2),
    },
    "ScheduledHyperParamSetter": {
        "make": lambda: library.ScheduledHyperParamSetter(library.LearningRate, [(0, 0.05), (3, 0.01)], "linear"),
    },
    "StatMonitorParamSetter": {
        "make": lambda: library.StatMonitorParamSetter(library.LearningRate, "loss", lambda rate: rate / 2, 0, 1),
        "needs": [library.Metrics],
    },
    "DataParallelInferenceRunner": {
        "make": lambda: library.DataParallelInferenceRunner(VALIDATION, library.ScalarStats("loss")),
        "needs": [library.Monitors],
    },
    "DeviceMemoryTracker": {"make": lambda: library.DeviceMemoryTracker([FakeGPU]), "needs": [library.Monitors]},
    "DumpArrays": {"make": lambda: library.DumpArrays(["step.loss", "params"], folder(), keep=2)},
    "DumpImages": {
        "make": lambda: library.DumpImages("step.outputs", folder(), keep=1),
        "needs": [library.Monitors],
    },
    "LogHistograms": {"make": lambda: library.LogHistograms(freq=2), "needs": [library.Monitors]},
    "LogHyperParams": {"needs": [library.Monitors]},
    "LogMetrics": {"needs": [library.Metrics, library.Monitors]},
    "LogSummaries": {"make": lambda: library.LogSummaries("step.loss", period=3), "needs": [library.Monitors]},
    "LogTraces": {"needs": [squares, library.Monitors]},
    "LogVisualization": {
        "make": lambda: library.LogVisualization(lambda ys: (ys > 0).astype(np.float32), "step.ys", freq=3),
        "needs": [library.Monitors],
    },
    "MovingAverage": {"make": lambda: library.MovingAverage("step.loss"), "needs": [library.Monitors]},
    "PrintArrays": {"make": lambda: library.PrintArrays(["step.loss", "params"], io.StringIO())},
    "ProcessArrays": {"make": lambda: library.ProcessArrays("step.loss", float)},
    "SimpleMovingAverage": {
        "make": lambda: library.SimpleMovingAverage("step.loss", 3),
        "needs": [library.Monitors],
    },
    "Traces": {"make": lambda: squares()},
    "EarlyStopping": {"make": lambda: library.EarlyStopping(3), "needs": [library.Metrics]},
    "EstimatedTimeLeft": {"make": lambda: library.EstimatedTimeLeft(file=io.StringIO())},
    "GPUUtilizationTracker": {"make": lambda: library.GPUUtilizationTracker([0]), "needs": [library.Monitors]},
    "GarbageCollect": {"make": lambda: library.GarbageCollect(3)},
    "GradientNoise": {"make": lambda: library.GradientNoise(0.3)},
    "HostMemoryTracker": {"needs": [library.Monitors]},
    "InferenceRunner": {
        "make": lambda: library.InferenceRunner(VALIDATION, [library.ScalarStats("loss")]),
        "needs": [library.Monitors],
    },
    "LabelSmoothing": {"learner": of_images},
    "BadSteps": {"needs": [SkipsSteps]},
    "LossSpikeGuard": {"make": lambda: library.LossSpikeGuard(0.5, window=3)},
    "MaxSaver": {
        "make": lambda: max_saver(folder()),
        "needs": [library.Metrics],
        "handles": ["_files"],  # what is in the directory
    },
    "MinSaver": {
        "make": lambda: library.MinSaver(folder()),
        "needs": [library.Metrics],
        "handles": ["_files"],  # what is in the directory
    },
    "ModelSaver": {"make": lambda: library.ModelSaver(folder()), "handles": ["_files"]},
    "Metrics": {"make": lambda: library.Metrics(library.Metric(mean_output, name="mean"))},
    "FitSummary": {"make": lambda: library.FitSummary(io.StringIO())},
    "MetricsPrinter": {"make": lambda: library.MetricsPrinter(io.StringIO()), "needs": [library.Metrics]},
    "MixUp": {"learner": of_images},
    "Monitors": {"handles": ["_group"]},  # files and connections
    "ModelSummary": {"make": lambda: library.ModelSummary(io.StringIO())},
    "Profiler": {"make": lambda: library.Profiler(Path(FOLDER.name) / "profile", steps=(2, 3))},
    "ProgressBar": {"make": lambda: library.ProgressBar(io.StringIO(), interval=1e-9)},
    "ReduceLROnPlateau": {  # no epoch is better by so much
        "make": lambda: library.ReduceLROnPlateau(0.5, patience=0, threshold=1e6),
        "needs": [library.Metrics],
    },
    "SanityCheck": {"unused": ["optimizer", "callbacks"]},  # for checks of one's own
    "SendMonitorData": {
        "make": lambda: library.SendMonitorData(lambda record: None, "loss"),
        "needs": [library.Monitors, LogsLoss],
    },
    "SendStat": {
        "make": lambda: library.SendStat(["true", "{loss}"], "loss"),
        "needs": [library.Monitors, LogsLoss],
    },
    "StepTimeout": {"make": lambda: library.StepTimeout(3600)},
    "StopAfter": {"make": lambda: library.StopAfter(3600)},
    "ControlFile": {
        "make": lambda: library.ControlFile(folder()),
        "unused": ["callbacks", "snapshots"],  # there is no command
        "handles": ["_commands"],  # what is in the file
    },
    "Scheduler": {
        "make": lambda: library.Scheduler({library.LearningRate: optax.linear_schedule(0.1, 0.01, 10)}),
    },
    "StochasticWeightAveraging": {"make": lambda: library.StochasticWeightAveraging(3, every=2)},
    "ThroughputTracker": {"needs": [library.Monitors]},
    "ToDevice": {
        "make": lambda: library.ToDevice(jax.devices()[0]),
    },
    "CallbackFactory": {
        "make": lambda: library.CallbackFactory(
            before_train=noted, trigger=noted, access={"params": Read(), "cbstate": {"losses": Append()}}
        ),
        "needs": [Losses],
    },
    "ConditionalCallback": {
        "make": lambda: library.ConditionalCallback(logging_losses(), library.FrequencyThrottle(3, StepEnd)),
        "needs": [Losses],
    },
    "EnableCallbackIf": {
        "make": lambda: library.EnableCallbackIf(logging_losses(), lambda learner: learner.progress.step % 3 == 1),
        "needs": [Losses],
    },
    "HookToCallback": {"make": lambda: library.HookToCallback(lambda step, values: None, values=["loss"])},
    "PeriodicCallback": {
        "make": lambda: library.PeriodicCallback(logging_losses(), every_k_steps=3, every_k_epochs=2),
        "needs": [Losses],
    },
    "PeriodicTrigger": {
        "make": lambda: library.PeriodicTrigger(
            library.RunFunction(sync, init=sync, access=SYNC), every_k_steps=3, every_k_epochs=1, before_train=True
        ),
    },
    "ProxyCallback": {"make": lambda: library.ProxyCallback(logging_losses()), "needs": [Losses]},
    "RunFunction": {"make": lambda: library.RunFunction(sync, run_step=True, init=sync, access=SYNC)},
    "StartProcOrThread": {"make": lambda: library.StartProcOrThread(Idle)},
}


def found():
    """Return the names of all public callbacks."""
    named = {name: getattr(library, name) for name in library.__all__}
    return sorted(n for n, value in named.items() if isinstance(value, type) and issubclass(value, Callback))
