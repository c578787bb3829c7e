"""Fields of objects: which keep the value that they have now, as far as the object's own methods go.

Fields that are assigned from outside are not found. What is read with them is the callback as it is now, which is also
the one whose `stateaccess` is compared.
"""

from __future__ import annotations

import ast
import dis
import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any

from fluxcb._check.source.text import attribute_name, find_source
from fluxcb._declare.callback import Callback

__all__ = ["fields_of", "is_kept", "is_unchanged", "signature"]

# What Python calls to set up, copy, compare and show objects assigns no field while a training runs; these may.
_RUNNING = ("__call__", "__enter__", "__exit__")
_READING = ("state_dict", "stateaccess", "runafter", "resolveconflict")
_BY_ANY_NAME = ("setattr", "delattr", "__dict__", "__setattr__", "vars")

_MANY = 64  # members of a container that are compared

# What only looks at a container.
_LOOKING = ("items", "keys", "values", "get", "index", "count")
_TAKING = ("len", "list", "tuple", "set", "frozenset", "sorted", "dict", "zip", "enumerate", "sum", "max", "min")
_TAKING += ("any", "all", "map", "reversed", "join", "print", "repr", "str", "bool", "isinstance")


def fields_of(owner: Any) -> Mapping[str, Any]:
    """Return an object's fields, without asking it."""
    try:
        return object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return {}


def signature(value: Any, depth: int = 4) -> Any:
    """Return something that is equal for objects whose types and fields are equal, down to some depth."""
    cls = type(value)
    if cls in (str, int, float, bool, bytes, type(None)):
        return cls, value
    if depth and cls in (tuple, list) and len(value) < _MANY:
        return cls, tuple(signature(item, depth - 1) for item in value)
    fields = value if cls is dict else {} if cls.__module__ == "builtins" else fields_of(value)
    if depth and 0 < len(fields) < _MANY and not hasattr(cls, "__slots__"):
        return cls, tuple((signature(k, 1), signature(v, depth - 1)) for k, v in fields.items())
    return cls, _Itself(value)


class _Itself:
    """One object and no other, however it compares."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def is_kept(name: str, owner: Any, me: Any) -> bool:
    """Tell whether no method of the object's class, or of the callback's, assigns a field of this name later."""
    changing = _assigned(type(owner)) | _assigned(type(me))
    return name not in changing and "*" not in changing


def is_unchanged(name: str, owner: Any, me: Any) -> bool:
    """Tell whether those methods do nothing with a container in this field but look at it."""
    return not any(name in _handled(type(instance)) for instance in (owner, me))


@functools.lru_cache(maxsize=1024)
def _assigned(cls: type) -> frozenset[str]:
    """Return the names of attributes that later methods assign, `*` for any name."""
    names: set[str] = set()
    for function in _later(cls):
        found = _attributes_of(function)
        if found is None:
            names |= _stored(function.__code__)
            continue
        names.update(name for name, node, _ in found if isinstance(node.ctx, ast.Store | ast.Del))
        if not _names(function.__code__).isdisjoint(_BY_ANY_NAME):
            names.add("*")
    return frozenset(names)


def _later(cls: type) -> Iterator[types.FunctionType]:
    """Yield the functions of a class that may run after it was set up."""
    for base in cls.__mro__:
        for method, value in vars(base).items() if base not in (object, Callback) else ():
            dunder = method.startswith("__") and method.endswith("__")
            if method in _RUNNING or not (dunder or method in _READING):
                wrapped = (getattr(value, name, None) for name in ("__func__", "fget", "fset", "func", "__wrapped__"))
                yield from (f for f in (value, *wrapped) if isinstance(f, types.FunctionType))


def _stored(code: types.CodeType) -> set[str]:
    names = {i.argval for i in dis.get_instructions(code) if i.opname in ("STORE_ATTR", "DELETE_ATTR")}
    names.update(*(_stored(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)))
    return names if _names(code).isdisjoint(_BY_ANY_NAME) else {*names, "*"}


def _names(code: types.CodeType) -> set[str]:
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return set(code.co_names).union(*map(_names, inner))


def _attributes_of(
    function: types.FunctionType,
) -> list[tuple[str, ast.Attribute, Mapping[ast.AST, ast.AST]]] | None:
    """Return the attributes in a method's text that may be fields of its object, each with what stands around it."""
    text = find_source(function)
    if text is None:
        return None
    parents = {child: node for node in ast.walk(text.node) for child in ast.iter_child_nodes(node)}
    assigned = {node.id for node in parents if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)}
    args = text.node.args
    # What begins with another argument, as `learner.step.metrics`, is no field of the object.
    others = {arg.arg for arg in (*args.posonlyargs, *args.args)[1:]} - assigned
    return [
        (attribute_name(node.attr, text.class_name), node, parents)
        for node in parents
        if isinstance(node, ast.Attribute) and _root(node) not in others
    ]


def _root(node: ast.AST) -> str | None:
    while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else None


class _All(frozenset[str]):
    """Every name: nothing is known."""

    def __contains__(self, name: object) -> bool:
        return True


@functools.lru_cache(maxsize=1024)
def _handled(cls: type) -> frozenset[str]:
    """Return the names of attributes with which later methods do more than look."""
    names: set[str] = set()
    for function in _later(cls):
        found = _attributes_of(function)
        if found is None:
            return _All()
        names.update(name for name, node, parents in found if not _only_looks(node, parents))
    return frozenset(names)


def _only_looks(node: ast.Attribute, parents: Mapping[ast.AST, ast.AST]) -> bool:
    parent = parents[node]
    if isinstance(parent, ast.For | ast.comprehension):
        return parent.iter is node
    if isinstance(parent, ast.Attribute):
        return parent.attr in _LOOKING
    if isinstance(parent, ast.Subscript):
        return parent.value is node and isinstance(parent.ctx, ast.Load)
    if isinstance(parent, ast.Call):
        function = parent.func
        called = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        return function is not node and called in _TAKING
    return isinstance(parent, ast.Compare | ast.If | ast.IfExp | ast.BoolOp | ast.UnaryOp | ast.FormattedValue)
