"""The way of each link between two columns: where it leaves a box, and which upright track it bends in.

Between two columns, a link runs level, then up or down in a track of its own, then level again. No two links ever run
along the same line; they only cross.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["SAME", "Bend", "Net", "route_channel", "spread"]

SAME = 2.5
"""Level lines nearer than this (pixels) would be taken for one."""


@dataclass(frozen=True)
class Net:
    """What a link does between two columns.

    Attributes:
        left: Heights at which it meets the column to the left; two for a link between two boxes of that column.
        right: Heights at which it meets the column to the right: one, or none.
    """

    left: tuple[float, ...]
    right: tuple[float, ...]

    @property
    def straight(self) -> bool:
        """Whether it needs no track."""
        return len(self.left) == 1 and len(self.right) == 1 and self.left[0] == self.right[0]


@dataclass(frozen=True)
class Bend:
    """An upright piece of a link: the number of its track, and the heights between which it runs."""

    track: int
    start: float
    end: float


def route_channel(nets: Sequence[Net]) -> tuple[list[tuple[Bend, ...]], int]:
    """Give each link the tracks it bends in.

    Args:
        nets: The links between two columns.

    Returns:
        For each link its bends, left to right, none where it is straight; and the number of tracks.
    """
    bent = [i for i, net in enumerate(nets) if not net.straight]
    order, detours = _order(nets, bent)
    levels = sorted(height for net in nets for height in (*net.left, *net.right))
    bends: list[tuple[Bend, ...]] = [()] * len(nets)
    spans: dict[int, tuple[float, float]] = {}
    for track, i in enumerate(detours):
        start = nets[i].left[0]
        free = _free_level(levels, start)
        levels.append(free)
        bends[i] = (Bend(track, start, free),)
        spans[i] = (free, nets[i].right[0])
    tracks: list[list[tuple[float, float]]] = []
    for i in order:
        start, end = spans.get(i) or _ends(nets[i])
        low, high = min(start, end) - SAME, max(start, end) + SAME
        # Looked for from the right, so that links that could cross or touch keep their order.
        clear = len(tracks)
        while clear > 0 and all(high < a or b < low for a, b in tracks[clear - 1]):
            clear -= 1
        if clear == len(tracks):
            tracks.append([])
        tracks[clear].append((low, high))
        bends[i] = (*bends[i], Bend(len(detours) + clear, start, end))
    return bends, len(detours) + len(tracks)


def _ends(net: Net) -> tuple[float, float]:
    start, end = (*net.left, *net.right)
    return start, end


def _order(nets: Sequence[Net], bent: list[int]) -> tuple[list[int], list[int]]:
    """Return the links in the order of their tracks, and those that need a detour because no order will do."""
    ahead = {i: {j for j in bent if j != i and _must_precede(nets[i], nets[j])} for i in bent}
    behind = dict.fromkeys(bent, 0)
    for others in ahead.values():
        for j in others:
            behind[j] += 1
    cost = dict.fromkeys(bent, 0)
    gain = {(i, j): _crossings(nets[i], nets[j]) - _crossings(nets[j], nets[i]) for i in bent for j in bent if i != j}
    for (i, _), difference in gain.items():
        cost[i] += difference
    order: list[int] = []
    detours: list[int] = []
    left = dict.fromkeys(bent)
    while left:
        free = [i for i in left if behind[i] == 0]
        if not free:
            # A circle: one of it leaves its level at once, by a detour, and is then in nobody's way.
            stuck = min((i for i in left if len(nets[i].left) == 1 and ahead[i]), key=lambda i: (behind[i], i))
            detours.append(stuck)
            for j in ahead[stuck]:
                behind[j] -= 1
            ahead[stuck] = set()
            continue
        i = min(free, key=lambda i: (cost[i], i))
        order.append(i)
        del left[i]
        for j in ahead[i]:
            behind[j] -= 1
        for j in left:
            cost[j] -= gain[j, i]
    return order, detours


def _must_precede(one: Net, other: Net) -> bool:
    """Tell whether `one` must bend to the left of `other`: they'd else lie on one line."""
    return any(abs(a - b) < SAME for a in one.left for b in other.right)


def _crossings(one: Net, other: Net) -> int:
    """Return how often two links cross if `one` bends to the left of `other`."""
    low, high = sorted(_ends(one))
    other_low, other_high = sorted(_ends(other))
    return sum(other_low < y < other_high for y in one.right) + sum(low < y < high for y in other.left)


def _free_level(levels: Sequence[float], wanted: float) -> float:
    """Return the level nearest to a wanted one that is no link's."""
    step = 2 * SAME
    candidates = (wanted + sign * n * step / 2 for n in range(2, 4 * len(levels) + 4) for sign in (1, -1))
    return next(y for y in candidates if all(abs(y - level) >= SAME for level in levels))


def spread(wanted: Sequence[float], gap: float, low: float, high: float) -> list[float]:
    """Return heights in the same order, at least `gap` apart and within bounds, as near to the wanted as can be.

    Args:
        wanted: Where each would stand alone.
        gap: How far they must be apart.
        low: The lowest height allowed.
        high: The highest height allowed; at least `low + gap * (len(wanted) - 1)`.

    Returns:
        The heights with the least sum of distances, so that as many as possible stand exactly where they want.
    """
    pools: list[list[float]] = []  # isotonic regression by pooling neighbours that are in each other's way

    def middle(pool: list[float]) -> float:
        return sorted(pool)[(len(pool) - 1) // 2]

    for i, height in enumerate(wanted):
        pools.append([height - i * gap])
        while len(pools) > 1 and middle(pools[-2]) > middle(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    levels = [middle(pool) for pool in pools for _ in pool]
    top = high - gap * (len(wanted) - 1)
    return [min(max(level, low), top) + i * gap for i, level in enumerate(levels)]
