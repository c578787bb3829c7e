"""Pytrees as nested dicts with plain names: the form in which orbax stores them, whatever their containers are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from fluxcb._errors import DeclarationError
from fluxcb._typing import PyTree

__all__ = ["Name", "flat", "named", "nested", "sequences", "unflatten"]

Name = tuple[str, ...]

_ALONE = ("%",)  # the name of an array that is a pytree by itself; no other name is "%"


def named(tree: PyTree) -> dict[Name, Any]:
    """Return a pytree's leaves by name, in its order.

    A name has a part per container on the way: a key, an index, an attribute's name. Orbax takes "a.b" for "b" in "a",
    and a path for a path, so dots and slashes in keys are written as `%2E` and `%2F`.

    Raises:
        DeclarationError: Two leaves have one name, as with the keys 1 and "1".
    """
    found: dict[Name, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = tuple(map(_part, path)) or _ALONE
        if name in found:
            raise DeclarationError(
                f"Two arrays of a pytree would have the name `{'.'.join(name)}` in a checkpoint.",
                why="keys are stored as text",
                fix="use keys that differ as text",
            )
        found[name] = leaf
    return found


def _part(entry: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            text = str(getattr(entry, attribute))
            return text.replace("%", "%25").replace(".", "%2E").replace("/", "%2F") or "%0"
    return str(entry)


def nested(leaves: Mapping[Name, Any]) -> dict[str, Any]:
    """Return leaves by name as nested dicts."""
    tree: dict[str, Any] = {}
    for name, leaf in leaves.items():
        at = tree
        for part in name[:-1]:
            at = at.setdefault(part, {})
        at[name[-1]] = leaf
    return tree


def flat(tree: Mapping[str, Any]) -> dict[Name, Any]:
    """Return the leaves of nested dicts by name: what `nested` was made of."""
    found: dict[Name, Any] = {}
    for part, item in tree.items():
        if isinstance(item, Mapping):
            found |= {(part, *name): leaf for name, leaf in flat(item).items()}
        else:
            found[part,] = item
    return found


def sequences(tree: PyTree) -> list[str]:
    """Return the names of the lists and tuples in a pytree, which `unflatten` makes lists again."""
    found: dict[str, None] = {}
    for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]:
        for length, entry in enumerate(path):
            if isinstance(entry, jax.tree_util.SequenceKey):
                found[".".join(map(_part, path[:length]))] = None
    return list(found)


def unflatten(leaves: Mapping[Name, Any], lists: list[str]) -> PyTree:
    """Return leaves by name as nested dicts and lists, with the keys as they were (as text)."""
    if list(leaves) == [_ALONE]:
        return leaves[_ALONE]

    def made(tree: Any, name: Name) -> Any:
        if not isinstance(tree, dict):
            return tree
        items = {part: made(item, (*name, part)) for part, item in tree.items()}
        if ".".join(name) in lists:
            return [items[part] for part in sorted(items, key=int)]
        return {_plain(part): item for part, item in items.items()}

    return made(nested(leaves), ())


def _plain(part: str) -> str:
    return "" if part == "%0" else part.replace("%2F", "/").replace("%2E", ".").replace("%25", "%")
