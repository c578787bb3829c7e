"""What a measurement says: figures with their spread, in tables for people, pages and programs."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

__all__ = ["Figure", "Table"]


@dataclass(frozen=True)
class Figure:
    """A median with its quartiles.

    Attributes:
        median: The median.
        q1: The lower quartile.
        q3: The upper quartile.
        digits: Decimals that are shown.
    """

    median: float
    q1: float
    q3: float
    digits: int = 2

    @classmethod
    def of(cls, values: Iterable[float], digits: int = 2) -> Figure:
        """Return the figure of some values, one per round."""
        values = list(values)
        if len(values) == 1:
            return cls(values[0], values[0], values[0], digits)
        q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, q1, q3, digits)

    def __str__(self) -> str:
        shown = [f"{value:,.{self.digits}f}" for value in (self.median, self.q1, self.q3)]
        return f"{shown[0]} ({shown[1]} to {shown[2]})"


Cell = Figure | str


@dataclass
class Table:
    """A table of figures.

    Attributes:
        title: What was measured, on what.
        rows: Per row name, the cells by column name; the first row has all columns.
        notes: Sentences below it.
    """

    title: str
    rows: dict[str, dict[str, Cell]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def columns(self) -> list[str]:
        """The names of the columns, in the order in which they came up."""
        return list(dict.fromkeys(column for cells in self.rows.values() for column in cells))

    def print(self, console: Console) -> None:
        """Print it for a person."""
        console.print(f"\n{self.title}", style="bold", highlight=False)
        if self.rows:
            table = RichTable("", *self.columns)
            for name, cells in self.rows.items():
                table.add_row(name, *[str(cells.get(column, "")) for column in self.columns])
            console.print(table)
        for note in self.notes:
            console.print(f"  {note}", highlight=False)

    def markdown(self) -> str:
        """Return it as a page shows it."""
        lines = [f"### {self.title}", ""]
        if self.rows:
            lines += [_line("", *self.columns), "|---|" + "--:|" * len(self.columns)]
            lines += [
                _line(name, *[str(cells.get(column, "")) for column in self.columns])
                for name, cells in self.rows.items()
            ]
            lines.append("")
        lines += [f"- {note}" for note in self.notes]
        return "\n".join(lines).rstrip() + "\n"

    def as_json(self) -> dict[str, Any]:
        """Return it for programs: medians and quartiles by row and column."""
        rows = {
            name: {
                column: {"median": cell.median, "q1": cell.q1, "q3": cell.q3} if isinstance(cell, Figure) else cell
                for column, cell in cells.items()
            }
            for name, cells in self.rows.items()
        }
        return {"title": self.title, "rows": rows, "notes": self.notes}


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |".replace("|  |", "| |")
