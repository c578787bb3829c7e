"""The displays of `ProgressBar`: a live bar in terminals and notebooks, and lines in files and pipes."""

from __future__ import annotations

import html
import math
import time
from abc import ABC, abstractmethod
from typing import Any

from fluxcb.callbacks.progress.cell_output import CellOutput, cell_output
from fluxcb.callbacks.progress.console import in_notebook, is_plain, print_line

__all__ = ["Display", "open_display"]

_PLAIN_SECONDS = 10.0
_TEXT_WIDTH = 72  # width without the bar (characters); narrower terminals do not show the remaining time
_BAR_WIDTHS = 4, 8, 40  # of a bar (characters): if nothing else can be left out, in a narrow terminal, and at most
_TIME_WIDTH = 8  # of the remaining time (characters)


def open_display(console: Any, *, of_fit: bool, interval: float, rows_follow: bool) -> Display:
    """Return the display that suits a console.

    Args:
        console: The console.
        of_fit: Whether the display lasts for a fit. In a hand-written loop there is one per epoch.
        interval: Minimum time between two updates of a bar (seconds).
        rows_follow: Whether a table on the same console prints a row at the end of an epoch.
    """
    if in_notebook(console):
        return _NotebookBar(console, of_fit, rows_follow)
    if is_plain(console):
        return _Lines(console, of_fit, rows_follow)
    return _Bar(console, of_fit, interval)


class Display(ABC):
    """The displayed state of the current epoch.

    Args:
        console: The console.
        of_fit: Whether the display lasts for a fit.

    Attributes:
        begun: Whether the first epoch has begun.
        title: The text before the bar, e.g. `epoch 1/5 training`; empty before the first epoch.
        total: Steps of the epoch, or 0 if that is not known.
        done: Steps of the epoch that were run before the fit was resumed.
        compiling: Whether the first step is being compiled.
        loss: The most recent loss that was read.
    """

    def __init__(self, console: Any, of_fit: bool) -> None:
        self.console = console
        self.of_fit = of_fit
        self.name = self.title = ""
        self.total = self.done = 0
        self.begun = self.compiling = False
        self.loss: float | None = None
        self.began = self.looked = time.monotonic()
        self._counted_from = 0, self.began  # the steps and the time at which the rate starts to count
        self._lengths: dict[str, int] = {}  # steps of the last epoch, by phase

    def begin(self, name: str, title: str, total: int, done: int, *, compiling: bool) -> None:
        """Begin an epoch.

        Args:
            name: The phase's name.
            title: The text before the bar, e.g. `epoch 1/5 training`.
            total: Steps of the epoch, or 0 if that is not known.
            done: Steps of the epoch that have already been run.
            compiling: Whether the first step is about to be compiled.
        """
        self.name, self.title, self.total, self.done, self.loss = name, title, total, done, None
        self.begun, self.compiling, self.began = True, compiling, time.monotonic()
        self._counted_from = done, self.began

    def announce(self, name: str, title: str) -> None:
        """Show that the step is being compiled when a fit resumes within an epoch, before its position is known.

        Args:
            name: The phase's name.
            title: The text before the bar.
        """
        self.begin(name, title, 0, 0, compiling=True)
        self.begun = False

    def looks(self, steps: int, interval: float) -> bool:
        """Return whether to read the step: once per interval, and when it may be the last step of the epoch."""
        # Without windows, reading the step waits for the device.
        now, expected = time.monotonic(), self.total or self._lengths.get(self.name)
        if now - self.looked < interval and expected is not None and steps != expected:
            return False
        self.looked = now
        return True

    def update(self, steps: int, loss: float | None) -> None:
        """Show the number of finished steps and the loss of the last one (None in a phase without a loss)."""
        self.loss = loss
        if self.compiling and steps > self.done:  # the rate excludes the compile time
            self.compiling, self._counted_from = False, (steps, time.monotonic())
        self.show(steps)

    def end(self, steps: int, *, trains: bool) -> None:
        """Record the length of the epoch, and show its end.

        Args:
            steps: Finished steps.
            trains: Whether the phase trains.
        """
        self.compiling = False
        self._lengths[self.name] = steps
        if not 0 < self.done == steps:  # all its steps were run before the fit was resumed
            self.finish(steps, trains=trains)

    def finish(self, steps: int, *, trains: bool) -> None:
        """Show the end of an epoch."""
        self.show(steps)

    @abstractmethod
    def show(self, steps: int) -> None:
        """Show the number of finished steps."""

    @abstractmethod
    def close(self) -> None:
        """End the display."""

    def rate(self, steps: int, now: float) -> float:
        """Return the steps per second, or 0 if no step has finished since the first one was compiled."""
        first, since = self._counted_from
        return (steps - first) / max(now - since, 1e-9)

    def line(self, steps: int, now: float) -> str:
        """Return the state of the epoch as a line of text."""
        of = f"/{self.total}" if self.total else ""
        loss = f", loss {self.loss:.4f}" if self.loss is not None else ""
        rate = self.rate(steps, now) or (steps - self.done) / max(now - self.began, 1e-9)
        return f"{self.title}: {steps}{of} steps{loss}, {_per_second(rate)}"


class _Lines(Display):
    """Plain lines, printed at intervals.

    Args:
        console: The console.
        of_fit: Whether the display lasts for a fit.
        rows_follow: Whether a table on the same console prints a row at the end of an epoch.
    """

    def __init__(self, console: Any, of_fit: bool, rows_follow: bool) -> None:
        super().__init__(console, of_fit)
        self.rows_follow = rows_follow
        self.shown = 0.0

    def begin(self, name: str, title: str, total: int, done: int, *, compiling: bool) -> None:
        super().begin(name, title, total, done, compiling=compiling)
        self.shown = self.began
        if compiling:
            print_line(self.console, f"{title}: compiling the step")

    def close(self) -> None:
        """Do nothing, because lines need no cleanup."""

    def show(self, steps: int) -> None:
        if time.monotonic() - self.shown >= _PLAIN_SECONDS:
            self._print(steps)

    def finish(self, steps: int, *, trains: bool) -> None:
        if not self.rows_follow and (trains or time.monotonic() - self.began >= _PLAIN_SECONDS):
            self._print(steps)

    def _print(self, steps: int) -> None:
        self.shown = time.monotonic()
        print_line(self.console, self.line(steps, self.shown))


class _Bar(Display):
    """A live bar in the last line of the terminal.

    Args:
        console: The console.
        of_fit: Whether the display lasts for a fit.
        interval: Minimum time between two updates (seconds).
    """

    def __init__(self, console: Any, of_fit: bool, interval: float) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
        from rich.table import Column

        super().__init__(console, of_fit)
        self.interval = interval
        texts = [TextColumn("{task.fields[loss]}"), TextColumn("{task.fields[rate]}")]
        self._bar = BarColumn()
        self._shows_time = console.width >= _TEXT_WIDTH
        self._progress = Progress(
            TextColumn("{task.description}", markup=False),
            self._bar,
            MofNCompleteColumn(table_column=Column(no_wrap=True)),
            *texts,
            *([TimeRemainingColumn()] if self._shows_time else []),
            console=console,
            transient=True,
            auto_refresh=False,  # no thread: the handler updates the bar, at most once per interval
        )
        self._progress.start()
        self._task: Any = None
        self._losses: dict[str, str] = {}
        self._drawn = -math.inf

    def begin(self, name: str, title: str, total: int, done: int, *, compiling: bool) -> None:
        super().begin(name, title, total, done, compiling=compiling)
        if self._task is not None:
            self._progress.remove_task(self._task)
        # Before the first loss, show the loss of the phase's previous epoch. Otherwise, short epochs never show a loss.
        loss = "compiling" if compiling else self._losses.get(name, "")
        title, loss, rate = self._fitting(done, loss, "")
        self._task = self._progress.add_task(title, total=total or None, completed=done, loss=loss, rate=rate)

    def show(self, steps: int) -> None:
        if self.loss is not None:
            self._losses[self.name] = f"loss {self.loss:.4f}"
        now = time.monotonic()
        if now - self._drawn < self.interval:  # for epochs of milliseconds, drawing would take longer than training
            return
        self._drawn = now
        title, loss, rate = self._fitting(steps, self._losses.get(self.name, ""), _per_second(self.rate(steps, now)))
        self._progress.update(self._task, description=title, completed=steps, loss=loss, rate=rate, refresh=True)

    def close(self) -> None:
        self._progress.stop()

    def _fitting(self, steps: int, loss: str, rate: str) -> tuple[str, str, str]:
        """Set the width of the bar, and return the title, the loss and the rate as far as the line has room for them.

        Without this, rich would shorten all columns alike, and the number of steps would become unreadable. The rate is
        left out first, then the loss, then a part of the bar, and then the end of the title.
        """
        from rich.cells import cell_len, set_cell_size

        least, narrow, most = _BAR_WIDTHS
        width = self.console.width
        count = len(f"{steps:{len(str(self.total))}}/{self.total or '?'}")
        # A space follows each of the 5 columns, even if the column is empty.
        room = width - count - 5 - (_TIME_WIDTH if self._shows_time else 0)
        bar = min(most, max(narrow, width - _TEXT_WIDTH))
        used = cell_len(self.title) + bar
        if used > room:
            bar = max(least, room - cell_len(self.title))
            used = room
        if used + cell_len(loss) > room:
            loss = rate = ""
        elif used + cell_len(loss) + cell_len(rate) > room:
            rate = ""
        self._bar.bar_width = bar
        title = self.title if cell_len(self.title) + bar <= room else set_cell_size(self.title, max(0, room - bar))
        return title, loss, rate


class _NotebookBar(Display):
    """A bar below a notebook cell, in the same output as the table of the fit.

    Args:
        console: The console.
        of_fit: Whether the display lasts for a fit.
        rows_follow: Whether a table on the same console prints a row at the end of an epoch.
    """

    def __init__(self, console: Any, of_fit: bool, rows_follow: bool) -> None:
        super().__init__(console, of_fit)
        self.rows_follow = rows_follow
        self.steps = 0
        self._losses: dict[str, str] = {}
        self._last_line = ""
        self._output: CellOutput | None = cell_output("bar", self)

    def begin(self, name: str, title: str, total: int, done: int, *, compiling: bool) -> None:
        super().begin(name, title, total, done, compiling=compiling)
        self.steps = done
        self._redraw()

    def show(self, steps: int) -> None:
        self.steps = steps
        if self.loss is not None:
            self._losses[self.name] = f"loss {self.loss:.4f}"
        self._redraw()

    def finish(self, steps: int, *, trains: bool) -> None:
        self.show(steps)
        if trains:
            self._last_line = self.line(steps, time.monotonic())

    def close(self) -> None:
        """Remove the bar. Without a table, the line of the last training epoch replaces it."""
        output, self._output = self._output, None
        if output is not None:
            output.close("bar", remove=self.rows_follow)

    def _redraw(self) -> None:
        if self._output is None:
            return
        if self.compiling:  # nothing else updates the bar while the step compiles, which can take minutes
            self._output.draw()
        else:
            self._output.redraw()

    def html(self) -> str:
        """Return the bar as HTML: text and a `progress` element, which uses the theme of the front end."""
        if self._output is None:
            return f"<div>{html.escape(self._last_line)}</div>" if self._last_line else ""
        if not self.title:
            return ""
        value = f' value="{self.steps}"' if self.total and not self.compiling else ""  # animated if empty
        bar = f'<progress max="{self.total or 1}"{value} style="width: 16em; vertical-align: middle"></progress>'
        texts = "".join(f"<span>{html.escape(text)}</span>" for text in self._texts())
        style = "display: flex; gap: 1em; align-items: center; flex-wrap: wrap; font-variant-numeric: tabular-nums"
        return f'<div style="{style}"><span>{html.escape(self.title)}</span>{bar}{texts}</div>'

    def text(self) -> str:
        """Return the bar as a line of text."""
        if self._output is None:
            return self._last_line
        return "  ".join([self.title, *self._texts()]) if self.title else ""

    def _texts(self) -> list[str]:
        count = f"{self.steps}/{self.total or '?'}"
        if self.compiling:
            return [count, "compiling"]
        rate = self.rate(self.steps, time.monotonic())
        left = _clock((self.total - self.steps) / rate) if self.total and rate else ""
        return [text for text in (count, self._losses.get(self.name, ""), _per_second(rate), left) if text]


def _per_second(rate: float) -> str:
    """Return a rate as text, or an empty string for 0."""
    if rate == 0:
        return ""
    return f"{rate:,.0f} steps/s" if rate >= 9.95 else f"{rate:.2g} steps/s"


def _clock(seconds: float) -> str:
    """Return a time as `h:mm:ss`."""
    minutes, rest = divmod(math.ceil(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
