"""The step loop: the steps of a phase, window by window.

While the device runs one window, the host prepares and dispatches the next one, and then runs the handlers of the
previous window: step by step, each with the values of its own step. This overlaps the Python code of the handlers with
the work of the device. Running ahead is correct for two reasons. First, a stop stays set in the carry, so no step runs
after it. Second, a handler that can cancel, that writes what a step reads, or that reads much of the carry has declared
this. Such a handler ends its window, and nothing is dispatched until it has run.

A step that takes longer than `WINDOW_SECONDS` is a window as well: the next step is dispatched while it runs. An
accelerator then does not wait for the handlers, for the next batch, or for its transfer. The handlers of a step still
run as soon as the step has finished, so progress bars and logs are not delayed. The price is the time of one step at
the end: Ctrl-C takes effect after at most two steps, and an exception in a handler after at most one more step. The
memory for one more batch is needed.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

import jax

from fluxcb._compile.arrays import leading_axis
from fluxcb._compile.windows import WindowPlan, bound_at, must_look_before
from fluxcb._declare.control import Cancel, CancelStep
from fluxcb._declare.events import StepBegin, StepEnd, Trigger
from fluxcb._declare.phases import Phase
from fluxcb._interruptions import is_interruption
from fluxcb._run.batch_stream import BatchStream
from fluxcb._run.emitter import Emitter
from fluxcb._run.program_runner import ProgramRunner
from fluxcb._run.programs import Programs
from fluxcb._run.pulling import pull_batches, return_batches
from fluxcb._run.state import HostState
from fluxcb._run.window import Window
from fluxcb._run.window_spans import WindowSpans
from fluxcb._typing import Batch, StatePath

__all__ = ["StepLoop"]

_STEP_BEGIN, _STEP_END, _TRIGGER = StepBegin(), StepEnd(), Trigger()


class StepLoop:
    """Runs the steps of one phase.

    Args:
        state: The state of the Learner; the loop uses the counters, the moment, and the train state.
        programs: The compiled programs, which have the plan.
        emitter: Runs host handlers.
        runner: Calls the programs of the phase.
        phase: The phase.

    Attributes:
        runner: See the argument.
        look_before: The bounds of the StepBegin handlers that have to run before their step, with reasons.
        windows: Number of windows that have run.
        steps: Number of steps that have run.
    """

    _runs_ahead = True
    """Whether the device may be ahead of the handlers while a window is replayed."""

    def __init__(
        self, state: HostState, programs: Programs, emitter: Emitter, runner: ProgramRunner, phase: Phase
    ) -> None:
        self._programs = programs
        self._emitter = emitter
        self._progress, self._moment, self._train = state.progress, state.moment, state.train
        self._meter = state.meter
        # The engine creates new step loops when a timeline is turned on or off, so the loop can bind the timeline once.
        timeline = state.meter.timeline
        self._spans = WindowSpans(timeline, type(phase).__name__) if timeline is not None else None
        self._phase = phase
        self._trains = type(phase).trains
        # Bound here because the loop reads these attributes at every step.
        self._plan = programs.plan.phase(type(phase))
        self.look_before = must_look_before(self._plan.begin, self._train.carry, self._train.hyperparams)
        # A "live" handler is a StepBegin handler that changes something the step reads, so it cannot be replayed
        # afterwards.
        self._live_calls = tuple(bound.call for bound in self.look_before)
        self.runner = runner
        self.windows = self.steps = 0
        self._last_end = 0.0
        self._stream: BatchStream | None = None

    # -- the loop ---------------------------------------------------------------------------

    def run(self, stream: BatchStream, limit: int | None, *, continues_stream: bool, interruptible: bool) -> None:
        """Run an epoch's steps.

        Args:
            stream: The batches.
            limit: Maximum number of steps, or None for all the data.
            continues_stream: Whether the epoch continues the stream of the previous epoch.
            interruptible: Whether a signal ends the epoch early.
        """
        progress, train, interrupted = self._progress, self._train, self._emitter.interrupt
        if stream is not self._stream:  # the data was replaced, and its batches may have another shape
            self._stream = stream
            self.runner.forget()
        pending: Window | None = None
        failed: tuple[BaseException, Batch] | None = None  # see `Window.failed`
        while True:
            # The counters on the host do not include the pending window, whose handlers have not run. So every length
            # and every due step below is computed from the counters plus `ahead`.
            ahead = pending.length if pending is not None else 0
            length, live = self._next_length(ahead)
            if limit is not None:
                length = min(length, limit - progress.step_in_epoch - ahead)
            if interruptible and interrupted.requested:
                # A signal handler only sets a flag. If it raised inside a call that donates the carry, the carry would
                # be lost.
                length = 0
            if pending is not None and (pending.blocks or live or length <= 0):
                # A handler of the pending window, or StepBegin of the next step, has to run before anything else is
                # dispatched. It may change the data, the train state, or the counters, so the length is computed again
                # afterwards.
                self._finish_window(pending, stream)
                pending = None
                continue
            if length <= 0:  # the limit is reached, or a signal arrived
                return
            try:
                window = self._pull(stream, length, continues_stream)
            except BaseException as error:
                # The data source failed. Its error is raised in turn: the handlers of the preceding steps run first.
                try:
                    self._finish_pending(pending, stream, error)
                except Cancel:
                    # One of these handlers cancelled the epoch before the failing batch was needed. A later epoch of
                    # the same stream raises the error when it reaches that batch.
                    stream.fail_later(error)
                    raise
                if is_interruption(error) or not stream.has_buffered:
                    raise
                # A traced handler stopped the pending window, which returned its unused batches. They come before the
                # failure.
                pending = None
                stream.fail_later(error)
                continue
            if pending is not None and (not self.runner.step_seconds or not window.length):
                # There are two reasons to replay the pending window first. Before the first window has finished, the
                # time of a step is unknown. If the data has ended, a stop in the pending window may still return
                # batches to the stream. The batches that were just pulled wait in the stream.
                stream.push_back(window.cut(0))
                self._finish_window(pending, stream)
                pending = None
                continue
            if not window.length:  # the data has ended
                self.runner.end_of_data()
                return
            if live and not self._begin_live(window):  # StepBegin cancelled the step, which consumes its batch
                continue
            try:
                self._dispatch(window, ahead, stream)
            except BaseException as error:
                if is_interruption(error) or (window.calls and train.alive):
                    # The exception arrived between two calls of the window, for example from a signal handler. The
                    # steps that were called have changed the train state, so they are counted. Otherwise the counters
                    # would disagree with it.
                    self._finish_pending(pending, stream, error)
                    if window.calls and train.alive:
                        self._count_unseen(window, stream)
                    raise
                if pending is None or not train.alive:
                    # Either no step precedes the failure, or the train state is lost and nothing can run. The failing
                    # batch counts as consumed, so that a caller who catches the error gets past it. The batches after
                    # it are returned.
                    stream.push_back(window.cut(0)[1:])
                    raise
                # The handlers of the preceding steps run first. Then the batch is dispatched again and is expected to
                # fail again.
                failed = error, window.batches[0]
                stream.push_back(window.cut(0))
                self._finish_window(pending, stream)
                pending = None
                continue
            if failed is not None and any(batch is failed[1] for batch in window.batches):
                # The batch was dispatched without an error this time, so it did not cause the first one (the device may
                # have been out of memory, for example). To not lose that error, it is raised now, after the steps that
                # ran are counted.
                for unseen in (pending, window):
                    if unseen is not None:
                        self._count_unseen(unseen, stream)
                raise failed[0]
            failed = window.failed or failed
            # The device runs the new window while the handlers of the pending window run.
            if pending is not None:
                self._finish_window(pending, stream, following=window)
            pending = window if window.length else None

    def run_one(self, batch: Batch) -> Mapping[str, Any]:
        """Run one step on a batch that the caller provides.

        Returns:
            The values of the step on the device, by name; empty if the step was cancelled.
        """
        window = Window([batch], self._meter)
        if self._plan.begin and not self._begin_live(window):  # nothing else is in flight, so StepBegin can run first
            return {}
        self._dispatch(window, 0, None, manual=True)
        if self._spans is not None or "stop" in window.program.step.step_specs:
            self._finish_window(window, None)  # waits: a timeline shows when the step ended on the device
        else:  # nothing can stop the step, so only a handler that reads one of its values has to wait
            self.windows += 1
            self.steps += 1
            self._replay(window)
        return window.unpacked_values()

    @property
    def compiled(self) -> bool:
        """Whether the step has been compiled. A batch of another shape can still need another program."""
        return self.runner.main_program is not None or self._programs.has(self._phase)

    def _number(self) -> int:
        """Return the number of finished steps that schedules count: of the training, or of a validation epoch."""
        return self._progress.step if self._trains else self._progress.step_in_epoch

    def _next_length(self, ahead: int) -> tuple[int, bool]:
        """Return the length of the next window (steps), and whether StepBegin must run before its step."""
        number, epoch = self._number() + ahead, self._progress.epoch
        length = 1
        runner = self.runner
        # Without a measured step time, the window has one step: the first window measures it.
        if runner.step_seconds:
            max_length = runner.max_length(idle=not ahead)
            length = max(1, min(max_length, int(runner.window_seconds / runner.step_seconds)))
        cancelled = self._progress.cancelled_of(self._phase)
        due = bound_at(self._live_calls, number, epoch, cancelled)
        if due is not None:
            if due == number + 1:
                return 1, True
            length = min(length, due - number - 1)
        plan = runner.plan
        for bound in plan.bounds if plan is not None else ():
            due = bound_at((bound.call,), number, epoch, cancelled)
            if due is not None:
                length = min(length, due - number)
        return length, False

    def _pull(self, stream: BatchStream, length: int, continues_stream: bool) -> Window:
        """Pull the batches of a window: `length` of them, or fewer."""
        began = time.perf_counter()
        first = stream.consumed
        window = Window(pull_batches(stream, length, continues_stream, seconds=self.runner.window_seconds), self._meter)
        window.stream, window.first_batch = stream, first
        if self._spans is not None:
            self._spans.pulled(stream.name, began, window.length)
        return window

    def _begin_live(self, window: Window) -> bool:
        """Run the StepBegin handlers before their step, and return whether the step is to run."""
        moment = self._moment
        moment.window, moment.batch_size = window, leading_axis(window.batches[0])
        try:
            self._emitter.run_calls(self._plan.begin, _STEP_BEGIN, self._phase)
        except Cancel as cancel:
            self._progress.count_cancelled(trains=self._trains)
            if isinstance(cancel, CancelStep):
                return False
            raise
        finally:
            moment.window, moment.batch_size = None, 0
        window.overwritten.clear()  # the writes preceded the step, so the values of the step include them
        window.live = True
        return True

    # -- dispatching ------------------------------------------------------------------------

    def _dispatch(self, window: Window, ahead: int, stream: BatchStream | None, *, manual: bool = False) -> None:
        """Dispatch a window to the device without waiting for it.

        Args:
            window: The window. It is shortened to the batches that have the shape of its first batch.
            ahead: Number of steps that were dispatched before and not replayed yet.
            stream: Receives the batches that are not consumed. None for a single step outside an epoch.
            manual: Whether the caller of `run_step` provided the batch.

        Raises:
            Exception: The first step of the window failed; its batch is consumed.
        """
        train, progress, began = self._train, self._progress, time.perf_counter()
        window.first_step = self._number() + ahead + 1
        try:
            self.runner.call(window, stream, manual=manual)
        except BaseException as error:
            if train.alive and train.some_array.is_deleted():  # the failed call had already donated the carry
                train.lose(error)
            raise
        plan = window.plan = self.runner.plan_of(window.program)
        begin, cancelled = self._number() + ahead, progress.cancelled_of(self._phase)
        end = begin + window.length
        if self._spans is not None:
            kind = self._programs.kind_of(window.program.step, train.platform)
            self._spans.dispatched(window, kind, began, begin + 1, progress.epoch)
        kept: list[StatePath] = []
        for bound in plan.bounds:
            # `_next_length` made the window end at the first due step of any bound, so only the last step can be due.
            if bound_at((bound.call,), end - 1, progress.epoch, cancelled) == end:
                window.blocks |= bound.blocks
                kept += bound.keeps
        if not window.blocks:  # the next window may donate the carry before these handlers run, so they get copies
            window.kept = train.copies_of(kept)

    # -- looking ----------------------------------------------------------------------------

    def _finish_window(self, window: Window, stream: BatchStream | None, *, following: Window | None = None) -> None:
        """Wait for a window, and run the handlers of its steps.

        Args:
            window: The window.
            stream: Receives the batches that were not consumed.
            following: The window that was dispatched after this one.
        """
        try:
            self._wait_for(window, stream, following)
            self._replay(window)
        except BaseException as error:
            # The device has already run the rest of the window and the following window. Their steps are counted
            # without their handlers, so that the counters agree with the train state.
            missed = window.length - window.reached
            missed += self._count_unseen(following, stream) if following is not None and following.length else 0
            planned = isinstance(error, Cancel) or not isinstance(error, Exception)
            if missed and self._trains and self._train.alive and not planned:
                step = self._progress.step
                error.add_note(f"the device runs ahead of host handlers: the train state is that after step {step}")
            raise

    def _wait_for(self, window: Window, stream: BatchStream | None, following: Window | None) -> None:
        """Wait for a window. If a traced handler stopped it, drop the steps that did not run."""
        train, progress = self._train, self._progress
        began = time.perf_counter() if self._spans is not None else 0.0
        try:
            # An asynchronous failure of the device is raised here, at the first wait after it.
            ran, stopped = self.runner.wait(window)
        except jax.errors.JaxRuntimeError as error:
            train.lose(error)
            raise
        now = time.perf_counter()
        seconds = now - max(window.began, self._last_end)
        self._last_end = now
        self.runner.record_duration(window, seconds)
        if ran < window.length or stopped:
            # The following window has run no step, because the stop is in the carry. All of its batches are returned.
            window.stopped = stopped
            rest = window.cut(ran) + (following.cut(0) if following is not None else [])
            return_batches(stream, rest)
            # The carry still has `stopped` set, so without new counters no further step would run.
            step = progress.step + (ran if self._trains else 0)
            train.set_counters(progress, step=step, step_in_epoch=progress.step_in_epoch + ran)
        if self._spans is not None:
            self._spans.waited(window, began, now, self._number() + 1, progress.epoch)
        self.windows += 1
        self.steps += ran

    def _replay(self, window: Window) -> None:
        """Run the handlers of a window's steps."""
        progress, moment, phase, trains = self._progress, self._moment, self._phase, self._trains
        run_calls, spans = self._emitter.run_calls, self._spans
        # The replay changes the counters, so the span on the timeline is described by their values at its start.
        first, epoch, began = self._number() + 1, progress.epoch, time.perf_counter()
        plan = window.plan
        # `plan.inner` lacks the handlers that can be due at the last step only.
        begin, end, trigger = plan.begin if not window.live else (), plan.inner, plan.trigger
        length, sparse = window.length, plan.sparse
        last = length - 1
        moment.batch_size, moment.inside_window = plan.batch_size, True
        done = 0
        try:
            # `ahead` makes `HostBackend` refuse the train state, which is not that of the replayed step.
            moment.window, moment.ahead, window.computed = window, self._runs_ahead, True
            while done < length:
                if sparse:  # most steps have no due handler and are only counted
                    skipped = self._until_due(plan, length - done)
                    done += skipped
                    progress.count(skipped, trains=trains)
                    if done == length:
                        break
                window.at = done
                if done == last:
                    end, moment.inside_window = plan.end, False
                    moment.ahead = self._runs_ahead and not (window.blocks or window.stopped)
                if begin:
                    # The values of the step are already here, but StepBegin must not see them. Whether they are here
                    # depends on how long the window is, so a handler would see them at some steps and not at others.
                    window.computed = False
                    run_calls(begin, _STEP_BEGIN, phase)
                    window.computed = True
                done += 1
                if trains:  # not `Progress.count`: this line runs at every step
                    progress.step += 1
                progress.step_in_epoch += 1
                try:
                    if end:
                        run_calls(end, _STEP_END, phase)
                # The step has finished, so a cancel only skips the remaining handlers of the moment.
                except CancelStep:
                    pass
                # Values that handlers wrote at this step must not leak into the next one.
                if window.written:
                    window.written = {}
                if trigger:
                    # Trigger runs between two steps, where handlers see no step values.
                    moment.window = None
                    with contextlib.suppress(CancelStep):
                        run_calls(trigger, _TRIGGER, phase)
                    if self._emitter.between_steps:
                        self._emitter.run_between_steps(phase)
                    moment.window = window
        finally:
            moment.end_step()
            progress.count(length - done, trains=trains)  # the device has run these steps, even if a handler raised
            window.reached = done
            if spans is not None:
                spans.replayed(window, began, first, epoch)

    def _until_due(self, plan: WindowPlan, left: int) -> int:
        """Return the number of steps before the next one at which a handler can be due, at most `left`."""
        number = self._number()
        calls = (*plan.begin, *plan.end, *plan.trigger)
        due = bound_at(calls, number, self._progress.epoch, self._progress.cancelled_of(self._phase))
        return left if due is None else min(left, due - number - 1)

    def _finish_pending(self, pending: Window | None, stream: BatchStream, error: BaseException) -> None:
        """Run the handlers of the steps before a failure. After an interruption, only count the steps."""
        if pending is None:
            return
        if is_interruption(error):
            self._count_unseen(pending, stream)
        else:
            self._finish_window(pending, stream)

    def _count_unseen(self, window: Window, stream: BatchStream | None) -> int:
        """Count the steps of a window whose handlers will not run, and return their number."""
        try:
            self._wait_for(window, stream, None)
        except jax.errors.JaxRuntimeError:  # the train state is marked as lost; the exception being raised says more
            return 0
        self._progress.count(window.length, trains=self._trains)
        return window.length
