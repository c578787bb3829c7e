"""How high items stand: lanes straight, boxes between their neighbours (after Brandes and Köpf 2001).

Items are aligned with a median neighbour, into blocks of one height, in each of four ways: with the layer before or
after, from the top or from the bottom. Each way gives heights; the mean of the middle two is taken.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from fluxcb._draw.layers import Layering

__all__ = ["place_items"]

Distance = Callable[[int, int], float]


def place_items(layers: list[list[int]], layering: Layering, distance: Distance) -> list[float]:
    """Return each item's height (of its middle).

    Args:
        layers: The layers in their order, top to bottom.
        layering: What the items are, and their links.
        distance: `distance(upper, lower)`: how far the middles of two neighbours in one layer must be apart.
    """
    items = sum(map(len, layers))
    if not items:
        return []
    before: list[list[int]] = [[] for _ in range(items)]
    after: list[list[int]] = [[] for _ in range(items)]
    for segment in layering.segments:
        before[segment.end].append(segment.start)
        after[segment.start].append(segment.end)
    count = layering.count
    ways: list[list[float]] = []
    for rows, fixed in ((layers, before), (layers[::-1], after)):
        crossing_lanes = _crossing_lanes(rows, fixed, count)
        for mirrored in (False, True):
            turned = [row[::-1] for row in rows] if mirrored else rows
            roots = _align(turned, fixed, crossing_lanes)
            apart: Distance = (lambda a, b: distance(b, a)) if mirrored else distance
            heights = _compact(turned, roots, apart)
            ways.append([-height for height in heights] if mirrored else heights)
    return _balanced(ways)


def _crossing_lanes(rows: list[list[int]], fixed: list[list[int]], count: int) -> set[tuple[int, int]]:
    """Find the segments (item, neighbour) that cross a lane: these may bend, the lane may not."""
    found: set[tuple[int, int]] = set()
    for upper, row in itertools.pairwise(rows):
        place = {item: i for i, item in enumerate(upper)}
        lanes = [
            (i, place[other]) for i, item in enumerate(row) if item >= count for other in fixed[item] if other >= count
        ]
        begin, low = 0, -1
        for i, other in [*lanes, (len(row) - 1, len(upper))]:
            if other < low:  # two lanes cross: the first one seen stays straight, this one is found below
                continue
            for item in row[begin : i + 1]:
                found.update((item, neighbour) for neighbour in fixed[item] if not low <= place[neighbour] <= other)
            begin, low = i, other
    return found


def _align(rows: list[list[int]], fixed: list[list[int]], crossing_lanes: set[tuple[int, int]]) -> list[int]:
    """Return for each item the root of its block."""
    roots = list(range(sum(map(len, rows))))
    for upper, row in itertools.pairwise(rows):
        place = {item: i for i, item in enumerate(upper)}
        last = -1
        for item in row:
            neighbours = sorted(fixed[item], key=place.__getitem__)
            middle = (len(neighbours) - 1) // 2
            for neighbour in dict.fromkeys((*neighbours[middle : middle + 1], *neighbours[len(neighbours) // 2 :][:1])):
                if place[neighbour] > last and (item, neighbour) not in crossing_lanes:
                    roots[item] = roots[neighbour]
                    last = place[neighbour]
                    break
    return roots


def _compact(rows: list[list[int]], roots: list[int], apart: Distance) -> list[float]:
    """Put the blocks as high as they go, then pull each down to what holds it from below."""
    below: dict[int, dict[int, float]] = {root: {} for root in roots}
    waiting = dict.fromkeys(roots, 0)
    for row in rows:
        for a, b in itertools.pairwise(row):
            gaps = below[roots[a]]
            if roots[b] not in gaps:
                waiting[roots[b]] += 1
            gaps[roots[b]] = max(gaps.get(roots[b], 0.0), apart(a, b))
    ready = [root for root, number in waiting.items() if number == 0]
    height = dict.fromkeys(roots, 0.0)
    order: list[int] = []
    while ready:
        root = ready.pop()
        order.append(root)
        for other, gap in below[root].items():
            height[other] = max(height[other], height[root] + gap)
            waiting[other] -= 1
            if waiting[other] == 0:
                ready.append(other)
    for root in reversed(order):
        if below[root]:
            height[root] = max(height[root], min(height[other] - gap for other, gap in below[root].items()))
    return [height[root] for root in roots]


def _balanced(ways: Sequence[list[float]]) -> list[float]:
    smallest = min(ways, key=lambda heights: max(heights) - min(heights))
    top, bottom = min(smallest), max(smallest)
    shifted = []
    for i, heights in enumerate(ways):  # those from the top keep their top, those from the bottom their bottom
        shift = bottom - max(heights) if i % 2 else top - min(heights)
        shifted.append([height + shift for height in heights])
    middle = [sum(sorted(each)[1:3]) / 2 for each in zip(*shifted, strict=True)]
    return [height - min(middle) for height in middle]
