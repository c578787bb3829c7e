"""`DeviceMemoryTracker`: log the peak memory of devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fluxcb._declare.access import Append
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import EpochEnd, Event
from fluxcb._declare.handlers import on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._tracebacks import warn_user
from fluxcb.callbacks.arguments import require

__all__ = ["DeviceMemoryTracker"]


class DeviceMemoryTracker(Callback):
    """Log the peak memory of each device to `cbstate.monitors` after each training epoch.

    The values are logged under names such as `PeakMemory (MB)/gpu:0`, with the platform and the number of the device.
    One MB is 10^6 bytes. The peak is that since the start of the process, because JAX cannot reset it. A device without
    memory statistics, such as a CPU, is skipped with a warning, which is issued once.

    Args:
        devices: The JAX devices; those of this process by default.

    Access:
        cbstate.monitors: Append.

    Runs:
        EpochEnd x AbstractTrainingPhase (host).

    Cost:
        One query per device and epoch, which does not wait for the device.

    Raises:
        DeclarationError: `devices` does not contain devices.
        MissingStateError: There is no `Monitors` (when the Learner is built).

    Example:
        >>> from types import SimpleNamespace
        >>> from fluxcb.callbacks import DeviceMemoryTracker, Monitors
        >>> from fluxcb.testing import testlearner
        >>> device = SimpleNamespace(platform="gpu", id=0, memory_stats=lambda: {"peak_bytes_in_use": 12_500_000})
        >>> learner = testlearner(Monitors(), DeviceMemoryTracker([device]))  # stands for `jax.devices()`
        >>> history = learner.fit(1)
        >>> learner.cbstate["monitors"].latest("PeakMemory (MB)/gpu:0")
        12.5

    Source:
        tensorpack, `GPUMemoryTracker`.
    """

    def __init__(self, devices: Sequence[Any] | None = None) -> None:
        fits = isinstance(devices, Sequence) and all(callable(getattr(d, "memory_stats", None)) for d in devices)
        if devices is not None:
            what = "`devices` of `DeviceMemoryTracker`"
            require(bool(fits and devices), devices, what, "JAX devices", "jax.local_devices()")
        self.devices = None if devices is None else tuple(devices)
        self._without: set[str] = set()

    def stateaccess(self) -> Mapping[str, Any]:
        """Return the declared access; see the class docstring."""
        return {"cbstate": {"monitors": Append()}}

    @on(EpochEnd, AbstractTrainingPhase)
    def put(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Log the peak of each device."""
        for device in self._tracked():
            name = f"{device.platform}:{device.id}"
            peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
            if peak is not None:
                learner.cbstate.monitors.put_scalar(f"PeakMemory (MB)/{name}", peak / 1e6)
            elif name not in self._without:
                self._without.add(name)
                text = f"{self!r} does not log the memory of {name}, because it has no memory statistics."
                warn_user(text, UserWarning)

    def _tracked(self) -> Sequence[Any]:
        if self.devices is not None:
            return self.devices
        import jax

        return jax.local_devices()

    def __repr__(self) -> str:
        names = "" if self.devices is None else ", ".join(f"{d.platform}:{d.id}" for d in self.devices)
        return f"DeviceMemoryTracker({names})"
