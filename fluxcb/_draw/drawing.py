"""What a picture shows, as plain data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["Drawing", "Link", "LinkKind", "Node", "NodeKind"]

NodeKind = Literal["host", "traced", "both", "none"]
LinkKind = Literal["order", "cycle", "conflict"]


@dataclass(frozen=True)
class Node:
    """A box.

    Attributes:
        key: What links call it; unique in a drawing.
        title: Its first line.
        kind: Where it runs.
        reads: What it reads, one line each.
        writes: What it writes, one line each.
        details: What a page shows on request: headings, each with its lines.
    """

    key: str
    title: str
    kind: NodeKind
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    details: tuple[tuple[str, tuple[str, ...]], ...] = ()


@dataclass(frozen=True)
class Link:
    """A line between two boxes.

    Attributes:
        earlier: Key of the node that runs first; of a conflict, either one.
        later: Key of the other node.
        label: A word or two that say why.
        reasons: Why, in full, one line each.
        moments: When it holds.
        kind: An order, an order that is part of a circle, or a conflict (which has no direction).
        implied: Whether it follows from other links, and is drawn fainter.
    """

    earlier: str
    later: str
    label: str = ""
    reasons: tuple[str, ...] = ()
    moments: tuple[str, ...] = ()
    kind: LinkKind = "order"
    implied: bool = False


@dataclass(frozen=True)
class Drawing:
    """A picture's content.

    Attributes:
        title: What it is a picture of.
        nodes: The boxes.
        links: The lines; both ends are among the nodes.
        problems: What is wrong with the whole, as a page tells it.
    """

    title: str
    nodes: tuple[Node, ...]
    links: tuple[Link, ...]
    problems: tuple[str, ...] = ()
