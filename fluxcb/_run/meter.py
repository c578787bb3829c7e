"""Measuring the cost of each handler, and counting how often the host reads the device."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fluxcb._errors import DeclarationError
from fluxcb._run.timeline import Timeline

__all__ = ["HandlerTime", "Meter", "Timings"]

T = TypeVar("T")


@dataclass(slots=True)
class HandlerTime:
    """The measured cost of one handler at one moment.

    Attributes:
        handler: The callback and its method, as in `StopOnNaNLoss().cancel`.
        moment: Where it runs, as in `StepEnd x TrainingPhase`.
        calls: Number of calls.
        seconds: Total time (s).
        syncs: Number of times that it made the host wait for a device value, or copy one.
        reads: The names of these values, with counts.
    """

    handler: str
    moment: str
    calls: int = 0
    seconds: float = 0.0
    syncs: int = 0
    reads: Counter[str] = field(default_factory=Counter)

    @property
    def mean(self) -> float:
        """Time per call (s)."""
        return self.seconds / self.calls if self.calls else 0.0


@dataclass(frozen=True)
class Timings:
    """The measured cost of all handlers, the most expensive first. Prints as a table.

    Attributes:
        rows: One entry per handler and moment. The last entry counts the reads of the engine itself.
    """

    rows: tuple[HandlerTime, ...]

    def __iter__(self) -> Iterator[HandlerTime]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __rich__(self) -> Any:
        """Return the table that rich prints."""
        # Imported here, because rich takes long to import and most runs measure nothing.
        from rich import box
        from rich.table import Table

        table = Table(title="time of the host handlers", box=box.SIMPLE, padding=(0, 1, 0, 0))
        table.add_column("handler", no_wrap=True)
        table.add_column("moment", no_wrap=True)
        for name in ("calls", "total (ms)", "mean (us)", "syncs"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("read from the device", overflow="fold")
        for row in self.rows:
            reads = ", ".join(f"{name} ({count:,})" for name, count in row.reads.most_common(3))
            mean = f"{row.mean * 1e6:.2f}"
            table.add_row(
                row.handler, row.moment, f"{row.calls:,}", f"{row.seconds * 1e3:.2f}", mean, f"{row.syncs:,}", reads
            )
        return table

    def __str__(self) -> str:
        import io

        from rich.console import Console

        console = Console(file=(file := io.StringIO()), width=120)
        console.print(self)
        return file.getvalue().rstrip("\n")


class Meter:
    """Counts reads of device values, times handlers while it is on, and records them on a timeline if there is one.

    Attributes:
        on: Whether handlers are timed.
        timeline: The timeline that is being recorded, or None.
        reads: Number of device values that the host has read.
    """

    def __init__(self) -> None:
        self.on = False
        self.timeline: Timeline | None = None
        self.reads = 0
        self._rows: dict[Any, HandlerTime] = {}
        # Reads outside all handlers, such as the wait for a window, are counted here.
        self._engine = HandlerTime("the engine", "between the steps")
        self._current = self._engine

    def start(self) -> None:
        """Discard all measurements, and start measuring."""
        self.on = True
        self._rows = {}
        # A new record, so that a table that was returned before does not change.
        self._engine = self._current = HandlerTime("the engine", "between the steps")

    def note_read(self, what: str) -> None:
        """Count a device value that a handler receives without a transfer."""
        self._count(what)
        if self.timeline is not None:
            self.timeline.read(what)

    def fetched(self, what: str, fetch: Callable[[], T]) -> T:
        """Fetch a device value, and count it."""
        self._count(what)
        return fetch() if self.timeline is None else self.timeline.fetched(what, fetch)

    def _count(self, what: str) -> None:
        self.reads += 1
        # Only the total is counted otherwise, because this runs at each read.
        if self.on:
            self._current.syncs += 1
            self._current.reads[what] += 1

    def span(self, name: str, category: str, **facts: Any) -> contextlib.AbstractContextManager[None]:
        """Return a context that is recorded as a span on the timeline, if there is one."""
        return contextlib.nullcontext() if self.timeline is None else self.timeline.span(name, category, **facts)

    @property
    def wrapper(self) -> Callable[[Callable[..., Any], str, str], Callable[..., Any]] | None:
        """The function with which plans wrap handlers, or None. Without measuring, handlers are called directly."""
        return self._wrapped if self.on or self.timeline is not None else None

    def _wrapped(self, function: Callable[..., Any], handler: str, moment: str) -> Callable[..., Any]:
        wrapped = self.timed(function, handler, moment) if self.on else function
        if self.timeline is None:
            return wrapped
        # The timeline groups calls by class and method. The label of the callback distinguishes its instances.
        callback, _, method = handler.rpartition(".")
        owner = type(getattr(function, "__self__", None)).__name__  # handlers are bound methods
        return self.timeline.handler(wrapped, f"{owner}.{method}", callback, moment)

    def timed(self, function: Callable[..., Any], handler: str, moment: str) -> Callable[..., Any]:
        """Return a handler that measures its time."""
        # The function is part of the key, because two callbacks of a class can have the same label.
        row = self._rows.setdefault((handler, moment, function), HandlerTime(handler, moment))
        clock = time.perf_counter

        def run(event: Any, phase: Any, learner: Any) -> Any:
            # A handler can emit an event, whose handlers run inside it. Their reads belong to them.
            outer, self._current = self._current, row
            began = clock()
            try:
                return function(event, phase, learner)
            finally:
                row.seconds += clock() - began
                row.calls += 1
                self._current = outer

        return run

    def timings(self) -> Timings:
        """Return the measurements.

        Raises:
            DeclarationError: Nothing was measured.
        """
        if not (self.on or self._rows):  # the rows remain after measuring was turned off
            raise DeclarationError(
                "Nothing has been measured.",
                why="measuring takes time at each call, so it is off by default",
                fix="call `learner.callbacks.measure()` before `fit`",
            )
        rows = sorted(self._rows.values(), key=lambda row: -row.seconds)
        # A handler has a row as soon as a plan has wrapped it, and may not have been called since.
        return Timings((*(row for row in rows if row.calls), *((self._engine,) if self._engine.syncs else ())))
