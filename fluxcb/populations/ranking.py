"""Ranking the members of a population by a metric."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

__all__ = ["ranked"]


def ranked(scores: Mapping[int, float], mode: Literal["min", "max"]) -> list[int]:
    """Return the members from the best to the worst. NaN is worst, and ties go to the lower number.

    Args:
        scores: The value of each member.
        mode: `max` if high values are good.
    """
    sign = -1 if mode == "max" else 1
    return sorted(scores, key=lambda member: (math.isnan(scores[member]), sign * scores[member], member))
