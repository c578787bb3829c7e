"""Copies of callbacks, because an audit trains callbacks, and must not change a list in a user's module."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from fluxcb._declare.callback import Callback
from fluxcb._declare.resolution import InOrder

__all__ = ["fresh_callbacks"]


def fresh_callbacks(callbacks: Iterable[Any]) -> list[Any]:
    """Return copies of callbacks that do not belong to a Learner, in the same groups and wrappers.

    The fields of the callbacks are copied as well. Some objects are shared with the original callbacks: open files,
    locks, consoles, objects that hold one of these, and everything outside the fields (globals of modules, closures of
    functions). An audit can change shared objects. To avoid this, declare a function that returns the list.

    Args:
        callbacks: Callback instances, and `in_order(...)` groups of them.
    """
    memo: dict[int, Any] = {}
    return [_copied(item, memo) for item in callbacks]


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Return a copy like `copy.deepcopy`, except that parts that cannot be copied are shared."""
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, InOrder):
        return InOrder(tuple(_copied(member, memo) for member in value))
    if isinstance(value, Callback) and "__deepcopy__" not in dir(value):
        new = memo[id(value)] = object.__new__(type(value))
        for name, field in vars(value).items():
            if not name.startswith("_fluxcb_"):
                object.__setattr__(new, name, _copied(field, memo))
        return new
    if type(value) is list:
        items = memo[id(value)] = []
        items += [_copied(item, memo) for item in value]
        return items
    if type(value) is dict:
        entries = memo[id(value)] = {}
        entries.update({key: _copied(item, memo) for key, item in value.items()})
        return entries
    if type(value) is tuple:
        return tuple(_copied(item, memo) for item in value)
    try:
        new = copy.deepcopy(value, dict(memo))  # a copy of the memo, because a failed attempt adds incomplete copies
    except Exception:
        new = value
    memo[id(value)] = new
    return new
