"""The trackers of throughput, memory and GPUs: which values they log at which step, and that no thread is left."""

import itertools
import sys
import threading
import time
import warnings
from types import SimpleNamespace

import pytest

from fluxcb import Append, Callback, DeclarationError, MissingStateError, every, on
from fluxcb.callbacks import (
    DeviceMemoryTracker,
    GPUUtilizationTracker,
    HostMemoryTracker,
    Monitors,
    ThroughputTracker,
)
from fluxcb.events import EpochEnd, StepBegin, StepEnd, Trigger
from fluxcb.phases import TrainingPhase, ValidationPhase
from fluxcb.testing import testlearner


def history(learner, name):
    return learner.cbstate["monitors"].history(name)


@pytest.mark.parametrize("tracker", [ThroughputTracker, HostMemoryTracker, DeviceMemoryTracker, GPUUtilizationTracker])
def test_trackers_require_monitors(tracker, nvml):
    with pytest.raises(MissingStateError, match=r"`cbstate\.monitors`, which no callback"):
        testlearner(tracker())


# --- ThroughputTracker ----------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """Return a list whose one number is the time (seconds)."""
    now = [100.0]
    monkeypatch.setattr("fluxcb.callbacks.progress.throughput.monotonic", lambda: now[0])
    monkeypatch.setattr("fluxcb._declare.schedules.time.monotonic", lambda: now[0])
    return now


class Takes(Callback):
    """Lets time pass: before each training step, behind it, in validation, and after each epoch."""

    def __init__(self, clock, step=1.0, behind=0.0, validation=50.0, epoch=100.0):
        self.clock, self.step, self.behind, self.validation, self.epoch = clock, step, behind, validation, epoch

    def stateaccess(self):
        return {"control": Append()}

    @on
    def before_step(self, event: StepBegin, phase: TrainingPhase, learner):
        self.clock[0] += self.step

    @on
    def after_step(self, event: StepEnd, phase: TrainingPhase, learner):
        self.clock[0] += self.behind

    @on
    def after_validation(self, event: EpochEnd, phase: ValidationPhase, learner):
        self.clock[0] += self.validation

    @on(Trigger, TrainingPhase, access={})
    def after_epoch(self, event, phase, learner):
        self.clock[0] += self.epoch


RATE, NOW = "Throughput (steps/sec)", "Throughput now (steps/sec)"


# tensorpack's own values with this clock (4 steps an epoch, 1 s a step, 100 s between epochs), measured on it
@pytest.mark.parametrize(
    ("tracker", "behind", "name", "expected"),
    [
        (lambda: ThroughputTracker(), 0, RATE, [(4, 1.0), (8, 1.0)]),
        (lambda: ThroughputTracker(32), 0, "Throughput (samples/sec)", [(4, 32.0), (8, 32.0)]),
        (lambda: every(ThroughputTracker(), steps=3), 0, RATE, [(3, 1.0), (6, 1.0)]),
        (lambda: ThroughputTracker(), 1, RATE, [(4, 0.5), (8, 0.5)]),
        (lambda: every(ThroughputTracker(), epochs=2), 0, RATE, [(8, 1.0)]),
    ],
)
def test_throughput_only_counts_the_time_of_training_epochs(tracker, behind, name, expected, clock):
    learner = testlearner(Takes(clock, behind=behind), tracker(), Monitors())
    learner.fit(2)
    assert history(learner, name) == expected


def test_the_current_throughput_is_logged_within_an_epoch(clock):
    # 20 steps of 1 s: 5 s have passed at each fifth step, whatever the clock was asked in between.
    learner = testlearner(Takes(clock), ThroughputTracker(seconds=5), Monitors(), batches=20, validation_batches=0)
    learner.fit(1)
    steps, rates = zip(*history(learner, NOW), strict=True)
    assert set(rates) == {1.0}
    assert all(later - earlier >= 5 for earlier, later in itertools.pairwise(steps))
    assert history(learner, RATE) == [(20, 1.0)]


def test_two_triggers_at_one_step_log_one_value(clock):
    """tensorpack puts 0.0 the second time, or fails."""
    learner = testlearner(Takes(clock), ThroughputTracker(), Monitors())
    learner.fit(1)
    learner.trigger()
    assert history(learner, RATE) == [(4, 1.0)]


def test_no_value_is_logged_without_elapsed_time(clock):
    learner = testlearner(Takes(clock, step=0, validation=0, epoch=0), ThroughputTracker(), Monitors())
    learner.fit(2)
    assert learner.cbstate["monitors"].names() == []


def test_each_fit_resets_the_clock(clock):
    learner = testlearner(Takes(clock), ThroughputTracker(), Monitors())
    for _ in range(2):
        learner.fit(1)
        clock[0] += 1000
    assert history(learner, RATE) == [(4, 1.0), (8, 1.0)]


def test_throughput_does_not_shorten_windows():
    learner = testlearner(ThroughputTracker(), Monitors(), steps_per_call=4)
    learner.fit(1)
    assert "ended by  nothing" in learner.explain_windows()


@pytest.mark.parametrize("samples", [0, -1, 1.5, True, "32"])
def test_throughput_tracker_rejects_invalid_arguments(samples, refused):
    text = (
        f"`samples_per_step` of `ThroughputTracker` must be a whole number of at least 1, not {samples!r}.\n"
        "  why:   periods and counts are whole numbers of steps or epochs\n"
        "  fix:   pass a positive int"
    )
    with refused(DeclarationError, text):
        ThroughputTracker(samples)


def test_a_period_of_zero_seconds_is_rejected(refused):
    text = (
        "The period of `EverySeconds` (seconds) must be a number above 0, not 0.\n"
        "  fix:   pass a positive number of seconds"
    )
    with refused(DeclarationError, text):
        ThroughputTracker(seconds=0)


# --- HostMemoryTracker ----------------------------------------------------------------------------------------------


def test_host_memory(monkeypatch):
    process = SimpleNamespace(memory_info=lambda: SimpleNamespace(rss=3 * 1024**3))
    psutil = SimpleNamespace(virtual_memory=lambda: SimpleNamespace(available=12.5 * 1024**3), Process=lambda: process)
    monkeypatch.setitem(sys.modules, "psutil", psutil)
    learner = testlearner(HostMemoryTracker(), Monitors())
    learner.fit(2)
    assert history(learner, "HostFreeMemory (GB)") == [(4, 12.5), (8, 12.5)]
    assert history(learner, "ProcessMemory (GB)") == [(4, 3.0), (8, 3.0)]


def test_host_memory_of_the_real_machine():
    psutil = pytest.importorskip("psutil")
    learner = testlearner(HostMemoryTracker(), Monitors())
    learner.fit(1)
    latest = learner.cbstate["monitors"].latest
    assert 0 < latest("HostFreeMemory (GB)") <= psutil.virtual_memory().total / 1024**3
    assert 0.01 < latest("ProcessMemory (GB)") <= psutil.virtual_memory().total / 1024**3


@pytest.mark.parametrize(
    ("module", "tracker", "package", "extra"),
    [
        ("psutil", HostMemoryTracker, "psutil", "psutil"),
        ("pynvml", GPUUtilizationTracker, "pynvml", "nvml"),
    ],
)
def test_a_missing_library_is_named(module, tracker, package, extra, monkeypatch, refused):
    monkeypatch.setitem(sys.modules, module, None)
    text = (
        f"`{tracker.__name__}` needs the package `{package}`, which is not installed.\n"
        f"  fix:   `pip install 'fluxcb[{extra}]'`"
    )
    callback = tracker()  # a set of callbacks can be checked where the library is not
    with refused(DeclarationError, text):
        testlearner(callback, Monitors())


# --- DeviceMemoryTracker --------------------------------------------------------------------------------------------


class Device:
    platform = "gpu"

    def __init__(self, number, *peaks):
        self.id, self.peaks = number, list(peaks)

    def memory_stats(self):
        return {"bytes_in_use": 1, "peak_bytes_in_use": self.peaks.pop(0)}


def test_the_peak_memory_of_each_device_is_logged_after_each_epoch():
    devices = [Device(0, 2_500_000, 3_000_000), Device(1, 1, 2)]
    learner = testlearner(DeviceMemoryTracker(devices), Monitors())
    learner.fit(2)
    assert history(learner, "PeakMemory (MB)/gpu:0") == [(4, 2.5), (8, 3.0)]
    assert history(learner, "PeakMemory (MB)/gpu:1") == [(4, 1e-6), (8, 2e-6)]


def test_a_device_without_statistics_warns_once_and_is_not_logged():
    device = SimpleNamespace(platform="cpu", id=0, memory_stats=lambda: None)
    learner = testlearner(DeviceMemoryTracker([device, Device(1, 1e6, 1e6)]), Monitors())
    with pytest.warns(UserWarning, match="gpu:1") as caught:
        learner.fit(2)
    assert [str(warning.message) for warning in caught] == [
        "DeviceMemoryTracker(cpu:0, gpu:1) does not log the memory of cpu:0, because it has no memory statistics."
    ]
    assert learner.cbstate["monitors"].names() == ["PeakMemory (MB)/gpu:1"]


def test_the_devices_of_this_machine():
    import jax

    learner = testlearner(DeviceMemoryTracker(), Monitors())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        learner.fit(1)
    with_statistics = [d for d in jax.local_devices() if d.memory_stats()]
    assert len(learner.cbstate["monitors"]) == len(with_statistics)
    assert len(caught) == len(jax.local_devices()) - len(with_statistics)


@pytest.mark.parametrize("devices", [[], [0], "gpu:0", 3])
def test_values_that_are_not_devices_are_rejected(devices, refused):
    text = (
        f"`devices` of `DeviceMemoryTracker` must be JAX devices, not {devices!r}.\n"
        "  fix:   write e.g. `jax.local_devices()`"
    )
    with refused(DeclarationError, text):
        DeviceMemoryTracker(devices)


# --- GPUUtilizationTracker ------------------------------------------------------------------------------------------


class NVML:
    """NVIDIA's library, with two GPUs whose utilisation is listed beforehand; the last value stays."""

    class NVMLError(Exception):
        pass

    def __init__(self, values=None, count=2):
        self.values = values or {0: [50], 1: [10]}
        self.count, self.users, self.told = count, 0, {0: [], 1: []}
        self.failure = None

    def nvmlInit(self):  # noqa: N802 - its names
        if self.failure == "init":
            raise self.NVMLError("Driver Not Loaded")
        self.users += 1

    def nvmlShutdown(self):  # noqa: N802
        self.users -= 1

    def nvmlDeviceGetCount(self):  # noqa: N802
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        if index >= self.count:
            raise self.NVMLError("Invalid Argument")
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid):  # noqa: N802
        return int(uuid.removeprefix("GPU-"))

    def nvmlDeviceGetUtilizationRates(self, handle):  # noqa: N802
        if self.failure == "sample":
            raise self.NVMLError("GPU is lost")
        values = self.values[handle]
        self.told[handle].append(values.pop(0) if len(values) > 1 else values[0])
        return SimpleNamespace(gpu=self.told[handle][-1], memory=99)


@pytest.fixture
def nvml(monkeypatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    library = NVML()
    monkeypatch.setitem(sys.modules, "pynvml", library)
    return library


def gpu_threads():
    return [thread.name for thread in threading.enumerate() if thread.name == "fluxcb-gpu-utilization"]


class Waits(Callback):
    """Waits in the last step of each training epoch until each GPU has been asked three times, and after the epoch."""

    def __init__(self, nvml):
        self.nvml, self.means, self.threads = nvml, [], []

    @on
    def wait_in_step(self, event: StepEnd, phase: TrainingPhase, learner):
        ends = time.monotonic() + 600
        while learner.progress.step_in_epoch == 4 and len(self.nvml.told[1]) < 3:
            assert time.monotonic() < ends
            time.sleep(0.001)

    @on
    def wait_after_epoch(self, event: Trigger, phase: TrainingPhase, learner):
        self.means.append([(learner.progress.step, sum(told) / len(told)) for told in self.nvml.told.values()])
        self.nvml.told = {0: [], 1: []}
        self.threads += gpu_threads()
        time.sleep(0.05)
        assert self.nvml.told == {0: [], 1: []}  # what happens after an epoch is not sampled


def test_the_mean_over_an_epoch_is_logged_for_each_gpu(nvml):
    nvml.values = {0: [10, 20, 90, 40, 100, 80, 50], 1: [0, 0, 0, 4, 7, 9, 50]}
    waits = Waits(nvml)
    learner = testlearner(waits, GPUUtilizationTracker(interval=0.01), Monitors(), steps_per_call=1)
    learner.fit(2)
    assert [history(learner, "GPUUtil/0"), history(learner, "GPUUtil/1")] == [
        list(m) for m in zip(*waits.means, strict=True)
    ]
    assert waits.means[0][0][1] not in (10.0, 50.0)  # of several samples
    assert waits.threads == []
    assert nvml.users == 0


def test_an_epoch_shorter_than_the_interval_has_one_sample(nvml):
    nvml.values = {0: [30, 70], 1: [1, 2]}
    learner = testlearner(GPUUtilizationTracker(interval=3600), Monitors())
    learner.fit(2)
    assert history(learner, "GPUUtil/0") == [(4, 30.0), (8, 70.0)]
    assert history(learner, "GPUUtil/1") == [(4, 1.0), (8, 2.0)]
    assert gpu_threads() == []
    assert nvml.users == 0


@pytest.mark.parametrize(
    ("given", "visible", "names"),
    [
        (None, None, ["0", "1"]),
        (None, "1", ["1"]),
        (None, "1,0,-1,2", ["1", "0"]),
        (None, "GPU-1", ["GPU-1"]),
        ([1], "0", ["1"]),
        (["GPU-0", 1], None, ["GPU-0", "1"]),
    ],
)
def test_gpus_are_selected_by_number_uuid_or_environment(given, visible, names, nvml, monkeypatch):
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    learner = testlearner(GPUUtilizationTracker(given, interval=3600), Monitors())
    learner.fit(1)
    assert learner.cbstate["monitors"].names() == [f"GPUUtil/{name}" for name in names]


def test_a_driver_failure_during_training_warns_once_and_does_not_end_the_training(nvml):
    """tensorpack ends the training as if it were done."""
    learner = testlearner(GPUUtilizationTracker([0]), Monitors())
    nvml.failure = "sample"
    with pytest.warns(UserWarning, match="GPU is lost") as caught:
        learner.fit(3)
    assert [str(warning.message) for warning in caught] == [
        "GPUUtilizationTracker([0]): the driver does not report the utilization: NVMLError: GPU is lost"
    ]
    assert (learner.step, learner.cbstate["monitors"].names()) == (12, [])
    assert nvml.users == 0


def test_the_thread_ends_when_a_fit_fails(nvml):
    class Fails(Callback):
        @on
        def fail(self, event: StepEnd, phase: TrainingPhase, learner):
            assert gpu_threads()
            raise RuntimeError("no")

    learner = testlearner(GPUUtilizationTracker([0]), Monitors(), Fails())
    with pytest.raises(RuntimeError, match="no"):
        learner.fit(1)
    assert gpu_threads() == []
    assert nvml.users == 0


def test_a_machine_without_a_gpu_is_an_error(nvml, refused):
    nvml.failure = "init"
    text = (
        "`GPUUtilizationTracker` cannot find an NVIDIA driver: Driver Not Loaded.\n"
        "  why:   this machine has no NVIDIA GPU, or the GPU cannot be used\n"
        "  fix:   remove the callback on this machine"
    )
    with refused(DeclarationError, text):
        testlearner(GPUUtilizationTracker(), Monitors())


@pytest.mark.parametrize("visible", [None, "", "-1"])
def test_a_machine_with_hidden_gpus_is_an_error(visible, nvml, monkeypatch, refused):
    if visible is None:
        nvml.count = 0
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    text = (
        "`GPUUtilizationTracker` cannot find an NVIDIA GPU.\n"
        "  why:   the driver reports no GPU, or `CUDA_VISIBLE_DEVICES` is empty\n"
        "  fix:   remove the callback on this machine"
    )
    with refused(DeclarationError, text):
        testlearner(GPUUtilizationTracker(), Monitors())


def test_a_missing_gpu_is_an_error(nvml, refused):
    text = (
        "`GPUUtilizationTracker` cannot find GPU 2: Invalid Argument.\n"
        "  why:   the number of GPUs on this machine is 2\n"
        "  fix:   use a GPU that `nvidia-smi -L` lists"
    )
    with refused(DeclarationError, text):
        testlearner(GPUUtilizationTracker([0, 2]), Monitors())
    assert nvml.users == 0


@pytest.mark.parametrize("devices", [[], 0, "0", [-1], [True], [1.5], ["0"]])
def test_values_that_do_not_name_gpus_are_rejected(devices, refused):
    text = (
        f"`devices` of `GPUUtilizationTracker` must be a list of GPU numbers or UUIDs, not {devices!r}.\n"
        '  fix:   write e.g. `[0, 1]`, or a UUID from `nvidia-smi -L` such as `["GPU-8d6b..."]`'
    )
    with refused(DeclarationError, text):
        GPUUtilizationTracker(devices)


def test_an_interval_of_zero_is_rejected(refused):
    text = (
        "`interval` of `GPUUtilizationTracker` (seconds) must be a number above 0, not 0.\n"
        "  fix:   give a finite number above 0"
    )
    with refused(DeclarationError, text):
        GPUUtilizationTracker(interval=0)


def test_without_a_hub_the_error_names_monitors():
    with pytest.raises(MissingStateError) as raised:
        testlearner(ThroughputTracker())
    assert raised.value.fix == ("add `Monitors()` to the callbacks, which creates it",)
