"""Calling: which program runs a window's steps, the one for single steps or the one for windows."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

import jax
import numpy as np

from fluxcb._compile.arrays import nbytes_of
from fluxcb._compile.plan import Plan
from fluxcb._compile.program import Program
from fluxcb._compile.traced import StepSetup
from fluxcb._compile.windows import WindowPlan
from fluxcb._declare.phases import Phase
from fluxcb._run.feed import Feed, give_back
from fluxcb._run.programs import Programs
from fluxcb._run.stacking import Stacker
from fluxcb._run.state import HostState
from fluxcb._run.window import Window
from fluxcb._typing import Batch, Rows

__all__ = ["Caller"]

AHEAD = 32
"""Single-step calls in a window: JAX runs at most 32 computations ahead (measured on CPU).

Also the steps of a window of stacked batches where nothing is under way, as at an epoch's beginning: while the device
runs so many, the host puts the next together.
"""

AHEAD_SHARDED = 8
"""The same where the carry lies on several devices: with more, XLA's collectives on CPU wait for each other in vain."""

LONGEST = 128
"""Steps of a window where the engine chooses; more would only make the last handlers of an epoch wait longer."""

WINDOW_SECONDS = 0.1
"""How long a window lasts at most: two are under way at a time, and bars, clocks and Ctrl-C stay alive (s)."""

_WORTHWHILE = 0.05  # calling the program is worth avoiding if it takes this share of a step's time
_TELLING = 64  # steps whose calls tell what those to come will cost
_SURELY = 2  # compile at once what the steps to come would pay for so many times: the fit may end before its time


class Host(Protocol):
    """What calling needs of the engine."""

    state: HostState
    programs: Programs
    plan: Plan

    @property
    def setup(self) -> Callable[[Phase], StepSetup]:
        """Returns what a phase's traced step needs."""
        ...


class Caller:
    """Calls the programs of one phase.

    Args:
        engine: The engine.
        phase: The phase.

    Attributes:
        usual: The single-step program of the first batch, whose shape the others have; None before the first step.
        many: The window program, or None as long as there is none.
        calls: How often a program was called.
        spent: CPU time spent on calling the single-step program where that mattered (s).
        step_seconds: What a step took lately (s), or 0 if that is not known.
    """

    def __init__(self, engine: Host, phase: Phase) -> None:
        self._engine = engine
        self._state = engine.state
        self._phase = phase
        self._plan = engine.plan.phase(type(phase))
        self.usual: Program | None = None
        self._single: Program | None = None  # the one last used: a shorter last batch has its own
        self.many: Program | None = None
        self._stacker: Stacker | None = None
        self._each: int | None = None  # bytes of a step's batch and fetched values
        self.calls = self._told = 0
        self.spent = self.step_seconds = 0.0

    @property
    def plan(self) -> WindowPlan | None:
        """What bounds the windows, once a step's shapes are known."""
        return self.plan_of(self.usual) if self.usual is not None else None

    def plan_of(self, program: Program) -> WindowPlan:
        """Return what bounds the windows of a program."""
        engine = self._engine
        return engine.programs.windows(engine.plan, self._phase, program.step, self._state)

    def longest(self, *, idle: bool) -> int:
        """Return how many steps a window has at most.

        Args:
            idle: Whether nothing is under way: the device waits until the window has been put together, and begins
                sooner with a short one.
        """
        if self.many is not None:
            waits = idle and self._stacker is not None and not self._stacker.rows  # rows are put together in no time
            return min(AHEAD, self.many.steps) if waits else self.many.steps
        several = len(self._state.some_array.devices()) > 1
        return max(1, min(AHEAD_SHARDED if several else AHEAD, self._most()))

    @property
    def window_seconds(self) -> float:
        """How long a window lasts at most (s)."""
        return WINDOW_SECONDS

    def forget(self) -> None:
        """Look the programs up anew: the model or the data was exchanged."""
        self.usual = self._single = self.many = self._stacker = self._each = None

    def _most(self) -> int:
        """Return how many steps' batches and fetched values may be held in memory."""
        if self.usual is None:
            return 1
        if self._each is None:
            self._each = nbytes_of(self.usual.step.batch_spec) + self.plan_of(self.usual).fetch.bytes_each
        return self._engine.programs.window_bytes // max(1, self._each)

    def took(self, window: Window, seconds: float) -> None:
        """Note how long a window took (s): when calling single steps has cost enough, windows are compiled."""
        self.step_seconds = seconds / window.length
        if window.calling > _WORTHWHILE * seconds:
            self.spent += window.calling
            self._told += window.length

    def call(self, window: Window, feed: Feed | None, *, by_hand: bool) -> None:
        """Run a window's steps on the device, without waiting.

        Args:
            window: The window; it is cut where its batches cease to have one shape.
            feed: Where batches go back that are not consumed.
            by_hand: Whether the step is run by hand.

        Raises:
            Exception: Its first step failed; the window has all its batches still.
        """
        if by_hand or not self._call_window(window, feed):
            self._call_single(window, feed, by_hand=by_hand)

    def _call_window(self, window: Window, feed: Feed | None) -> bool:
        """Call the window program if there is to be one; tell whether it was called."""
        state, engine = self._state, self._engine
        stacker = self._stacker_for(window.batches[0]) if window.length > 1 else None
        if stacker is None:
            return False
        buffer, count = stacker.stack(window.batches)
        if count < 2:
            return False
        give_back(feed, window.cut(count))

        def program() -> Program:
            setup = engine.setup(self._phase)
            return engine.programs.many(
                setup, engine.plan, self._phase, state, window.batches[0], buffer, stacker.steps
            )

        held = self.many or program()
        window.began = time.perf_counter()
        try:
            carry, outputs = held.call(state.laid_out(held.layout), buffer, np.uint32(count))
        except (TypeError, ValueError):  # a callback has moved the carry to another place; nothing was donated
            if (other := program()) is held:
                raise
            held = other
            carry, outputs = held.call(state.laid_out(held.layout), buffer, np.uint32(count))
        state.came_back(carry, held.layout)
        self.many = held
        window.calls.append(outputs)
        window.came_from(held)
        self.calls += 1
        return True

    def _call_single(self, window: Window, feed: Feed | None, *, by_hand: bool) -> None:
        """Call the single-step program for each batch."""
        state = self._state
        calls, carry = window.calls, None
        program = None if by_hand else self._single
        failure: BaseException | None = None
        worked = time.thread_time()
        try:
            if program is None:
                program = self._single_program(window.batches[0], by_hand=by_hand)
            # CPU time, because a call waits where too many are under way already.
            call, window.began, worked = program.call, time.perf_counter(), time.thread_time()
            for batch in window.batches:
                try:
                    if carry is None:
                        carry = state.laid_out(program.layout)
                    carry, outputs = call(carry, batch)
                except (TypeError, ValueError, OverflowError):
                    # Another shape than the program's; nothing was donated. A shorter last batch has its own.
                    if calls or (other := self._single_program(batch, by_hand=by_hand)) is program:
                        raise
                    program, call = other, other.call
                    carry = state.laid_out(program.layout)
                    window.began, worked = time.perf_counter(), time.thread_time()
                    carry, outputs = call(carry, batch)
                calls.append(outputs)
        except BaseException as error:
            failure = error
        if calls and program is not None:
            state.came_back(carry, program.layout)
        window.calling = time.thread_time() - worked
        if not by_hand:
            self._single, self.usual = program, self.usual or program
        if calls and program is not None:
            window.came_from(program)
            self.calls += len(calls)
        if isinstance(failure, Exception) and (not calls or state.some_array.is_deleted()):
            raise failure
        give_back(feed, window.cut(len(calls)))  # steps of a window have one shape, and errors their turn
        if failure is not None and not isinstance(failure, Exception):
            raise failure

    def _single_program(self, batch: Batch, *, by_hand: bool) -> Program:
        engine = self._engine
        setup = engine.setup(self._phase)
        return engine.programs.single(setup, engine.plan, self._phase, self._state, batch, by_hand=by_hand)

    def _stacker_for(self, batch: Batch) -> Stacker | None:
        """Return what stacks batches for the window program, or None if there is to be none."""
        if self._stacker is None and self.usual is not None and self._pays(batch):
            steps = self._buffer_length(batch)
            if steps > 1 and jax.tree.leaves(self.usual.step.batch_spec):
                self._stacker = Stacker(batch, steps)
        return self._stacker

    def _pays(self, batch: Batch) -> bool:
        programs = self._engine.programs
        if self.usual is None or programs.kind_of(self.usual.step, self._state.platform) == "straight":
            return False
        if programs.steps_per_call != "auto":
            return programs.steps_per_call > 1
        if programs.has_windows(self.usual.step):
            return True
        if isinstance(batch, Rows):  # data on the device asks for windows, once it is known how long a step takes
            return self.calls > AHEAD
        # The window program is compiled when calling this one has cost as much: at most, the cost is doubled. Or
        # before, where it is known how many steps are still to come.
        coming = self.spent / self._told * self._steps_to_come() if self._told >= _TELLING else 0.0
        return self.spent > self.usual.seconds or coming > _SURELY * self.usual.seconds

    def _steps_to_come(self) -> int:
        """Return how many steps of the phase the fit still has, as far as that is known."""
        state = self._state
        if type(self._phase).trains and state.last_step:
            return state.last_step - state.step
        epochs = max(0, state.epochs - state.epoch)
        return max(0, state.steps_in_epoch - state.step_in_epoch) + epochs * state.steps_in_epoch

    def _buffer_length(self, batch: Batch) -> int:
        """Return how many steps a window program's buffer has."""
        programs, most = self._engine.programs, self._most()
        if programs.steps_per_call != "auto":
            return min(most, programs.steps_per_call)
        alone = isinstance(batch, Rows) and not (self._plan.begin or self._plan.end or self._plan.trigger)
        steps = max(LONGEST, self._state.steps_in_epoch) if alone else LONGEST
        in_time = int(2 * self.window_seconds / self.step_seconds) if self.step_seconds else steps
        return min(most, steps, in_time)
