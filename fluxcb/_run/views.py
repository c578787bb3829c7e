"""Read-only views: what a Read of shared Python state hands out.

A view looks like what it shows (`isinstance` agrees), forwards reading, wraps what it returns,
and refuses every change, also one made by the object's own methods.
"""

from __future__ import annotations

import collections
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from fluxcb._errors import AccessError

__all__ = ["read_only"]

_MUTATING = {
    dict: ("__setitem__", "__delitem__", "__ior__", "clear", "pop", "popitem", "setdefault", "update"),
    list: (
        *("__setitem__", "__delitem__", "__iadd__", "__imul__", "append", "clear", "extend", "insert", "pop", "remove"),
        *("reverse", "sort"),
    ),
    set: (
        *(
            "__iand__",
            "__ior__",
            "__isub__",
            "__ixor__",
            "add",
            "clear",
            "difference_update",
            "discard",
            "pop",
            "remove",
        ),
        *("intersection_update", "symmetric_difference_update", "update"),
    ),
    collections.deque: (
        *("__setitem__", "__delitem__", "__iadd__", "__imul__", "append", "appendleft", "clear", "extend"),
        *("extendleft", "insert", "pop", "popleft", "remove", "reverse", "rotate"),
    ),
}

_ITEMS = (type({}.values()), type({}.items()))

_FORWARDED = (
    *("__getitem__", "__len__", "__contains__", "__call__", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"),
    *(
        "__bool__",
        "__float__",
        "__int__",
        "__index__",
        "__add__",
        "__radd__",
        "__mul__",
        "__sub__",
        "__str__",
        "__format__",
    ),
    *("__or__", "__and__", "__reversed__", "__hash__"),
)


def read_only(value: Any, refuse: Callable[[], AccessError]) -> Any:
    """Return a view of a mutable object, or the object itself if it cannot be changed.

    Args:
        value: The object.
        refuse: Makes the error that a write through the view raises.
    """
    if isinstance(value, np.ndarray):
        view = value.view()
        view.flags.writeable = False
        return view
    if isinstance(value, _View):
        return value
    if type(value) is tuple:
        return tuple(read_only(item, refuse) for item in value)
    if isinstance(value, _ITEMS):  # what they hand out would be live
        return [read_only(item, refuse) for item in value]
    if isinstance(value, dict | list | set | collections.deque) or _is_plain_object(value):
        return _view_class(type(value))(value, refuse)
    return value


def _is_plain_object(value: Any) -> bool:
    if isinstance(value, type | types.ModuleType | types.FunctionType | types.MethodType | types.BuiltinFunctionType):
        return False
    cls = type(value)
    # Arrays and what extension modules define keep their own rules; jax arrays cannot be changed anyway.
    if cls.__module__.split(".")[0] in ("jax", "jaxlib", "numpy", "builtins", "collections", "flax", "optax"):
        return cls.__module__ == "collections"
    return hasattr(value, "__dict__")


class _View:
    """Base of the generated view classes."""

    __slots__ = ("_refuse", "_target")

    def __init__(self, target: Any, refuse: Callable[[], AccessError]) -> None:
        object.__setattr__(self, "_target", target)
        object.__setattr__(self, "_refuse", refuse)

    def __getattr__(self, name: str) -> Any:
        target, refuse = self._target, self._refuse
        found = getattr(type(target), name, None)
        if isinstance(found, types.FunctionType) and name not in getattr(target, "__dict__", {}):
            return types.MethodType(found, self)  # so that the method's own writes meet the view
        if isinstance(found, property) and found.fget is not None:
            return read_only(found.fget(self), refuse)
        for base, names in _MUTATING.items():
            if name in names and isinstance(target, base):
                return self._refused
        value = getattr(target, name)
        if isinstance(value, types.BuiltinMethodType | types.MethodWrapperType):
            return lambda *args, **kwargs: read_only(value(*args, **kwargs), refuse)
        return read_only(value, refuse)

    def _refused(self, *_: Any, **__: Any) -> Any:
        raise self._refuse()

    def __setattr__(self, name: str, value: Any) -> None:
        raise self._refuse()

    def __delattr__(self, name: str) -> None:
        raise self._refuse()

    def __setitem__(self, key: Any, value: Any) -> None:
        raise self._refuse()

    def __delitem__(self, key: Any) -> None:
        raise self._refuse()

    def __iter__(self) -> Iterator[Any]:
        return iter([read_only(item, self._refuse) for item in self._target])

    def __repr__(self) -> str:
        return repr(self._target)

    def __reduce__(self) -> Any:
        return self._target.__reduce__()


@functools.cache
def _view_class(cls: type) -> type[_View]:
    namespace: dict[str, Any] = {"__slots__": (), "__class__": property(lambda self: cls)}
    for name in _FORWARDED:
        if getattr(cls, name, None) is not None:
            namespace[name] = _forward(cls, name)
    return type(f"ReadOnly{cls.__name__}", (_View,), namespace)


def _forward(cls: type, name: str) -> Callable[..., Any]:
    method = getattr(cls, name)

    def forwarded(self: _View, *args: Any) -> Any:
        unwrapped = [a._target if type(a).__mro__[1:2] == (_View,) else a for a in args]
        own = isinstance(method, types.FunctionType)  # a Python method meets the view, a C one needs the object
        return read_only(method(self if own else self._target, *unwrapped), self._refuse)

    return forwarded
