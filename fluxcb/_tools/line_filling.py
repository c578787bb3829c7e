"""Lines of the command line that continue below themselves in a terminal, and stay whole in a file or a pipe."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterable, Iterator

__all__ = ["filled", "line_width"]

_LEAST = 24  # columns for the words; in a terminal with less room, they continue at a small indentation


def line_width() -> int | None:
    """Return the width of the terminal (characters), or None if standard output is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def filled(head: str, words: Iterable[str], width: int | None) -> Iterator[str]:
    """Yield the lines of a heading that is followed by words.

    Args:
        head: The heading. The words of the following lines are indented by its length.
        words: Texts, which are not broken.
        width: The longest line (characters), or None for a single line.

    Example:
        >>> for line in filled("StepEnd  ", ["Metrics(),", "Recorder(),", "ProgressBar()"], 35):
        ...     print(line)
        StepEnd  Metrics(), Recorder(),
                 ProgressBar()
    """
    indent = " " * (len(head) if width is None or len(head) + _LEAST <= width else 4)
    line, begun = head, False
    for word in words:
        if begun and width is not None and len(line) + 1 + len(word) > width:
            yield line
            line, begun = indent, False
        line += f" {word}" if begun else word
        begun = True
    yield line.rstrip()
