"""What the processes of a training tell each other without a collective: failures, signals, and where their data ends.

A collective cannot report that a process does not take part in it, because the others wait inside it. These messages
therefore go through the key-value store of JAX's coordination service (`jax.distributed`), and a thread of each process
reads them. Each process has two keys, which it overwrites: its `Record`, and a heartbeat.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any, NoReturn, TypeVar

import jax

from fluxcb._declare.collectives import collective_calls
from fluxcb._errors import PeerError
from fluxcb._run.interrupts import Interrupt
from fluxcb._run.peer_records import CONNECTION_WORDS, Record, different_steps, ended, silent
from fluxcb._run.process_exit import ProcessExit, end_process

__all__ = ["Peers"]

T = TypeVar("T")

_POLL = 0.25  # seconds between two reads of the records of the other processes
_POLL_URGENT = 0.01  # the same while the training waits for a record
_READY = 5e-4  # seconds between two checks whether the device has finished
_BEATS = 6  # heartbeats in the timeout
_GRACE = 6.0  # seconds that the training has to raise an error before the process is ended
_REPORT = 2000  # characters of an error that the others see


class Peers:
    """The other processes of a training, as one process sees them.

    The training thread runs whatever waits for other processes with `call` or `wait_until`. If another process fails,
    `wait_until` raises an error at once. `call` may be inside a collective, which Python cannot interrupt. It raises
    when the connection breaks, because the process that failed exits. If that takes long, this process is ended, too.
    Running collectives on another thread would let the training thread raise at once, but XLA on CPU keeps the order of
    collectives only within one thread (jax 0.10.2).

    Args:
        process: The index of this process.
        count: The number of processes.
        timeout: Silence after which a process counts as lost (s).
        store: The client of JAX's coordination service.
        name: The name of the Learner, which is the same in all processes.
    """

    def __init__(self, process: int, count: int, timeout: float, store: Any, name: str) -> None:
        self._process, self._count, self._timeout = process, count, timeout
        self._store, self._name = store, name
        self._numbers = itertools.count(1)  # all processes begin the same fits in the same order
        self._session: _Session | None = None
        self._agreed_error: BaseException | None = None

    @contextlib.contextmanager
    def watch(self, pressed: Callable[[], Interrupt], agreed: Callable[[], Interrupt]) -> Iterator[None]:
        """Watch the other processes until the context is left.

        Args:
            pressed: Returns what was requested on this process.
            agreed: Returns what all processes have agreed upon; `call` sets it.
        """
        if self._session is not None:  # an epoch inside a fit
            yield
            return
        folder = f"fluxcb/{self._name}/{next(self._numbers)}"
        session = _Session(self._process, self._count, self._timeout, self._store, folder, pressed, agreed)
        self._session = session
        try:
            with collective_calls(self):
                yield
        finally:
            session.close()
            self._session = None

    @property
    def lost(self) -> bool:
        """Whether a process has failed, so that no collective may be called any longer."""
        return self._session is not None and self._session.lost

    def report(self, error: BaseException) -> None:
        """Tell the other processes that this one does not take part any longer, unless all agreed on the error."""
        if self._session is not None and error is not self._agreed_error:
            self._session.report(error)

    def agreed_on(self, error: BaseException) -> None:
        """Note that all processes raise an error at the same place, so that none waits for another."""
        self._agreed_error = error

    def call(
        self,
        function: Callable[[], T],
        *,
        steps: Callable[[], int] = lambda: 1,
        abandoned: Callable[[PeerError], None] | None = None,
    ) -> T:
        """Call a function that may wait for other processes.

        Args:
            function: The function.
            steps: Returns how many steps it runs, or has run; 1 for an agreement.
            abandoned: Called before a PeerError is raised for an error of the function.

        Raises:
            PeerError: Another process failed or is lost.
            Exception: What the function raised.
        """
        return self._session.call(function, steps, abandoned) if self._session is not None else function()

    def collective(self, function: Callable[[], T]) -> T:
        """Call a function in which all processes take part; see `fluxcb.collective`.

        Raises:
            PeerError: Another process failed or is lost.
            Exception: What the function raised. The other processes do not wait for this one any longer.
        """
        try:
            return self.call(function)
        except Exception as error:
            self.report(error)
            raise

    def wait_until(self, ready: Callable[[], bool], abandoned: Callable[[PeerError], None]) -> None:
        """Wait until the device has computed something.

        Args:
            ready: Returns whether it has.
            abandoned: Called before a PeerError is raised.

        Raises:
            PeerError: Another process failed or is lost.
        """
        if self._session is not None:
            self._session.wait_until(ready, abandoned)

    def mark(self, what: str) -> None:
        """Wait until all processes have come to the same place in the program.

        Args:
            what: Describes the place. All processes must describe it in the same way.

        Raises:
            PeerError: Another process is somewhere else.
        """
        if self._session is not None:
            self._session.mark(what)


class _Session:
    """One fit, or one epoch outside a fit: its messages, and the threads that handle them."""

    def __init__(
        self,
        process: int,
        count: int,
        timeout: float,
        store: Any,
        folder: str,
        pressed: Callable[[], Interrupt],
        agreed: Callable[[], Interrupt],
    ) -> None:
        self._process, self._count, self._timeout = process, count, timeout
        self._pressed, self._agreed = pressed, agreed
        self._store, self._folder = store, folder
        self._begun = 0  # steps and agreements
        self._record = Record()
        self._written: Record | None = None  # what the store has
        self._records: dict[int, Record] = {}
        self._target: int | None = None  # position after which the fit stops
        self._failure: PeerError | None = None
        self._raised = False  # whether the training thread has raised a failure, or ended in another way
        self._beats: dict[int, tuple[str, float]] = {}  # the last heartbeat of each process, and when it came
        self._answered = time.monotonic()  # when the store last did
        # Guards the attributes above; notified at each change of what the training thread may wait for.
        self._changed = threading.Condition()
        self._closed = threading.Event()
        self._urgent = threading.Event()
        self._threads = [
            threading.Thread(target=target, name=f"fluxcb-peers-{name}", daemon=True)
            for name, target in (("records", self._exchange), ("watch", self._watch))
        ]
        self._exit = ProcessExit(process, self._others_ended, self._leader_lost)
        for thread in self._threads:
            thread.start()

    # -- the training thread ------------------------------------------------------------------

    @property
    def lost(self) -> bool:
        return self._failure is not None or bool(self._record.ended)

    def call(
        self, function: Callable[[], T], steps: Callable[[], int], abandoned: Callable[[PeerError], None] | None
    ) -> T:
        planned = steps()
        self._begin(planned)
        try:
            value = function()
        except Exception as error:
            failure = self._cause_of(error)
            if failure is None:
                raise
            if abandoned is not None:
                abandoned(failure)
            self._raise(failure, error)
        finally:
            with self._changed:
                self._begun += steps() - planned  # a window whose call fails may have run fewer steps
        self._end()
        return value

    def wait_until(self, ready: Callable[[], bool], abandoned: Callable[[PeerError], None]) -> None:
        while not ready():
            with self._changed:
                if self._failure is not None:
                    abandoned(self._failure)
                    self._raise(self._failure)
                self._changed.wait(_READY)

    def _begin(self, steps: int) -> None:
        pressed = self._pressed()
        with self._changed:
            if self._record.stop is None and pressed.requested and not self._agreed().requested:
                # From here on, this process dispatches nothing until all have agreed where to stop. So the others get
                # no further than the windows that are under way.
                self._update(stop=self._begun, signal=1 + pressed.preempted)
            self._wait_for_target()
            if self._failure is not None:
                self._raise(self._failure)
            self._begun += steps

    def _end(self) -> None:
        with self._changed:
            self._wait_for_target()
            if self._target is not None and self._begun >= self._target:
                # Every process gets here at the same position, so all of them see the request at the same place.
                agreed = self._agreed()
                agreed.requested = True
                agreed.preempted |= all(r.signal != 1 for r in (self._record, *self._records.values()))
                agreed.paused = self._pressed().paused

    def _wait_for_target(self) -> None:
        while self._record.stop is not None and self._target is None:
            self._wait()

    def mark(self, what: str) -> None:
        with self._changed:
            number = self._record.marks + 1
            self._update(marks=number, mark=what, at=self._begun)
            while len(self._records) < self._count - 1 or any(r.marks < number for r in self._records.values()):
                self._wait()
            for process, record in sorted(self._records.items()):
                # A process that is further ahead has compared this mark already.
                if record.marks == number and record.mark != what:
                    self._raise(self._fail(different_steps(self._process, what, process, record.mark)))

    def _wait(self) -> None:
        """Wait for news from the other processes."""
        if self._failure is not None:
            self._raise(self._failure)
        self._wait_for_news()

    def _wait_for_news(self) -> None:
        self._urgent.set()
        self._changed.wait(_POLL)

    def _raise(self, failure: PeerError, error: BaseException | None = None) -> NoReturn:
        """Raise a failure, as the cause of an error of a collective or for the first time."""
        self._raised = True
        # A new exception each time: the same one would collect the tracebacks of several raises.
        raise PeerError(failure.what, where=failure.where, why=failure.why, fix=failure.fix) from error

    def _cause_of(self, error: BaseException) -> PeerError | None:
        """Return the failure of the other process that caused an error of a collective, if there is one.

        A connection breaks before its cause is known: the report of the other process, or its missing heartbeats.
        """
        if not (isinstance(error, Exception) and any(word in str(error) for word in CONNECTION_WORDS)):
            return None
        # 2.5 periods without a heartbeat: two are missing.
        silence = 2.5 * self._timeout / _BEATS
        until = time.monotonic() + self._timeout
        with self._changed:
            while self._failure is None and time.monotonic() < until:
                self._find_silent(silence)
                if self._failure is None:
                    self._wait_for_news()
            return self._failure

    def report(self, error: BaseException) -> None:
        with self._changed:
            self._raised = True
            if not self._record.ended:
                if isinstance(error, PeerError):
                    self._relay(error)
                else:
                    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
                    self._update(ended=text[:_REPORT])
            until = time.monotonic() + 1.0
            while self._written is not self._record and time.monotonic() < until:  # the store may be lost too
                self._wait_for_news()
        self._exit.without_jax(error)

    def _leader_lost(self, failure: PeerError) -> PeerError:
        with self._changed:
            return self._fail(failure)

    def _others_ended(self) -> bool:
        """Return whether all processes that respond have reported why they ended."""
        now = time.monotonic()
        with self._changed:
            quiet = {other for other, (_, seen) in self._beats.items() if now - seen > 2.5 * self._timeout / _BEATS}
            return all(record.ended for other, record in self._records.items() if other not in quiet)

    def close(self) -> None:
        with self._changed:
            self._update(done=True)
        self._closed.set()
        self._urgent.set()
        if not self.lost:  # otherwise a thread may wait for a process that does not come
            for thread in self._threads:
                thread.join()
            self._exit.as_usual()

    # -- the other threads --------------------------------------------------------------------

    def _exchange(self) -> None:
        """Write heartbeats, and read the records of the others."""
        period = self._timeout / _BEATS
        # The store answers one request at a time, so many processes ask less often.
        pause = _POLL * max(1.0, self._count / 64)
        next_beat = 0.0
        for number in itertools.count():
            try:
                if (record := self._record) is not self._written:
                    self._store.key_value_set(
                        f"{self._folder}/records/{self._process}", json.dumps(asdict(record)), True
                    )
                    self._written = record
                if time.monotonic() >= next_beat:
                    next_beat = time.monotonic() + period
                    self._store.key_value_set(f"{self._folder}/beats/{self._process}", str(number), True)
                    self._note_beats(self._store.key_value_dir_get(f"{self._folder}/beats/"))
                self._note_records(self._store.key_value_dir_get(f"{self._folder}/records/"))
            except jax.errors.JaxRuntimeError:  # the store does not answer; see `_find_silent`
                if self._closed.wait(_POLL):
                    return
                continue
            self._answered = time.monotonic()
            # After a failure, the process keeps reading: process 0 exits last.
            if self._closed.is_set() and self._written is self._record and (not self.lost or self._others_ended()):
                return
            if self._urgent.wait(pause):
                self._urgent.clear()
                self._closed.wait(_POLL_URGENT)

    def _note_beats(self, entries: list[tuple[str, str]]) -> None:
        now = time.monotonic()
        for key, value in entries:
            other = int(key.rsplit("/", 1)[1])
            if other != self._process and self._beats.get(other, ("", 0.0))[0] != value:
                self._beats[other] = value, now

    def _note_records(self, entries: list[tuple[str, str]]) -> None:
        with self._changed:
            for key, value in entries:
                other = int(key.rsplit("/", 1)[1])
                if other != self._process:
                    self._records[other] = Record(**json.loads(value))
            # The process that failed comes before those that report its failure.
            for other, record in sorted(self._records.items(), key=lambda item: (item[1].relayed is not None, item[0])):
                if self._record.ended:
                    break
                if record.ended:
                    self._fail(ended(other, record), relay=False)
                elif record.marks > self._record.marks and record.at < self._begun:
                    self._fail(different_steps(self._process, "continues with another step", other, record.mark))
            stops = [record.stop for record in self._records.values()]
            if any(stop is not None for stop in stops) and self._record.stop is None:
                # From here on, the training thread begins nothing until the position is known (`_wait_for_target`).
                self._update(stop=self._begun)
            if self._target is None and len(stops) == self._count - 1:
                positions = [stop for stop in (*stops, self._record.stop) if stop is not None]
                if len(positions) == self._count:
                    # One more than the furthest: no process has completed that one, so all see the stop after it.
                    self._target = max(positions) + 1
            self._changed.notify_all()

    def _watch(self) -> None:
        """Notice lost processes, and end this process if the training thread cannot raise the error itself."""
        while not self._closed.wait(min(_POLL, self._timeout / 10)):
            with self._changed:
                self._find_silent(self._timeout)
                failure = self._failure
            if failure is not None and not self._closed.wait(_GRACE) and not self._raised:
                # The training thread is in a collective or in a handler that does not return.
                end_process(self._process, failure)

    def _find_silent(self, silence: float) -> None:
        """Note a failure if the store or a process has been silent for some time (s)."""
        now = time.monotonic()
        if self._failure is not None or self._record.ended:
            return
        if now - self._answered > silence and self._process != 0:
            self._fail(silent(0, now - self._answered))
        # A process that has not begun the session has no heartbeat yet; it may be loading its data.
        for other, (_, seen) in self._beats.items():
            done = other in self._records and self._records[other].done
            # What happens after the last answer of the store is not known. If process 0 is stopped, so is the store,
            # and no heartbeats of any process arrive.
            if not done and self._answered - seen > silence:
                self._fail(silent(other, now - seen))

    def _fail(self, failure: PeerError, *, relay: bool = True) -> PeerError:
        """Note a failure, and return the first one that was noted.

        Args:
            failure: The failure.
            relay: Whether to tell the other processes at once. The training thread may be in a collective with them.
        """
        if self._failure is None:
            self._failure = failure
            if relay and not self._record.ended:
                self._relay(failure)
            self._changed.notify_all()
        return self._failure

    def _relay(self, failure: PeerError) -> None:
        self._update(ended=failure.what, relayed={"where": failure.where, "why": failure.why, "fix": failure.fix})

    def _update(self, **changes: Any) -> None:
        # Written by `_exchange`: the store may not answer, and this thread holds the lock.
        self._record = replace(self._record, **changes)
        self._urgent.set()
