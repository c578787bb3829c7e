"""Curves drawn with Braille dots in a terminal."""

import re

import pytest

from fluxcb.plots.chart import Line, chart
from fluxcb.plots.scale import spanning, ticks


def drawn(points, *, log=False, **options):
    return chart([Line(points)], x=spanning([x for x, _ in points], log=log), **options)


def dots(lines):
    """Return the set dots of a chart as (column, row) from the top left; each character has two by four dots."""
    found = set()
    for row, line in enumerate(lines):
        body = re.split("[┤│]", line.plain)
        if len(body) < 2:
            continue
        for column, character in enumerate(body[1]):
            bits = ord(character) - 0x2800 if character != " " else 0
            for bit, (dx, dy) in enumerate([(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2), (0, 3), (1, 3)]):
                if bits >> bit & 1:
                    found.add((2 * column + dx, 4 * row + dy))
    return found


def test_straight_line():
    # Ticks are at 0, 2.5 ... 10, so labels take 3 characters and the axis 2; a character has 2 x 4 dots.
    lines = drawn([(0, 0), (10, 10)], width=15, height=2)
    columns = 2 * (15 - 3 - 2)
    expected = {(round(x), round(7 * (1 - x / (columns - 1)))) for x in range(columns)}
    assert dots(lines) == expected
    assert [line.plain[:4] for line in lines] == [" 10 ", "  0 ", "    ", "    "]


def test_curves_have_no_gaps():
    points = [(x, (x * 7919) % 13) for x in range(40)]
    found = dots(drawn(points, width=30, height=6))
    columns = {x for x, _ in found}
    assert columns == set(range(min(columns), max(columns) + 1))
    for x, y in found:  # each dot but one has a neighbour
        assert any((x + dx, y + dy) in found for dx in (-1, 0, 1) for dy in (-1, 0, 1) if (dx, dy) != (0, 0))


def test_single_point_and_horizontal_line():
    assert len(dots(drawn([(3, 2.0)], width=20, height=4))) == 1
    level = dots(drawn([(0, 2.0), (5, 2.0)], width=20, height=4))
    assert len({y for _, y in level}) == 1


def test_logarithmic_axis():
    # Equal factors are equal distances: the points lie on the line that 0, 1, 2 make.
    logarithmic = drawn([(0.1, 0), (1, 5), (10, 10)], width=40, height=4, log=True)
    assert dots(logarithmic) == dots(drawn([(0, 0), (1, 5), (2, 10)], width=40, height=4))
    assert logarithmic[-1].plain.split() == ["0.1", "10"]


def test_axis_label_is_centered():
    *_, rule, below = drawn([(0, 0), (10, 10)], width=24, height=2, x_label="step")
    assert below.plain == "     0" + "step".center(19 - 3) + "10"
    assert len(below.plain) == len(rule.plain) == 24


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0, 10, [0, 2.5, 5, 7.5, 10]),
        (0.2, 0.9, [0.2, 0.4, 0.6, 0.8, 1.0]),
        (-1, 1, [-1, -0.5, 0, 0.5, 1]),
        (3, 3, [3, 3.25, 3.5, 3.75, 4]),
        (0, 1e-5, [0, 2.5e-6, 5e-6, 7.5e-6, 1e-5]),
        (1e-13, 3e-13, [1e-13, 1.5e-13, 2e-13, 2.5e-13, 3e-13]),
        (1e17, 1e17, [1e17, 1e17 + 2.5e7, 1e17 + 5e7, 1e17 + 7.5e7, 1e17 + 1e8]),
    ],
)
def test_ticks_are_round_and_enclose_values(low, high, expected):
    assert ticks(low, high) == pytest.approx(expected, rel=1e-12)
