"""Measuring: what each handler costs, and how often the host reads the device."""

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
    """What one handler has cost so far.

    Attributes:
        handler: The callback and its method, as in `StopOnNaNLoss().cancel`.
        moment: Where it runs, as in `StepEnd x TrainingPhase`.
        calls: How often it ran.
        seconds: Time it took in all (s).
        syncs: How often it made the host wait for a value of the device, or copy one.
        reads: Which values these were, and how often.
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
    """What handlers have cost since measuring began, the dearest first; prints as a table.

    Attributes:
        rows: One entry per handler and moment; the last ones are the engine's own waits.
    """

    rows: tuple[HandlerTime, ...]

    def __iter__(self) -> Iterator[HandlerTime]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __rich__(self) -> Any:
        """Return the table that rich prints."""
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
    """Counts reads of device values, times handlers while it is on, and fills a timeline while there is one.

    Attributes:
        on: Whether handlers are timed.
        timeline: Records what happens when, or None.
        reads: How often the host has read values of the device.
    """

    def __init__(self) -> None:
        self.on = False
        self.timeline: Timeline | None = None
        self.reads = 0
        self._rows: dict[Any, HandlerTime] = {}
        self._engine = HandlerTime("the engine", "between the steps")
        self._current = self._engine

    def start(self) -> None:
        """Forget what was measured, and measure from now on."""
        self.on = True
        self._rows = {}
        self._engine = self._current = HandlerTime("the engine", "between the steps")

    def note_read(self, what: str) -> None:
        """Note that a handler is handed a value of the device."""
        self._count(what)
        if self.timeline is not None:
            self.timeline.read(what)

    def fetched(self, what: str, fetch: Callable[[], T]) -> T:
        """Fetch a value of the device, and note it."""
        self._count(what)
        return fetch() if self.timeline is None else self.timeline.fetched(what, fetch)

    def _count(self, what: str) -> None:
        self.reads += 1
        if self.on:
            self._current.syncs += 1
            self._current.reads[what] += 1

    def span(self, name: str, category: str, **facts: Any) -> contextlib.AbstractContextManager[None]:
        """Return a context that the timeline records, if there is one."""
        return contextlib.nullcontext() if self.timeline is None else self.timeline.span(name, category, **facts)

    @property
    def wrapper(self) -> Callable[[Callable[..., None], str, str], Callable[..., None]] | None:
        """What plans wrap handlers in; None if nobody wants to know about them."""
        return self._wrapped if self.on or self.timeline is not None else None

    def _wrapped(self, function: Callable[..., None], handler: str, moment: str) -> Callable[..., None]:
        wrapped = self.timed(function, handler, moment) if self.on else function
        if self.timeline is None:
            return wrapped
        callback, _, method = handler.rpartition(".")
        owner = type(getattr(function, "__self__", None)).__name__  # handlers are bound methods
        return self.timeline.handler(wrapped, f"{owner}.{method}", callback, moment)

    def timed(self, function: Callable[..., None], handler: str, moment: str) -> Callable[..., None]:
        """Return a handler that notes its time."""
        row = self._rows.setdefault((handler, moment, function), HandlerTime(handler, moment))
        clock = time.perf_counter

        def run(event: Any, phase: Any, learner: Any) -> None:
            outer, self._current = self._current, row
            began = clock()
            try:
                function(event, phase, learner)
            finally:
                row.seconds += clock() - began
                row.calls += 1
                self._current = outer

        return run

    def timings(self) -> Timings:
        """Return what was measured.

        Raises:
            DeclarationError: Nothing was.
        """
        if not (self.on or self._rows):
            raise DeclarationError(
                "Nothing has been measured.",
                why="measuring costs a little at each call, so it is off",
                fix="call `learner.callbacks.measure()` before `fit`",
            )
        rows = sorted(self._rows.values(), key=lambda row: -row.seconds)
        return Timings((*(row for row in rows if row.calls), *((self._engine,) if self._engine.syncs else ())))
