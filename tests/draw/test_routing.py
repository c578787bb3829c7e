"""Tracks and ports: who bends where, by reasoning about small channels."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fluxcb._draw.routing import Bend, Net, route_channel, spread


def net(left: float, right: float) -> Net:
    return Net((left,), (right,))


def test_a_straight_link_needs_no_track() -> None:
    assert route_channel([net(10, 10)]) == ([()], 0)


def test_links_that_do_not_meet_share_a_track() -> None:
    bends, tracks = route_channel([net(0, 20), net(40, 60)])
    assert bends == [(Bend(0, 0, 20),), (Bend(0, 40, 60),)]
    assert tracks == 1


def test_links_side_by_side_are_nested_so_that_they_do_not_cross() -> None:
    """Both run down; the lower one must bend first, or its level start would cross the other's upright piece."""
    [(upper,), (lower,)], tracks = route_channel([net(0, 100), net(20, 120)])
    assert lower.track < upper.track
    assert tracks == 2


def test_a_link_leaves_a_level_before_another_comes_to_it() -> None:
    """The first ends at 20, where the second begins: the second must have bent away to the left of that."""
    [(comes,), (leaves,)], _ = route_channel([net(60, 20), net(20, 90)])
    assert leaves.track < comes.track


def test_two_links_that_change_places_are_kept_apart_by_a_detour() -> None:
    """Each would have to bend before the other; one leaves its level at once, and goes on at a level nobody has."""
    bends, tracks = route_channel([net(0, 50), net(50, 0)])
    [detoured], [other] = [b for b in bends if len(b) == 2], [b for b in bends if len(b) == 1]
    assert [bend.track for bend in detoured] == [0, *(bend.track for bend in detoured[1:])]
    assert detoured[0].end == detoured[1].start
    assert detoured[0].end not in (0, 50)
    assert tracks == 3
    assert {detoured[1].track, other[0].track} == {1, 2}


def test_a_link_at_the_side_has_one_upright_piece() -> None:
    assert route_channel([Net((10, 60), ())]) == ([(Bend(0, 10, 60),)], 1)


@pytest.mark.parametrize(
    ("wanted", "expected"),
    [
        ([], []),
        ([30], [30]),
        ([5], [10]),  # within bounds
        ([95], [90]),
        ([20, 60], [20, 60]),  # far enough apart: each as it likes
        ([50, 50], [40, 50]),  # one of the two gets its wish
        ([20, 80, 80], [20, 70, 80]),
        ([0, 0, 0], [10, 20, 30]),
    ],
)
def test_ports_stand_apart_where_they_want_to(wanted: list[float], expected: list[float]) -> None:
    assert spread(wanted, 10, 10, 90) == expected


@given(st.lists(st.integers(-50, 250), max_size=12).map(sorted))
def test_ports_are_apart_and_within_bounds(wanted: list[int]) -> None:
    found = spread(wanted, 10, 0, 200)
    assert len(found) == len(wanted)
    assert all(b - a >= 10 for a, b in itertools.pairwise(found))
    assert all(0 <= y <= 200 for y in found)


@given(st.lists(st.integers(0, 12).map(lambda n: n * 10), min_size=1, max_size=4).map(sorted))
def test_ports_are_as_near_to_what_they_want_as_can_be(wanted: list[int]) -> None:
    """The least sum of distances, found by trying every choice of tens (an optimum is among them)."""
    least = min(
        sum(abs(a - b) for a, b in zip(choice, wanted, strict=True))
        for choice in itertools.combinations(range(-40, 170, 10), len(wanted))
    )
    assert sum(abs(a - b) for a, b in zip(spread(wanted, 10, -1000, 1000), wanted, strict=True)) == least
