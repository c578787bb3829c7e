"""Which handlers of a moment may run at the same time, on threads."""

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
    """The handlers of a moment, with their dependencies.

    Attributes:
        calls: The handlers, in serial order.
        needs: For each handler, the number of handlers that it waits for.
        after: For each handler, the indices of the handlers that wait for it.
        alone: For each handler, whether it runs alone, on the thread that called `fit`.
        seconds: For each handler, the duration of its last run (s); infinite before the first.
    """

    calls: tuple[HostCall, ...]
    needs: tuple[int, ...]
    after: tuple[tuple[int, ...], ...]
    alone: tuple[bool, ...]
    seconds: list[float]


def concurrency_of(calls: Sequence[HostCall], graph: CallbackGraph) -> Concurrency | None:
    """Return which handlers of a moment can overlap, or None if each has to wait for the previous one.

    A handler waits for an earlier one if the graph orders them, or if one of them writes what the other touches. This
    includes pairs that the graph leaves unordered: two `Append()`s, `Read(previous=True)`, `NoConflict()`. Results and
    logs are therefore those of the serial order, at the cost of parallelism between handlers that touch the same path.
    Ordering only the Appends would leave the other pairs unsafe.
    """
    alone = tuple(_alone(call) for call in calls)
    after: list[tuple[int, ...]] = []
    needs = [0] * len(calls)
    for i, earlier in enumerate(calls):
        waiting = [j for j in range(i + 1, len(calls)) if alone[i] or alone[j] or _related(earlier, calls[j], graph)]
        after.append(tuple(waiting))
        for j in waiting:
            needs[j] += 1
    # A chain has no parallelism, so the serial emitter runs it with less overhead.
    if all(i + 1 in after[i] for i in range(len(calls) - 1)):
        return None
    # The first run of a handler counts as long: it then runs on a thread, where it is measured.
    return Concurrency(tuple(calls), tuple(needs), tuple(after), alone, [math.inf] * len(calls))


def _alone(call: HostCall) -> bool:
    # A cancel skips what comes after it in the serial order, and nothing else. A handler of a `main_thread` callback
    # may run an epoch, which moves counters that other handlers read.
    return call.alone or ("control",) in call.handler.access or call.handler.declared.callback.main_thread


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
