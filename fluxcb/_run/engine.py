"""The engine: emitting events, and epochs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax

from fluxcb._check.graph import CallbackGraph
from fluxcb._compile.plan import HostCall, Plan
from fluxcb._compile.traced import StepSetup
from fluxcb._declare.access import Append
from fluxcb._declare.control import Cancel, CancelEpoch, CancelFitting, CancelStep, PauseFitting, RewindFitting
from fluxcb._declare.declared import Declared
from fluxcb._declare.events import EpochBegin, EpochEnd, Event, FitStopping, StepBegin, StepEnd, Trigger
from fluxcb._declare.phases import Phase
from fluxcb._errors import AccessError, DeclarationError, StateLostError
from fluxcb._run.calling import Caller
from fluxcb._run.feed import Feed, expected_steps
from fluxcb._run.host_backend import HostBackend
from fluxcb._run.interrupts import Interrupt
from fluxcb._run.programs import Programs
from fluxcb._run.state import HostState
from fluxcb._run.stepping import Steps
from fluxcb._run.timeline_steps import TimelineSteps
from fluxcb._typing import Batch

__all__ = ["TRIGGER", "Engine", "refuse_rewinds", "whose"]

TRIGGER = Trigger()


def whose(call: HostCall) -> str:
    """Return whose handler a call is, and where that stands, for notes."""
    return f"{call.handler.declared.label} in {call.handler.where}"


class Engine:
    """Runs phases with a plan.

    Args:
        state: The state.
        programs: The compiled programs.

    Attributes:
        plan: The handlers of all moments.
        setup: Returns what a phase's traced step needs.
        interrupt: Whether the fit is to end between two steps.
        running: How many epochs are running, one inside the other.
        fit_phase: The phase that the fit at hand trains, or None outside a fit.
        stopped: Whether the fit at hand is over, and FitStopping has been emitted.
        accepts: Whether the fit at hand can go back to an earlier checkpoint.
    """

    def __init__(self, state: HostState, programs: Programs) -> None:
        self.state = state
        self.programs = programs
        self.plan: Plan
        self.setup: Callable[[Phase], StepSetup]
        self.interrupt = Interrupt()
        self.running = 0
        self.fit_phase: Phase | None = None
        self.stopped = False
        self.accepts: Callable[[RewindFitting], bool] = refuse_rewinds
        self._steps: dict[Phase, Steps] = {}

    def backend(self, declared: Declared) -> HostBackend:
        """Return the way of one callback's proxies into the state."""
        return HostBackend(self.state, declared)

    def threads(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which handlers may have threads; here they never do."""
        return contextlib.nullcontext()

    def caller(self, phase: Phase) -> Caller:
        """Return what calls the programs of a phase."""
        return Caller(self, phase)

    def adapted(self, call: HostCall) -> HostCall:
        """Return a host call as it is on this process; here there is no other."""
        return call

    def pause(self, asked: PauseFitting, call: HostCall, event: Event) -> None:
        """End the fit between two steps, as a signal does.

        Raises:
            PauseFitting: There is no fit.
            AccessError: The handler may not ask for it.
        """
        if self.fit_phase is None:
            raise asked
        if isinstance(event, StepBegin | StepEnd):
            self._check_cancel(call, event)
        self.pressed.pause(str(asked) or PauseFitting.__name__)

    @property
    def pressed(self) -> Interrupt:
        """What has been asked for on this process."""
        return self.interrupt

    def check(self, graph: CallbackGraph) -> None:
        """Check what can be known once the train state exists."""

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
                try:
                    call.function(event, phase, call.learner)
                except PauseFitting as asked:
                    self.pause(asked, call, event)
                if state.handed:
                    state.verify_handed()
        except Cancel:
            if call is not None and isinstance(event, StepBegin | StepEnd):
                self._check_cancel(call, event)
            raise
        except BaseException as error:  # including KeyboardInterrupt and SystemExit
            if call is not None:
                error.add_note(self._note(call, event, phase))
            raise
        finally:
            if state.copies:
                state.forget_copies()
            if state.handed:  # by a handler that raised
                state.handed = []

    def _due(self, call: HostCall, phase: Phase, event: Event) -> bool:
        state = self.state
        if call.asks > state.open:
            return False
        number = state.step if type(phase).trains else state.step_in_epoch
        if isinstance(event, StepBegin):
            number += 1
        epoch, learner = state.epoch, call.learner
        cancelled = state.cancelled_of(phase) if call.begins else 0
        for schedule in call.schedules:  # runs at every step, where a generator would be slower than the loop
            if not schedule.due(number + cancelled if schedule.periodic else number, epoch, learner):
                return False
        return True

    def _note(self, call: HostCall, event: Event, phase: Phase) -> str:
        state = self.state
        return (
            f"raised by {whose(call)}, at {event!r} x {type(phase).__name__}, "
            f"epoch {state.epoch}, step {state.step} ({state.step_in_epoch} in this epoch)"
        )

    def _check_cancel(self, call: HostCall, event: Event) -> None:
        access = call.handler.access
        window = self.state.window
        where = call.handler.where
        if ("control",) not in access:
            raise AccessError(
                f"{call.handler.declared.label} raises a Cancel at {event!r} without declaring `control`.",
                where=[where, call.handler.declared.where],
                why="steps are dispatched ahead unless a handler that may cancel is due",
                fix=call.handler.declared.how_to_declare(("control",), Append()),
            )
        if not call.cancels and not (window is not None and window.stop):
            raise AccessError(
                f"{call.handler.declared.label} reads `step.stop`, and cancels at a step that nothing stopped.",
                where=where,
                why="a handler that reads `step.stop` is taken to cancel at stopped steps only, and holds nothing up",
                fix="cancel only `if learner.step.stop`, or do not read `step.stop` in this handler",
            )

    # -- epochs -----------------------------------------------------------------------------

    def run_epoch(self, phase: Phase, feed: Feed, *, limit: int | None, goes_on: bool, inside: bool = False) -> int:
        """Run one epoch of a phase, or the rest of one that a checkpoint was written in.

        Args:
            phase: The phase.
            feed: Its batches.
            limit: Steps at most, or None for all the data.
            goes_on: Whether the data stream runs on from epoch to epoch.
            inside: Whether a handler runs it, which is not interrupted by the first signal.

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
        if self.running and state.ahead:
            raise DeclarationError(
                f"A step's handler asks for an epoch of {type(phase).__name__}, and the next steps do not wait for it.",
                why="the device has gone on meanwhile, so the train state is not that of the handler's step",
                fix='declare `{"params": Read(borrow=True)}` for this handler; the next steps then wait for it',
            )
        at = None
        if not inside and state.fit.at is not None and state.fit.at.phase == type(phase).name:
            at, state.fit.at = state.fit.at, None
        outer = state.step_in_epoch if at is None else at.outer, state.steps_in_epoch, state.window, state.batch_size
        cancelled = state.cancelled_in_epoch
        outer_compiled, state.compiled = state.compiled, self.steps(phase).compiled
        if not trains and not inside:
            state.outer_step_in_epoch = outer[0]
        self.running += 1
        try:
            name = type(phase).__name__
            with state.meter.span(f"epoch of {name}", "epoch", phase=name):
                return self._run_epoch(phase, feed, limit=limit, goes_on=goes_on, inside=inside, again=at is not None)
        finally:
            self.running -= 1
            if not trains:  # the training epoch before or around it keeps its counts
                state.step_in_epoch, state.steps_in_epoch, state.window, state.batch_size = outer
                state.cancelled_in_epoch = cancelled
                state.compiled = outer_compiled
                if state.alive:
                    state.set_counters()

    def _run_epoch(
        self, phase: Phase, feed: Feed, *, limit: int | None, goes_on: bool, inside: bool, again: bool
    ) -> int:
        state = self.state
        if not again:
            number = state.epoch + (1 if type(phase).trains else 0)
            feed.begin_epoch(max(number, 1), goes_on=goes_on)
            state.epoch, state.step_in_epoch = number, 0
            state.cancelled_in_epoch = 0
        state.steps_in_epoch = expected_steps(feed, limit, goes_on)
        if state.built:
            state.set_counters()
        try:
            if not again:
                with contextlib.suppress(CancelStep):  # there is no step to cancel, only the rest of the moment
                    self.emit(EpochBegin(), phase)
            self.steps(phase).run(feed, limit, goes_on=goes_on, heeds=not inside)
            self._settle()
            if self.interrupt.requested and not inside and self.fit_phase is not None:
                self.stop(self.interrupt.reason, phase)
        except (CancelEpoch, CancelStep):
            pass
        except CancelFitting as cancel:
            if not (isinstance(cancel, RewindFitting) and self.accepts(cancel)):
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
            self.state.some_array.block_until_ready()
        except jax.errors.JaxRuntimeError as error:
            self.state.lose(error)
            raise

    def _end_epoch(self, phase: Phase, feed: Feed, goes_on: bool) -> None:
        feed.end_epoch(goes_on=goes_on)
        with contextlib.suppress(CancelEpoch, CancelStep):
            self.emit(EpochEnd(), phase)

    def trigger(self, phase: Phase) -> None:
        """Emit the Trigger that follows a training epoch."""
        with contextlib.suppress(CancelEpoch, CancelStep):
            self.run_calls(self.plan.epoch_triggers(type(phase)), TRIGGER, phase)
        self.give_snapshots(None)

    def stop(self, reason: str | None, at: Phase | None) -> None:
        """Emit FitStopping, once in a fit.

        Args:
            reason: Why the fit ends before its time, or None.
            at: The phase whose epoch is at hand, or None between two epochs.
        """
        phase = self.fit_phase
        if self.stopped or phase is None:
            return
        self.stopped = True
        with contextlib.suppress(Cancel):  # what they would stop is over
            self.emit(FitStopping(reason), phase)
        self.give_snapshots(at)

    def give_snapshots(self, at: Phase | None) -> None:
        """Give handlers that asked for it a snapshot of this moment between two steps, or two epochs.

        Args:
            at: The phase whose epoch is at hand, or None between two epochs.
        """
        snapshots = self.state.snapshots
        if snapshots.asked:
            snapshots.give(at)

    def run_single(self, phase: Phase, batch: Batch) -> dict[str, Any]:
        """Run one step on a batch given by hand.

        Returns:
            What was fetched of it, the loss included; empty if it was cancelled.
        """
        return dict(self.steps(phase).run_one(batch))

    def steps(self, phase: Phase) -> Steps:
        """Return what runs the steps of a phase."""
        if phase not in self._steps:
            timeline = self.state.meter.timeline
            self._steps[phase] = TimelineSteps(self, phase, timeline) if timeline is not None else Steps(self, phase)
        return self._steps[phase]

    def forget_programs(self) -> None:
        """Look programs up anew: what they were made of has changed."""
        for steps in self._steps.values():  # one of them may be running
            steps.caller.forget()

    def use(self, plan: Plan, setup: Callable[[Phase], StepSetup]) -> None:
        """Run with another plan from now on."""
        self.plan, self.setup = plan, setup
        self._steps = {}


def refuse_rewinds(asked: RewindFitting) -> bool:
    """Tell that a loop that is written by hand ends, and goes nowhere."""
    return False
