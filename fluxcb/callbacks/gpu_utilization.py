"""`GPUUtilizationTracker`: how busy NVIDIA GPUs are while steps are trained."""

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
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._errors import DeclarationError
from fluxcb.callbacks.arguments import number_above
from fluxcb.callbacks.statistics_sent import warn_once

__all__ = ["GPUUtilizationTracker"]


class GPUUtilizationTracker(Callback):
    """Put the mean utilisation of each NVIDIA GPU over a training epoch into `cbstate.monitors`.

    The name is `GPUUtil/0`, by what names the GPU in `devices`; the value is the part of the time in which it ran
    anything (percent), as the driver (NVML) tells it. It is sampled on a thread that lives while an epoch is trained;
    validation and what happens after epochs do not count. An epoch shorter than `interval` has one sample, taken at its
    end. When the driver fails during training there is a warning once, and nothing is put.

    Args:
        devices: GPUs by NVML's numbers, or by UUIDs. By default those of `CUDA_VISIBLE_DEVICES`, else all.
        interval: Time between two samples (seconds).

    Access:
        cbstate.monitors: Append.

    Runs:
        FitBegin, FitEnd x Phase, EpochBegin, EpochEnd x AbstractTrainingPhase (host).

    Cost:
        A thread that asks the driver every `interval`; a training epoch's end waits for its last sample, some
        milliseconds. Fetches nothing.

    Raises:
        DeclarationError: `devices` are no numbers or UUIDs, or `interval` is no number above 0; when the Learner is
            built, nvidia-ml-py is not installed, there is no NVIDIA driver or GPU, or none of that number.
        MissingStateError: There is no `Monitors` (when the Learner is built).

    Example:
        >>> from fluxcb.callbacks import GPUUtilizationTracker
        >>> GPUUtilizationTracker([0, 1], interval=0.5)
        GPUUtilizationTracker([0, 1])

    Source:
        tensorpack, `GPUUtilizationTracker`, which forks a process, and ends the training as if it were done when that
        fails.
    """

    def __init__(self, devices: Sequence[int | str] | None = None, *, interval: float = 1.0) -> None:
        self.devices = None if devices is None else _checked(devices)
        self.interval = number_above(0, interval, "`interval` of `GPUUtilizationTracker` (seconds)")
        self._samples: _Samples | None = None
        self._restored: dict[str, tuple[float, int]] | None = None  # the sums of an epoch that is to be gone on with
        self._said: set[str] = set()

    def stateaccess(self) -> Mapping[str, Any]:
        """Return what it reads and writes; see the class."""
        return {"cbstate": {"monitors": Append()}}

    def init(self, learner: Any) -> None:
        """See to it that there are the GPUs."""
        nvml = _nvml()
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            raise DeclarationError(
                f"`GPUUtilizationTracker` finds no NVIDIA driver: {error}.",
                why="there is no NVIDIA GPU on this machine, or it cannot be used",
                fix="leave the callback out here",
            ) from error
        try:
            _handles(nvml, self.devices)
        finally:
            nvml.nvmlShutdown()

    def state_dict(self) -> dict[str, Any]:
        """Return the sums and numbers of the samples of the epoch at hand, None between epochs."""
        return {"sums": dict(self._samples.sums) if self._samples is not None else None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with that epoch when the fit begins."""
        self._restored = state["sums"]

    @on(FitBegin, Phase, access={})
    def go_on(self, event: Event, phase: Phase, learner: Any) -> None:
        """Sample on in the middle of an epoch, where the fit goes on there."""
        sums, self._restored = self._restored, None
        if sums is not None:
            self._samples = _Samples(self.devices, self.interval, sums)

    @on(EpochBegin, AbstractTrainingPhase, access={})
    def begin(self, event: Event, phase: Phase, learner: Any) -> None:
        """Begin to sample."""
        self._stop()  # of an epoch that ended with an error, in a loop written by hand
        self._samples = _Samples(self.devices, self.interval, {})

    @on(EpochEnd, AbstractTrainingPhase)
    def put(self, event: Event, phase: Phase, learner: Any) -> None:
        """Put the means."""
        samples = self._stop()
        if samples is None:
            return
        if samples.failure:
            warn_once(self._said, self, f"the driver does not tell the utilisation: {samples.failure}")
        for name, (total, count) in samples.sums.items():
            learner.cbstate.monitors.put_scalar(f"GPUUtil/{name}", total / count)

    @on(FitEnd, Phase, access={})
    def end(self, event: Event, phase: Phase, learner: Any) -> None:
        """Stop the thread, also after an error."""
        self._stop()

    def _stop(self) -> _Samples | None:
        samples, self._samples = self._samples, None
        if samples is not None:
            samples.stop()
        return samples

    def __repr__(self) -> str:
        return f"GPUUtilizationTracker({'' if self.devices is None else list(self.devices)})"


class _Samples:
    """Samples that a thread takes until it is stopped.

    Attributes:
        sums: By GPU, the sum of its samples (percent) and their number.
        failure: Why there are no more, or an empty string.
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
        """Take a last sample if there is none, and end the thread."""
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
        except Exception as error:  # of the driver; whatever it is, the training goes on
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
            f"`devices` of `GPUUtilizationTracker` must be numbers of GPUs, or their UUIDs, not {devices!r}.",
            fix='e.g. `[0, 1]`, or `["GPU-8d6b..."]` as `nvidia-smi -L` shows them',
        )
    return tuple(devices)


def _visible(listed: str) -> list[int | str]:
    """Return what `CUDA_VISIBLE_DEVICES` lists; CUDA ignores what comes behind an entry that is none, such as -1."""
    devices: list[int | str] = []
    for entry in map(str.strip, listed.split(",")):
        if not entry.isdecimal() and not entry.startswith(("GPU-", "MIG-")):
            break
        devices.append(int(entry) if entry.isdecimal() else entry)
    return devices


def _handles(nvml: Any, devices: Sequence[int | str] | None) -> dict[str, Any]:
    """Return NVML's handles of GPUs by their names.

    Raises:
        DeclarationError: There is no such GPU, or none at all.
    """
    if devices is None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        devices = range(nvml.nvmlDeviceGetCount()) if visible is None else _visible(visible)
    handles = {}
    for device in devices:
        by = nvml.nvmlDeviceGetHandleByIndex if isinstance(device, int) else nvml.nvmlDeviceGetHandleByUUID
        try:
            handles[str(device)] = by(device)
        except nvml.NVMLError as error:
            raise DeclarationError(
                f"`GPUUtilizationTracker` finds no GPU {device!r}: {error}.",
                why=f"there are {nvml.nvmlDeviceGetCount()}",
                fix="name one that `nvidia-smi -L` shows",
            ) from error
    if not handles:
        raise DeclarationError(
            "`GPUUtilizationTracker` finds no NVIDIA GPU.",
            why="the driver knows none, or `CUDA_VISIBLE_DEVICES` lists none",
            fix="leave the callback out here",
        )
    return handles
