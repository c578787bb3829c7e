"""The graph as text: the handlers of each moment in order, with the reason for each position."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass

from fluxcb._check.graph import CallbackGraph, moment_name
from fluxcb._declare.access import dotted, overlap, writes
from fluxcb._declare.declared import Handler, Moment
from fluxcb._declare.events import BUILTIN_EVENTS, Event, TracedEvent
from fluxcb._typing import StatePath

__all__ = ["counts", "explain", "summary"]

WIDTH = 80
"""Longest line of a summary (characters)."""
_CANCELS = "as late as possible: a cancel skips the handlers after it"
_UNORDERED = """\
Where no reason is given, no order is needed: host handlers run in list order,
traced handlers in the order of their class names."""
_TURNS: Mapping[type[Event], int] = {event: turn for turn, event in enumerate(BUILTIN_EVENTS)}


@dataclass(frozen=True)
class _Reason:
    """A reason for the position of a handler.

    Attributes:
        after: Number of the handler that it runs after, or None if the reason does not involve another handler.
        words: The text of the reason.
    """

    after: int | None
    words: str


@dataclass(frozen=True)
class _Place:
    """The position of a handler at a moment.

    Attributes:
        number: The position, starting at 1.
        handler: The handler.
        reasons: The reasons for the position; empty if the handler is unordered.
    """

    number: int
    handler: Handler
    reasons: tuple[_Reason, ...]


def explain(graph: CallbackGraph) -> str:
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


def summary(graph: CallbackGraph) -> str:
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


def counts(graph: CallbackGraph) -> str:
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


def _places(graph: CallbackGraph) -> Iterator[tuple[Moment, list[_Place]]]:
    before: dict[int, list[int]] = {}
    for earlier, later in graph.edges:
        before.setdefault(later, []).append(earlier)
    writers = _writers(graph)
    for moment in graph.moments:
        handlers = graph.orders[moment]
        numbers = {handler.declared.position: number for number, handler in enumerate(handlers, 1)}
        places = []
        for number, handler in enumerate(handlers, 1):
            earlier = [p for p in before.get(handler.declared.position, ()) if numbers.get(p, number) < number]
            reasons = [
                _Reason(numbers[position], "; ".join(reasons))
                for position in sorted(earlier, key=numbers.__getitem__)
                if (reasons := graph.edges[position, handler.declared.position].at.get(moment))
            ]
            after = {reason.after for reason in reasons}
            if _cancels(handler) and any(
                not _cancels(other) and i not in after for i, other in enumerate(handlers[: number - 1], 1)
            ):
                reasons.append(_Reason(None, _CANCELS))
            if not reasons:
                reasons += [_Reason(None, words) for words in _written_earlier(handler, writers)]
            places.append(_Place(number, handler, tuple(reasons)))
        yield moment, places


def _direct(place: _Place, places: Sequence[_Place]) -> Iterator[_Reason]:
    """Yield the reasons for a position, without those that follow from two others."""
    after = [reason.after for reason in place.reasons if reason.after is not None]
    between = {reason.after for number in after for reason in places[number - 1].reasons}
    return (reason for reason in place.reasons if reason.after is None or reason.after not in between)


def _cancels(handler: Handler) -> bool:
    return not handler.traced and ("control",) in handler.access


def _is_ordered(place: _Place) -> bool:
    return any(reason.after is not None or reason.words == _CANCELS for reason in place.reasons)


Writers = dict[str, list[tuple[StatePath, Handler]]]
"""For each entry of the shared state, the written paths, each with the handler that writes it."""


def _writers(graph: CallbackGraph) -> Writers:
    found: Writers = {}
    for handlers in graph.orders.values():
        for handler in handlers:
            for path, permission in handler.access.items():
                if path[0] == "cbstate" and len(path) > 1 and writes(permission) and handler.event in _TURNS:
                    found.setdefault(path[1], []).append((path, handler))
    return found


def _written_earlier(handler: Handler, writers: Writers) -> Iterator[str]:
    """Yield a reason for each entry that a handler reads and that another callback wrote at an earlier moment."""
    turn = _TURNS.get(handler.event, 0)  # for a user-defined event, it is not known which events are earlier
    for path, permission in handler.access.items():
        if path[0] != "cbstate" or len(path) < 2 or writes(permission):
            continue
        earlier = [
            writer
            for written, writer in writers.get(path[1], ())
            if overlap(written, path) and _TURNS[writer.event] < turn and writer.declared is not handler.declared
        ]
        if earlier:
            latest = max(earlier, key=lambda writer: _TURNS[writer.event])
            yield f"reads `{dotted(path)}`, which {latest.declared.cls.__name__} wrote at {latest.event.__name__}"


# -- words -------------------------------------------------------------------------------------


def _due(handler: Handler) -> str:
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
