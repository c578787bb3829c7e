"""The graph as text: who runs at each moment, in which order, and why."""

from __future__ import annotations

from fluxcb._check.graph import CallbackGraph, moment_name
from fluxcb._declare.declared import Handler
from fluxcb._declare.events import TracedEvent

__all__ = ["explain"]


def explain(graph: CallbackGraph) -> str:
    """Return per moment the handlers in order, each with the reasons it stands behind others."""
    lines: list[str] = []
    before: dict[int, list[int]] = {}
    for earlier, later in graph.edges:
        before.setdefault(later, []).append(earlier)
    for moment in graph.moments:
        kind = "traced" if issubclass(moment[0], TracedEvent) else "host"
        lines.append(f"{moment_name(moment)} ({kind})")
        handlers = graph.orders[moment]
        numbers = {handler.declared.position: number for number, handler in enumerate(handlers, 1)}
        for number, handler in enumerate(handlers, 1):
            lines.append(f"  {number}. {handler.declared.label}.{handler.name}{_due(handler)}")
            earlier = [p for p in before.get(handler.declared.position, ()) if numbers.get(p, number) < number]
            earlier.sort(key=numbers.__getitem__)
            lines += [f"       {reason}" for reason in _reasons(graph, handler, earlier)]
    return "\n".join(lines)


def _due(handler: Handler) -> str:
    return f"  [{', '.join(map(repr, handler.schedules))}]" if handler.schedules else ""


def _reasons(graph: CallbackGraph, handler: Handler, earlier: list[int]) -> list[str]:
    found = []
    for position in earlier:
        reasons = graph.edges[position, handler.declared.position].at.get((handler.event, handler.phase))
        if reasons:
            found.append(f"after {graph.declared[position].label}: {'; '.join(reasons)}")
    return found
