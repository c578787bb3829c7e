"""Handlers with a deadline: each gets a copy of what it declares, and runs on a thread while training goes on."""

from __future__ import annotations

import contextvars
import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from fluxcb._compile.access_source import access_source
from fluxcb._compile.call_errors import host_returned
from fluxcb._compile.plan import HostCall
from fluxcb._compile.protect import make_proxy
from fluxcb._declare.access import Permission, dotted
from fluxcb._declare.control import Cancel, PauseFitting
from fluxcb._declare.deadlines import is_deadline
from fluxcb._declare.events import Event
from fluxcb._declare.phases import Phase
from fluxcb._declare.state import PROGRESS
from fluxcb._errors import AccessError, DeclarationError
from fluxcb._run.views import copied_view, is_view
from fluxcb._typing import StatePath

__all__ = ["MAX_WAITING", "DeferredCalls"]

MAX_WAITING = 2
"""Maximum number of calls of a callback that have not finished. Each of them holds copies of what it reads."""


@dataclass(eq=False)
class _Work:
    """A call that was handed to a thread."""

    call: HostCall
    phase: type[Phase]
    future: Future[None]
    note: str


class DeferredCalls:
    """The calls of handlers with a deadline that have not been waited for.

    The calls of one callback run one after the other, on a thread of the callback.

    Args:
        in_fit: Returns whether a fit is running. Otherwise, handlers run at once, because no FitEnd would wait for
            them.
        moment: Returns the epoch and the step, for messages.
    """

    def __init__(self, in_fit: Callable[[], bool], moment: Callable[[], str]) -> None:
        self._in_fit, self._moment = in_fit, moment
        self._threads: dict[int, ThreadPoolExecutor] = {}  # by the position of the callback
        self.works: list[_Work] = []

    def deferred(self, call: HostCall) -> HostCall:
        """Return a call that hands the handler to a thread."""
        handler = call.handler
        copies = _Copies()
        source = access_source(handler)
        view = make_proxy(handler.access, copies, declared=source, where=source.where)

        def run(values: Mapping[StatePath, Any], event: Event, phase: Phase) -> None:
            copies.values = values  # only one call of the callback runs at a time
            if (returned := handler.function(event, phase, view)) is not None:
                raise host_returned(handler, returned)

        def submit(event: Event, phase: Phase, learner: Any) -> None:
            if not self._in_fit():
                run(_copied_values(call, learner), event, phase)
                return
            # The events of a step are run without `wait_for`. A handler whose deadline is its own event waits here for
            # its last call.
            if (deadline := handler.handler.deadline) is not None and isinstance(event, deadline):
                self._wait([work for work in self.works if work.call.handler is handler])
            position = handler.declared.position
            mine = [work.future for work in self.works if work.call.handler.declared.position == position]
            # Before the values are copied. A handler that is slower than the training would otherwise fill the memory
            # with copies.
            while len(unfinished := [future for future in mine if not future.done()]) >= MAX_WAITING:
                wait(unfinished, return_when=FIRST_COMPLETED)
            if position not in self._threads:
                # One thread for each callback, so that its calls run in order and `copies.values` belongs to the
                # running call.
                self._threads[position] = ThreadPoolExecutor(1, thread_name_prefix="fluxcb-deadline")
            job = functools.partial(run, _copied_values(call, learner), event, phase)
            # The handler sees the context variables of the thread that called `fit`, as without a deadline.
            future = self._threads[position].submit(contextvars.copy_context().run, job)
            # Formatted now, because the counters are those of a later step when the call fails.
            note = f"called at {event!r} x {type(phase).__name__}, {self._moment()}"
            self.works.append(_Work(call, type(phase), future, note))

        return replace(call, function=submit)

    def wait_for(self, event: Event, phase: Phase) -> None:
        """Wait for the calls that must have finished before an event.

        Raises:
            BaseException: The exception of the first call that has failed, with a note that names it.
        """
        self._wait(
            [
                work
                for work in self.works
                if (deadline := work.call.handler.handler.deadline) is not None
                and is_deadline(deadline, work.phase, type(event), type(phase))
            ]
        )

    def finish(self) -> list[BaseException]:
        """Wait for all calls, end the threads, and return the exceptions of the calls that have failed."""
        failures: list[BaseException] = []
        while self.works:
            try:
                # One by one, because the failure of a call must not end the wait for the others.
                self._wait(self.works[:1])
            except BaseException as error:
                failures.append(error)
        for thread in self._threads.values():
            thread.shutdown()
        self._threads.clear()
        return failures

    def _wait(self, works: list[_Work]) -> None:
        for work in works:
            # Before the wait, so that `finish` does not raise the same exception again.
            self.works.remove(work)
            try:
                work.future.result()
            except (Cancel, PauseFitting) as error:
                raise AccessError(
                    f"{work.call.handler.declared.label} raises {type(error).__name__} in a handler with a deadline.",
                    where=work.call.handler.where,
                    why="further steps have run in the meantime",
                    fix="leave out `deadline`",
                ) from error
            except BaseException as error:
                deadline = work.call.handler.handler.deadline
                # Otherwise, the exception comes from a signal during the wait, and not from the handler.
                if work.future.done():
                    error.add_note(
                        f"raised by {work.call.handler.declared.label} in {work.call.handler.where}, {work.note}, "
                        f"with the deadline {deadline.__name__ if deadline is not None else None}"
                    )
                raise


class _Copies:
    """The backend of a protected learner that reads from copies.

    Attributes:
        values: The copies for the running call, by path.
    """

    def __init__(self) -> None:
        self.values: Mapping[StatePath, Any] = {}

    def read(self, path: StatePath, permission: Permission) -> Any:
        """Return the copy of the value at a path."""
        # The value may be a part of a copy: a handler that declares `params` also reads `params.w`.
        for length in range(len(path), 0, -1):
            if path[:length] in self.values:
                value = self.values[path[:length]]
                for name in path[length:]:
                    value = value[name] if isinstance(value, Mapping) else getattr(value, name)
                return value
        raise KeyError(dotted(path))

    def reader(self, path: StatePath, permission: Permission) -> Callable[[Any], Any]:
        """Return the getter of a path."""
        return lambda view: self.read(path, permission)

    def write(self, path: StatePath, value: Any, permission: Permission) -> None:
        """Do nothing: such a handler declares no write, so the protected learner refuses it."""

    def refused_write(self, path: StatePath) -> None:
        """Return None: the declaration of a write has its own error for a handler with a deadline."""

    def undeclared_fix(self, path: StatePath, permission: Permission) -> str:
        """Return an empty string: the copies do not tell what exists."""
        return ""

    def names(self, path: StatePath) -> Iterator[str]:
        """Iterate over the names that exist below a path."""
        below = {known[len(path)] for known in self.values if len(known) > len(path) and known[: len(path)] == path}
        whole = self.values.get(path)
        return iter(sorted(below | set(whole if isinstance(whole, Mapping) else ())))

    def hub(self, path: StatePath) -> None:
        """Return None: a copy has no methods that take the names of parts."""


def _copied_values(call: HostCall, learner: Any) -> dict[StatePath, Any]:
    """Return copies of all values that a handler may read."""
    # Handlers read the counters and the key without declaring them, and both change with each step.
    values: dict[StatePath, Any] = {("progress", name): getattr(learner.progress, name) for name in PROGRESS}
    values["key",] = learner.key
    for path in call.handler.access:
        view = learner
        # From the protected learner of the handler, which reads the values of the handler's own step.
        for name in path:
            view = view[name]
        # A whole namespace such as `hyperparams` has no value of its own.
        found = {name: view[name] for name in view} if path in (("step",), ("cbstate",), ("hyperparams",)) else view
        values[path] = _copied(found, f"{call.handler.declared.label} cannot get a copy of `{dotted(path)}`")
    return values


def _copied(value: Any, problem: str) -> Any:
    if isinstance(value, jax.Array):  # the live arrays are never read: a host handler gets copies
        return value
    if isinstance(value, np.ndarray):
        value = np.array(value)
        value.flags.writeable = False
        return value
    try:
        if is_view(value):
            return copied_view(value)
        if isinstance(value, Mapping):
            return {key: _copied(item, problem) for key, item in value.items()}
        if type(value) in (list, tuple):
            return type(value)(_copied(item, problem) for item in value)
        return copy.deepcopy(value)
    except DeclarationError:  # raised for an item of the value
        raise
    except Exception as error:
        raise DeclarationError(
            f"{problem}: {type(error).__name__}: {error}.",
            why="a handler with a deadline runs while training goes on, so it needs copies of what it reads",
            fix="declare the parts that it reads, or leave out `deadline`",
        ) from error
