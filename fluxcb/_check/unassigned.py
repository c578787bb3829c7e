"""Values that a callback declares to write, and that no line of its handlers assigns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from fluxcb._check.source.touches import Reading, Touch
from fluxcb._declare.access import dotted, overlap, writes
from fluxcb._declare.callback import Callback, unwrap
from fluxcb._declare.declared import Declared
from fluxcb._declare.signatures import assigns
from fluxcb._typing import StatePath

__all__ = ["unassigned"]

# An entry of `cbstate` can be an object that a handler changes without an assignment.
_ASSIGNED = ("step", "params", "opt_state", "model_state")


def unassigned(declared: Declared, read: Callable[..., Reading]) -> Iterator[tuple[StatePath, str]]:
    """Yield each path that a callback declares to write but never assigns, with a text.

    A handler that computes `grads = 2 * learner.step.grads` and forgets to assign the result changes nothing.

    Args:
        declared: The callback.
        read: Returns the state that a function uses; see `Reader.read`.
    """
    callback = unwrap(declared.callback)
    # A callback with declarations of its own per instance, such as `CustomCallback`, has no code that could be judged.
    if declared.is_shipped or callback is not declared.callback or declared.cls.access_argument is not None:
        return
    paths = [path for path, permission in declared.access.items() if writes(permission) and _is_assigned(path)]
    # Reading the source takes long, and nearly all callbacks assign what they declare.
    paths = [path for path in paths if not any(assigns(function, path[-1]) for function in _functions(declared.cls))]
    if not paths:
        return
    bound = [declared.handler(entry.event, entry.phase) for entry in declared.handlers]
    readings = [
        read(h.function, before=2, me=getattr(h.function, "__self__", callback)) for h in bound if h is not None
    ]
    if not readings or any(reading.unclear for reading in readings):
        return
    touches = [touch for reading in readings for touch in reading.touches]
    for path in paths:
        found = [touch for touch in touches if not touch.path or overlap(touch.path, path)]
        if any(_may_assign(touch, path) for touch in found):
            continue
        name, place = type(declared.access[path]).__name__, dotted(path)
        is_read = any(touch.path[: len(path)] == path for touch in found)
        otherwise = (
            "If it only reads the value, declare `Read()`" if is_read else f"Or remove it from {declared.access_place}"
        )
        yield (
            path,
            f"{declared.label} declares {name}() on `{place}`, but its handlers do not assign it. "
            f"Assign the new value: `learner.{place} = ...`. {otherwise}.",
        )


def _is_assigned(path: StatePath) -> bool:
    """Return whether a path is a value that handlers assign as a whole."""
    if path[0] == "hyperparams":
        return len(path) == 2
    return path[0] in _ASSIGNED and len(path) == (2 if path[0] == "step" else 1)


def _may_assign(touch: Touch, path: StatePath) -> bool:
    """Return whether a use assigns a value, or passes what contains the value to code that could assign it."""
    if touch.how in ("passes", "calls"):
        return len(touch.path) < len(path)
    return touch.how not in ("reads", "lists")


def _functions(cls: type[Callback]) -> Sequence[Any]:
    """Return the functions in the body of a class of the user and of its base classes."""
    bases = [base for base in cls.__mro__ if base is not object and base.__module__.partition(".")[0] != "fluxcb"]
    return [value for base in bases for value in vars(base).values() if callable(value)]
