"""`HostMemoryTracker`: how much memory the machine has left, and the process uses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fluxcb._declare.access import Append
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import Event, Trigger
from fluxcb._declare.extras import library
from fluxcb._declare.handlers import on
from fluxcb._declare.phases import AbstractTrainingPhase, Phase

__all__ = ["HostMemoryTracker"]

_GIB = 1024**3


class HostMemoryTracker(Callback):
    """Put the host's memory into `cbstate.monitors` after each epoch.

    `HostFreeMemory (GB)` is what programs can still get, `ProcessMemory (GB)` what this process occupies; GB are 1024^3
    bytes.

    Access:
        cbstate.monitors: Append.

    Runs:
        Trigger x AbstractTrainingPhase (host).

    Cost:
        Some 50 us per epoch. Fetches nothing.

    Raises:
        DeclarationError: psutil is not installed (when the Learner is built).
        MissingStateError: There is no `Monitors` (when the Learner is built).

    Example:
        >>> from fluxcb.callbacks import HostMemoryTracker, Monitors
        >>> from fluxcb.testing import testlearner
        >>> learner = testlearner(Monitors(), HostMemoryTracker())
        >>> history = learner.fit(1)
        >>> learner.cbstate["monitors"].names()
        ['HostFreeMemory (GB)', 'ProcessMemory (GB)']

    Source:
        tensorpack, `HostMemoryTracker`.
    """

    def stateaccess(self) -> Mapping[str, Any]:
        """Return what it reads and writes; see the class."""
        return {"cbstate": {"monitors": Append()}}

    def init(self, learner: Any) -> None:
        """See to it that psutil is there."""
        _psutil()

    @on(Trigger, AbstractTrainingPhase)
    def put(self, event: Event, phase: Phase, learner: Any) -> None:
        """Put both."""
        psutil, monitors = _psutil(), learner.cbstate.monitors
        monitors.put_scalar("HostFreeMemory (GB)", psutil.virtual_memory().available / _GIB)
        monitors.put_scalar("ProcessMemory (GB)", psutil.Process().memory_info().rss / _GIB)


def _psutil() -> Any:
    return library("psutil", extra="psutil", owner="HostMemoryTracker")
