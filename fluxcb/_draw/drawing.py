"""The content of pictures as plain data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

__all__ = ["Arc", "Drawing", "Link", "LinkKind", "Node", "NodeKind", "Row", "Timeline"]

NodeKind = Literal["host", "traced", "both", "none"]
LinkKind = Literal["order", "cycle", "conflict", "data"]


@dataclass(frozen=True)
class Node:
    """A callback.

    Attributes:
        key: The name that links use; unique in a drawing.
        title: The text that is displayed.
        kind: Whether its handlers run on the host, are traced, both, or neither.
        reads: The paths that it reads.
        writes: The paths that it writes.
    """

    key: str
    title: str
    kind: NodeKind
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Link:
    """A line between two callbacks.

    Attributes:
        earlier: Key of the node that runs first, or of either node for a conflict, which has no direction.
        later: Key of the other node.
        label: The reason in one or two words.
        reasons: The full reasons, one line each.
        moments: The moments at which the order or the conflict holds; empty for data.
        kind: An order, an order that is part of a cycle, a conflict, or data that is read at a later moment.
        implied: Whether the order follows from other links.
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
    """Callbacks and the links between them.

    Attributes:
        title: What the drawing shows.
        nodes: The callbacks.
        links: The lines. Both ends of each line are in `nodes`.
    """

    title: str
    nodes: tuple[Node, ...]
    links: tuple[Link, ...]


@dataclass(frozen=True)
class Row:
    """A handler of a callback at a moment.

    Attributes:
        callback: The label of the callback.
        moment: The name of the moment, or an empty string for a callback that runs at no moment.
        traced: Whether the handler is traced into the step.
        handler: The name of the handler and when it is due.
        reads: The paths that the handler reads, the most informative first.
        writes: The paths that the handler writes, the most informative first.
        details: Additional headings, each with its lines.
        cost: The cost of the handler in a few words, or an empty string.
    """

    callback: str
    moment: str
    traced: bool = False
    handler: str = ""
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    details: tuple[tuple[str, tuple[str, ...]], ...] = ()
    cost: str = ""


@dataclass(frozen=True)
class Arc:
    """A line between two rows.

    Attributes:
        earlier: Number of the row that runs first. In a cycle, it can be below the other one.
        later: Number of the other row.
        label: The reason in one or two words; for data, the path.
        reasons: The full reasons, one line each.
        kind: The meaning of the line, as for `Link`. Only data connects rows of different moments.
        implied: Whether the order follows from other arcs.
    """

    earlier: int
    later: int
    label: str = ""
    reasons: tuple[str, ...] = ()
    kind: LinkKind = "order"
    implied: bool = False

    @property
    def why(self) -> str:
        """The reasons as one text. The reasons of a conflict are the lines of an error message."""
        return ("\n" if self.kind == "conflict" else "; ").join(self.reasons)


@dataclass(frozen=True)
class Timeline:
    """Handlers in execution order, and the arcs between them.

    Attributes:
        title: What the picture shows.
        rows: The handlers. Those of one moment are consecutive.
        arcs: The lines between rows.
        problems: Descriptions of everything that is wrong with the callbacks.
    """

    title: str
    rows: tuple[Row, ...]
    arcs: tuple[Arc, ...]
    problems: tuple[str, ...] = ()

    def restricted(self, keep_row: Callable[[Row], bool], keep_arc: Callable[[Arc], bool]) -> Timeline:
        """Return the timeline with only some of its rows and arcs.

        Args:
            keep_row: Whether to keep a row.
            keep_arc: Whether to keep an arc. An arc is also removed if one of its rows is.
        """
        numbers = {old: new for new, old in enumerate(i for i, row in enumerate(self.rows) if keep_row(row))}
        arcs = tuple(
            replace(arc, earlier=numbers[arc.earlier], later=numbers[arc.later])
            for arc in self.arcs
            if arc.earlier in numbers and arc.later in numbers and keep_arc(arc)
        )
        return replace(self, rows=tuple(self.rows[old] for old in numbers), arcs=arcs)
