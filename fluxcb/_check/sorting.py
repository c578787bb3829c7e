"""Topological sorting, and the nodes that can be reached from each node of a graph."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from typing import Any

__all__ = ["reachable", "topological"]


def topological(
    nodes: Iterable[int], edges: Iterable[tuple[int, int]], *, key: Any
) -> tuple[list[int], list[set[int]]]:
    """Sort nodes topologically; ties are broken by key.

    Returns:
        The order, and the members of each loop. The order includes the members of loops, sorted by key in each loop.
    """
    waiting = dict.fromkeys(nodes, 0)
    after: dict[int, list[int]] = {i: [] for i in waiting}
    for i, j in edges:
        if i in waiting and j in waiting:
            after[i].append(j)
            waiting[j] += 1
    heap = [(key(i), i) for i, number in waiting.items() if number == 0]
    heapq.heapify(heap)
    order: list[int] = []
    loops: list[set[int]] = []
    while waiting:
        if not heap:
            looping = _first_loops(waiting, after)
            loops += [members for members in looping if not any(members <= known for known in loops)]
            first = min((i for members in looping for i in members), key=key)
            heap.append((key(first), first))
        _, i = heapq.heappop(heap)
        order.append(i)
        del waiting[i]
        for j in after[i]:
            if j in waiting:
                waiting[j] -= 1
                if waiting[j] == 0:
                    heapq.heappush(heap, (key(j), j))
    return order, sorted(loops, key=min)


def reachable(edges: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Return the nodes that can be reached from the start of each edge, as the bits of an integer."""
    after: dict[int, list[int]] = {}
    for i, j in edges:
        after.setdefault(i, []).append(j)
    reached = dict.fromkeys(after, 0)
    if not after:
        return reached
    backwards = topological(after, edges, key=lambda i: i)[0][::-1]
    changed = True
    while changed:  # runs twice if there is no cycle
        changed = False
        for i in backwards:
            now = reached[i]
            for j in after[i]:
                now |= 1 << j | reached.get(j, 0)
            changed |= now != reached[i]
            reached[i] = now
    return reached


def _first_loops(left: Iterable[int], after: dict[int, list[int]]) -> list[set[int]]:
    """Return the members of the loops that only depend on themselves, among the remaining nodes."""
    import networkx as nx

    left = set(left)
    graph = nx.DiGraph((i, j) for i in left for j in after[i] if j in left)
    return [c for c in nx.strongly_connected_components(graph) if all(i in c for j in c for i in graph.predecessors(j))]
