"""`learner.callbacks`: the callbacks of a Learner, exchangeable one by one."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from fluxcb._check.graph import CallbackGraph
from fluxcb._declare.callback import Callback, unwrap
from fluxcb._declare.resolution import InOrder
from fluxcb._errors import DeclarationError, did_you_mean
from fluxcb._run.measuring import Timings
from fluxcb._tracebacks import entry_point

__all__ = ["CallbackSet"]

C = TypeVar("C", bound=Callback)


class CallbackSet:
    """The callbacks of a Learner; each change re-checks the whole set, and is undone if the check fails.

    Args:
        items: The list, `in_order` groups included.
        install: Checks a list and puts it to work.
        measure: Turns the measuring of handlers on or off.
        timings: Returns what was measured.
        trace: Records a timeline of so many events, and writes it to a file.
        graph: Returns the graph of the set at work.
    """

    def __init__(
        self,
        items: Iterable[Any],
        install: Callable[[list[Any]], None],
        measure: Callable[[bool], None],
        timings: Callable[[], Timings],
        trace: Callable[[str | os.PathLike[str], int], AbstractContextManager[None]],
        graph: Callable[[], CallbackGraph],
    ) -> None:
        self._items = list(items)
        self._install = install
        self._measure = measure
        self._timings = timings
        self._trace = trace
        self._graph = graph

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

    @property
    def graph(self) -> CallbackGraph:
        """The callback graph of the set at work, which can be drawn: `learner.callbacks.graph.render("svg")`."""
        return self._graph()

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """Return what notebooks show: the graph."""
        return self.graph._repr_mimebundle_(include, exclude)

    def get(self, cls: type[C]) -> C:
        """Return the first callback of a class, looking inside wrappers.

        Raises:
            DeclarationError: There is none, or it is no class.
        """
        if not isinstance(cls, type):
            raise DeclarationError(
                f"`learner.callbacks.get` takes a callback class, not {cls!r}.",
                fix="e.g. `learner.callbacks.get(Recorder)`",
            )
        for callback in self:
            inner = unwrap(callback)
            if isinstance(inner, cls):
                return inner  # pyright: ignore[reportReturnType]  # the check above hides that `cls` is a type[C]
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
            >>> history = learner.fit(1)
            >>> [(row.moment, row.calls) for row in learner.callbacks.timings() if "StepEnd" in row.moment]
            [('StepEnd x TrainingPhase', 8)]
        """
        return self._timings()

    def trace(self, path: str | os.PathLike[str], *, max_events: int = 1_000_000) -> AbstractContextManager[None]:
        """Record what happens when, for chrome://tracing and ui.perfetto.dev, while the context is open.

        One track shows the host: fits, epochs, pulled batches, compilations, dispatched windows, waits, and each call
        of a host handler with its event, phase, epoch and step; fetches and reads lie inside, with who asked. The other
        shows when the device ran which steps. Handlers of a window run after it, in a span `replay handlers`; arrows
        lead from a window's dispatch to the device's time, and from there to its handlers.

        Args:
            path: The file to write when the context is left, also by an error; compressed if it ends in `.gz`. What was
                there before is replaced, or kept whole.
            max_events: How many events to keep. They take 50 bytes each while recording, and about 200 in the file
                (15 compressed). What comes later is missing, and the timeline says so; fits, epochs and compilations
                are always kept.

        Raises:
            DeclarationError: On entering: the file cannot be written, the Learner is being traced already, or is
                fitting.

        Example:
            >>> import json
            >>> from pathlib import Path
            >>> from fluxcb.testing import EventLog, testlearner
            >>> learner = testlearner(EventLog(), batches=8, validation_batches=0)
            >>> with learner.callbacks.trace("trace.json"):
            ...     history = learner.fit(1)
            >>> events = json.loads(Path("trace.json").read_text())["traceEvents"]
            >>> [
            ...     e["args"]["step"]
            ...     for e in events
            ...     if e["name"] == "EventLog.record" and e["args"]["event"] == "StepEnd"
            ... ]
            [1, 2, 3, 4, 5, 6, 7, 8]
        """
        return self._trace(path, max_events)

    @entry_point
    def set(self, callbacks: Iterable[Any]) -> None:
        """Replace all callbacks, defaults included.

        Raises:
            FluxcbError: The new set is not valid; the old one stays.
        """
        if isinstance(callbacks, str | Callback) or not isinstance(callbacks, Iterable):
            raise DeclarationError(
                f"`callbacks.set` takes a list of callback instances, not {callbacks!r}.",
                fix="write `learner.callbacks.set([...])`, or `learner.callbacks.add(...)` for one more",
            )
        items = list(callbacks)
        self._install(items)
        self._items = items

    @entry_point
    def add(self, *callbacks: Any) -> None:
        """Add callbacks at the end of the list.

        Raises:
            FluxcbError: The new set is not valid; the old one stays.
        """
        for given in callbacks:
            if isinstance(given, list | tuple | set | frozenset) and not isinstance(given, InOrder):
                raise DeclarationError(
                    f"`learner.callbacks.add` takes callbacks one by one, not a {type(given).__name__} of them.",
                    fix="pass them one by one: `learner.callbacks.add(a, b)`",
                )
        self.set([*self._items, *callbacks])

    @entry_point
    def replace(self, callback: Callback) -> None:
        """Put a callback in the place of the one of its class.

        Raises:
            DeclarationError: There is none of its class.
            FluxcbError: The new set is not valid; the old one stays.
        """
        if not isinstance(callback, Callback):
            raise DeclarationError(
                f"`learner.callbacks.replace` takes a callback instance, not {callback!r}.",
                fix=f"write `learner.callbacks.replace({callback.__name__}(...))`"
                if isinstance(callback, type)
                else "e.g. `learner.callbacks.replace(EarlyStopping(3))`",
            )
        old = self.get(type(unwrap(callback)))
        self.set(_exchanged(self._items, old, [callback]))

    @entry_point
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
