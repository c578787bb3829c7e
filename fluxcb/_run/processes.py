"""Several processes, one training: what they have to agree upon, so that all of them make the same calls.

Each process runs the same fit, and every call of a program is one that all of them take part in. So nothing may decide
what is called next that differs between them: how long a step took here, a clock, Ctrl-C, a cancel by process 0 alone.
A Learner in a single process has nothing of this.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from fluxcb._check.graph import CallbackGraph
from fluxcb._compile.carried import part_of
from fluxcb._compile.plan import HostCall
from fluxcb._compile.windows import carry_reads
from fluxcb._declare.access import dotted
from fluxcb._declare.control import Cancel, CancelEpoch, CancelFitting, CancelStep, PauseFitting, RewindFitting
from fluxcb._declare.declared import Handler
from fluxcb._declare.events import Event, StepBegin, StepEnd, Trigger
from fluxcb._declare.phases import Phase
from fluxcb._declare.schedules import EverySeconds, EverySteps, Schedule
from fluxcb._errors import DeclarationError, FluxcbError
from fluxcb._run.calling import Caller
from fluxcb._run.engine import TRIGGER, Engine
from fluxcb._run.interrupts import Interrupt
from fluxcb._run.threaded import ThreadedEngine
from fluxcb._run.window import Window
from fluxcb._typing import StatePath

__all__ = ["AgreeingEngine", "AgreeingThreadedEngine"]

_CARRIED = ("params", "model_state", "opt_state", "hyperparams", "cbstate", "*")
_CANCELS: tuple[type[Cancel], ...] = (CancelStep, CancelEpoch, RewindFitting, CancelFitting)
_FAILED = len(_CANCELS) + 1
_PREEMPTED = 2
_TOLD = 3 + 2 * 8  # bytes before it
_TEXT = 250  # bytes of a cancel's message that reach the other processes


class AgreedCaller(Caller):
    """Calls the programs of one phase in the same order on all processes, however long a step takes on each."""

    @property
    def window_seconds(self) -> float:
        """How long a window lasts at most (s): no time bounds it."""
        return 1e9

    def took(self, window: Window, seconds: float) -> None:
        """Note that steps take time; "auto" never compiles windows, since it would do so when that pays here."""
        super().took(window, seconds)
        self.spent = 0.0


@dataclass(frozen=True)
class AgreedSeconds(EverySeconds):
    """A clock that all processes read off process 0."""

    def due(self, step: int, epoch: int, learner: Any) -> bool:
        """Tell whether the period has passed on process 0."""
        return _as_on_chief(super().due(step, epoch, learner))

    def next_due(self, step: int, epoch: int) -> int | None:
        """Return the next step if the period has passed on process 0."""
        return step + 1 if _as_on_chief(super().next_due(step, epoch) is not None) else None


@dataclass(frozen=True)
class LocalSeconds(EverySeconds):
    """A clock of process 0's own, for handlers that concern nobody else; it ends no window."""

    def next_due(self, step: int, epoch: int) -> None:
        """Return None: it is asked where windows end anyway."""


class Agreeing(Engine):
    """An engine whose moments end in the same way on all processes."""

    def __init__(self, *parts: Any) -> None:
        self._pressed = self._agreed_interrupt = Interrupt()
        super().__init__(*parts)

    @property  # of an attribute, which the only process of a training reads faster
    def interrupt(self) -> Interrupt:
        """Whether Ctrl-C was pressed in any process when they last agreed."""
        return self._agreed_interrupt

    @interrupt.setter
    def interrupt(self, pressed: Interrupt) -> None:
        self._pressed, self._agreed_interrupt = pressed, Interrupt()

    def caller(self, phase: Phase) -> Caller:
        """Return what calls the programs of a phase."""
        return AgreedCaller(self, phase)

    def emit(self, event: Event, phase: Phase) -> None:
        """Run the host handlers of an event, and end the moment as the other processes do."""
        with self._agreed(f"{event!r} x {type(phase).__name__}"):
            super().emit(event, phase)

    @property
    def pressed(self) -> Interrupt:
        """What has been asked for on this process; the others learn of it when they next agree."""
        return self._pressed

    def trigger(self, phase: Phase) -> None:
        """Emit the Trigger that follows a training epoch."""
        with contextlib.suppress(CancelEpoch, CancelStep), self._agreed(f"{TRIGGER!r} x {type(phase).__name__}"):
            self.run_calls(self.plan.epoch_triggers(type(phase)), TRIGGER, phase)
        self.give_snapshots(None)

    def adapted(self, call: HostCall) -> HostCall:
        """Return a host call as it is on this process."""
        handler = call.handler
        function = call.function
        chief_only = handler.declared.callback.chief_only
        if chief_only and jax.process_index() != 0:
            function = _elsewhere
        inside = issubclass(handler.event, Trigger) and any(
            isinstance(s, EverySteps | EverySeconds) for s in call.schedules
        )
        cancels = issubclass(handler.event, StepBegin | StepEnd) and ("control",) in handler.access
        if inside or cancels:
            function = self._agreeing(function, call)
        own = chief_only and not cancels and not any(path[0] in _CARRIED for path in handler.access)
        schedules = tuple(_clock(schedule, own=own) for schedule in call.schedules)
        return replace(call, function=function, schedules=schedules)

    def _agreeing(self, function: Callable[..., None], call: HostCall) -> Callable[..., None]:
        state, where = self.state, call.handler.where
        always = call.cancels or issubclass(call.handler.event, Trigger)

        def run(event: Event, phase: Phase, learner: Any) -> None:
            # A handler that cancels at stopped steps only does so where all processes know that the step is stopped.
            if not (always or (state.window is not None and state.window.stop)):
                function(event, phase, learner)
                return
            with self._agreed(where):
                try:
                    function(event, phase, learner)
                except PauseFitting as asked:
                    self.pause(asked, call, event)

        return run

    @contextlib.contextmanager
    def _agreed(self, where: str) -> Iterator[None]:
        """Let all processes leave the context in the same way: the strongest of theirs, of several the first one's."""
        mine: Exception | None = None
        try:
            yield
        except Exception as error:
            mine = error
        number, text, back, process, signals = _gathered(mine, self._pressed)
        self._agreed_interrupt.requested |= signals > 0
        self._agreed_interrupt.preempted |= signals == _PREEMPTED
        self._agreed_interrupt.paused = self._pressed.paused
        if mine is not None and not isinstance(mine, Cancel):
            raise mine
        if number == _FAILED:
            raise FluxcbError(
                f"Process {process} failed: {text}",
                where=where,
                why="the processes of a training go on together, or not at all",
                fix=f"see the traceback of process {process}",
            )
        if number:
            if mine is not None and str(mine) == text:  # other processes have only the text of the exception
                raise mine
            if _CANCELS[number - 1] is RewindFitting:
                raise RewindFitting(text, *back)
            raise _CANCELS[number - 1](text)

    def check(self, graph: CallbackGraph) -> None:
        """Check that nothing that runs on process 0 only reads what process 0 does not have.

        Raises:
            DeclarationError: Something does.
        """
        for handler in dict.fromkeys(handler for handlers in graph.orders.values() for handler in handlers):
            if handler.declared.callback.chief_only:
                for path, permission in carry_reads(handler, self.state.carry, self.state.hyperparams):
                    if not getattr(permission, "borrow", False):  # who borrows arrays may only want their shapes
                        self._check_read(handler, path)

    def _check_read(self, handler: Handler, path: StatePath) -> None:
        for leaf in jax.tree.leaves(part_of(self.state.carry, self.state.hyperparams, path)):
            if not (leaf.is_fully_addressable or leaf.is_fully_replicated):
                raise DeclarationError(
                    f"{handler.declared.label} is `chief_only`, and reads `{dotted(path)}`, whose arrays are spread "
                    "over several processes.",
                    where=handler.where,
                    why="all processes have to take part where such an array is put together",
                    fix=["remove `chief_only = True`", "compute what it needs in a traced handler"],
                )


class AgreeingEngine(Agreeing, Engine):
    """The engine of one process of several."""


class AgreeingThreadedEngine(Agreeing, ThreadedEngine):
    """The engine of one process of several, whose handlers run on threads."""


def _elsewhere(event: Event, phase: Phase, learner: Any) -> None:
    """Take the place of a handler that runs on process 0."""


def _clock(schedule: Schedule, *, own: bool) -> Schedule:
    if not isinstance(schedule, EverySeconds):
        return schedule
    return (LocalSeconds if own else AgreedSeconds)(schedule.seconds)


def _as_on_chief(value: bool) -> bool:
    return bool(multihost_utils.broadcast_one_to_all(np.int32(value)))


def _gathered(mine: Exception | None, pressed: Interrupt) -> tuple[int, str, tuple[int, int], int, int]:
    """Return the strongest outcome of all processes, what it says, whose it is, and the strongest signal.

    Of a `RewindFitting` what it says is in three parts: the reason; before which step, and how often.
    """
    number, text, back = 0, "", (0, 0)
    if isinstance(mine, Cancel):
        number = 1 + next(i for i, cancel in enumerate(_CANCELS) if isinstance(mine, cancel))
        text = str(mine)
        back = (mine.before, mine.at_most) if isinstance(mine, RewindFitting) else back
    elif mine is not None:
        number, text = _FAILED, f"{type(mine).__name__}: {mine}"
    told = text.encode()[:_TEXT]
    row = np.zeros(_TOLD + _TEXT, np.uint8)
    row[:3] = number, pressed.requested + pressed.preempted, len(told)
    row[3:_TOLD] = np.array(back, np.int64).view(np.uint8)
    row[_TOLD : _TOLD + len(told)] = np.frombuffer(told, np.uint8)
    rows = np.asarray(multihost_utils.process_allgather(row))
    process = int(np.argmax(rows[:, 0]))
    length = int(rows[process, 2])
    said = rows[process, _TOLD : _TOLD + length].tobytes().decode(errors="ignore")
    before, at_most = map(int, np.frombuffer(rows[process, 3:_TOLD].tobytes(), np.int64))
    return int(rows[process, 0]), said, (before, at_most), process, int(rows[:, 1].max())
