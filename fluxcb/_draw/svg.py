"""A drawing as SVG that stands alone: no style sheet, no font, no script, and no ids that two pictures could share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from math import hypot

from fluxcb._draw.boxes import LABEL, LEADING, LINE, PAD, STRIP, TITLE, text_width
from fluxcb._draw.drawing import Drawing, Link, Node, NodeKind
from fluxcb._draw.labels import place_labels
from fluxcb._draw.layout import Box, Layout, Point, arrange

__all__ = ["to_svg"]

FONT = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono','Liberation Mono',monospace"
PAPER, INK, SOFT, RED = "#ffffff", "#0f172a", "#64748b", "#dc2626"
FILL = {"host": "#fff7e0", "traced": "#e6f0ff", "both": "#f6f6f9", "none": "#f4f4f5"}
STRIPS: dict[NodeKind, tuple[tuple[str, str], ...]] = {
    "host": (("host", "#b45309"),),
    "traced": (("traced", "#1d4ed8"),),
    "both": (("host", "#b45309"), ("traced", "#1d4ed8")),
    "none": (("idle", "#71717a"),),
}
WORDS: dict[NodeKind, str] = {
    "host": "runs on the host",
    "traced": "traced into the step",
    "both": "on the host, and traced",
    "none": "runs at no moment",
}
# Links that leave one box share a colour. None is red, which means that something is wrong.
COLOURS = ("#475569", "#0f766e", "#6d28d9", "#0369a1", "#4d7c0f", "#a21caf", "#92400e", "#1e40af")
MARGIN, LEGEND = 24.0, 34.0
TIP = 8.0


def to_svg(drawing: Drawing) -> str:
    """Return a drawing as SVG.

    Boxes run from left (first) to right; each link has a lane of its own. What is cut to fit stands in full in the
    tooltips.

    Args:
        drawing: What to show.

    Returns:
        One `<svg>` element.
    """
    layout = arrange(drawing)
    legend, legend_width = _legend(drawing)
    width = max(layout.width, legend_width) + 2 * MARGIN
    height = layout.height + 2 * MARGIN + LEGEND
    number = {node.key: i for i, node in enumerate(drawing.nodes)}
    labels = place_labels(layout, [link.label for link in drawing.links])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
        f'height="{height:g}" font-family="{FONT}" font-size="{LINE:g}" fill="{INK}" role="img">',
        f"<title>{_text(drawing.title)}</title>",
        f'<rect class="paper" width="{width:g}" height="{height:g}" fill="{PAPER}"/>',
        f'<g class="legend" transform="translate({MARGIN:g} 16)">',
        *legend,
        "</g>",
        f'<g transform="translate({MARGIN:g} {MARGIN + LEGEND:g})">',
    ]
    # Faint ones first, what is wrong last: what matters lies on top.
    weight = {"order": 1, "cycle": 2, "conflict": 3}
    above = sorted(
        range(len(drawing.links)), key=lambda i: 0 if drawing.links[i].implied else weight[drawing.links[i].kind]
    )
    colours = _colours(drawing, layout)
    for i in above:
        link = drawing.links[i]
        title = f"{drawing.nodes[number[link.earlier]].title} {'and' if link.kind == 'conflict' else 'before'} "
        title += drawing.nodes[number[link.later]].title
        parts += _link(i, link, layout.routes[i].points, colours[i], title, number)
    for i, label in enumerate(labels):
        if label is not None:
            colour = RED if drawing.links[i].kind != "order" else colours[i]
            parts.append(
                f'<text class="label" data-link="{i}" x="{label.x:g}" y="{label.y:g}" font-size="{LABEL:g}" '
                f'fill="{colour}">{_text(label.text)}</text>'
            )
    for i, (node, box) in enumerate(zip(drawing.nodes, layout.boxes, strict=True)):
        parts += _box(i, node, box)
    if layout.alone is not None:
        parts.append(f'<text x="0" y="{layout.alone - 10:g}" fill="{SOFT}">unordered:</text>')
    return "\n".join([*parts, "</g>", "</svg>", ""])


def _text(text: str) -> str:
    """Escape text; what XML cannot hold becomes a replacement character."""
    return escape(
        "".join(c if c in "\t\n" or (c >= " " and not "\x7f" <= c <= "\x9f" and _legal(c)) else "�" for c in text)
    )


def _legal(char: str) -> bool:
    return not ("\ud800" <= char <= "\udfff" or char in "￾￿")


def _colours(drawing: Drawing, layout: Layout) -> list[str]:
    """Give the links of one box one colour, and those of boxes that stand near each other different ones."""
    at = {node.key: (box.x, box.y) for node, box in zip(drawing.nodes, layout.boxes, strict=True)}
    sources = sorted({link.earlier for link in drawing.links}, key=at.__getitem__)
    colour = {key: COLOURS[i % len(COLOURS)] for i, key in enumerate(sources)}
    return [colour[link.earlier] for link in drawing.links]


def _link(
    i: int, link: Link, points: Sequence[Point], colour: str, title: str, number: dict[str, int]
) -> Iterable[str]:
    wrong = link.kind != "order"
    line = points if link.kind == "conflict" else _shortened(points, TIP - 1)
    path = _rounded(line)
    style = f'stroke="{RED if wrong else colour}" stroke-width="{2 if wrong else 0.8 if link.implied else 1.4}"'
    if link.kind == "conflict":
        style += ' stroke-dasharray="6 4"'
    about = [title, *link.reasons, *(f"at {moment}" for moment in link.moments)]
    yield (
        f'<g class="link {link.kind}{" implied" if link.implied else ""}" data-link="{i}" '
        f'data-ends="{number[link.earlier]} {number[link.later]}" fill="none">'
    )
    yield f"<title>{_text(chr(10).join(about))}</title>"
    # A line of the paper's colour below each line interrupts the ones it crosses: which goes on where stays visible.
    yield f'<path class="halo" d="{path}" stroke="{PAPER}" stroke-width="{5 if wrong else 4}"/>'
    yield f'<path class="line" d="{path}" {style}/>'
    if link.kind != "conflict":
        yield f'<path class="tip" d="{_tip(points)}" fill="{RED if wrong else colour}"/>'
    yield "</g>"


def _shortened(points: Sequence[Point], by: float) -> list[Point]:
    (a, b), (c, d) = points[-2], points[-1]
    length = hypot(c - a, d - b)
    return [*points[:-1], (c - (c - a) / length * by, d - (d - b) / length * by)]


def _tip(points: Sequence[Point]) -> str:
    (a, _), (x, y) = points[-2], points[-1]
    back = x - TIP if x > a else x + TIP  # the last piece is level
    return f"M{x:g} {y:g}L{back:g} {y - 3.5:g}L{back:g} {y + 3.5:g}Z"


def _rounded(points: Sequence[Point], radius: float = 5.0) -> str:
    """Return a path along points with round corners."""
    path = f"M{points[0][0]:g} {points[0][1]:g}"
    for (a, b), (x, y), (c, d) in zip(points, points[1:], points[2:], strict=False):
        before, after = hypot(x - a, y - b), hypot(c - x, d - y)
        r = min(radius, before / 2, after / 2)
        start = (x - (x - a) / before * r, y - (y - b) / before * r)
        end = (x + (c - x) / after * r, y + (d - y) / after * r)
        path += f"L{start[0]:g} {start[1]:g}Q{x:g} {y:g} {end[0]:g} {end[1]:g}"
    return f"{path}L{points[-1][0]:g} {points[-1][1]:g}"


def _box(i: int, node: Node, box: Box) -> Iterable[str]:
    about = [node.title, WORDS[node.kind], *(f"reads {p}" for p in node.reads), *(f"writes {p}" for p in node.writes)]
    yield f'<g class="node {node.kind}" data-node="{i}" transform="translate({box.x:g} {box.y:g})">'
    yield f"<title>{_text(chr(10).join(about))}</title>"
    yield from _frame(node.kind, box.width, box.height)
    # A box that is higher than its text, for its many links, has the text in its middle.
    top = (box.height - box.text.height) / 2
    lines = box.text.lines
    rows = len(box.text.title)
    first = top + (21 if lines else box.text.height / 2 + 4.5 - LEADING * (rows - 1) / 2)
    for row, words in enumerate(box.text.title):
        y = first + row * LEADING
        yield f'<text x="{STRIP + PAD}" y="{y:g}" font-size="{TITLE:g}" font-weight="bold">{_text(words)}</text>'
    for row, line in enumerate(lines, rows):
        y = first + 3 + row * LEADING
        if line.verb:
            yield f'<text class="soft" x="{STRIP + PAD}" y="{y:g}" fill="{SOFT}">{line.verb}</text>'
        yield f'<text x="{STRIP + PAD + text_width("writes ", LINE):g}" y="{y:g}">{_text(line.words)}</text>'
    yield "</g>"


def _frame(kind: NodeKind, width: float, height: float) -> Iterable[str]:
    """Draw a box: round corners on the host, square ones where it is traced, and a strip that says so."""
    strips = STRIPS[kind]
    yield f'<path class="box" d="{_outline(kind, width, height)}" fill="{FILL[kind]}" stroke="{strips[0][1]}"/>'
    part = height / len(strips)
    for j, (word, colour) in enumerate(strips):
        upper, lower = _corners(kind)
        edge = _strip(j * part, (j + 1) * part, upper if j == 0 else 0, lower if j == len(strips) - 1 else 0)
        yield f'<path d="{edge}" fill="{colour}"/>'
        yield (
            f'<text transform="translate({STRIP / 2 + 3:g} {(j + 0.5) * part:g}) rotate(-90)" text-anchor="middle" '
            f'font-size="9" font-weight="bold" fill="#ffffff">{word}</text>'
        )


def _corners(kind: NodeKind) -> tuple[float, float]:
    """Return how round a box's upper and lower corners are."""
    return 9.0 if kind in ("host", "both") else 0.0, 9.0 if kind == "host" else 0.0


def _outline(kind: NodeKind, width: float, height: float, scale: float = 1.0) -> str:
    r, s = (corner * scale for corner in _corners(kind))
    return (
        f"M{r:g} 0H{width - r:g}Q{width:g} 0 {width:g} {r:g}V{height - s:g}Q{width:g} {height:g} {width - s:g} "
        f"{height:g}H{s:g}Q0 {height:g} 0 {height - s:g}V{r:g}Q0 0 {r:g} 0Z"
    )


def _strip(top: float, bottom: float, upper: float, lower: float) -> str:
    return (
        f"M{STRIP} {top:g}H{upper:g}Q0 {top:g} 0 {top + upper:g}V{bottom - lower:g}"
        f"Q0 {bottom:g} {lower:g} {bottom:g}H{STRIP}Z"
    )


def _legend(drawing: Drawing) -> tuple[list[str], float]:
    """Explain what occurs in the drawing."""
    kinds = {node.kind for node in drawing.nodes}
    links = {"implied" if link.implied and link.kind == "order" else link.kind for link in drawing.links}
    parts: list[str] = []
    x = 0.0
    for kind, words in WORDS.items():
        if kind in kinds:
            outline = _outline(kind, 24, 16, scale=0.45)
            edge = STRIPS[kind][0][1]
            parts.append(f'<g class="{kind}" transform="translate({x:g} 0)">')
            parts.append(f'<path class="box" d="{outline}" fill="{FILL[kind]}" stroke="{edge}"/>')
            high = 16 / len(STRIPS[kind])
            for j, (_, colour) in enumerate(STRIPS[kind]):
                parts.append(f'<rect y="{j * high:g}" width="6" height="{high:g}" fill="{colour}"/>')
            parts.append(f'<text x="31" y="12">{words}</text></g>')
            x += 31 + text_width(words, LINE) + 24
    samples = (
        ("order", "runs before", f'stroke="{COLOURS[0]}" stroke-width="1.4"', COLOURS[0]),
        ("implied", "follows from others", f'stroke="{COLOURS[0]}" stroke-width="0.8"', COLOURS[0]),
        ("cycle", "cycle: no order satisfies all", f'stroke="{RED}" stroke-width="2"', RED),
        ("conflict", "conflict: no order is known", f'stroke="{RED}" stroke-width="2" stroke-dasharray="6 4"', ""),
    )
    for kind, words, style, tip in samples:
        if kind in links:
            parts.append(f'<g transform="translate({x:g} 8)"><path class="line" d="M0 0H{28 if tip else 34}" {style}/>')
            if tip:
                parts.append(f'<path class="tip" d="{_tip(((0, 0), (34, 0)))}" fill="{tip}"/>')
            parts.append(f'<text x="41" y="4">{words}</text></g>')
            x += 41 + text_width(words, LINE) + 24
    return parts, max(x - 24, 0.0)
