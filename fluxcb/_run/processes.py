"""Training with several processes: the decisions that all of them must agree on, so that they make the same calls.

Each process runs the same fit, and every program call is a collective operation of all processes. The next call must
therefore not depend on anything that differs between processes, such as the duration of a step, a clock, Ctrl-C, or a
cancel on process 0. A Learner in a single process uses none of this.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import jax
import numpy as np
from jax._src import distributed  # jax 0.7 to 0.12 have no public access to the key-value store
from jax.experimental import multihost_utils

from fluxcb._check.graph import CallbackGraph
from fluxcb._compile.call_errors import host_returned
from fluxcb._compile.carry_paths import part_of
from fluxcb._compile.plan import HostCall
from fluxcb._compile.windows import carry_reads
from fluxcb._declare.access import dotted
from fluxcb._declare.collectives import collective
from fluxcb._declare.control import Cancel, CancelEpoch, CancelFitting, CancelStep, PauseFitting, RewindFitting
from fluxcb._declare.declared import BoundHandler, Declared
from fluxcb._declare.events import Event, StepBegin, StepEnd, Trigger
from fluxcb._declare.phases import Phase
from fluxcb._declare.schedules import EverySeconds, EverySteps, Predicate, Schedule
from fluxcb._errors import DeclarationError, PeerError
from fluxcb._run.batch_stream import BatchStream
from fluxcb._run.emitter import Emitter
from fluxcb._run.host_backend import HostBackend
from fluxcb._run.host_writes import HostWrites, may_write_carry
from fluxcb._run.interrupts import Interrupt
from fluxcb._run.peers import Peers
from fluxcb._run.program_runner import ProgramRunner
from fluxcb._run.programs import Programs
from fluxcb._run.pulling import return_batches
from fluxcb._run.services import Services
from fluxcb._run.state import HostState
from fluxcb._run.threaded import ThreadedEmitter
from fluxcb._run.validate_callbacks import traced_entries
from fluxcb._run.window import Window
from fluxcb._traced_values import describe
from fluxcb._typing import Batch, StatePath

__all__ = ["MultiProcessEmitter", "MultiProcessRunner", "MultiProcessThreadedEmitter", "make_peers"]

T = TypeVar("T")

_CARRIED = ("params", "model_state", "opt_state", "hyperparams", "cbstate", "*")
# In order of severity; an exception that is not a Cancel (`_FAILED`) is the most severe outcome.
_CANCELS: tuple[type[Cancel], ...] = (CancelStep, CancelEpoch, RewindFitting, CancelFitting)
_FAILED = len(_CANCELS) + 1
_PREEMPTED = 2
_HEADER_BYTES = 3 + 2 * 8  # outcome, signal, length of the message, and two numbers of a rewind
# At most 255, because one byte of the row contains the length.
_TEXT_BYTES = 250  # maximum size of a message that is sent to the other processes


_learners = itertools.count(1)  # all processes build the same Learners in the same order


def make_peers(timeout: float) -> Peers:
    """Return the other processes, as the Learner that is being built sees them.

    Args:
        timeout: Silence after which a process counts as lost (s).
    """
    client = distributed.global_state.client
    return Peers(jax.process_index(), jax.process_count(), timeout, client, str(next(_learners)))


class MultiProcessRunner(ProgramRunner):
    """Calls the programs of one phase in the same order on all processes, independent of local step times.

    Args:
        state: See `ProgramRunner`.
        programs: See `ProgramRunner`.
        phase: See `ProgramRunner`.
        peers: The other processes.
    """

    chooses_locally = False

    def __init__(self, state: HostState, programs: Programs, phase: Phase, *, peers: Peers) -> None:
        super().__init__(state, programs, phase)
        self._peers = peers
        self._shapes: list[str] = []  # of the last batch

    def call(self, window: Window, stream: BatchStream | None, *, manual: bool) -> None:
        """Run a window's steps on the device; see `ProgramRunner.call`."""
        shapes = _shapes(window.batches[0])
        # Cut here and not by the call, so that the position that other processes compare is exact during the call.
        same = next((i for i, batch in enumerate(window.batches) if _shapes(batch) != shapes), window.length)
        return_batches(stream, window.cut(same))
        if shapes != self._shapes:
            # Processes with batches of different shapes would wait for each other inside a collective.
            self._peers.mark(f"{type(self._phase).__name__} has a batch of {', '.join(shapes)}")
            self._shapes = shapes
        call = super().call
        self._peers.call(
            lambda: call(window, stream, manual=manual),  # on CPU, it may wait for the collectives of its steps
            steps=lambda: window.length,
            abandoned=self._train.lose,
        )

    def wait(self, window: Window) -> tuple[int, bool]:
        """Wait for a window's end; see `Window.wait`."""
        self._peers.wait_until(window.ready, self._train.lose)
        return self._peers.call(window.wait, steps=lambda: 0, abandoned=self._train.lose)

    def end_of_data(self) -> None:
        """Check that the data of all processes ends at the same step."""
        phase, progress = type(self._phase).__name__, self._progress
        self._peers.mark(f"the data of {phase} ends after step {progress.step_in_epoch} of epoch {progress.epoch}")

    @property
    def window_seconds(self) -> float:
        """Maximum duration of a window (s): no limit, because window lengths must not depend on local times."""
        return 1e9

    def record_duration(self, window: Window, seconds: float) -> None:
        """Record the duration, but never the cost of calls: "auto" would otherwise compile windows at a local time."""
        super().record_duration(window, seconds)
        self.call_seconds = 0.0


@dataclass(frozen=True)
class AgreedSeconds(EverySeconds):
    """A clock whose value all processes take from process 0."""

    def due(self, step: int, epoch: int, learner: Any) -> bool:
        """Return whether the period has passed on process 0."""
        return _chief_value(lambda: EverySeconds.due(self, step, epoch, learner))

    def next_due(self, step: int, epoch: int) -> int | None:
        """Return the next step if the period has passed on process 0."""
        return step + 1 if _chief_value(lambda: EverySeconds.next_due(self, step, epoch) is not None) else None


@dataclass(frozen=True)
class LocalSeconds(EverySeconds):
    """A local clock of process 0, for handlers that no other process depends on; it ends no window."""

    def next_due(self, step: int, epoch: int) -> None:
        """Return None, so that no window ends for this clock. It is polled at the ends of all windows."""


@dataclass(frozen=True)
class AgreedPredicate(Predicate):
    """A condition whose value all processes take from process 0."""

    def due(self, step: int, epoch: int, learner: Any) -> bool:
        """Return whether the condition holds in process 0."""
        return _chief_value(lambda: Predicate.due(self, step, epoch, learner))


class SynchronizedEmitter(Emitter):
    """Base class of emitters that end each moment in the same way on all processes."""

    def __init__(self, *args: Any, peers: Peers) -> None:
        self._local_interrupt = self._agreed_interrupt = Interrupt()
        self._backends: dict[Declared, HostBackend] = {}
        self._peers = peers
        super().__init__(*args)

    @contextlib.contextmanager
    def threads(self) -> Iterator[None]:
        """Watch the other processes, and keep the threads of handlers, until the context is left."""
        with self._peers.watch(lambda: self._local_interrupt, lambda: self._agreed_interrupt), super().threads():
            yield

    def before_fit(self, function: Callable[[], T]) -> T:
        """Call a function in which all processes take part, before a fit begins, and watch the other processes."""
        with self._peers.watch(lambda: self._local_interrupt, lambda: self._agreed_interrupt):
            return self._peers.collective(function)

    def wait_for(self, array: Any) -> None:
        """Wait until an array has been computed, for which all processes are needed."""
        self._peers.wait_until(array.is_ready, self._train.lose)
        self._peers.call(array.block_until_ready, steps=lambda: 0, abandoned=self._train.lose)

    def report(self, error: BaseException) -> None:
        """Tell the other processes that this process ends the training."""
        self._peers.report(error)

    def agreed_on(self, error: BaseException) -> None:
        """Note that all processes raise this error at the same place."""
        self._peers.agreed_on(error)

    @property  # overrides an attribute, which is faster to read in a single process
    def interrupt(self) -> Interrupt:
        """The interrupt that all processes know of, as of their last agreement.

        Agreeing at each window would cost a collective operation each time, so they agree only at some events.
        """
        return self._agreed_interrupt

    @interrupt.setter
    def interrupt(self, local_interrupt: Interrupt) -> None:
        self._local_interrupt, self._agreed_interrupt = local_interrupt, Interrupt()

    def emit(self, event: Event, phase: Phase) -> None:
        """Run the host handlers of an event, and end the moment in the same way as the other processes."""
        with self._synchronized(f"{event!r} x {type(phase).__name__}"):
            super().emit(event, phase)

    @property
    def local_interrupt(self) -> Interrupt:
        """The interrupt requested on this process; the others learn of it at the next agreement."""
        return self._local_interrupt

    def emit_after_epoch(self, event: Event, phase: Phase) -> None:
        """Run the Trigger handlers that are due after an epoch, and end the moment in the same way on all processes."""
        with self._synchronized(f"{event!r} x {type(phase).__name__}"):
            super().emit_after_epoch(event, phase)

    def adapt_call(self, call: HostCall, graph: CallbackGraph) -> HostCall:
        """Return a host call adapted to this process."""
        handler = call.handler
        function, schedules = call.function, call.schedules
        # The call stays in the plan of every process, because it determines where windows end and what is fetched. Its
        # `init` also runs everywhere, and its reads are fetched everywhere: the carry and the program must be the same
        # on all processes.
        chief_only = handler.declared.callback.chief_only
        if chief_only and jax.process_index() != 0:
            function = _skip_on_this_process
        # Trigger handlers with such a schedule run inside epochs, where `emit` does not agree on the outcome.
        inside = issubclass(handler.event, Trigger) and any(
            isinstance(s, EverySteps | EverySeconds) for s in call.schedules
        )
        cancels = issubclass(handler.event, StepBegin | StepEnd) and ("control",) in handler.access
        writes = not chief_only and may_write_carry(handler.access, traced_entries(graph))
        if writes:
            function = self._writing_call(function, call)
        if inside or cancels or writes:
            function = self._synchronized_call(function, call, always=writes)
            schedules = tuple(_agreed_predicate(schedule) for schedule in schedules)
        local = chief_only and not cancels and not any(path[0] in _CARRIED for path in handler.access)
        schedules = tuple(_clock(schedule, local=local) for schedule in schedules)
        # These handlers make collective calls, whose order is the same in all processes only if no handler overlaps.
        return replace(call, function=function, schedules=schedules, alone=inside or cancels or writes)

    def backend(self, declared: Declared, services: Services) -> Any:  # with threads, a `SharedBackend`
        """Return the backend that the proxies of one callback read from and write to."""
        backend = self._backends[declared] = super().backend(declared, services)
        return backend

    def _writing_call(self, function: Callable[..., Any], call: HostCall) -> Callable[..., Any]:
        """Return a function that also sends what a handler has written from process 0 to the other processes."""
        handler = call.handler

        def run(event: Event, phase: Phase, learner: Any) -> Any:
            backend = self._backends[handler.declared]
            host_writes = HostWrites(backend, handler.access, self._train, handler.where, self._peers)
            try:
                returned = function(event, phase, learner)
            # The values that the handler has written before its cancel remain.
            except (Cancel, PauseFitting):
                host_writes.agree()
                raise
            except Exception:
                host_writes.agree(failed=True)  # the other processes wait in this call
                raise
            host_writes.agree()
            return returned

        return run

    def _synchronized_call(self, function: Callable[..., Any], call: HostCall, *, always: bool) -> Callable[..., Any]:
        moment, where = self.state.moment, call.handler.where
        always = always or call.cancels or issubclass(call.handler.event, Trigger)

        def run(event: Event, phase: Phase, learner: Any) -> Any:
            # All processes know whether a step is stopped, so a handler that cancels only at stopped steps agrees only
            # there.
            if not (always or (moment.window is not None and moment.window.stop)):
                return function(event, phase, learner)
            with self._synchronized(where):
                try:
                    # Checked inside the agreement, so that the other processes learn of the error.
                    if (returned := function(event, phase, learner)) is not None:
                        raise host_returned(call.handler, returned)
                except PauseFitting as request:
                    self.pause(request, call, event)
            return None

        return run

    @contextlib.contextmanager
    def _synchronized(self, where: str) -> Iterator[None]:
        """Make all processes leave the context in the same way.

        Every process raises the most severe outcome; ties go to the lowest rank.
        """
        local_error: Exception | None = None
        try:
            yield
        except Exception as error:
            local_error = error
        if self._peers.lost:  # no other process would take part in the agreement
            if local_error is not None:
                raise local_error
            return
        outcomes = self._peers.call(lambda: _gather_outcomes(local_error, self._local_interrupt))
        number, text, back, process, signals = outcomes
        # A signal on any process ends the fit on all of them, at the same step.
        self._agreed_interrupt.requested |= signals > 0
        self._agreed_interrupt.preempted |= signals == _PREEMPTED
        self._agreed_interrupt.paused = self._local_interrupt.paused
        if local_error is not None and not isinstance(local_error, Cancel):
            self._peers.agreed_on(local_error)
            raise local_error
        # The exception of this process was raised above. Here, another process has failed, and this one would wait for
        # it forever at the next collective call.
        if number == _FAILED:
            failure = PeerError(
                f"Process {process} failed: {text}",
                where=where,
                why="if one process of a run fails, all processes stop",
                fix=f"see the traceback of process {process}",
            )
            self._peers.agreed_on(failure)
            raise failure
        if number:
            # The other processes have only the text of the exception.
            if local_error is not None and str(local_error) == text:
                raise local_error
            if _CANCELS[number - 1] is RewindFitting:
                raise RewindFitting(text, *back)
            raise _CANCELS[number - 1](text)

    def check(self, graph: CallbackGraph) -> None:
        """Check that `chief_only` callbacks read only arrays that process 0 can assemble.

        Raises:
            DeclarationError: A callback reads an array that is spread over several processes.
        """
        for handler in dict.fromkeys(handler for handlers in graph.orders.values() for handler in handlers):
            if handler.declared.callback.chief_only:
                for path, permission in carry_reads(handler, self._train.carry, self._train.hyperparams):
                    if not getattr(permission, "borrow", False):  # a borrower may need only the shapes
                        self._check_read(handler, path)

    def _check_read(self, handler: BoundHandler, path: StatePath) -> None:
        for leaf in jax.tree.leaves(part_of(self._train.carry, self._train.hyperparams, path)):
            # A replicated array has a complete copy on process 0.
            if not (leaf.is_fully_addressable or leaf.is_fully_replicated):
                raise DeclarationError(
                    f"{handler.declared.label} is `chief_only`, and reads `{dotted(path)}`, whose arrays are spread "
                    "over several processes.",
                    where=handler.where,
                    why="all processes have to take part in assembling such an array",
                    fix=["remove `chief_only = True`", "compute what it needs in a traced handler"],
                )


class MultiProcessEmitter(SynchronizedEmitter, Emitter):
    """Runs host handlers in one process of several."""


class MultiProcessThreadedEmitter(SynchronizedEmitter, ThreadedEmitter):
    """Runs host handlers in one process of several, on threads."""


def _skip_on_this_process(event: Event, phase: Phase, learner: Any) -> None:
    """Do nothing: replaces a handler that runs only on process 0."""


def _clock(schedule: Schedule, *, local: bool) -> Schedule:
    if not isinstance(schedule, EverySeconds):
        return schedule
    return (LocalSeconds if local else AgreedSeconds)(schedule.seconds)


def _agreed_predicate(schedule: Schedule) -> Schedule:
    if not isinstance(schedule, Predicate):
        return schedule
    return AgreedPredicate(**{entry.name: getattr(schedule, entry.name) for entry in fields(schedule)})


def _chief_value(value: Callable[[], bool]) -> bool:
    """Return what a function returns in process 0. It may be the user's, and raise in one process."""
    return collective(lambda: bool(multihost_utils.broadcast_one_to_all(np.int32(value()))))


def _gather_outcomes(
    local_error: Exception | None, local_interrupt: Interrupt
) -> tuple[int, str, tuple[int, int], int, int]:
    """Return the most severe outcome of all processes, its message, its rewind, its process, and the strongest signal.

    A `RewindFitting` has two numbers besides its message: the step to go back to, and the maximum number of rewinds.
    """
    number, text, back = 0, "", (0, 0)
    if isinstance(local_error, Cancel):
        number = 1 + next(i for i, cancel in enumerate(_CANCELS) if isinstance(local_error, cancel))
        text = str(local_error)
        back = (local_error.before, local_error.at_most) if isinstance(local_error, RewindFitting) else back
    elif local_error is not None:
        number, text = _FAILED, f"{type(local_error).__name__}: {local_error}"
    encoded = text.encode()[:_TEXT_BYTES]
    # One array of bytes for everything, because each agreement costs one collective operation per array.
    row = np.zeros(_HEADER_BYTES + _TEXT_BYTES, np.uint8)
    # The signal is 0 for none, 1 for Ctrl-C, and 2 for SIGTERM or a paused fit.
    row[:3] = number, local_interrupt.requested + local_interrupt.preempted, len(encoded)
    row[3:_HEADER_BYTES] = np.array(back, np.int64).view(np.uint8)
    row[_HEADER_BYTES : _HEADER_BYTES + len(encoded)] = np.frombuffer(encoded, np.uint8)
    rows = np.asarray(multihost_utils.process_allgather(row))
    # The numbers of outcomes are ordered by severity, and `argmax` returns the first process with the highest one.
    process = int(np.argmax(rows[:, 0]))
    length = int(rows[process, 2])
    # The limit `_TEXT_BYTES` may have cut a character, whose bytes are ignored.
    message = rows[process, _HEADER_BYTES : _HEADER_BYTES + length].tobytes().decode(errors="ignore")
    before, at_most = map(int, np.frombuffer(rows[process, 3:_HEADER_BYTES].tobytes(), np.int64))
    return int(rows[process, 0]), message, (before, at_most), process, int(rows[:, 1].max())


def _shapes(batch: Batch) -> list[str]:
    return [describe(leaf) for leaf in jax.tree.leaves(batch)]
