"""Explains why one callback runs before another, that they are unordered, or that they conflict."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

from fluxcb._check.conflicts import settle
from fluxcb._check.graph import CallbackGraph
from fluxcb._check.ordering import moment_name
from fluxcb._declare.declared import Declared, Moment
from fluxcb._declare.events import TracedEvent
from fluxcb._errors import CheckError, DeclarationError, did_you_mean

__all__ = ["explain_pair", "find_callback"]


def find_callback(graph: CallbackGraph, name: str) -> Declared:
    """Return the callback with a name: the name of its class, or its label in messages.

    Raises:
        DeclarationError: No callback has this name, or several have it.
    """
    exact = [d for d in graph.declared if d.label == name]
    found = exact or [d for d in graph.declared if name in (d.cls.__name__, d.name)]
    if len(found) == 1:
        return found[0]
    labels = [d.label for d in graph.declared]
    if found:
        raise DeclarationError(
            f"{name!r} matches {len(found)} callbacks of this set.",
            fix=f"use the full name of one of them: {', '.join(repr(d.label) for d in found)}",
        )
    near = did_you_mean(name, [*labels, *(d.cls.__name__ for d in graph.declared)])
    raise DeclarationError(
        f"There is no callback {name!r} in this set.{near}", fix=f"it has {', '.join(labels) or 'no callbacks'}"
    )


def explain_pair(graph: CallbackGraph, a: Declared, b: Declared) -> str:
    """Return a text about the relation of two callbacks of a graph, moment by moment."""
    if a is b:
        raise DeclarationError(f"{a.label} was named twice.", fix="name two callbacks")
    shared = [moment for moment in graph.orders if _runs(graph, moment, a) and _runs(graph, moment, b)]
    if not shared:
        return "\n".join(
            [
                f"{a.label} and {b.label} never run at the same moment, so they need no order.",
                *(f"  {d.label} runs at {_listed(graph, d)}" for d in (a, b)),
            ]
        )
    moments_by_text: dict[str, list[Moment]] = {}
    for moment in shared:
        moments_by_text.setdefault(_at(graph, a, b, moment), []).append(moment)
    blocks = [f"{text}\n  at {', '.join(map(moment_name, moments))}" for text, moments in moments_by_text.items()]
    return "\n".join(blocks)


def _at(graph: CallbackGraph, a: Declared, b: Declared, moment: Moment) -> str:
    """Return the relation of two callbacks at one moment that they share."""
    edges = [pair for pair, edge in graph.edges.items() if moment in edge.at]
    for one, other in ((a, b), (b, a)):
        pair = (one.position, other.position)
        if pair in edges:
            reasons = [f"  because {reason}" for reason in graph.edges[pair].at[moment]]
            return "\n".join([f"{one.label} runs before {other.label}.", *reasons])
    for clash in graph.conflicts:
        if moment in clash.moments and {clash.a.declared.position, clash.b.declared.position} == {
            a.position,
            b.position,
        }:
            return str(clash.error)
    for one, other in ((a, b), (b, a)):
        path = _path(edges, one.position, other.position)
        if path:
            labels = [graph.declared[i].label for i in path]
            reasons = [
                f"  {graph.declared[i].label} before {graph.declared[j].label}: "
                f"{'; '.join(graph.edges[i, j].at[moment])}"
                for i, j in itertools.pairwise(path)
            ]
            return "\n".join([f"{one.label} runs before {other.label}: {' -> '.join(labels)}.", *reasons])
    return _free(graph, a, b, moment)


def _free(graph: CallbackGraph, a: Declared, b: Declared, moment: Moment) -> str:
    first, second = (handler for handler in graph.orders[moment] if handler.declared in (a, b))
    may_cancel = ("control",) in second.access and ("control",) not in first.access
    if issubclass(moment[0], TracedEvent):
        rule = "by the name of its class"
    else:
        rule = "because the other may cancel the rest" if may_cancel else "by its place in the list"
    try:
        settled = settle(a, b)
        why = settled.reason if settled.first == "any" else "neither writes state that the other reads or writes"
    except CheckError as error:  # reported together with the problems of the set
        why = error.what
    return (
        f"{a.label} and {b.label} need no order.\n  because {why}\n"
        f"  {first.declared.label} currently runs before {second.declared.label}, {rule}"
    )


def _path(edges: Iterable[tuple[int, int]], start: int, goal: int) -> list[int]:
    import networkx as nx

    graph = nx.DiGraph(edges)
    if start not in graph or goal not in graph or not nx.has_path(graph, start, goal):
        return []
    return nx.shortest_path(graph, start, goal)


def _runs(graph: CallbackGraph, moment: Moment, d: Declared) -> bool:
    return any(handler.declared is d for handler in graph.orders[moment])


def _listed(graph: CallbackGraph, d: Declared) -> str:
    moments = [moment_name(moment) for moment in graph.orders if _runs(graph, moment, d)]
    return ", ".join(moments) or "no moment of these phases"
