"""Windows: how many steps may run before a host handler has to look."""

from __future__ import annotations

from collections.abc import Sequence

from fluxcb._compile.plan import HostCall

__all__ = ["AHEAD", "LONGEST", "bound_at"]

AHEAD = 32
"""Steps a window has where nobody waits for it: JAX runs at most 32 computations ahead (measured on CPU)."""

LONGEST = 128
"""Steps a window may have where the host waits for its end, so that the wait is shared by many."""


def bound_at(calls: Sequence[HostCall], step: int, epoch: int) -> int | None:
    """Return the first step after `step` at which one of these calls may be due, or None if none ever is."""
    first: int | None = None
    for call in calls:
        due: int | None = step + 1
        for schedule in call.schedules:  # due when all are: the latest of their next times bounds from below
            nearest = schedule.next_due(step, epoch)
            due = None if nearest is None or due is None else max(due, nearest)
        if due is not None and (first is None or due < first):
            first = due
    return first
