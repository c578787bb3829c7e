"""Running host handlers on threads, with the state that they share.

The thread that called `fit` schedules the handlers. It also runs the handlers that must run alone or that are too short
for a thread. With the serial executor, nothing in this file is used.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import heapq
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AbstractContextManager
from typing import Any
from weakref import WeakKeyDictionary

from fluxcb._compile.call_errors import host_returned
from fluxcb._compile.lent_values import LentValues
from fluxcb._compile.plan import HostCall, Plan
from fluxcb._declare.access import Permission
from fluxcb._declare.control import Cancel, PauseFitting
from fluxcb._declare.declared import Declared
from fluxcb._declare.events import Event
from fluxcb._declare.phases import Phase
from fluxcb._errors import AccessError, DeclarationError
from fluxcb._run.concurrency import Concurrency, concurrency_of
from fluxcb._run.emitter import Emitter, handler_label
from fluxcb._run.executors import Executor, Pool
from fluxcb._run.host_backend import HostBackend
from fluxcb._run.meter import HandlerTime, Meter
from fluxcb._run.programs import Programs
from fluxcb._run.services import Services
from fluxcb._run.state import HostState
from fluxcb._typing import StatePath

__all__ = ["LentByThread", "SharedMeter", "ThreadedEmitter"]

WORTH_A_THREAD = 1e-4
"""A handler whose last run was shorter (s) stays on the main thread, because a handover takes about 30 us.

Otherwise threads would make steps slower. The choice of the thread changes no result.
"""


class SharedMeter(Meter):
    """A meter that handlers on several threads can use concurrently."""

    def __init__(self) -> None:
        # Before the constructor of the base class, which sets `_current`.
        self._lock = threading.Lock()
        self._rows_at_work = threading.local()
        super().__init__()

    @property
    def _current(self) -> HandlerTime:
        # Each thread runs another handler, to which its reads are counted.
        return getattr(self._rows_at_work, "row", self._engine)

    @_current.setter
    def _current(self, row: HandlerTime) -> None:
        self._rows_at_work.row = row

    def _count(self, what: str) -> None:
        with self._lock:
            super()._count(what)


class LentByThread(LentValues, threading.local):
    """The lent containers of each thread: `threading.local` calls `__init__` once per thread."""


class SharedBackend(HostBackend):
    """Serializes reads and writes, because the carry, its copies, and windows are not thread-safe.

    Args:
        state: The state.
        declared: The callback.
        services: The services that handlers reach besides the state.
        lock: Held while the carry, a copy of it, or a value of a window is read or replaced. These operations are short
            compared with the rest of an expensive handler.
    """

    def __init__(
        self, state: HostState, declared: Declared, services: Services, lock: AbstractContextManager[Any]
    ) -> None:
        super().__init__(state, declared, services)
        self._lock = lock

    def _value(self, path: StatePath, permission: Permission) -> Any:
        with self._lock:
            return super()._value(path, permission)

    def write(self, path: StatePath, value: Any, permission: Permission) -> None:
        """Replace the value at a path."""
        with self._lock:
            super().write(path, value, permission)


class ThreadedEmitter(Emitter):
    """Runs the handlers of a moment on threads, as far as the graph allows.

    Args:
        state: The state.
        programs: Has the plan.
        executor: Provides the threads.
    """

    def __init__(self, state: HostState, programs: Programs, executor: Executor) -> None:
        super().__init__(state, programs)
        self._lock = threading.RLock()
        self._executor = executor
        self._in_fit = False
        self._pool: Pool | None = None
        self._concurrent = False  # whether handlers of the current moment may be running on other threads
        # Weak, so that the plans of replaced callbacks can be freed.
        self._concurrency: WeakKeyDictionary[Plan, dict[tuple[HostCall, ...], Concurrency | None]] = WeakKeyDictionary()

    def backend(self, declared: Declared, services: Services) -> SharedBackend:
        """Return the backend through which the protected learners of a callback read and write."""
        return SharedBackend(self.state, declared, services, self._lock)

    @contextlib.contextmanager
    def threads(self) -> Iterator[None]:
        """Return a context that keeps the threads, which start when they are first needed."""
        self._in_fit = True
        try:
            yield
        finally:
            self._in_fit = False
            pool, self._pool = self._pool, None
            if pool is not None:
                pool.shutdown()

    def run_calls(self, calls: Sequence[HostCall], event: Event, phase: Phase) -> None:
        """Run the host calls that are due, concurrently where that is possible."""
        self.refuse_concurrent(f"{event!r} x {type(phase).__name__}")
        # Outside of `threads()`, nothing would end the pool. A single handler has nothing to overlap with.
        if not self._in_fit or len(calls) < 2:
            super().run_calls(calls, event, phase)
            return
        # Which handlers may overlap depends on the graph only, so it is computed once per plan and moment.
        calls = tuple(calls)
        by_calls = self._concurrency.setdefault(self.plan, {})
        if calls not in by_calls:
            by_calls[calls] = concurrency_of(calls, self.plan.graph)
        handlers = by_calls[calls]
        if handlers is None:
            super().run_calls(calls, event, phase)
        else:
            _Emission(self, handlers, event, phase).run()

    def refuse_concurrent(self, what: str) -> None:
        """Refuse an action that must not happen while handlers run on other threads."""
        if self._concurrent:
            raise DeclarationError(
                f"A handler requests {what} while other handlers of its moment may be running on other threads.",
                why="it would change the counters and the step that the other handlers read",
                fix="write `main_thread = True` in the body of its class: its handlers then run alone, on the thread "
                "that called `fit`",
            )

    # -- for `_Emission` ------------------------------------------------------------------------

    @property
    def pool(self) -> Pool:
        """The threads."""
        if self._pool is None:
            self._pool = self._executor.open()
        if self._pool is None:
            raise TypeError(f"{self._executor!r} gives no threads")
        return self._pool

    @contextlib.contextmanager
    def concurrent(self, concurrent: bool) -> Iterator[None]:
        """Set whether handlers may be running on other threads, until the context is left."""
        outer, self._concurrent = self._concurrent, concurrent
        try:
            yield
        finally:
            self._concurrent = outer

    def is_due(self, call: HostCall, event: Event, phase: Phase) -> bool:
        """Return whether a call is due."""
        due = not call.schedules or self._due(call, phase, event)
        if self._lent.entries:  # a predicate has read something
            self._lent.verify()
        return due


class _Emission:
    """One event's handlers, while they run.

    Args:
        emitter: Runs handlers.
        handlers: The handlers of the event, with their dependencies.
        event: The event.
        phase: The phase.
    """

    def __init__(self, emitter: ThreadedEmitter, handlers: Concurrency, event: Event, phase: Phase) -> None:
        self._emitter, self._handlers = emitter, handlers
        self._train, self._lent = emitter.state.train, emitter.state.moment.lent
        self._event, self._phase = event, phase
        self._needs = list(handlers.needs)
        # A heap, so that handlers start in serial order.
        self._ready = [i for i, number in enumerate(self._needs) if number == 0]
        self._due: list[int] = []  # stored, because a clock must be polled only once
        self._running: dict[Future[Any], int] = {}
        self._raised: dict[int, BaseException] = {}

    def run(self) -> None:
        """Run the handlers. Return or raise only after all of them have finished."""
        try:
            with self._emitter.concurrent(True):
                while True:
                    if not self._raised:  # after an error, only wait for the running handlers
                        inline = self._start()
                        if inline is not None:
                            self._run_inline(inline)
                            continue
                    if not self._running:
                        break
                    self._wait_for_one()
        except BaseException:  # a second Ctrl-C; no handler may still run after the moment
            wait(self._running)
            raise
        finally:
            # The readers of a moment share copies of the carry, and later steps change it.
            self._train.forget_copies()
        if self._raised:
            self._raise()

    def _start(self) -> int | None:
        """Start ready handlers on threads where it pays off; return the one to run on this thread, or None."""
        handlers = self._handlers
        while self._ready:
            i = heapq.heappop(self._ready)
            try:
                due = self._emitter.is_due(handlers.calls[i], self._event, self._phase)
            except Exception as error:
                self._raised[i] = error
                return None
            if due:
                self._due.append(i)
            else:
                self._release_dependents(i)
        # A thread pays off only for an expensive handler that can overlap with another one.
        expensive = [i for i in self._due if handlers.seconds[i] >= WORTH_A_THREAD and not handlers.alone[i]]
        cheap = [i for i in self._due if i not in expensive]
        if len(expensive) > 1 or (expensive and self._running):
            # In serial order, so that they begin in the same order in each run.
            for i in sorted(expensive):
                # Handlers see the context variables of the thread that called `fit`, as in serial runs.
                job = functools.partial(contextvars.copy_context().run, functools.partial(self._call_handler, i))
                self._running[self._emitter.pool.submit(job)] = i
            self._due, expensive = cheap, []
        # Cheap handlers go first: handlers that wait for them can then overlap with the expensive one.
        inline = min(cheap or expensive, default=None)
        if inline is not None:
            self._due.remove(inline)
        return inline

    def _run_inline(self, i: int) -> None:
        with self._emitter.concurrent(not self._handlers.alone[i]):
            self._call_handler(i)
        error = self._raised.get(i)
        if error is None:
            self._release_dependents(i)
        elif not isinstance(error, Exception):  # KeyboardInterrupt and SystemExit do not wait for other handlers
            raise self._emitter.explain_error(error, self._handlers.calls[i], self._event, self._phase)

    def _call_handler(self, i: int) -> None:
        """Run one handler, on any thread."""
        call, lent = self._handlers.calls[i], self._lent
        began = time.perf_counter()
        lent.forget()
        try:
            if (returned := call.function(self._event, self._phase, call.learner)) is not None:
                raise host_returned(call.handler, returned)
            lent.verify()
        except PauseFitting as request:
            try:
                self._emitter.pause(request, call, self._event)
            # Outside a fit, `pause` raises the request again. It refuses a handler that does not declare `control`.
            except (PauseFitting, AccessError) as error:
                self._raised[i] = error
        except BaseException as error:
            self._raised[i] = error
        finally:
            lent.forget()
            # Decides where the handler runs next time.
            self._handlers.seconds[i] = time.perf_counter() - began

    def _wait_for_one(self) -> None:
        """Wait until a handler on a thread has finished."""
        # Not all of them: each handler that finishes can release others.
        done, _ = wait(self._running, return_when=FIRST_COMPLETED)
        for future in done:
            i = self._running.pop(future)
            error = future.exception()
            if error is not None:  # from the executor; exceptions of handlers are in `_raised`
                self._raised[i] = error
            elif i not in self._raised:
                self._release_dependents(i)

    def _release_dependents(self, i: int) -> None:
        for j in self._handlers.after[i]:
            self._needs[j] -= 1
            if not self._needs[j]:
                heapq.heappush(self._ready, j)

    def _raise(self) -> None:
        """Raise the exception of the first handler in serial order, a Cancel only if there is no other exception."""
        calls, event, phase = self._handlers.calls, self._event, self._phase
        raised = {i: self._emitter.explain_error(error, calls[i], event, phase) for i, error in self._raised.items()}
        # The serial order makes the result independent of the timing of the threads.
        order = sorted(raised, key=lambda i: (isinstance(raised[i], Cancel), i))
        first = raised[order[0]]
        for i in order[1:]:
            first.add_note(f"and by {handler_label(calls[i])}: {type(raised[i]).__name__}: {raised[i]}")
        self._raised.clear()  # otherwise the exception would reference itself through this frame
        raise first
