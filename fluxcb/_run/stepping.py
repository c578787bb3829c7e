"""Stepping: the steps of a phase, window by window.

While the device runs one window, the host prepares and dispatches the next, and then runs the handlers of the one
before: step by step, each seeing its own step's values. Where a handler has to look or change something between two
steps, the window ends there, and nothing is dispatched until the handler has run.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax

from fluxcb._compile.arrays import leading_axis
from fluxcb._compile.plan import AT_END, IN_SYNC, HostCall
from fluxcb._compile.windows import WindowPlan, bound_at, must_look_before
from fluxcb._declare.control import Cancel, CancelStep
from fluxcb._declare.events import Event, StepBegin, StepEnd, Trigger
from fluxcb._declare.phases import Phase
from fluxcb._run import calling
from fluxcb._run.feed import Feed, give_back, pull
from fluxcb._run.interrupts import Interrupt
from fluxcb._run.window import Window
from fluxcb._typing import Batch, StatePath

__all__ = ["Steps"]

_STEP_BEGIN, _STEP_END, _TRIGGER = StepBegin(), StepEnd(), Trigger()


class Host(calling.Host, Protocol):
    """What stepping needs of the engine."""

    interrupt: Interrupt

    def caller(self, phase: Phase) -> calling.Caller:
        """Return what calls the programs of a phase."""
        ...

    def run_calls(self, calls: Sequence[HostCall], event: Event, phase: Phase) -> None:
        """Run host calls that are due."""
        ...

    def give_snapshots(self, at: Phase | None) -> None:
        """Give handlers that asked for it a snapshot of this moment."""
        ...


class Steps:
    """Runs the steps of one phase.

    Args:
        engine: The engine.
        phase: The phase.

    Attributes:
        caller: Calls the programs.
        look_before: The StepBegin handlers that run before their step, and why.
        windows: How many windows have run.
        steps: How many steps have run.
    """

    def __init__(self, engine: Host, phase: Phase) -> None:
        self._engine = engine
        self._state = engine.state
        self._phase = phase
        self._trains = type(phase).trains
        self._plan = engine.plan.phase(type(phase))
        self.look_before = must_look_before(self._plan.begin, self._state.carry, self._state.hyperparams)
        self._live_calls = tuple(bound.call for bound in self.look_before)
        self.caller = engine.caller(phase)
        self.windows = self.steps = 0
        self._ended = 0.0
        self._feed: Feed | None = None

    # -- the loop ---------------------------------------------------------------------------

    def run(self, feed: Feed, limit: int | None, *, goes_on: bool, heeds: bool) -> None:
        """Run an epoch's steps.

        Args:
            feed: The batches.
            limit: Steps at most, or None for all the data.
            goes_on: Whether the data stream runs on from epoch to epoch.
            heeds: Whether a signal ends them.
        """
        state = self._state
        if feed is not self._feed:  # the data was exchanged, and its batches may be of another shape
            self._feed = feed
            self.caller.forget()
        pending: Window | None = None
        while True:
            ahead = pending.length if pending is not None else 0
            length, live = self._next_length(ahead)
            if limit is not None:
                length = min(length, limit - state.step_in_epoch - ahead)
            if heeds and self._engine.interrupt.requested:
                length = 0
            if pending is not None and (pending.blocks or live or length <= 0):
                self._look(pending, feed)
                pending = None
                continue  # a handler may have changed anything
            if length <= 0:
                return
            try:
                window = self._pull(feed, length, goes_on)
            except BaseException as error:
                try:
                    self._finish(pending, feed, error)
                except Cancel:  # of a step before it: the error comes in the turn of its batch
                    if isinstance(error, Exception):
                        feed.fail_later(error)
                    raise
                if not (feed.waiting and isinstance(error, Exception)):
                    raise
                pending = None  # the window before was stopped, and gave batches back that come first
                feed.fail_later(error)
                continue
            if pending is not None and (self._slow or not window.length):
                # These batches are at hand when their turn comes; a stop may put others before them.
                feed.push_back(window.cut(0))
                self._look(pending, feed)
                pending = None
                continue
            if not window.length:
                return
            if live and not self._begin_live(window):
                continue
            try:
                self._dispatch(window, ahead, feed)
            except Exception:
                if pending is None or not state.alive:
                    feed.push_back(window.cut(0)[1:])  # the batch that failed is spent; those behind it are not
                    raise
                feed.push_back(window.cut(0))  # it fails in its turn, once the steps before it have been looked at
                self._look(pending, feed)
                pending = None
                continue
            except BaseException as error:
                self._finish(pending, feed, error)
                if window.calls and state.alive:  # interrupted between two of its calls
                    self._catch_up(window, feed)
                raise
            if pending is not None:
                self._look(pending, feed, behind=window)
            pending = window if window.length else None

    def run_one(self, batch: Batch) -> Mapping[str, Any]:
        """Run one step on a batch given by hand.

        Returns:
            Its values on the device, by name; empty if it was cancelled.
        """
        window = Window([batch], self._state.meter)
        if not self._begin_live(window):
            return {}
        self._dispatch(window, 0, None, by_hand=True)
        self._look(window, None)
        return window.by_hand()

    @property
    def compiled(self) -> bool:
        """Whether the step has been compiled. Batches of another shape than before may still need another program."""
        engine, phase = self._engine, self._phase
        return self.caller.usual is not None or engine.programs.has(
            engine.setup(phase), engine.plan, phase, self._state
        )

    @property
    def _slow(self) -> bool:
        """Whether a step takes so long, or is so new, that nothing is won by running ahead of its handlers."""
        return not 0 < self.caller.step_seconds < self.caller.window_seconds / 2

    def _number(self) -> int:
        """Return how many steps schedules count as finished: the training's, or the epoch's where none train."""
        return self._state.step if self._trains else self._state.step_in_epoch

    def _next_length(self, ahead: int) -> tuple[int, bool]:
        """Return how many steps the next window has, and whether StepBegin must run before its step."""
        number, epoch = self._number() + ahead, self._state.epoch
        length = 1
        caller = self.caller
        if caller.step_seconds:
            longest = caller.longest(idle=not ahead)
            length = max(1, min(longest, int(caller.window_seconds / caller.step_seconds)))
        cancelled = self._state.cancelled_of(self._phase)
        due = bound_at(self._live_calls, number, epoch, cancelled)
        if due is not None:
            if due == number + 1:
                return 1, True
            length = min(length, due - number - 1)
        plan = caller.plan
        for bound in plan.bounds if plan is not None else ():
            due = bound_at((bound.call,), number, epoch, cancelled)
            if due is not None:
                length = min(length, due - number)
        return length, False

    def _pull(self, feed: Feed, length: int, goes_on: bool) -> Window:
        """Pull the batches of a window: `length` of them, or fewer."""
        return Window(pull(feed, length, goes_on, seconds=self.caller.window_seconds), self._state.meter)

    def _begin_live(self, window: Window) -> bool:
        """Run StepBegin before its step; tell whether the step is to run."""
        state = self._state
        state.window, state.batch_size = window, leading_axis(window.batches[0])
        try:
            self._engine.run_calls(self._plan.begin, _STEP_BEGIN, self._phase)
        except Cancel as cancel:
            if self._trains:
                state.cancelled += 1
            else:
                state.cancelled_in_epoch += 1
            if isinstance(cancel, CancelStep):
                return False
            raise
        finally:
            state.window, state.batch_size = None, 0
        window.overwritten.clear()  # what was written is what the step began with
        window.live = True
        return True

    # -- dispatching ------------------------------------------------------------------------

    def _dispatch(self, window: Window, ahead: int, feed: Feed | None, *, by_hand: bool = False) -> None:
        """Give a window to the device without waiting.

        Args:
            window: The window; it is cut where its batches cease to have one shape.
            ahead: Steps that were dispatched and not looked at yet.
            feed: Where batches go back that are not consumed.
            by_hand: Whether the step is run by hand.

        Raises:
            Exception: Its first step failed, and is spent.
        """
        state = self._state
        try:
            self.caller.call(window, feed, by_hand=by_hand)
        except BaseException as error:
            if state.alive and state.some_array.is_deleted():
                state.lose(error)
            raise
        plan = window.plan = self.caller.plan_of(window.program)
        end, cancelled = self._number() + ahead + window.length, state.cancelled_of(self._phase)
        kept: list[StatePath] = []
        for bound in plan.bounds:
            if bound_at((bound.call,), end - 1, state.epoch, cancelled) == end:
                window.blocks |= bound.blocks
                kept += bound.keeps
        if not window.blocks:  # the device may go on before these handlers have run, so they get copies
            window.kept = state.copies_of(kept)

    # -- looking ----------------------------------------------------------------------------

    def _look(self, window: Window, feed: Feed | None, *, behind: Window | None = None) -> None:
        """Wait for a window, and run the handlers of its steps.

        Args:
            window: The window.
            feed: Where batches go back that were not consumed.
            behind: The window that was dispatched after it.
        """
        try:
            self._settle(window, feed, behind)
            self._replay(window)
        except BaseException as error:
            missed = window.length - window.reached
            missed += self._catch_up(behind, feed) if behind is not None and behind.length else 0
            planned = isinstance(error, Cancel) or not isinstance(error, Exception)
            if missed and self._trains and self._state.alive and not planned:
                step = self._state.step
                error.add_note(f"the device runs ahead of host handlers: the train state is that after step {step}")
            raise

    def _settle(self, window: Window, feed: Feed | None, behind: Window | None) -> None:
        """Wait for a window; if a traced handler stopped it, forget the steps that did not run."""
        state = self._state
        try:
            ran, stopped = window.wait()
        except jax.errors.JaxRuntimeError as error:
            state.lose(error)
            raise
        now = time.perf_counter()
        seconds = now - max(window.began, self._ended)
        self._ended = now
        self.caller.took(window, seconds)
        if ran < window.length or stopped:
            window.stopped = stopped
            rest = window.cut(ran) + (behind.cut(0) if behind is not None else [])
            give_back(feed, rest)
            step = state.step + (ran if self._trains else 0)
            state.set_counters(step=step, step_in_epoch=state.step_in_epoch + ran)
        self.windows += 1
        self.steps += ran

    def _replay(self, window: Window) -> None:
        """Run the handlers of a window's steps."""
        state, phase, trains, run_calls = self._state, self._phase, self._trains, self._engine.run_calls
        plan = window.plan
        begin, end, trigger = plan.begin if not window.live else (), plan.inner, plan.trigger
        length, sparse = window.length, plan.sparse
        last = length - 1
        state.batch_size, state.open = plan.batch_size, 0
        done = 0
        state.window, state.ahead, window.computed = window, True, True
        try:
            while done < length:
                if sparse:
                    skipped = self._until_due(plan, length - done)
                    done += skipped
                    state.step += skipped if trains else 0
                    state.step_in_epoch += skipped
                    if done == length:
                        break
                window.at = done
                if done == last:
                    end, state.open = plan.end, IN_SYNC if window.blocks or window.stopped else AT_END
                    state.ahead = state.open != IN_SYNC
                if begin:
                    # What the step computed is here already, but was not when the step began.
                    window.computed = False
                    run_calls(begin, _STEP_BEGIN, phase)
                    window.computed = True
                done += 1
                if trains:
                    state.step += 1
                state.step_in_epoch += 1
                try:
                    if end:
                        run_calls(end, _STEP_END, phase)
                except CancelStep:
                    pass
                if window.written:
                    window.written = {}
                if trigger:
                    state.window = None
                    with contextlib.suppress(CancelStep):
                        run_calls(trigger, _TRIGGER, phase)
                    self._engine.give_snapshots(phase)
                    state.window = window
        finally:
            state.window, state.ahead, state.batch_size, state.open = None, False, 0, IN_SYNC
            state.step += (length - done) if trains else 0
            state.step_in_epoch += length - done
            window.reached = done

    def _until_due(self, plan: WindowPlan, left: int) -> int:
        """Return how many steps come before the next at which some handler may be due, at most those left."""
        number, state = self._number(), self._state
        calls = (*plan.begin, *plan.end, *plan.trigger)
        due = bound_at(calls, number, state.epoch, state.cancelled_of(self._phase))
        return left if due is None else min(left, due - number - 1)

    def _finish(self, pending: Window | None, feed: Feed, error: BaseException) -> None:
        """Let the handlers of the steps before a failure look, unless it is an interrupt that must not wait."""
        if pending is None:
            return
        if isinstance(error, Exception):
            self._look(pending, feed)
        else:
            self._catch_up(pending, feed)

    def _catch_up(self, window: Window, feed: Feed | None) -> int:
        """Count the steps of a window whose handlers will not run, and return how many they are."""
        state = self._state
        try:
            self._settle(window, feed, None)
        except jax.errors.JaxRuntimeError:  # the state is noted as lost; what is raised already comes first
            return 0
        state.step += window.length if self._trains else 0
        state.step_in_epoch += window.length
        return window.length
