"""The callback graph: per moment one order, and for each edge the reason it is there."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from fluxcb._check.conflicts import Overlaps, Settlement, conflict, overlapping_pairs, settle
from fluxcb._check.cycles import cycle
from fluxcb._check.shown import ShownText
from fluxcb._check.sorting import reachable, topological
from fluxcb._declare.access import dotted
from fluxcb._declare.callback import Callback
from fluxcb._declare.declared import Declared, Handler, Moment
from fluxcb._declare.events import BUILTIN_EVENTS, Event, TracedEvent, is_concrete
from fluxcb._declare.phases import Phase
from fluxcb._declare.resolution import resolveconflict
from fluxcb._declare.state import emits
from fluxcb._errors import CheckError

if TYPE_CHECKING:
    import networkx as nx

__all__ = ["CallbackGraph", "Conflict", "Edge", "moment_name"]


def moment_name(moment: Moment) -> str:
    """Return `StepEnd x TrainingPhase`."""
    return f"{moment[0].__name__} x {moment[1].__name__}"


@dataclass
class Edge:
    """Why one callback runs before another, and where.

    Attributes:
        at: For each moment at which both run, in loop order, the reasons that hold there, one line each.
    """

    at: dict[Moment, list[str]] = field(default_factory=dict)

    @property
    def reasons(self) -> list[str]:
        """All reasons, each once."""
        return list(dict.fromkeys(reason for reasons in self.at.values() for reason in reasons))

    @property
    def moments(self) -> list[Moment]:
        """The moments both run at, in loop order."""
        return list(self.at)


Relations = dict[tuple[int, int], list[str]]
"""For position pairs `(earlier, later)` of one moment, why they are in this order."""


@dataclass
class Conflict:
    """Two callbacks that cannot both run as they are.

    Attributes:
        a: A handler of the one that stands earlier in the list.
        b: A handler of the other.
        shared: What they share where both write and nobody knows an order; None if they may never meet.
        moments: The moments at which both run.
        error: What was, or will be, raised.
    """

    a: Handler
    b: Handler
    shared: Overlaps | None
    moments: list[Moment] = field(default_factory=list)
    error: CheckError | None = None


class CallbackGraph:
    """The order of a set of callbacks, derived from what they declare.

    Args:
        declared: The callbacks' declarations.
        ordered: Position pairs `(earlier, later)` stated by `in_order`.
        phases: The phases that will be run.

    Attributes:
        problems: Everything found to be wrong so far; `require()` raises it.
        edges: For position pairs `(earlier, later)`, the edge.
        conflicts: The pairs that are in conflict, also after the problems were raised.
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
        self.conflicts: list[Conflict] = []
        self._seen_cycles: set[frozenset[int]] = set()
        self._related: dict[tuple[Any, ...], tuple[Relations, list[Conflict]]] = {}
        self._outspoken = {
            d.position
            for d in self.declared
            if d.cls.resolveconflict is not Callback.resolveconflict or resolveconflict.concerns(d.cls)
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
            before, known = len(self.problems), len(self.conflicts)
            self._order(moment)
            self._report_conflicts()
            found = self.problems[before:]
            if found:  # asked again, it says the same again
                self._forget(moment)
                del self.problems[before:], self.conflicts[known:]
                raise CheckError.of(found)
        return self.orders.get(moment, ())

    @property
    def moments(self) -> list[Moment]:
        """The moments at which somebody runs: phase by phase, in loop order."""
        position = {event: i for i, event in enumerate(BUILTIN_EVENTS)}
        phases = {phase: i for i, phase in enumerate(self.phases)}
        return sorted(
            self.orders, key=lambda m: (phases.get(m[1], len(phases)), position.get(m[0], len(position)), m[0].__name__)
        )

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, CallbackGraph):
            return NotImplemented
        from fluxcb._check.comparing import differences

        return not differences(self, other)

    __hash__ = None  # pyright: ignore[reportAssignmentType]  # it changes: new moments may be asked for

    def explain(self) -> str:
        """Return a text that lists the handlers of each moment in order, with the reason for each position."""
        from fluxcb._check.render import explain

        return ShownText(explain(self))

    def render(self, form: str = "tree", *, event: type[Event] | None = None, phase: type[Phase] | None = None) -> str:
        """Return the graph as a picture, or as text; it need not be valid.

        Args:
            form: `tree` (text in stages, with reasons), `text` (the same for every order of the list, for snapshots),
                `mermaid`, `dot` (Graphviz), `svg`, or `html` (a page with a picture per moment, and details on click).
            event: Show only moments of this event.
            phase: Show only moments of this phase.

        Raises:
            DeclarationError: There is no such form.
        """
        from fluxcb._check.pictures import render

        return render(self, form, event=event, phase=phase)

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """Return what notebooks show."""
        forms = {"text/plain": "tree", "image/svg+xml": "svg", "text/vnd.mermaid": "mermaid"}
        return {kind: self.render(form) for kind, form in forms.items()}

    def __str__(self) -> str:
        from fluxcb._check.render import summary

        return summary(self)

    def __repr__(self) -> str:
        from fluxcb._check.render import counts

        return f"<CallbackGraph: {counts(self)}>"

    def require(self) -> None:
        """Raise everything that was found to be wrong.

        Raises:
            CheckError: The one problem, or an error that holds all of them.
        """
        if self.problems:
            raise CheckError.of(self.problems)

    @property
    def digraph(self) -> nx.DiGraph:
        """The graph for networkx, which notebooks display as a picture.

        Nodes are callback labels with the attribute `callback`. Edges have the attributes `reasons` and `moments`.
        """
        from fluxcb._check.digraph import to_digraph

        return to_digraph(self)

    def init_order(self) -> list[Declared]:
        """Return the callbacks in the order in which their `init` runs: creators before readers.

        Initialising has no moment of its own, so edges of all moments count, and creators of shared
        state come before readers that they meet at no moment; where these form a loop, list order
        decides within it.
        """
        before = {*self._runafter, *self._ordered, *self.edges}
        for (i, j), shared in overlapping_pairs(self.declared).items():
            for pair, paths in (((i, j), shared.a_before_b), ((j, i), shared.b_before_a)):
                if any(written[0] == "cbstate" for written, _ in paths) and pair[::-1] not in before:
                    before.add(pair)
        return [self.declared[i] for i in topological(range(len(self.declared)), before, key=lambda i: (i,))[0]]

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
        return [(event, phase) for phase in self.phases for event in events if emits(event, phase)]

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
        for pair, reasons in relations.items():
            self.edges.setdefault(pair, Edge()).at[moment] = reasons
        by_position = {h.declared.position: h for h in handlers}
        order, loops = topological(by_position, relations, key=_tie_break(by_position, event))
        for members in loops:
            self._report_cycle(members, relations, moment)
        self.orders[moment] = tuple(by_position[i] for i in order)

    def _relate(self, handlers: Sequence[Handler], moment: Moment) -> Relations:
        # Many moments have the same handlers (training and validation); what they share is found once.
        key = tuple((h.declared.position, tuple(h.access.items())) for h in handlers)
        if key not in self._related:
            self._related[key] = self._relate_anew(handlers)
        relations, conflicts = self._related[key]
        for found in conflicts:
            found.moments.append(moment)
        return relations

    def _relate_anew(self, handlers: Sequence[Handler]) -> tuple[Relations, list[Conflict]]:
        at = {handler.declared.position: index for index, handler in enumerate(handlers)}
        relations: Relations = {}
        for (i, j), reason in [*self._runafter.items(), *((pair, "in_order") for pair in self._ordered)]:
            if i in at and j in at:
                relations.setdefault((i, j), []).append(reason)
        overlaps = overlapping_pairs(handlers)
        candidates = dict.fromkeys(overlaps)
        for k in (at[i] for i in self._outspoken & at.keys()):  # those may have something to say about anybody
            candidates.update(dict.fromkeys((min(k, m), max(k, m)) for m in range(len(handlers)) if m != k))
        clashes: dict[tuple[int, int], Conflict] = {}
        free: list[tuple[int, int]] = []
        for a, b in sorted(candidates):
            answer = self._resolve(handlers[a], handlers[b], relations)
            if isinstance(answer, Conflict):
                clashes[a, b] = answer
            elif answer.first is None and (a, b) in overlaps:
                free.append((a, b))
        after = reachable(relations)
        for a, b in free:
            clash = self._relate_pair(handlers[a], handlers[b], overlaps[a, b], relations, after)
            if clash is not None:
                clashes[a, b] = clash
        return relations, [self._known(clashes[pair]) for pair in sorted(clashes)]

    def _known(self, clash: Conflict) -> Conflict:
        for known in self.conflicts:  # found at another moment, beside other handlers
            same = known.a.declared is clash.a.declared and known.b.declared is clash.b.declared
            if same and known.shared == clash.shared:
                return known
        self.conflicts.append(clash)
        return clash

    def _resolve(self, a: Handler, b: Handler, relations: Relations) -> Settlement | Conflict:
        """Record the order that both callbacks and the registry state for a pair.

        Return the order, or the conflict if they disagree.
        """
        i, j = a.declared.position, b.declared.position
        try:
            settlement = settle(a.declared, b.declared)
        except CheckError as error:
            if str(error) not in map(str, self.problems):
                self.problems.append(error)
            return Conflict(a, b, None, error=error)
        if settlement.first in ("a", "b"):
            relations.setdefault((i, j) if settlement.first == "a" else (j, i), []).append(settlement.reason)
        return settlement

    def _relate_pair(
        self, a: Handler, b: Handler, shared: Overlaps, relations: Relations, after: dict[int, int]
    ) -> Conflict | None:
        """Record the order of a pair that follows from its reads and writes; return a conflict if there is none.

        Args:
            a: The handler of the callback that is earlier in the list.
            b: The handler of the other callback.
            shared: The state that both access.
            relations: Receives the order.
            after: For each position, the positions that are stated to come after it, directly or through others; see
                `reachable`.
        """
        forward = a.declared.position, b.declared.position
        backward = b.declared.position, a.declared.position
        # What is stated outweighs what is derived from reads and writes.
        if forward in relations or backward in relations:
            return None
        # Only stated orders settle a conflict. If one callback reads what the other one computes, their order is known,
        # but not which of their writes to some other path should remain.
        if shared.both_write and not any(after.get(i, 0) >> j & 1 for i, j in (forward, backward)):
            return Conflict(a, b, shared)
        for pair, paths, writer, reader in (
            (forward, shared.a_before_b, a, b),
            (backward, shared.b_before_a, b, a),
        ):
            for written, read in paths:
                nested = written == read[: len(written)] or read == written[: len(read)]
                what = dotted(max(written, read, key=len) if nested else written)
                seen = "it" if nested else f"`{dotted(read)}`"  # an alias, or `*`
                reason = f"{writer.declared.cls.__name__} writes `{what}`, {reader.declared.cls.__name__} reads {seen}"
                reasons = relations.setdefault(pair, [])
                if reason not in reasons:
                    reasons.append(reason)
        return None

    def _forget(self, moment: Moment) -> None:
        del self.orders[moment]
        for edge in self.edges.values():
            edge.at.pop(moment, None)
        self.edges = {pair: edge for pair, edge in self.edges.items() if edge.at}
        self._seen_cycles.clear()
        self._related.clear()

    # -- telling what is wrong --------------------------------------------------------------

    def _report_conflicts(self) -> None:
        for found in self.conflicts:
            if found.error is None and found.shared is not None:
                found.error = conflict(found.a, found.b, found.shared, [moment_name(m) for m in found.moments])
                self.problems.append(found.error)

    def _report_cycle(self, members: set[int], relations: Relations, moment: Moment) -> None:
        import networkx as nx

        graph = nx.DiGraph((i, j) for i, j in sorted(relations) if i in members and j in members)
        # The shortest loop says most; of these, the one that starts first in the list.
        loops = [[i, *nx.shortest_path(graph, j, i)] for i, j in graph.edges]
        nodes = min(loops, key=lambda nodes: (len(nodes), nodes))
        if frozenset(nodes) in self._seen_cycles:
            return
        self._seen_cycles.add(frozenset(nodes))
        found = cycle(nodes, self.declared, relations, self._ordered, self._runafter, moment_name(moment))
        self.problems.append(found)


def _tie_break(handlers: dict[int, Handler], event: type[Event]) -> Any:
    if issubclass(event, TracedEvent):  # not the list position: a shuffled list compiles the same program
        return lambda i: (f"{handlers[i].declared.cls.__module__}.{handlers[i].declared.cls.__qualname__}", i)
    # Who may cancel comes last: a cancel skips the rest of the moment, which then is nobody.
    return lambda i: (("control",) in handlers[i].access, i)
