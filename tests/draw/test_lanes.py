"""The layout of arcs: which arcs share a line, and the lanes and order of the lines."""

from __future__ import annotations

import itertools
from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from fluxcb._draw.drawing import Arc
from fluxcb._draw.lanes import Bus, assign_lanes, bundled, ports


def pairs(buses: list[Bus]) -> list[tuple[int, list[tuple[int, int]]]]:
    return [(bus.hub, [(arc.earlier, arc.later) for arc in bus.arcs]) for bus in buses]


def test_one_write_with_several_readers_is_one_line() -> None:
    arcs = [Arc(0, later, "x", kind="data") for later in (3, 5, 4)]
    assert pairs(bundled(arcs)) == [(0, [(0, 3), (0, 4), (0, 5)])]


def test_several_writes_with_one_reader_are_one_line() -> None:
    assert pairs(bundled([Arc(earlier, 9) for earlier in (1, 0, 2)])) == [(9, [(0, 9), (1, 9), (2, 9)])]


def test_arc_joins_larger_group() -> None:
    arcs = [Arc(0, 5), Arc(1, 5), Arc(2, 5), Arc(2, 4), Arc(2, 6), Arc(2, 7)]
    assert pairs(bundled(arcs)) == [(5, [(0, 5), (1, 5)]), (2, [(2, 4), (2, 5), (2, 6), (2, 7)])]


def test_other_paths_and_kinds_have_separate_lines() -> None:
    data = [Arc(0, 1, "x", kind="data"), Arc(0, 2, "y", kind="data")]
    assert pairs(bundled(data)) == [(0, [(0, 1)]), (0, [(0, 2)])]
    orders = [Arc(0, 1, "x"), Arc(0, 2, "y"), Arc(0, 3, "z", kind="conflict")]
    assert pairs(bundled(orders)) == [(0, [(0, 1), (0, 2)]), (0, [(0, 3)])]


def test_short_lines_are_close_to_rows() -> None:
    buses = bundled([Arc(0, 9), Arc(1, 5), Arc(2, 3), Arc(6, 8)])
    lanes = dict(zip([bus.rows for bus in buses], assign_lanes(buses), strict=True))
    assert lanes == {(2, 3): 0, (6, 8): 0, (1, 5): 1, (0, 9): 2}


def test_lines_that_meet_at_row_share_lane() -> None:
    buses = bundled([Arc(0, 2), Arc(2, 4)])
    assert assign_lanes(buses) == [0, 0]
    assert ports(buses, [0, 0]) == {0: [0], 2: [0, 1], 4: [1]}


arcs = st.lists(
    st.tuples(st.integers(0, 12), st.integers(0, 12), st.sampled_from("ab")).filter(lambda arc: arc[0] < arc[1]),
    unique=True,
    max_size=30,
).map(lambda found: [Arc(a, b, label, kind="data") for a, b, label in found])


@given(arcs)
def test_every_arc_is_in_one_bus_and_touches_its_hub(given_arcs: list[Arc]) -> None:
    buses = bundled(given_arcs)
    assert Counter(arc for bus in buses for arc in bus.arcs) == Counter(given_arcs)
    for bus in buses:
        assert len({arc.label for arc in bus.arcs}) == 1
        assert all(arc.earlier == bus.hub for arc in bus.arcs) or all(arc.later == bus.hub for arc in bus.arcs)


@given(arcs)
def test_lines_in_lane_do_not_overlap_and_lines_at_row_do_not_cross(given_arcs: list[Arc]) -> None:
    buses = bundled(given_arcs)
    lanes = assign_lanes(buses)
    for (one, lane), (other, lane2) in itertools.combinations(zip(buses, lanes, strict=True), 2):
        assert lane != lane2 or one.rows[-1] <= other.rows[0] or other.rows[-1] <= one.rows[0]
    for row, found in ports(buses, lanes).items():
        assert Counter(found) == Counter(i for i, bus in enumerate(buses) if row in bus.rows)
        # A line that goes on both upward and downward crosses the farther lines of the row in any order.
        ending = [i for i in found if row in (buses[i].rows[0], buses[i].rows[-1])]
        for above, below in itertools.combinations(ending, 2):
            # The level piece of the farther line would cross the nearer one if that went on in its direction.
            if lanes[above] > lanes[below]:
                assert buses[below].rows[0] >= row
            if lanes[below] > lanes[above]:
                assert buses[above].rows[-1] <= row
