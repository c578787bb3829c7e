"""The callback graph for networkx, which notebooks display as a picture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

import networkx as nx

from fluxcb._check.graph import CallbackGraph, moment_name
from fluxcb._check.pictures import drawing
from fluxcb._draw.drawing import Drawing
from fluxcb._draw.svg import to_svg

__all__ = ["CallbackDiGraph", "to_digraph"]

# The name of the graph attribute that holds the picture. networkx passes graph attributes on to copies, subgraphs and
# pickles, which an attribute of the instance would not survive.
_PICTURE = "picture"


class _Picture:
    """The drawing of a whole graph. It is computed on first use, because a graph of 1000 callbacks takes a while."""

    def __init__(self, make: Callable[[], Drawing]) -> None:
        self._make = make

    @cached_property
    def drawing(self) -> Drawing:
        return self._make()

    def __reduce__(self) -> tuple[Any, ...]:  # plain data, so that copies and pickles hold no callbacks
        return _picture_of, (self.drawing,)


def _picture_of(known: Drawing) -> _Picture:
    return _Picture(lambda: known)


class CallbackDiGraph(nx.DiGraph):
    """A `networkx.DiGraph` of callbacks that notebooks display as a picture.

    Nodes are callback labels with the attributes `callback` and `position`. Edges have the attributes `reasons` and
    `moments`. The picture shows the current nodes and edges of the graph, so a subgraph has a smaller picture. A graph
    with nodes or edges that were added by hand has no picture.
    """

    def __repr__(self) -> str:
        return f"<{self}>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        shown = self._drawing()
        picture = {} if shown is None else {"image/svg+xml": to_svg(shown)}
        return {"text/plain": repr(self), **picture}

    def _drawing(self) -> Drawing | None:
        """Return the content of the picture, or None if a node or an edge is not in the drawing."""
        picture = self.graph.get(_PICTURE)
        if not isinstance(picture, _Picture):
            return None
        known = picture.drawing
        nodes = tuple(node for node in known.nodes if node.title in self)
        title = {node.key: node.title for node in nodes}
        ends = [(link, title.get(link.earlier), title.get(link.later)) for link in known.links]
        # Conflicts have no direction, so they are not edges in networkx. They are drawn if both nodes are in the graph.
        links = tuple(
            link
            for link, earlier, later in ends
            if earlier and later and (link.kind == "conflict" or self.has_edge(earlier, later))
        )
        ordered = sum(link.kind != "conflict" for link in links)
        if len(nodes) != len(self) or ordered != self.number_of_edges():
            return None
        return replace(known, nodes=nodes, links=links)


def to_digraph(graph: CallbackGraph) -> CallbackDiGraph:
    """Return a callback graph as a networkx graph."""
    shown = CallbackDiGraph()
    shown.graph[_PICTURE] = _Picture(lambda: drawing(graph))
    for d in graph.declared:
        shown.add_node(d.label, callback=d.callback, position=d.position)
    for (i, j), edge in graph.edges.items():
        shown.add_edge(
            graph.declared[i].label,
            graph.declared[j].label,
            reasons=tuple(edge.reasons),
            moments=tuple(moment_name(m) for m in edge.moments),
        )
    return shown
