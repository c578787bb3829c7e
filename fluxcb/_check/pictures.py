"""The graph as pictures: the rows, nodes and lines that they show, and their forms."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from fluxcb._check.dataflow import DataFlow, first_reads, in_fit_order
from fluxcb._check.ordering import Ordering, moment_name
from fluxcb._check.shown import ShownMermaid, ShownPage, ShownSvg, ShownText
from fluxcb._declare.access import Append, Permission, Read, dotted, writes
from fluxcb._declare.declared import BoundHandler, Declared, Moment
from fluxcb._declare.events import Event
from fluxcb._declare.phases import Phase
from fluxcb._draw.drawing import Arc, Drawing, Link, LinkKind, Node, NodeKind, Row, Timeline
from fluxcb._draw.notations import to_dot, to_mermaid
from fluxcb._draw.outline import to_text, to_tree
from fluxcb._draw.page import to_page
from fluxcb._draw.svg import to_svg
from fluxcb._errors import DeclarationError, did_you_mean
from fluxcb._typing import StatePath

__all__ = ["HandlerCosts", "drawing", "render", "timeline"]

Pair = tuple[int, int]
HandlerCosts = Mapping[tuple[str, str, type[Phase]], str]
"""For the label of a callback, the name of a handler, and a phase, the cost of the handler in a few words."""


def render(
    graph: Ordering,
    form: str,
    *,
    event: type[Event] | None = None,
    phase: type[Phase] | None = None,
    costs: HandlerCosts | None = None,
) -> str:
    """Return a graph in one of the forms that `CallbackGraph.render` names.

    Raises:
        DeclarationError: There is no such form, or it cannot show costs.
    """
    forms = (*_NOTATIONS, *_PICTURES)
    if form not in forms:
        raise DeclarationError(
            f"A callback graph has no form {form!r}.{did_you_mean(str(form), list(forms))}",
            fix=f"choose one of {', '.join(forms)}",
        )
    moments = None if event is None and phase is None else _chosen(graph, event, phase)
    if form in _PICTURES:
        shown, draw = _PICTURES[form]
        return shown(draw(timeline(graph, moments, costs)))
    if costs is not None:
        raise DeclarationError(
            f"The form {form!r} of a callback graph does not show costs.", fix=f"choose one of {', '.join(_PICTURES)}"
        )
    shown, write = _NOTATIONS[form]
    return shown(write(drawing(graph, moments)))


_NOTATIONS: Mapping[str, tuple[type[ShownText], Callable[[Drawing], str]]] = {
    "tree": (ShownText, to_tree),
    "text": (ShownText, to_text),
    "mermaid": (ShownMermaid, to_mermaid),
    "dot": (ShownText, to_dot),
}
_PICTURES: Mapping[str, tuple[type[ShownText], Callable[[Timeline], str]]] = {
    "svg": (ShownSvg, to_svg),
    "html": (ShownPage, to_page),
}


def _chosen(graph: Ordering, event: type[Event] | None, phase: type[Phase] | None) -> list[Moment]:
    if event is not None and phase is not None:
        graph.handlers(event, phase)  # derives the moment if neither construction nor an earlier call has done it
    return [m for m in graph.moments if event in (None, m[0]) and phase in (None, m[1])]


# -- callbacks and links -----------------------------------------------------------------------


def drawing(graph: Ordering, moments: Sequence[Moment] | None = None) -> Drawing:
    """Return the callbacks of a graph and the links between them, for a drawing.

    Args:
        graph: The graph, which may be invalid.
        moments: The moments to show, with the access and the order that hold there. None for all, with callbacks that
            run at no moment.
    """
    handlers: dict[int, list[BoundHandler]] = {}
    for moment in graph.moments if moments is None else moments:
        for handler in graph.orders.get(moment, ()):
            handlers.setdefault(handler.declared.position, []).append(handler)
    nodes = tuple(
        _node(d, handlers.get(d.position, []), all_access=moments is None)
        for d in graph.declared
        if moments is None or d.position in handlers
    )
    return Drawing(_title(moments), nodes, tuple(_links(timeline(graph, moments))))


def _title(moments: Sequence[Moment] | None) -> str:
    if moments is None:
        return "Callbacks at all moments"
    return ", ".join(map(moment_name, moments)) or "No moment"


def _node(d: Declared, handlers: Sequence[BoundHandler], *, all_access: bool) -> Node:
    kinds = {handler.traced for handler in handlers}
    kind: NodeKind = "none" if not kinds else "both" if len(kinds) == 2 else "traced" if True in kinds else "host"
    access = d.access if all_access else {path: p for handler in handlers for path, p in handler.access.items()}
    return Node(d.label, d.label, kind, *_access_lines(access.items()))


def _links(shown: Timeline) -> Iterable[Link]:
    """Merge the arcs that connect the same callbacks."""
    merged: dict[tuple[str, str, str], list[Arc]] = {}
    for arc in shown.arcs:
        kind = "order" if arc.kind == "cycle" else arc.kind
        ends = shown.rows[arc.earlier].callback, shown.rows[arc.later].callback
        merged.setdefault((*ends, kind), []).append(arc)
    for (earlier, later, _), arcs in merged.items():
        kinds = {arc.kind for arc in arcs}
        moments = () if kinds == {"data"} else tuple(shown.rows[arc.earlier].moment for arc in arcs)
        reasons = tuple(dict.fromkeys(reason for arc in arcs for reason in arc.reasons))
        # The label of an order counts reasons, and arcs of different moments can have different ones.
        label = _label(reasons) if kinds & {"order", "cycle"} else _shortened(arc.label for arc in arcs)
        kind: LinkKind = "cycle" if "cycle" in kinds else arcs[0].kind
        yield Link(earlier, later, label, reasons, moments, kind, implied=all(arc.implied for arc in arcs))


# -- rows and arcs -----------------------------------------------------------------------------


def timeline(graph: Ordering, moments: Sequence[Moment] | None = None, costs: HandlerCosts | None = None) -> Timeline:
    """Return the handlers of a graph in execution order, and the arcs between them.

    Args:
        graph: The graph, which may be invalid.
        moments: The moments to show. None for all, with callbacks that run at no moment.
        costs: The costs to show, or None for none.
    """
    chosen = in_fit_order(graph, graph.moments if moments is None else moments)
    places = [place for moment in chosen for place in enumerate(graph.orders.get(moment, ()), 1)]
    active = {handler.declared.position for _, handler in places}
    idle = [d for d in graph.declared if moments is None and d.position not in active]
    shared = _shared_names(graph)
    rows = [
        *(_row(graph, handler, place, shared, costs or {}) for place, handler in places),
        *(_idle_row(d) for d in idle),
    ]
    number = {(h.event, h.phase, h.declared.position): i for i, (_, h) in enumerate(places)}
    at = set(chosen)
    arcs = [*_orders(graph, at, number), *_conflicts(graph, at, number), *_data(first_reads(graph, chosen), number)]
    problems = tuple(f"{type(problem).__name__}: {problem}" for problem in graph.problems)
    return Timeline(_title(moments), tuple(rows), tuple(arcs), problems)


Numbers = Mapping[tuple[type[Event], type[Phase], int], int]
"""For a moment and the position of a callback, the number of the row."""


def _shared_names(graph: Ordering) -> set[StatePath]:
    """Return the beginnings of the paths that several callbacks use; they explain an order, so rows show them first."""
    users: dict[StatePath, set[int]] = {}
    for d in graph.declared:
        for path in d.access:
            users.setdefault(path[:2], set()).add(d.position)
    return {start for start, found in users.items() if len(found) > 1}


def _row(graph: Ordering, handler: BoundHandler, place: int, shared: set[StatePath], costs: HandlerCosts) -> Row:
    d = handler.declared
    moment = handler.event, handler.phase
    access = sorted(handler.access.items(), key=lambda item: item[0][:2] not in shared)
    reads, written = _access_lines(access)
    due = f", {' and '.join(map(repr, handler.schedules))}" if handler.schedules else ""
    cost = costs.get((d.label, handler.name, handler.phase), "")
    details = [
        ("runs", (f"{place} of {len(graph.orders[moment])} handlers{due}",)),
        ("reads", reads),
        ("writes", written),
        ("costs", (cost,) if cost else ()),
        *_about(d),
        ("handler", (handler.where,)),
    ]
    return Row(
        d.label,
        moment_name(moment),
        handler.traced,
        f"{handler.name}{due}",
        reads,
        written,
        tuple((name, lines) for name, lines in details if lines),
        cost,
    )


def _idle_row(d: Declared) -> Row:
    reads, written = _access_lines(d.access.items())
    return Row(d.label, "", reads=reads, writes=written, details=tuple(_about(d)))


def _about(d: Declared) -> Iterable[tuple[str, tuple[str, ...]]]:
    summary = (d.cls.__doc__ or "").strip().partition("\n")[0]
    if summary:
        yield "does", (summary,)
    yield "class", (f"{d.cls.__module__}.{d.cls.__qualname__}",)
    yield "declared", (d.where,)


def _access_lines(access: Iterable[tuple[StatePath, Permission]]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    access = list(access)
    reads = tuple(_access_line(path, p) for path, p in access if not writes(p))
    return reads, tuple(_access_line(path, p) for path, p in access if writes(p))


def _access_line(path: StatePath, permission: Permission) -> str:
    if isinstance(permission, Append):
        return f"{dotted(path)} (append)"
    if isinstance(permission, Read) and permission.previous:
        return f"{dotted(path)} (previous)"
    return dotted(path)


def _orders(graph: Ordering, moments: set[Moment], number: Numbers) -> Iterable[Arc]:
    at: dict[Moment, list[Pair]] = {}
    for pair, edge in graph.edges.items():
        for moment in edge.moments:
            at.setdefault(moment, []).append(pair)
    circular = {(moment, pair) for moment in moments for pair in _in_cycles(at.get(moment, ()))}
    implied = {(moment, pair) for moment in moments for pair in _implied(at.get(moment, ()))}
    for (i, j), edge in graph.edges.items():
        for moment, reasons in edge.at.items():
            if moment in moments:
                yield Arc(
                    number[*moment, i],
                    number[*moment, j],
                    _label(reasons),
                    tuple(reasons),
                    "cycle" if (moment, (i, j)) in circular else "order",
                    (moment, (i, j)) in implied,
                )


def _conflicts(graph: Ordering, moments: set[Moment], number: Numbers) -> Iterable[Arc]:
    for found in graph.conflicts:
        paths = [dotted(max(pair, key=len)) for pair in found.shared.both_write] if found.shared else []
        for moment in found.moments:
            if moment in moments:
                yield Arc(
                    number[*moment, found.a.declared.position],
                    number[*moment, found.b.declared.position],
                    _shortened(paths) if paths else "never together",
                    tuple(str(found.error).splitlines()),
                    "conflict",
                )


def _data(flows: Iterable[DataFlow], number: Numbers) -> Iterable[Arc]:
    for flow in flows:
        writer, reader, path = flow.writer, flow.reader, dotted(flow.path)
        wrote = f"{writer.declared.cls.__name__} writes `{path}` at {moment_name((writer.event, writer.phase))}"
        read = f"{reader.declared.cls.__name__} reads it at {moment_name((reader.event, reader.phase))}"
        yield Arc(
            number[writer.event, writer.phase, writer.declared.position],
            number[reader.event, reader.phase, reader.declared.position],
            path,
            (f"{wrote}, {read}",),
            "data",
        )


# -- labels, cycles and implied edges ----------------------------------------------------------


def _label(reasons: Sequence[str]) -> str:
    """Return the reasons of an edge as one word each: the path that is written and read, or the stated order."""
    words = []
    for reason in reasons:
        path = re.search(r" writes `([^`]*)`, .* reads ", reason)
        stated = re.search(r"in_order|runafter|resolveconflict", reason)
        words.append(path[1] if path else stated[0] if stated else reason)
    return _shortened(words)


def _shortened(words: Iterable[str]) -> str:
    each = list(dict.fromkeys(words))
    return each[0] if len(each) == 1 else f"{each[0]} +{len(each) - 1}"


def _successors(pairs: Iterable[Pair]) -> dict[int, list[int]]:
    after: dict[int, list[int]] = {}
    for i, j in pairs:
        after.setdefault(i, []).append(j)
        after.setdefault(j, [])
    return after


def _reached(after: Mapping[int, Sequence[int]], start: int) -> set[int]:
    """Return the nodes that can be reached from a node in at least one step."""
    seen: set[int] = set()
    stack = list(after[start])
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack += after[node]
    return seen


def _in_cycles(pairs: Sequence[Pair]) -> list[Pair]:
    """Return the pairs that are part of a cycle."""
    after = _successors(pairs)
    reached = {node: _reached(after, node) for node in after}
    return [(i, j) for i, j in pairs if i in reached[j]]


def _implied(pairs: Sequence[Pair]) -> list[Pair]:
    """Return the pairs that follow from other pairs through a callback in between, ignoring cycles."""
    after = _successors(pairs)
    reached = {node: _reached(after, node) for node in after}
    return [
        (i, j)
        for i, j in pairs
        if any(j in reached[k] and i not in reached[k] and k not in reached[j] for k in after[i] if k != j)
    ]
