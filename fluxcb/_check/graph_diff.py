"""How two callback graphs differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fluxcb._check.ordering import Ordering

__all__ = ["differences"]


def differences(left: Ordering, right: Ordering) -> list[str]:
    """Return the differences of two graphs, a summary first, or an empty list if they are equal.

    Graphs are equal if they have the same callbacks, by label, the same edges with the same reasons, and the same order
    at each moment.
    """
    callbacks = _sides({d.label: "" for d in left.declared}, {d.label: "" for d in right.declared})
    edges = _sides(_edges(left), _edges(right))
    orders = _sides(_orders(left), _orders(right))
    counts = {"callbacks": _count(callbacks), "edges": _count(edges), "orders": _count(orders)}
    if not any(counts.values()):
        return []
    summary = ", ".join(f"{count} {what if count > 1 else what[:-1]}" for what, count in counts.items() if count)
    return [f"callback graphs differ in {summary}", *callbacks, *edges, *orders]


def _edges(graph: Ordering) -> dict[str, str]:
    return {
        f"{graph.declared[i].label} -> {graph.declared[j].label}": "; ".join(sorted(edge.reasons))
        for (i, j), edge in graph.edges.items()
    }


def _orders(graph: Ordering) -> dict[str, str]:
    return {
        f"{event.__name__} x {phase.__name__}": ", ".join(handler.declared.label for handler in handlers)
        for (event, phase), handlers in graph.orders.items()
    }


def _sides(left: Mapping[str, str], right: Mapping[str, str]) -> list[str]:
    lines = []
    for key in _both(left, right):
        if key in left and key in right:
            if left[key] != right[key]:
                lines += [f"{key}:", f"  left:  {left[key]}", f"  right: {right[key]}"]
        else:
            side, text = ("left", left[key]) if key in left else ("right", right[key])
            lines.append(f"only {side}: {key}{f' ({text})' if text else ''}")
    return lines


def _count(lines: Iterable[str]) -> int:
    return sum(not line.startswith("  ") for line in lines)


def _both(left: Iterable[str], right: Iterable[str]) -> Iterable[str]:
    return dict.fromkeys([*left, *right])
