"""Layers: which column each node stands in, and lanes for links that pass by a column."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

__all__ = ["Layering", "Segment", "assign_layers", "depths", "rank_nodes"]

Pair = tuple[int, int]


@dataclass(frozen=True)
class Segment:
    """A piece of a link, from an item of one layer to an item of the next (or of the same: a link at the side).

    Attributes:
        start: The item to the left (at the side: the one whose number is lower).
        end: The item to the right.
        link: The link's number.
    """

    start: int
    end: int
    link: int


@dataclass(frozen=True)
class Layering:
    """Items in layers. Items below `count` are nodes; the others are lanes, where a long link passes a layer.

    Attributes:
        count: How many nodes there are.
        layers: For each layer, its items.
        segments: Pieces of links between neighbouring layers.
        sides: Links within one layer.
        chains: For each link, the items it visits, left to right.
    """

    count: int
    layers: list[list[int]]
    segments: list[Segment]
    sides: list[Segment]
    chains: list[tuple[int, ...]]


class _Acyclic:
    """Nodes in an order in which links point forward; those that would close a circle are taken the other way round."""

    def __init__(self, count: int, edges: Iterable[Pair]) -> None:
        pairs = sorted({(a, b) for a, b in edges if a != b})
        self.order = _sequence(count, pairs)
        place = {node: i for i, node in enumerate(self.order)}
        forward = {(a, b) if place[a] < place[b] else (b, a) for a, b in pairs}
        self.before: list[list[int]] = [[] for _ in range(count)]
        self.after: list[list[int]] = [[] for _ in range(count)]
        for a, b in sorted(forward):
            self.before[b].append(a)
            self.after[a].append(b)

    def depths(self) -> list[int]:
        """Return for each node the length of the longest way to it."""
        depth = [0] * len(self.order)
        for node in self.order:
            depth[node] = max((depth[other] + 1 for other in self.before[node]), default=0)
        return depth


def depths(count: int, edges: Iterable[Pair]) -> list[int]:
    """Return for each node how many others, at most, must come one after the other before it.

    Args:
        count: Number of nodes.
        edges: Pairs (earlier, later) of node numbers; those that would close a circle count the other way round.
    """
    return _Acyclic(count, edges).depths()


def rank_nodes(count: int, edges: Iterable[Pair]) -> list[int]:
    """Give each node a layer, so that links point to later layers and are short.

    Links that would close a circle are taken the other way round.

    Args:
        count: Number of nodes.
        edges: Pairs (earlier, later) of node numbers.

    Returns:
        Each node's layer, from 0; no layer is empty.
    """
    graph = _Acyclic(count, edges)
    rank = graph.depths()
    _pull(rank, graph)
    used = {layer: i for i, layer in enumerate(sorted(set(rank)))}
    return [used[layer] for layer in rank]


def _sequence(count: int, pairs: Sequence[Pair]) -> list[int]:
    """Order nodes so that few pairs point backwards, and none where there is no circle (Eades, Lin and Smyth 1993)."""
    out: list[set[int]] = [set() for _ in range(count)]
    into: list[set[int]] = [set() for _ in range(count)]
    for a, b in pairs:
        out[a].add(b)
        into[b].add(a)
    left = dict.fromkeys(range(count))
    first: list[int] = []
    last: list[int] = []
    loose = list(range(count - 1, -1, -1))  # nodes that may have become a source or a sink

    def take(node: int, into_list: list[int]) -> None:
        into_list.append(node)
        del left[node]
        for other in out[node]:
            into[other].discard(node)
        for other in into[node]:
            out[other].discard(node)
        loose.extend(sorted((out[node] | into[node]) & left.keys(), reverse=True))

    while left:
        if loose:
            node = loose.pop()
            if node in left and not into[node]:
                take(node, first)
            elif node in left and not out[node]:
                take(node, last)
        else:
            take(max(left, key=lambda node: (len(out[node]) - len(into[node]), -node)), first)
    return first + last[::-1]


def _pull(rank: list[int], graph: _Acyclic) -> None:
    """Move nodes toward the side on which they have more links, until nothing gets shorter."""
    before, after, order = graph.before, graph.after, graph.order
    moved = True
    rounds = 0
    while moved and rounds < 20:
        moved, rounds = False, rounds + 1
        for node in order[::-1] if rounds % 2 else order:
            want = len(after[node]) - len(before[node])
            if want > 0:
                best = min(rank[other] for other in after[node]) - 1
            elif want < 0:
                best = max(rank[other] for other in before[node]) + 1
            else:
                continue
            if best != rank[node]:
                rank[node], moved = best, True


def assign_layers(count: int, edges: Sequence[Pair], conflicts: Sequence[Pair]) -> Layering:
    """Put nodes into layers, and lanes for links into the layers that these pass.

    Args:
        count: Number of nodes.
        edges: Pairs (earlier, later); their numbers come first.
        conflicts: Pairs without a direction; they decide no layer.

    Returns:
        The layers, in the order of the nodes' numbers.
    """
    rank = rank_nodes(count, edges)
    layers: list[list[int]] = [[] for _ in range(max(rank, default=-1) + 1)]
    for node, layer in enumerate(rank):
        layers[layer].append(node)
    segments: list[Segment] = []
    sides: list[Segment] = []
    chains: list[tuple[int, ...]] = []
    items = count
    for link, (a, b) in enumerate([*edges, *conflicts]):
        if rank[a] == rank[b]:
            sides.append(Segment(min(a, b), max(a, b), link))
            chains.append((min(a, b), max(a, b)))
            continue
        left, right = (a, b) if rank[a] < rank[b] else (b, a)
        lanes = list(range(items, items + rank[right] - rank[left] - 1))
        items += len(lanes)
        for layer, lane in enumerate(lanes, rank[left] + 1):
            layers[layer].append(lane)
        chain = (left, *lanes, right)
        chains.append(chain)
        segments += [Segment(start, end, link) for start, end in itertools.pairwise(chain)]
    return Layering(count, layers, segments, sides, chains)
