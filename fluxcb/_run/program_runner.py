"""Running the steps of a window with the single-step program or the window program."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.profiler import StepTraceAnnotation

from fluxcb._compile.arrays import nbytes_of, process_nbytes_of
from fluxcb._compile.program import Program
from fluxcb._compile.windows import WindowPlan, bound_at, must_look_before
from fluxcb._declare.phases import Phase
from fluxcb._interruptions import is_interruption
from fluxcb._run.batch_stream import BatchStream
from fluxcb._run.programs import Programs
from fluxcb._run.pulling import return_batches
from fluxcb._run.stacker import Stacker
from fluxcb._run.state import HostState
from fluxcb._run.window import Window
from fluxcb._run.window_trial import faster_kind
from fluxcb._typing import Batch, PyTree, Rows

__all__ = ["ProgramRunner"]

AHEAD = 32
"""Maximum number of single-step calls in a window. JAX runs at most 32 computations ahead (measured on CPU).

The same limit applies to a window of stacked batches while the device is idle, as at the start of an epoch. The device
waits until the window is stacked, and the host stacks the next, longer window while the device runs this one. For the
64-64-10 network (19 us per step, 2.4 us to stack a batch), this saves 0.2 ms per epoch.
"""

AHEAD_SHARDED = 8
"""The limit if the carry is on several CPU devices: two windows are in flight, so at most 16 calls.

With 64 calls in flight, the CPU collectives of XLA abort, also in hand-written loops (jax 0.10.2), because each call
holds threads that wait for the other devices. On GPU and TPU, a collective waits in the queue of each device and holds
no thread, so the limit is `AHEAD`. The GPU client of XLA has the same limit of 32 calls.
"""

LONGEST = 128
"""Maximum window length (steps) that the engine chooses. Longer ones only delay the last handlers of an epoch."""

WINDOW_SECONDS = 0.1
"""Maximum duration of a window (s). Two are in flight, so Ctrl-C, progress bars and clocks react in 0.2 s."""

# The exceptions that JAX raises for arguments that a program was not compiled for.
_OTHER_SHAPE = (TypeError, ValueError, OverflowError)
_NOTICEABLE_SHARE = 0.05  # minimum share of the step time that calling must take for windows to be worthwhile
_MIN_TIMED_STEPS = 64  # number of timed steps that predict the calling cost of later steps well enough
# Compile early if the expected saving is this multiple of the compile time. It is above 1 because a fit can end early.
_MIN_SAVING_RATIO = 2
_MAX_TRIALS = 5  # maximum number of trials that a stop by a traced handler may end

# A phase begins with the window program if its steps are cheap: at most so many floating-point operations (about 20 ms
# on CPU) and bytes of a batch (stacking it takes about 20 us), and so many steps between handlers that end a window.
_CHEAP_FLOPS = 1e9
_CHEAP_BYTES = 1 << 18
_MIN_DISTANCE = 4


def _explained(error: BaseException) -> BaseException:
    """Return the error that `jax_debug_nans` raises for a jitted function, if a compiled step has raised it.

    JAX raises a private exception in compiled programs, which `jax.jit` catches to run the function again without
    `jit`. It has no text, and the step has donated its arguments, so it cannot run again.

    The error of JAX's transfer guard gets a note, because calls of the step transfer NumPy batches. An explicit
    `device_put` of each batch, which the guard would allow, takes longer.
    """
    if isinstance(error, jax.errors.JaxRuntimeError) and "Disallowed host-to-device transfer" in str(error):
        note = "call `fit` under `with jax.transfer_guard_host_to_device('allow'):`, because its calls transfer batches"
        if note not in getattr(error, "__notes__", ()):
            error.add_note(note)
    if type(error).__name__ != "InternalFloatingPointError":
        return error
    return FloatingPointError(
        f"`jax_debug_nans` or `jax_debug_infs` found {error.args[-1]} in a result of the compiled step.\n"
        "  fix:   to find the gradient or parameter, turn this setting of JAX off, and add "
        "`fluxcb.callbacks.CheckNumerics()`"
    )


class ProgramRunner:
    """Calls the programs of one phase.

    There are two programs. The single-step program takes one batch, and the window program takes a buffer of stacked
    batches. Both give the same bits, so it does not matter when the window program takes over. A phase with cheap steps
    begins with the window program and compiles no other one.

    Args:
        state: The state of the Learner; the runner uses the train state, and the counters that predict the remaining
            steps.
        programs: The compiled programs.
        phase: The phase.

    Attributes:
        main_program: The first program, for batches with the shape of the first one. None before the first step.
        window_program: The window program, or None before it is compiled.
        calls: Number of program calls.
        call_seconds: CPU time spent on calling the single-step program in windows where it was a noticeable share (s).
        step_seconds: Duration of a step in the last window (s), or 0 if it is unknown.
    """

    chooses_locally = True
    """Whether this process alone chooses between single steps and windows."""

    def __init__(self, state: HostState, programs: Programs, phase: Phase) -> None:
        self._train, self._progress = state.train, state.progress
        self._programs = programs
        self._phase = phase
        self._plan = programs.plan.phase(type(phase))
        self.main_program: Program | None = None
        # The programs of the last calls. A shorter last batch has its own program.
        self._step_program: Program | None = None
        self._manual_program: Program | None = None
        self.window_program: Program | None = None
        self._stacker: Stacker | None = None
        self._bytes_per_step: int | None = None  # size of a step's batch and fetched values in this process
        self._batch_bytes = 0
        self._trials = 0
        self._measures: bool | None = None  # whether windows are measured before they are used; None: unknown
        self.calls = self._timed_steps = 0
        self.call_seconds = self.step_seconds = 0.0

    @property
    def plan(self) -> WindowPlan | None:
        """The window plan of the phase, or None before the shapes of a step are known."""
        return self.plan_of(self.main_program) if self.main_program is not None else None

    def plan_of(self, program: Program) -> WindowPlan:
        """Return the window plan of a program."""
        return self._programs.windows(self._phase, program.step)

    def max_length(self, *, idle: bool) -> int:
        """Return the maximum number of steps of the next window.

        Args:
            idle: Whether no window is in flight, so that the device starts sooner with a short one; see `AHEAD`.
        """
        if self.window_program is not None:
            waits = idle and self._stacker is not None and not self._stacker.rows  # stacking row numbers is fast
            return min(AHEAD, self.window_program.steps) if waits else self.window_program.steps
        train = self._train
        meets = train.platform == "cpu" and len(train.some_array.devices()) > 1
        return max(1, min(AHEAD_SHARDED if meets else AHEAD, self._max_in_memory()))

    @property
    def window_seconds(self) -> float:
        """Maximum duration of a window (s)."""
        return WINDOW_SECONDS

    def forget(self) -> None:
        """Forget the programs, because the model or the data was replaced."""
        self.main_program = self._step_program = self._manual_program = self.window_program = None
        self._stacker = self._bytes_per_step = self._measures = None

    def _max_in_memory(self) -> int:
        """Return the number of steps whose batches and fetched values fit into `window_bytes`."""
        if self.main_program is None:
            return 1
        if self._bytes_per_step is None:
            self._bytes_per_step = self._batch_bytes + self.plan_of(self.main_program).fetch.bytes_each
        return self._programs.window_bytes // max(1, self._bytes_per_step)

    def _begin_with(self, program: Program, batch: Batch) -> None:
        """Store the first program and the size of the batches that it takes."""
        # Rows of resident arrays are gathered by the program.
        rows = isinstance(batch, Rows)
        self._batch_bytes = nbytes_of(program.step.batch_spec) if rows else process_nbytes_of(batch)
        self.main_program = program

    def record_duration(self, window: Window, seconds: float) -> None:
        """Record the duration of a window (s); `_windows_pay_off` compares it with the compile time."""
        self.step_seconds = seconds / window.length
        if window.call_seconds > _NOTICEABLE_SHARE * seconds:
            self.call_seconds += window.call_seconds
            self._timed_steps += window.length

    def wait(self, window: Window) -> tuple[int, bool]:
        """Wait for a window's end; see `Window.wait`."""
        return window.wait()

    def end_of_data(self) -> None:
        """Note that the data of an epoch has ended; several processes check that it ends for all of them."""

    def call(self, window: Window, stream: BatchStream | None, *, manual: bool) -> None:
        """Run a window's steps on the device, without waiting.

        Args:
            window: The window. It is shortened to the batches that have the shape of its first batch.
            stream: Receives the batches that are not consumed. None for a single step outside an epoch.
            manual: Whether the caller of `run_step` provided the batch.

        Raises:
            Exception: The first step failed; the window still has all its batches.
        """
        try:
            in_window = not manual and self._call_window(window, stream)
        except Exception as error:
            if (explained := _explained(error)) is not error:
                raise explained from None
            raise
        if not in_window:
            self._call_single(window, stream, manual=manual)

    def _call_window(self, window: Window, stream: BatchStream | None) -> bool:
        """Call the window program if windows pay off, and return whether it was called."""
        train = self._train
        only_windows = self.main_program is self.window_program  # also if neither is compiled yet
        stacker = self._stacker_for(window.batches[0]) if window.length > 1 or only_windows else None
        if stacker is None:
            return False
        buffer, count = stacker.stack(window.batches)
        # The single-step program runs a single step with less work, if there is one for this shape.
        if count < 2 and not (count and only_windows):
            return False
        return_batches(stream, window.cut(count))
        if not self._chooses_windows(window.batches, buffer, stacker):
            return False

        def find_program() -> Program:
            return self._programs.window_program(self._phase, window.batches[0], buffer, stacker.steps)

        program = self.window_program or find_program()
        window.record_program(program)
        window.began = time.perf_counter()
        try:
            with StepTraceAnnotation(type(self._phase).name, step_num=window.first_step, steps=count):
                carry, outputs = program.call(train.lend(program.layout), buffer, np.uint32(count))
        except (TypeError, ValueError) as error:
            # A callback may have moved the carry to other devices. JAX checks arguments before it donates anything, so
            # the train state survives, and the program for these devices can be called instead. A collective that fails
            # on CPU also raises a ValueError, but after the carry was donated.
            if is_interruption(error) or train.some_array.is_deleted() or (other := find_program()) is program:
                raise
            program = other
            window.record_program(program)
            carry, outputs = program.call(train.lend(program.layout), buffer, np.uint32(count))
        train.take_back(carry, program.layout)
        self.window_program = program
        if self.main_program is None:
            self._begin_with(program, window.batches[0])
        window.calls.append(outputs)
        window.start_transfers()
        self.calls += 1
        return True

    def _call_single(self, window: Window, stream: BatchStream | None, *, manual: bool) -> None:
        """Call the single-step program for each batch."""
        train = self._train
        calls, carry = window.calls, None
        program = self._manual_program if manual else self._step_program
        failure: BaseException | None = None
        annotated, number = StepTraceAnnotation.is_enabled(), window.first_step
        # CPU time instead of wall time, because a call blocks if too many are in flight. Reading this clock can take 10
        # us, so it is not read for a single step outside an epoch.
        clock = _no_clock if manual else time.thread_time
        worked = clock()
        try:
            if program is None:
                program = self._find_step_program(window.batches[0], manual=manual)
            window.record_program(program)
            call, window.began, worked = program.call, time.perf_counter(), clock()
            if annotated:
                call = self._annotated(call, number)
            for batch in window.batches:
                try:
                    if carry is None:
                        carry = train.lend(program.layout)
                    carry, outputs = call(carry, batch)
                except _OTHER_SHAPE as error:
                    # A batch of another shape, such as a shorter last one, needs another program. Nothing was donated.
                    # After the first call, the window is shortened here instead, because all its steps must have one
                    # shape. A collective that fails on CPU also raises a ValueError, but after the carry was donated.
                    if calls or is_interruption(error) or train.some_array.is_deleted():
                        raise
                    if (other := self._find_step_program(batch, manual=manual)) is program:
                        raise
                    program, call = other, self._annotated(other.call, number) if annotated else other.call
                    window.record_program(program)
                    carry = train.lend(program.layout)
                    window.began, worked = time.perf_counter(), clock()
                    carry, outputs = call(carry, batch)
                calls.append(outputs)
        except BaseException as error:
            # Raised below, after the carry that the last call returned is taken back.
            failure = _explained(error)
        if calls and program is not None:
            train.take_back(carry, program.layout)
        window.call_seconds = clock() - worked
        if manual:
            self._manual_program = program
        else:
            self._step_program = program
            if self.main_program is None and program is not None:
                self._begin_with(program, window.batches[0])
        if calls and program is not None:
            window.start_transfers()
            self.calls += len(calls)
        interrupted = failure is not None and is_interruption(failure)
        if failure is not None and not interrupted and (not calls or train.some_array.is_deleted()):
            raise failure  # either no step has run, or the failed call has donated the carry
        rest = window.cut(len(calls))
        return_batches(stream, rest)
        if failure is not None:
            if interrupted or not rest:
                raise failure
            # The handlers of the preceding steps run first. Then the batch is dispatched again and is expected to fail
            # again.
            if not isinstance(failure, _OTHER_SHAPE):  # the next window gets a program for a batch of another shape
                window.failed = failure, rest[0]

    def _annotated(self, call: Callable[..., Any], number: int) -> Callable[..., Any]:
        """Return a call of the single-step program that profiles show as a step, counted from `number`."""
        numbers = itertools.count(number)

        def run(carry: PyTree, batch: Batch) -> Any:
            with StepTraceAnnotation(type(self._phase).name, step_num=next(numbers)):
                return call(carry, batch)

        return run

    def _find_step_program(self, batch: Batch, *, manual: bool) -> Program:
        return self._programs.step_program(self._phase, batch, manual=manual)

    def _stacker_for(self, batch: Batch) -> Stacker | None:
        """Return the stacker for the window program, or None if windows do not pay off."""
        if self._stacker is not None:
            return self._stacker
        if self.main_program is None:
            steps = self._first_buffer_length(batch)
        else:
            steps = self._buffer_length(batch) if self._windows_pay_off(batch) else 1
        if steps > 1 and jax.tree.leaves(batch.rows if isinstance(batch, Rows) else batch):
            self._stacker = Stacker(batch, steps)
        return self._stacker

    def _first_buffer_length(self, batch: Batch) -> int:
        """Return the length of the window program's buffer (steps) if the phase begins with it, otherwise 1.

        A window program costs as much to compile as the single-step program, and runs windows of all lengths.
        """
        programs, progress, train = self._programs, self._progress, self._train
        if programs.steps_per_call != "auto" or not self.chooses_locally:
            return 1
        resident = isinstance(batch, Rows)
        # Batches on a device are stacked by a function that has to be compiled as well.
        on_device = not resident and any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(batch))
        if on_device or train.platform != "cpu" or len(train.some_array.devices()) > 1:
            return 1
        step = programs.traced(self._phase, batch)
        if programs.kind_of(step, "cpu") == "straight" or step.flops > _CHEAP_FLOPS or step.jaxpr.effects:
            return 1
        size = 0 if resident else process_nbytes_of(batch)
        plan = programs.windows(self._phase, step)
        bounds = (*plan.bounds, *must_look_before(self._plan.begin, train.carry, train.hyperparams))
        number = progress.step if type(self._phase).trains else progress.step_in_epoch
        due = bound_at((bound.call for bound in bounds), number, progress.epoch, progress.cancelled_of(self._phase))
        if size > _CHEAP_BYTES or (due is not None and due - number < _MIN_DISTANCE):
            return 1
        most = programs.window_bytes // max(1, size + plan.fetch.bytes_each)
        # A short first fit must not make the windows of later fits short. Full-batch training has no longer windows.
        longest, least = self._longest(batch), 2 if progress.steps_in_epoch == 1 else AHEAD
        return min(most, longest, max(least, progress.steps_in_epoch or longest))

    def _longest(self, batch: Batch) -> int:
        """Return the maximum length (steps) of a buffer that the engine chooses."""
        # Without host handlers, nobody waits for the end of a window, so it can be an epoch of resident data.
        alone = isinstance(batch, Rows) and not (self._plan.begin or self._plan.end or self._plan.trigger)
        return max(LONGEST, self._progress.steps_in_epoch) if alone else LONGEST

    def _windows_pay_off(self, batch: Batch) -> bool:
        programs, platform = self._programs, self._train.platform
        if self.main_program is None:
            return False
        step = self.main_program.step
        if self._measures is None:
            self._measures = programs.awaits_choice(step, platform)
        # A `straight` program has no loop; see `Programs.kind_of`.
        if programs.kind_of(step, platform) == "straight" and not self._measures:
            return False
        if programs.steps_per_call != "auto":
            return programs.steps_per_call > 1
        if programs.has_windows(self.main_program.step):
            return True
        if isinstance(batch, Rows):  # data on the device always gains from windows, once the step time is measured
            return self.calls > AHEAD
        # The window program is compiled when calling single steps has cost as much time as compiling it. A fit of one
        # second then does not pay for it, and the total cost is at most doubled. If the number of remaining steps is
        # known, it is compiled as soon as the expected saving covers the cost. Compiling in a background thread was
        # rejected, because the thread could outlive the fit.
        saving, compile_seconds = 0.0, self.main_program.seconds
        if self._timed_steps >= _MIN_TIMED_STEPS:
            saving = self.call_seconds / self._timed_steps * self._steps_to_come()
        return self.call_seconds > compile_seconds or saving > _MIN_SAVING_RATIO * compile_seconds

    def _chooses_windows(self, batches: list[Batch], buffer: Any, stacker: Stacker) -> bool:
        """Return whether the window program is to be called; on an accelerator, measure first whether it is faster.

        The choice is made once per phase, because both kinds of programs may give other bits there. It stays in
        checkpoints; see `Programs.adopt`.
        """
        if not self._measures:
            return True
        programs, phase = self._programs, self._phase
        single = self._find_step_program(batches[0], manual=False)
        try:
            window = programs.window_program(phase, batches[0], buffer, stacker.steps)
            kind = faster_kind(self._train, single, window, batches, stacker)
        except jax.errors.JaxRuntimeError:
            # The window program or the copy of the carry does not fit into memory. If a step before has failed, waiting
            # for its window raises the error.
            kind = "straight"
        self._trials += 1
        if kind is None and self._trials == _MAX_TRIALS:
            kind = "straight"
        if kind is not None:
            programs.chosen[type(phase).name] = kind
            self._measures = False
            self._step_program = None  # a program of the same kind runs the single steps from now on
        if kind != "loop":
            self._stacker = None
        return kind == "loop"

    def _steps_to_come(self) -> int:
        """Return the number of steps of the phase that remain in this fit, as far as it is known."""
        progress = self._progress
        if type(self._phase).trains and progress.last_step:
            return progress.last_step - progress.step
        epochs = max(0, progress.epochs - progress.epoch)
        return max(0, progress.steps_in_epoch - progress.step_in_epoch) + epochs * progress.steps_in_epoch

    def _buffer_length(self, batch: Batch) -> int:
        """Return the length of the window program's buffer (steps)."""
        programs, most = self._programs, self._max_in_memory()
        if programs.steps_per_call != "auto":
            return min(most, programs.steps_per_call)
        steps = self._longest(batch)
        in_time = int(2 * self.window_seconds / self.step_seconds) if self.step_seconds else steps
        return min(most, steps, in_time)


def _no_clock() -> float:
    return 0.0
