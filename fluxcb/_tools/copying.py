"""Copying callbacks: an audit trains them, and a list that a module holds must stay as it is."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any

from fluxcb._declare.callback import Callback
from fluxcb._declare.resolution import InOrder

__all__ = ["fresh_callbacks"]


def fresh_callbacks(callbacks: Iterable[Any]) -> list[Any]:
    """Return copies of callbacks, which belong to no Learner, in groups and wrappers as they were.

    Their fields are copied, too. What cannot be copied is shared with the original: open files, locks, consoles, and
    objects that hold one; so is everything outside the callbacks' own fields (modules' globals, what functions close
    over). An audit can change that. Who minds declares a function that makes the list.

    Args:
        callbacks: Callback instances, and `in_order(...)` groups of them.
    """
    memo: dict[int, Any] = {}
    return [_copied(item, memo) for item in callbacks]


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    """Return a copy as `copy.deepcopy` makes it, but of what can be copied only."""
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, InOrder):
        return InOrder(tuple(_copied(member, memo) for member in value))
    if isinstance(value, Callback) and "__deepcopy__" not in dir(value):
        new = memo[id(value)] = object.__new__(type(value))
        for name, held in vars(value).items():
            if not name.startswith("_fluxcb_"):
                object.__setattr__(new, name, _copied(held, memo))
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
        new = copy.deepcopy(value, dict(memo))  # a copy of the memo: an attempt that fails leaves halves in it
    except Exception:
        new = value
    memo[id(value)] = new
    return new
