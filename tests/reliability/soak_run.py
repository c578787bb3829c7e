"""A long training with every compatible built-in callback. It prints its resources ten times, as JSON.

To train for a million steps, run `python tests/reliability/soak_run.py 1000000`. With the argument `exchanged`, the
excluded callbacks replace those that they conflict with.
"""

import collections
import ctypes
import gc
import itertools
import json
import os
import sys
import tempfile
import threading
import types
import warnings
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fluxcb
import fluxcb.callbacks as library
from fluxcb import Append, Callback, Learner, Read, every, on, throttle
from fluxcb.callbacks.hyperparams.hyperparameter import HyperParameter
from fluxcb.callbacks.saving import snapshot_saver
from fluxcb.checkpoints.run_folder import RunFolder
from fluxcb.events import StepEnd
from fluxcb.logging import CSVBackend, JSONLinesBackend, TensorBoardBackend
from fluxcb.phases import TrainingPhase

EPOCH = 1000  # steps
HISTORY = 200  # values of a name that `Monitors` keeps, at least
CLASSES = 3
BYTES_OF_A_NUMBER = 32  # a float or an int, as Python's allocator rounds it

LIBC = ctypes.CDLL(None)
SAVES = collections.Counter()  # checkpoints written, by directory


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
        return types.SimpleNamespace(gpu=50)


class Parameter(HyperParameter):
    def __init__(self, name):
        self.name = name


class ByEpoch(library.HyperParamSetter):
    def next_value(self, learner):
        return 1e-8 / (1 + learner.progress.epoch % 7)


class Idle(threading.Thread):
    def __init__(self):
        super().__init__(daemon=True)
        self._over = threading.Event()
        self.stop = self._over.set

    def run(self):
        self._over.wait()


class LogsLoss(Callback):
    """Log a number under one name at every 50th step, like callbacks of users."""

    def stateaccess(self):
        return {"step": {"loss": Read()}, "cbstate": {"monitors": Append()}}

    @on
    def log(self, event: StepEnd, phase: TrainingPhase, learner):
        learner.cbstate.monitors.put_scalar("loss", learner.step.loss)


def batches(seed, count):
    rng = np.random.default_rng(seed)
    classes = rng.integers(0, CLASSES, (count, 8))
    images = rng.normal(size=(count, 8, 6, 6, 1)) + 2 * (np.arange(6) // 2 == classes[..., None])[..., None, None]
    return list(zip(images.astype(np.float32), classes, strict=True))


class Cycled:
    """The same few batches, repeated `EPOCH` times."""

    def __init__(self):
        self.batches = batches(0, 8)

    def __iter__(self):
        return itertools.islice(itertools.cycle(self.batches), EPOCH)

    def __len__(self):
        return EPOCH


def sync(learner):
    learner.cbstate.target = learner.params


def read_loss(learner):
    float(learner.step.loss)


def makers(folder, nothing, sent):
    """Return functions that create the callbacks; expensive callbacks have a schedule."""
    validation = batches(1, 2)
    (folder / "hyper.txt").write_text("weight_decay: 0.0001")
    loss = {"step": {"loss": Read()}}

    def custom():
        return library.CustomCallback(read_loss, StepEnd, access=loss)

    return {
        "AccumulateGradients": lambda: library.AccumulateGradients(3),
        "CallbackFactory": lambda: library.CallbackFactory(trigger=lambda learner: None),
        "CheckNumerics": library.CheckNumerics,
        "CheckReplicas": library.CheckReplicas,
        "Checkpointer": lambda: library.Checkpointer(folder / "run", epochs=50, keep_last=2),
        "ClipGradients": lambda: library.ClipGradients(1.0),
        "ConditionalCallback": lambda: library.ConditionalCallback(custom(), library.FrequencyThrottle(30, StepEnd)),
        "CustomCallback": lambda: throttle(custom(), StepEnd, freq=20),
        "CutMix": library.CutMix,
        "DataParallelInferenceRunner": lambda: library.DataParallelInferenceRunner(
            validation, library.ScalarStats("loss"), name="parallel"
        ),
        "Debugger": lambda: library.Debugger(lambda learner: False),
        "DeviceMemoryTracker": lambda: library.DeviceMemoryTracker([FakeGPU]),
        "DumpArrays": lambda: every(library.DumpArrays(["step.loss", "params"], folder / "arrays", keep=3), steps=500),
        "DumpImages": lambda: every(library.DumpImages("step.xs", folder / "images", keep=2), steps=EPOCH),
        "DynamicLossScale": library.DynamicLossScale,
        "EarlyStopping": lambda: library.EarlyStopping(10**6),
        "EnableCallbackIf": lambda: every(library.EnableCallbackIf(custom(), lambda learner: True), steps=10),
        "EstimatedTimeLeft": lambda: library.EstimatedTimeLeft(file=nothing),
        "Freeze": lambda: library.Freeze("frozen"),
        "GPUUtilizationTracker": lambda: library.GPUUtilizationTracker([0]),
        "GarbageCollect": lambda: library.GarbageCollect(epochs=5),
        "GradientNoise": lambda: library.GradientNoise(0.01),
        "HookToCallback": lambda: every(library.HookToCallback(lambda step, values: None, values=["loss"]), steps=10),
        "HostMemoryTracker": library.HostMemoryTracker,
        "HumanHyperParamSetter": lambda: library.HumanHyperParamSetter(Parameter("weight_decay"), folder / "hyper.txt"),
        "HyperParamSetter": lambda: ByEpoch(Parameter("eps")),
        "HyperParamSetterWithFunc": lambda: library.HyperParamSetterWithFunc(
            Parameter("b2"), lambda epoch, current: 0.999 - 0.001 * (epoch % 5)
        ),
        "InferenceRunner": lambda: library.InferenceRunner(validation, library.ScalarStats("loss")),
        "InjectShell": lambda: library.InjectShell(folder / "INJECT_SHELL.tmp"),
        "LabelSmoothing": library.LabelSmoothing,
        "LogHistograms": lambda: library.LogHistograms(freq=EPOCH),
        "LogHyperParams": library.LogHyperParams,
        "LogMetrics": lambda: library.LogMetrics(),
        "LogSummaries": lambda: library.LogSummaries("step.loss", period=100),
        "LogTraces": library.LogTraces,
        "LogVisualization": lambda: library.LogVisualization(
            lambda xs: (xs > 0).astype("float32"), "step.xs", freq=EPOCH
        ),
        "LossSpikeGuard": lambda: library.LossSpikeGuard(10.0, window=8),
        "MaxSaver": lambda: every(library.MaxSaver(folder / "best", "accuracy"), epochs=2),
        "Metrics": lambda: library.Metrics(library.accuracy),
        "FitSummary": lambda: library.FitSummary(nothing),
        "MetricsPrinter": lambda: library.MetricsPrinter(nothing),
        "MinSaver": lambda: every(library.MinSaver(folder / "best"), epochs=2),
        "MixUp": library.MixUp,
        "ModelSaver": lambda: every(library.ModelSaver(folder / "models", max_to_keep=1), epochs=50),
        "ModelSummary": lambda: library.ModelSummary(nothing),
        "Monitors": lambda: library.Monitors(
            JSONLinesBackend(folder / "log.jsonl"),
            CSVBackend(folder / "log.csv"),
            *([TensorBoardBackend(folder / "tensorboard")] if find_spec("tensorboardX") else []),
            history=HISTORY,
        ),
        "MovingAverage": lambda: library.MovingAverage("step.loss"),
        "ParameterEMA": library.ParameterEMA,
        "PeriodicCallback": lambda: library.PeriodicCallback(custom(), every_k_steps=50, every_k_epochs=2),
        "PeriodicTrigger": lambda: library.PeriodicTrigger(
            library.RunFunction(sync, init=sync, access={"params": Read(), "cbstate": {"target": fluxcb.Write()}}),
            every_k_steps=500,
        ),
        "PrintArrays": lambda: every(library.PrintArrays(["step.loss", "params"], nothing), steps=200),
        "ProcessArrays": lambda: every(library.ProcessArrays("step.loss", float), steps=10),
        "Profiler": lambda: library.Profiler(folder / "profile", steps=(30, 32)),
        "ProgressBar": lambda: library.ProgressBar(nothing),
        "ProxyCallback": lambda: throttle(library.ProxyCallback(custom()), StepEnd, freq=20),
        "Recorder": library.Recorder,
        "ReduceLROnPlateau": lambda: library.ReduceLROnPlateau(0.9, patience=2),
        "RunFunction": lambda: library.RunFunction(lambda learner: None),
        "SanityCheck": library.SanityCheck,
        "ScheduledHyperParamSetter": lambda: library.ScheduledHyperParamSetter(
            Parameter("b1"), [(0, 0.9), (10**6, 0.8)], "linear"
        ),
        "Scheduler": lambda: library.Scheduler({"eps_root": lambda step: 1e-9 * (step % 100)}),
        "SendMonitorData": lambda: library.SendMonitorData(sent.append, "loss"),
        "SendStat": lambda: every(library.SendStat(["true", "{loss}"], "loss"), epochs=10),
        "SimpleMovingAverage": lambda: library.SimpleMovingAverage("step.loss", 100),
        # `LossSpikeGuard` skips a tenth of the steps here, so the list is full after the first thousand.
        "BadSteps": lambda: library.BadSteps(keep_last=100),
        "SkipNonFinite": library.SkipNonFinite,
        "StartProcOrThread": lambda: library.StartProcOrThread(Idle),
        "StatMonitorParamSetter": lambda: library.StatMonitorParamSetter(
            Parameter("unused"), "loss", lambda value: value / 2, 0, 5
        ),
        "StepTimeout": lambda: library.StepTimeout(300),
        "StochasticWeightAveraging": lambda: library.StochasticWeightAveraging(1000, every=100),
        "ControlFile": lambda: library.ControlFile(folder),
        "StopAfter": lambda: library.StopAfter(10**6),
        "StopOnNaNLoss": library.StopOnNaNLoss,
        "ThroughputTracker": library.ThroughputTracker,
        "ToDevice": lambda: library.ToDevice(jax.devices()[0]),
        "Traces": lambda: every(
            library.Traces({"square": lambda learner: learner.step.loss**2}, access=loss), steps=EPOCH
        ),
    }


# Which of the callbacks cannot be there, and beside whom not.
EXCLUDED = {"MixUp": "CutMix", "StopOnNaNLoss": "SkipNonFinite", "StochasticWeightAveraging": "ParameterEMA"}


def callbacks_of(make, exchanged):
    """Create all callbacks except the excluded ones, or the excluded ones instead of those that they conflict with."""
    left_out = EXCLUDED.values() if exchanged else EXCLUDED
    made = {name: function() for name, function in make.items() if name not in left_out}
    return [
        *made.values(),
        every(LogsLoss(), steps=50),
    ]


def loss_of(outputs, ys):
    """Return the cross-entropy with classes, or with class probabilities if images were mixed."""
    if ys.ndim == 1:
        return optax.softmax_cross_entropy_with_integer_labels(outputs, ys).mean()
    return optax.softmax_cross_entropy(outputs, ys).mean()


def adamw(learning_rate, b1, b2, eps, eps_root, weight_decay, unused):
    return optax.adamw(learning_rate, b1, b2, eps, eps_root, weight_decay=weight_decay)


def build(callbacks):
    return Learner(
        (
            lambda key, xs: {"w": jnp.zeros((36, CLASSES)), "frozen": jnp.zeros(CLASSES)},
            lambda params, xs: xs.reshape(len(xs), -1) @ params["w"] + params["frozen"],
        ),
        loss_of,
        fluxcb.inject(
            adamw, learning_rate=0.01, b1=0.9, b2=0.999, eps=1e-8, eps_root=0.0, weight_decay=1e-4, unused=1.0
        ),
        data=(Cycled(), batches(2, 2)),
        callbacks=callbacks,
        default_callbacks=False,
    )


# --- what is held -----------------------------------------------------------------------------------------------------


def resident():
    """Return the resident memory of this process in bytes, without free memory that malloc keeps."""
    if hasattr(LIBC, "malloc_trim"):
        LIBC.malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def history_of(learner):
    """Return the bytes and objects of the values that `Metrics` keeps for every step, which may grow."""
    log = learner.cbstate["metrics_step"]["training"]
    numbers = len(log.steps) * (1 + len(log.values))
    lists = [log.steps, *log.values.values()]
    return numbers * BYTES_OF_A_NUMBER + sum(map(sys.getsizeof, lists)), numbers


def held(learner, folder):
    gc.collect()
    of_history, numbers = history_of(learner)
    return {
        "step": learner.step,
        "bytes": resident() - of_history,
        "objects": sys.getallocatedblocks() - numbers,
        "arrays": len(jax.live_arrays()),
        "threads": threading.active_count(),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "compiles": learner.compile_counts["compiles"],
        "files": files_in(folder),
        "saves": SAVES.total(),
    }


def files_in(folder):
    """Return the number of files in each part of a folder, and their bytes."""
    found = {}
    for path in folder.rglob("*"):
        if path.is_file():
            count, size = found.setdefault(path.relative_to(folder).parts[0], [0, 0])
            found[path.relative_to(folder).parts[0]] = [count + 1, size + path.stat().st_size]
    return found


class CountedRunFolder(RunFolder):
    def commit(self, written, step):
        SAVES[self.path.name] += 1
        return super().commit(written, step)


def main(steps, exchanged):
    sys.modules["pynvml"] = FakeGPU  # pyright: ignore[reportArgumentType]  # as good as a module
    snapshot_saver.RunFolder = CountedRunFolder
    warnings.simplefilter("error")
    with tempfile.TemporaryDirectory() as name, open(os.devnull, "w") as nothing:
        folder, sent = Path(name), collections.deque(maxlen=10)
        learner = build(callbacks_of(makers(folder, nothing, sent), exchanged))
        for at in range(1, 11):
            learner.fit(steps=steps * at // 10 - learner.step)
            print(json.dumps({**held(learner, folder), "sent": len(sent)}), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), "exchanged" in sys.argv[2:])
