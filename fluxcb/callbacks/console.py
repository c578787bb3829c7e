"""Where callbacks print: one console per file, so that tables and a live bar do not tear each other."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import IO, Any

__all__ = ["console_for", "is_plain", "print_table"]

_consoles: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def console_for(file: IO[str] | None) -> Any:
    """Return the rich console of a file; rich's own one for standard output if it is None."""
    import rich
    from rich.console import Console

    if file is None:
        return rich.get_console()
    if file not in _consoles:
        _consoles[file] = Console(file=file)
    return _consoles[file]


def is_plain(console: Any) -> bool:
    """Tell whether plain lines are wanted: in files, pipes, notebooks and terminals without a cursor."""
    return console.is_jupyter or not console.is_terminal or console.is_dumb_terminal


def print_line(console: Any, text: str, style: str | None = None) -> None:
    """Print one line as it is: no markup, no highlighting, no wrapping."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)


def print_table(console: Any, header: Sequence[str], rows: Sequence[Sequence[str]], footer: Sequence[str]) -> None:
    """Print a table, its first column to the left and the others to the right; plain where the console is.

    Args:
        console: The rich console.
        header: Column titles.
        rows: The cells, by row.
        footer: The last row, set apart.
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
    """Return one line of a table: the first cell to the left, the others to the right."""
    first, *rest = zip(cells, widths, strict=True)
    return "  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]).rstrip()
