"""Curves in a terminal, drawn with braille dots."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.text import Text

__all__ = ["chart", "ticks"]

Points = Sequence[tuple[float, float]]

# Which bit of a braille character each of its 2 x 4 dots is (Unicode 2800 and up), from the top left.
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
_BLANK = 0x2800


def chart(
    series: Sequence[tuple[Points, str]], *, width: int, height: int, x_label: str = "", log_x: bool = False
) -> list[Text]:
    """Return curves over common axes as lines of text.

    Args:
        series: Finite points `(x, y)` of each curve, and its colour (a rich style). Later ones cover earlier ones.
        width: Width of the whole, axis included (characters).
        height: Height of the plot (lines).
        x_label: Name of the horizontal axis.
        log_x: Whether the horizontal axis is logarithmic; then each `x` is above 0.
    """
    from rich.text import Text

    xs = [x for points, _ in series for x, _ in points]
    ys = [y for points, _ in series for _, y in points]
    levels = ticks(min(ys), max(ys))
    low, high = levels[0], levels[-1]
    along = math.log10 if log_x else float
    left, right = along(min(xs)), along(max(xs))
    margin = max(len(f"{level:g}") for level in levels)
    columns = max(8, width - margin - 2)
    dots = [[0] * columns for _ in range(height)]
    colours = [[""] * columns for _ in range(height)]
    for points, colour in series:
        across, down = (columns * 2 - 1) / ((right - left) or 1.0), (height * 4 - 1) / (high - low)
        places = [((along(x) - left) * across, (high - y) * down) for x, y in sorted(points)]
        for column, row in _joined(places):
            dots[row // 4][column // 2] |= _DOTS[row % 4][column % 2]
            colours[row // 4][column // 2] = colour
    shown = [*levels[1:-1], low, high]  # the last ones win where two share a line
    labels = {round((high - level) / (high - low) * (height - 1)): f"{level:g}" for level in shown}
    lines = []
    for row in range(height):
        line = Text(f"{labels.get(row, ''):>{margin}} {'┤' if row in labels else '│'}")
        for bits, colour in zip(dots[row], colours[row], strict=True):
            line.append(chr(_BLANK + bits) if bits else " ", style=colour)
        line.rstrip()
        lines.append(line)
    first, last = f"{min(xs):g}", f"{max(xs):g}"
    lines.append(Text(f"{'':>{margin}} └{'─' * columns}"))
    lines.append(Text(f"{'':>{margin}}  {first}{x_label:^{columns - len(first) - len(last)}}{last}"))
    return lines


def _joined(places: Sequence[tuple[float, float]]) -> Iterator[tuple[int, int]]:
    """Yield the dots of a line through some places, without gaps."""
    for x, y in places[:1]:
        yield round(x), round(y)
    for (x0, y0), (x1, y1) in itertools.pairwise(places):
        number = max(1, math.ceil(max(abs(x1 - x0), abs(y1 - y0)) - 1e-6))
        for i in range(1, number + 1):
            yield round(x0 + (x1 - x0) * i / number), round(y0 + (y1 - y0) * i / number)


def ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers that enclose a range."""
    if high <= low:
        high = low + max(1.0, abs(low) * 1e-9)  # 1 is nothing beside 1e17
    rough = (high - low) / 4
    exponent = math.floor(math.log10(rough))
    steps = [float(f"{factor}e{exponent}") for factor in (1, 2, 2.5, 5, 10)]  # 2.5 * 1e-6 is less than 2.5e-6
    step = next(step for step in steps if step >= rough)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(number * step, max(0, 2 - exponent)) for number in range(first, last + 1)]
