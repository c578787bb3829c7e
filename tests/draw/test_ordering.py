"""Few crossings, counted one by one; layers from links."""

from __future__ import annotations

from itertools import combinations, pairwise, permutations, product

from hypothesis import given
from hypothesis import strategies as st

from fluxcb._draw.layers import assign_layers, depths, rank_nodes
from fluxcb._draw.ordering import count_crossings, order_layers

PAIRS = st.lists(
    st.tuples(st.integers(0, 7), st.integers(0, 7)).filter(lambda p: p[0] < p[1]), max_size=14, unique=True
)


def crossings_one_by_one(layers: list[list[int]], segments) -> int:
    place = {item: (layer, i) for layer, row in enumerate(layers) for i, item in enumerate(row)}
    total = 0
    for one, other in combinations(segments, 2):
        (layer, a), (_, b) = place[one.start], place[one.end]
        (other_layer, c), (_, d) = place[other.start], place[other.end]
        total += layer == other_layer and (a - c) * (b - d) < 0
    return total


@given(PAIRS)
def test_crossings_are_counted_right(pairs) -> None:
    layering = assign_layers(8, pairs, [])
    expected = crossings_one_by_one(layering.layers, layering.segments)
    assert count_crossings(layering.layers, layering) == expected


@given(PAIRS)
def test_ordering_moves_items_within_layers_only_and_adds_no_crossing(pairs) -> None:
    layering = assign_layers(8, pairs, [])
    ordered = order_layers(layering)
    assert [sorted(row) for row in ordered] == [sorted(row) for row in layering.layers]
    assert order_layers(layering) == ordered


def test_a_small_graph_gets_as_few_crossings_as_any_order_has() -> None:
    pairs = [(0, 5), (0, 7), (1, 4), (1, 6), (2, 5), (2, 4), (3, 6), (3, 7)]
    layering = assign_layers(8, pairs, [])
    orders = product(*(permutations(row) for row in layering.layers))
    fewest = min(count_crossings(order, layering) for order in orders)
    assert fewest > 0  # else the sweeps would have nothing to weigh
    assert count_crossings(order_layers(layering), layering) == fewest


@given(PAIRS)
def test_layers_follow_links(pairs) -> None:
    rank, depth = rank_nodes(8, pairs), depths(8, pairs)
    assert all(rank[a] < rank[b] for a, b in pairs)
    assert sorted(set(rank)) == list(range(max(rank) + 1))
    for node in range(8):  # one more than the deepest of those before it
        assert depth[node] == max((depth[a] + 1 for a, b in pairs if b == node), default=0)
    assert sum(rank[b] - rank[a] for a, b in pairs) <= sum(depth[b] - depth[a] for a, b in pairs)


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=20))
def test_circles_are_ranked_too(pairs) -> None:
    rank = rank_nodes(6, pairs)
    assert all(rank[a] != rank[b] for a, b in pairs if a != b)


def test_a_circle_is_opened_at_one_link() -> None:
    pairs = [(0, 1), (1, 2), (2, 3), (3, 0)]
    rank = rank_nodes(4, pairs)
    assert sum(rank[a] > rank[b] for a, b in pairs) == 1


def test_a_long_link_gets_a_lane_in_each_layer_it_passes() -> None:
    layering = assign_layers(4, [(0, 1), (1, 2), (2, 3), (0, 3)], [])
    chain = layering.chains[3]
    assert (chain[0], chain[-1], len(chain)) == (0, 3, 4)
    assert [item >= 4 for item in chain] == [False, True, True, False]
    for (a, b), layer in zip(pairwise(chain), range(3), strict=True):
        assert a in layering.layers[layer]
        assert b in layering.layers[layer + 1]


def test_a_conflict_within_a_layer_stays_at_its_side() -> None:
    layering = assign_layers(3, [(0, 2)], [(1, 0), (1, 2)])
    assert [(side.start, side.end, side.link) for side in layering.sides] == [(0, 1, 1)]
    assert [(s.start, s.end, s.link) for s in layering.segments] == [(0, 2, 0), (1, 2, 2)]
