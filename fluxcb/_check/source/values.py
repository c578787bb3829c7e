"""What a name may stand for while source is read: a place in the Learner, an object that exists, or something unknown.

A `Value` is the set of everything that an expression may be, as far as the reading knows: one member means that it is
certain. Objects are looked at without running their code: no property, no `__getattr__`.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from fluxcb._check.source.fields import fields_of, is_kept, is_unchanged
from fluxcb._typing import StatePath

if TYPE_CHECKING:
    from fluxcb._check.source.scope import Local

__all__ = [
    "UNKNOWN",
    "Atom",
    "Fixed",
    "Getter",
    "Keywords",
    "Many",
    "Obj",
    "Partial",
    "Ref",
    "Seq",
    "Super",
    "Value",
    "attribute_of",
    "carries",
    "constant",
    "elements",
    "inherited",
    "item",
    "members",
    "named",
    "ordered",
    "parts",
    "texts",
    "truth",
    "union",
]


@dataclass(frozen=True, slots=True)
class Ref:
    """A place in the Learner; with `part`, something below it whose name is not known."""

    path: StatePath
    part: bool = False


class Obj:
    """An object that exists now, and will be what it is when the handler runs."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Obj) or type(self.value) is not type(other.value):
            return False
        return self.value is other.value or (type(self.value) in _SIMPLE and self.value == other.value)

    def __hash__(self) -> int:
        return hash(self.value) if type(self.value) in _SIMPLE else id(self.value)


class Fixed(Obj):
    """A list, set or dict that exists, and whose members stay those it has now."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Seq:
    """A tuple whose members are known."""

    items: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Many:
    """Something to iterate over, each of whose members may be `item`."""

    item: Value


@dataclass(frozen=True, slots=True)
class Keywords:
    """What `**kwargs` has caught."""

    items: tuple[tuple[str, Value], ...]


@dataclass(frozen=True, slots=True)
class Partial:
    """A function with its first arguments, made by `functools.partial` while the handler runs."""

    function: Atom
    positional: tuple[Value, ...]
    keywords: tuple[tuple[str, Value], ...]


@dataclass(frozen=True, slots=True)
class Super:
    """What `super()` returns: the classes behind `after` in the order of `owner`."""

    after: type
    owner: Any


@dataclass(frozen=True, slots=True)
class Getter:
    """A property's function and its object: to be read, not run."""

    function: Any  # a types.FunctionType, which pyright takes for a descriptor
    owner: Any


@dataclass(frozen=True, slots=True)
class _Unknown:
    """Something that is no place in the Learner, and about which nothing else is known."""


Atom: TypeAlias = "Ref | Obj | Seq | Many | Keywords | Partial | Super | Getter | Local | _Unknown"
Value: TypeAlias = frozenset["Atom"]

UNKNOWN: Value = frozenset((_Unknown(),))

_SIMPLE = (str, int, float, bool, bytes, type(None))
_ABSENT = object()
_ONE_BY_ONE = 6
_DEEPEST = 8  # names of one path: a loop that goes down a tree goes on for ever otherwise


def union(values: Iterable[Value]) -> Value:
    """Return everything that one of these values may be."""
    return frozenset().union(*values)


def carries(value: Value) -> bool:
    """Tell whether a value may lead to the Learner: a place in it, or something that may hold one."""
    return any(not isinstance(atom, Obj | Super | Getter | _Unknown) and _holds(atom) for atom in value)


def _holds(atom: Atom) -> bool:
    if isinstance(atom, Seq):
        return any(map(carries, atom.items))
    if isinstance(atom, Keywords):
        return any(carries(value) for _, value in atom.items)
    return carries(atom.item) if isinstance(atom, Many) else True


def texts(value: Value) -> list[str] | None:
    """Return the texts that a value may be, or None if it may be something else."""
    found = sorted(atom.value for atom in value if isinstance(atom, Obj) and type(atom.value) is str)
    return found if found and len(found) == len(value) else None


def named(name: str) -> Value:
    """Return the value that is certainly this text."""
    return frozenset((Obj(name),))


def ordered(value: Value) -> list[Atom]:
    """Return what a value may be in an order that is the same each time: sets have none."""
    return sorted(value, key=_rank) if len(value) > 1 else list(value)


def _rank(atom: Atom) -> tuple[str, str]:
    if isinstance(atom, Ref):
        return "", repr((atom.path, atom.part))
    if isinstance(atom, Obj):
        value = atom.value
        if type(value) in _SIMPLE:
            return "Obj", repr(value)
        return "Obj", (value if isinstance(value, types.FunctionType | type) else type(value)).__qualname__
    return type(atom).__name__, ""


def parts(base: Value, key: Value) -> list[tuple[Ref, bool]]:
    """Return the places that parts of a base by this name, or one of these, may be; and of each whether it is sure.

    Parts of a part whose name is not known are that part again.
    """
    found: list[tuple[Ref, bool]] = []
    names = texts(key)
    for atom in ordered(base):
        if not isinstance(atom, Ref):
            continue
        if names is None or atom.part or len(atom.path) >= _DEEPEST:
            found.append((Ref(atom.path, True), len(base) == 1))
        else:
            found += [(Ref((*atom.path, name)), len(base) == len(names) == 1) for name in names]
    return found


def members(value: Value) -> list[Value] | None:
    """Return the members of something iterated over, one by one, or None if they are not known or too many."""
    [atom] = value if len(value) == 1 else [None]
    found: list[Value] = []
    if isinstance(atom, Seq):
        found += atom.items
    elif isinstance(atom, Fixed) or (isinstance(atom, Obj) and type(atom.value) is tuple):
        found += [frozenset((Obj(item),)) for item in atom.value]
    else:
        return None
    return found if len(found) <= _ONE_BY_ONE else None


def item(owner: Any, key: Value) -> Atom | None:
    """Return a member of a tuple, or of a list or dict that stays as it is, or None where that is not known."""
    for kind in (int, str):
        index = constant(key, kind)
        try:
            return None if index is None else Obj(owner[index])
        except (LookupError, TypeError):
            continue
    return None


def constant(value: Value, kind: type) -> Any:
    """Return the number, text or other plain constant that a value certainly is, or None."""
    if len(value) == 1:
        [atom] = value
        if isinstance(atom, Obj) and type(atom.value) is kind:
            return atom.value
    return None


def truth(value: Value) -> bool | None:
    """Tell whether a value counts as true, or None where that is not known."""
    known = {_atom_truth(atom) for atom in value}
    return known.pop() if len(known) == 1 else None


def _atom_truth(atom: Atom) -> bool | None:
    if isinstance(atom, Ref):  # of a place with parts, which may be a view, nothing is known either
        return None
    if isinstance(atom, Obj):
        value = atom.value
        if isinstance(atom, Fixed):
            return bool(value)
        if type(value) in (*_SIMPLE, tuple, frozenset):
            return bool(value)
        if not hasattr(type(value), "__bool__") and not hasattr(type(value), "__len__"):
            return True
    return bool(atom.items) if isinstance(atom, Seq) else None


def elements(value: Value) -> Value:
    """Return what the members of something iterated over may be."""
    found: list[Value] = []
    for atom in value:
        if isinstance(atom, Seq):
            found += atom.items
        elif isinstance(atom, Many):
            found.append(atom.item)
        elif isinstance(atom, Fixed) or (isinstance(atom, Obj) and type(atom.value) is tuple):
            found += [frozenset((Obj(item),)) for item in atom.value]
        else:
            found.append(UNKNOWN)
    return union(found) or UNKNOWN


def attribute_of(owner: Any, name: str, me: Any, asked: dict[str, Any]) -> Atom | None:
    """Return what an attribute of an object is, or None where that is not known.

    Args:
        owner: The object.
        name: The attribute's name.
        me: The callback whose handler is read.
        asked: Gets what was asked of the callback's own fields: name and value.
    """
    if isinstance(owner, types.ModuleType):
        return _known(vars(owner).get(name, _ABSENT))
    if isinstance(owner, type):
        return _of_class(inspect.getattr_static(owner, name, _ABSENT), owner)
    cls = type(owner)
    if cls.__module__ == "builtins" or _overrides_lookup(cls):
        return None
    on_class = next((vars(base)[name] for base in cls.__mro__ if name in vars(base)), _ABSENT)
    if isinstance(on_class, property):
        return Getter(on_class.fget, owner) if isinstance(on_class.fget, types.FunctionType) else None
    if hasattr(type(on_class), "__set__"):
        return None
    own = fields_of(owner).get(name, _ABSENT)
    if owner is me:
        asked[name] = own
    if own is not _ABSENT:
        if not is_kept(name, owner, me):
            return None
        container = type(own) in (list, set, dict)
        return Fixed(own) if container and is_unchanged(name, owner, me) else Obj(own)
    if isinstance(on_class, functools.cached_property):
        return Getter(on_class.func, owner) if isinstance(on_class.func, types.FunctionType) else None
    plain = on_class is not _ABSENT and not hasattr(type(on_class), "__get__")
    if plain and not is_kept(name, owner, me):
        return None
    return _bound(on_class, owner, cls)


def inherited(name: str, after: type, owner: Any) -> Atom | None:
    """Return what `super().name` is: the attribute in the classes behind one of the object's."""
    cls = owner if isinstance(owner, type) else type(owner)
    order = cls.__mro__
    if after not in order:
        return None
    behind = order[order.index(after) + 1 :]
    found = next((vars(base)[name] for base in behind if name in vars(base)), _ABSENT)
    if isinstance(found, property):
        return Getter(found.fget, owner) if isinstance(found.fget, types.FunctionType) else None
    return _of_class(found, cls) if isinstance(owner, type) else _bound(found, owner, cls)


def _known(value: Any) -> Atom | None:
    return None if value is _ABSENT else Obj(value)


def _of_class(found: Any, cls: type) -> Atom | None:
    if isinstance(found, staticmethod):
        return Obj(found.__func__)
    if isinstance(found, classmethod):
        return Obj(types.MethodType(found.__func__, cls))
    if found is _ABSENT or (hasattr(type(found), "__get__") and not isinstance(found, types.FunctionType)):
        return None
    return Obj(found)


def _bound(found: Any, owner: Any, cls: type) -> Atom | None:
    if isinstance(found, types.FunctionType):
        return Obj(types.MethodType(found, owner))
    if isinstance(found, functools.partialmethod) and isinstance(found.func, types.FunctionType):
        return Obj(functools.partial(types.MethodType(found.func, owner), *found.args, **found.keywords))
    if isinstance(fields_of(found).get("__wrapped__"), types.FunctionType):  # functools.lru_cache, jax.jit
        return Obj(functools.partial(found, owner))  # pyright: ignore[reportArgumentType]  # it can be called
    return _of_class(found, cls)


@functools.cache
def _overrides_lookup(cls: type) -> bool:
    return any("__getattribute__" in vars(base) for base in cls.__mro__ if base is not object)
