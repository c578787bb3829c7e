"""The table of `MetricsPrinter`: lines in a terminal, a file or a pipe, and one output in a notebook."""

from __future__ import annotations

import html
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fluxcb.callbacks.progress.cell_output import cell_output, current_cell
from fluxcb.callbacks.progress.console import in_notebook, is_plain, show_block

__all__ = ["EpochTable", "open_table"]

_NUMBER_WIDTH = 10  # width of the longest number, `-1.234e-05`
_TIME_WIDTH = 8
_LIVE_ROWS = 50  # shown in a notebook while the fit runs, because each update sends all of them
_STORED_ROWS = 1_000  # shown at the end of the fit, which the notebook stores


def open_table(console: Any, *, of_fit: bool, printed: int, epochs: int) -> EpochTable:
    """Return a table that suits a console.

    Args:
        console: The console.
        of_fit: Whether the table lasts for a fit. In a hand-written loop, the last row is not known.
        printed: Number of the epoch that precedes the first row.
        epochs: Number of the last epoch, or 0 if that is not known.
    """
    return (_NotebookTable if in_notebook(console) else _PrintedTable)(console, of_fit, printed, epochs)


class EpochTable(ABC):
    """A table with one row per epoch.

    Args:
        console: The console.
        of_fit: Whether the table lasts for a fit.
        printed: Number of the epoch that precedes the first row.
        epochs: Number of the last epoch, or 0 if that is not known.

    Attributes:
        columns: Titles of the columns between `epoch` and `time`.
        notes: Lines above the header.
    """

    def __init__(self, console: Any, of_fit: bool, printed: int, epochs: int) -> None:
        self.console = console
        self.of_fit = of_fit
        self.columns: tuple[str, ...] = ()
        self.notes: tuple[str, ...] = ()
        self._printed = printed
        self._epoch_width = max(len("epoch"), len(str(epochs)))
        self._last_row = time.monotonic()

    @property
    def over(self) -> bool:
        """Whether rows can no longer be added to the table."""
        return False

    def begin(self, columns: Sequence[str], notes: Sequence[str] = ()) -> None:
        """Show the notes, and the header if columns are known."""
        self.notes = tuple(notes)
        self.show_notes()
        if columns:
            self.columns = tuple(columns)
            self.show_header()

    def add(self, epoch: int, values: Mapping[str, float]) -> None:
        """Show the row of an epoch if it has values and has not been shown.

        Args:
            epoch: Number of the epoch.
            values: Metrics by column.
        """
        if epoch <= self._printed or not values:
            return
        now = time.monotonic()
        seconds, self._printed, self._last_row = now - self._last_row, epoch, now
        new = [title for title in values if title not in self.columns]
        if new:
            self.columns = (*self.columns, *new)
        if new or len(str(epoch)) > self._epoch_width:
            self._epoch_width = max(self._epoch_width, len(str(epoch)))
            self.show_header()
        numbers = [_number(values[title]) if title in values else "-" for title in self.columns]
        self.show_row([str(epoch), *numbers, _seconds(seconds)])

    @property
    def header(self) -> list[str]:
        """The titles of all columns."""
        return ["epoch", *self.columns, "time"]

    def lines(self, cells: Sequence[str], width: float = math.inf) -> list[str]:
        """Return a row as text, aligned with the others.

        Args:
            cells: The cells.
            width: Maximum length of a line (characters). A longer row continues on the next lines.
        """
        widths = [self._epoch_width, *(max(len(title), _NUMBER_WIDTH) for title in self.columns), _TIME_WIDTH]
        # A title that is longer than a line must not move the number below it beyond the line.
        widths = [int(min(of, max(_NUMBER_WIDTH, width - self._epoch_width - 2))) for of in widths]
        lines = [" " * self._epoch_width]
        for cell, of in list(zip(cells, widths, strict=True))[1:]:
            if len(lines[-1]) + 2 + of > width and lines[-1].strip():
                lines.append(" " * self._epoch_width)
            lines[-1] += f"  {cell.rjust(of)}"
        return [cells[0].rjust(self._epoch_width) + lines[0][self._epoch_width :], *lines[1:]]

    @abstractmethod
    def show_notes(self) -> None:
        """Show the notes, if they are not shown together with the header."""

    @abstractmethod
    def show_header(self) -> None:
        """Show the header for new columns."""

    @abstractmethod
    def show_row(self, cells: list[str]) -> None:
        """Show a row."""

    @abstractmethod
    def close(self) -> None:
        """End the table."""


class _PrintedTable(EpochTable):
    """A table whose rows are printed one by one. In a terminal, a row that is too long continues on the next line."""

    _width = math.inf

    def show_notes(self) -> None:
        if self.notes:
            show_block(self.console, self.notes)

    def show_header(self) -> None:
        self._width = math.inf if is_plain(self.console) else self.console.width
        show_block(self.console, self.lines(self.header, self._width), "bold")

    def show_row(self, cells: list[str]) -> None:
        show_block(self.console, self.lines(cells, self._width))

    def close(self) -> None:
        """Do nothing, because lines need no cleanup."""


class _NotebookTable(EpochTable):
    """A table in the output below a notebook cell, which it shares with the bar of the fit."""

    def __init__(self, console: Any, of_fit: bool, printed: int, epochs: int) -> None:
        super().__init__(console, of_fit, printed, epochs)
        self._rows: list[list[str]] = []
        self._most = _LIVE_ROWS
        self._output = cell_output("table", self)

    @property
    def over(self) -> bool:
        return self._output.cell != current_cell()

    def show_notes(self) -> None:
        """Do nothing, because the notes are the caption of the table."""

    def show_header(self) -> None:
        self._draw()

    def show_row(self, cells: list[str]) -> None:
        self._rows.append(cells)
        self._draw()

    def _draw(self) -> None:
        if self.of_fit:
            self._output.redraw()
        else:  # it is not known which row is the last
            self._output.draw()

    def close(self) -> None:
        self._most = _STORED_ROWS
        self._output.close("table", remove=False)

    def html(self) -> str:
        """Return the table as HTML with the class `dataframe`, which front ends style for their theme."""
        if not self.columns:
            return ""
        head = "".join(f"<th>{html.escape(title)}</th>" for title in self.header)
        earlier = self._earlier()
        note = f'<tr><td colspan="{len(self.header)}">{earlier}</td></tr>' if earlier else ""
        rows = "".join(f"<tr><td>{'</td><td>'.join(cells)}</td></tr>" for cells in self._shown())
        notes = "<br>".join(map(html.escape, self.notes))
        caption = f"<caption>{notes}</caption>" if notes else ""
        style = "text-align: right; font-variant-numeric: tabular-nums"
        return (
            f'<table class="dataframe" style="{style}">{caption}'
            f'<thead><tr style="text-align: right">{head}</tr></thead>'
            f"<tbody>{note}{rows}</tbody></table>"
        )

    def text(self) -> str:
        """Return the table as text."""
        if not self.columns:
            return ""
        earlier = [line] if (line := self._earlier()) else []
        rows = [line for cells in self._shown() for line in self.lines(cells)]
        return "\n".join([*self.notes, *self.lines(self.header), *earlier, *rows])

    def _earlier(self) -> str:
        left_out = len(self._rows) - self._most
        return f"{left_out:,} earlier epochs are in learner.history" if left_out > 0 else ""

    def _shown(self) -> Iterator[list[str]]:
        """Iterate over the last rows. Rows from before a column was added have an empty cell in it."""
        for epoch, *numbers, seconds in self._rows[-self._most :]:
            yield [epoch, *numbers, *["-"] * (len(self.columns) - len(numbers)), seconds]


def _number(value: float) -> str:
    """Return a number in at most 10 characters."""
    if value == 0 or 1e-3 <= abs(value) < 1e4 or value != value:
        return f"{value:.4f}"
    text = f"{value:.3e}"
    return text if len(text) <= _NUMBER_WIDTH else f"{value:.2e}"  # the exponent has three digits


def _seconds(seconds: float) -> str:
    """Return a time in seconds, in at most 8 characters up to 999999 s."""
    return f"{seconds:.1f} s" if seconds < 9999.95 else f"{seconds:.0f} s"
