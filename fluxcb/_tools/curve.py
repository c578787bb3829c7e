"""Curves as a self-contained SVG file that any browser opens."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

from fluxcb.plots.chart import ticks

__all__ = ["curve_svg"]

Points = Sequence[tuple[float, float]]

_WIDTH, _HEIGHT = 760, 420
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 150, 44, 48
# Okabe and Ito's palette, which people with colour vision deficiencies can tell apart.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")


def curve_svg(series: Mapping[str, Points], *, title: str, x_label: str, y_label: str) -> str:
    """Return an SVG drawing of curves over common axes.

    Args:
        series: Points `(x, y)` by name; points that are not finite are left out.
        title: Heading.
        x_label: Name of the horizontal axis, with its unit.
        y_label: Name of the vertical axis, with its unit.
    """
    finite = {
        name: [(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)] for name, points in series.items()
    }
    finite = {name: points for name, points in finite.items() if points}
    xs = [x for points in finite.values() for x, _ in points] or [0.0, 1.0]
    ys = [y for points in finite.values() for _, y in points] or [0.0, 1.0]
    x_ticks, y_ticks = ticks(min(xs), max(xs)), ticks(min(*ys, 0.0), max(ys))
    x_low, x_high, y_low, y_high = x_ticks[0], x_ticks[-1], y_ticks[0], y_ticks[-1]

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - x_low) / (x_high - x_low)
        up = (y - y_low) / (y_high - y_low)
        return _LEFT + across * (_WIDTH - _LEFT - _RIGHT), _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" width="{_WIDTH}" '
        f'height="{_HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="white"/>',
        f'<text x="{_LEFT}" y="24" font-size="15" font-weight="bold">{escape(title)}</text>',
    ]
    for y in y_ticks:
        left, level = at(x_low, y)
        right, _ = at(x_high, y)
        parts.append(f'<line x1="{left:.1f}" y1="{level:.1f}" x2="{right:.1f}" y2="{level:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 8:.1f}" y="{level + 4:.1f}" text-anchor="end" fill="#444">{y:g}</text>')
    for x in x_ticks:
        place, bottom = at(x, y_low)
        parts.append(f'<line x1="{place:.1f}" y1="{bottom:.1f}" x2="{place:.1f}" y2="{bottom + 4:.1f}" stroke="#888"/>')
        parts.append(f'<text x="{place:.1f}" y="{bottom + 18:.1f}" text-anchor="middle" fill="#444">{x:g}</text>')
    middle_x, middle_y = (_LEFT + _WIDTH - _RIGHT) / 2, (_TOP + _HEIGHT - _BOTTOM) / 2
    parts.append(f'<text x="{middle_x}" y="{_HEIGHT - 10}" text-anchor="middle">{escape(x_label)}</text>')
    parts.append(
        f'<text x="18" y="{middle_y}" text-anchor="middle" transform="rotate(-90 18 {middle_y})">'
        f"{escape(y_label)}</text>"
    )
    for number, (name, points) in enumerate(finite.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        line = " ".join(f"{a:.1f},{b:.1f}" for a, b in (at(x, y) for x, y in points))
        parts.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        level = _TOP + 8 + 20 * number
        edge = _WIDTH - _RIGHT + 14
        parts.append(f'<path d="M{edge} {level}h20" stroke="{colour}" stroke-width="3"/>')
        parts.append(f'<text x="{edge + 26}" y="{level + 4}">{escape(name)}</text>')
    return "\n".join([*parts, "</svg>", ""])
