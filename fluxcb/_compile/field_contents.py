"""Contents of the fields of a callback and of the variables of a function, to be compared before and after a change."""

from __future__ import annotations

import dis
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
from fluxcb._declare.signatures import names_in

__all__ = [
    "UNKNOWN",
    "content_of",
    "function_of",
    "has_changed",
    "is_of_library",
    "names_used",
    "objects_within",
    "variables_of",
]

UNKNOWN = object()
"""The content of an object about which nothing is known. It equals itself, so it never seems to have changed."""

_ATOMS = (bool, int, float, complex, str, bytes, type(None))
# Contents are copied for each trace and compared again between epochs, so the limits keep both short.
_MAX_BYTES = 1 << 20
_MAX_PARTS = 1000
_MAX_DEPTH = 4
_CALLBACKS = frozenset({"callback", "io_callback", "pure_callback"})  # of JAX
_LIBRARIES = frozenset({"fluxcb", "jax", "jaxlib", "numpy", "optax"})


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


def content_of(value: Any, names: Collection[str], depth: int = 0, *, follow: bool = True, copies: bool = True) -> Any:
    """Return a copy of what is known of a value: numbers, texts and arrays, also inside containers and objects.

    Args:
        value: Any value.
        names: The attributes of objects to look at. A handler uses only those that its code names.
        depth: How many containers and objects are around the value.
        follow: Whether to look at the attributes that the methods and properties of objects use, too.
        copies: Whether to copy NumPy arrays, to find changes in place. Otherwise, they are referenced.
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
        small = value.nbytes <= _MAX_BYTES and not value.dtype.hasobject
        return _copied(value) if copies and small else _Array(value)
    if isinstance(value, jax.Array):
        return _Array(value)
    if isinstance(value, np.random.Generator):
        # The states of some bit generators have arrays, which cannot be compared by `==`.
        return pickle.dumps(value.bit_generator.state)
    if isinstance(value, list | tuple | set | frozenset):
        if len(value) > _MAX_PARTS:
            return _Long(len(value))
        parts = [content_of(part, names, depth + 1, follow=follow, copies=copies) for part in value]
        if isinstance(value, set | frozenset):
            # The content of an entry, such as a dict of its fields, may not be hashable.
            return set(map(repr, parts))
        return parts if isinstance(value, list) else tuple(parts)
    if isinstance(value, Mapping):
        if len(value) > _MAX_PARTS:
            return _Long(len(value))
        return {
            repr(key): content_of(part, names, depth + 1, follow=follow, copies=copies) for key, part in value.items()
        }
    if isinstance(value, type | ModuleType):
        return _constants_of(value, names) or UNKNOWN
    if isinstance(value, FunctionType | functools.partial):
        variables = variables_of(value)
        # Names of the called function, because the code that calls it does not name what this function reads.
        inner = names_used(value) if variables else ()
        contents = {
            name: content_of(variable, inner, depth + 1, follow=follow, copies=copies)
            for name, variable in variables.items()
        }
        return {name: content for name, content in contents.items() if content is not UNKNOWN} or UNKNOWN
    fields = _fields(value)
    if fields and follow:
        names = _names_reached(type(value), frozenset(names))
    found: dict[Any, Any] = {
        name: content_of(fields[name], names, depth + 1, follow=follow, copies=copies)
        for name in names
        if name in fields
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


def variables_of(function: Any) -> dict[str, Any]:
    """Return the values from outside of a function of the user that its code uses.

    They are the variables of enclosing functions, global variables, and the arguments that are defaults or that
    `functools.partial` has bound.

    Returns:
        The current values, by name. Empty for functions of libraries, and for other objects.
    """
    of = function_of(function)
    if of is None:
        return {}
    known = _known_arguments(function, of)
    found = {name: known[name] for name in _arguments_read(of.__code__) & known.keys()}
    found |= {name: of.__globals__[name] for name in _globals_of(of.__code__) & of.__globals__.keys()}
    for name, cell in zip(of.__code__.co_freevars, of.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # the variable has no value yet
            continue
    return found


def function_of(function: Any) -> FunctionType | None:
    """Return a function of the user, without decorators and `functools.partial`, or None for anything else."""
    while isinstance(function, functools.partial):
        function = function.func
    function = inspect.unwrap(function)
    if not isinstance(function, FunctionType) or "site-packages" in function.__code__.co_filename:
        return None
    # A library that is installed in editable mode is not in `site-packages`.
    library = function.__module__ and function.__module__.partition(".")[0] in _LIBRARIES
    return None if library else function


def names_used(function: Any) -> frozenset[str]:
    """Return the names of attributes and globals in the code of a function and of the helpers that it can call.

    A helper is a function of the user in a variable, in a module, or in an object that is a variable. The function may
    pass it any of its variables, so the code of the helper tells what of them is read.
    """
    found, seen, todo = set[str](), set[CodeType](), [function]
    for helper in todo:  # grows in the loop
        of = function_of(helper)
        if of is None or of.__code__ in seen:
            continue
        seen.add(of.__code__)
        names = names_in(of.__code__)
        found |= names
        for value in variables_of(helper).values():
            todo.append(value)
            # JAX calls a method that is passed to such a function later, at each step.
            if _CALLBACKS.isdisjoint(names):
                members = vars(value if isinstance(value, ModuleType) else type(value))
                todo += [members[name] for name in names & members.keys()]
    return frozenset(found)


def _known_arguments(function: Any, of: FunctionType) -> dict[str, Any]:
    """Return the arguments that defaults and `functools.partial` give to a function, by name."""
    names, defaults = of.__code__.co_varnames[: of.__code__.co_argcount], of.__defaults__ or ()
    known = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True)) | (of.__kwdefaults__ or {})
    layers = []
    while isinstance(function, functools.partial):
        layers.append(function)
        function = function.func
    for layer in reversed(layers):  # an outer one replaces keywords, and appends positional arguments
        known |= dict(zip(names, layer.args, strict=False)) | layer.keywords
        names = names[len(layer.args) :]
    return known


@functools.lru_cache(maxsize=512)
def _arguments_read(code: CodeType) -> frozenset[str]:
    """Return the local variables that a function never assigns and does not delete."""
    assigned = set[Any]()
    for instruction in dis.get_instructions(code):
        if instruction.opname.startswith(("STORE_FAST", "STORE_DEREF", "DELETE_")):
            # Since Python 3.13, some instructions store two variables.
            assigned.update(instruction.argval if isinstance(instruction.argval, tuple) else [instruction.argval])
    return frozenset(code.co_varnames) - assigned


@functools.lru_cache(maxsize=512)  # reading the instructions of a function takes a millisecond
def _globals_of(code: CodeType) -> frozenset[str]:
    """Return the global variables that a function and the functions in it read or assign."""
    inner = (_globals_of(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "STORE_GLOBAL")).union(
        *inner
    )


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
    if module.partition(".")[0] in _LIBRARIES:
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
    return type(value).__module__.partition(".")[0] in _LIBRARIES


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
