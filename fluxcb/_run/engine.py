"""The engine: emitting events, and the loop over windows of steps.

A window is a run of steps at whose inner boundaries no host handler has to look. Its steps are
dispatched without waiting; then the host handlers of its steps run, step by step, each seeing
its own step's values.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from fluxcb._compile.plan import HostCall, PhasePlan, Plan
from fluxcb._compile.traced import StepSetup
from fluxcb._compile.windows import AHEAD, LONGEST, bound_at
from fluxcb._declare.control import Cancel, CancelEpoch, CancelFitting, CancelStep
from fluxcb._declare.events import EpochBegin, EpochEnd, Event, StepBegin, StepEnd, Trigger
from fluxcb._declare.phases import Phase
from fluxcb._errors import AccessError, DeclarationError, StateLostError
from fluxcb._run.feed import Feed, expected_steps, pull
from fluxcb._run.interrupts import Interrupt
from fluxcb._run.programs import Programs
from fluxcb._run.state import HostState, StepRecord
from fluxcb._typing import Batch

__all__ = ["Engine"]

_WINDOW_SECONDS = 0.2  # a window lasts about this long at most, so that bars, clocks and Ctrl-C stay alive

_STEP_BEGIN, _STEP_END, _TRIGGER = StepBegin(), StepEnd(), Trigger()


class Engine:
    """Runs phases with a plan.

    Args:
        state: The state.
        programs: The compiled programs.

    Attributes:
        plan: The handlers of all moments.
        setup: Returns what a phase's traced step needs.
        interrupt: Whether Ctrl-C was pressed.
        running: How many epochs are running, one inside the other.
    """

    def __init__(self, state: HostState, programs: Programs) -> None:
        self.state = state
        self.programs = programs
        self.plan: Plan
        self.setup: Callable[[Phase], StepSetup]
        self.interrupt = Interrupt()
        self._hot: dict[Any, Any] = {}  # the program of the usual batch shape, without a lookup per window
        self.running = 0
        self._step_seconds = 0.0
        self._last_window = 0

    # -- events -----------------------------------------------------------------------------

    def emit(self, event: Event, phase: Phase) -> None:
        """Run the host handlers of an event, in plan order."""
        self.run_calls(self.plan.calls(type(event), type(phase)), event, phase)

    def run_calls(self, calls: Sequence[HostCall], event: Event, phase: Phase) -> None:
        """Run host calls that are due, one after the other."""
        call = None
        state = self.state
        try:
            for call in calls:
                if call.schedules and not self._due(call, phase, event):
                    if state.handed:  # by a predicate
                        state.verify_handed()
                    continue
                call.function(event, phase, call.learner)
                if state.handed:
                    state.verify_handed()
        except Cancel:
            if call is not None and isinstance(event, StepBegin | StepEnd):
                self._check_cancel(call, event)
            raise
        except Exception as error:
            if call is not None:
                error.add_note(self._note(call, event, phase))
            raise
        finally:
            state.forget_copies()
            if state.handed:  # by a handler that raised
                state.handed = []

    def _due(self, call: HostCall, phase: Phase, event: Event) -> bool:
        state = self.state
        number = state.step if type(phase).trains else state.step_in_epoch
        if isinstance(event, StepBegin):
            number += 1
        epoch, learner = state.epoch, call.learner
        for schedule in call.schedules:  # noqa: SIM110 - asked at every step, where a generator costs more than the loop
            if not schedule.due(number, epoch, learner):
                return False
        return True

    def _number(self, phase: Phase) -> int:
        """Return how many steps schedules count as finished: the training's, or the epoch's where none train."""
        return self.state.step if type(phase).trains else self.state.step_in_epoch

    def _note(self, call: HostCall, event: Event, phase: Phase) -> str:
        state = self.state
        return (
            f"raised in {call.handler.where}, at {event!r} x {type(phase).__name__}, "
            f"epoch {state.epoch}, step {state.step} ({state.step_in_epoch} in this epoch)"
        )

    def _check_cancel(self, call: HostCall, event: Event) -> None:
        access = call.handler.access
        record = self.state.record
        where = call.handler.where
        if ("control",) not in access:
            raise AccessError(
                f"{call.handler.declared.label} raises a Cancel at {event!r} without declaring `control`.",
                where=[where, call.handler.declared.where],
                why="steps are dispatched ahead unless a handler that may cancel is due",
                fix='add `{"control": Append()}` to `stateaccess`',
            )
        if not call.bounds and not (record is not None and record.stop):
            raise AccessError(
                f"{call.handler.declared.label} reads `step.stop`, and cancels at a step that nothing stopped.",
                where=where,
                why="a handler that reads `step.stop` is taken to cancel at stopped steps only, and holds nothing up",
                fix="cancel only `if learner.step.stop`, or do not read `step.stop` in this handler",
            )

    # -- epochs -----------------------------------------------------------------------------

    def run_epoch(self, phase: Phase, feed: Feed, *, limit: int | None, goes_on: bool) -> int:
        """Run one epoch of a phase.

        Args:
            phase: The phase.
            feed: Its batches.
            limit: Steps at most, or None for all the data.
            goes_on: Whether the data stream runs on from epoch to epoch.

        Returns:
            The number of steps run.

        Raises:
            CancelFitting: A handler cancelled the fit; EpochEnd has been emitted.
            DeclarationError: A handler asked for an epoch of training while one is running.
        """
        state, trains = self.state, type(phase).trains
        if self.running and trains:
            raise DeclarationError(
                f"An epoch of {type(phase).__name__} was asked for while another epoch is running.",
                why="a Learner has one train state and one set of counters",
                fix="run it after the other has ended; epochs that do not train, such as validation, may run inside",
            )
        outer = state.step_in_epoch, state.steps_in_epoch, state.record
        self.running += 1
        try:
            return self._run_epoch(phase, feed, limit=limit, goes_on=goes_on)
        finally:
            self.running -= 1
            if not trains:  # the training epoch before or around it keeps its counts
                state.step_in_epoch, state.steps_in_epoch, state.record = outer
                if state.alive:
                    state.set_counters()

    def _run_epoch(self, phase: Phase, feed: Feed, *, limit: int | None, goes_on: bool) -> int:
        state = self.state
        number = state.epoch + (1 if type(phase).trains else 0)
        feed.begin_epoch(max(number, 1), goes_on=goes_on)
        state.epoch, state.step_in_epoch = number, 0
        state.steps_in_epoch = expected_steps(feed, limit, goes_on)
        if state.built:
            state.set_counters()
        try:
            with contextlib.suppress(CancelStep):  # there is no step to cancel, only the rest of the moment
                self.emit(EpochBegin(), phase)
            self._run_steps(phase, feed, limit, goes_on)
            self._settle()
        except (CancelEpoch, CancelStep):
            pass
        except CancelFitting:
            self._end_epoch(phase, feed, goes_on)
            raise
        except jax.errors.JaxRuntimeError:  # a handler may have met it first, reading a value of the failed step
            with contextlib.suppress(jax.errors.JaxRuntimeError, StateLostError):
                self._settle()
            raise
        self._end_epoch(phase, feed, goes_on)
        return state.step_in_epoch

    def _settle(self) -> None:
        """Wait for the last step, so that what failed on the device is told here and not at some later read."""
        try:
            self.state.carry["counters"].block_until_ready()
        except jax.errors.JaxRuntimeError as error:
            self.state.lose(error)
            raise

    def _end_epoch(self, phase: Phase, feed: Feed, goes_on: bool) -> None:
        feed.end_epoch(goes_on=goes_on)
        self.state.record = None
        with contextlib.suppress(CancelEpoch, CancelStep):
            self.emit(EpochEnd(), phase)

    def trigger(self, phase: Phase) -> None:
        """Emit the Trigger that follows a training epoch."""
        with contextlib.suppress(CancelEpoch, CancelStep):
            self.run_calls(self.plan.epoch_triggers(type(phase)), _TRIGGER, phase)

    # -- windows ----------------------------------------------------------------------------

    def _run_steps(self, phase: Phase, feed: Feed, limit: int | None, goes_on: bool) -> None:
        plan = self.plan.phase(type(phase))
        while not self.interrupt.requested:
            length, live = self._next_window(phase, plan)
            if limit is not None:
                length = min(length, limit - self.state.step_in_epoch)
            if length <= 0:
                return
            batches, failure = pull(feed, length, goes_on)
            if batches:
                self._run_window(batches, phase, plan, feed, live=live)
            if failure is not None:
                raise failure
            if not batches:
                return

    def _next_window(self, phase: Phase, plan: PhasePlan) -> tuple[int, bool]:
        """Return how many steps the next window has, and whether StepBegin must run before its step."""
        number, epoch = self._number(phase), self.state.epoch
        longest = LONGEST if plan.waits else AHEAD
        length = longest if self._step_seconds == 0 else max(1, int(_WINDOW_SECONDS / self._step_seconds))
        length = min(length, longest, max(1, 2 * self._last_window))
        for calls, before in plan.bounding:
            due = bound_at(calls, number, epoch)
            if due is None:
                continue
            if before and due == number + 1:
                return 1, True
            length = min(length, due - number - (1 if before else 0))
        self._last_window = length
        return length, False

    def _run_window(
        self,
        batches: list[Batch],
        phase: Phase,
        plan: PhasePlan,
        feed: Feed | None,
        *,
        live: bool,
        fetch: Sequence[str] = (),
    ) -> list[StepRecord]:
        """Run a window of steps: dispatch them, then let their host handlers look.

        Args:
            batches: One per step.
            phase: The phase.
            plan: What happens around its steps.
            feed: Where batches go back that were not consumed.
            live: Whether the (only) step's StepBegin runs before it.
            fetch: Step values to fetch beside those that handlers declare.

        Returns:
            The steps that ran; none if the only one was cancelled before it began.
        """
        state = self.state
        records = [StepRecord(batch) for batch in batches]
        if live and not self._begin_live(records[0], phase, plan):
            return []
        began = time.perf_counter()
        failure = self._dispatch(records, phase, fetch)
        if plan.stops:
            self._keep_what_ran(records)
        if feed is not None:  # the batch that failed is spent; those behind it are not
            feed.push_back(batches[len(records) + (failure is not None) :])
        if plan.begin or plan.end or plan.trigger:
            self._replay(records, phase, plan, live=live)
        else:
            state.step += len(records) if type(phase).trains else 0
            state.step_in_epoch += len(records)
        if plan.waits:  # only a window that was waited for tells how long a step takes
            self._step_seconds = (time.perf_counter() - began) / len(records)
        if failure is not None:
            raise failure
        return records

    def run_single(self, phase: Phase, batch: Batch) -> dict[str, Any]:
        """Run one step on a batch given by hand.

        Returns:
            What was fetched of it, the loss included; empty if it was cancelled.
        """
        plan = self.plan.phase(type(phase))
        ran = self._run_window([batch], phase, plan, None, live=True, fetch=("loss",))
        return dict(ran[0].values) if ran else {}

    def _begin_live(self, record: StepRecord, phase: Phase, plan: PhasePlan) -> bool:
        self.state.record = record
        try:
            self.run_calls(plan.begin, _STEP_BEGIN, phase)
        except CancelStep:
            self.state.record = None
            return False
        except BaseException:
            self.state.record = None
            raise
        return True

    def _dispatch(self, records: list[StepRecord], phase: Phase, fetch: Sequence[str]) -> BaseException | None:
        """Call the program for each record without waiting.

        Returns:
            What went wrong at a later step, if anything; `records` then holds the steps before it.
        """
        state = self.state
        carry = state.carry
        one = self.programs.one
        program = self._hot.get((phase, *fetch))
        if program is None:
            program = self._program(phase, carry, records[0].batch, fetch)
            self._hot[phase, *fetch] = program
        record = records[0]
        try:
            for record in records:
                if self.interrupt.requested and record is not records[0]:
                    del records[records.index(record) :]
                    break
                try:
                    carry, record.values = program(carry, record.batch, one)
                except (TypeError, ValueError):
                    # Another shape than the program's; nothing was donated. A shorter last batch has its own.
                    other = self._program(phase, carry, record.batch, fetch)
                    if other is program:
                        raise
                    carry, record.values = other(carry, record.batch, one)
                    program = self._hot[phase, *fetch] = other
        except BaseException as error:
            if carry["counters"].is_deleted():
                state.lose(error)
                raise
            state.carry = carry
            del records[records.index(record) :]
            if not records:
                raise
            return error
        state.carry = carry
        return None

    def _program(self, phase: Phase, carry: Any, batch: Batch, fetch: Sequence[str]) -> Any:
        by_hand = bool(fetch)  # only a step run by hand fetches more than handlers declare
        return self.programs.program(
            self.setup(phase), self.plan, phase, carry, batch, fetch=fetch, checked=not by_hand
        )

    def forget_programs(self) -> None:
        """Look programs up anew: what they were made of has changed."""
        self._hot = {}

    def use(self, plan: Plan, setup: Callable[[Phase], StepSetup]) -> None:
        """Run with another plan from now on."""
        self.plan, self.setup = plan, setup
        self._hot = {}

    def _keep_what_ran(self, records: list[StepRecord]) -> None:
        """Wait for the window; if a traced handler stopped it, drop the steps that did not run."""
        state = self.state
        try:
            counters = state.carry["counters"]
            counters.block_until_ready()  # unlike np.asarray, this lets signals through
            step, _, step_in_epoch, stopped = np.asarray(counters).tolist()
        except jax.errors.JaxRuntimeError as error:
            state.lose(error)
            raise
        if stopped:
            del records[step_in_epoch - state.step_in_epoch :]
            records[-1].stop = True
            state.set_counters(step=step, step_in_epoch=step_in_epoch)

    def _replay(self, records: list[StepRecord], phase: Phase, plan: PhasePlan, *, live: bool) -> None:
        state = self.state
        trains = type(phase).trains
        begin, end, trigger = plan.begin, plan.end, plan.trigger
        last = len(records)
        done = number = 0
        try:
            for record in records:
                number += 1
                if begin and not live:
                    # What the step computed is here already, but was not when the step began.
                    state.record = before = StepRecord(record.batch)
                    self.run_calls(begin, _STEP_BEGIN, phase)
                    record.host.update(before.host)
                state.record = record
                done += 1
                if trains:
                    state.step += 1
                state.step_in_epoch += 1
                try:
                    if end:
                        self.run_calls(end, _STEP_END, phase)
                except CancelStep:
                    pass
                state.record = None
                try:
                    if trigger:
                        self.run_calls(trigger, _TRIGGER, phase)
                except CancelStep:
                    pass
        except Exception as error:
            if done < last and not isinstance(error, Cancel):
                error.add_note(
                    f"raised while the host handlers of a window of {last} step{'s' if last > 1 else ''} ran, at its "
                    f"step {number}; the train state is that of the window's last step"
                )
            raise
        finally:
            state.record = None
            state.step += (last - done) if trains else 0
            state.step_in_epoch += last - done
