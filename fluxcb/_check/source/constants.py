"""Conditions, keys and called functions in the source of a callback that are known without running it."""

from __future__ import annotations

import ast
import dis
import functools
import types
from collections.abc import Mapping
from typing import Any

from fluxcb._check.source.frame import Frame, closure, object_of
from fluxcb._check.source.text import attribute_name
from fluxcb._check.source.touches import Runs
from fluxcb._declare.callback import Callback

__all__ = ["Constants", "field_of", "identity"]

_PLAIN = (bool, int, float, str, types.NoneType)


def identity(value: Any) -> Any:
    """Return a key that is equal for equal plain values, and otherwise only for the same object."""
    return (type(value), value) if isinstance(value, _PLAIN) else id(value)


def fields(owner: Any) -> Mapping[str, Any]:
    return getattr(owner, "__dict__", {})


_MISSING = object()


def field_of(owner: Any, name: str) -> Any:
    """Return a field or a plain attribute of the class, without running code of the user."""
    for scope in (fields(owner), *map(vars, type(owner).__mro__)):
        if name in scope:
            return scope[name]
    return _MISSING


@functools.lru_cache(maxsize=1024)
def _assigned(cls: type) -> frozenset[str]:
    """Return the names of the attributes that methods assign after construction, with `*` for unknown names."""
    names: set[str] = set()
    for base in cls.__mro__:
        for name, member in vars(base).items() if base not in (object, Callback) else ():
            functions = (getattr(member, part, None) for part in ("__func__", "fget", "fset", "func", "__wrapped__"))
            for function in (member, *functions):
                if isinstance(function, types.FunctionType) and name not in (
                    "__init__",
                    "__new__",
                    "__init_subclass__",
                ):
                    names |= _stored(function.__code__)
    return frozenset(names)


def _stored(code: types.CodeType) -> set[str]:
    names = {i.argval for i in dis.get_instructions(code) if i.opname in ("STORE_ATTR", "DELETE_ATTR")}
    if not {"setattr", "delattr", "__dict__", "vars"}.isdisjoint(code.co_names):
        names.add("*")
    return names.union(*(_stored(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)))


class Constants:
    """Values of expressions that cannot change while a callback is used.

    Args:
        me: The callback.

    Attributes:
        decided: The fields of the callback that were used, with their values.
    """

    def __init__(self, me: Any) -> None:
        self.decided: dict[str, Any] = {}
        self._me = me

    def branches_taken(self, frame: Frame, test: ast.expr) -> tuple[Runs, Runs]:
        """Return whether the branches for a true and for a false condition are taken.

        A condition on the callback itself may be an option that is never set. Any other condition occurs at some step.
        """
        known = self.constant(frame, test)
        if known is not None:
            return (Runs.SURELY, Runs.NEVER) if known[0] else (Runs.NEVER, Runs.SURELY)
        guard = any(isinstance(part, ast.Name) and part.id in ("isinstance", "hasattr") for part in ast.walk(test))
        level = Runs.MAYBE if guard or self.mentions_owner(frame, test) else Runs.SURELY
        return level, level

    def mentions_owner(self, frame: Frame, node: ast.AST) -> bool:
        """Return whether an expression uses the object whose method the function is."""
        name = frame.owner_name
        return name is not None and any(isinstance(part, ast.Name) and part.id == name for part in ast.walk(node))

    def constant(self, frame: Frame, node: ast.expr) -> tuple[Any] | None:
        """Return the value of an expression that cannot change while the callback is used, or None."""
        match node:
            case ast.Constant(value=value):
                return (value,)
            case ast.Name():
                value = object_of(frame, node)
                return (value,) if isinstance(value, _PLAIN) and value is not None else None
            case ast.Attribute(value=ast.Name(id=owner), attr=attr) if self.is_owner(frame, owner):
                name = attribute_name(attr, frame.text.class_name)
                value = field_of(frame.owner, name)
                return (value,) if isinstance(value, _PLAIN) and self._is_constant_field(frame, name) else None
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                known = self.constant(frame, operand)
                return None if known is None else (not known[0],)
            case ast.BoolOp(op=op, values=parts):
                decisive = isinstance(op, ast.Or)
                known = [self.constant(frame, part) for part in parts]
                if any(part is not None and bool(part[0]) is decisive for part in known):
                    return (decisive,)
                return None if None in known else (not decisive,)
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                a, b = self._identified(frame, left, right, op), self.constant(frame, right)
                if a is None or b is None:
                    return None
                same = a[0] is b[0] if isinstance(op, ast.Is | ast.IsNot) else a[0] == b[0]
                return (same,) if isinstance(op, ast.Is | ast.Eq) else (not same,)
        return None

    def _identified(self, frame: Frame, left: ast.expr, right: ast.expr, op: ast.cmpop) -> tuple[Any] | None:
        """Return the left side of a comparison. For `is None`, any field that keeps its value is allowed."""
        if not isinstance(op, ast.Is | ast.IsNot | ast.Eq | ast.NotEq):
            return None
        of_none = isinstance(op, ast.Is | ast.IsNot) and isinstance(right, ast.Constant) and right.value is None
        referred_object = self.referred_object(frame, left) if of_none else None
        return (referred_object,) if referred_object is not None else self.constant(frame, left)

    def is_owner(self, frame: Frame, name: str) -> bool:
        """Return whether a name is the object whose method the function is."""
        return name == frame.owner_name and frame.bound[name] == 1

    def _is_constant_field(self, frame: Frame, name: str) -> bool:
        """Return whether a field keeps its value, and record that the analysis depends on it."""
        owner = frame.owner
        if name in _assigned(type(owner)) or "*" in _assigned(type(owner)):
            return False
        if owner is self._me:  # other objects are in fields of the callback, which have been recorded
            self.decided[name] = identity(field_of(owner, name))
        return True

    def referred_object(self, frame: Frame, node: ast.expr) -> Any:
        """Return the callback, or the object in one of its fields, to which an expression refers, or None."""
        if isinstance(node, ast.Name):
            return frame.owner if self.is_owner(frame, node.id) else None
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and self.is_owner(frame, node.value.id):
            name = attribute_name(node.attr, frame.text.class_name)
            return fields(frame.owner).get(name) if self._is_constant_field(frame, name) else None
        return None

    def called_function(self, frame: Frame, node: ast.expr) -> tuple[Any, Any]:
        """Return the function to which an expression refers and the object whose method it is, as far as known."""
        if not isinstance(node, ast.Attribute):
            return object_of(frame, node), None
        name = attribute_name(node.attr, frame.text.class_name)
        match node.value:
            case ast.Call(func=ast.Name(id="super"), args=[]) if "__class__" in frame.function.__code__.co_freevars:
                owner, mro = frame.owner, type(frame.owner).__mro__
                here = closure(frame.function)["__class__"]
                classes = mro[mro.index(here) + 1 :] if here in mro else ()
            case _:
                owner = self.referred_object(frame, node.value)
                if owner is None:
                    return object_of(frame, node), None
                classes = type(owner).__mro__
                if name in fields(owner):
                    target = self.referred_object(frame, node)
                    if isinstance(target, types.MethodType):
                        return target.__func__, target.__self__
                    return target, None
        found = next((vars(cls)[name] for cls in classes if name in vars(cls)), None)
        if isinstance(found, staticmethod):
            return found.__func__, None
        return (found, owner) if isinstance(found, types.FunctionType) else (None, None)
