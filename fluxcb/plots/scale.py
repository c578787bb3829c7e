"""Axes of charts for all backends: the range, the ticks, and the position of a value."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

__all__ = ["Scale", "enclosing", "spanning", "ticks"]


@dataclass(frozen=True)
class Scale:
    """One axis of a chart.

    Attributes:
        low: The value at the start of the axis.
        high: The value at the end of the axis.
        ticks: The values that have a label, in ascending order.
        log: Whether the axis is logarithmic.
    """

    low: float
    high: float
    ticks: tuple[float, ...]
    log: bool = False

    def share(self, value: float) -> float:
        """Return the position of a value on the axis: 0 at `low`, 1 at `high`."""
        along = math.log10 if self.log else float
        length = along(self.high) - along(self.low)
        return (along(value) - along(self.low)) / (length or 1.0)


def enclosing(values: Iterable[float]) -> Scale:
    """Return a scale that begins and ends at a tick and encloses the values; a single value is in the middle."""
    values = list(values)
    low, high = min(values), max(values)
    pad = (abs(low) / 10 or 1.0) if low == high else 0.0
    found = ticks(low - pad, high + pad)
    return Scale(found[0], found[-1], tuple(found))


def spanning(values: Iterable[float], *, log: bool = False) -> Scale:
    """Return a scale from the lowest to the highest of the values, with ticks between them.

    For whole numbers, such as steps and epochs, the ticks are whole numbers. A logarithmic scale has ticks at powers of
    ten, or at its ends if the range contains fewer than two powers of ten.
    """
    values = list(values)
    low, high = min(values), max(values)
    if low == high:
        return Scale(low, high, (low,), log)
    if log:
        powers = range(math.ceil(math.log10(low) - 1e-9), math.floor(math.log10(high) + 1e-9) + 1)
        every = max(1, math.ceil(len(powers) / 8))  # at most 8 labels, because more would overlap
        found = [float(f"1e{power}") for power in powers][::every]
        return Scale(low, high, tuple(found) if len(found) > 1 else (low, high), log=True)
    all_integers = all(float(value).is_integer() for value in values)
    found = [tick for tick in ticks(low, high, 8) if low <= tick <= high and (not all_integers or tick.is_integer())]
    return Scale(low, high, tuple(found) if len(found) > 1 else (low, high))


def ticks(low: float, high: float, intervals: int = 4) -> list[float]:
    """Return round numbers that enclose a range, about `intervals` + 1 of them."""
    if high <= low:
        high = low + max(1.0, abs(low) * 1e-9)  # adding 1 would not change 1e17
    rough = (high - low) / intervals
    exponent = math.floor(math.log10(rough))
    steps = [float(f"{factor}e{exponent}") for factor in (1, 2, 2.5, 5, 10)]  # 2.5 * 1e-6 is less than 2.5e-6
    step = next(step for step in steps if step >= rough)
    first, last = math.floor(low / step), math.ceil(high / step)
    return [round(number * step, max(0, 2 - exponent)) for number in range(first, last + 1)]
