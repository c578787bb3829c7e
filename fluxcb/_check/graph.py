"""The callback graph: per moment one order, and for each edge the reason it is there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fluxcb._check.conflicts import Overlaps, conflict, overlapping_pairs, settle
from fluxcb._declare.access import dotted
from fluxcb._declare.callback import Callback
from fluxcb._declare.declared import Declared, Handler, Moment
from fluxcb._declare.events import BUILTIN_EVENTS, Event, TracedEvent, is_concrete
from fluxcb._declare.phases import Phase
from fluxcb._declare.resolution import resolveconflict
from fluxcb._errors import CheckError, CycleError

if TYPE_CHECKING:
    import networkx as nx

__all__ = ["CallbackGraph", "Edge", "moment_name"]


def moment_name(moment: Moment) -> str:
    """Return `StepEnd x TrainingPhase`."""
    return f"{moment[0].__name__} x {moment[1].__name__}"


@dataclass
class Edge:
    """Why one callback runs before another, and where.

    Attributes:
        reasons: One line each.
        moments: The moments both run at, in loop order.
    """

    reasons: list[str] = field(default_factory=list)
    moments: list[Moment] = field(default_factory=list)

    def add(self, reason: str, moment: Moment) -> None:
        """Note one more reason or moment."""
        if reason not in self.reasons:
            self.reasons.append(reason)
        if moment not in self.moments:
            self.moments.append(moment)


class CallbackGraph:
    """The order of a set of callbacks, derived from what they declare.

    Args:
        declared: The callbacks' declarations.
        ordered: Position pairs `(earlier, later)` stated by `in_order`.
        phases: The phases that will be run.

    Attributes:
        problems: Everything found to be wrong so far; `require()` raises it.
        edges: For position pairs `(earlier, later)`, the edge.
        orders: For each moment that has handlers, these in the order in which they run.
    """

    def __init__(
        self, declared: Sequence[Declared], ordered: Iterable[tuple[int, int]], phases: Sequence[type[Phase]]
    ) -> None:
        self.declared = list(declared)
        self.phases = tuple(dict.fromkeys(phases))
        self.problems: list[CheckError] = []
        self.edges: dict[tuple[int, int], Edge] = {}
        self.orders: dict[Moment, tuple[Handler, ...]] = {}
        self._ordered = set(ordered)
        self._runafter = self._read_runafter()
        self._conflicts: dict[tuple[int, int], tuple[Handler, Handler, Overlaps, list[str]]] = {}
        self._seen_cycles: set[frozenset[int]] = set()
        self._relations: dict[tuple[Any, ...], dict[tuple[int, int], list[str]]] = {}
        self._outspoken = {
            d.position
            for d in self.declared
            if type(d.callback).resolveconflict is not Callback.resolveconflict or resolveconflict.concerns(d.cls)
        }
        for moment in self._moments():
            self._order(moment)
        self._report_conflicts()

    # -- what users ask ---------------------------------------------------------------------

    def order(self, event: type[Event], phase: type[Phase]) -> list[Callback]:
        """Return the callbacks that run at a moment, first to last."""
        return [handler.declared.callback for handler in self.handlers(event, phase)]

    def handlers(self, event: type[Event], phase: type[Phase]) -> tuple[Handler, ...]:
        """Return the handlers of a moment in order, deriving it now for classes not seen at construction.

        Raises:
            CheckError: At this new moment the callbacks conflict.
        """
        moment = (event, phase)
        if moment not in self.orders:
            before = len(self.problems)
            self._order(moment)
            self._report_conflicts()
            if len(self.problems) > before:
                raise CheckError.of(self.problems[before:])
        return self.orders.get(moment, ())

    def require(self) -> None:
        """Raise everything that was found to be wrong.

        Raises:
            CheckError: The one problem, or an error that holds all of them.
        """
        if self.problems:
            raise CheckError.of(self.problems)

    @property
    def digraph(self) -> nx.DiGraph:
        """The graph: nodes are callback labels (attribute `callback`), edges carry `reasons` and `moments`."""
        import networkx as nx

        graph = nx.DiGraph()
        for d in self.declared:
            graph.add_node(d.label, callback=d.callback, position=d.position)
        for (i, j), edge in self.edges.items():
            graph.add_edge(
                self.declared[i].label,
                self.declared[j].label,
                reasons=tuple(edge.reasons),
                moments=tuple(moment_name(m) for m in edge.moments),
            )
        return graph

    def init_order(self) -> list[Declared]:
        """Return the callbacks in the order in which their `init` runs: creators before readers.

        Initialising has no moment of its own, so edges of all moments count; where these form a
        loop, list order decides within it.
        """
        return [self.declared[i] for i in _topological(range(len(self.declared)), self.edges, key=lambda i: (i,))[0]]

    # -- deriving it ------------------------------------------------------------------------

    def _read_runafter(self) -> dict[tuple[int, int], str]:
        found: dict[tuple[int, int], str] = {}
        positions: dict[type, list[int]] = {}
        for d in self.declared:
            for cls in d.cls.__mro__:
                positions.setdefault(cls, []).append(d.position)
        for later in self.declared:
            for cls in later.runafter:
                for earlier in positions.get(cls, ()):
                    if earlier != later.position:
                        found[earlier, later.position] = f"{later.cls.__name__}.runafter names {cls.__name__}"
        return found

    def _moments(self) -> list[Moment]:
        events: dict[type[Event], None] = dict.fromkeys(BUILTIN_EVENTS)
        for d in self.declared:
            events.update((entry.event, None) for entry in d.callback.handlers() if is_concrete(entry.event))
        for phase in self.phases:
            events.update(dict.fromkeys(phase.provides))
        return [(event, phase) for phase in self.phases for event in events]

    def _order(self, moment: Moment) -> None:
        event, phase = moment
        handlers: list[Handler] = []
        for d in self.declared:
            handler = d.handler(event, phase)
            if handler is not None:
                handlers.append(handler)
        if not handlers:
            return
        relations = self._relate(handlers, moment)
        for (i, j), reasons in relations.items():
            edge = self.edges.setdefault((i, j), Edge())
            for reason in reasons:
                edge.add(reason, moment)
        by_position = {h.declared.position: h for h in handlers}
        order, stuck = _topological(by_position, relations, key=_tie_break(by_position, event))
        if stuck:
            self._report_cycle(stuck, relations, moment)
        self.orders[moment] = tuple(by_position[i] for i in order)

    def _relate(self, handlers: Sequence[Handler], moment: Moment) -> dict[tuple[int, int], list[str]]:
        """Return for position pairs `(earlier, later)` of one moment why they are in this order."""
        # Many moments have the same handlers (training and validation); what they share is found once.
        key = tuple((h.declared.position, h.name, tuple(h.access.items())) for h in handlers)
        if key in self._relations:
            for pair in self._conflicts.keys() & {
                (a.declared.position, b.declared.position) for a in handlers for b in handlers
            } if self._conflicts else ():
                self._conflicts[pair][3].append(moment_name(moment))
            return self._relations[key]
        positions = [h.declared.position for h in handlers]
        present = set(positions)
        relations: dict[tuple[int, int], list[str]] = {}
        stated = {pair: "in_order" for pair in self._ordered}
        stated = {**self._runafter, **stated}
        for (i, j), reason in stated.items():
            if i in present and j in present:
                relations.setdefault((i, j), []).append(reason)
        overlaps = overlapping_pairs(handlers)
        at = {position: index for index, position in enumerate(positions)}
        candidates = dict.fromkeys(overlaps)
        for i in self._outspoken & present:  # those may have something to say about anybody
            candidates.update(dict.fromkeys((min(at[i], k), max(at[i], k)) for k in range(len(handlers)) if k != at[i]))
        for a, b in candidates:
            self._relate_pair(handlers[a], handlers[b], overlaps.get((a, b)), relations, moment)
        self._relations[key] = relations
        return relations

    def _relate_pair(
        self,
        a: Handler,
        b: Handler,
        shared: Overlaps | None,
        relations: dict[tuple[int, int], list[str]],
        moment: Moment,
    ) -> None:
        i, j = a.declared.position, b.declared.position
        forward, backward = (i, j), (j, i)
        try:
            settlement = settle(a.declared, b.declared)
        except CheckError as error:
            if str(error) not in {str(p) for p in self.problems}:
                self.problems.append(error)
            return
        if settlement.first in ("a", "b"):
            relations.setdefault(forward if settlement.first == "a" else backward, []).append(settlement.reason)
        if shared is None or settlement.first == "any":
            return
        known = forward in relations or backward in relations
        if shared.both_write and not known:
            entry = self._conflicts.setdefault(forward, (a, b, shared, []))
            entry[3].append(moment_name(moment))
            return
        if known:  # what is stated outweighs what is derived from reads and writes
            return
        for pair, paths, writer, reader in (
            (forward, shared.a_before_b, a, b),
            (backward, shared.b_before_a, b, a),
        ):
            for written, read in paths:
                path = dotted(read if len(read) >= len(written) else written)
                reason = f"{writer.declared.cls.__name__} writes `{path}`, {reader.declared.cls.__name__} reads it"
                relations.setdefault(pair, []).append(reason)

    # -- telling what is wrong --------------------------------------------------------------

    def _report_conflicts(self) -> None:
        for a, b, shared, moments in self._conflicts.values():
            self.problems.append(conflict(a, b, shared, list(dict.fromkeys(moments))))
        self._conflicts.clear()

    def _report_cycle(self, stuck: set[int], relations: dict[tuple[int, int], list[str]], moment: Moment) -> None:
        import networkx as nx

        graph = nx.DiGraph((i, j) for i, j in sorted(relations) if i in stuck and j in stuck)
        loop = [edge[:2] for edge in nx.find_cycle(graph)]
        members = frozenset(i for i, _ in loop)
        if members in self._seen_cycles:
            return
        self._seen_cycles.add(members)
        start = min(range(len(loop)), key=lambda k: loop[k][0])
        loop = loop[start:] + loop[:start]
        names = [self.declared[i].label for i, _ in loop]
        self.problems.append(
            CycleError(
                f"{len(names)} callbacks must each run before the next, in a circle: {' -> '.join([*names, names[0]])}.",
                where=[
                    f"{self.declared[i].label} -> {self.declared[j].label}: {'; '.join(relations[i, j])}" for i, j in loop
                ],
                why=f"at {moment_name(moment)} no order satisfies all of these",
                fix=[
                    "declare `Read(previous=True)` in the reader that may see what an earlier moment left",
                    "narrow a handler's access with `@on(..., access={...})` to what it really touches",
                    "state the order of one pair with `in_order`, `runafter` or `resolveconflict`",
                ],
            )
        )


def _tie_break(handlers: dict[int, Handler], event: type[Event]) -> Any:
    if issubclass(event, TracedEvent):  # not the list position: a shuffled list compiles the same program
        return lambda i: (f"{handlers[i].declared.cls.__module__}.{handlers[i].declared.cls.__qualname__}", i)
    return lambda i: (i,)


def _topological(
    nodes: Iterable[int], edges: Iterable[tuple[int, int]], *, key: Any
) -> tuple[list[int], set[int]]:
    """Sort topologically, ties by key.

    Returns:
        The order, and the nodes that are stuck behind a cycle; the order holds these too, by key.
    """
    import heapq

    nodes = list(nodes)
    present = set(nodes)
    after: dict[int, list[int]] = {i: [] for i in nodes}
    waiting = dict.fromkeys(nodes, 0)
    for i, j in edges:
        if i in present and j in present:
            after[i].append(j)
            waiting[j] += 1
    heap = [(key(i), i) for i in nodes if waiting[i] == 0]
    heapq.heapify(heap)
    order: list[int] = []
    stuck: set[int] = set()
    placed: set[int] = set()
    while len(order) < len(nodes):
        if not heap:  # a cycle: go on with the first of those left, so that an order exists to show
            left = [i for i in nodes if i not in placed]
            stuck |= set(left)
            first = min(left, key=key)
            waiting[first] = 0
            heapq.heappush(heap, (key(first), first))
        _, i = heapq.heappop(heap)
        if i in placed:
            continue
        placed.add(i)
        order.append(i)
        for j in after[i]:
            waiting[j] -= 1
            if waiting[j] == 0:
                heapq.heappush(heap, (key(j), j))
    return order, stuck
