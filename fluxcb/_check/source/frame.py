"""`Frame`, the state of analyzing one function: places in the learner, and the names that refer to them."""

from __future__ import annotations

import ast
import builtins
import types
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from fluxcb._check.source.text import SourceText
from fluxcb._errors import AccessError
from fluxcb._typing import StatePath

__all__ = ["Frame", "Ref", "Value", "below", "bound_names", "closure", "may_catch", "object_of", "package", "titled"]


@dataclass(frozen=True)
class Ref:
    """A place in the learner. With `part`, it is an unnamed part of that place."""

    path: StatePath
    part: bool = False


Value = tuple[Ref, ...]
"""The places to which an expression may refer. It is empty if the expression is unrelated to the learner."""


@dataclass
class Frame:
    """A function that is being analyzed.

    Attributes:
        function: The function.
        text: Its source.
        bound: How often each name is bound, in the function and in its inner functions.
        places: The places to which names refer that are bound once.
        owner: The object whose method the function is, or None.
        owner_name: The name of the parameter with that object.
        members: The items of the literals over which names iterate.
        returned: The places that the function may return.
    """

    function: Any  # a `types.FunctionType`, which type checkers would bind as a method
    text: SourceText
    bound: Counter[str]
    places: dict[str, Value]
    owner: Any
    owner_name: str | None
    members: dict[str, list[ast.expr]] = field(default_factory=dict)
    returned: list[Ref] = field(default_factory=list)


def below(base: Value, names: Iterable[str | None]) -> Value:
    """Return the parts of places that may have these names. None is an unknown name."""
    return tuple(
        ref if ref.part else Ref(ref.path, part=True) if name is None else Ref((*ref.path, name))
        for ref in base
        for name in names
    )


def bound_names(node: ast.AST) -> Iterator[str]:
    """Yield a name for each time that it is bound in a function or in its inner functions."""
    for part in ast.walk(node):
        match part:
            case ast.Name(id=name, ctx=ast.Store() | ast.Del()) | ast.arg(arg=name):
                yield name
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                if part is not node:
                    yield name
            case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                yield name
            case ast.MatchMapping(rest=str(name)):
                yield name
            case ast.alias(name=name, asname=other):
                yield other or name.split(".")[0]
            case ast.Global(names=names) | ast.Nonlocal(names=names):
                yield from (*names, *names)


def closure(function: types.FunctionType) -> dict[str, Any]:
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell.cell_contents for name, cell in cells if cell != types.CellType()}


def package(function: types.FunctionType) -> str:
    return function.__module__.partition(".")[0] if function.__module__ else ""


def titled(function: types.FunctionType) -> str:
    return function.__qualname__.split("<locals>.")[-1]


def object_of(frame: Frame, node: ast.expr) -> Any:
    """Return the object to which a global or enclosing name refers, or None if it is unknown."""
    if isinstance(node, ast.Name):
        name = node.id
        if frame.bound[name] or name in frame.text.rebound:
            return None
        scopes = (closure(frame.function), frame.function.__globals__, vars(builtins))
        return next((scope[name] for scope in scopes if name in scope), None)
    if isinstance(node, ast.Attribute):
        module = object_of(frame, node.value)
        return vars(module).get(node.attr) if isinstance(module, types.ModuleType) else None
    return None


def may_catch(frame: Frame, kinds: ast.expr | None) -> bool:
    """Return whether an `except` clause may catch an AccessError."""
    for kind in kinds.elts if isinstance(kinds, ast.Tuple) else [kinds]:
        found = object_of(frame, kind) if kind is not None else BaseException
        if not (isinstance(found, type) and not issubclass(AccessError, found)):
            return True
    return False
