"""Resolutions of conflicts between callbacks, their registration for pairs of classes, and `in_order`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fluxcb._calls import Constructed, entry_point
from fluxcb._errors import DeclarationError

if TYPE_CHECKING:
    from fluxcb._declare.callback import Callback

__all__ = [
    "InOrder",
    "NoConflict",
    "NotDefined",
    "Resolution",
    "RunFirst",
    "Unresolvable",
    "in_order",
    "resolveconflict",
]


@dataclass(frozen=True)
class Resolution(Constructed):
    """Base class of the values that `resolveconflict` returns."""


@dataclass(frozen=True)
class NotDefined(Resolution):
    """State that no order is known for two callbacks (the default)."""


@dataclass(frozen=True)
class Unresolvable(Resolution):
    """State that two callbacks can never be used together at one moment."""


@dataclass(frozen=True)
class NoConflict(Resolution):
    """State that two callbacks may run in any order."""


@dataclass(frozen=True, eq=False)
class RunFirst(Resolution):
    """State that one of two callbacks runs before the other.

    Args:
        callback: The instance that runs first.
    """

    callback: Any

    def __repr__(self) -> str:
        return f"RunFirst({self.callback!r})"


ResolutionFn = Callable[[Any, Any], Resolution]


class _Registry:
    """Registry of resolutions for pairs of callback classes that are defined elsewhere.

    Register a function with the decorator `@resolveconflict.register(A, B)`. The function receives an instance of `A`
    and an instance of `B`, in this order, and returns a resolution. Instances of subclasses are included. fluxcb calls
    the function that is registered for the most specific pair of classes.
    """

    def __init__(self) -> None:
        self._functions: dict[tuple[type, type], ResolutionFn] = {}

    def register(self, first: type[Callback], second: type[Callback]) -> Callable[[ResolutionFn], ResolutionFn]:
        """Return a decorator that registers a resolution for two callback classes.

        Args:
            first: Class of the function's first argument.
            second: Class of the function's second argument.

        Raises:
            DeclarationError: One of the two is not a class.
        """
        for cls in (first, second):
            if not isinstance(cls, type):
                raise DeclarationError(
                    f"`resolveconflict.register` takes two callback classes, not {cls!r}.",
                    fix="for two instances of one class, write `in_order(first, second)`",
                )

        def decorate(function: ResolutionFn) -> ResolutionFn:
            self._functions[first, second] = function
            return function

        return decorate

    def unregister(self, first: type[Callback], second: type[Callback]) -> None:
        """Remove the resolution that is registered for exactly this pair of classes."""
        del self._functions[first, second]

    def concerns(self, cls: type) -> bool:
        """Return whether a resolution is registered for a class or one of its bases."""
        bases = set(cls.__mro__)
        return any(first in bases or second in bases for first, second in self._functions)

    def answers(self, one: Any, other: Any) -> list[Resolution]:
        """Return the resolutions of two instances, in either order, from the most specific pairs of classes only."""
        fitting: dict[tuple[type, type], list[tuple[ResolutionFn, Any, Any]]] = {}  # by (one's class, other's)
        for (first, second), function in self._functions.items():
            if isinstance(one, first) and isinstance(other, second):
                fitting.setdefault((first, second), []).append((function, one, other))
            if isinstance(one, second) and isinstance(other, first):
                fitting.setdefault((second, first), []).append((function, other, one))
        best = [pair for pair in fitting if not any(_narrower(other, pair) for other in fitting)]
        return [function(a, b) for pair in best for function, a, b in fitting[pair]]


def _narrower(pair: tuple[type, type], than: tuple[type, type]) -> bool:
    return pair != than and issubclass(pair[0], than[0]) and issubclass(pair[1], than[1])


resolveconflict = _Registry()


@dataclass(frozen=True)
class InOrder:
    """Callbacks that run in this order. `in_order` returns it."""

    callbacks: tuple[Any, ...]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.callbacks)

    def __repr__(self) -> str:
        return f"in_order({', '.join(map(repr, self.callbacks))})"


@entry_point
def in_order(*callbacks: Callback) -> InOrder:
    """Make callback instances run in this order at every moment that they share.

    Put the result into the list of callbacks: `[in_order(warmup, decay), Recorder()]`.

    Args:
        *callbacks: Two or more callback instances.

    Raises:
        DeclarationError: There are fewer than two callbacks, one of them appears twice, or an argument is a list.
    """
    for group in callbacks:
        if isinstance(group, list | tuple | InOrder):
            kind = "another `in_order(...)`" if isinstance(group, InOrder) else f"a {type(group).__name__}"
            raise DeclarationError(
                f"`in_order` takes callbacks as arguments, not {kind}.",
                fix=[
                    "write `in_order(first, second)` inside the callbacks list",
                    "unpack a list: `in_order(*callbacks)`",
                ],
            )
    if len(callbacks) < 2:
        raise DeclarationError(
            f"`in_order` takes two or more callbacks, but got {len(callbacks)}.",
            fix="write `in_order(first, second)` inside the callbacks list",
        )
    for position, callback in enumerate(callbacks):
        if any(callback is earlier for earlier in callbacks[:position]):
            raise DeclarationError(
                f"`in_order` was given {callback!r} twice.",
                why="a callback cannot run before itself",
                fix="name each callback once",
            )
    return InOrder(callbacks)
