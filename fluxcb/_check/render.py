"""The graph as text: the handlers of each moment in order, with the reason for each position."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Sequence, Sized
from functools import cached_property
from typing import NamedTuple

from fluxcb._check.dataflow import data_flows
from fluxcb._check.ordering import Ordering, moment_name
from fluxcb._declare.access import dotted, writes
from fluxcb._declare.declared import BoundHandler, Moment
from fluxcb._declare.events import TracedEvent
from fluxcb._typing import StatePath

__all__ = ["counts", "explain", "summary"]

WIDTH = 80
"""Longest line of a summary (characters)."""
_CANCELS = "as late as possible: a cancel skips the handlers after it"
_UNORDERED = """\
If no reason is given, no order is needed: host handlers run in list order,
traced handlers in the order of their class names."""


class _Reason(NamedTuple):
    """A reason for the position of a handler.

    Attributes:
        after: Number of the handler that it runs after, or None if the reason does not involve another handler.
        words: The text of the reason.
    """

    after: int | None
    words: str


class _Place(NamedTuple):
    """The position of a handler at a moment.

    Attributes:
        number: The position, starting at 1.
        handler: The handler.
        reasons: The reasons for the position; empty if the handler is unordered.
    """

    number: int
    handler: BoundHandler
    reasons: tuple[_Reason, ...]


def explain(graph: Ordering) -> str:
    """Return the handlers of each moment in order, each with the reasons for its position."""
    lines: list[str] = []
    for moment, places in _places(graph):
        kind = "traced" if issubclass(moment[0], TracedEvent) else "host"
        lines.append(f"{moment_name(moment)} ({kind})")
        for place in places:
            lines.append(f"  {place.number}. {place.handler.declared.label}.{place.handler.name}{_due(place.handler)}")
            for reason in place.reasons:
                after = f"after {_label(places, reason.after)}: " if reason.after is not None else ""
                lines.append(f"       {after}{reason.words}")
        free = [place.number for place in places if not _is_ordered(place)]
        if len(free) > 1:
            lines.append(f"     {_listed(free)} need no order: {_tie(moment)}")
    return "\n".join(lines)


def summary(graph: Ordering) -> str:
    """Return the size of the graph, followed by a line for each moment with its callbacks in order and the reasons."""
    lines = [counts(graph)]
    width = max((len(event.__name__) for event, _ in graph.moments), default=0)
    phase, unordered = None, False
    for moment, places in _places(graph):
        if moment[1] is not phase:
            phase = moment[1]
            lines += ["", phase.__name__]
        head = f"  {moment[0].__name__:<{width}}  {'traced' if issubclass(moment[0], TracedEvent) else 'host':<6}  "
        lines += _filled(head, (f"{place.number}. {place.handler.declared.label}" for place in places))
        for place in places:
            for reason in _direct(place, places):
                after = f" after {reason.after}" if reason.after is not None else ""
                lines += textwrap.wrap(
                    f"{place.number}{after}: {reason.words}",
                    WIDTH,
                    initial_indent=" " * 8,
                    subsequent_indent=" " * 11,
                    break_long_words=False,
                    break_on_hyphens=False,
                )
        unordered = unordered or sum(not _is_ordered(place) for place in places) > 1
    if unordered:
        lines += ["", _UNORDERED]
    return "\n".join(lines)


def counts(graph: Ordering) -> str:
    """Return the numbers of callbacks, moments, edges and, if there are any, problems of a graph."""
    phases = {phase for _, phase in graph.moments}
    numbers = [
        _count(graph.declared, "callback"),
        f"{_count(graph.moments, 'moment')} in {_count(phases, 'phase')}",
        _count(graph.edges, "edge"),
        *([_count(graph.problems, "problem")] if graph.problems else []),
    ]
    return ", ".join(numbers)


def _count(things: Sized, what: str) -> str:
    return f"{len(things)} {what}{'' if len(things) == 1 else 's'}"


# -- reasons -----------------------------------------------------------------------------------


def _places(graph: Ordering) -> Iterator[tuple[Moment, list[_Place]]]:
    before: dict[int, list[int]] = {}
    for earlier, later in graph.edges:
        before.setdefault(later, []).append(earlier)
    written = _WrittenEarlier(graph)
    for moment in graph.moments:
        handlers = graph.orders[moment]
        numbers = {handler.declared.position: number for number, handler in enumerate(handlers, 1)}
        places = []
        for number, handler in enumerate(handlers, 1):
            own = handler.declared.position
            earlier = [p for p in before.get(own, ()) if numbers.get(p, number) < number]
            reasons = [
                _Reason(numbers[position], "; ".join(texts))
                for position in sorted(earlier, key=numbers.__getitem__)
                if (texts := graph.edges[position, own].at.get(moment))
            ]
            if _cancels(handler):
                after = {reason.after for reason in reasons}
                others = enumerate(handlers[: number - 1], 1)
                if any(not _cancels(other) and i not in after for i, other in others):
                    reasons.append(_Reason(None, _CANCELS))
            if not reasons:
                reasons += [_Reason(None, words) for words in written.reasons(handler)]
            places.append(_Place(number, handler, tuple(reasons)))
        yield moment, places


def _direct(place: _Place, places: Sequence[_Place]) -> Iterator[_Reason]:
    """Yield the reasons for a position, without those that follow from two others."""
    after = [reason.after for reason in place.reasons if reason.after is not None]
    between = {reason.after for number in after for reason in places[number - 1].reasons}
    return (reason for reason in place.reasons if reason.after is None or reason.after not in between)


def _cancels(handler: BoundHandler) -> bool:
    return not handler.traced and ("control",) in handler.access


def _is_ordered(place: _Place) -> bool:
    return any(reason.after is not None or reason.words == _CANCELS for reason in place.reasons)


class _WrittenEarlier:
    """Reasons that follow from entries which other callbacks wrote at earlier moments."""

    def __init__(self, graph: Ordering) -> None:
        self._graph = graph

    def reasons(self, handler: BoundHandler) -> list[str]:
        """Return a reason for each entry that a handler reads."""
        if any(path[0] == "cbstate" and not writes(permission) for path, permission in handler.access.items()):
            return self._found.get(handler, [])
        return []

    @cached_property  # most graphs have edges for all handlers that read an entry, and do not need it
    def _found(self) -> dict[BoundHandler, list[str]]:
        latest: dict[tuple[BoundHandler, StatePath], BoundHandler] = {}
        for flow in data_flows(self._graph, self._graph.moments):
            if flow.path[0] == "cbstate" and not flow.within_moment:
                latest.setdefault((flow.reader, flow.path), flow.writer)
        found: dict[BoundHandler, list[str]] = {}
        for (reader, path), writer in latest.items():
            reason = f"reads `{dotted(path)}`, which {writer.declared.cls.__name__} wrote at {writer.event.__name__}"
            found.setdefault(reader, []).append(reason)
        return found


# -- words -------------------------------------------------------------------------------------


def _due(handler: BoundHandler) -> str:
    return f"  [{', '.join(map(repr, handler.schedules))}]" if handler.schedules else ""


def _label(places: Sequence[_Place], number: int) -> str:
    return places[number - 1].handler.declared.label


def _tie(moment: Moment) -> str:
    return (
        "they run in the order of their class names" if issubclass(moment[0], TracedEvent) else "they run in list order"
    )


def _listed(numbers: Sequence[int]) -> str:
    """Return `1 and 3`, or `1 to 4` for consecutive numbers."""
    if len(numbers) > 2 and numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{numbers[0]} to {numbers[-1]}"
    *most, last = map(str, numbers)
    return f"{', '.join(most)} and {last}"


def _filled(head: str, items: Iterable[str]) -> Iterator[str]:
    """Yield a heading followed by items, wrapped into lines."""
    line, begun = head, False
    for item in items:
        if begun and len(line) + 2 + len(item) > WIDTH:
            yield line
            line, begun = " " * len(head), False
        line += f"  {item}" if begun else item
        begun = True
    yield line
