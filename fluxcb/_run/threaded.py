"""The engine whose handlers of one moment run on threads, and the state that they share.

The thread that called `fit` decides what starts when, and runs what has to run by itself or is not worth a thread. With
the serial executor nothing of this file is in use.
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
from typing import Any

from fluxcb._compile.plan import HostCall, Plan
from fluxcb._declare.access import Permission
from fluxcb._declare.control import Cancel, PauseFitting
from fluxcb._declare.declared import Declared
from fluxcb._declare.events import Event, StepBegin, StepEnd
from fluxcb._declare.phases import Phase
from fluxcb._errors import AccessError, DeclarationError
from fluxcb._run.engine import Engine, whose
from fluxcb._run.executors import Executor, Pool
from fluxcb._run.feed import Feed
from fluxcb._run.host_backend import HostBackend
from fluxcb._run.measuring import HandlerTime, Meter
from fluxcb._run.moments import Concurrency, concurrency_of
from fluxcb._run.programs import Programs
from fluxcb._run.state import HostState
from fluxcb._typing import StatePath

__all__ = ["SharedState", "ThreadedEngine"]

WORTH_A_THREAD = 1e-4
"""A handler that took less (s) when it last ran is run where it is: handing it to a thread takes some 30 us."""


class SharedMeter(Meter):
    """A meter that handlers on several threads use at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rows_at_work = threading.local()
        super().__init__()

    @property
    def _current(self) -> HandlerTime:
        return getattr(self._rows_at_work, "row", self._engine)

    @_current.setter
    def _current(self, row: HandlerTime) -> None:
        self._rows_at_work.row = row

    def _count(self, what: str) -> None:
        with self._lock:
            super()._count(what)


class _ByThread(threading.local):
    def __init__(self) -> None:
        self.handed: list[tuple[str, StatePath, Any, list[Any], Any]] = []


class SharedState(HostState):
    """A state that handlers on several threads use at once.

    Attributes:
        lock: Held while the carry, a copy of it or a window's value is looked up or exchanged.
    """

    def __init__(self, **parts: Any) -> None:
        self.lock = threading.RLock()
        self._by_thread = _ByThread()
        super().__init__(**parts)
        self.meter = SharedMeter()

    @property  # of an attribute, which the serial path reads faster
    def handed(self) -> list[tuple[str, StatePath, Any, list[Any], Any]]:
        """Containers that the handler on this thread was given."""
        return self._by_thread.handed

    @handed.setter
    def handed(  # pyright: ignore[reportIncompatibleVariableOverride]  # see above
        self, handed: list[tuple[str, StatePath, Any, list[Any], Any]]
    ) -> None:
        self._by_thread.handed = handed


class SharedBackend(HostBackend):
    """Reads and writes one at a time: what is not thread-safe below is made so here."""

    _state: SharedState

    def _value(self, path: StatePath, permission: Permission) -> Any:
        with self._state.lock:
            return super()._value(path, permission)

    def write(self, path: StatePath, value: Any, permission: Permission) -> None:
        """Replace the value at a path."""
        with self._state.lock:
            super().write(path, value, permission)


class ThreadedEngine(Engine):
    """Runs the handlers of a moment on threads, as far as the graph allows.

    Args:
        state: The state.
        programs: The compiled programs.
        executor: Gives the threads.
    """

    state: SharedState

    def __init__(self, state: SharedState, programs: Programs, executor: Executor) -> None:
        super().__init__(state, programs)
        self._executor = executor
        self._in_fit = False
        self._pool: Pool | None = None
        self._at_once = False  # whether handlers of the moment at hand may be running on other threads
        self._known: dict[tuple[HostCall, ...], Concurrency | None] = {}

    def backend(self, declared: Declared) -> SharedBackend:
        """Return the way of one callback's proxies into the state."""
        return SharedBackend(self.state, declared)

    def use(self, plan: Plan, setup: Any) -> None:
        """Run with another plan from now on."""
        super().use(plan, setup)
        self._known = {}

    @contextlib.contextmanager
    def threads(self) -> Iterator[None]:
        """Keep threads, once they are needed, until the context is left."""
        self._in_fit = True
        try:
            yield
        finally:
            self._in_fit = False
            pool, self._pool = self._pool, None
            if pool is not None:
                pool.shutdown()

    def run_epoch(self, phase: Phase, feed: Feed, *, limit: int | None, goes_on: bool, inside: bool = False) -> int:
        """Run one epoch of a phase."""
        self._refuse_at_once(f"an epoch of {type(phase).__name__}")
        return super().run_epoch(phase, feed, limit=limit, goes_on=goes_on, inside=inside)

    def run_calls(self, calls: Sequence[HostCall], event: Event, phase: Phase) -> None:
        """Run host calls that are due, several at a time where that is possible."""
        self._refuse_at_once(f"{event!r} x {type(phase).__name__}")
        if not self._in_fit or len(calls) < 2:
            super().run_calls(calls, event, phase)
            return
        calls = tuple(calls)
        if calls not in self._known:
            self._known[calls] = concurrency_of(calls, self.plan.graph)
        moment = self._known[calls]
        if moment is None:
            super().run_calls(calls, event, phase)
        else:
            _Emission(self, moment, event, phase).run()

    def _refuse_at_once(self, what: str) -> None:
        if self._at_once:
            raise DeclarationError(
                f"A handler asks for {what}, while others of its moment may be running on other threads.",
                why="it would move the counters and the step that they look at",
                fix="write `main_thread = True` into its class: its handlers then run by themselves, where `fit` "
                "was called",
            )

    # -- what an emission asks ----------------------------------------------------------------

    @property
    def pool(self) -> Pool:
        """The threads."""
        if self._pool is None:
            self._pool = self._executor.open()
        if self._pool is None:
            raise TypeError(f"{self._executor!r} gives no threads")
        return self._pool

    @contextlib.contextmanager
    def at_once(self, at_once: bool) -> Iterator[None]:
        """Say whether handlers may be running on other threads."""
        outer, self._at_once = self._at_once, at_once
        try:
            yield
        finally:
            self._at_once = outer

    def is_due(self, call: HostCall, event: Event, phase: Phase) -> bool:
        """Tell whether a call is due."""
        due = not call.schedules or self._due(call, phase, event)
        if self.state.handed:  # by a predicate
            self.state.verify_handed()
        return due

    def explained(self, error: BaseException, call: HostCall, event: Event, phase: Phase) -> BaseException:
        """Return what a handler raised as `run_calls` raises it."""
        if isinstance(error, Cancel) and isinstance(event, StepBegin | StepEnd):
            try:
                self._check_cancel(call, event)
            except AccessError as refusal:
                refusal.__context__ = error
                return refusal
        elif not isinstance(error, Cancel):
            error.add_note(self._note(call, event, phase))
        return error


class _Emission:
    """One event's handlers, while they run.

    Args:
        engine: The engine.
        moment: The handlers.
        event: The event.
        phase: The phase.
    """

    def __init__(self, engine: ThreadedEngine, moment: Concurrency, event: Event, phase: Phase) -> None:
        self._engine, self._state, self._moment = engine, engine.state, moment
        self._event, self._phase = event, phase
        self._needs = list(moment.needs)
        self._ready = [i for i, number in enumerate(self._needs) if number == 0]  # a heap: they start in serial order
        self._due: list[int] = []  # kept, because a clock is asked once
        self._running: dict[Future[Any], int] = {}
        self._raised: dict[int, BaseException] = {}

    def run(self) -> None:
        """Run the handlers; return, or raise, once none is running."""
        try:
            with self._engine.at_once(True):
                while True:
                    if not self._raised:
                        here = self._start()
                        if here is not None:
                            self._run_here(here)
                            continue
                    if not self._running:
                        break
                    self._collect()
        except BaseException:  # a second Ctrl-C
            wait(self._running)
            raise
        finally:
            if self._state.copies:
                self._state.forget_copies()
        if self._raised:
            self._raise()

    def _start(self) -> int | None:
        """Start what is ready and worth a thread; return which one to run here, if any."""
        moment = self._moment
        while self._ready:
            i = heapq.heappop(self._ready)
            try:
                due = self._engine.is_due(moment.calls[i], self._event, self._phase)
            except Exception as error:
                self._raised[i] = error
                return None
            if due:
                self._due.append(i)
            else:
                self._finish(i)
        dear = [i for i in self._due if moment.seconds[i] >= WORTH_A_THREAD and not moment.alone[i]]
        cheap = [i for i in self._due if i not in dear]
        if len(dear) > 1 or (dear and self._running):
            for i in sorted(dear):
                job = functools.partial(contextvars.copy_context().run, functools.partial(self._work, i))
                self._running[self._engine.pool.submit(job)] = i
            self._due, dear = cheap, []
        here = min(
            cheap or dear, default=None
        )  # what is cheap first: who waits for it may then run beside the dear one
        if here is not None:
            self._due.remove(here)
        return here

    def _run_here(self, i: int) -> None:
        with self._engine.at_once(not self._moment.alone[i]):
            self._work(i)
        error = self._raised.get(i)
        if error is None:
            self._finish(i)
        elif not isinstance(error, Exception):  # KeyboardInterrupt and SystemExit do not wait for other handlers
            raise self._engine.explained(error, self._moment.calls[i], self._event, self._phase)

    def _work(self, i: int) -> None:
        """Run one handler, on whatever thread."""
        call, state = self._moment.calls[i], self._state
        began = time.perf_counter()
        state.handed = []
        try:
            call.function(self._event, self._phase, call.learner)
            if state.handed:
                state.verify_handed()
        except PauseFitting as asked:
            try:
                self._engine.pause(asked, call, self._event)
            except (PauseFitting, AccessError) as error:
                self._raised[i] = error
        except BaseException as error:
            self._raised[i] = error
        finally:
            state.handed = []
            self._moment.seconds[i] = time.perf_counter() - began

    def _collect(self) -> None:
        """Wait until a thread is done with a handler."""
        done, _ = wait(self._running, return_when=FIRST_COMPLETED)
        for future in done:
            i = self._running.pop(future)
            error = future.exception()
            if error is not None:  # of the threads, not of the handler
                self._raised[i] = error
            elif i not in self._raised:
                self._finish(i)

    def _finish(self, i: int) -> None:
        for j in self._moment.after[i]:
            self._needs[j] -= 1
            if not self._needs[j]:
                heapq.heappush(self._ready, j)

    def _raise(self) -> None:
        """Raise what the first handler in serial order raised, a Cancel only if nothing else was raised."""
        calls, event, phase = self._moment.calls, self._event, self._phase
        raised = {i: self._engine.explained(error, calls[i], event, phase) for i, error in self._raised.items()}
        order = sorted(raised, key=lambda i: (isinstance(raised[i], Cancel), i))
        first = raised[order[0]]
        for i in order[1:]:
            first.add_note(f"and by {whose(calls[i])}: {type(raised[i]).__name__}: {raised[i]}")
        self._raised.clear()  # else the exception would hold itself, by way of this frame
        raise first
