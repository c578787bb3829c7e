"""Render a timeline as a self-contained SVG image.

Rows are stacked in execution order. On the left, solid lines show the order of handlers within a moment. On the right,
dashed lines show data that a handler of a later moment reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from fluxcb._draw.drawing import Arc, Row, Timeline
from fluxcb._draw.lanes import Bus, assign_lanes, bundled, ports
from fluxcb._draw.textbox import escaped, text_width, wrapped

__all__ = ["to_svg"]

FONT = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono','Liberation Mono',monospace"
PAPER, INK, SOFT, RED = "#ffffff", "#0f172a", "#64748b", "#dc2626"
FILL = {"host": "#fff7e6", "traced": "#e8f0ff", "idle": "#f4f4f5"}
EDGE = {"host": "#f0d9a8", "traced": "#bdd0f7", "idle": "#d9d9de"}
STRONG = {"host": "#b45309", "traced": "#1d4ed8", "idle": "#71717a"}
WORDS = {"host": "runs on the host", "traced": "traced into the step", "idle": "runs at no moment"}
# The lines of one hub share a color. Red is not among the colors, because it marks cycles and conflicts.
COLORS = ("#475569", "#0f766e", "#7c3aed", "#0369a1", "#4d7c0f", "#be185d", "#92400e", "#1e40af")
TITLE, LINE = 12.0, 11.0
"""Font sizes (pixels)."""
LEADING, MARGIN, PAD, GAP, HEADING = 15.0, 20.0, 10.0, 4.0, 36.0
"""Line height, margin of the picture, padding of text, gap between rows, and space above a moment (pixels)."""
FIRST, LANE, PORT, TIP = 16.0, 9.0, 6.0, 7.0
"""Distance of the first lane, distance between lanes and between line ends at a row, and length of a tip (pixels)."""
ARC = {
    "order": ("runs before, within a moment", 'stroke-width="1.5"'),
    "implied": ("follows from other lines", 'stroke-width="1" stroke-opacity=".45"'),
    "data": ("data that a later moment reads", 'stroke-width="1.5" stroke-dasharray="5 3"'),
    "cycle": ("cycle: no order satisfies all", 'stroke-width="2"'),
    "conflict": ("conflict: no order is declared", 'stroke-width="2" stroke-dasharray="2 3"'),
}
"""The text in the legend and the style of each kind of line."""


@dataclass(frozen=True)
class _Side:
    """The lines on one side of the rows.

    Attributes:
        sign: -1 for the left side, 1 for the right side.
        buses: The lines.
        lanes: The lane of each line.
        ports: The lines that are connected to each row, from top to bottom.
    """

    sign: int
    buses: Sequence[Bus]
    lanes: Sequence[int]
    ports: Mapping[int, Sequence[int]]

    @property
    def width(self) -> float:
        return FIRST + LANE * max(self.lanes) + 4 if self.buses else 0.0


def _side(sign: int, arcs: Iterable[Arc]) -> _Side:
    buses = bundled(arcs)
    lanes = assign_lanes(buses)
    return _Side(sign, buses, lanes, ports(buses, lanes))


_Cells = tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]
"""The lines of text in each of the three columns."""


@dataclass(frozen=True)
class _Card:
    """The box of a row: its text in three columns, and its position (pixels)."""

    kind: str
    cells: _Cells
    top: float
    height: float


def _kind(row: Row) -> str:
    return "idle" if not row.moment else "traced" if row.traced else "host"


def _cells(row: Row) -> _Cells:
    reads, written = ([*(f"{path}," for path in paths[:-1]), *paths[-1:]] for paths in (row.reads, row.writes))
    return (
        (*wrapped(row.callback.split(" "), 40, 3), *([row.cost] if row.cost else [])),
        wrapped(reads, 34, 2, "+{} more"),
        wrapped(written, 34, 2, "+{} more"),
    )


def _arranged(rows: Sequence[Row], cells: Sequence[_Cells], sides: Sequence[_Side], y: float) -> list[_Card]:
    """Stack the rows, with space for a heading above each moment."""
    cards = []
    for i, row in enumerate(rows):
        if i == 0 or row.moment != rows[i - 1].moment:
            y += HEADING
        most_ports = max(len(side.ports.get(i, ())) for side in sides)
        height = max(11 + LEADING * max(map(len, cells[i])), 12 + PORT * most_ports)
        cards.append(_Card(_kind(row), cells[i], y, height))
        y += height + GAP
    return cards


def to_svg(timeline: Timeline) -> str:
    """Return a timeline as a single `<svg>` element.

    Tooltips show the reasons for each line, and text that does not fit into a row. Browsers highlight the line under
    the pointer, or all lines of the row under the pointer.
    """
    rows = timeline.rows
    left = _side(-1, (arc for arc in timeline.arcs if arc.kind != "data"))
    right = _side(1, (arc for arc in timeline.arcs if arc.kind == "data"))
    cells = [_cells(row) for row in rows]
    headings = ([row.moment for row in rows], ["reads"], ["writes"])
    widths = []
    for i, size in enumerate((TITLE, LINE, LINE)):
        lines = [*headings[i], *(line for row in cells for line in row[i])]
        widths.append(max((text_width(line, size) for line in lines), default=0.0))
    begin = MARGIN + left.width
    columns = [begin + PAD]
    for width in widths:
        columns.append(ceil(columns[-1] + width + 2 * PAD))
    end = columns.pop() - PAD
    legend, legend_end, y = _legend(timeline, max(end + right.width, 640))
    cards = _arranged(rows, cells, (left, right), y)
    width = max(end + right.width if rows else 0, legend_end) + MARGIN
    height = (cards[-1].top + cards[-1].height if cards else y) + MARGIN
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" class="fluxcb-graph" viewBox="0 0 {width:g} {height:g}" '
            f'width="{width:g}" height="{height:g}" font-family="{FONT}" font-size="{LINE:g}" fill="{INK}" role="img">',
            f"<title>{escaped(timeline.title)}</title>",
            f"<style>{_highlighting(timeline)}</style>",
            f'<rect class="paper" width="{width:g}" height="{height:g}" fill="{PAPER}"/>',
            *legend,
            *_lines(timeline, left, begin, cards),
            *_lines(timeline, right, end, cards),
            *(part for i in range(len(rows)) for part in _row(timeline, i, cards[i], columns, end)),
            "</svg>",
            "",
        ]
    )


def _highlighting(timeline: Timeline) -> str:
    """Return CSS rules that fade all lines except the line, or the lines of the row, under the pointer.

    Several pictures in one notebook do not affect each other, because the rules only depend on row numbers and only
    apply within a picture. Browsers without `:has()` ignore the rules.
    """
    connected = sorted({row for arc in timeline.arcs for row in (arc.earlier, arc.later)})
    if not connected:
        return ""
    own = ",".join(f".fluxcb-graph:has(.r{i}:hover) .a{i}" for i in connected)
    return (
        ".fluxcb-graph:has(.row:hover,.bus:hover) .arc{opacity:.15}"
        f"{own},.fluxcb-graph .bus:hover .arc{{opacity:1;stroke-opacity:1}}"
    )


# -- rows --------------------------------------------------------------------------------------


def _row(timeline: Timeline, i: int, card: _Card, columns: Sequence[float], end: float) -> Iterable[str]:
    row, kind = timeline.rows[i], card.kind
    left, top = columns[0] - PAD, card.top
    if i == 0 or row.moment != timeline.rows[i - 1].moment:
        heading = row.moment or "At no moment"
        yield f'<g class="moment" font-size="{TITLE:g}" font-weight="bold" fill="{STRONG[kind]}">'
        yield _text(heading, left, top - 9)
        yield "</g>"
        for x, word in zip(columns[1:], ("reads", "writes"), strict=True):
            yield f'<g class="soft" fill="{SOFT}">{_text(word, x, top - 9)}</g>'
    about = [row.callback, " ".join(filter(None, (row.handler, WORDS[kind])))]
    about += [*(f"reads {path}" for path in row.reads), *(f"writes {path}" for path in row.writes)]
    yield f'<g class="row {kind} r{i}"><title>{escaped(chr(10).join(about))}</title>'
    yield (
        f'<rect class="card" x="{left:g}" y="{top:g}" width="{end - left:g}" height="{card.height:g}" rx="4" '
        f'fill="{FILL[kind]}" stroke="{EDGE[kind]}"/>'
    )
    for j, (x, lines) in enumerate(zip(columns, card.cells, strict=True)):
        first = top + card.height / 2 - LEADING * (len(lines) - 1) / 2 + 4
        shown = [_text(line, x, first + k * LEADING) if line else "" for k, line in enumerate(lines)]
        size = f' font-size="{TITLE:g}" font-weight="bold"' if j == 0 else ""
        cost = shown.pop() if j == 0 and row.cost else ""
        yield f"<g{size}>{''.join(shown)}</g>"
        if cost:
            yield f'<g class="soft cost" fill="{SOFT}">{cost}</g>'
    yield "</g>"


def _text(text: str, x: float, y: float) -> str:
    return f'<text x="{x:g}" y="{y:g}">{escaped(text)}</text>'


# -- lines -------------------------------------------------------------------------------------


def _lines(timeline: Timeline, side: _Side, edge: float, cards: Sequence[_Card]) -> Iterable[str]:
    """Draw the lines of one side. Long lines are drawn first, so that short ones are on top."""
    hubs = {hub: COLORS[i % len(COLORS)] for i, hub in enumerate(dict.fromkeys(bus.hub for bus in side.buses))}
    port = {
        (row, bus): cards[row].top + cards[row].height / 2 + PORT * (k - (len(found) - 1) / 2)
        for row, found in side.ports.items()
        for k, bus in enumerate(found)
    }
    for i in sorted(range(len(side.buses)), key=lambda i: (-side.lanes[i], i)):
        bus = side.buses[i]
        lane = edge + side.sign * (FIRST + LANE * side.lanes[i])
        color = RED if bus.arcs[0].kind in ("cycle", "conflict") else hubs[bus.hub]
        about = [
            f"{timeline.rows[arc.earlier].callback} {_VERB[arc.kind]} {timeline.rows[arc.later].callback}: {arc.why}"
            for arc in bus.arcs
        ]
        yield f'<g class="bus" fill="none"><title>{escaped(chr(10).join(about))}</title>'
        shapes = []
        # Draw faint arcs first, so that a shared segment looks like its strongest arc.
        for arc in sorted(bus.arcs, key=lambda arc: not arc.implied):
            other = arc.later if arc.earlier == bus.hub else arc.earlier
            gaps = [TIP - 1 if row == arc.later and arc.kind != "conflict" else 0 for row in (bus.hub, other)]
            ends = [(edge + side.sign * gap, port[row, i]) for gap, row in zip(gaps, (bus.hub, other), strict=True)]
            shapes.append((arc, _path(ends[0], lane, ends[1])))
        for _, path in shapes:
            yield f'<path class="halo" d="{path}" stroke="{PAPER}" stroke-width="5"/>'
        for arc, path in shapes:
            style = ARC["implied" if arc.implied else arc.kind][1]
            yield (
                f'<g class="arc {arc.kind}{" implied" if arc.implied else ""} a{arc.earlier} a{arc.later}" '
                f'data-from="{arc.earlier}" data-to="{arc.later}" stroke="{color}" {style}>'
            )
            yield f'<path class="line" d="{path}"/>'
            if arc.kind != "conflict":
                yield _tip(edge, side.sign, port[arc.later, i], color)
            yield "</g>"
        yield "</g>"


_VERB = {"order": "before", "cycle": "before", "conflict": "and", "data": "to"}


def _path(start: tuple[float, float], lane: float, end: tuple[float, float]) -> str:
    """Return a path from one row to another through a lane, with rounded corners."""
    (x, y), (x_end, y_end) = start, end
    down, inward = 1 if y_end > y else -1, 1 if x > lane else -1
    r = min(5.0, abs(y_end - y) / 2)
    return (
        f"M{x:g} {y:g}H{lane + inward * r:g}Q{lane:g} {y:g} {lane:g} {y + down * r:g}"
        f"V{y_end - down * r:g}Q{lane:g} {y_end:g} {lane + inward * r:g} {y_end:g}H{x_end:g}"
    )


def _tip(edge: float, sign: int, y: float, color: str) -> str:
    back = edge + sign * TIP
    return f'<path class="tip" d="M{edge:g} {y:g}L{back:g} {y - 3.5:g}V{y + 3.5:g}Z" fill="{color}" stroke="none"/>'


# -- the legend --------------------------------------------------------------------------------


def _legend(timeline: Timeline, room: float) -> tuple[list[str], float, float]:
    """Return the legend for the kinds of rows and lines in the picture.

    Returns:
        The SVG elements, the right edge and the bottom edge (pixels).
    """
    kinds = {_kind(row) for row in timeline.rows}
    lines = {"implied" if arc.implied else arc.kind for arc in timeline.arcs}
    items = [(words, kind, "") for kind, words in WORDS.items() if kind in kinds]
    items += [(words, kind, style) for kind, (words, style) in ARC.items() if kind in lines]
    parts: list[str] = []
    x, y, right = MARGIN, MARGIN, 0.0
    for words, kind, style in items:
        width = 40 + text_width(words, LINE)
        if x > MARGIN and x + width > room:
            x, y = MARGIN, y + 20
        if style:
            color = RED if kind in ("cycle", "conflict") else COLORS[0]
            parts.append(f'<g class="legend {kind}" stroke="{color}" fill="none" {style}>')
            parts.append(f'<path class="line" d="M{x:g} {y + 6:g}H{x + 26:g}"/>')
            parts.append("" if kind == "conflict" else _tip(x + 32, -1, y + 6, color))
        else:
            parts.append(f'<g class="legend {kind}">')
            parts.append(
                f'<rect class="card" x="{x:g}" y="{y:g}" width="26" height="12" rx="3" fill="{FILL[kind]}" '
                f'stroke="{STRONG[kind]}"/>'
            )
        parts.append(f"</g><g>{_text(words, x + 40, y + 10)}</g>")
        right = max(right, x + width)
        x += width + 24
    return parts, right, y + (20 if items else 0)
