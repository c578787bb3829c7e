"""Curves in a terminal, drawn with braille dots, or with ASCII characters."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fluxcb.plots.panel import Points
from fluxcb.plots.scale import Scale, enclosing

if TYPE_CHECKING:
    from rich.text import Text

__all__ = ["Line", "chart"]

# Which bit of a braille character each of its 2 x 4 dots is (Unicode 2800 and up), from the top left.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_BLANK = 0x2800
_MARKERS = 6
"""Number of markers on a curve with many points."""


@dataclass(frozen=True)
class Line:
    """A curve in a chart.

    Attributes:
        points: Its points `(x, y)`, all finite.
        style: Its color (a rich style).
        marker: A character that distinguishes the curve from others without colors, or an empty string. It is drawn at
            every point if the curve has few points, and at a few of them otherwise.
        ascii_path: The character that the curve consists of in a chart of ASCII characters.
    """

    points: Points
    style: str = ""
    marker: str = ""
    ascii_path: str = "."


def chart(
    lines: Sequence[Line], *, width: int, height: int, x: Scale, x_label: str = "", ascii_only: bool = False
) -> list[Text]:
    """Return curves over common axes as lines of text.

    Args:
        lines: The curves. Later ones cover earlier ones.
        width: Width of the whole, axis included (characters).
        height: Height of the plot (lines).
        x: The horizontal axis.
        x_label: The name of the horizontal axis, which is omitted if there is no room.
        ascii_only: Whether to draw with ASCII characters.
    """
    from rich.text import Text

    y = enclosing([value for line in lines for _, value in line.points] or [0.0, 1.0])
    margin = max(len(f"{level:g}") for level in y.ticks)
    columns = max(8, width - margin - 2)
    cells = [[(" ", "")] * columns for _ in range(height)]
    dots = [[0] * columns for _ in range(height)]
    marked: list[tuple[int, int, Line]] = []
    for number, line in enumerate(lines):
        places = [(x.share(a) * (columns * 2 - 1), (1 - y.share(b)) * (height * 4 - 1)) for a, b in sorted(line.points)]
        path = list(_joined(places))
        for column, row in path:
            dots[row // 4][column // 2] |= _DOTS[row % 4][column % 2]
            braille = chr(_BLANK + dots[row // 4][column // 2])
            cells[row // 4][column // 2] = line.ascii_path if ascii_only else braille, line.style
        if line.marker:
            few = len(places) <= 2 * _MARKERS
            chosen = [(round(a), round(b)) for a, b in places] if few else _spread(path, number, len(lines))
            marked += [(column // 2, row // 4, line) for column, row in chosen]
    for column, row, line in marked:
        cells[row][column] = line.marker, line.style
    shown = [*y.ticks[1:-1], y.low, y.high]  # if two labels share a line, the later one is shown
    labels = {round((1 - y.share(level)) * (height - 1)): f"{level:g}" for level in shown}
    texts = []
    tick, edge, corner, bottom = "+|+-" if ascii_only else "┤│└─"
    for row in range(height):
        text = Text(f"{labels.get(row, ''):>{margin}} {tick if row in labels else edge}")
        for character, style in cells[row]:
            text.append(character, style=style)
        text.rstrip()
        texts.append(text)
    texts.append(Text(f"{'':>{margin}} {corner}{bottom * columns}"))
    texts.append(Text(f"{'':>{margin}}  {_below(x, x_label, columns)}".rstrip()))
    return texts


def _below(x: Scale, label: str, columns: int) -> str:
    first, last = f"{x.low:g}", f"{x.high:g}" if x.high > x.low else ""
    room = columns - len(first) - len(last)
    return f"{first}{label if len(label) + 2 <= room else '':^{max(1, room)}}{last}"


def _spread(path: Sequence[tuple[int, int]], number: int, lines: int) -> Iterator[tuple[int, int]]:
    """Yield a few positions along a curve. Different curves of a chart get positions in different columns."""
    left, right = path[0][0], path[-1][0]
    at = dict(path)
    for i in range(_MARKERS):
        column = left + round((right - left) * (i + (number + 0.5) / lines) / _MARKERS)
        if column in at:
            yield column, at[column]


def _joined(places: Sequence[tuple[float, float]]) -> Iterator[tuple[int, int]]:
    """Yield the dots of a line through some places, without gaps."""
    for x, y in places[:1]:
        yield round(x), round(y)
    for (x0, y0), (x1, y1) in itertools.pairwise(places):
        number = max(1, math.ceil(max(abs(x1 - x0), abs(y1 - y0)) - 1e-6))
        for i in range(1, number + 1):
            yield round(x0 + (x1 - x0) * i / number), round(y0 + (y1 - y0) * i / number)
