"""Where a link's label has room: along a level piece of its line, touching nothing else."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from fluxcb._draw.boxes import LABEL, clipped, text_width
from fluxcb._draw.layout import Layout, Point

__all__ = ["Label", "place_labels"]

LENGTHS = (30, 20, 13)
"""To how many cells a label may be cut; with less room, there is none."""
_ABOVE, _BELOW, _MARGIN = 9.0, 2.0, 5.0
_CELL = 64.0

Rect = tuple[float, float, float, float]


@dataclass(frozen=True)
class Label:
    """A label's place.

    Attributes:
        text: What is written.
        x: Where it begins.
        y: Its base line.
    """

    text: str
    x: float
    y: float


class _Taken:
    """Rectangles, found by the squares of a grid that they touch."""

    def __init__(self) -> None:
        self.cells: defaultdict[tuple[int, int], list[tuple[int, Rect]]] = defaultdict(list)

    def add(self, owner: int, rect: Rect) -> None:
        for cell in self._cells(rect):
            self.cells[cell].append((owner, rect))

    def meets(self, rect: Rect, own: int) -> bool:
        left, top, right, bottom = rect
        return any(
            owner != own and a < right and left < c and b < bottom and top < d
            for cell in self._cells(rect)
            for owner, (a, b, c, d) in self.cells.get(cell, ())
        )

    @staticmethod
    def _cells(rect: Rect) -> Iterable[tuple[int, int]]:
        left, top, right, bottom = (int(value // _CELL) for value in rect)
        return ((x, y) for x in range(left, right + 1) for y in range(top, bottom + 1))


def place_labels(layout: Layout, texts: Sequence[str]) -> list[Label | None]:
    """Return for each link where its label stands, or None where there is no room.

    Args:
        layout: The boxes and the links' ways.
        texts: The links' labels; an empty one needs no place.
    """
    taken = _Taken()
    for box in layout.boxes:
        taken.add(-1, (box.x, box.y, box.x + box.width, box.y + box.height))
    for i, route in enumerate(layout.routes):
        for (a, b), (c, d) in pairwise(route.points):
            taken.add(i, (min(a, c) - 1.5, min(b, d) - 1.5, max(a, c) + 1.5, max(b, d) + 1.5))
    placed: list[Label | None] = []
    for i, (route, text) in enumerate(zip(layout.routes, texts, strict=True)):
        label = _place(taken, i, route.points, text) if text else None
        placed.append(label)
        if label is not None:
            width = text_width(label.text, LABEL)
            taken.add(-1, (label.x - 2, label.y - _ABOVE, label.x + width + 2, label.y + _BELOW))
    return placed


def _place(taken: _Taken, own: int, points: Sequence[Point], text: str) -> Label | None:
    pieces = list(pairwise(points))
    runs = [(min(a, c), max(a, c), b) for (a, b), (c, d) in pieces if b == d]
    uprights = [(a, min(b, d), max(b, d)) for (a, b), (c, d) in pieces if a == c]
    # The end of a path says more than its beginning.
    for shown in dict.fromkeys(clipped(text, cells, keep_end=True) for cells in LENGTHS):
        width = text_width(shown, LABEL)
        for left, right, y in sorted(runs, key=lambda run: run[0] - run[1]):
            space = right - left - width - 2 * _MARGIN
            if space < 0:
                continue
            for part in (0.5, 0.0, 1.0, 0.25, 0.75):
                x = left + _MARGIN + part * space
                for base in (y - 3.5, y + 10):
                    # The label's own line may bend nearby, but not through it.
                    rect = (x - 2, base - _ABOVE + 1, x + width + 2, base + _BELOW)
                    if not taken.meets(rect, own) and not _crosses(points, rect):
                        return Label(shown, x, base)
        if points[0][0] == points[-1][0]:  # it joins two boxes of one column: there is room beside it
            for x, upper, lower in uprights:
                base = (upper + lower) / 2 + 3
                if not taken.meets((x + 3, base - _ABOVE + 1, x + 7 + width, base + _BELOW), own):
                    return Label(shown, x + 5, base)
    return None


def _crosses(points: Sequence[Point], rect: Rect) -> bool:
    left, top, right, bottom = rect
    return any(
        min(a, c) < right and left < max(a, c) and min(b, d) < bottom and top < max(b, d)
        for (a, b), (c, d) in pairwise(points)
        if a == c
    )
