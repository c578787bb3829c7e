"""Functions that print lines, blocks and tables through the console of a file."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import Any

from fluxcb._terminal import escape_line
from fluxcb.logging.consoles import console_for, in_notebook, print_line, print_lines

__all__ = [
    "aligned",
    "console_for",
    "in_notebook",
    "is_plain",
    "print_line",
    "print_lines",
    "print_table",
    "show_block",
]


def is_plain(console: Any) -> bool:
    """Return whether a console shows plain text, as in files, pipes, notebooks and terminals without a cursor."""
    return console.is_jupyter or not console.is_terminal or console.is_dumb_terminal


def show_block(console: Any, lines: Sequence[str], style: str | None = None) -> None:
    """Print a block of text, for example the summary at the end of a fit.

    In a terminal, the block appears above the live bar, and long lines are wrapped between words. In a file, a pipe or
    a notebook, it follows the previous output. The block is printed in one write, so that no other output can appear
    between its lines.

    Args:
        console: The console of `console_for`.
        lines: The lines, without line ends.
        style: The rich style of the lines in a terminal, e.g. `bold`. It is ignored for plain text.
    """
    if is_plain(console):
        print_lines(console, lines, None)
        return
    wrapper = textwrap.TextWrapper(
        console.width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    print_lines(console, [part for line in lines for part in wrapper.wrap(escape_line(line)) or [""]], style)


def print_table(console: Any, header: Sequence[str], rows: Sequence[Sequence[str]], footer: Sequence[str]) -> None:
    """Print a table whose first column is left-aligned and whose other columns are right-aligned.

    Args:
        console: The rich console.
        header: Column titles.
        rows: The cells of each row.
        footer: The cells of the last row, which a line separates from the others.
    """
    widths = [max(len(line[i]) for line in (header, *rows, footer)) for i in range(len(header))]
    plain = is_plain(console)
    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
    print_line(console, aligned(header, widths), None if plain else "bold")
    print_line(console, rule, None if plain else "dim")
    for row in rows:
        print_line(console, aligned(row, widths))
    print_line(console, rule, None if plain else "dim")
    print_line(console, aligned(footer, widths), None if plain else "bold")


def aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Return one line of a table, with the first cell left-aligned and the others right-aligned."""
    first, *rest = zip(cells, widths, strict=True)
    return "  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]).rstrip()
