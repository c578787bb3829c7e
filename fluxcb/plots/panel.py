"""The content of a chart, as plain data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fluxcb.plots.scale import Scale, spanning

__all__ = ["COLORS", "DOTTED", "LARGEST", "Panel", "Points", "shared_x"]

Points = Sequence[tuple[float, float]]

# Okabe and Ito's palette, which people with color vision deficiencies can tell apart.
COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9")
LARGEST = 1e300
"""Numbers beyond this magnitude are not drawn, because the length of their axis could overflow."""
DOTTED = 40
"""Curves with at most this many points have a dot at each point, because a line of one point would be invisible."""


@dataclass(frozen=True)
class Panel:
    """Curves over common axes.

    Attributes:
        curves: Points `(x, y)` of each curve, by name.
        x_label: Name of the horizontal axis, with its unit.
        y_label: Name of the vertical axis, with its unit.
        log_x: Whether the horizontal axis is logarithmic.
        marks: Positions on the horizontal axis, by name.
        x_scale: The horizontal axis, or None to derive it from the panel's own points.
    """

    curves: Mapping[str, Points]
    x_label: str = ""
    y_label: str = ""
    log_x: bool = False
    marks: Mapping[str, float] = field(default_factory=dict)
    x_scale: Scale | None = None

    def has_place(self, point: tuple[float, float]) -> bool:
        """Return whether a point can be drawn."""
        x, y = point
        return abs(x) <= LARGEST and abs(y) <= LARGEST and (x > 0 or not self.log_x)

    def drawable(self) -> dict[str, list[tuple[float, float]]]:
        """Return the points of each curve that can be drawn."""
        return {name: [point for point in points if self.has_place(point)] for name, points in self.curves.items()}

    @property
    def horizontal(self) -> Scale:
        """The horizontal axis."""
        # A point without a value, such as a NaN at the end of a run, still has a place on this axis.
        xs = [x for points in self.curves.values() for x, _ in points if self.has_place((x, 0.0))]
        return self.x_scale or spanning([*xs, *self.marks.values()] or [0.0, 1.0], log=self.log_x)


def shared_x(panels: Sequence[Panel]) -> Scale:
    """Return the horizontal axis that spans those of several panels."""
    ends = [end for panel in panels for end in (panel.horizontal.low, panel.horizontal.high)]
    return spanning(ends, log=any(panel.log_x for panel in panels))
