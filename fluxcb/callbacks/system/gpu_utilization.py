"""`GPUUtilizationTracker`: log the utilization of NVIDIA GPUs during training."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from fluxcb._declare.access import Append
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import EpochBegin, EpochEnd, Event, FitBegin, FitEnd
from fluxcb._declare.extras import library
from fluxcb._declare.handlers import on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._errors import DeclarationError
from fluxcb.callbacks.arguments import finite_number
from fluxcb.callbacks.logging.statistics_sent import warn_once

__all__ = ["GPUUtilizationTracker"]


class GPUUtilizationTracker(Callback):
    """Log the mean utilization of each NVIDIA GPU over a training epoch to `cbstate.monitors`.

    The values are logged under names such as `GPUUtil/0`, with the number or UUID of the GPU as in `devices`. The
    utilization is the fraction of time in which the GPU ran any kernel (percent), as reported by the driver (NVML). A
    background thread samples it during training epochs, but not during validation or other work after an epoch. If an
    epoch is shorter than `interval`, it has a single sample at its end. If the driver fails during training, the
    callback issues a warning once and does not log values.

    Args:
        devices: NVML numbers or UUIDs of GPUs. By default, the GPUs in `CUDA_VISIBLE_DEVICES`, or all GPUs if it is not
            set.
        interval: Time between two samples (seconds).

    Access:
        cbstate.monitors: Append.

    Runs:
        FitBegin, FitEnd x Phase, EpochBegin, EpochEnd x AbstractTrainingPhase (host).

    Cost:
        A thread that queries the driver every `interval`. The end of a training epoch waits a few milliseconds for the
        last sample. Fetches nothing.

    Raises:
        DeclarationError: `devices` contains an item that is not a number or a UUID, or `interval` is not a positive
            number. When the Learner is built: nvidia-ml-py is not installed, there is no NVIDIA driver or GPU, or a GPU
            in `devices` does not exist.
        MissingStateError: There is no `Monitors` (when the Learner is built).

    Example:
        >>> from fluxcb.callbacks import GPUUtilizationTracker
        >>> GPUUtilizationTracker([0, 1], interval=0.5)
        GPUUtilizationTracker([0, 1])

    Source:
        tensorpack, `GPUUtilizationTracker`, which forks a process, and ends the training without an error if that
        process fails.
    """

    def __init__(self, devices: Sequence[int | str] | None = None, *, interval: float = 1.0) -> None:
        self.devices = None if devices is None else _checked(devices)
        self.interval = finite_number(interval, "`interval` of `GPUUtilizationTracker` (seconds)", above=0)
        self._samples: _Samples | None = None
        self._restored: dict[str, tuple[float, int]] | None = None  # sums of the epoch to resume
        self._warned: set[str] = set()

    def stateaccess(self) -> Mapping[str, Any]:
        """Return the declared access; see the class docstring."""
        return {"cbstate": {"monitors": Append()}}

    def init(self, learner: LearnerView) -> None:
        """Check that the driver and the GPUs exist."""
        nvml = _nvml()
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            raise DeclarationError(
                f"`GPUUtilizationTracker` cannot find an NVIDIA driver: {error}.",
                why="this machine has no NVIDIA GPU, or the GPU cannot be used",
                fix="remove the callback on this machine",
            ) from error
        try:
            _handles(nvml, self.devices)
        finally:
            nvml.nvmlShutdown()

    def state_dict(self) -> dict[str, Any]:
        """Return the sums and the numbers of samples of the current epoch, or None between epochs."""
        return {"sums": dict(self._samples.sums) if self._samples is not None else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the sums. The next fit continues the epoch."""
        self._restored = state["sums"]

    @on(FitBegin, Phase, access={})
    def resume(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Continue sampling if the fit resumes within an epoch."""
        sums, self._restored = self._restored, None
        if sums is not None:
            self._samples = _Samples(self.devices, self.interval, sums)

    @on(EpochBegin, AbstractTrainingPhase, access={})
    def begin(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Begin sampling."""
        self._stop()  # the thread of an epoch that ended with an error in a hand-written loop
        self._samples = _Samples(self.devices, self.interval, {})

    @on(EpochEnd, AbstractTrainingPhase)
    def put(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Log the means."""
        samples = self._stop()
        if samples is None:
            return
        if samples.failure:
            warn_once(self._warned, self, f"the driver does not report the utilization: {samples.failure}")
        for name, (total, count) in samples.sums.items():
            learner.cbstate.monitors.put_scalar(f"GPUUtil/{name}", total / count)

    @on(FitEnd, Phase, access={})
    def end(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Stop the thread, even if the fit failed."""
        self._stop()

    def _stop(self) -> _Samples | None:
        samples, self._samples = self._samples, None
        if samples is not None:
            samples.stop()
        return samples

    def __repr__(self) -> str:
        return f"GPUUtilizationTracker({'' if self.devices is None else list(self.devices)})"


class _Samples:
    """Samples from a background thread.

    Args:
        devices: The GPUs.
        interval: Time between two samples (seconds).
        sums: The sums to continue from.

    Attributes:
        sums: The sum of the samples (percent) and their number, keyed by GPU.
        failure: Why sampling failed, or an empty string.
    """

    def __init__(
        self, devices: Sequence[int | str] | None, interval: float, sums: Mapping[str, tuple[float, int]]
    ) -> None:
        self._devices, self._interval = devices, interval
        self.sums = dict(sums)
        self.failure = ""
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._work, name="fluxcb-gpu-utilization", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread. If there are no samples yet, it takes one first."""
        self._stopped.set()
        self._thread.join()

    def _work(self) -> None:
        try:
            nvml = _nvml()
            nvml.nvmlInit()
            try:
                handles = _handles(nvml, self._devices)
                while not self._stopped.wait(self._interval):
                    self._sample(nvml, handles)
                if not self.sums:
                    self._sample(nvml, handles)
            finally:
                nvml.nvmlShutdown()
        except Exception as error:  # training must continue, whichever error the driver raises
            self.failure = f"{type(error).__name__}: {error}"

    def _sample(self, nvml: Any, handles: Mapping[str, Any]) -> None:
        for name, handle in handles.items():
            total, count = self.sums.get(name, (0.0, 0))
            self.sums[name] = total + nvml.nvmlDeviceGetUtilizationRates(handle).gpu, count + 1


def _nvml() -> Any:
    return library("pynvml", extra="nvml", owner="GPUUtilizationTracker")


def _checked(devices: Any) -> tuple[int | str, ...]:
    fits = isinstance(devices, Sequence) and not isinstance(devices, str) and len(devices) > 0
    for device in devices if fits else ():
        number = isinstance(device, int) and not isinstance(device, bool) and device >= 0
        fits = fits and (number or (isinstance(device, str) and device.startswith(("GPU-", "MIG-"))))
    if not fits:
        raise DeclarationError(
            f"`devices` of `GPUUtilizationTracker` must be a list of GPU numbers or UUIDs, not {devices!r}.",
            fix='write e.g. `[0, 1]`, or a UUID from `nvidia-smi -L` such as `["GPU-8d6b..."]`',
        )
    return tuple(devices)


def _visible(listed: str) -> list[int | str]:
    """Return the devices in `CUDA_VISIBLE_DEVICES`. CUDA ignores all entries after an invalid one, such as -1."""
    devices: list[int | str] = []
    for entry in map(str.strip, listed.split(",")):
        if not entry.isdecimal() and not entry.startswith(("GPU-", "MIG-")):
            break
        devices.append(int(entry) if entry.isdecimal() else entry)
    return devices


def _handles(nvml: Any, devices: Sequence[int | str] | None) -> dict[str, Any]:
    """Return the NVML handles of GPUs, keyed by name.

    Raises:
        DeclarationError: A GPU does not exist, or there are no GPUs.
    """
    if devices is None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = range(nvml.nvmlDeviceGetCount()) if visible is None else _visible(visible)
    handles = {}
    for device in devices:
        find = nvml.nvmlDeviceGetHandleByIndex if isinstance(device, int) else nvml.nvmlDeviceGetHandleByUUID
        try:
            handles[str(device)] = find(device)
        except nvml.NVMLError as error:
            raise DeclarationError(
                f"`GPUUtilizationTracker` cannot find GPU {device!r}: {error}.",
                why=f"the number of GPUs on this machine is {nvml.nvmlDeviceGetCount()}",
                fix="use a GPU that `nvidia-smi -L` lists",
            ) from error
    if not handles:
        raise DeclarationError(
            "`GPUUtilizationTracker` cannot find an NVIDIA GPU.",
            why="the driver reports no GPU, or `CUDA_VISIBLE_DEVICES` is empty",
            fix="remove the callback on this machine",
        )
    return handles
