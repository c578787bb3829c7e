"""Curves as a self-contained SVG image that any browser opens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from fluxcb.plots.panel import COLORS, DOTTED, Panel, Points
from fluxcb.plots.scale import Scale, enclosing

__all__ = ["panels_svg"]

_WIDTH, _PLOT = 760.0, 270.0
"""Width of the image, and height of each panel between its axes (pixels)."""
_MARGIN, _TITLE, _LEGEND, _BELOW = 20.0, 30.0, 20.0, 48.0
_SAMPLE = 26.0
"""Width of a legend entry without its text (pixels)."""
_CHARACTER = 7.2
"""Estimated width of a character at font size 12 (pixels). It is rather large, so that no legend is cut off."""
_DASHES = ("", "7 3", "2 3", "9 3 2 3", "12 4", "4 2")
"""A line style for each color, for printing in black and white."""


def panels_svg(panels: Sequence[Panel], *, title: str = "") -> str:
    """Return an SVG image of panels, one below the other.

    Args:
        panels: What to draw. Points that cannot be drawn leave a gap.
        title: Heading, or an empty string for none.
    """
    legends = [_legend_rows(panel) for panel in panels]
    widest = max((_width_of(row) for rows in legends for row in rows), default=0.0)
    width = max(_WIDTH, widest + 2 * _MARGIN, len(title) * 9.0 + 2 * _MARGIN)
    parts: list[str] = []
    top = 12.0
    if title:
        parts.append(f'<text x="{_MARGIN:g}" y="24" font-size="15" font-weight="bold">{escape(title)}</text>')
        top += _TITLE
    scales = [_vertical(panel) for panel in panels]
    labels = max((len(f"{level:g}") for scale in scales for level in scale.ticks), default=0)
    left = _MARGIN + 20 + labels * _CHARACTER  # the same for all panels, so that their axes are aligned
    for panel, rows, scale in zip(panels, legends, scales, strict=True):
        for row in rows:
            parts += _legend(row, top)
            top += _LEGEND
        parts += _panel(panel, scale, left, width - _MARGIN - 10, top + 8)
        top += 8 + _PLOT + _BELOW
    height = top + 6
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" font-family="sans-serif" font-size="12">'
    )
    return "\n".join([head, f'<rect width="{width:g}" height="{height:g}" fill="white"/>', *parts, "</svg>", ""])


# -- legend ------------------------------------------------------------------------------------

Entry = tuple[str, str]
"""A name, and the style of its line."""


def _entries(panel: Panel) -> list[Entry]:
    curves = [(name, _style(number)) for number, name in enumerate(panel.curves)]
    return [*curves, *((name, _MARK) for name in panel.marks)]


_MARK = 'stroke="#666" stroke-width="1" stroke-dasharray="4 3"'


def _style(number: int) -> str:
    dashes = _DASHES[number % len(_DASHES)]
    dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'stroke="{_color(number)}" stroke-width="1.5"{dashed}'


def _color(number: int) -> str:
    return COLORS[number % len(COLORS)]


def _legend_rows(panel: Panel) -> list[list[Entry]]:
    """Return the entries of a legend in rows that fit the usual width; a longer entry gets a separate row."""
    rows: list[list[Entry]] = []
    for entry in _entries(panel):
        if rows and _width_of([*rows[-1], entry]) <= _WIDTH - 2 * _MARGIN:
            rows[-1].append(entry)
        else:
            rows.append([entry])
    return rows


def _width_of(row: Sequence[Entry]) -> float:
    return sum(_SAMPLE + 18 + len(name) * _CHARACTER for name, _ in row)


def _legend(row: Sequence[Entry], top: float) -> Iterator[str]:
    x = _MARGIN
    for name, style in row:
        yield f'<path d="M{x:.1f} {top + 8:g}h{_SAMPLE:g}" {style.replace("1.5", "2.5")}/>'
        yield f'<text class="legend" x="{x + _SAMPLE + 6:.1f}" y="{top + 12:g}">{escape(name)}</text>'
        x += _width_of([(name, style)])


# -- a panel -----------------------------------------------------------------------------------


def _vertical(panel: Panel) -> Scale:
    return enclosing([y for points in panel.drawable().values() for _, y in points] or [0.0, 1.0])


def _panel(panel: Panel, y: Scale, left: float, right: float, top: float) -> Iterator[str]:
    x, bottom = panel.horizontal, top + _PLOT

    def at(a: float, b: float) -> tuple[float, float]:
        return left + x.share(a) * (right - left), bottom - y.share(b) * _PLOT

    for level in y.ticks:
        _, place = at(x.low, level)
        yield f'<line x1="{left:.1f}" y1="{place:.1f}" x2="{right:.1f}" y2="{place:.1f}" stroke="#ddd"/>'
        yield f'<text x="{left - 8:.1f}" y="{place + 4:.1f}" text-anchor="end" fill="#444">{level:g}</text>'
    yield from _x_ticks(x, left, right, bottom)
    middle = (left + right) / 2
    yield f'<text x="{middle:.1f}" y="{bottom + 36:.1f}" text-anchor="middle">{escape(panel.x_label)}</text>'
    middle = top + _PLOT / 2
    yield (
        f'<text x="18" y="{middle:.1f}" text-anchor="middle" transform="rotate(-90 18 {middle:.1f})">'
        f"{escape(panel.y_label)}</text>"
    )
    for place in panel.marks.values():
        (across, _) = at(place, y.low)
        yield f'<path class="mark" d="M{across:.1f} {top:.1f}V{bottom:.1f}" fill="none" {_MARK}/>'
    for number, curve in enumerate(panel.curves.values()):
        for run in _runs(panel, curve):
            places = [at(a, b) for a, b in run]
            line = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
            yield f'<polyline points="{line}" fill="none" {_style(number)}/>'
            if len(curve) <= DOTTED or len(run) == 1:
                yield from (f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.5" fill="{_color(number)}"/>' for a, b in places)


def _x_ticks(x: Scale, left: float, right: float, bottom: float) -> Iterator[str]:
    for tick in x.ticks:
        place = left + x.share(tick) * (right - left)
        yield f'<line x1="{place:.1f}" y1="{bottom:.1f}" x2="{place:.1f}" y2="{bottom + 4:.1f}" stroke="#888"/>'
        yield f'<text x="{place:.1f}" y="{bottom + 18:.1f}" text-anchor="middle" fill="#444">{tick:g}</text>'


def _runs(panel: Panel, curve: Points) -> Iterator[list[tuple[float, float]]]:
    """Yield the segments of a curve between its gaps."""
    run: list[tuple[float, float]] = []
    for point in curve:
        if panel.has_place(point):
            run.append(point)
        elif run:
            yield run
            run = []
    if run:
        yield run
