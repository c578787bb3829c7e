"""The order of items within their layers, such that links cross seldom."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from fluxcb._draw.layers import Layering

__all__ = ["count_crossings", "order_layers"]

Neighbours = list[list[int]]


def order_layers(layering: Layering, sweeps: int = 16) -> list[list[int]]:
    """Return the layers with their items in an order with few crossings.

    Layers are swept to and fro: each is sorted by the barycentres of its items' neighbours in the layer before it, then
    neighbouring items change places while that helps. The best order seen is returned.

    Args:
        layering: The layers.
        sweeps: How often to go to and fro.
    """
    items = sum(map(len, layering.layers))
    before: Neighbours = [[] for _ in range(items)]
    after: Neighbours = [[] for _ in range(items)]
    beside: Neighbours = [[] for _ in range(items)]
    for segment in layering.segments:
        after[segment.start].append(segment.end)
        before[segment.end].append(segment.start)
    for segment in layering.sides:
        beside[segment.start].append(segment.end)
        beside[segment.end].append(segment.start)
    best = layers = _first_order(layering.layers, before, after)
    fewest = _crossings(layers, after)
    stale = 0
    for sweep in range(sweeps):
        layers = [list(layer) for layer in layers]
        forward = sweep % 2 == 0
        fixed, rows = (before, layers[1:]) if forward else (after, layers[-2::-1])
        position = _positions(layers)
        for row in rows:
            _sort_by_barycentre(row, fixed, beside, position, prefer_later=sweep % 4 > 1)
            position.update((item, i) for i, item in enumerate(row))
        _transpose(layers, before, after)
        crossings = _crossings(layers, after)
        if crossings < fewest:
            best, fewest, stale = layers, crossings, 0
        else:
            stale += 1
        if fewest == 0 or stale == 6:
            break
    return best


def count_crossings(layers: Sequence[Sequence[int]], layering: Layering) -> int:
    """Return how often segments cross when layers have this order."""
    after: Neighbours = [[] for _ in range(sum(map(len, layers)))]
    for segment in layering.segments:
        after[segment.start].append(segment.end)
    return _crossings(layers, after)


def _first_order(layers: list[list[int]], before: Neighbours, after: Neighbours) -> list[list[int]]:
    """Visit everything depth first, so that what hangs together starts out together."""
    seen: dict[int, None] = {}
    for start in (item for layer in layers for item in layer):
        stack = [start]
        while stack:
            item = stack.pop()
            if item not in seen:
                seen[item] = None
                stack += [*before[item][::-1], *after[item][::-1]]
    number = {item: i for i, item in enumerate(seen)}
    return [sorted(layer, key=number.__getitem__) for layer in layers]


def _positions(layers: Sequence[Sequence[int]]) -> dict[int, int]:
    return {item: i for layer in layers for i, item in enumerate(layer)}


def _sort_by_barycentre(
    row: list[int], fixed: Neighbours, beside: Neighbours, position: dict[int, int], *, prefer_later: bool
) -> None:
    """Sort items that have neighbours among the places of such items; the others keep their places."""
    keys: dict[int, float] = {}
    for item in row:
        places = [position[other] for other in fixed[item]]
        if places:
            keys[item] = sum(places) / len(places)
    for item in row:  # a partner in the same layer attracts, most of all where nothing else does
        partners = [keys.get(other, position[other]) for other in beside[item]]
        if partners:
            own = keys.get(item, position[item])
            keys[item] = (own + sum(partners) / len(partners)) / 2
    movable = [item for item in row if item in keys]
    # Ties are left as they are in half of the sweeps, and turned in the others: both are starting points.
    ordered = sorted(movable, key=lambda item: (keys[item], -position[item] if prefer_later else position[item]))
    slots = [i for i, item in enumerate(row) if item in keys]
    for slot, item in zip(slots, ordered, strict=True):
        row[slot] = item


def _transpose(layers: list[list[int]], before: Neighbours, after: Neighbours) -> None:
    position = _positions(layers)
    for _ in range(8):
        improved = False
        near: dict[int, tuple[list[int], list[int]]] = {}
        for row in layers:
            for item in row:
                near[item] = (
                    sorted(position[other] for other in before[item]),
                    sorted(position[other] for other in after[item]),
                )
            for i in range(len(row) - 1):
                a, b = row[i], row[i + 1]
                now = sum(_pair_crossings(x, y) for x, y in zip(near[a], near[b], strict=True))
                if now and sum(_pair_crossings(y, x) for x, y in zip(near[a], near[b], strict=True)) < now:
                    row[i], row[i + 1] = b, a
                    position[a], position[b] = i + 1, i
                    improved = True
        if not improved:
            break


def _pair_crossings(upper: Sequence[int], lower: Sequence[int]) -> int:
    """Return the crossings of two items' links to one layer, whose places there are sorted."""
    return sum(bisect_left(lower, place) for place in upper)


def _crossings(layers: Sequence[Sequence[int]], after: Neighbours) -> int:
    position = _positions(layers)
    total = 0
    for row in layers:
        seen: list[int] = []
        for item in row:
            ends = sorted(position[other] for other in after[item])
            total += sum(len(seen) - bisect_left(seen, end + 1) for end in ends)
            for end in ends:
                insort(seen, end)
    return total
