"""Which handlers of a moment may run at the same time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fluxcb._check.graph import CallbackGraph
from fluxcb._compile.plan import HostCall
from fluxcb._declare.access import overlap, writes

__all__ = ["Concurrency", "concurrency_of"]


@dataclass(eq=False)
class Concurrency:
    """The handlers of a moment, and which of them wait for which.

    Attributes:
        calls: The handlers, in serial order.
        needs: For each, how many others it waits for.
        after: For each, which others wait for it.
        alone: Whether it runs by itself, where `fit` was called.
        seconds: How long it took when it last ran (s); infinite before.
    """

    calls: tuple[HostCall, ...]
    needs: tuple[int, ...]
    after: tuple[tuple[int, ...], ...]
    alone: tuple[bool, ...]
    seconds: list[float]


def concurrency_of(calls: Sequence[HostCall], graph: CallbackGraph) -> Concurrency | None:
    """Return how handlers of one moment may run at the same time, or None if each has to wait for the one before.

    One waits for another that stands before it in the serial order if the graph orders them, or if one of them writes
    what the other touches, also by Append, or where a resolution says that either may be first: so that results are
    those of the serial order.
    """
    alone = tuple(_alone(call) for call in calls)
    after: list[tuple[int, ...]] = []
    needs = [0] * len(calls)
    for i, earlier in enumerate(calls):
        waiting = [j for j in range(i + 1, len(calls)) if alone[i] or alone[j] or _related(earlier, calls[j], graph)]
        after.append(tuple(waiting))
        for j in waiting:
            needs[j] += 1
    if all(i + 1 in after[i] for i in range(len(calls) - 1)):
        return None
    return Concurrency(tuple(calls), tuple(needs), tuple(after), alone, [math.inf] * len(calls))


def _alone(call: HostCall) -> bool:
    # A cancel skips what comes after it in the serial order, and nothing else.
    return ("control",) in call.handler.access or call.handler.declared.callback.main_thread


def _related(earlier: HostCall, later: HostCall, graph: CallbackGraph) -> bool:
    a, b = earlier.handler, later.handler
    edge = graph.edges.get((a.declared.position, b.declared.position))
    if edge is not None and (a.event, a.phase) in edge.at:
        return True
    return any(
        overlap(path, other)
        for path, permission in a.access.items()
        for other, others in b.access.items()
        if writes(permission) or writes(others)
    )
