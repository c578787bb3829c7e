"""Read-only views of shared Python state, for callbacks that declare `Read`.

A view passes `isinstance` checks for the class of its object, forwards reads, and wraps the results. It refuses every
change, also a change by the object's own methods.
"""

from __future__ import annotations

import collections
import copy
import functools
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from fluxcb._errors import AccessError

__all__ = ["copied_view", "is_view", "read_only"]

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


_IMMUTABLE = frozenset((int, float, str, bool, types.NoneType))


def read_only(value: Any, refuse: Callable[[], AccessError]) -> Any:
    """Return a view of a mutable object, or the object itself if it cannot be changed.

    Args:
        value: The object.
        refuse: Returns the error that a write through the view raises.
    """
    if type(value) in _IMMUTABLE:  # most values, and the checks below take longer
        return value
    # NumPy has its own read-only views, which cost no copy.
    if isinstance(value, np.ndarray):
        view = value.view()
        view.flags.writeable = False
        return view
    if isinstance(value, _View):
        return value
    # A tuple is immutable, but its items may not be.
    if type(value) is tuple:
        return tuple(read_only(item, refuse) for item in value)
    if isinstance(value, _ITEMS):  # iterating one would yield the mutable objects themselves
        return [read_only(item, refuse) for item in value]
    if isinstance(value, dict | list | set | collections.deque) or _is_plain_object(value):
        return _view_class(type(value))(value, refuse)
    return value


def is_view(value: Any) -> bool:
    """Return whether a value is a read-only view, which `isinstance` takes for its object."""
    return _View in type(value).__mro__


def copied_view(view: Any) -> Any:
    """Return a read-only view of a deep copy of the object behind a view."""
    return read_only(copy.deepcopy(view._target), view._refuse)


def _is_plain_object(value: Any) -> bool:
    if isinstance(value, type | types.ModuleType | types.FunctionType | types.MethodType | types.BuiltinFunctionType):
        return False
    cls = type(value)
    # Objects of these packages are returned as they are: JAX arrays are immutable, and C extension types do not work
    # behind a Python view.
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
            return types.MethodType(found, self)  # bound to the view, so that writes in the method are refused
        # The getter runs on the view, so a property that changes its object is refused too.
        if isinstance(found, property) and found.fget is not None:
            return read_only(found.fget(self), refuse)
        # Methods of C types write directly and bypass `__setattr__`, so they are listed by name.
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
        # A list, so that the object can change during the iteration.
        return iter([read_only(item, self._refuse) for item in self._target])

    def __repr__(self) -> str:
        return repr(self._target)

    # `copy` and `pickle` call this method. `dict.__reduce__` and `list.__reduce__` would raise an error.
    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._target.__reduce_ex__(protocol)


@functools.cache
def _view_class(cls: type) -> type[_View]:
    # Python looks special methods up on the class and not through `__getattr__`, so each class gets its own view class.
    # The property `__class__` makes `isinstance` succeed.
    namespace: dict[str, Any] = {"__slots__": (), "__class__": property(lambda self: cls)}
    for name in _FORWARDED:
        if getattr(cls, name, None) is not None:
            namespace[name] = _forward(cls, name)
    return type(f"ReadOnly{cls.__name__}", (_View,), namespace)


def _forward(cls: type, name: str) -> Callable[..., Any]:
    method = getattr(cls, name)

    def forwarded(self: _View, *args: Any) -> Any:
        # Operators of C types accept only their own types as the other operand.
        unwrapped = [a._target if type(a).__mro__[1:2] == (_View,) else a for a in args]
        is_python = isinstance(method, types.FunctionType)  # a C method cannot take the view as `self`
        return read_only(method(self if is_python else self._target, *unwrapped), self._refuse)

    return forwarded
