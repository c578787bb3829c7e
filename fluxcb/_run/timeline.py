"""The timeline: what the host does and when the device works.

Each thread of the host has a track, whose spans lie one inside the other. Usually one thread does everything. The
device has a track, too.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

from fluxcb._declare.schedules import positive
from fluxcb._errors import DeclarationError
from fluxcb._run.trace_file import Kind, check_writable, save

__all__ = ["WINDOW", "Timeline", "recorded_timeline"]

T = TypeVar("T")

_PROGRESS = ("epoch", "step", "step_in_epoch")
WINDOW = ("first_step", "steps", "epoch")
"""Numbers of a window: its first step as schedules count it, how many steps it has, the epoch."""

_HOST, _DEVICE = 1, 2


class Progress(Protocol):
    """The counters of the state."""

    step: int
    epoch: int
    step_in_epoch: int


class _Here(threading.local):
    """What one thread is at.

    Args:
        new_track: Returns the thread's track.

    Attributes:
        track: The thread's track.
        who: Who runs on it.
    """

    def __init__(self, new_track: Callable[[], int]) -> None:
        self.track = new_track()
        self.who = "the engine"


class Timeline:
    """Records spans and instants.

    Each event is six numbers in one array (48 bytes), so that a million of them take some 50 MB until they are written.

    Args:
        progress: The counters.
        max_events: How many events to keep. Fits, epochs and compilations are kept beyond it.

    Attributes:
        dropped: How many events were not kept.
    """

    def __init__(self, progress: Progress, max_events: int) -> None:
        self._progress = progress
        self._max_events = self._left = max_events
        self.dropped = 0
        self._rows = array("d")
        self._kinds: list[Kind] = []
        self._numbers: dict[Any, int] = {}
        self._lock = threading.Lock()
        self._main = threading.current_thread()
        self._threads: dict[str, int] = {}
        self._here = _Here(self._new_track)
        self._arrows = 0
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
        """Return the number of a kind of event, which `add` takes.

        Args:
            name: What the viewer shows.
            category: What the viewer filters by.
            letter: The format's `ph`.
            track: The host's or the device's.
            numbers: Names of the arguments that differ from event to event, three at most.
            **facts: The arguments that all of them share.
        """
        key = (name, category, letter, track, numbers, tuple(facts.items()))
        number = self._numbers.get(key)
        if number is None:
            with self._lock:
                number = self._numbers[key] = len(self._kinds)
                self._kinds.append(Kind(letter, track, name, category, facts, numbers))
        return number

    def add(self, kind: int, began: float, ended: float, *numbers: int) -> None:
        """Record an event from `began` to `ended` (s, of `time.perf_counter`) with the three numbers of its kind."""
        if self._left > 0:
            self._left -= 1
            self._rows.extend(array("d", (kind, began, ended, *numbers)))  # at once, for other threads add, too
        else:
            if not self.dropped:
                text = f"max_events={self._max_events:,} is reached: only fits, epochs and compilations from here on"
                self._rows.extend(array("d", (self.kind(text, "trace", letter="i"), ended, ended, *self._now())))
            self.dropped += 1

    @contextlib.contextmanager
    def span(self, name: str, category: str, **facts: Any) -> Iterator[None]:
        """Record what happens inside, with the counters at its end, whether the timeline is full or not."""
        kind = self.kind(name, category, **facts)
        began = time.perf_counter()
        try:
            yield
        finally:
            self._rows.extend(array("d", (kind, began, time.perf_counter(), *self._now())))

    def read(self, what: str) -> None:
        """Record that a handler is handed a value of the device."""
        self._instant(f"read {what}", "fetch", by=self._here.who)

    def fetched(self, what: str, fetch: Callable[[], T]) -> T:
        """Fetch a value of the device, and record it."""
        kind = self.kind(f"fetch {what}", "fetch", track=self._here.track, by=self._here.who)
        now, began = self._now(), time.perf_counter()
        try:
            return fetch()
        finally:
            self.add(kind, began, time.perf_counter(), *now)

    def handler(self, function: Callable[..., None], name: str, callback: str, moment: str) -> Callable[..., None]:
        """Return a handler that records its calls.

        Args:
            function: The handler.
            name: Its class and method.
            callback: Its callback, which tells two of one class apart.
            moment: Where it runs, as in `StepEnd x TrainingPhase`.
        """
        event_name, _, phase_name = moment.partition(" x ")

        def on_track(track: int) -> int:
            return self.kind(name, "handler", track=track, event=event_name, phase=phase_name, callback=callback)

        kinds = {_HOST: on_track(_HOST)}
        here, progress, clock, add = self._here, self._progress, time.perf_counter, self.add

        def run(event: Any, phase: Any, learner: Any) -> None:
            if here.track not in kinds:
                kinds[here.track] = on_track(here.track)
            kind = kinds[here.track]
            outer, here.who = here.who, name
            epoch, step, step_in_epoch = progress.epoch, progress.step, progress.step_in_epoch
            began = clock()
            try:
                function(event, phase, learner)
            except BaseException as error:
                self._instant(type(error).__name__, "raised", by=name)
                raise
            finally:
                add(kind, began, clock(), epoch, step, step_in_epoch)
                here.who = outer

        return run

    def device_kind(self, phase: str, program: str, buffer: int) -> int:
        """Return the kind of the windows that a program runs.

        Args:
            phase: Name of the phase's class.
            program: `loop` or `straight`.
            buffer: Steps that the window program's buffer has, 1 for the single-step program.
        """
        name = f"{phase}: window" if buffer > 1 else f"{phase}: single steps"
        return self.kind(
            name, "device", track=_DEVICE, numbers=WINDOW, phase=phase, program=program, steps_per_call=buffer
        )

    def dispatched(self, kind: int, began: float, *window: int) -> int:
        """Record that a window was dispatched, and return the number of the arrow that begins here.

        Args:
            kind: Of a span.
            began: When dispatching began (s, of `time.perf_counter`).
            *window: First step, steps, epoch.
        """
        self.add(kind, began, time.perf_counter(), *window)
        self._arrows += 1
        self._arrow("s", self._arrows, began, _HOST)  # where a span begins, because Perfetto looks for one just there
        return self._arrows

    def device(self, kind: int, arrow: int, called: float, done: float, *window: int) -> None:
        """Record the device's time for a window.

        Args:
            kind: See `device_kind`.
            arrow: The arrow that leads to it.
            called: When its program was called (s, of `time.perf_counter`).
            done: When it was known to be done (s).
            *window: First step, steps, epoch.
        """
        began = max(called, self._device_free)  # the window before comes first
        self._device_free = done
        self.add(kind, began, done, *window)
        self._arrow("t", arrow, began, _DEVICE)

    def replayed(self, kind: int, arrow: int, began: float, *window: int) -> None:
        """Record that the handlers of a window ran, where its arrow ends."""
        self.add(kind, began, time.perf_counter(), *window)
        self._arrow("f", arrow, began, _HOST)

    def _arrow(self, letter: str, number: int, at: float, track: int) -> None:
        kind = self.kind("window", "window", letter=letter, track=track, numbers=("window",))
        self.add(kind, at, at, number, 0, 0)

    def _instant(self, name: str, category: str, **facts: Any) -> None:
        now = time.perf_counter()
        self.add(self.kind(name, category, letter="i", track=self._here.track, **facts), now, now, *self._now())

    def _new_track(self) -> int:
        """Return the track of the thread at work; pools of one fit after the other share tracks, by their names."""
        with self._lock:
            if threading.current_thread() is self._main:
                return _HOST
            return self._threads.setdefault(threading.current_thread().name, _DEVICE + 1 + len(self._threads))

    def _now(self) -> tuple[int, int, int]:
        progress = self._progress
        return progress.epoch, progress.step, progress.step_in_epoch

    # -- writing ----------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Write what was recorded to a file.

        Raises:
            OSError: It cannot be written.
        """
        tracks = {_HOST: "host", _DEVICE: "device", **{number: name for name, number in self._threads.items()}}
        save(path, self._kinds, self._rows, origin=self._began, tracks=tracks, dropped=self.dropped)


@contextlib.contextmanager
def recorded_timeline(path: str | os.PathLike[str], progress: Progress, max_events: int) -> Iterator[Timeline]:
    """Give a timeline, and write it when the context is left, whatever ends it.

    Raises:
        DeclarationError: The file cannot be written; nothing has run then.
        OSError: It could be, but can no longer.
    """
    max_events = positive(max_events, "`max_events` of `trace`")
    if not isinstance(path, str | os.PathLike):
        raise DeclarationError(f"`trace` takes a path, not {path!r}.", fix='e.g. `trace("trace.json")`')
    path = Path(path)
    check_writable(path)
    timeline = Timeline(progress, max_events)
    try:
        yield timeline
    except BaseException as error:
        try:
            timeline.save(path)
        except OSError as failure:  # what ended the context is worth more
            error.add_note(f"and the trace could not be written: {failure}")
        raise
    timeline.save(path)
