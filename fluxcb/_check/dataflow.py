"""Data that a handler reads and a handler of another callback wrote before."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fluxcb._check.ordering import Ordering
from fluxcb._declare.access import Append, Permission, Read, Write, overlap, writes
from fluxcb._declare.declared import BoundHandler, Moment
from fluxcb._declare.events import (
    EpochBegin,
    EpochEnd,
    Event,
    FitBegin,
    FitEnd,
    FitStopping,
    StepBegin,
    StepEnd,
    Trigger,
)
from fluxcb._declare.phases import Phase
from fluxcb._declare.state import provided
from fluxcb._typing import StatePath

__all__ = ["DataFlow", "data_flows", "first_reads", "in_fit_order"]


@dataclass(frozen=True)
class DataFlow:
    """State that one callback writes and another one reads.

    Attributes:
        writer: The handler that writes.
        reader: The handler that reads.
        path: The part of the state that both declare.
        written: The path that the writer declares.
    """

    writer: BoundHandler
    reader: BoundHandler
    path: StatePath
    written: StatePath

    @property
    def within_moment(self) -> bool:
        """Whether both handlers run at the same moment."""
        return (self.writer.event, self.writer.phase) == (self.reader.event, self.reader.phase)


def in_fit_order(graph: Ordering, moments: Iterable[Moment]) -> list[Moment]:
    """Sort moments by their first occurrence in a fit: training, validation, and the moments that follow it.

    User-defined events that no phase names in `provides` come after the other events of their phase, because the
    declarations do not say when they are emitted.
    """
    phases = {phase: i for i, phase in enumerate(graph.phases)}

    def place(moment: Moment) -> tuple[int, int, int, str]:
        event, phase = moment
        known = _events(phase)
        number = phases.get(phase, len(phases))
        turn = known.index(event) if event in known else len(known)
        if event in (FitBegin, Trigger, FitStopping, FitEnd):
            return (0 if event is FitBegin else 3, turn, number, "")
        return (1 if phase.trains else 2, number, turn, event.__name__)

    return sorted(moments, key=place)


def _events(phase: type[Phase]) -> list[type[Event]]:
    return [FitBegin, EpochBegin, StepBegin, *provided(phase), StepEnd, EpochEnd, Trigger, FitStopping, FitEnd]


def first_reads(graph: Ordering, moments: Iterable[Moment]) -> list[DataFlow]:
    """Return the data that flows between callbacks from one moment to a later one, without repetitions.

    A callback that reads the same value at several moments is connected with the writer once: at the first of these
    moments. If that is the moment of the write, an edge of the graph connects the two, and there is no flow.
    """
    # With all built-in callbacks, a connection for each read would result in four times as many lines.
    first: dict[tuple[BoundHandler, StatePath, int], DataFlow] = {}
    for flow in data_flows(graph, moments):
        first.setdefault((flow.writer, flow.written, flow.reader.declared.position), flow)
    return [flow for flow in first.values() if not flow.within_moment]


def data_flows(graph: Ordering, moments: Iterable[Moment]) -> Iterator[DataFlow]:
    """Yield the data that flows between callbacks, within a moment or to a later moment of the same epoch.

    A handler reads the values that the latest handlers before it wrote. `Write()` replaces earlier values, and
    `Append()` adds to them. The following is not included:

    - Data that the next step or the next epoch reads.
    - Data that a handler may read because it has `Write()`; it does not declare whether it does.
    - `Read()` on `*` or on the whole of `cbstate`, which would connect a handler with almost all others.
    - User-defined events that no phase names in `provides`, because it is not known when they are emitted.

    Yields:
        The flows, sorted by reader in the order of a fit; for each path that it reads, the latest writer first.
    """
    known = in_fit_order(graph, (m for m in moments if m[0] in _events(m[1])))
    handlers = [handler for moment in known for handler in graph.orders.get(moment, ())]
    written = _Writes(handlers)
    for i, reader in enumerate(handlers):
        for path, permission in reader.access.items():
            if isinstance(permission, Read) and path not in (("*",), ("cbstate",)):
                yield from written.read_by(i, reader, path, previous=permission.previous)


_Write = tuple[int, BoundHandler, StatePath, Permission]
"""The number of a handler, the handler, and a path that it may write with this permission."""


class _Writes:
    """The writes of all handlers, grouped by the first two names of their paths for fast lookup."""

    def __init__(self, handlers: Iterable[BoundHandler]) -> None:
        self.groups: dict[str, dict[StatePath, list[_Write]]] = {}
        for i, handler in enumerate(handlers):
            for path, permission in handler.access.items():
                if writes(permission) and path[0] != "control":
                    group = self.groups.setdefault(path[0], {})
                    group.setdefault(path[:2], []).append((i, handler, path, permission))

    def _groups_of(self, path: StatePath) -> Iterator[list[_Write]]:
        """Yield the groups that may have writes of a path."""
        first, is_nested = path[0], len(path) > 1
        for name, groups in self.groups.items():
            if name == first and is_nested:
                yield from (groups[start] for start in (path[:1], path[:2]) if start in groups)
            elif overlap((name,), (first,)):
                yield from groups.values()

    def read_by(self, number: int, reader: BoundHandler, path: StatePath, *, previous: bool) -> Iterator[DataFlow]:
        """Yield the flows to a handler that reads a path, the latest writer first."""
        found = self._groups_of(path)
        earlier = [
            write for group in found for write in group[: bisect_left(group, number, key=lambda write: write[0])]
        ]
        replaced: list[StatePath] = []
        for _, writer, wrote, permission in sorted(earlier, key=lambda write: -write[0]):
            shared = path if _contains(wrote, path) else wrote
            flow = DataFlow(writer, reader, shared, wrote)
            if not overlap(wrote, path) or (flow.within_moment and previous):
                continue
            if path[0] == "step" and writer.phase is not reader.phase:  # each step has its own values
                continue
            if isinstance(permission, Append) and _contains(wrote, path) and wrote != path:
                continue  # `Append()` on a whole hub may add any name, as for the edges of the graph
            if any(_contains(other, shared) for other in replaced):
                continue
            if isinstance(permission, Write):
                replaced.append(wrote)
            if writer.declared is not reader.declared:
                yield flow


def _contains(outer: StatePath, inner: StatePath) -> bool:
    return inner[: len(outer)] == outer
