"""The loop over windows, recorded: takes the place of `Steps` while a timeline is on, so that it costs nothing else."""

from __future__ import annotations

import time
from weakref import WeakKeyDictionary

from fluxcb._compile.program import Program
from fluxcb._declare.phases import Phase
from fluxcb._run.feed import Feed
from fluxcb._run.stepping import Host, Steps
from fluxcb._run.timeline import WINDOW, Timeline
from fluxcb._run.window import Window

__all__ = ["TimelineSteps"]


class TimelineSteps(Steps):
    """Runs the steps of one phase, and records them.

    Args:
        engine: The engine.
        phase: The phase.
        timeline: Where to.
    """

    def __init__(self, engine: Host, phase: Phase, timeline: Timeline) -> None:
        super().__init__(engine, phase)
        self._timeline = timeline
        self._phase_name = name = type(phase).__name__
        self._dispatching = timeline.kind("dispatch", "dispatch", numbers=WINDOW, phase=name)
        self._waiting = timeline.kind("wait for the device", "wait", numbers=WINDOW, phase=name)
        self._replaying = timeline.kind("replay handlers", "replay", numbers=WINDOW, phase=name)
        self._programs: dict[Program, int] = {}
        self._arrows: WeakKeyDictionary[Window, int] = WeakKeyDictionary()

    def _pull(self, feed: Feed, length: int, goes_on: bool) -> Window:
        timeline, pulled = self._timeline, 0
        kind = timeline.kind("pull batches", "data", numbers=("batches",), source=feed.name)
        began = time.perf_counter()
        try:
            window = super()._pull(feed, length, goes_on)
            pulled = window.length
            return window
        finally:
            timeline.add(kind, began, time.perf_counter(), pulled, 0, 0)

    def _dispatch(self, window: Window, ahead: int, feed: Feed | None, *, by_hand: bool = False) -> None:
        first, began = self._number() + ahead + 1, time.perf_counter()
        try:
            super()._dispatch(window, ahead, feed, by_hand=by_hand)
        finally:
            self._arrows[window] = self._timeline.dispatched(
                self._dispatching, began, first, window.length, self._state.epoch
            )
        self._device_kind(window.program)  # asked here, too, because the carry may be lost later

    def _settle(self, window: Window, feed: Feed | None, behind: Window | None) -> None:
        first, began = self._number() + 1, time.perf_counter()
        try:
            super()._settle(window, feed, behind)
        finally:
            self._timeline.add(self._waiting, began, time.perf_counter(), first, window.length, self._state.epoch)
        kind, arrow = self._device_kind(window.program), self._arrows[window]
        self._timeline.device(kind, arrow, window.began, self._ended, first, window.length, self._state.epoch)

    def _replay(self, window: Window) -> None:
        first, began = self._number() + 1, time.perf_counter()
        try:
            super()._replay(window)
        finally:
            arrow = self._arrows[window]
            self._timeline.replayed(self._replaying, arrow, began, first, window.length, self._state.epoch)

    def _device_kind(self, program: Program) -> int:
        if program not in self._programs:
            kind = self._engine.programs.kind_of(program.step, self._state.platform)
            self._programs[program] = self._timeline.device_kind(self._phase_name, kind, program.steps)
        return self._programs[program]
