"""Answers that are known without running anything: comparisons and types of objects that exist.

They tell which branches a callback takes with the fields it has, as in `if self.track_loss:`.
"""

from __future__ import annotations

import abc
import ast
import enum
import operator
import types
from collections.abc import Callable, Mapping, MutableMapping, MutableSequence, Sequence, Set
from typing import Any

from fluxcb._check.source.grants import NAMESPACES
from fluxcb._check.source.values import Fixed, Obj, Ref, Seq, Value, constant

__all__ = ["compared", "either", "instance_of", "is_learner", "joined_texts", "length"]

_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_TEXTS = 16
_PLAIN = (str, int, float, bool, type(None))
_CONTAINERS = (Mapping, MutableMapping, Sequence, MutableSequence, Set)  # which the learner is not
# Only of these it is certain that there is one object per value.
_SINGLE = (bool, type(None), type, enum.Enum)


def compared(op: ast.cmpop, left: Value, right: Value) -> bool | None:
    """Return the answer of a comparison, or None where it is not known."""
    a, b = _only(left), _only(right)
    if isinstance(op, ast.In | ast.NotIn):
        found = _among(a, _members(right))
        return None if found is None else found is isinstance(op, ast.In)
    if not isinstance(a, Obj) or not isinstance(b, Obj):
        return None
    if isinstance(op, ast.Is | ast.IsNot):
        if a.value is not b.value and not isinstance(a.value, _SINGLE) and not isinstance(b.value, _SINGLE):
            return None
        return (a.value is b.value) is isinstance(op, ast.Is)
    plain = type(a.value) in _PLAIN and type(b.value) in _PLAIN
    members = isinstance(a.value, enum.Enum) and isinstance(b.value, enum.Enum) and not isinstance(op, ast.Lt | ast.Gt)
    if type(op) not in _COMPARE or not (plain or (members and type(a.value).__eq__ is object.__eq__)):
        return None
    try:
        return bool(_COMPARE[type(op)](a.value, b.value))
    except TypeError:
        return None


def _only(value: Value) -> Any:
    [atom] = value if len(value) == 1 else [None]
    return atom


def _members(value: Value) -> list[Any] | None:
    """Return the plain members of a container that stays as it is, or None."""
    atom = _only(value)
    if isinstance(atom, Seq):
        found = [_only(item) for item in atom.items]
        members = [item.value for item in found if isinstance(item, Obj)]
        known = len(members) == len(found)
    elif isinstance(atom, Fixed) or (isinstance(atom, Obj) and type(atom.value) in (tuple, frozenset)):
        members, known = list(atom.value), True
    else:
        return None
    return members if known and all(type(member) in _PLAIN for member in members) else None


def _among(atom: Any, members: list[Any] | None) -> bool | None:
    if members is None or not isinstance(atom, Obj) or type(atom.value) not in _PLAIN:
        return None
    return atom.value in members


def instance_of(value: Value, classes: Value) -> bool | None:
    """Return the answer of `isinstance`, or None where it is not known."""
    if len(value) > 1:
        answers = {instance_of(frozenset((atom,)), classes) for atom in value}
        return answers.pop() if len(answers) == 1 else None
    a, b = _only(value), _only(classes)
    if isinstance(b, Seq):
        answers = {instance_of(value, item) for item in b.items}
        return True if True in answers else None if None in answers else False
    if isinstance(b, Obj) and isinstance(b.value, types.UnionType):
        return instance_of(value, frozenset((Seq(tuple(frozenset((Obj(cls),)) for cls in b.value.__args__)),)))
    if isinstance(b, Obj) and any(b.value is cls for cls in _CONTAINERS) and is_learner(value):
        return False
    if not isinstance(b, Obj) or type(b.value) is not type:  # other metaclasses may answer as they like
        return None
    if is_learner(value):
        return b.value is object
    return isinstance(a.value, b.value) if isinstance(a, Obj) else None


def joined_texts(pieces: Sequence[Value]) -> Value | None:
    """Return the texts that some values make when they are put one behind the other, or None if they are not known."""
    found = [""]
    for piece in pieces:
        plain = [atom.value for atom in piece if isinstance(atom, Obj) and type(atom.value) in (str, int)]
        if not plain or len(plain) < len(piece) or len(found) * len(plain) > _TEXTS:
            return None
        found = [text + str(more) for text in found for more in plain]
    return frozenset(Obj(text) for text in found)


def either(left: Value, right: Value) -> Value | None:
    """Return the union of two classes, as in `isinstance(x, list | tuple)`, or None if they are none."""
    a, b = _only(left), _only(right)
    plain = (type, abc.ABCMeta, types.UnionType)  # other metaclasses may make of it what they like
    if not isinstance(a, Obj) or not isinstance(b, Obj) or type(a.value) not in plain or type(b.value) not in plain:
        return None
    return frozenset((Obj(a.value | b.value),))


def is_learner(value: Value) -> bool:
    """Tell whether a value certainly is the learner as handlers see it, or one of its parts that have parts."""
    atom = _only(value)
    return isinstance(atom, Ref) and not atom.part and (not atom.path or atom.path in [(name,) for name in NAMESPACES])


def length(value: Value) -> int | None:
    """Return the length of a text or container that stays as it is, or None."""
    text = constant(value, str)
    atom = _only(value)
    if text is not None:
        return len(text)
    if isinstance(atom, Fixed) or (isinstance(atom, Obj) and type(atom.value) is tuple):
        return len(atom.value)
    return len(atom.items) if isinstance(atom, Seq) else None
