"""Render a drawing as Mermaid or as Graphviz DOT."""

from __future__ import annotations

import re
from collections.abc import Iterable

from fluxcb._draw.drawing import Drawing, Link, Node

__all__ = ["to_dot", "to_mermaid"]

RED, BLUE = "#dc2626", "#0369a1"
FILL = {"host": "#fff7e0", "traced": "#e6f0ff", "both": "#ede9fe", "none": "#f4f4f5"}
EDGE = {"host": "#b45309", "traced": "#1d4ed8", "both": "#6d28d9", "none": "#71717a"}
# Node shapes in Mermaid: rounded for host handlers, a rectangle for traced handlers, a rectangle with bars for both.
_SHAPE = {"host": ('("', '")'), "traced": ('["', '"]'), "both": ('[["', '"]]'), "none": ('["', '"]')}
_CSS = {"host": "host", "traced": "traced", "both": "hostAndTraced", "none": "idle"}
_SPECIAL = re.compile(r"[^\w .,:;=+*/()\[\]{}'-]")


def to_mermaid(drawing: Drawing) -> str:
    """Return a drawing as Mermaid, which GitHub and notebooks can render."""
    name = {node.key: f"n{i}" for i, node in enumerate(drawing.nodes)}
    lines = ["graph LR"]
    for node in drawing.nodes:
        opening, closing = _SHAPE[node.kind]
        lines.append(f"  {name[node.key]}{opening}{_mermaid(node.title)}{closing}:::{_CSS[node.kind]}")
    for link in drawing.links:
        line = "-.-" if link.kind == "conflict" else "-.->" if link.implied or link.kind == "data" else "-->"
        label = f'|"{_mermaid(link.label)}"|' if link.label else ""
        lines.append(f"  {name[link.earlier]} {line}{label} {name[link.later]}")
    lines += [
        f"  classDef {_CSS[kind]} fill:{FILL[kind]},stroke:{EDGE[kind]},color:#0f172a"
        for kind in dict.fromkeys(node.kind for node in drawing.nodes)
    ]
    for kinds, color in ((("cycle", "conflict"), RED), (("data",), BLUE)):
        numbers = [str(i) for i, link in enumerate(drawing.links) if link.kind in kinds]
        if numbers:
            lines.append(f"  linkStyle {','.join(numbers)} stroke:{color},color:{color}")
    return "\n".join(lines)


def _mermaid(text: str) -> str:
    """Escape text for a quoted label in Mermaid, where a special character is written as `#` and its code point."""
    return _SPECIAL.sub(lambda found: f"#{ord(found[0])};", " ".join(text.split()))


def to_dot(drawing: Drawing) -> str:
    """Return a drawing in the DOT language of Graphviz."""
    name = {node.key: f"n{i}" for i, node in enumerate(drawing.nodes)}
    lines = [
        f"digraph {_dot(drawing.title)} {{",
        "  rankdir=LR;",
        '  node [shape=box, fontname="monospace", fontsize=11];',
        '  edge [fontname="monospace", fontsize=9];',
        *(f"  {name[node.key]} [{', '.join(_dot_node(node))}];" for node in drawing.nodes),
        *(f"  {name[x.earlier]} -> {name[x.later]} [{', '.join(_dot_link(x))}];" for x in drawing.links),
        "}",
    ]
    return "\n".join(lines)


def _dot_node(node: Node) -> Iterable[str]:
    rows = [node.title, *(f"reads {path}" for path in node.reads), *(f"writes {path}" for path in node.writes)]
    where = {"host": "host", "traced": "traced", "both": "host and traced", "none": "runs at no moment"}[node.kind]
    yield f"label={_dot(rows[0], f'({where})', *rows[1:])}"
    yield f'style="{"rounded,filled" if node.kind == "host" else "filled"}"'
    yield f'fillcolor="{FILL[node.kind]}"'
    yield f'color="{EDGE[node.kind]}"'
    if node.kind == "both":
        yield "peripheries=2"


def _dot_link(link: Link) -> Iterable[str]:
    yield f"label={_dot(link.label)}"
    yield f"tooltip={_dot(*link.reasons)}"
    if link.kind == "conflict":
        yield "dir=none"
        yield "constraint=false"
    if link.kind == "data":
        yield "constraint=false"
    if link.kind != "order":
        color = BLUE if link.kind == "data" else RED
        yield f'color="{color}"'
        yield f'fontcolor="{color}"'
    if link.kind in ("conflict", "data") or link.implied:
        yield f"style={'dotted' if link.implied else 'dashed'}"


def _dot(*lines: str) -> str:
    """Return lines as a quoted string, with backslashes, quotes and ampersands escaped."""
    text = "\\n".join(
        "".join(c if c.isprintable() else " " for c in line)
        .replace("\\", "\\\\")
        .replace('"', '\\"')
        .replace("&", "&amp;")
        for line in lines
    )
    return f'"{text}"'
