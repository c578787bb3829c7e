"""The source of functions: finds the part of a syntax tree from which an existing function was compiled."""

from __future__ import annotations

import ast
import functools
import linecache
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

__all__ = ["FunctionNode", "SourceText", "attribute_name", "find_source"]

FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclass(frozen=True, eq=False)
class SourceText:
    """The definition of a function in its file.

    Attributes:
        node: Its definition.
        class_name: The class whose body contains it, or None. Python adds this name to private names (`__name`).
        rebound: Names that some function of the file assigns with `global` or `nonlocal`, so their values may change.
    """

    node: FunctionNode
    class_name: str | None
    rebound: frozenset[str]


@dataclass(frozen=True, eq=False)
class _File:
    functions: Mapping[tuple[int, str], list[tuple[FunctionNode, str | None]]]
    rebound: frozenset[str]


def find_source(function: types.FunctionType) -> SourceText | None:
    """Return the definition of a function in its file, or None if it cannot be identified with certainty."""
    code = function.__code__
    linecache.checkcache(code.co_filename)
    lines = linecache.getlines(code.co_filename, function.__globals__)
    file = _read("".join(lines)) if lines else None
    if file is None:
        return None
    found = file.functions.get((code.co_firstlineno, code.co_name), [])
    found = [(node, name) for node, name in found if _fits(node, name, code)]
    if len(found) > 1:
        found = [(node, name) for node, name in found if _spans(node, code)]
    if len(found) != 1:
        return None
    return SourceText(found[0][0], found[0][1], file.rebound)


def attribute_name(name: str, class_name: str | None) -> str:
    """Return the actual name of an attribute, because Python adds the name of the class to private names."""
    if class_name is None or not name.startswith("__") or name.endswith("__"):
        return name
    return f"_{class_name.lstrip('_')}{name}"


@functools.lru_cache(maxsize=256)
def _read(text: str) -> _File | None:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    functions: dict[tuple[int, str], list[tuple[FunctionNode, str | None]]] = {}
    rebound: set[str] = set()
    for node, class_name in _nodes(tree, None):
        if isinstance(node, ast.Global | ast.Nonlocal):
            rebound.update(node.names)
        elif isinstance(node, ast.Lambda):
            functions.setdefault((node.lineno, "<lambda>"), []).append((node, class_name))
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            name = attribute_name(node.name, class_name)
            functions.setdefault((first, node.name), []).append((node, class_name))
            if name != node.name:
                functions.setdefault((first, name), []).append((node, class_name))
    return _File(functions, frozenset(rebound))


def _nodes(tree: ast.AST, class_name: str | None) -> Iterator[tuple[ast.AST, str | None]]:
    pending: list[tuple[ast.AST, str | None]] = [(tree, class_name)]
    while pending:
        node, within = pending.pop()
        yield node, within
        inside = node.name if isinstance(node, ast.ClassDef) else within
        pending += [(child, inside) for child in ast.iter_child_nodes(node)]


def _fits(node: FunctionNode, class_name: str | None, code: types.CodeType) -> bool:
    """Return whether code was compiled from this text. The file may have changed since it was imported."""
    args = node.args
    names = [arg.arg for arg in (*args.posonlyargs, *args.args, *args.kwonlyargs)]
    compiled_names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    if tuple(attribute_name(name, class_name) for name in names) != compiled_names:
        return False
    body = [node.body] if isinstance(node, ast.Lambda) else node.body
    read = {attribute_name(name, class_name) for part in body for name in _attributes(part)}
    return read <= _names(code)


def _attributes(node: ast.AST) -> Iterator[str]:
    pending = [node]
    while pending:
        part = pending.pop()
        if isinstance(part, ast.Assert) and not __debug__:
            continue
        if isinstance(part, ast.Attribute):
            yield part.attr
        for field, value in ast.iter_fields(part):
            if field not in ("annotation", "returns"):
                pending += [
                    child for child in (value if isinstance(value, list) else [value]) if isinstance(child, ast.AST)
                ]


def _names(code: types.CodeType) -> set[str]:
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names(constant)
    return names


def _spans(node: FunctionNode, code: types.CodeType) -> bool:
    """Return whether code is at the position of this lambda, because one line may contain several lambdas."""
    body = node.body if isinstance(node, ast.Lambda) else node.body[0]
    begin, end = (body.lineno, body.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)
    positions = [p for p in code.co_positions() if None not in p and p[2:] != (0, 0)]
    return bool(positions) and all(begin <= (p[0], p[2]) and (p[1], p[3]) <= end for p in positions)
