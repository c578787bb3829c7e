"""Curves in a terminal, drawn with braille dots."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from fluxcb._tools.curve import ticks

if TYPE_CHECKING:
    from rich.text import Text

__all__ = ["chart"]

Points = Sequence[tuple[float, float]]

# Which bit of a braille character each of its 2 x 4 dots is (Unicode 2800 and up), from the top left.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_BLANK = 0x2800


def chart(series: Sequence[tuple[Points, str]], *, width: int, height: int) -> list[Text]:
    """Return curves over common axes as lines of text.

    Args:
        series: Finite points `(x, y)` of each curve, and its colour (a rich style).
        width: Width of the whole, axis included (characters).
        height: Height of the plot (lines).
    """
    from rich.text import Text

    xs = [x for points, _ in series for x, _ in points]
    ys = [y for points, _ in series for _, y in points]
    levels = ticks(min(ys), max(ys))
    low, high = levels[0], levels[-1]
    left, right = min(xs), max(xs)
    margin = max(len(f"{level:g}") for level in levels)
    columns = max(8, width - margin - 2)
    dots = [[0] * columns for _ in range(height)]
    colours = [[""] * columns for _ in range(height)]
    for points, colour in series:
        places = [
            ((x - left) / ((right - left) or 1.0) * (columns * 2 - 1), (high - y) / (high - low) * (height * 4 - 1))
            for x, y in sorted(points)
        ]
        for across, down in _joined(places):
            dots[down // 4][across // 2] |= _DOTS[down % 4][across % 2]
            colours[down // 4][across // 2] = colour
    shown = [*levels[1:-1], low, high]  # the last ones win where two share a line
    labels = {round((high - level) / (high - low) * (height - 1)): f"{level:g}" for level in shown}
    lines = []
    for row in range(height):
        line = Text(f"{labels.get(row, ''):>{margin}} {'┤' if row in labels else '│'}")
        for bits, colour in zip(dots[row], colours[row], strict=True):
            line.append(chr(_BLANK + bits) if bits else " ", style=colour)
        line.rstrip()
        lines.append(line)
    first, last = f"{left:g}", f"{right:g}"
    lines.append(Text(f"{'':>{margin}} └{'─' * columns}"))
    lines.append(Text(f"{'':>{margin}}  {first}{last:>{columns - len(first)}}"))
    return lines


def _joined(places: Sequence[tuple[float, float]]) -> Iterator[tuple[int, int]]:
    """Yield the dots of a line through some places, without gaps."""
    for x, y in places[:1]:
        yield round(x), round(y)
    for (x0, y0), (x1, y1) in itertools.pairwise(places):
        number = max(1, math.ceil(max(abs(x1 - x0), abs(y1 - y0)) - 1e-6))
        for i in range(1, number + 1):
            yield round(x0 + (x1 - x0) * i / number), round(y0 + (y1 - y0) * i / number)
