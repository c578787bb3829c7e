"""Group arcs into lines, and assign the lines to lanes so that they do not overlap."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from fluxcb._draw.drawing import Arc

__all__ = ["Bus", "assign_lanes", "bundled", "ports"]


@dataclass(frozen=True)
class Bus:
    """Arcs that share one of their rows and are drawn as one line with branches.

    Attributes:
        hub: Number of the shared row.
        arcs: The arcs, sorted by the other row. All begin at the hub, or all end there.
    """

    hub: int
    arcs: tuple[Arc, ...]

    @property
    def rows(self) -> tuple[int, ...]:
        """The numbers of all rows that it connects, from top to bottom."""
        return tuple(sorted({row for arc in self.arcs for row in (arc.earlier, arc.later)}))


def bundled(arcs: Iterable[Arc]) -> list[Bus]:
    """Group arcs into buses.

    Arcs only share a line with arcs of the same kind, and data arcs also need the same path. Each arc joins the larger
    of its two possible groups: the arcs that begin at the same row, or those that end at the same row.
    """
    arcs = list(arcs)
    begins = Counter((_sharing(arc), arc.earlier) for arc in arcs)
    ends = Counter((_sharing(arc), arc.later) for arc in arcs)
    groups: dict[Hashable, list[Arc]] = {}
    for arc in arcs:
        begin, end = (_sharing(arc), arc.earlier), (_sharing(arc), arc.later)
        starts_here = begins[begin] >= ends[end]
        groups.setdefault((starts_here, begin if starts_here else end), []).append(arc)
    buses = [
        Bus(
            members[0].earlier if starts_here else members[0].later,
            tuple(sorted(members, key=lambda arc: (arc.earlier, arc.later))),
        )
        for (starts_here, _), members in groups.items()  # pyright: ignore[reportGeneralTypeIssues]  # the keys are pairs
    ]
    return sorted(buses, key=lambda bus: (bus.rows[0], bus.rows[-1], bus.hub, bus.arcs[0].label))


def _sharing(arc: Arc) -> tuple[str, str]:
    return arc.kind, arc.label if arc.kind == "data" else ""


def assign_lanes(buses: Sequence[Bus]) -> list[int]:
    """Return the lane of each bus, where lane 0 is next to the rows.

    Buses in the same lane do not overlap, except at their ends. Short buses get the lanes next to the rows, so that
    longer ones enclose them.
    """
    lanes: list[list[tuple[int, int]]] = []
    chosen = [0] * len(buses)
    for i in sorted(range(len(buses)), key=lambda i: (buses[i].rows[-1] - buses[i].rows[0], i)):
        top, bottom = buses[i].rows[0], buses[i].rows[-1]
        lane = next(
            (k for k, taken in enumerate(lanes) if all(bottom <= a or b <= top for a, b in taken)),
            len(lanes),
        )
        if lane == len(lanes):
            lanes.append([])
        lanes[lane].append((top, bottom))
        chosen[i] = lane
    return chosen


def ports(buses: Sequence[Bus], lanes: Sequence[int]) -> dict[int, list[int]]:
    """Return the numbers of the buses that are connected to each row, from top to bottom.

    Lines from above are sorted from the nearest lane to the farthest, and lines that go down are sorted from the
    farthest to the nearest. In this order, the lines of a row do not cross each other.
    """
    connected: dict[int, list[int]] = {}
    for i, bus in enumerate(buses):
        for row in bus.rows:
            connected.setdefault(row, []).append(i)

    def place(i: int, row: int) -> tuple[int, int, int]:
        above, below = buses[i].rows[0] < row, row < buses[i].rows[-1]
        return (1, lanes[i], i) if above and below else (0, lanes[i], i) if above else (2, -lanes[i], i)

    return {row: sorted(numbers, key=lambda i: place(i, row)) for row, numbers in connected.items()}
