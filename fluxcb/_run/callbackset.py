"""`CallbackSet`: `learner.callbacks`, the callbacks of a Learner, which can be replaced one by one."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Set
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from fluxcb._calls import entry_point
from fluxcb._check.graph import CallbackGraph
from fluxcb._declare.callback import Callback, unwrap
from fluxcb._declare.resolution import InOrder
from fluxcb._declare.signatures import current_definition
from fluxcb._declare.uncopied import Uncopied
from fluxcb._errors import DeclarationError, did_you_mean
from fluxcb._run.costs import handler_notes
from fluxcb._run.instrumentation import measure, trace
from fluxcb._run.learner_core import LearnerCore
from fluxcb._run.meter import Timings
from fluxcb._run.switches import switch

__all__ = ["CallbackSet"]

_CALLS = {
    "append": "write `learner.callbacks.add(callback)`",
    "extend": "write `learner.callbacks.add(*callbacks)`",
    "insert": "write `learner.callbacks.set([...])` with the whole list",
}
"""Methods of lists that a CallbackSet does not have, each with what to do instead."""

C = TypeVar("C", bound=Callback)


class CallbackSet(Uncopied):
    """The callbacks of a Learner. Each change checks the whole set again, and is undone if the check fails.

    Args:
        items: The list, including `in_order` groups.
        core: The core of the Learner.
    """

    copied_instead = ("create the callbacks again, because an instance belongs to one Learner",)

    def __init__(self, items: Iterable[Any], core: LearnerCore) -> None:
        self._items = list(items)
        self._core = core

    if not TYPE_CHECKING:  # type checkers must report unknown attributes

        @entry_point
        def __getattr__(self, name: str) -> Any:
            if name not in _CALLS:
                return object.__getattribute__(self, name)  # raises the error of Python, or that of a property
            # `getattr` with a default and `hasattr` expect an AttributeError, so the fix becomes part of its text.
            error = DeclarationError(f"`learner.callbacks` has no attribute `{name}`.", fix=_CALLS[name])
            raise AttributeError(str(error), name=name)  # with `obj`, Python would add a suggestion of its own

    if not TYPE_CHECKING:  # type checkers must report indexing and addition

        @entry_point
        def __getitem__(self, key: Any) -> Any:
            # The position says nothing about the order, because fluxcb decides it.
            is_class = isinstance(key, type) and issubclass(key, Callback)
            raise TypeError(
                str(
                    DeclarationError(
                        f"`learner.callbacks` has no entry {key!r}, because it is neither a list nor a dict.",
                        fix=f"write `learner.callbacks.get({key.__name__})`"
                        if is_class
                        else ["write e.g. `learner.callbacks.get(Recorder)`", "write `list(learner.callbacks)[0]`"],
                    )
                )
            )

        @entry_point
        def __add__(self, other: Any) -> Any:
            # Also for `+=`. The assignment that follows could not replace the set.
            raise TypeError(
                str(
                    DeclarationError(
                        "`learner.callbacks` is not a list, so `+` does not add to it.", fix=_CALLS["extend"]
                    )
                )
            )

    def __iter__(self) -> Iterator[Callback]:
        for item in self._items:
            if isinstance(item, InOrder):
                yield from item
            else:
                yield item

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __contains__(self, callback: object) -> bool:
        # Users hold their callback, and the set may have a wrapper around it.
        return any(c is callback or unwrap(c) is callback for c in self)

    def __repr__(self) -> str:
        return f"[{', '.join(map(repr, self))}]"

    @property
    def graph(self) -> CallbackGraph:
        """The callback graph of this set, which can be drawn: `learner.callbacks.graph.render("svg")`."""
        graph = self._core.graph
        # Set here, because `_check` cannot import `_run`. The costs are computed only if a picture shows them.
        graph.handler_costs = partial(handler_notes, self._core)
        return graph

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        """Return what notebooks show: the graph."""
        return self.graph._repr_mimebundle_(include, exclude)

    @entry_point
    def get(self, cls: type[C]) -> C:
        """Return the first callback of a class, looking inside wrappers.

        Raises:
            DeclarationError: There is none, or `cls` is not a class.
        """
        if not isinstance(cls, type):
            raise DeclarationError(
                f"`learner.callbacks.get` takes a callback class, not {cls!r}.",
                fix="write e.g. `learner.callbacks.get(Recorder)`",
            )
        return self._first(cls, f"add one: `learner.callbacks.add({cls.__name__}(...))`")

    def _first(self, cls: type[C], fix: str) -> C:
        for callback in self:
            # Users ask for their callback and not for the `every(...)` around it.
            inner = unwrap(callback)
            # A notebook cell that defines a class can have run again since this callback was created.
            current = map(current_definition, type(inner).__mro__)
            if isinstance(inner, cls) or current_definition(cls) in current:
                return inner  # pyright: ignore[reportReturnType]  # the check above hides that `cls` is a type[C]
        names = [type(unwrap(c)).__name__ for c in self]
        raise DeclarationError(
            f"This Learner has no {cls.__name__}.{did_you_mean(cls.__name__, names)}",
            why=f"it has {', '.join(names) or 'no callbacks'}",
            fix=fix,
        )

    @property
    def disabled(self) -> tuple[str, ...]:
        """The names of the disabled callbacks."""
        return tuple(declared.name for declared in self._core.graph.declared if declared.disabled)

    @entry_point
    def disable(self, *names: str) -> None:
        """Disable callbacks without compiling: their handlers do not run until `enable`.

        A handler can call this method during a fit. The callbacks are then disabled after the current epoch and its
        Trigger, before a checkpoint is written. Of the handlers of a callback that was disabled during the fit, only
        those of FitEnd run.

        The compiled step stays the same. State that the disabled callbacks do not influence is therefore the same bit
        for bit. Values that they wrote to `cbstate` and to hyperparameters remain. Checkpoints record which callbacks
        are disabled.

        Args:
            *names: Names of callbacks: the class name, or the attribute `name` of the callback. If several callbacks
                have the same name, `#2` follows the name of the second one. A callback with traced handlers must be
                wrapped in `fluxcb.switchable`.

        Raises:
            DeclarationError: There is no such callback, it has traced handlers and is not `switchable`, an enabled
                callback reads a value that only the disabled ones write, or `learner.run_epoch` is running.

        Example:
            >>> from fluxcb import switchable
            >>> from fluxcb.callbacks import ClipGradients
            >>> from fluxcb.testing import testlearner
            >>> learner = testlearner(switchable(ClipGradients(0.1)))
            >>> history = learner.fit(1)
            >>> compiled = learner.compile_counts
            >>> learner.callbacks.disable("ClipGradients")
            >>> history = learner.fit(1)
            >>> learner.callbacks.disabled, learner.compile_counts == compiled
            (('ClipGradients',), True)
        """
        switch(self._core, names, on=False)

    @entry_point
    def enable(self, *names: str) -> None:
        """Enable callbacks that `disable` has disabled.

        Args:
            *names: Names of callbacks; see `disable`.

        Raises:
            DeclarationError: There is no such callback, it reads a value that only disabled callbacks write, or
                `learner.run_epoch` is running. Or a fit is running, in which the callback has missed FitBegin, for
                which it has a handler.
        """
        switch(self._core, names, on=True)

    @entry_point
    def measure(self, on: bool = True) -> None:
        """Start or stop measuring the cost of each host handler.

        Args:
            on: Whether to measure. Starting again discards the previous measurements.

        Raises:
            DeclarationError: The Learner is fitting.
        """
        measure(self._core, on)

    @entry_point
    def timings(self) -> Timings:
        """Return the cost of each host handler since `measure()`: calls, time, and reads of the device.

        Each entry has the handler, the moment, the number of calls, the time (s), and the device values that the
        handler made the host read, with counts. The last entry counts the reads of the engine itself. `rich.print`
        shows a table.

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
        return self._core.state.meter.timings()

    @entry_point
    def trace(self, path: str | os.PathLike[str], *, max_events: int = 1_000_000) -> AbstractContextManager[None]:
        """Record a timeline for chrome://tracing and ui.perfetto.dev while the context is open.

        One track shows the host: fits, epochs, pulled batches, compilations, dispatched windows, waits, and each call
        of a host handler with its event, phase, epoch, and step. Fetches and reads are nested inside, with the name of
        the handler. Another track shows when the device ran which steps. The handlers of a window run after it, in a
        span `replay handlers`. Arrows lead from the dispatch of a window to its time on the device, and from there to
        its handlers.

        Args:
            path: The file to write when the context is left, also after an error; compressed if the name ends in `.gz`.
                An existing file is replaced completely, or kept if writing fails.
            max_events: Maximum number of events. An event takes 50 bytes while recording, and about 200 in the file (15
                compressed). Later events are dropped, which the timeline shows. Fits, epochs, and compilations are
                always kept.

        Raises:
            DeclarationError: When the context is entered: the file cannot be written, the Learner is already being
                traced, or it is fitting.

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
        return trace(self._core, path, max_events)

    @entry_point
    def set(self, callbacks: Iterable[Any]) -> None:
        """Replace all callbacks, including the defaults.

        Raises:
            FluxcbError: The new set is not valid; the old one stays.
        """
        if isinstance(callbacks, str | Callback | Set | Mapping) or not isinstance(callbacks, Iterable):
            raise DeclarationError(
                f"`callbacks.set` takes a list of callback instances, not {callbacks!r}.",
                fix="write `learner.callbacks.set([...])`, or `learner.callbacks.add(...)` for one more",
            )
        items = list(callbacks)
        # First, because it raises an error for a set that is not valid, and the old list must stay then.
        self._core.reinstall(items)
        self._items = items

    @entry_point
    def add(self, *callbacks: Any) -> None:
        """Add callbacks at the end of the list.

        Raises:
            FluxcbError: The new set is not valid; the old one stays.
        """
        # The check of the set would report a list as a callback of the wrong type, which hides the mistake.
        for given in callbacks:
            if isinstance(given, list | tuple | set | frozenset) and not isinstance(given, InOrder):
                raise DeclarationError(
                    f"`learner.callbacks.add` takes callbacks one by one, not a {type(given).__name__} of them.",
                    fix="pass them one by one: `learner.callbacks.add(a, b)`",
                )
        self.set([*self._items, *callbacks])

    @entry_point
    def replace(self, callback: Callback) -> None:
        """Replace the callback of the same class.

        Raises:
            DeclarationError: There is no callback of this class.
        """
        if not isinstance(callback, Callback):
            raise DeclarationError(
                f"`learner.callbacks.replace` takes a callback instance, not {callback!r}.",
                fix=f"write `learner.callbacks.replace({callback.__name__}(...))`"
                if isinstance(callback, type)
                else "write e.g. `learner.callbacks.replace(EarlyStopping(3))`",
            )
        old = self.get(type(unwrap(callback)))
        self.set(_exchanged(self._items, old, [callback]))

    @entry_point
    def remove(self, callback: Callback | type[Callback]) -> None:
        """Remove a callback, which is passed as an instance or as a class.

        Raises:
            DeclarationError: The Learner does not have this callback.
        """
        # Users keep a reference to their own callback, and not to the wrapper around it.
        absent = self._by_name(callback) or "delete this call, or pass one of the callbacks in `learner.callbacks`"
        old = self._first(callback, absent) if isinstance(callback, type) else unwrap(callback)
        if old not in self:
            raise DeclarationError(f"{callback!r} is not a callback of this Learner.", fix=absent)
        self.set(_exchanged(self._items, old, []))

    def _by_name(self, name: Any) -> str:
        """Return the call that removes the callback with a name, or "" if there is none."""
        inner = [unwrap(callback) for callback in self]
        if any(type(callback).__name__ == name for callback in inner):
            return f"write `learner.callbacks.remove(learner.callbacks.get({name}))`"
        if isinstance(name, str) and any(callback.name == name for callback in self):
            return f"write `learner.callbacks.remove(next(c for c in learner.callbacks if c.name == {name!r}))`"
        return ""


def _exchanged(items: list[Any], old: Callback, new: list[Any]) -> list[Any]:
    result: list[Any] = []
    for item in items:
        if isinstance(item, InOrder):
            # Replacing a member must keep the order that the group states.
            group = [c for member in item for c in (new if unwrap(member) is old else [member])]
            # An order needs two or more callbacks, so a single remaining callback leaves the group.
            result += [InOrder(tuple(group))] if len(group) > 1 else group
        elif unwrap(item) is old:
            result += new
        else:
            result.append(item)
    return result
