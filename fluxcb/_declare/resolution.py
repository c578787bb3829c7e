"""Resolutions: the four answers to a conflict, how classes register them, and order for instances."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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
class Resolution:
    """An answer of `resolveconflict`."""


@dataclass(frozen=True)
class NotDefined(Resolution):
    """Nothing is known about this pair (the default)."""


@dataclass(frozen=True)
class Unresolvable(Resolution):
    """These two can never be used together at one moment."""


@dataclass(frozen=True)
class NoConflict(Resolution):
    """Any order is fine."""


@dataclass(frozen=True, eq=False)
class RunFirst(Resolution):
    """`callback`, one of the two, runs first.

    Args:
        callback: The instance that runs before the other one.
    """

    callback: Any


ResolutionFn = Callable[[Any, Any], Resolution]


class _Registry:
    """Resolutions for pairs of classes that one does not own.

    Register with the decorator `@resolveconflict.register(A, B)`; the function gets an `A` (or
    subclass) and a `B`, in this order, and returns a resolution. The most specific pair of
    classes answers.
    """

    def __init__(self) -> None:
        self._functions: dict[tuple[type, type], ResolutionFn] = {}

    def register(self, first: type[Callback], second: type[Callback]) -> Callable[[ResolutionFn], ResolutionFn]:
        """Return a decorator that registers a resolution for two callback classes.

        Args:
            first: Class of the function's first argument.
            second: Class of its second.

        Raises:
            DeclarationError: One of the two is not a class.
        """
        for cls in (first, second):
            if not isinstance(cls, type):
                raise DeclarationError(
                    f"`resolveconflict.register` takes two callback classes, not {cls!r}.",
                    fix="for two instances of one class, put them into `in_order(first, second)`",
                )

        def decorate(function: ResolutionFn) -> ResolutionFn:
            self._functions[first, second] = function
            return function

        return decorate

    def unregister(self, first: type[Callback], second: type[Callback]) -> None:
        """Forget the resolution registered for exactly this pair of classes."""
        del self._functions[first, second]

    def concerns(self, cls: type) -> bool:
        """Tell whether anything is registered for a class or one of its bases."""
        bases = set(cls.__mro__)
        return any(first in bases or second in bases for first, second in self._functions)

    def answers(self, one: Any, other: Any) -> list[Resolution]:
        """Return what is registered for two instances, whichever way round: of the most specific pairs only."""
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
    """Callbacks of a list that run in this order; made by `in_order`."""

    callbacks: tuple[Any, ...]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.callbacks)


def in_order(*callbacks: Callback) -> InOrder:
    """State that these instances run in this order wherever they share a moment.

    Put the result into the callbacks list in their place: `[in_order(warmup, decay), Recorder()]`.

    Args:
        *callbacks: Two or more callback instances.

    Raises:
        DeclarationError: Fewer than two were given, or one of them twice.
    """
    if len(callbacks) < 2:
        raise DeclarationError(
            f"`in_order` orders two or more callbacks; {len(callbacks)} given.",
            fix="write `in_order(first, second)` inside the callbacks list",
        )
    for position, callback in enumerate(callbacks):
        if any(callback is earlier for earlier in callbacks[:position]):
            raise DeclarationError(
                f"`in_order` was given {callback!r} twice.",
                why="nothing can run before itself",
                fix="name each callback once",
            )
    return InOrder(callbacks)
