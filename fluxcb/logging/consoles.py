"""One rich console per file, so that what several callbacks print, and a live bar below it, do not tear each other."""

from __future__ import annotations

import io
import sys
import weakref
from collections.abc import Sequence
from typing import IO, Any

from fluxcb._errors import DeclarationError

__all__ = ["CONSOLES", "console_for", "in_notebook", "print_line", "print_lines", "text_file"]

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
        # In a notebook, rich would show the lines of every console below the cell and leave the file empty. Kernels
        # also set FORCE_COLOR, so rich would treat every file as a terminal.
        plain = False if rich.get_console().is_jupyter else None
        console = CONSOLES[id(file)] = Console(file=file, force_jupyter=False, force_terminal=plain)
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


def in_notebook(console: Any) -> bool:
    """Return whether a console shows its output below a notebook cell.

    Output that is redirected (`contextlib.redirect_stdout`, `%%capture`) is written as text to the redirection target.
    """
    return console.is_jupyter and not isinstance(sys.stdout, io.TextIOWrapper | io.StringIO)


def print_line(console: Any, text: str, style: str | None = None) -> None:
    """Print one line as it is: no markup, no emoji codes, no highlighting, no wrapping, no control codes."""
    print_lines(console, [text], style)


def print_lines(console: Any, lines: Sequence[str], style: str | None = None) -> None:
    """Print lines like `print_line`, in one write, so that no other output can appear between them.

    Args:
        console: The rich console.
        lines: The lines, without line ends.
        style: The rich style of the lines, e.g. `bold`. It is ignored for plain text.
    """
    from rich.control import strip_control_codes
    from rich.segment import Segment, Segments

    shown = [strip_control_codes(line) for line in lines]
    if console.is_jupyter:  # each rich print would create another output; lines of a stream share one
        sys.stdout.write("".join(f"{line}\n" for line in shown))
        return
    # A segment is what rich makes of a text in the end; made here, it takes two thirds of the time.
    look = console.get_style(style) if style is not None else None
    segments = [segment for line in shown for segment in (Segment(line, look), Segment.line())]
    console.print(Segments(segments), end="", soft_wrap=True)
