"""Recording the windows of one phase on a timeline: pulling, dispatching, waiting, replaying, and the device's time."""

from __future__ import annotations

import time
from weakref import WeakKeyDictionary

from fluxcb._compile.program import Program, ProgramKind
from fluxcb._run.timeline import WINDOW, Timeline
from fluxcb._run.window import Window

__all__ = ["WindowSpans"]


class WindowSpans:
    """Records the windows of one phase. `StepLoop` calls it at the end of each part of its work.

    Args:
        timeline: The timeline.
        phase: Name of the phase's class.
    """

    def __init__(self, timeline: Timeline, phase: str) -> None:
        self._timeline, self._phase = timeline, phase
        self._dispatching = timeline.kind("dispatch", "dispatch", numbers=WINDOW, phase=phase)
        self._waiting = timeline.kind("wait for the device", "wait", numbers=WINDOW, phase=phase)
        self._replaying = timeline.kind("replay handlers", "replay", numbers=WINDOW, phase=phase)
        # By program, because a phase can switch from single steps to windows.
        self._programs: dict[Program, int] = {}
        # Arrows lead from a window's dispatch to the device's time, and from there to its handlers.
        self._arrows: WeakKeyDictionary[Window, int] = WeakKeyDictionary()

    def pulled(self, source: str, began: float, batches: int) -> None:
        """Record that batches of a source were pulled, from `began` (s) until now."""
        kind = self._timeline.kind("pull batches", "data", numbers=("batches",), source=source)
        self._timeline.add(kind, began, time.perf_counter(), batches, 0, 0)

    def dispatched(self, window: Window, program: ProgramKind, began: float, first: int, epoch: int) -> None:
        """Record that a window was dispatched.

        Args:
            window: The window.
            program: The kind of its program.
            began: When dispatching began (s).
            first: Number of its first step.
            epoch: Number of the epoch.
        """
        if window.program not in self._programs:
            kind = self._timeline.device_kind(self._phase, program, window.program.steps)
            self._programs[window.program] = kind
        self._arrows[window] = self._timeline.dispatched(self._dispatching, began, first, window.length, epoch)

    def waited(self, window: Window, began: float, ended: float, first: int, epoch: int) -> None:
        """Record that the host waited for a window.

        Args:
            window: The window.
            began: When waiting began (s).
            ended: When the host observed that the device had finished (s).
            first: Number of its first step.
            epoch: Number of the epoch.
        """
        timeline, numbers = self._timeline, (first, window.length, epoch)
        timeline.add(self._waiting, began, time.perf_counter(), *numbers)
        timeline.device(self._programs[window.program], self._arrows[window], window.began, ended, *numbers)

    def replayed(self, window: Window, began: float, first: int, epoch: int) -> None:
        """Record that the handlers of a window ran, from `began` (s) until now."""
        self._timeline.replayed(self._replaying, self._arrows[window], began, first, window.length, epoch)
