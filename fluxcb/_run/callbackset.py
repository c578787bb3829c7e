"""`learner.callbacks`: the callbacks of a Learner, exchangeable one by one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from fluxcb._declare.callback import Callback, unwrap
from fluxcb._declare.resolution import InOrder
from fluxcb._errors import DeclarationError, did_you_mean
from fluxcb._run.measuring import Timings

__all__ = ["CallbackSet"]

C = TypeVar("C", bound=Callback)


class CallbackSet:
    """The callbacks of a Learner; each change re-checks the whole set, and is undone if the check fails.

    Args:
        items: The list, `in_order` groups included.
        install: Checks a list and puts it to work.
        measure: Turns the measuring of handlers on or off.
        timings: Returns what was measured.
    """

    def __init__(
        self,
        items: Iterable[Any],
        install: Callable[[list[Any]], None],
        measure: Callable[[bool], None],
        timings: Callable[[], Timings],
    ) -> None:
        self._items = list(items)
        self._install = install
        self._measure = measure
        self._timings = timings

    def __iter__(self) -> Iterator[Callback]:
        for item in self._items:
            if isinstance(item, InOrder):
                yield from item
            else:
                yield item

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, callback: object) -> bool:
        return any(c is callback or unwrap(c) is callback for c in self)

    def __repr__(self) -> str:
        return f"[{', '.join(map(repr, self))}]"

    def get(self, cls: type[C]) -> C:
        """Return the first callback of a class, looking inside wrappers.

        Raises:
            DeclarationError: There is none.
        """
        for callback in self:
            inner = unwrap(callback)
            if isinstance(inner, cls):
                return inner
        names = [type(unwrap(c)).__name__ for c in self]
        raise DeclarationError(
            f"This Learner has no {cls.__name__}.{did_you_mean(cls.__name__, names)}",
            fix=f"add one: `learner.callbacks.add({cls.__name__}(...))`; it has {', '.join(names) or 'no callbacks'}",
        )

    def measure(self, on: bool = True) -> None:
        """Measure what each host handler costs from now on, or stop measuring.

        Args:
            on: Whether to measure; turning it on again starts from zero.

        Raises:
            DeclarationError: The Learner is fitting.
        """
        self._measure(on)

    def timings(self) -> Timings:
        """Return what the host handlers have cost since `measure()`: calls, time, and reads of the device.

        Each entry has the handler, the moment, its calls, its time (s) and how often it made the host read a value of
        the device, and which. What the engine itself waits for stands in the last one. `rich.print` shows a table.

        Raises:
            DeclarationError: Nothing has been measured.

        Example:
            >>> from fluxcb.testing import EventLog, testlearner
            >>> learner = testlearner(EventLog(), batches=8, validation_batches=0)
            >>> learner.callbacks.measure()
            >>> learner.fit(1)
            >>> [(row.moment, row.calls) for row in learner.callbacks.timings() if "StepEnd" in row.moment]
            [('StepEnd x TrainingPhase', 8)]
        """
        return self._timings()

    def set(self, callbacks: Iterable[Any]) -> None:
        """Replace all callbacks, defaults included.

        Raises:
            FluxcbError: The new set is not valid; the old one stays.
        """
        items = list(callbacks)
        self._install(items)
        self._items = items

    def add(self, *callbacks: Any) -> None:
        """Add callbacks at the end of the list.

        Raises:
            FluxcbError: The new set is not valid; the old one stays.
        """
        self.set([*self._items, *callbacks])

    def replace(self, callback: Callback) -> None:
        """Put a callback in the place of the one of its class.

        Raises:
            DeclarationError: There is none of its class.
            FluxcbError: The new set is not valid; the old one stays.
        """
        old = self.get(type(unwrap(callback)))
        self.set(_exchanged(self._items, old, [callback]))

    def remove(self, callback: Callback | type[Callback]) -> None:
        """Remove a callback, given as an instance or by class.

        Raises:
            DeclarationError: It is not there.
            FluxcbError: The remaining set is not valid; the old one stays.
        """
        old = self.get(callback) if isinstance(callback, type) else unwrap(callback)
        if old not in self:
            raise DeclarationError(f"{callback!r} is not a callback of this Learner.", fix="see `learner.callbacks`")
        self.set(_exchanged(self._items, old, []))


def _exchanged(items: list[Any], old: Callback, new: list[Any]) -> list[Any]:
    result: list[Any] = []
    for item in items:
        if isinstance(item, InOrder):
            group = [c for member in item for c in (new if unwrap(member) is old else [member])]
            result += [InOrder(tuple(group))] if len(group) > 1 else group
        elif unwrap(item) is old:
            result += new
        else:
            result.append(item)
    return result
