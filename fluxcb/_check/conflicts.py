"""Callbacks that use the same state at one moment, and which of the two runs first."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from fluxcb._declare.access import Append, Permission, Read, overlap, writes
from fluxcb._declare.callback import Callback, unwrap
from fluxcb._declare.declared import BoundHandler, Declared
from fluxcb._declare.resolution import NoConflict, NotDefined, Resolution, RunFirst, Unresolvable, resolveconflict
from fluxcb._errors import CheckError, ConflictError
from fluxcb._typing import StatePath

__all__ = ["Overlaps", "Settlement", "overlapping_pairs", "settle"]


@dataclass
class Overlaps:
    """The state that two handlers share at a moment, where `a` is earlier in the list than `b`.

    Attributes:
        both_write: Pairs of paths that both write, at least one of them with Write.
        a_before_b: Pairs of paths that `a` writes and `b` reads.
        b_before_a: Pairs of paths that `b` writes and `a` reads, as (b's path, a's path).
    """

    both_write: list[tuple[StatePath, StatePath]]
    a_before_b: list[tuple[StatePath, StatePath]]
    b_before_a: list[tuple[StatePath, StatePath]]


def overlapping_pairs(handlers: Sequence[BoundHandler] | Sequence[Declared]) -> dict[tuple[int, int], Overlaps]:
    """Find the pairs of handlers of one moment that overlap, and of which at least one writes.

    Args:
        handlers: The handlers of one moment, or whole callbacks.

    Returns:
        The shared state for index pairs `(i, j)` with `i < j`. The cost grows with the number of
        declared paths and of overlapping pairs, not with the square of the number of handlers.
    """
    index = _PathIndex(handlers)
    found: dict[tuple[int, int], Overlaps] = {}
    for i, handler in enumerate(handlers):
        for path, permission in handler.access.items():
            if not writes(permission) or path[0] == "control":
                continue
            for j, other_path, other in index.overlapping(path):
                if j != i:
                    _note(found, i, path, permission, j, other_path, other)
    return found


class _PathIndex:
    """Declared paths, indexed by prefix to find overlaps without comparing all pairs."""

    def __init__(self, handlers: Sequence[BoundHandler] | Sequence[Declared]) -> None:
        self.at: dict[StatePath, list[tuple[int, StatePath, Permission]]] = defaultdict(list)
        self.below: dict[StatePath, list[tuple[int, StatePath, Permission]]] = defaultdict(list)
        self.first: dict[str, list[tuple[int, StatePath, Permission]]] = defaultdict(list)
        self.everything: list[tuple[int, StatePath, Permission]] = []
        for i, handler in enumerate(handlers):
            for path, permission in handler.access.items():
                row = (i, path, permission)
                self.everything.append(row)
                self.at[path].append(row)
                self.first[path[0]].append(row)
                for length in range(1, len(path)):
                    self.below[path[:length]].append(row)
        self.names = tuple(self.first)

    def overlapping(self, path: StatePath) -> Iterable[tuple[int, StatePath, Permission]]:
        if path[0] == "*":
            yield from self.everything
            return
        for length in range(1, len(path) + 1):
            yield from self.at[path[:length]]
        yield from self.below[path]
        for name in self.names:  # `*` and the aliases, of which there are few
            if name != path[0] and overlap((name,), path):
                yield from self.first[name]


def _note(
    found: dict[tuple[int, int], Overlaps],
    i: int,
    path: StatePath,
    permission: Permission,
    j: int,
    other_path: StatePath,
    other: Permission,
) -> None:
    appends = isinstance(permission, Append)
    if writes(other):
        if (appends and isinstance(other, Append)) or j < i:  # each of these pairs is found from both sides
            return
        _entry(found, i, j).both_write.append((path, other_path))
        return
    if isinstance(other, Read) and other.previous:
        return
    # An Append to a hub may add any name, so it is ordered before readers of the whole hub, but not of a single name.
    # Otherwise, two callbacks that append to one hub and read from it would form a cycle.
    if appends and len(path) < len(other_path) and other_path[: len(path)] == path:
        return
    if i < j:
        _entry(found, i, j).a_before_b.append((path, other_path))
    else:
        _entry(found, j, i).b_before_a.append((path, other_path))


def _entry(found: dict[tuple[int, int], Overlaps], i: int, j: int) -> Overlaps:
    return found.setdefault((i, j), Overlaps([], [], []))


@dataclass(frozen=True)
class Settlement:
    """The order of a pair of callbacks, as stated by both callbacks and the registry.

    Attributes:
        first: `a`, `b`, `any` (no conflict), or None if nothing is known.
        reason: The callback or the registry entry that stated it.
    """

    first: str | None
    reason: str = ""


def settle(a: Declared, b: Declared) -> Settlement:
    """Return how both callbacks and the registry resolve a conflict of the two callbacks.

    Raises:
        ConflictError: The callbacks can never be used together, or the answers differ.
        CheckError: An answer is not a resolution.
    """
    one, other = unwrap(a.callback), unwrap(b.callback)
    found: list[tuple[str, Settlement]] = []
    for source, resolution in (
        (f"{a.cls.__name__}.resolveconflict", one.resolveconflict(other)),
        (f"{b.cls.__name__}.resolveconflict", other.resolveconflict(one)),
        *(("resolveconflict.register", settlement) for settlement in resolveconflict.answers(one, other)),
    ):
        settlement = _read(resolution, source, a, b)
        if settlement is not None:
            found.append((source, settlement))
    if not found:
        return Settlement(None)
    if len({settlement.first for _, settlement in found}) > 1:
        words = {"a": f"{a.label} first", "b": f"{b.label} first", "any": "any order is fine"}
        raise ConflictError(
            f"{a.label} and {b.label} have contradictory resolutions.",
            where=[f"{source}: {words[str(settlement.first)]}" for source, settlement in found],
            why="fluxcb can derive an order only if all resolutions agree",
            fix="make the resolutions agree, or return `NotDefined()` from one of them",
        )
    return Settlement(found[0][1].first, " and ".join(sorted({settlement.reason for _, settlement in found})))


def _read(resolution: Resolution, source: str, a: Declared, b: Declared) -> Settlement | None:
    if isinstance(resolution, NotDefined):
        return None
    if isinstance(resolution, NoConflict):
        return Settlement("any", f"{source} returns NoConflict()")
    if isinstance(resolution, Unresolvable):
        raise ConflictError(
            f"{a.label} and {b.label} can never be used together.",
            where=f"{source} returns Unresolvable()",
            fix="remove one of the two from the callbacks list",
        )
    if isinstance(resolution, RunFirst):
        first = unwrap(resolution.callback) if isinstance(resolution.callback, Callback) else resolution.callback
        for side, declared in (("a", a), ("b", b)):
            if first is unwrap(declared.callback) or (first is declared.cls and a.cls is not b.cls):
                return Settlement(side, f"{source} returns RunFirst({declared.label})")
    raise CheckError(
        f"`{source}` returned {resolution!r} for {a.label} and {b.label}.",
        fix="return NotDefined(), Unresolvable(), NoConflict(), or RunFirst(one of the two callbacks)",
    )
