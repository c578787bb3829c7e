"""One rich console per file, so that what several callbacks print, and a live bar below it, do not tear each other."""

from __future__ import annotations

import weakref
from typing import IO, Any

from fluxcb._errors import DeclarationError

__all__ = ["CONSOLES", "console_for", "print_line", "text_file"]

# By the file's `id`, and as long as somebody holds the console, which holds the file: with the file for a weak key,
# neither would ever go.
CONSOLES: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""The consoles in use, by the `id` of their file."""


def console_for(file: IO[str] | None) -> Any:
    """Return the rich console of a file; rich's own one for standard output if it is None."""
    import rich
    from rich.console import Console

    if file is None:
        return rich.get_console()
    console = CONSOLES.get(id(file))
    if console is None:
        console = CONSOLES[id(file)] = Console(file=file)
        if not console.is_terminal:
            console.size = console.size  # else rich asks the system for it at each line
    return console


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
    """Print one line as it is: no markup, no emoji codes, no highlighting, no wrapping, no control codes."""
    from rich.control import strip_control_codes
    from rich.segment import Segment, Segments

    # A segment is what rich makes of a text in the end; made here, it takes two thirds of the time.
    line = Segment(strip_control_codes(text), console.get_style(style) if style is not None else None)
    console.print(Segments([line, Segment.line()]), end="", soft_wrap=True)
