"""The rules of an access: whether a protected learner would allow each use of state.

The protected learner itself belongs to a later stage. A test compares the two on generated handlers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fluxcb._check.source.touches import Touch, shown
from fluxcb._declare.access import Access, Permission, Read, writes
from fluxcb._declare.state import FIRST_LEVEL, MAPPING_METHODS, PROGRESS
from fluxcb._typing import StatePath

__all__ = ["NAMESPACES", "AccessRules", "Doubt", "Refusal"]

# First-level names that have parts under every access.
NAMESPACES = ("step", "cbstate", "hyperparams", "progress", "data")

# Methods that change Python's own containers. Methods of other objects with these names are treated the same.
_MUTATING = frozenset(
    (
        *("append", "extend", "insert", "remove", "clear", "sort", "reverse"),
        *("pop", "popitem", "setdefault", "update", "add", "discard"),
    )
)


@dataclass(frozen=True)
class Refusal:
    """A use that raises AccessError.

    Attributes:
        path: The place at which it raises.
        verb: What is not allowed at this place.
        known: Names that are allowed next to it.
    """

    path: StatePath
    verb: Literal["reads", "writes", "deletes"]
    known: tuple[str, ...] = ()


@dataclass(frozen=True)
class Doubt:
    """A use for which the source does not show whether it is allowed. `what` gives the reason."""

    what: str


@dataclass(frozen=True)
class _Part:
    """A part of the Learner that has parts itself, each allowed or not."""

    path: StatePath
    tree: Mapping[str, Any]
    open: Permission | None


@dataclass(frozen=True)
class _Thing:
    """A value, which is allowed with all its content."""

    path: StatePath
    permission: Permission


class AccessRules:
    """The rules of one access.

    Args:
        access: The access.
    """

    def __init__(self, access: Access) -> None:
        self._everything = access.get(("*",))
        names = [name for name in FIRST_LEVEL if name not in ("*", "control")]
        tree: dict[str, Any] = dict.fromkeys(names, self._everything) if self._everything else {}
        for path, permission in access.items():
            if path not in (("control",), ("*",)):
                node = tree
                for name in path[:-1]:
                    if not isinstance(node.get(name), dict):
                        node[name] = {}
                    node = node[name]
                node[path[-1]] = permission
        tree["progress"] = dict.fromkeys(PROGRESS, Read())
        for name in NAMESPACES:
            tree.setdefault(name, {})
        tree.setdefault("key", Read())
        self._tree = tree

    def judge(self, touch: Touch) -> Refusal | Doubt | None:
        """Return how a protected learner would react to a use, or None if it allows the use."""
        if touch.how in ("writes", "deletes", "drops"):
            return self._judge_change(touch)
        if touch.how == "lists":  # every handler may list names
            return None
        place = self._place(touch.path)
        if not isinstance(place, _Part | _Thing):
            return place if isinstance(place, Refusal | Doubt) else None
        if touch.how == "reads":
            if touch.part and isinstance(place, _Part) and place.open is None:
                return Doubt(f"reads {_spelled(touch)} whose name is not known")
        elif touch.how == "calls":
            if isinstance(place, _Thing) and self._may_change(touch, place):
                return Doubt(f"calls `{touch.path[-1]}` of `{shown(place.path)}`, for which it declares only Read()")
        elif isinstance(place, _Part):
            granted = place.open is not None and writes(place.open)
            return None if granted else Doubt(touch.note.replace("{}", _spelled(touch), 1))
        return None

    def _judge_change(self, touch: Touch) -> Refusal | Doubt | None:
        place = self._place(touch.path if touch.part else touch.path[:-1])
        if isinstance(place, Refusal):
            return Refusal(place.path, "writes", place.known)
        if place is None or isinstance(place, Doubt):
            return place
        if isinstance(place, _Thing):
            if writes(place.permission):
                return None
            return Doubt(f"changes something in `{shown(place.path)}`, for which it declares only Read()")
        if touch.part:
            if touch.how == "writes" and place.open is not None and writes(place.open):
                return None
            return Doubt(f"{touch.how} {_spelled(touch)} whose name is not known")
        name = touch.path[-1]
        if name.startswith("_"):
            return Doubt(f"{touch.how} {_spelled(touch)}")
        if touch.how in ("deletes", "drops"):
            return Refusal(touch.path, "deletes")
        granted = place.tree.get(name)
        if isinstance(granted, Permission) and writes(granted) and touch.path not in {(n,) for n in NAMESPACES}:
            return None
        if granted is None and place.open is not None and writes(place.open):
            return None
        return Refusal(touch.path, "writes", tuple(place.tree))

    def _place(self, path: StatePath) -> _Part | _Thing | Refusal | Doubt | None:
        """Return what is at a path, or None for a method of a part, such as `items`."""
        part = _Part((), self._tree, None)
        for position, name in enumerate(path):
            here = path[: position + 1]
            if name.startswith("_"):
                return Doubt(f"uses `{shown(here)}`, which is not part of the state")
            node = part.tree.get(name)
            if node is None and part.open is None and position and name in MAPPING_METHODS:
                return None
            if node is None:
                return _Thing(here, part.open) if part.open is not None else Refusal(here, "reads", tuple(part.tree))
            if isinstance(node, Permission):
                if position or name not in NAMESPACES:
                    return _Thing(here, node)
                part = _Part(here, {}, node)
            else:
                everything = self._everything if here != ("progress",) else None
                part = _Part(here, node, part.open if position else everything)
        return part

    def _may_change(self, touch: Touch, place: _Thing) -> bool:
        """Return whether a call may change shared Python objects, of which readers get read-only views."""
        inside = touch.path[0] == "cbstate" and len(touch.path) > len(place.path)
        return inside and touch.path[-1] in _MUTATING and not writes(place.permission)


def _spelled(touch: Touch) -> str:
    name = shown(touch.path)
    return f"a part of `{name}`" if touch.part else f"`{name}`"
