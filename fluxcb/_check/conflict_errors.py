"""The errors for conflicts of callbacks whose order is unknown or contradictory."""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterable, Sequence

from fluxcb._check.conflicts import Overlaps
from fluxcb._declare.access import Append, Write, dotted, lookup, recommended
from fluxcb._declare.callback import unwrap
from fluxcb._declare.declared import BoundHandler, Declared
from fluxcb._errors import ConflictError
from fluxcb._typing import StatePath

__all__ = ["DELETE_ONE", "conflict", "contradictory_copies", "contradictory_orders", "ordering"]

DELETE_ONE = "keep the order that you need, and delete the other `in_order(...)`"


def conflict(a: BoundHandler, b: BoundHandler, overlaps: Overlaps, moments: Sequence[str]) -> ConflictError:
    """Return the error for two writers without a known order."""
    where = list(dict.fromkeys(h.where if h.access is not h.declared.access else h.declared.where for h in (a, b)))
    if a.declared.cls is b.declared.cls and a.declared.is_shipped and a.declared.cls.access_argument is None:
        entries = [path for pair in overlaps.both_write for path in pair if path[0] == "cbstate"]
        if entries:
            return _shared_entry(a.declared, b.declared, max(entries, key=len), where)
    paths = " and ".join(dict.fromkeys(f"`{dotted(max(pair, key=len))}`" for pair in overlaps.both_write))
    one, other = a.declared, b.declared
    if _overwrites(other, one, [path for pair in overlaps.both_write for path in pair]):
        one, other = other, one
    fixes = [ordering(one, other)]
    # Only suggest changes to classes that the user wrote.
    first, second = (other, one) if other.is_shipped else (one, other)
    if one.cls is not other.cls and not second.is_shipped:
        before, after = first.class_name_beside(second), second.class_name_beside(first)
        fixes.append(f"make `{after}.runafter()` return `({before},)`")
    if one.cls is other.cls and repr(one.callback) == repr(other.callback):
        fixes.append(f"if you need only one {one.callback!r}, remove the other from the list")
    fixes[:0] = _appending(one, other, overlaps)
    in_cbstate = all(path[0] == "cbstate" for pair in overlaps.both_write for path in pair)
    if in_cbstate and not (one.is_shipped or other.is_shipped):
        fixes.append("declare `Append()` in both if the order of the values that they add does not matter")
    return ConflictError(
        f"{one.label} and {other.label} both write {paths} and no order is declared.",
        where=where,
        why=f"both run at {_listed(moments)}, and the result depends on which one is last",
        fix=fixes,
    )


def _overwrites(scheduler: Declared, other: Declared, paths: Iterable[StatePath]) -> bool:
    """Return whether a callback sets at every step what the other one may set at some steps, so it must come first."""
    scheduled, others = (unwrap(d.callback).scheduled_hyperparams for d in (scheduler, other))
    names = {path[1] for path in paths if path[0] == "hyperparams" and len(path) > 1}
    return any(name in scheduled and name not in others for name in names)


def _appending(one: Declared, other: Declared, overlaps: Overlaps) -> list[str]:
    """Return the fix for a path where one callback adds a value and the user's other one writes, but may add, too."""
    for of_user, adds in ((one, other), (other, one)):
        for path in {path for pair in overlaps.both_write for path in pair}:
            recommends = isinstance(recommended(path, Write()), Append) and isinstance(
                lookup(of_user.access, path), Write
            )
            if recommends and not of_user.is_shipped and isinstance(lookup(adds.access, path), Append):
                return [f"declare `Append()` on `{dotted(path)}` in `{of_user.cls.__name__}`"]
    return []


def _shared_entry(one: Declared, other: Declared, entry: StatePath, where: list[str]) -> ConflictError:
    """Return the error for two callbacks of a class of the library that keep their values in one entry of `cbstate`."""
    fixes = ["remove one of the two from the callbacks list"]
    if "name" in inspect.signature(one.cls).parameters:
        fixes.append("pass another `name` to one of the two")
    return ConflictError(
        f"{one.label} and {other.label} both keep their values in `{dotted(entry)}`.",
        where=where,
        why="in any order, each of them would continue from the values of the other",
        fix=fixes,
    )


def contradictory_orders(first: str, second: str) -> str:
    """Return the first sentence of the error for two `in_order` that contradict each other."""
    return f"`in_order` states contradictory orders: {first} before {second}, and {second} before {first}."


def contradictory_copies(
    declared: Sequence[Declared], ordered: Collection[tuple[int, int]]
) -> list[tuple[set[int], ConflictError]]:
    """Return the contradictions such as `[in_order(A(), B()), in_order(B(), A())]`, each with its four positions.

    Each `in_order` has its own instances, so the orders form no cycle. But the conflicts of four callbacks, such as
    `A()` and `A() #2`, would not show what is wrong with the list.
    """
    found = []
    stated: dict[tuple[str, str], tuple[int, int]] = {}
    for pair in sorted(ordered):
        first, second = (repr(declared[i].callback) for i in pair)
        stated.setdefault((first, second), pair)
        reverse = stated.get((second, first))
        if reverse is not None and first != second:
            error = ConflictError(
                contradictory_orders(second, first),
                why="the two `in_order(...)` contain different instances, so the list contains each callback twice, "
                "and no order of its two instances is declared",
                fix=[DELETE_ONE, "to use all four, assign them to variables, and put them into one `in_order(...)`"],
            )
            found.append(({*pair, *reverse}, error))
    return found


def ordering(one: Declared, other: Declared) -> str:
    """Return the edit of the callbacks list that states an order of two callbacks."""
    is_clear = one.code != other.code or "..." not in one.code
    if one.code and other.code and is_clear:
        return f"put them in the list as `in_order({one.code}, {other.code})`"
    return "assign the two to variables, and put them in the list as `in_order(first, second)`"


def _listed(moments: Sequence[str]) -> str:
    shown = list(moments[:3])
    rest = f" and {len(moments) - 3} more" if len(moments) > 3 else ""
    return ", ".join(shown) + rest
