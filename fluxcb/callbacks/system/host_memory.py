"""`HostMemoryTracker`: log the free memory of the host and the memory of the process."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from fluxcb._declare.access import Append
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import Event, Trigger
from fluxcb._declare.extras import library
from fluxcb._declare.handlers import on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import AbstractTrainingPhase, Phase

__all__ = ["HostMemoryTracker"]

_GIB = 1024**3


class HostMemoryTracker(Callback):
    """Log the memory of the host to `cbstate.monitors` after each epoch.

    `HostFreeMemory (GB)` is the available memory of the host, and `ProcessMemory (GB)` is the resident memory of this
    process. One GB is 1024^3 bytes.

    Access:
        cbstate.monitors: Append.

    Runs:
        Trigger x AbstractTrainingPhase (host).

    Cost:
        About 50 us per epoch. Fetches nothing.

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
        """Return the declared access; see the class docstring."""
        return {"cbstate": {"monitors": Append()}}

    def logged_names(self, metrics: Mapping[type[Phase], Collection[str]]) -> Collection[str]:
        """Return the names of the two values."""
        return ("HostFreeMemory (GB)", "ProcessMemory (GB)")

    def init(self, learner: LearnerView) -> None:
        """Check that psutil is installed."""
        _psutil()

    @on(Trigger, AbstractTrainingPhase)
    def put(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Log both values."""
        psutil, monitors = _psutil(), learner.cbstate.monitors
        monitors.put_scalar("HostFreeMemory (GB)", psutil.virtual_memory().available / _GIB)
        monitors.put_scalar("ProcessMemory (GB)", psutil.Process().memory_info().rss / _GIB)


def _psutil() -> Any:
    return library("psutil", extra="psutil", owner="HostMemoryTracker")
