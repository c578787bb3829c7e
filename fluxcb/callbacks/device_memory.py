"""`DeviceMemoryTracker`: the most memory that devices have used."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from fluxcb._declare.access import Append
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import EpochEnd, Event
from fluxcb._declare.handlers import on
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._errors import DeclarationError

__all__ = ["DeviceMemoryTracker"]


class DeviceMemoryTracker(Callback):
    """Put the most memory that each device has used so far into `cbstate.monitors` after each training epoch.

    The name is `PeakMemory (MB)/gpu:0`, by platform and number of the device; MB are 10^6 bytes. The peak counts from
    the start of the process: JAX cannot set it back. A device without such statistics, as a CPU, gives a warning once,
    and nothing is put for it.

    Args:
        devices: The JAX devices; those of this process by default.

    Access:
        cbstate.monitors: Append.

    Runs:
        EpochEnd x AbstractTrainingPhase (host).

    Cost:
        A question to each device per epoch, which waits for nothing.

    Raises:
        DeclarationError: `devices` are no devices.
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
        if devices is not None and not (fits and devices):
            raise DeclarationError(
                f"`devices` of `DeviceMemoryTracker` must be JAX devices, not {devices!r}.",
                fix="e.g. `jax.local_devices()`",
            )
        self.devices = None if devices is None else tuple(devices)
        self._without: set[str] = set()

    def stateaccess(self) -> Mapping[str, Any]:
        """Return what it reads and writes; see the class."""
        return {"cbstate": {"monitors": Append()}}

    @on(EpochEnd, AbstractTrainingPhase)
    def put(self, event: Event, phase: Phase, learner: Any) -> None:
        """Put each device's peak."""
        for device in self._found():
            name = f"{device.platform}:{device.id}"
            peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
            if peak is not None:
                learner.cbstate.monitors.put_scalar(f"PeakMemory (MB)/{name}", peak / 1e6)
            elif name not in self._without:
                self._without.add(name)
                text = f"{self!r}: {name} has no statistics of its memory, so nothing is put for it."
                warnings.warn(text, UserWarning, stacklevel=2)

    def _found(self) -> Sequence[Any]:
        if self.devices is not None:
            return self.devices
        import jax

        return jax.local_devices()

    def __repr__(self) -> str:
        names = "" if self.devices is None else ", ".join(f"{d.platform}:{d.id}" for d in self.devices)
        return f"DeviceMemoryTracker({names})"
