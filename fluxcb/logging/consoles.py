"""One rich console per file, so that what several callbacks print, and a live bar below it, do not tear each other."""

from __future__ import annotations

import weakref
from typing import IO, Any

from fluxcb._errors import DeclarationError

__all__ = ["CONSOLES", "console_for", "print_line", "text_file"]

CONSOLES: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
"""The consoles in use, by file."""


def console_for(file: IO[str] | None) -> Any:
    """Return the rich console of a file; rich's own one for standard output if it is None."""
    import rich
    from rich.console import Console

    if file is None:
        return rich.get_console()
    if file not in CONSOLES:
        CONSOLES[file] = Console(file=file)
    return CONSOLES[file]


def text_file(file: IO[str] | None, owner: str) -> IO[str] | None:
    """Return a file that lines can be printed to; None stands for the usual one.

    Raises:
        DeclarationError: It is no open file.
    """
    if file is None or callable(getattr(file, "write", None)):
        return file
    raise DeclarationError(
        f"`file` of `{owner}` must be an open text file, not {file!r}.",
        fix='write `file=open("lines.txt", "w")`, or leave it out',
    )


def print_line(console: Any, text: str, style: str | None = None) -> None:
    """Print one line as it is: no markup, no highlighting, no wrapping."""
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
