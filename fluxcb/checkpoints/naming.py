"""Convert pytrees to nested dicts with text keys, the form in which Orbax stores them, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from fluxcb._errors import DeclarationError
from fluxcb._typing import PyTree

__all__ = ["Name", "flat", "named", "nested", "sequences", "shown_name", "unflatten"]

Name = tuple[str, ...]

_SINGLE_ARRAY = ("%",)  # the name of an array that is the whole pytree; no other name can be "%"


def named(tree: PyTree) -> dict[Name, Any]:
    """Return the leaves of a pytree, keyed by name, in the order of the pytree.

    A name has one part for each container on the path: a key, an index or an attribute name. Dots and slashes in keys
    are written as `%2E` and `%2F`, because Orbax would interpret "a.b" as "b" inside "a", and "a/b" as a file path.

    Raises:
        DeclarationError: Two leaves have the same name, for example with the keys 1 and "1".
    """
    leaves: dict[Name, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = tuple(map(_part, path)) or _SINGLE_ARRAY
        if name in leaves:
            raise DeclarationError(
                f"Two arrays of a pytree would have the name `{'.'.join(name)}` in a checkpoint.",
                why="keys are stored as strings",
                fix="use keys whose strings differ",
            )
        leaves[name] = leaf
    return leaves


def _part(entry: Any) -> str:
    for attribute in ("key", "idx", "name"):
        if hasattr(entry, attribute):
            text = str(getattr(entry, attribute))
            return text.replace("%", "%25").replace(".", "%2E").replace("/", "%2F") or "%0"
    return str(entry)


def shown_name(text: str) -> str:
    """Return a name in the form for messages, with the original keys: `N.norm` instead of `N%2Enorm`."""
    return ".".join(map(_original_key, text.split(".")))


def nested(leaves: Mapping[Name, Any]) -> dict[str, Any]:
    """Return named leaves as nested dicts."""
    tree: dict[str, Any] = {}
    for name, leaf in leaves.items():
        node = tree
        for part in name[:-1]:
            node = node.setdefault(part, {})
        node[name[-1]] = leaf
    return tree


def flat(tree: Mapping[str, Any]) -> dict[Name, Any]:
    """Return the leaves of nested dicts, keyed by name. This is the inverse of `nested`."""
    leaves: dict[Name, Any] = {}
    for part, item in tree.items():
        if isinstance(item, Mapping):
            leaves |= {(part, *name): leaf for name, leaf in flat(item).items()}
        else:
            leaves[part,] = item
    return leaves


def sequences(tree: PyTree) -> list[str]:
    """Return the names of the lists and tuples in a pytree, which `unflatten` restores as lists."""
    found: dict[str, None] = {}
    for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]:
        for length, entry in enumerate(path):
            if isinstance(entry, jax.tree_util.SequenceKey):
                found[".".join(map(_part, path[:length]))] = None
    return list(found)


def unflatten(leaves: Mapping[Name, Any], lists: list[str]) -> PyTree:
    """Return named leaves as nested dicts and lists, with the original keys as text."""
    if list(leaves) == [_SINGLE_ARRAY]:
        return leaves[_SINGLE_ARRAY]

    def restore(tree: Any, name: Name) -> Any:
        if not isinstance(tree, dict):
            return tree
        items = {part: restore(item, (*name, part)) for part, item in tree.items()}
        if ".".join(name) in lists:
            return [items[part] for part in sorted(items, key=int)]
        return {_original_key(part): item for part, item in items.items()}

    return restore(nested(leaves), ())


def _original_key(part: str) -> str:
    return "" if part == "%0" else part.replace("%2F", "/").replace("%2E", ".").replace("%25", "%")
