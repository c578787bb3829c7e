"""The error for a cycle: its edges with their reasons, and the edits that break it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from fluxcb._check.conflict_errors import DELETE_ONE, contradictory_orders, ordering
from fluxcb._declare.declared import Declared
from fluxcb._declare.phases import BUILTIN_PHASES
from fluxcb._declare.state import ENGINE_STEP_NAMES, step_names
from fluxcb._errors import CycleError

__all__ = ["cycle"]

Pair = tuple[int, int]

SHOWN = 2
"""How many `in_order` lines a message suggests at most."""


def cycle(
    nodes: Sequence[int],
    declared: Sequence[Declared],
    relations: Mapping[Pair, Sequence[str]],
    ordered: Collection[Pair],
    runafter: Mapping[Pair, str],
    moment: str,
) -> CycleError:
    """Return the error for a cycle.

    Args:
        nodes: The positions of its callbacks, in order. The first position is repeated at the end.
        declared: All callbacks.
        relations: For each pair `(earlier, later)` of the moment, the reasons for that order.
        ordered: The pairs that `in_order` states.
        runafter: The pairs that `runafter` states, each with its reason.
        moment: The moment.
    """
    edges = list(itertools.pairwise(nodes))
    labels = [declared[i].label for i in nodes]
    if len(edges) == 2 and all(list(relations[pair]) == ["in_order"] for pair in edges):
        return CycleError(
            contradictory_orders(labels[0], labels[1]),
            why=f"at {moment}, no order satisfies both",
            fix=DELETE_ONE,
        )
    fixes = _Fixes(declared, relations, ordered, runafter)
    return CycleError(
        f"{len(edges)} callbacks form a cycle: {' -> '.join(labels)}.",
        where=[f"{declared[i].label} -> {declared[j].label}: {'; '.join(relations[i, j])}" for i, j in edges],
        why=f"at {moment}, no order satisfies all of these",
        fix=list(dict.fromkeys([*fixes.in_the_list(edges), *fixes.in_classes(edges)])),
    )


class _Fixes:
    """The edits that break a cycle; the arguments are those of `cycle`."""

    def __init__(
        self,
        declared: Sequence[Declared],
        relations: Mapping[Pair, Sequence[str]],
        ordered: Collection[Pair],
        runafter: Mapping[Pair, str],
    ) -> None:
        self._declared = declared
        self._relations = relations
        self._ordered = set(ordered)
        self._runafter = runafter

    def in_the_list(self, edges: Sequence[Pair]) -> list[str]:
        """Return the edits of the callbacks list, which are possible even if the user did not write the callbacks."""
        reversed_ = [(j, i) for i, j in edges if self._may_be_reversed((i, j))]
        left = {pair: self._cycles_with(pair) for pair in reversed_}
        best = sorted(pair for pair in reversed_ if left[pair] == min(left.values()))
        best.sort(key=lambda pair: pair[0] > pair[1])  # first the pairs that keep the order of the list
        lines = list(dict.fromkeys(ordering(self._declared[i], self._declared[j]) for i, j in best[:SHOWN]))
        # If `runafter` states the same order, the cycle would remain.
        return lines + [self._swapping(*pair) for pair in edges if pair in self._ordered - self._runafter.keys()]

    def in_classes(self, edges: Sequence[Pair]) -> Iterator[str]:
        """Iterate over the edits of the user's own classes."""
        for pair in edges:
            if pair in self._runafter and pair not in self._ordered and self._is_users(pair[1]):
                named = self._runafter[pair].rpartition(" ")[2]
                yield f"remove `{named}` from `{self._class(pair[1])}.runafter()`"
            for reason in self._relations[pair]:
                source, resolution, _ = reason.partition(" returns RunFirst(")
                if resolution and any(source.startswith(f"{self._class(i)}.") and self._is_users(i) for i in pair):
                    yield f"return `RunFirst` of the other callback from `{source}`"
        if readers := self._users([reader for pair in edges if self._may_be_reversed(pair) for reader in pair[1:]]):
            yield f"in {readers}, declare `Read(previous=True)` if a value from an earlier moment is sufficient"
        if classes := self._users([i for pair in edges if self._is_derived(pair) for i in pair]):
            yield f"in {classes}, narrow a handler that uses less with `@on(..., access={{...}})`"

    def _is_derived(self, pair: Pair) -> bool:
        """Return whether an edge follows only from reads and writes."""
        return all(" writes `" in reason for reason in self._relations[pair])

    def _may_be_reversed(self, pair: Pair) -> bool:
        """Return whether the reader can run first, because a stated order overrides a derived one.

        The reader cannot run first if it reads a step value that exists only after the writer has written it.
        """
        written = [name for reason in self._relations[pair] for name in re.findall(r" writes `step\.(\w+)", reason)]
        return self._is_derived(pair) and set(written) <= {*ENGINE_STEP_NAMES, *step_names(BUILTIN_PHASES)}

    def _is_users(self, i: int) -> bool:
        return self._declared[i].cls.__module__.partition(".")[0] != "fluxcb"

    def _users(self, positions: Sequence[int]) -> str:
        """Return the classes of these callbacks that the user wrote, as the text "`A` or `B`"."""
        return " or ".join(dict.fromkeys(f"`{self._class(i)}`" for i in sorted(positions) if self._is_users(i)))

    def _class(self, i: int) -> str:
        return self._declared[i].cls.__name__

    def _cycles_with(self, stated: Pair) -> int:
        """Return how many cycles would remain if `in_order` stated the order of one more pair."""
        import networkx as nx

        graph = nx.DiGraph([stated, *(pair for pair in self._relations if pair != stated[::-1])])
        return sum(len(members) > 1 for members in nx.strongly_connected_components(graph))

    def _swapping(self, i: int, j: int) -> str:
        """Return the edit that reverses an order of the list."""
        one, other = self._declared[i], self._declared[j]
        if one.code and other.code:
            return f"swap the two in `in_order({one.code}, {other.code})`"
        return f"swap {one.label} and {other.label} in their `in_order(...)`"
