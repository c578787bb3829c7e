"""Properties of a user's function that are known without calling it: its parameters, its kind, and its location.

Also the location of a line that is running.
"""

from __future__ import annotations

import ast
import dis
import functools
import inspect
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from types import CodeType, TracebackType
from typing import Any

from fluxcb._errors import DeclarationError

__all__ = [
    "accepts",
    "as_code",
    "assigns",
    "constants_in",
    "current_definition",
    "example_call",
    "line_of",
    "method_place",
    "names_in",
    "parameter_names",
    "runs_later",
    "shown_path",
    "source_of",
]


def accepts(function: Any, count: int) -> bool:
    """Return whether a function accepts `count` positional arguments. True if there is no introspectable signature."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some functions that are written in C
        return True
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


def parameter_names(function: Any) -> list[str]:
    """Return the names of the parameters of a function, or none if it has no introspectable signature."""
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []


def names_in(code: CodeType) -> set[str]:
    """Return the names of attributes and globals in a function and in the functions that it defines."""
    inner = (names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return {*code.co_names}.union(*inner)


def constants_in(function: Any) -> set[str]:
    """Return the strings among the constants in the code of a function and of the functions that it defines."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return set() if code is None else set(_strings(code.co_consts))


def _strings(constants: Iterable[Any]) -> Iterator[str]:
    for constant in constants:
        if isinstance(constant, str):
            yield constant
        elif isinstance(constant, tuple | frozenset):
            yield from _strings(constant)
        elif isinstance(constant, CodeType):
            yield from _strings(constant.co_consts)


def assigns(function: Any, name: str) -> bool:
    """Return whether the code of a function, or one inside it, assigns an attribute with this name."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return code is not None and _assigns(code, name)


def _assigns(code: CodeType, name: str) -> bool:
    return any(i.opname == "STORE_ATTR" and i.argval == name for i in dis.get_instructions(code)) or any(
        _assigns(constant, name) for constant in code.co_consts if isinstance(constant, CodeType)
    )


_EXAMPLES: Mapping[str, str] = {"float": "1.0", "int": "1", "str": '"name"', "bool": "True"}


def example_call(cls: type) -> str:
    """Return a call of a class with an example of each required argument, such as `ClipGradients(max_norm=1.0)`."""
    try:
        parameters = list(inspect.signature(cls).parameters.values())
    except (TypeError, ValueError):
        return f"{cls.__name__}()"
    required = [p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]

    def shown(parameter: inspect.Parameter) -> str:
        annotation = parameter.annotation
        text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
        value = next((_EXAMPLES[kind] for kind in text.split(" | ") if kind in _EXAMPLES), "...")
        return value if parameter.kind is parameter.POSITIONAL_ONLY else f"{parameter.name}={value}"

    arguments = ", ".join(map(shown, required))
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if takes_any and not arguments and cls.__module__.startswith("fluxcb."):
        try:
            cls()
        except DeclarationError:  # e.g. EarlyStopping, which needs at least one criterion
            arguments = "..."
    return f"{cls.__name__}({arguments})"


def current_definition(cls: type) -> type:
    """Return the class that has replaced a class whose cell or module ran again, or the class itself."""
    found: Any = sys.modules.get(cls.__module__)
    for name in cls.__qualname__.split("."):
        found = getattr(found, name, None)
    names = (cls.__module__, cls.__qualname__)
    return found if isinstance(found, type) and (found.__module__, found.__qualname__) == names else cls


def runs_later(function: Any) -> str:
    """Return the kind of a function whose call does not run its body, such as `a coroutine function`, or ""."""
    if inspect.iscoroutinefunction(function):
        return "a coroutine function"
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        return "a generator function"
    return ""


def as_code(shown: str) -> str:
    """Return the repr of an object as code, or "" if it is not code, for example because it shows a function.

    The arguments of `Scheduler(learning_rate)` name a hyperparameter, and are not those of the call that creates the
    object. The result is then `Scheduler(...)`.
    """
    try:
        call = ast.parse(shown, mode="eval").body
    except SyntaxError:
        return ""
    if not isinstance(call, ast.Call):
        return shown
    arguments = (*call.args, *(keyword.value for keyword in call.keywords))
    abbreviated = any(isinstance(node, ast.Name) for argument in arguments for node in ast.walk(argument))
    return f"{ast.unparse(call.func)}(...)" if abbreviated else shown


def source_of(function: Any) -> str:
    """Return `file:line` of a function, relative to the working directory if the file is inside."""
    code = getattr(inspect.unwrap(function), "__code__", None)  # constructors have a wrapper
    if code is None:
        return getattr(function, "__qualname__", repr(function))
    return f"{shown_path(code.co_filename)}:{code.co_firstlineno}"


def method_place(cls: type, name: str, function: Any = None) -> str:
    """Return `Class.method  file:line`, with the class that defines the method.

    Args:
        cls: The class that has the method.
        name: The name of the method.
        function: The method, if it is not the attribute of the class.
    """
    owner = next((base for base in cls.__mro__ if name in vars(base)), cls)
    # A private base class of the library tells users less than the class that they know.
    shown = cls if owner.__name__.startswith("_") else owner
    return f"{shown.__name__}.{name}  {source_of(getattr(cls, name) if function is None else function)}"


def line_of(traceback: TracebackType) -> str:
    """Return `function  file:line` of an entry of a traceback."""
    code = traceback.tb_frame.f_code
    return f"{code.co_name}  {shown_path(code.co_filename)}:{traceback.tb_lineno}"


def shown_path(path: str) -> str:
    """Return the path of a file, relative to the working directory if the file is inside, or e.g. `Cell In[5]`."""
    return _cell(path) or _relative(path, os.getcwd())


def _cell(path: str) -> str:
    """Return the name that IPython shows for a cell, or "". The file of a cell has a generated name."""
    get_ipython = getattr(sys.modules.get("IPython"), "get_ipython", None)  # not imported: it takes long
    shell = get_ipython() if get_ipython is not None else None
    format_code_name = getattr(getattr(shell, "compile", None), "format_code_name", None)
    return " ".join(format_code_name(path) or ()) if format_code_name is not None else ""


@functools.lru_cache(maxsize=256)
def _relative(path: str, folder: str) -> str:
    relative = os.path.relpath(path, folder) if os.path.isabs(path) else path
    return path if relative.startswith("..") else relative
