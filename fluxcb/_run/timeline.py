"""The timeline: the activities of the host and of the device, recorded with their times.

Each thread of the host has a track with nested spans. Usually there is one thread, whose nested spans show which
activity waits for which. A track for each kind of event would not show this. The device has its own track.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import jax

from fluxcb._declare.schedules import positive
from fluxcb._errors import DeclarationError
from fluxcb._run.progress import Progress
from fluxcb._run.trace_file import Kind, check_writable, save

__all__ = ["WINDOW", "Timeline", "recorded_timeline"]

T = TypeVar("T")

_PROGRESS = ("epoch", "step", "step_in_epoch")
WINDOW = ("first_step", "steps", "epoch")
"""The numbers of a window: its first step as schedules count it, its number of steps, and the epoch."""

# The threads of an executor get the numbers that follow.
_HOST, _DEVICE = 1, 2


class _ThreadState(threading.local):
    """The track and the running handler of one thread.

    Args:
        new_track: Returns the thread's track.

    Attributes:
        track: The thread's track.
        handler_name: The handler that runs on the thread, or "the engine".
    """

    def __init__(self, new_track: Callable[[], int]) -> None:
        self.track = new_track()
        self.handler_name = "the engine"


class Timeline:
    """Records spans and instants.

    Each event is six numbers in one array (48 bytes), so a million events take about 50 MB until they are written.
    Python objects would take many times as much, and slow down each step.

    Args:
        progress: The counters.
        max_events: Maximum number of events. Fits, epochs, and compilations are kept beyond it.

    Attributes:
        dropped: Number of events that were not kept.
    """

    def __init__(self, progress: Progress, max_events: int) -> None:
        self._progress = progress
        self._max_events = self._left = max_events
        self.dropped = 0
        self._rows = array("d")
        self._kinds: list[Kind] = []
        self._numbers: dict[Any, int] = {}
        self._lock = threading.Lock()
        # `fit` is called on the thread that begins the trace, so its track is the host's.
        self._main = threading.current_thread()
        self._threads: dict[str, int] = {}
        self._thread = _ThreadState(self._new_track)
        self._arrows = 0
        # The device has one queue, so its spans must not overlap. `_device_free` is the end of the last one.
        self._began = self._device_free = time.perf_counter()

    # -- recording --------------------------------------------------------------------------

    def kind(
        self,
        name: str,
        category: str,
        *,
        letter: str = "X",
        track: int = _HOST,
        numbers: tuple[str, ...] = _PROGRESS,
        **facts: Any,
    ) -> int:
        """Return the number of a kind of event, for `add`.

        Args:
            name: The name that the viewer shows.
            category: The category that the viewer filters by.
            letter: The field `ph` of the format.
            track: The track of the host or of the device.
            numbers: Names of the arguments that differ between events, at most three.
            **facts: The arguments that all events of the kind share.
        """
        key = (name, category, letter, track, numbers, tuple(facts.items()))
        number = self._numbers.get(key)
        if number is None:
            # Two threads may both create a kind, and the second number is as good as the first. The lock keeps the
            # number and the list in step.
            with self._lock:
                number = self._numbers[key] = len(self._kinds)
                self._kinds.append(Kind(letter, track, name, category, facts, numbers))
        return number

    def add(self, kind: int, began: float, ended: float, *numbers: int) -> None:
        """Record an event from `began` to `ended` (s, of `time.perf_counter`) with the three numbers of its kind."""
        if self._left > 0:
            self._left -= 1
            self._rows.extend(array("d", (kind, began, ended, *numbers)))  # one call, for thread safety
        else:
            # An instant in the picture, because a reader would otherwise look for events that were not kept.
            if not self.dropped:
                text = f"max_events={self._max_events:,} is reached: only fits, epochs and compilations from here on"
                self._rows.extend(array("d", (self.kind(text, "trace", letter="i"), ended, ended, *self._now())))
            self.dropped += 1

    @contextlib.contextmanager
    def span(self, name: str, category: str, **facts: Any) -> Iterator[None]:
        """Record the context as a span, with the counters at its end, even if the timeline is full."""
        kind = self.kind(name, category, **facts)
        began = time.perf_counter()
        try:
            yield
        finally:
            self._rows.extend(array("d", (kind, began, time.perf_counter(), *self._now())))

    def read(self, what: str) -> None:
        """Record that a handler receives a device value without a transfer."""
        self._instant(f"read {what}", "fetch", by=self._thread.handler_name)

    def fetched(self, what: str, fetch: Callable[[], T]) -> T:
        """Fetch a device value, and record the fetch."""
        kind = self.kind(f"fetch {what}", "fetch", track=self._thread.track, by=self._thread.handler_name)
        now, began = self._now(), time.perf_counter()
        try:
            return fetch()
        finally:
            self.add(kind, began, time.perf_counter(), *now)

    def handler(self, function: Callable[..., Any], name: str, callback: str, moment: str) -> Callable[..., Any]:
        """Return a handler that records its calls.

        Args:
            function: The handler.
            name: Its class and method.
            callback: Its callback, which distinguishes two instances of one class.
            moment: The moment at which it runs, e.g. `StepEnd x TrainingPhase`.
        """
        # Two fields, so that the viewer can filter by one of them.
        event_name, _, phase_name = moment.partition(" x ")

        def on_track(track: int) -> int:
            return self.kind(name, "handler", track=track, event=event_name, phase=phase_name, callback=callback)

        kinds = {_HOST: on_track(_HOST)}
        thread, progress, clock, add = self._thread, self._progress, time.perf_counter, self.add

        def run(event: Any, phase: Any, learner: Any) -> Any:
            # Threads appear during a fit, so the kind for a track is created at its first event.
            if thread.track not in kinds:
                kinds[thread.track] = on_track(thread.track)
            kind = kinds[thread.track]
            outer, thread.handler_name = thread.handler_name, name
            # Read before the call, because a handler may run an epoch, which changes the counters.
            epoch, step, step_in_epoch = progress.epoch, progress.step, progress.step_in_epoch
            began = clock()
            try:
                return function(event, phase, learner)
            # An exception is an event of its own, because its span alone would look like that of any other call.
            except BaseException as error:
                self._instant(type(error).__name__, "raised", by=name)
                raise
            finally:
                add(kind, began, clock(), epoch, step, step_in_epoch)
                thread.handler_name = outer

        return run

    def device_kind(self, phase: str, program: str, buffer: int) -> int:
        """Return the kind of the windows that a program runs.

        Args:
            phase: Name of the phase's class.
            program: `loop` or `straight`.
            buffer: Length of the window program's buffer (steps), or 1 for the single-step program.
        """
        name = f"{phase}: window" if buffer > 1 else f"{phase}: single steps"
        return self.kind(
            name, "device", track=_DEVICE, numbers=WINDOW, phase=phase, program=program, steps_per_call=buffer
        )

    def dispatched(self, kind: int, began: float, *window: int) -> int:
        """Record that a window was dispatched, and return the number of the arrow that begins there.

        Args:
            kind: The kind of the span.
            began: When dispatching began (s, of `time.perf_counter`).
            *window: First step, steps, epoch.
        """
        self.add(kind, began, time.perf_counter(), *window)
        self._arrows += 1
        self._arrow("s", self._arrows, began, _HOST)  # at the begin of the span, where Perfetto looks for one
        return self._arrows

    def device(self, kind: int, arrow: int, called: float, done: float, *window: int) -> None:
        """Record the device's time for a window.

        Args:
            kind: See `device_kind`.
            arrow: The arrow that leads to it.
            called: When its program was called (s, of `time.perf_counter`).
            done: When the host observed the end of the window (s).
            *window: First step, steps, epoch.
        """
        began = max(called, self._device_free)  # the device runs windows in order
        self._device_free = done
        self.add(kind, began, done, *window)
        self._arrow("t", arrow, began, _DEVICE)

    def replayed(self, kind: int, arrow: int, began: float, *window: int) -> None:
        """Record that the handlers of a window ran, at the end of its arrow."""
        self.add(kind, began, time.perf_counter(), *window)
        self._arrow("f", arrow, began, _HOST)

    def _arrow(self, letter: str, number: int, at: float, track: int) -> None:
        # Arrow events have an id instead of counters.
        kind = self.kind("window", "window", letter=letter, track=track, numbers=("window",))
        self.add(kind, at, at, number, 0, 0)

    def _instant(self, name: str, category: str, **facts: Any) -> None:
        now = time.perf_counter()
        self.add(self.kind(name, category, letter="i", track=self._thread.track, **facts), now, now, *self._now())

    def _new_track(self) -> int:
        """Return the track of the current thread. The thread pools of successive fits share tracks, by thread name."""
        with self._lock:
            if threading.current_thread() is self._main:
                return _HOST
            return self._threads.setdefault(threading.current_thread().name, _DEVICE + 1 + len(self._threads))

    def _now(self) -> tuple[int, int, int]:
        progress = self._progress
        return progress.epoch, progress.step, progress.step_in_epoch

    # -- writing ----------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Write the recorded events to a file.

        Raises:
            OSError: The file cannot be written.
        """
        tracks = {_HOST: "host", _DEVICE: "device", **{number: name for name, number in self._threads.items()}}
        save(path, self._kinds, self._rows, origin=self._began, tracks=tracks, dropped=self.dropped)


@contextlib.contextmanager
def recorded_timeline(path: str | os.PathLike[str], progress: Progress, max_events: int) -> Iterator[Timeline]:
    """Yield a timeline, and write it when the context is left, also after an error. Only process 0 writes it.

    Raises:
        DeclarationError: The file cannot be written. Nothing has run then.
        OSError: The file can no longer be written at the end.
    """
    max_events = positive(max_events, "`max_events` of `trace`")
    if not isinstance(path, str | os.PathLike):
        raise DeclarationError(f"`trace` takes a path, not {path!r}.", fix='write e.g. `trace("trace.json")`')
    path = Path(path)
    # Before the training, which may take days.
    check_writable(path)
    timeline = Timeline(progress, max_events)
    # All processes run the same steps, and they often share a file system.
    writes = jax.process_index() == 0
    try:
        yield timeline
    except BaseException as error:
        try:
            if writes:
                timeline.save(path)
        except OSError as failure:  # the error that ended the context is more important
            error.add_note(f"and the trace could not be written: {failure}")
        raise
    if writes:
        timeline.save(path)
