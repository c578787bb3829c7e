"""Contents of the fields of a callback and of the variables of a function, to be compared before and after a change."""

from __future__ import annotations

import functools
import inspect
import pickle
import sys
from collections.abc import Collection, Iterator, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import jax
import jax.core
import numpy as np

from fluxcb._compile.arrays import is_key
from fluxcb._compile.function_variables import LIBRARIES, code_of, names_in_helpers, variables_of
from fluxcb._declare.signatures import names_in

__all__ = ["UNKNOWN", "content_of", "has_changed", "is_of_library", "objects_within"]

UNKNOWN = object()
"""The content of an object about which nothing is known. It equals itself, so it never seems to have changed."""

_ATOMS = (bool, int, float, complex, str, bytes, type(None))
# Contents are copied for each trace and compared again between epochs, so the limits keep both short.
_MAX_BYTES = 1 << 20
_MAX_PARTS = 1000
_MAX_DEPTH = 4
_CALLBACKS = frozenset({"callback", "io_callback", "pure_callback"})  # of JAX


class _Long(int):
    """The length of a container that is too long to be copied."""


class _Array:
    """A JAX array, which never changes, or a NumPy array that is too large to be copied."""

    def __init__(self, value: Any) -> None:
        self._value = value  # kept, because another object could get the same `id`

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, _Array):
            return False
        a, b = self._value, other._value
        if a is b or a.nbytes > _MAX_BYTES or is_key(a):
            return a is b
        # A new array may have the same values. The values of an array that was donated are not known any more.
        return _lost(a) or _lost(b) or _copied(a) == _copied(b)

    __hash__ = None  # pyright: ignore[reportAssignmentType]


def content_of(value: Any, names: Collection[str], depth: int = 0, *, follow: bool = True) -> Any:
    """Return a copy of what is known of a value: numbers, texts and arrays, also inside containers and objects.

    Args:
        value: Any value.
        names: The attributes of objects to look at. A handler uses only those that its code names.
        depth: How many containers and objects are around the value.
        follow: Whether to look at the attributes that the methods and properties of objects use, too.
    """
    if isinstance(value, _ATOMS):
        return value
    # Code that names such a function passes it methods, which run at each step and may count their calls.
    follow = follow and _CALLBACKS.isdisjoint(names)
    # Objects can refer to each other in cycles, which end at this depth.
    if isinstance(value, jax.core.Tracer) or depth == _MAX_DEPTH:
        return UNKNOWN
    if isinstance(value, np.generic):
        return content_of(value.item(), names, depth + 1)
    if isinstance(value, np.ndarray):
        # The bytes of an array of Python objects are addresses, which stay the same when the objects change.
        return _copied(value) if value.nbytes <= _MAX_BYTES and not value.dtype.hasobject else _Array(value)
    if isinstance(value, jax.Array):
        return _Array(value)
    if isinstance(value, np.random.Generator):
        # The states of some bit generators have arrays, which cannot be compared by `==`.
        return pickle.dumps(value.bit_generator.state)
    if isinstance(value, list | tuple | set | frozenset):
        if len(value) > _MAX_PARTS:
            return _Long(len(value))
        parts = [content_of(part, names, depth + 1, follow=follow) for part in value]
        if isinstance(value, set | frozenset):
            # The content of an entry, such as a dict of its fields, may not be hashable.
            return set(map(repr, parts))
        return parts if isinstance(value, list) else tuple(parts)
    if isinstance(value, Mapping):
        if len(value) > _MAX_PARTS:
            return _Long(len(value))
        return {repr(key): content_of(part, names, depth + 1, follow=follow) for key, part in value.items()}
    if isinstance(value, type | ModuleType):
        return _constants_of(value, names) or UNKNOWN
    if isinstance(value, FunctionType | functools.partial):
        variables = variables_of(value)
        # Names of the called function, because the code that calls it does not name what this function reads.
        inner = names_in(code_of(value)) if variables else frozenset[str]()
        passed = names_in_helpers(value)
        contents = {
            name: content_of(variable, inner | passed.get((name,), inner), depth + 1, follow=follow)
            for name, variable in variables.items()
        }
        return {name: content for name, content in contents.items() if content is not UNKNOWN} or UNKNOWN
    fields = _fields(value)
    if fields and follow:
        names = _names_reached(type(value), frozenset(names))
    found: dict[Any, Any] = {
        name: content_of(fields[name], names, depth + 1, follow=follow) for name in names if name in fields
    }
    found = {name: content for name, content in found.items() if content is not UNKNOWN}
    # The arrays of a module of Flax NNX are in its variables.
    leaves = jax.tree.leaves(value) if fields else [value]
    if leaves and leaves[0] is not value:
        arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer)]
        found[None] = [_Array(leaf) for leaf in arrays]
    return found or UNKNOWN


@functools.lru_cache(maxsize=512)
def _names_reached(cls: type, names: frozenset[str]) -> frozenset[str]:
    """Return names with those in the code of the methods and properties of a class that they name, or that calls it."""
    found, codes = set(names), list[CodeType]()
    # The methods of these libraries and of Python use internal fields, which change at any call.
    others = {"flax", "equinox", *sys.stdlib_module_names}
    own = [base for base in reversed(cls.__mro__) if base.__module__.partition(".")[0] not in others]
    members = {name: member for base in own for name, member in vars(base).items()}
    todo = [*names, "__call__"]
    for name in todo:  # grows in the loop
        member = members.get(name)
        function = member.fget if isinstance(member, property) else member
        code = getattr(inspect.unwrap(function), "__code__", None) if function is not None else None
        if isinstance(code, CodeType) and code not in codes:
            codes.append(code)
            inner = names_in(code) - found
            found |= inner
            todo += inner
    return frozenset(found)


def has_changed(before: Any, after: Any) -> bool:
    """Return whether a content has changed in a way that matters to a handler that has used it.

    Lists, dicts and sets may grow, because handlers collect values in them.
    """
    if before is after or before == after:  # the same NaN is not equal to itself
        return False
    if isinstance(after, _Long) and isinstance(before, list | tuple | dict | set | _Long):
        return after < (before if isinstance(before, _Long) else len(before))
    if isinstance(before, list) and isinstance(after, list):
        # `map` ends with the shorter list, so entries that were appended are not compared.
        return len(after) < len(before) or any(map(has_changed, before, after))
    if isinstance(before, dict) and isinstance(after, dict):
        return any(key not in after or has_changed(part, after[key]) for key, part in before.items())
    if isinstance(before, set) and isinstance(after, set):
        return not before <= after
    return True


def _copied(value: Any) -> tuple[Any, ...]:
    return value.shape, str(value.dtype), np.asarray(value).tobytes()


def _constants_of(value: type | ModuleType, names: Collection[str]) -> dict[str, Any]:
    """Return the attributes of a class or module of the user that are numbers or texts, such as `Config.rate`."""
    module = value.__name__ if isinstance(value, ModuleType) else value.__module__
    if module.partition(".")[0] in LIBRARIES:
        return {}
    sources = [vars(value)] if isinstance(value, ModuleType) else [vars(base) for base in reversed(value.__mro__)]
    return {name: source[name] for source in sources for name in names if isinstance(source.get(name, ...), _ATOMS)}


def _lost(value: Any) -> bool:
    return isinstance(value, jax.Array) and (value.is_deleted() or not value.is_fully_addressable)


def _fields(value: Any) -> Mapping[str, Any]:
    """Return the fields of an object of the user, which may have their values in the class, except methods.

    Objects of libraries change on their own.
    """
    if isinstance(value, type | ModuleType | FunctionType | MethodType):
        return {}
    if is_of_library(value):
        return {}
    own = getattr(value, "__dict__", None)
    if own is None:
        return {}
    return {**{k: v for k, v in vars(type(value)).items() if isinstance(v, _ATOMS)}, **own}


def is_of_library(value: Any) -> bool:
    """Return whether the class of an object belongs to fluxcb, JAX, NumPy or Optax."""
    return type(value).__module__.partition(".")[0] in LIBRARIES


def objects_within(value: Any) -> Iterator[Any]:
    """Yield a value and the values in its containers and in the fields of its objects, to a limited depth."""
    level, seen = [value], set()
    for _ in range(_MAX_DEPTH):
        yield from level
        seen.update(map(id, level))
        inner = [part for outer in level for part in _parts(outer)]
        level = [part for part in {id(part): part for part in inner}.values() if id(part) not in seen]


def _parts(value: Any) -> Collection[Any]:
    if isinstance(value, Mapping):
        found = value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        found = value
    else:
        found = _fields(value).values()
    return found if len(found) <= _MAX_PARTS else ()
