"""Variables and arguments of a user's function whose values are known before it is called, and what its code reads."""

from __future__ import annotations

import dis
import functools
import inspect
import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

from fluxcb._declare.signatures import names_in

__all__ = ["LIBRARIES", "Path", "code_of", "label_of", "names_in_helpers", "value_at", "variables_of"]

LIBRARIES = frozenset({"fluxcb", "jax", "jaxlib", "numpy", "optax"})
"""The packages whose functions and objects are not the user's."""

Path = tuple[Any, ...]
"""A variable, followed by the names of attributes, and by 1-tuples with the keys of entries: `("o", "train", ("lr",))`.
"""

_MAX_CALLS = 4  # helpers that call each other: functions can be recursive
_UNKNOWN = object()


def variables_of(function: Any) -> dict[str, Any]:
    """Return what a function of the user reads from outside: global variables, those of enclosing functions, and more.

    Also the parameters that its code reads and whose values are known: those that `functools.partial` binds, and
    defaults.

    Returns:
        The current values, by name. Empty for functions of libraries, and for other objects.
    """
    of = None if isinstance(function, MethodType) else _function_of(function)
    return {} if of is None else _variables_of(function, of)


def _variables_of(function: Any, of: FunctionType) -> dict[str, Any]:
    found = {name: of.__globals__[name] for name in _globals_of(of.__code__) & of.__globals__.keys()}
    for name, cell in zip(of.__code__.co_freevars, of.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # the variable has no value yet
            continue
    known, read = _known_parameters(function, of)[0], _locals_read(of.__code__)
    return {**{name: value for name, value in known.items() if name in read}, **found}


def code_of(function: Any) -> CodeType:
    """Return the code of a function, or of the function in a `functools.partial`."""
    return inspect.unwrap(_without_partial(function)).__code__


def label_of(path: Path, code: CodeType) -> str:
    """Return how messages refer to a value that a function reads: ``The variable `o.train` ``."""
    kind = "argument" if path[0] in code.co_varnames else "variable"
    rest = "".join(f"[{part[0]!r}]" if isinstance(part, tuple) else f".{part}" for part in path[1:])
    return f"The {kind} `{path[0]}{rest}`"


def value_at(path: Path, variables: Mapping[str, Any]) -> Any:
    """Return the value of a variable, of its attribute, or of its entry.

    Properties are not computed.

    Raises:
        LookupError: There is no such value.
    """
    value = variables[path[0]]
    for part in path[1:]:
        if isinstance(part, tuple):
            if not isinstance(value, dict | list | tuple):
                raise KeyError(part[0])
            value = value[part[0]]
        else:
            value = _attribute(value, part)
    return value


def names_in_helpers(function: Any) -> dict[Path, frozenset[str]]:
    """Return the names in the code of the helpers to which a function passes its variables, by the passed values.

    A helper is a function of the user in a variable, or in an attribute of one. For `loss(p, b, cfg=o.train)`, the
    result has the names in the code of `loss`, for `("o", "train")`.

    Args:
        function: A function of the user.
    """
    variables = variables_of(function)
    found: dict[Path, frozenset[str]] = defaultdict(frozenset)
    if variables:
        _follow(code_of(function), variables, {name: (name,) for name in variables}, found, _MAX_CALLS)
    return found


def _follow(
    code: CodeType,
    variables: Mapping[str, Any],
    passed: Mapping[str, Path],
    found: dict[Path, frozenset[str]],
    depth: int,
) -> None:
    """Add the names in the helpers that some code calls.

    Args:
        code: The code of a function.
        variables: The known values of its variables and parameters.
        passed: The path of each of them in the variables of the first function.
        found: The names by path, which this function extends.
        depth: How many more calls to follow.
    """
    for call in _calls_in(code):
        try:
            helper = value_at(call.function, variables)
        except LookupError:
            continue
        of = _function_of(helper)
        if of is None:
            continue
        read = _locals_read(of.__code__)
        paths: dict[str, Path] = {}
        values = _variables_of(helper, of)
        for name, path in _arguments(call, helper, of).items():
            if path[0] not in passed or name not in read:
                continue
            try:
                values[name] = value_at(path, variables)
            except LookupError:
                continue
            paths[name] = passed[path[0]] + path[1:]
            found[paths[name]] |= names_in(of.__code__)
        if paths and depth:
            _follow(of.__code__, values, paths, found, depth - 1)


def _arguments(call: _Call, helper: Any, of: FunctionType) -> dict[str, Path]:
    """Return the arguments of a call of a helper, by the names of its parameters."""
    names = _known_parameters(helper, of)[1]
    positional = {name: path for name, path in zip(names, call.positional, strict=False) if path}
    return {**positional, **call.keywords}


def _function_of(function: Any) -> FunctionType | None:
    """Return the Python function in a function, method or `functools.partial` of the user, or None for libraries."""
    function = inspect.unwrap(_without_partial(function))
    function = getattr(function, "__func__", function) if isinstance(function, MethodType) else function
    if not isinstance(function, FunctionType) or "site-packages" in function.__code__.co_filename:
        return None
    # A library that is installed in editable mode is not in `site-packages`.
    library = function.__module__ and function.__module__.partition(".")[0] in LIBRARIES
    return None if library else function


def _without_partial(function: Any) -> Any:
    while isinstance(function, functools.partial):
        function = function.func
    return function


def _known_parameters(function: Any, of: FunctionType) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the values that defaults and `functools.partial` give to parameters, and what positional arguments fill.

    Args:
        function: A function, a method, or a `functools.partial` of one.
        of: The Python function in it.
    """
    names, defaults = of.__code__.co_varnames[: of.__code__.co_argcount], of.__defaults__ or ()
    known = dict(zip(names[len(names) - len(defaults) :], defaults, strict=True)) | (of.__kwdefaults__ or {})
    layers = []
    while isinstance(function, functools.partial):
        layers.append(function)
        function = function.func
    if isinstance(function, MethodType):
        names = names[1:]
    for layer in reversed(layers):  # an outer one replaces keywords, and appends positional arguments
        known |= dict(zip(names, layer.args, strict=False)) | layer.keywords
        names = names[len(layer.args) :]
    return known, names


def _attribute(value: Any, name: str) -> Any:
    """Return an attribute without running code of the user.

    Raises:
        LookupError: There is no such attribute.
    """
    found = inspect.getattr_static(value, name, _UNKNOWN)
    own = name in getattr(value, "__dict__", {})
    if found is _UNKNOWN or (not own and hasattr(type(found), "__get__") and not isinstance(found, FunctionType)):
        raise KeyError(name)
    if isinstance(found, FunctionType) and not own and not isinstance(value, type | ModuleType):
        return MethodType(found, value)
    return found


@functools.lru_cache(maxsize=512)  # reading the instructions of a function takes a millisecond
def _globals_of(code: CodeType) -> frozenset[str]:
    """Return the global variables that a function and the functions in it read or assign."""
    inner = (_globals_of(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return frozenset(i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "STORE_GLOBAL")).union(
        *inner
    )


@functools.lru_cache(maxsize=512)
def _locals_read(code: CodeType) -> frozenset[str]:
    """Return the local variables that a function reads and never assigns, or that functions in it use."""
    read, assigned = set(code.co_cellvars), set[str]()
    for instruction in dis.get_instructions(code):
        if instruction.opname.startswith("LOAD_FAST"):
            read.update(_texts(instruction.argval))
        elif instruction.opname.startswith(("STORE_", "DELETE_")):
            assigned.update(_texts(instruction.argval))
    return frozenset(read - assigned)


def _texts(value: Any) -> tuple[str, ...]:
    # Since Python 3.13, some instructions load or store two variables.
    return value if isinstance(value, tuple) else (value,) if isinstance(value, str) else ()


@dataclass(frozen=True)
class _Call:
    """A call of a function, where the function and some arguments are variables, or attributes or entries of them.

    Attributes:
        function: The path of the function.
        positional: The paths of the positional arguments; empty paths for other expressions.
        keywords: The paths of the keyword arguments that are variables.
    """

    function: Path
    positional: tuple[Path, ...]
    keywords: Mapping[str, Path] = field(hash=False)


@functools.lru_cache(maxsize=512)
def _calls_in(code: CodeType) -> tuple[_Call, ...]:
    """Return the calls in a function and in the functions that it defines, if a variable is one of their arguments."""
    stored = {
        name
        for instruction in dis.get_instructions(code)
        if instruction.opname.startswith(("STORE_FAST", "STORE_DEREF"))
        for name in _texts(instruction.argval)
    }
    own = {*code.co_varnames[: code.co_argcount + code.co_kwonlyargcount], *code.co_freevars} - stored
    calls = [call for call in _calls_of(code, own) if any(call.positional) or call.keywords]
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            # The parameters of an inner function are other variables, even if they have the same names.
            hidden = set(constant.co_varnames) | set(constant.co_cellvars)
            calls += [
                call
                for call in _calls_in(constant)
                if not hidden.intersection(path[0] for path in (*call.positional, *call.keywords.values()) if path)
            ]
    return tuple(calls)


def _calls_of(code: CodeType, own: set[str]) -> Iterator[_Call]:
    """Yield the calls in some code, found by following which variables are on the stack of its instructions.

    Args:
        code: The code.
        own: Its parameters and the variables of enclosing functions that it never assigns.
    """
    # An entry is the path of a variable, or None. Only entries that are loaded between two jumps are known.
    stack: list[Path | None] = []
    keywords: tuple[str, ...] = ()
    for instruction in dis.get_instructions(code):
        name, argument = instruction.opname, instruction.argval
        if instruction.is_jump_target:
            stack = []
        if name == "PRECALL":  # only in Python 3.11; its effect on the stack is that of the CALL after it
            continue
        if name == "KW_NAMES":  # until Python 3.12; `argval` is not known there
            keywords = code.co_consts[instruction.arg or 0]
            continue
        effect = dis.stack_effect(instruction.opcode, instruction.arg, jump=False)
        if name in ("CALL", "CALL_KW"):
            if name == "CALL_KW":  # since Python 3.13, the names are a constant on the stack
                names = _pop(stack, 1)[0]
                keywords = names[0][0] if names else ()
            arguments = [None if path and _is_constant(path) else path for path in _pop(stack, instruction.arg or 0)]
            # Below the arguments are the function and either NULL or the object of a method.
            function = next((path for path in _pop(stack, 2) if path), None)
            count = len(arguments) - len(keywords)
            if function:
                named = {key: path for key, path in zip(keywords, arguments[count:], strict=True) if path}
                yield _Call(function, tuple(path or () for path in arguments[:count]), named)
            stack.append(None)
            keywords = ()
        elif name == "LOAD_GLOBAL":
            stack += [(argument,)] + [None] * (effect - 1)
        elif name.startswith(("LOAD_FAST", "LOAD_DEREF")) and name != "LOAD_FAST_AND_CLEAR":
            stack += [(text,) if text in own else None for text in _texts(argument)]
        elif name in ("LOAD_ATTR", "LOAD_METHOD"):
            of = _pop(stack, 1)[0]
            stack += [of and (*of, argument)] + [None] * effect
        elif name == "LOAD_CONST":
            stack.append(((argument,),))
        elif name == "BINARY_SUBSCR" or (name == "BINARY_OP" and instruction.argrepr == "[]"):
            of, key = _pop(stack, 2)
            stack.append((*of, key[0]) if of and key and _is_constant(key) and not _is_constant(of) else None)
        elif effect > 0:
            stack += [None] * effect
        else:  # the result of an operation, or what the operation has left
            _pop(stack, 1 - effect)
            stack.append(None)


def _is_constant(path: Path) -> bool:
    return isinstance(path[0], tuple)


def _pop(stack: list[Path | None], count: int) -> list[Path | None]:
    """Remove and return the last entries of a stack, with None for those that are not known."""
    taken = (
        stack[len(stack) - count :] if count <= len(stack) else [*itertools.repeat(None, count - len(stack)), *stack]
    )
    del stack[max(0, len(stack) - count) :]
    return taken
