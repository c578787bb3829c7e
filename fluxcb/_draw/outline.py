"""Render a drawing as plain text: in stages for readers, or sorted for snapshot tests."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from fluxcb._draw.drawing import Drawing, Link

__all__ = ["to_text", "to_tree"]

WIDTH = 100
_KIND = "{:<8}"
_WORDS = {"host": "host", "traced": "traced", "both": "both", "none": "idle"}


def to_tree(drawing: Drawing) -> str:
    """Return a drawing as text in stages, where each node of a stage runs after a node of the previous stage.

    For each node, the text lists the nodes that it runs after, with the reasons, and the nodes whose data it reads.
    Implied links are only counted. Unordered nodes come last.
    """
    number = {node.key: i for i, node in enumerate(drawing.nodes)}
    links: list[list[Link]] = [[] for _ in drawing.nodes]  # by the node under which they are listed
    for link in drawing.links:
        if link.kind != "conflict":
            links[number[link.later]].append(link)
    conflicts = [link for link in drawing.links if link.kind == "conflict"]
    for link in conflicts:
        links[number[link.earlier]].append(link)
        links[number[link.later]].append(link)
    ordered = [(number[x.earlier], number[x.later]) for x in drawing.links if x.kind in ("order", "cycle")]
    stages = _stages(len(drawing.nodes), ordered)
    linked = {i for x in drawing.links if x.kind != "data" for i in (number[x.earlier], number[x.later])}
    lines = [f"{drawing.title}: {_count(drawing)}"]
    for stage in range(max(stages, default=-1) + 1):
        members = [i for i, own in enumerate(stages) if own == stage and i in linked]
        if members:
            lines += ["", f"stage {stage + 1}"]
        for i in members:
            lines.append(f"  {_KIND.format(_WORDS[drawing.nodes[i].kind])}{drawing.nodes[i].title}")
            lines += _link_lines(drawing, number, i, links[i])
    unordered = [i for i in range(len(drawing.nodes)) if i not in linked]
    if unordered:
        lines += ["", "unordered"]
    for i in unordered:
        lines.append(f"  {_KIND.format(_WORDS[drawing.nodes[i].kind])}{drawing.nodes[i].title}")
        lines += _link_lines(drawing, number, i, links[i])
    return "\n".join(lines)


def _stages(count: int, edges: Iterable[tuple[int, int]]) -> list[int]:
    """Return the length of the longest path to each node. A cycle is broken at its first node."""
    after: list[list[int]] = [[] for _ in range(count)]
    before = [0] * count
    for earlier, later in edges:
        after[earlier].append(later)
        before[later] += 1
    stage = [0] * count
    waiting = dict.fromkeys(range(count))
    ready = [i for i in waiting if not before[i]]
    while waiting:
        node = ready.pop() if ready else next(iter(waiting))
        del waiting[node]
        for later in after[node]:
            if later in waiting:
                before[later] -= 1
                stage[later] = max(stage[later], stage[node] + 1)
                if not before[later]:
                    ready.append(later)
    return stage


def _count(drawing: Drawing) -> str:
    numbers = [
        (len(drawing.nodes), "callback"),
        (sum(link.kind in ("order", "cycle") for link in drawing.links), "edge"),
        (sum(link.kind == "conflict" for link in drawing.links), "conflict"),
    ]
    return ", ".join(f"{n} {word}{'' if n == 1 else 's'}" for n, word in numbers if n or word != "conflict")


def _link_lines(drawing: Drawing, number: dict[str, int], own: int, links: list[Link]) -> Iterable[str]:
    def other(link: Link) -> str:
        i = number[link.earlier]
        return drawing.nodes[number[link.later] if i == own else i].title

    after = [link for link in links if link.kind == "order" and not link.implied]
    implied = sum(link.implied for link in links)
    if after:
        more = f"; {implied} more {'follows' if implied == 1 else 'follow'} from these" if implied else ""
        yield from _wrapped(f"after {', '.join(f'{other(x)} ({x.label})' for x in after)}{more}")
    read = [link for link in links if link.kind == "data"]
    if read:
        yield from _wrapped(f"reads {', '.join(f'{link.label} from {other(link)}' for link in read)}")
    for link in links:
        if link.kind == "cycle":
            yield from _wrapped(f"! after {other(link)} ({link.label}), in a cycle")
    for link in links:
        if link.kind == "conflict":
            yield from _wrapped(f"! in conflict with {other(link)} ({link.label})")


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=" " * 12, subsequent_indent=" " * 14, break_long_words=False, break_on_hyphens=False
    )


def to_text(drawing: Drawing) -> str:
    """Return a drawing as text that does not depend on the order of its nodes, for snapshot tests.

    Each node is followed by its access, and each link by its reasons and moments.
    """
    titles = {node.key: node.title for node in drawing.nodes}
    lines = [drawing.title, "", "callbacks"]
    for node in sorted(drawing.nodes, key=lambda node: node.title):
        lines.append(f"  {node.title}  [{_WORDS[node.kind]}]")
        lines += [f"    reads   {path}" for path in sorted(node.reads)]
        lines += [f"    writes  {path}" for path in sorted(node.writes)]
    for heading, kinds in (("edges", ("order", "cycle")), ("conflicts", ("conflict",)), ("data", ("data",))):
        rows = sorted(
            (*_pair(link, titles), link.label, link.moments, link.reasons)
            for link in drawing.links
            if link.kind in kinds
        )
        if rows:
            lines += ["", heading]
        arrow = "--" if heading == "conflicts" else "->"
        for one, other, label, moments, reasons in rows:
            lines.append(f"  {one} {arrow} {other}")
            lines += [f"    {reason}" for reason in ((label,) if heading == "conflicts" else sorted(reasons))]
            if moments:
                lines.append(f"    at {', '.join(sorted(moments))}")
    return "\n".join(lines)


def _pair(link: Link, titles: dict[str, str]) -> tuple[str, str]:
    one, other = titles[link.earlier], titles[link.later]
    return (min(one, other), max(one, other)) if link.kind == "conflict" else (one, other)
