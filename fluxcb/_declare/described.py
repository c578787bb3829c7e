"""Descriptions of arguments as texts, so that a resumed run can be compared with the saved one.

A checkpoint contains no objects, so the arguments of callbacks and of the optimizer are compared as texts: numbers and
strings as they are, functions by their code and by the values that they close over (Optax schedules are such
functions), arrays by dtype and shape, and all other objects by their class. Paths of files are left out.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import types
import zlib
from collections.abc import Callable, Mapping, Set
from typing import Any

__all__ = ["CODE", "Description", "describe_arguments", "describe_value"]

Description = dict[str, str]
"""The parts of a value by path, such as `schedules.learning_rate.decay_steps`, each as a text."""

CODE = "code"
"""The last part of the path of a function's bytecode. It differs between versions of Python and of packages."""

_LONGEST = 100  # characters of a text
_MAX_PARTS = 1000
_MAX_DEPTH = 12

# The directory of a run can be moved, and a run can be continued in another directory.
_LOCATIONS = ("folder", "file", "path")

# `optax.inject_hyperparams` keeps the numbers here. They are `hyperparams`, which are compared separately.
_SKIPPED = ("numeric_hps",)


def describe_arguments(cls: type, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Description | None:
    """Return the description of the arguments of a constructor, or None if they do not fit its signature."""
    try:
        bound = _signature(cls.__init__).bind(None, *args, **kwargs)
    except (TypeError, ValueError):
        return None
    bound.apply_defaults()
    description: Description = {}
    for name, value in list(bound.arguments.items())[1:]:  # without `self`
        if name not in _LOCATIONS:
            description.update(describe_value(value, name))
    return description


@functools.cache
def _signature(constructor: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(constructor)


def describe_value(value: Any, path: str) -> Description:
    """Return the description of a value; all paths in it begin with `path`."""
    describer = _Describer()
    describer.add(value, path, 0)
    return describer.found


class _Describer:
    def __init__(self) -> None:
        self.found: Description = {}
        self._functions: set[int] = set()

    def add(self, value: Any, path: str, depth: int) -> None:
        if len(self.found) >= _MAX_PARTS:
            return
        if isinstance(value, os.PathLike):
            return
        if depth == _MAX_DEPTH:
            self.found[path] = type(value).__qualname__
        elif (text := _text(value)) is not None:
            self.found[path] = text
        elif isinstance(arguments := getattr(value, "_fluxcb_arguments", None), dict):  # a callback in a wrapper
            self.found[path] = type(value).__qualname__
            self.found.update({f"{path}.{name}": part for name, part in arguments.items()})
        elif isinstance(value, functools.partial):
            self.add(value.func, path, depth + 1)
            self.add(value.args, f"{path}.args", depth + 1)
            self.add(value.keywords, path, depth + 1)
        elif isinstance(function := _function(value), types.FunctionType):
            self._add_function(function, path, depth)
        elif not self._add_container(value, path, depth):
            self.found[path] = type(value).__qualname__

    def _add_container(self, value: Any, path: str, depth: int) -> bool:
        parts: Description | dict[str, Any]
        if isinstance(value, tuple):
            names = getattr(value, "_fields", None)
            keys = [f".{name}" for name in names] if names is not None else [f"[{i}]" for i in range(len(value))]
            parts = {f"{path}{key}": item for key, item in zip(keys, value, strict=True)}
        elif isinstance(value, Mapping | list | Set):
            self.found[path] = type(value).__qualname__
            parts = self._items(value, path)
        elif dataclasses.is_dataclass(value) and value.__dataclass_params__.frozen:  # pyright: ignore[reportAttributeAccessIssue]
            self.found[path] = type(value).__qualname__
            parts = {f"{path}.{field.name}": getattr(value, field.name, None) for field in dataclasses.fields(value)}
        else:
            return False
        for name, item in parts.items():
            self.add(item, name, depth + 1)
        return True

    def _items(self, value: Mapping[Any, Any] | list[Any] | Set[Any], path: str) -> dict[str, Any]:
        """Return the items of a container that can be changed, unless a callback seems to collect objects in it."""
        if isinstance(value, Set):
            items = sorted((item for item in value if _is_setting(item)), key=lambda item: _text(item) or "")
        else:
            items = list(value.values() if isinstance(value, Mapping) else value)
        if not all(map(_is_setting, items)):
            return {}
        if isinstance(value, Mapping):
            return {f"{path}.{_key(key)}": item for key, item in value.items()}
        return {f"{path}[{number}]": item for number, item in enumerate(items)}

    def _add_function(self, function: types.FunctionType, path: str, depth: int) -> None:
        # A function of code that was run by `exec` may have no module.
        of_optax = (function.__module__ or "").partition(".")[0] == "optax"
        # The qualified name would differ after a function has moved in the user's program.
        self.found[path] = function.__qualname__.replace(".<locals>", "") if of_optax else function.__name__
        if id(function) in self._functions:  # a recursive function closes over itself
            return
        self._functions.add(id(function))
        self.found[f"{path}.{CODE}"] = f"{_digest(function.__code__):08x}"
        parameters = function.__code__.co_varnames
        defaults = function.__defaults__ or ()
        count = function.__code__.co_argcount
        values: dict[str, Any] = dict(zip(parameters[count - len(defaults) : count], defaults, strict=True))
        values.update(function.__kwdefaults__ or {})
        # Other functions often close over lists and dicts in which they collect results.
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            simple = isinstance(content, tuple) or _text(content) is not None or callable(content)
            if name not in _SKIPPED and (of_optax or simple):
                values[name] = content
        for name, value in values.items():
            self.add(value, f"{path}.{name}", depth + 1)


def _is_setting(value: Any) -> bool:
    return _text(value) is not None or callable(value) or isinstance(value, tuple | list | Mapping | Set)


def _text(value: Any) -> str | None:
    """Return the text of a number, a string, an array, a class or the like, or None."""
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        text = repr(value)
    elif isinstance(value, type):
        text = value.__qualname__
    elif hasattr(value, "dtype") and hasattr(value, "shape"):
        text = _array_text(value)
    else:
        return None
    if len(text) <= _LONGEST:
        return text
    return f"{text[:_LONGEST]}... ({len(text)} characters, {zlib.crc32(text.encode(errors='replace')):08x})"


def _array_text(value: Any) -> str:
    import numpy as np  # not at the top, because `fluxcb.check` works without NumPy

    if isinstance(value, np.generic | np.ndarray) and value.size == 1:
        return repr(value.item())
    return f"{value.dtype}[{', '.join(map(str, value.shape))}]"  # a JAX array is not read, which would wait for it


def _function(value: Any) -> Any:
    """Return the function inside a bound method or a `jax.jit`."""
    value = getattr(value, "__func__", value)
    return value if isinstance(value, types.FunctionType) else getattr(value, "__wrapped__", value)


def _key(key: Any) -> str:
    if isinstance(key, str | int):
        return str(key)
    return getattr(key, "__name__", None) or type(key).__qualname__


def _digest(code: types.CodeType) -> int:
    """Return a checksum of what a function computes, without its name, file and line numbers."""
    constants = "".join(map(_constant, code.co_consts))
    return zlib.crc32(code.co_code + f"{constants}{code.co_names}{code.co_varnames}".encode(errors="replace"))


def _constant(value: Any) -> str:
    if isinstance(value, types.CodeType):
        return f"{_digest(value):08x}"
    if isinstance(value, frozenset):  # its order differs between processes
        return repr(sorted(map(repr, value)))
    return repr(value)
