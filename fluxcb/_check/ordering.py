"""The order of a set of callbacks at each moment, with a reason for each edge."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from fluxcb._check.conflict_errors import conflict, contradictory_copies
from fluxcb._check.conflicts import Overlaps, Settlement, overlapping_pairs, settle
from fluxcb._check.cycles import cycle
from fluxcb._declare.access import dotted
from fluxcb._declare.callback import Callback
from fluxcb._declare.declared import BoundHandler, Declared, Moment
from fluxcb._declare.events import BUILTIN_EVENTS, Event, TracedEvent, is_concrete
from fluxcb._declare.phases import Phase
from fluxcb._declare.resolution import resolveconflict
from fluxcb._declare.signatures import current_definition
from fluxcb._declare.state import emits
from fluxcb._errors import CheckError

__all__ = ["Conflict", "Edge", "Ordering", "moment_name"]


def moment_name(moment: Moment) -> str:
    """Return `StepEnd x TrainingPhase`."""
    return f"{moment[0].__name__} x {moment[1].__name__}"


@dataclass
class Edge:
    """The reasons why one callback runs before another.

    Attributes:
        at: For each moment at which both run, in loop order, the reasons at this moment, one line each.
    """

    at: dict[Moment, list[str]] = field(default_factory=dict)

    @property
    def reasons(self) -> list[str]:
        """All reasons, without repetitions."""
        return list(dict.fromkeys(reason for reasons in self.at.values() for reason in reasons))

    @property
    def moments(self) -> list[Moment]:
        """The moments at which both run, in loop order."""
        return list(self.at)


Relations = dict[tuple[int, int], list[str]]
"""For position pairs `(earlier, later)` of one moment, the reasons for this order."""


@dataclass
class Conflict:
    """Two callbacks that cannot both run as they are.

    Attributes:
        a: A handler of the callback that is earlier in the list.
        b: A handler of the other callback.
        shared: The state that both write without a known order, or None if they may never run together.
        moments: The moments at which both run.
        error: The error that was, or will be, raised.
    """

    a: BoundHandler
    b: BoundHandler
    shared: Overlaps | None
    moments: list[Moment] = field(default_factory=list)
    error: CheckError | None = None


class Ordering:
    """The order of a set of callbacks, derived from their declarations.

    Args:
        declared: The callbacks' declarations.
        ordered: Position pairs `(earlier, later)` stated by `in_order`.
        phases: The phases that will be run.

    Attributes:
        problems: All problems that were found so far. `require()` raises them.
        edges: For position pairs `(earlier, later)`, the edge.
        conflicts: The pairs that conflict. They remain after the problems were raised.
        orders: For each moment that has handlers, the handlers in order.
    """

    def __init__(
        self, declared: Sequence[Declared], ordered: Iterable[tuple[int, int]], phases: Sequence[type[Phase]]
    ) -> None:
        self.declared = list(declared)
        self.phases = tuple(dict.fromkeys(phases))
        self.problems: list[CheckError] = []
        self.edges: dict[tuple[int, int], Edge] = {}
        self.orders: dict[Moment, tuple[BoundHandler, ...]] = {}
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

    def handlers(self, event: type[Event], phase: type[Phase]) -> tuple[BoundHandler, ...]:
        """Return the handlers of a moment in order. The order is derived now if the moment is new.

        Raises:
            CheckError: The callbacks conflict at the new moment.
        """
        moment = (event, phase)
        if moment not in self.orders:
            before, known = len(self.problems), len(self.conflicts)
            self._order(moment)
            self._report_conflicts()
            found = self.problems[before:]
            if found:  # later calls raise the same error again
                self._forget(moment)
                del self.problems[before:], self.conflicts[known:]
                raise CheckError.of(found)
        return self.orders.get(moment, ())

    @property
    def moments(self) -> list[Moment]:
        """The moments at which a handler runs: phase by phase, in loop order."""
        position = {event: i for i, event in enumerate(BUILTIN_EVENTS)}
        phases = {phase: i for i, phase in enumerate(self.phases)}
        return sorted(
            self.orders, key=lambda m: (phases.get(m[1], len(phases)), position.get(m[0], len(position)), m[0].__name__)
        )

    def ineffective_orders(self) -> list[tuple[Declared, list[Declared]]]:
        """Return the callbacks that `in_order` orders, but that never run at the same moment as any of the others.

        Each comes with these others. If both of a pair are such callbacks, only the first one is listed. `in_order`
        also orders calls of `init`, so pairs of callbacks that both define `init` are left out.
        """
        own_init = {d.position for d in self.declared if d.cls.init is not Callback.init}
        # Sets can have hundreds of thousands of pairs, so each pair is looked at only once or twice.
        effective = {i for pair in self._ordered if pair in self.edges or own_init.issuperset(pair) for i in pair}
        partners: dict[int, list[int]] = {}
        for i, j in sorted(pair for pair in self._ordered if not effective.issuperset(pair)):
            for one, other in ((i, j), (j, i)):
                if one not in effective and self.declared[one].handlers and self.declared[other].handlers:
                    partners.setdefault(one, []).append(other)
        found: list[tuple[Declared, list[Declared]]] = []
        listed: set[int] = set()
        for one, others in sorted(partners.items()):
            if not listed.intersection(others):
                listed.add(one)
                found.append((self.declared[one], [self.declared[i] for i in others]))
        return found

    def require(self) -> None:
        """Raise all problems that were found.

        Raises:
            CheckError: The only problem, or an error that holds all problems.
        """
        if self.problems:
            raise CheckError.of(self.problems)

    def init_order(self) -> list[Declared]:
        """Return the callbacks in the order in which their `init` runs: creators before readers.

        `init` is not part of a moment, so the edges of all moments count, and callbacks that create shared
        state come before callbacks that read it, even if they share no moment. Within a cycle, the order of the list
        decides.
        """
        before = {*self._runafter, *self._ordered, *self.edges}
        for (i, j), shared in overlapping_pairs(self.declared).items():
            for pair, paths in (((i, j), shared.a_before_b), ((j, i), shared.b_before_a)):
                if any(written[0] == "cbstate" for written, _ in paths) and pair[::-1] not in before:
                    before.add(pair)
        return [self.declared[i] for i in _topological(range(len(self.declared)), before, key=lambda i: (i,))[0]]

    # -- deriving the order -----------------------------------------------------------------

    def _read_runafter(self) -> dict[tuple[int, int], str]:
        found: dict[tuple[int, int], str] = {}
        if not any(d.runafter for d in self.declared):
            return found
        positions: dict[type, list[int]] = {}
        for d in self.declared:
            for cls in d.cls.__mro__:
                positions.setdefault(current_definition(cls), []).append(d.position)
        for later in self.declared:
            for cls in later.runafter:
                for earlier in positions.get(current_definition(cls), ()):
                    if earlier != later.position:
                        found[earlier, later.position] = f"{later.cls.__name__}.runafter names {cls.__name__}"
        return found

    def _moments(self) -> list[Moment]:
        events: dict[type[Event], None] = dict.fromkeys(BUILTIN_EVENTS)
        for d in self.declared:
            events.update((entry.event, None) for entry in d.handlers if is_concrete(entry.event))
        for phase in self.phases:
            events.update(dict.fromkeys(phase.provides))
        return [(event, phase) for phase in self.phases for event in events if emits(event, phase)]

    def _order(self, moment: Moment) -> None:
        event, phase = moment
        # Most callbacks are instances of a few classes, and have handlers at a few moments.
        fits: dict[frozenset[tuple[type[Event], type[Phase]]], bool] = {}
        handlers: list[BoundHandler] = []
        for d in self.declared:
            if d.pairs not in fits:
                fits[d.pairs] = any(issubclass(event, of) and issubclass(phase, during) for of, during in d.pairs)
            if fits[d.pairs] and (handler := d.handler(event, phase)) is not None:
                handlers.append(handler)
        if not handlers:
            return
        relations = self._relate(handlers, moment)
        for pair, reasons in relations.items():
            self.edges.setdefault(pair, Edge()).at[moment] = reasons
        by_position = {h.declared.position: h for h in handlers}
        order, loops = _topological(by_position, relations, key=_tie_break(by_position, event))
        for members in loops:
            self._report_cycle(members, relations, moment)
        self.orders[moment] = tuple(by_position[i] for i in order)

    def _relate(self, handlers: Sequence[BoundHandler], moment: Moment) -> Relations:
        # Many moments have the same handlers (training and validation), so their overlaps are computed only once.
        key = tuple((h.declared.position, tuple(h.access.items())) for h in handlers)
        if key not in self._related:
            self._related[key] = self._relate_anew(handlers)
        relations, conflicts = self._related[key]
        for found in conflicts:
            found.moments.append(moment)
        return relations

    def _relate_anew(self, handlers: Sequence[BoundHandler]) -> tuple[Relations, list[Conflict]]:
        at = {handler.declared.position: index for index, handler in enumerate(handlers)}
        relations: Relations = {}
        for (i, j), reason in [*self._runafter.items(), *((pair, "in_order") for pair in self._ordered)]:
            if i in at and j in at:
                relations.setdefault((i, j), []).append(reason)
        # Callbacks that never run at the same moment are not compared, because their orders could form a false cycle.
        overlaps = overlapping_pairs(handlers)
        candidates = dict.fromkeys(overlaps)
        for k in (at[i] for i in self._outspoken & at.keys()):  # these may resolve conflicts with any callback
            candidates.update(dict.fromkeys((min(k, m), max(k, m)) for m in range(len(handlers)) if m != k))
        clashes: dict[tuple[int, int], Conflict] = {}
        free: list[tuple[int, int]] = []
        for a, b in sorted(candidates):
            answer = self._resolve(handlers[a], handlers[b], relations)
            if isinstance(answer, Conflict):
                clashes[a, b] = answer
            elif answer.first is None and (a, b) in overlaps:
                free.append((a, b))
        after = _reachable(relations)
        for a, b in free:
            clash = self._relate_pair(handlers[a], handlers[b], overlaps[a, b], relations, after)
            if clash is not None:
                clashes[a, b] = clash
        return relations, [self._known(clashes[pair]) for pair in sorted(clashes)]

    def _known(self, clash: Conflict) -> Conflict:
        for known in self.conflicts:  # the same conflict at another moment, with other handlers around it
            same = known.a.declared is clash.a.declared and known.b.declared is clash.b.declared
            if same and known.shared == clash.shared:
                return known
        self.conflicts.append(clash)
        return clash

    def _resolve(self, a: BoundHandler, b: BoundHandler, relations: Relations) -> Settlement | Conflict:
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
        self, a: BoundHandler, b: BoundHandler, shared: Overlaps, relations: Relations, after: dict[int, int]
    ) -> Conflict | None:
        """Record the order of a pair that follows from its reads and writes; return a conflict if there is none.

        Args:
            a: The handler of the callback that is earlier in the list.
            b: The handler of the other callback.
            shared: The state that both access.
            relations: Receives the order.
            after: For each position, the positions that are stated to come after it, directly or through others; see
                `_reachable`.
        """
        forward = a.declared.position, b.declared.position
        backward = b.declared.position, a.declared.position
        # A stated order overrides an order that is derived from the reads and writes of the same pair.
        if forward in relations or backward in relations:
            return None
        # Only stated orders settle a conflict, also through other callbacks: A before B and B before C settle a
        # conflict of A and C. A derived order shows which callback needs a value, but not which of two writes should
        # remain. If it settled conflicts, a change of a `Read()` could silently change the result.
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

    # -- reporting problems -----------------------------------------------------------------

    def _report_conflicts(self) -> None:
        new = [(found, found.shared) for found in self.conflicts if found.error is None and found.shared is not None]
        copies = contradictory_copies(self.declared, self._ordered) if new else []
        reported: set[int] = set()
        for found, shared in new:
            pair = {found.a.declared.position, found.b.declared.position}
            # One error for all conflicts of a contradiction.
            error = next((error for positions, error in copies if pair <= positions), None)
            found.error = error or conflict(found.a, found.b, shared, [moment_name(m) for m in found.moments])
            if id(found.error) not in reported:
                reported.add(id(found.error))
                self.problems.append(found.error)

    def _report_cycle(self, members: set[int], relations: Relations, moment: Moment) -> None:
        import networkx as nx

        graph = nx.DiGraph((i, j) for i, j in sorted(relations) if i in members and j in members)
        # Report the shortest cycle. Among several, report the one that starts first in the list.
        loops = [[i, *nx.shortest_path(graph, j, i)] for i, j in graph.edges]
        nodes = min(loops, key=lambda nodes: (len(nodes), nodes))
        if frozenset(nodes) in self._seen_cycles:
            return
        self._seen_cycles.add(frozenset(nodes))
        found = cycle(nodes, self.declared, relations, self._ordered, self._runafter, moment_name(moment))
        self.problems.append(found)


def _tie_break(handlers: dict[int, BoundHandler], event: type[Event]) -> Any:
    if issubclass(event, TracedEvent):
        # Independent of the list, so that a shuffled list compiles the same program. The module comes after the name,
        # because it is `__main__` in a script and a notebook, and another one if the same file is imported.
        def by_name(i: int) -> tuple[str, str, str, int]:
            cls = handlers[i].declared.cls
            return cls.__name__, cls.__module__, cls.__qualname__, i

        return by_name
    # Handlers that may cancel come last among handlers without an order, because a cancel skips the rest of the moment.
    # Which steps are counted must not depend on the list.
    return lambda i: (("control",) in handlers[i].access, i)


# -- sorting ---------------------------------------------------------------------------------------


def _topological(
    nodes: Iterable[int], edges: Iterable[tuple[int, int]], *, key: Any
) -> tuple[list[int], list[set[int]]]:
    """Sort nodes topologically, with ties broken by key.

    Returns:
        The order, and the members of each cycle. The order includes the members of cycles, sorted by key.
    """
    waiting = dict.fromkeys(nodes, 0)
    after: dict[int, list[int]] = {i: [] for i in waiting}
    for i, j in edges:
        if i in waiting and j in waiting:
            after[i].append(j)
            waiting[j] += 1
    heap = [(key(i), i) for i, number in waiting.items() if number == 0]
    heapq.heapify(heap)
    order: list[int] = []
    loops: list[set[int]] = []
    while waiting:
        if not heap:
            looping = _first_loops(waiting, after)
            loops += [members for members in looping if not any(members <= known for known in loops)]
            first = min((i for members in looping for i in members), key=key)
            heap.append((key(first), first))
        _, i = heapq.heappop(heap)
        order.append(i)
        del waiting[i]
        for j in after[i]:
            if j in waiting:
                waiting[j] -= 1
                if waiting[j] == 0:
                    heapq.heappush(heap, (key(j), j))
    return order, sorted(loops, key=min)


def _reachable(edges: Iterable[tuple[int, int]]) -> dict[int, int]:
    """Return the nodes that can be reached from the start of each edge, as the bits of an integer."""
    after: dict[int, list[int]] = {}
    for i, j in edges:
        after.setdefault(i, []).append(j)
    reached = dict.fromkeys(after, 0)
    if not after:
        return reached
    backwards = _topological(after, edges, key=lambda i: i)[0][::-1]
    changed = True
    while changed:  # runs twice if there is no cycle
        changed = False
        for i in backwards:
            now = reached[i]
            for j in after[i]:
                now |= 1 << j | reached.get(j, 0)
            changed |= now != reached[i]
            reached[i] = now
    return reached


def _first_loops(left: Iterable[int], after: dict[int, list[int]]) -> list[set[int]]:
    """Return the members of the cycles that depend only on themselves, among the remaining nodes."""
    import networkx as nx

    left = set(left)
    graph = nx.DiGraph((i, j) for i in left for j in after[i] if j in left)
    return [c for c in nx.strongly_connected_components(graph) if all(i in c for j in c for i in graph.predecessors(j))]
