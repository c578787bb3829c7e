"""Flax NNX modules that add their train flag to calls without it."""

from __future__ import annotations

import functools
import inspect
from typing import Any

__all__ = ["add_flag"]


def add_flag(module: Any, name: str, value: bool) -> None:
    """Make a module add a keyword argument to calls that do not pass it.

    Args:
        module: The module.
        name: The keyword argument.
        value: Its value.
    """
    object.__setattr__(module, "__class__", _adding(type(module), name, value))


@functools.lru_cache(maxsize=512)  # NNX registers each class with JAX
def _adding(kind: type, name: str, value: bool) -> type:
    """Return a subclass whose call adds the argument."""
    call = kind.__call__
    signature = inspect.signature(call)

    @functools.wraps(call)
    def adding(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            passed = name in signature.bind_partial(self, *args, **kwargs).arguments
        except TypeError:  # the call itself will raise a better error
            passed = True
        return call(self, *args, **kwargs) if passed else call(self, *args, **{name: value}, **kwargs)

    # The same names, because they occur in messages.
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    return type(kind)(kind.__name__, (kind,), {**names, "__call__": adding})
