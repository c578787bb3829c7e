"""The callback graph for networkx, which notebooks display as a picture."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

import networkx as nx

from fluxcb._check.ordering import Ordering, moment_name
from fluxcb._check.pictures import timeline
from fluxcb._draw.drawing import Arc, Timeline
from fluxcb._draw.svg import to_svg
from fluxcb._errors import DeclarationError

__all__ = ["CallbackDiGraph", "to_digraph"]

# The name of the graph attribute that holds the picture. networkx passes graph attributes on to copies, subgraphs and
# pickles, which an attribute of the instance would not survive.
_PICTURE = "picture"
# Methods of `CallbackGraph`, which users look for here.
_OF_CALLBACK_GRAPH = ("explain", "handlers", "moments", "render")


class _Picture:
    """The picture of a whole graph. It is computed on first use, because a graph of 1000 callbacks takes a while."""

    def __init__(self, make: Callable[[], Timeline]) -> None:
        self._make = make

    @cached_property
    def timeline(self) -> Timeline:
        return self._make()

    def __reduce__(self) -> tuple[Any, ...]:  # plain data, so that copies and pickles hold no callbacks
        return _picture_of, (self.timeline,)


def _picture_of(known: Timeline) -> _Picture:
    return _Picture(lambda: known)


class CallbackDiGraph(nx.DiGraph):
    """A `networkx.DiGraph` of callbacks that notebooks display as a picture.

    Nodes are callback labels with the attributes `callback` and `position`. Edges have the attributes `reasons` and
    `moments`. The picture shows the current nodes and edges of the graph, so a subgraph has a smaller picture. A graph
    with nodes or edges that were added by hand has no picture.
    """

    if not TYPE_CHECKING:  # type checkers must report unknown attributes

        def __getattr__(self, name: str) -> Any:
            if name not in _OF_CALLBACK_GRAPH:
                return object.__getattribute__(self, name)  # raises the error of Python
            fix = f"for the graph of a Learner, write `learner.callbacks.graph.{name}`"
            error = DeclarationError(f"A `CallbackDiGraph` has no attribute `{name}`.", fix=fix)
            raise AttributeError(str(error), name=name)  # with `obj`, Python would add a suggestion of its own

    def __repr__(self) -> str:
        return f"<{self}>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        shown = self._timeline()
        picture = {} if shown is None else {"image/svg+xml": to_svg(shown)}
        return {"text/plain": repr(self), **picture}

    def _timeline(self) -> Timeline | None:
        """Return the content of the picture, or None if a node or an edge is not in the picture."""
        picture = self.graph.get(_PICTURE)
        if not isinstance(picture, _Picture):
            return None
        known = picture.timeline

        def ends(arc: Arc) -> tuple[str, str]:
            return known.rows[arc.earlier].callback, known.rows[arc.later].callback

        # Conflicts and data are not edges in networkx. They are drawn if both callbacks are in the graph.
        edges = {ends(arc) for arc in known.arcs if arc.kind in ("order", "cycle")}
        if not edges >= set(self.edges) or not {row.callback for row in known.rows} >= set(self):
            return None
        return known.restricted(
            lambda row: row.callback in self, lambda arc: arc.kind in ("conflict", "data") or self.has_edge(*ends(arc))
        )


def to_digraph(graph: Ordering) -> CallbackDiGraph:
    """Return a callback graph as a networkx graph."""
    shown = CallbackDiGraph()
    shown.graph[_PICTURE] = _Picture(lambda: timeline(graph))
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
