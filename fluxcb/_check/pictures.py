"""The graph as pictures: what boxes and lines show, and in which forms."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from fluxcb._check.graph import CallbackGraph, Conflict, moment_name
from fluxcb._check.shown import ShownMermaid, ShownPage, ShownSvg, ShownText
from fluxcb._declare.access import Access, Append, Permission, Read, dotted, writes
from fluxcb._declare.declared import Declared, Handler, Moment
from fluxcb._declare.events import Event
from fluxcb._declare.phases import Phase
from fluxcb._draw.drawing import Drawing, Link, LinkKind, Node, NodeKind
from fluxcb._draw.notations import to_dot, to_mermaid
from fluxcb._draw.outline import to_text, to_tree
from fluxcb._draw.page import to_page
from fluxcb._draw.svg import to_svg
from fluxcb._errors import DeclarationError, did_you_mean
from fluxcb._typing import StatePath

__all__ = ["drawing", "render"]

Pair = tuple[int, int]


def render(
    graph: CallbackGraph, form: str, *, event: type[Event] | None = None, phase: type[Phase] | None = None
) -> str:
    """Return a graph in one of the forms that `CallbackGraph.render` names.

    Raises:
        DeclarationError: There is no such form.
    """
    if form not in (*_FORMS, "html"):
        raise DeclarationError(
            f"A callback graph has no form {form!r}.{did_you_mean(str(form), [*_FORMS, 'html'])}",
            fix=f"choose one of {', '.join([*_FORMS, 'html'])}",
        )
    everything = event is None and phase is None
    chosen = _chosen(graph, event, phase)
    whole = drawing(graph, None if everything else chosen)
    if form != "html":
        return _SHOWN.get(form, ShownText)(_FORMS[form](whole))
    pages = {} if len(chosen) == 1 else {"All moments" if everything else "All of these moments": whole}
    return ShownPage(to_page(pages | {moment_name(moment): drawing(graph, [moment]) for moment in chosen}))


_FORMS: Mapping[str, Callable[[Drawing], str]] = {
    "tree": to_tree,
    "text": to_text,
    "mermaid": to_mermaid,
    "dot": to_dot,
    "svg": to_svg,
}
_SHOWN: Mapping[str, type[ShownText]] = {"mermaid": ShownMermaid, "svg": ShownSvg}


def _chosen(graph: CallbackGraph, event: type[Event] | None, phase: type[Phase] | None) -> list[Moment]:
    if event is not None and phase is not None:
        graph.handlers(event, phase)  # a moment of classes that nobody asked for yet
    return [m for m in graph.moments if event in (None, m[0]) and phase in (None, m[1])]


def drawing(graph: CallbackGraph, moments: Iterable[Moment] | None = None) -> Drawing:
    """Return what a picture of a graph shows.

    Args:
        graph: The graph; it need not be valid.
        moments: Show these moments only: who runs then, with the access and the order that hold there. None for all,
            with callbacks that run at no moment.
    """
    chosen = graph.moments if moments is None else list(moments)
    handlers: dict[int, list[Handler]] = {}
    for moment in chosen:
        for handler in graph.orders.get(moment, ()):
            handlers.setdefault(handler.declared.position, []).append(handler)
    shown = [d for d in graph.declared if moments is None or d.position in handlers]
    nodes = [_node(graph, d, handlers.get(d.position, []), whole=moments is None) for d in shown]
    links = [*_orders(graph, chosen), *_conflicts(graph.conflicts, set(chosen))]
    title = "Callbacks at all moments" if moments is None else ", ".join(map(moment_name, chosen)) or "No moment"
    problems = tuple(f"{type(problem).__name__}: {problem}" for problem in graph.problems)
    return Drawing(title, tuple(nodes), tuple(links), problems)


def _node(graph: CallbackGraph, d: Declared, handlers: Sequence[Handler], *, whole: bool) -> Node:
    kinds = {handler.traced for handler in handlers}
    kind: NodeKind = "none" if not kinds else "both" if len(kinds) == 2 else "traced" if True in kinds else "host"
    access = d.access if whole else {path: p for handler in handlers for path, p in handler.access.items()}
    reads, written = _access_lines(access)
    doc = (d.cls.__doc__ or "").strip().partition("\n")[0]
    details = [
        ("does", (doc,) if doc else ()),
        ("class", (f"{d.cls.__module__}.{d.cls.__qualname__}",)),
        ("declared", (d.where,)),
        ("reads", reads),
        ("writes", written),
        ("runs", tuple(_runs(graph, handler) for handler in handlers)),
    ]
    return Node(
        str(d.position), d.label, kind, reads, written, tuple((name, lines) for name, lines in details if lines)
    )


def _access_lines(access: Access) -> tuple[tuple[str, ...], tuple[str, ...]]:
    reads = tuple(_access_line(path, p) for path, p in access.items() if not writes(p))
    return reads, tuple(_access_line(path, p) for path, p in access.items() if writes(p))


def _access_line(path: StatePath, permission: Permission) -> str:
    if isinstance(permission, Append):
        return f"{dotted(path)} (append)"
    if isinstance(permission, Read) and permission.previous:
        return f"{dotted(path)} (previous)"
    return dotted(path)


def _runs(graph: CallbackGraph, handler: Handler) -> str:
    order = graph.orders[handler.event, handler.phase]
    place = next(i for i, other in enumerate(order, 1) if other is handler)
    due = f", {' and '.join(map(repr, handler.schedules))}" if handler.schedules else ""
    kind = "traced" if handler.traced else "host"
    return f"{moment_name((handler.event, handler.phase))}: {handler.name} ({kind}, {place} of {len(order)}{due})"


def _orders(graph: CallbackGraph, moments: Sequence[Moment]) -> Iterable[Link]:
    at: dict[Moment, list[Pair]] = {moment: [] for moment in moments}
    for pair, edge in graph.edges.items():
        for moment in edge.moments:
            if moment in at:
                at[moment].append(pair)
    circular = {(moment, pair) for moment, pairs in at.items() for pair in _in_circles(pairs)}
    implied = {(moment, pair) for moment, pairs in at.items() for pair in _implied(pairs)}
    for pair, edge in graph.edges.items():
        shown = {moment: reasons for moment, reasons in edge.at.items() if moment in at}
        if not shown:
            continue
        reasons = tuple(dict.fromkeys(reason for found in shown.values() for reason in found))
        kind: LinkKind = "cycle" if any((moment, pair) in circular for moment in shown) else "order"
        yield Link(
            str(pair[0]),
            str(pair[1]),
            label=_label(reasons),
            reasons=reasons,
            moments=tuple(map(moment_name, shown)),
            kind=kind,
            implied=all((moment, pair) in implied for moment in shown),
        )


def _conflicts(conflicts: Iterable[Conflict], moments: set[Moment]) -> Iterable[Link]:
    for found in conflicts:
        shown = [moment for moment in found.moments if moment in moments]
        if shown:
            paths = [dotted(max(pair, key=len)) for pair in found.shared.both_write] if found.shared else []
            yield Link(
                str(found.a.declared.position),
                str(found.b.declared.position),
                label=_shortened(paths) if paths else "never together",
                reasons=tuple(str(found.error).splitlines()),
                moments=tuple(map(moment_name, shown)),
                kind="conflict",
            )


def _label(reasons: Sequence[str]) -> str:
    """Say an edge's reasons in a word each: the path that one writes and the other reads, or who stated the order."""
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
    """Return what can be reached from a node in at least one step."""
    seen: set[int] = set()
    stack = list(after[start])
    while stack:
        node = stack.pop()
        if node not in seen:
            seen.add(node)
            stack += after[node]
    return seen


def _in_circles(pairs: Sequence[Pair]) -> list[Pair]:
    after = _successors(pairs)
    reached = {node: _reached(after, node) for node in after}
    return [(i, j) for i, j in pairs if i in reached[j]]


def _implied(pairs: Sequence[Pair]) -> list[Pair]:
    """Return the pairs that others already state, by way of a callback in between, circles left aside."""
    after = _successors(pairs)
    reached = {node: _reached(after, node) for node in after}
    return [
        (i, j)
        for i, j in pairs
        if any(j in reached[k] and i not in reached[k] and k not in reached[j] for k in after[i] if k != j)
    ]
