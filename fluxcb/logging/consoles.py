"""One rich console per file, so that the output of several callbacks and a live bar do not corrupt each other."""

from __future__ import annotations

import io
import sys
import weakref
from collections.abc import Sequence
from typing import IO, Any

from fluxcb._errors import DeclarationError
from fluxcb._terminal import escape_line

__all__ = ["CONSOLES", "console_for", "in_notebook", "print_line", "print_lines", "text_file"]

# The key is the file's `id`, and entries live as long as something uses the console. The console holds the file, so
# with the file itself as a weak key, no entry would ever be deleted.
CONSOLES: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""The consoles in use, by the `id` of their file."""


def console_for(file: IO[str] | None) -> Any:
    """Return the rich console of a file, or rich's own console for standard output if `file` is None."""
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
            console.size = console.size  # otherwise rich queries the size from the system at each line
    return console


def text_file(file: IO[str] | None, owner: str) -> IO[str] | None:
    """Return a file that lines can be printed to. None means the default output.

    Raises:
        DeclarationError: `file` is not an open text file.
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
    """Print one line without markup, emoji codes, highlighting and wrapping. Control characters are escaped."""
    print_lines(console, [text], style)


def print_lines(console: Any, lines: Sequence[str], style: str | None = None) -> None:
    """Print lines like `print_line`, in one write, so that no other output can appear between them.

    Args:
        console: The rich console.
        lines: The lines, without line ends.
        style: The rich style of the lines, e.g. `bold`. It is ignored for plain text.
    """
    from rich.segment import Segment, Segments

    shown = [escape_line(line) for line in lines]
    if console.is_jupyter:  # each rich print would create a separate output, and lines of a stream share one output
        sys.stdout.write("".join(f"{line}\n" for line in shown))
        return
    # Create rich's segments directly. This takes two thirds of the time that rich needs to create them from a Text.
    look = console.get_style(style) if style is not None else None
    segments = [segment for line in shown for segment in (Segment(line, look), Segment.line())]
    console.print(Segments(segments), end="", soft_wrap=True)
