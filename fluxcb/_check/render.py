"""The graph as text: who runs at each moment, in which order, and why."""

from __future__ import annotations

from fluxcb._check.graph import CallbackGraph, moment_name
from fluxcb._declare.declared import Handler
from fluxcb._declare.events import BUILTIN_EVENTS, TracedEvent

__all__ = ["explain", "mermaid"]


def explain(graph: CallbackGraph) -> str:
    """Return per moment the handlers in order, each with the reasons it stands behind others."""
    lines: list[str] = []
    position = {event: i for i, event in enumerate(BUILTIN_EVENTS)}
    phases = {phase: i for i, phase in enumerate(graph.phases)}
    moments = sorted(
        graph.orders, key=lambda m: (phases.get(m[1], len(phases)), position.get(m[0], len(position)), m[0].__name__)
    )
    for moment in moments:
        kind = "traced" if issubclass(moment[0], TracedEvent) else "host"
        lines.append(f"{moment_name(moment)} ({kind})")
        handlers = graph.orders[moment]
        for number, handler in enumerate(handlers, 1):
            lines.append(f"  {number}. {handler.declared.label}.{handler.name}{_due(handler)}")
            lines += [f"       {reason}" for reason in _reasons(graph, handler, handlers[: number - 1])]
    return "\n".join(lines)


def _due(handler: Handler) -> str:
    return f"  [{', '.join(map(repr, handler.schedules))}]" if handler.schedules else ""


def _reasons(graph: CallbackGraph, handler: Handler, earlier: tuple[Handler, ...]) -> list[str]:
    found = []
    for before in earlier:
        edge = graph.edges.get((before.declared.position, handler.declared.position))
        if edge is not None and (handler.event, handler.phase) in edge.moments:
            found.append(f"after {before.declared.label}: {'; '.join(edge.reasons)}")
    return found


def mermaid(graph: CallbackGraph) -> str:
    """Return the graph in Mermaid's notation, which GitHub and notebooks draw."""
    lines = ["graph LR"]
    lines += [f'  n{d.position}["{d.label.replace(chr(34), chr(39))}"]' for d in graph.declared]
    for (i, j), edge in graph.edges.items():
        lines.append(f'  n{i} -- "{edge.reasons[0].replace("`", "")}" --> n{j}')
    return "\n".join(lines)
