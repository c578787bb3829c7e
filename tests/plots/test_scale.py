"""Axes: ranges, ticks, and positions of values."""

import pytest

from fluxcb.plots.panel import Panel, shared_x
from fluxcb.plots.scale import Scale, enclosing, spanning


@pytest.mark.parametrize(
    ("values", "log", "expected"),
    [
        ([1, 450], False, (1, 450, (100, 200, 300, 400))),
        ([1, 3], False, (1, 3, (1, 2, 3))),  # there is no epoch 1.5
        ([0.5, 2.5], False, (0.5, 2.5, tuple(n / 4 for n in range(2, 11)))),
        ([7, 7], False, (7, 7, (7,))),
        ([1e-7, 10], True, (1e-7, 10, tuple(float(f"1e{n}") for n in range(-7, 2, 2)))),
        ([2, 5], True, (2, 5, (2, 5))),
    ],
)
def test_horizontal_axis_ends_at_values(values, log, expected):
    scale = spanning(values, log=log)
    assert (scale.low, scale.high, scale.ticks) == expected


def test_vertical_axis_ends_at_ticks():
    assert enclosing([0.2, 0.9]) == Scale(0.2, 1.0, (0.2, 0.4, 0.6, 0.8, 1.0))
    assert enclosing([0.9]) == Scale(0.8, 1.0, (0.8, 0.85, 0.9, 0.95, 1.0))
    assert enclosing([0.0, 0.0]) == Scale(-1.0, 1.0, (-1.0, -0.5, 0.0, 0.5, 1.0))


def test_relative_position_on_axis():
    assert [Scale(10, 20, ()).share(x) for x in (10, 12.5, 20)] == [0, 0.25, 1]
    assert [Scale(0.1, 1000, (), log=True).share(x) for x in (0.1, 1, 1000)] == pytest.approx([0, 0.25, 1])
    assert Scale(3, 3, ()).share(3) == 0


def test_panels_share_combined_axis():
    panels = [Panel({"a": [(5, 1.0), (9, 1.0)]}), Panel({"b": [(2, 1.0)]}, marks={"end": 12})]
    assert shared_x(panels) == spanning([2, 12])
