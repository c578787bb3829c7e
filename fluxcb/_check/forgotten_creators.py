"""What a missing entry of `cbstate` may be: a misspelled name, or the entry of a callback that is not in the list."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Collection, Iterator, Sequence

from fluxcb._declare.callback import Callback
from fluxcb._declare.declared import Declared
from fluxcb._declare.handlers import is_handler
from fluxcb._declare.signatures import assigns, constants_in, current_definition
from fluxcb._typing import StatePath

__all__ = ["forgotten_creators", "misspelled"]


def misspelled(name: str, known: Collection[str]) -> str:
    """Return the known name that differs from `name` in one or two letters, or "" if there is none."""
    # Two letters in the wrong order make a large difference in a short name.
    swapped = next((other for other in known if sorted(other) == sorted(name)), None)
    return swapped or next(iter(difflib.get_close_matches(name, known, n=1, cutoff=0.85)), "")


def forgotten_creators(path: StatePath, reader: Declared, declared: Sequence[Declared]) -> list[type[Callback]]:
    """Return the user's callback class that creates an entry of `cbstate` or `step` and has no instance in the list.

    Args:
        path: The path of the entry.
        reader: The callback that needs it.
        declared: The list.

    Returns:
        A list of at most one class.
    """
    # By name, because a notebook cell or module that runs again defines the class again.
    names = {base.__name__ for d in declared for base in d.cls.__mro__}
    return [
        cls
        for cls in _subclasses(Callback)
        if cls.__name__ not in names
        and _creates(cls, path)
        and _is_reachable(cls, reader.cls)
        and not inspect.isabstract(cls)
    ][:1]


def _subclasses(cls: type[Callback]) -> Iterator[type[Callback]]:
    for subclass in cls.__subclasses__():
        # A class that a notebook cell has defined again is still among the subclasses.
        if subclass.__module__.partition(".")[0] != "fluxcb" and current_definition(subclass) is subclass:
            yield subclass
        yield from _subclasses(subclass)


def _creates(cls: type[Callback], path: StatePath) -> bool:
    """Return whether the `init` of a class names an entry of `cbstate`, or a handler assigns a value of the step."""
    # The name in `stateaccess` alone would not show whether the class creates the entry or reads it as well.
    entry = path[1]
    if path[0] == "step":
        return any(
            assigns(method, entry) for base in cls.__mro__ for method in vars(base).values() if is_handler(method)
        )
    if cls.init is Callback.init:
        return False
    return assigns(cls.init, entry) or entry in constants_in(cls.init)


def _is_reachable(cls: type[Callback], reader: type[Callback]) -> bool:
    """Return whether a user who wrote `reader` can use a class: one inside a function is known only there."""
    scope, local, _ = cls.__qualname__.rpartition("<locals>.")
    return not local or (cls.__module__ == reader.__module__ and reader.__qualname__.startswith(scope + local))
