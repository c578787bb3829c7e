"""Measure, wrap and escape text for SVG and HTML."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from html import escape

__all__ = ["escaped", "text_width", "wrapped"]

# The character width of the widest common monospaced font (em), so that text fits in every font.
_ADVANCE = 0.605


def text_width(text: str, size: float) -> float:
    """Return an upper bound for the width of text in a monospaced font (pixels)."""
    return size * _ADVANCE * _cells(text)


def _cells(text: str) -> int:
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def wrapped(words: Iterable[str], cells: int, most_lines: int, rest: str = "…") -> tuple[str, ...]:
    """Wrap words into lines.

    Args:
        words: The words. A word that does not fit into a line continues on the next one.
        cells: The width of a line. A wide character takes two cells.
        most_lines: The maximum number of lines, at least one.
        rest: The mark at the end of the last line if words are omitted. `{}` is replaced with their number.

    Returns:
        The lines. There is at least one.
    """
    printable = [" ".join("".join(c if c.isprintable() else " " for c in word).split()) for word in words]
    pieces = [(i, piece) for i, word in enumerate(printable) for piece in _pieces(word, cells)]
    lines: list[str] = []
    line = ""
    for i, piece in pieces:
        longer = f"{line} {piece}" if line else piece
        # The last line must have space for the mark, unless this piece is the last one.
        mark = f" {rest.format(len(printable) - i)}" if len(lines) == most_lines - 1 else ""
        if line and _cells(longer) + (_cells(mark) if (i, piece) != pieces[-1] else 0) > cells:
            if mark:
                return (*lines, line + mark)
            lines.append(line)
            longer = piece
        line = longer
    return (*lines, line)


def _pieces(word: str, cells: int) -> Iterable[str]:
    """Split a word that does not fit into a line, if possible after a space or punctuation."""
    while _cells(word) > cells:
        end = 1
        while _cells(word[: end + 1]) <= cells:
            end += 1
        cut = max((i + 1 for i, c in enumerate(word[:end]) if c in " /,._=-"), default=end)
        yield word[:cut].rstrip()
        word = word[cut:]
    yield word


def escaped(text: str) -> str:
    """Escape text for XML. Characters that XML does not allow are replaced with U+FFFD."""
    return escape("".join(c if _is_legal(c) else "\ufffd" for c in text))


def _is_legal(c: str) -> bool:
    control, surrogate = c < " " or "\x7f" <= c <= "\x9f", "\ud800" <= c <= "\udfff"
    return c in "\t\n" or not (control or surrogate or c in "\ufffe\uffff")
