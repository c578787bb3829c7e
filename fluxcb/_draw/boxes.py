"""Boxes: which text they show, and how large that makes them."""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

from fluxcb._draw.drawing import Node

__all__ = ["LABEL", "LEADING", "LINE", "PAD", "STRIP", "TITLE", "Line", "Text", "clipped", "text_width", "write_box"]

STRIP = 18
"""Width of the strip that says where a node runs (pixels)."""
PAD = 9
TITLE, LINE, LABEL = 13.0, 11.0, 9.5
"""Font sizes (pixels)."""
LEADING = 15
"""Distance of lines (pixels)."""
MOST_LINES = 3
WIDEST = 32
"""Longest line of a title (cells); the lines below have as much room."""

# All monospaced fonts in use are at most this wide (em), so that text fits whichever a reader has.
_ADVANCE = 0.605


@dataclass(frozen=True)
class Line:
    """One line of a box: what is done with a path, and the path."""

    verb: str
    words: str


@dataclass(frozen=True)
class Text:
    """What a box shows.

    Attributes:
        title: One line or two, cut to fit.
        lines: The lines below it, cut to fit.
        width: Width of the box (pixels).
        height: Least height of the box (pixels).
    """

    title: tuple[str, ...]
    lines: tuple[Line, ...]
    width: float
    height: float


def text_width(text: str, size: float) -> float:
    """Return the width of text in a monospaced font of a size (pixels)."""
    return size * _ADVANCE * _cells(text)


def _cells(text: str) -> int:
    return sum(0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text)


def clipped(text: str, cells: int, *, keep_end: bool = False) -> str:
    """Return text on one line, of at most so many cells, with an ellipsis where something is left out."""
    text = _plain(text)
    if _cells(text) <= cells:
        return text
    while text and _cells(text) > cells - 1:
        text = text[1:] if keep_end else text[:-1]
    return f"…{text}" if keep_end else f"{text}…"


def _plain(text: str) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def _title(text: str) -> tuple[str, ...]:
    """Return a title on one line, or on two if it is long and has a space to break at."""
    text = _plain(text)
    if _cells(text) <= WIDEST:
        return (text,)
    breaks = [i for i, c in enumerate(text) if c == " " and _cells(text[:i]) <= WIDEST]
    if not breaks:
        return (clipped(text, WIDEST),)
    return text[: breaks[-1]], clipped(text[breaks[-1] + 1 :], WIDEST)


def write_box(node: Node) -> Text:
    """Lay out a node's text."""
    title = _title(node.title)
    lines = (*_some("reads", node.reads), *_some("writes", node.writes))
    widths = [
        *(text_width(row, TITLE) for row in title),
        *(text_width(f"{line.verb:7}{line.words}", LINE) for line in lines),
    ]
    height = 15 + LEADING * (len(title) + len(lines)) + (5 if lines else 0)
    return Text(title, lines, STRIP + 2 * PAD + ceil(max(widths)), max(height, 78 if node.kind == "both" else 46))


def _some(verb: str, paths: Sequence[str]) -> list[Line]:
    shown = (
        list(paths) if len(paths) <= MOST_LINES else [*paths[: MOST_LINES - 1], f"+{len(paths) - MOST_LINES + 1} more"]
    )
    room = WIDEST + 3 - 7
    return [Line(verb if i == 0 else "", clipped(words, room)) for i, words in enumerate(shown)]
