"""A drawing in notations that other programs draw: Mermaid's, and Graphviz's DOT."""

from __future__ import annotations

import re
from collections.abc import Iterable

from fluxcb._draw.drawing import Drawing, Link, Node

__all__ = ["to_dot", "to_mermaid"]

RED = "#dc2626"
FILL = {"host": "#fff7e0", "traced": "#e6f0ff", "both": "#ede9fe", "none": "#f4f4f5"}
EDGE = {"host": "#b45309", "traced": "#1d4ed8", "both": "#6d28d9", "none": "#71717a"}
# What a node's shape is in Mermaid: round for the host, a rectangle where traced, a rectangle with bars for both.
_SHAPE = {"host": ('("', '")'), "traced": ('["', '"]'), "both": ('[["', '"]]'), "none": ('["', '"]')}
_CSS = {"host": "host", "traced": "traced", "both": "hostAndTraced", "none": "idle"}
_SPECIAL = re.compile(r"[^\w .,:;=+*/()\[\]{}'-]")


def to_mermaid(drawing: Drawing) -> str:
    """Return a drawing in Mermaid's notation, which GitHub and notebooks draw."""
    name = {node.key: f"n{i}" for i, node in enumerate(drawing.nodes)}
    lines = ["graph LR"]
    for node in drawing.nodes:
        opening, closing = _SHAPE[node.kind]
        lines.append(f"  {name[node.key]}{opening}{_mermaid(node.title)}{closing}:::{_CSS[node.kind]}")
    for link in drawing.links:
        line = "-.-" if link.kind == "conflict" else "-.->" if link.implied else "-->"
        label = f'|"{_mermaid(link.label)}"|' if link.label else ""
        lines.append(f"  {name[link.earlier]} {line}{label} {name[link.later]}")
    kinds = dict.fromkeys(node.kind for node in drawing.nodes)
    lines += [f"  classDef {_CSS[kind]} fill:{FILL[kind]},stroke:{EDGE[kind]},color:#0f172a" for kind in kinds]
    wrong = [str(i) for i, link in enumerate(drawing.links) if link.kind != "order"]
    if wrong:
        lines.append(f"  linkStyle {','.join(wrong)} stroke:{RED},color:{RED}")
    return "\n".join(lines)


def _mermaid(text: str) -> str:
    """Escape text for a quoted label, in Mermaid's own way: `#` and the character's number."""
    return _SPECIAL.sub(lambda found: f"#{ord(found[0])};", " ".join(text.split()))


def to_dot(drawing: Drawing) -> str:
    """Return a drawing in Graphviz's language."""
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
    if link.kind != "order":
        yield f'color="{RED}"'
        yield f'fontcolor="{RED}"'
    if link.kind == "conflict" or link.implied:
        yield f"style={'dashed' if link.kind == 'conflict' else 'dotted'}"


def _dot(*lines: str) -> str:
    """Quote lines; in a quoted string, a backslash begins an escape, and an ampersand an entity."""
    text = "\\n".join(
        "".join(c if c.isprintable() else " " for c in line)
        .replace("\\", "\\\\")
        .replace('"', '\\"')
        .replace("&", "&amp;")
        for line in lines
    )
    return f'"{text}"'
