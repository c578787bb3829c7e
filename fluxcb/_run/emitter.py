"""Emitting an event: its host handlers run in the order of the plan, each with its own protected learner."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from fluxcb._check.graph import CallbackGraph
from fluxcb._compile.access_source import access_source
from fluxcb._compile.call_errors import host_returned
from fluxcb._compile.plan import ClockPolicy, HostCall, Plan
from fluxcb._declare.access import Append
from fluxcb._declare.control import Cancel, PauseFitting
from fluxcb._declare.declared import Declared
from fluxcb._declare.events import Event, StepBegin, StepEnd
from fluxcb._declare.phases import Phase
from fluxcb._errors import AccessError
from fluxcb._run.deferred import DeferredCalls
from fluxcb._run.host_backend import HostBackend
from fluxcb._run.interrupts import Interrupt
from fluxcb._run.programs import Programs
from fluxcb._run.services import Services
from fluxcb._run.state import HostState

__all__ = ["Emitter", "handler_label"]


_ANY_STEP, _IN_SYNC = ClockPolicy.ANY_STEP, ClockPolicy.WINDOW_END_IN_SYNC


def handler_label(call: HostCall) -> str:
    """Return the label and the source position of a call's handler, for the notes of exceptions."""
    return f"{call.handler.declared.label} in {call.handler.where}"


class Emitter:
    """Runs host handlers, one after the other.

    `ThreadedEmitter` runs them on threads, and `MultiProcessEmitter` in several processes. They are subclasses and not
    options, because this code runs at every step and should not branch for them.

    Args:
        state: The state.
        programs: Has the plan.

    Attributes:
        interrupt: Whether the fit has to end between two steps. The code that runs a fit or an epoch replaces it.
        fit_phase: The first phase that the current fit trains, or None outside a fit. `run_fit` sets it.
        between_steps: Functions to call after all handlers of the moment. Handlers add functions that need a consistent
            state, such as snapshots. A saver then needs no place in the order of the moment.
    """

    def __init__(self, state: HostState, programs: Programs) -> None:
        self.state = state
        self._programs = programs
        self.interrupt = Interrupt()
        self.fit_phase: Phase | None = None
        self.between_steps: list[Callable[[Phase | None], None]] = []
        # Bound here because handlers run at every step.
        self._progress, self._moment, self._train = state.progress, state.moment, state.train
        self._lent = state.moment.lent
        self.deferred = DeferredCalls(lambda: self.fit_phase is not None, self._position)

    # -- what differs with threads and with several processes ---------------------------------

    def backend(self, declared: Declared, services: Services) -> HostBackend:
        """Return the backend through which the protected learners of a callback read and write."""
        return HostBackend(self.state, declared, services)

    def threads(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which handlers can run on threads; here they never do."""
        return contextlib.nullcontext()

    def adapt_call(self, call: HostCall, graph: CallbackGraph) -> HostCall:
        """Return a host call adapted to this process; a single process only defers handlers with a deadline."""
        return self.deferred.deferred(call) if call.handler.handler.deadline is not None else call

    def wait_for(self, array: Any) -> None:
        """Wait until an array has been computed."""
        array.block_until_ready()

    def report(self, error: BaseException) -> None:
        """Tell other processes that this one does not take part any longer; here there are none."""

    def agreed_on(self, error: BaseException) -> None:
        """Note that all processes raise this error at the same place; here there is only one."""

    def check(self, graph: CallbackGraph) -> None:
        """Check declarations that need the train state; a single process has none."""

    def refuse_concurrent(self, what: str) -> None:
        """Refuse an action that must not happen while handlers run on other threads; here there are none."""

    @property
    def plan(self) -> Plan:
        """The handlers of all moments."""
        return self._programs.plan

    @property
    def local_interrupt(self) -> Interrupt:
        """The interrupt requested on this process; with several processes, it differs from the agreed one."""
        return self.interrupt

    # -- events -------------------------------------------------------------------------------

    def emit(self, event: Event, phase: Phase) -> None:
        """Run the host handlers of an event, in plan order."""
        if self.deferred.works:
            self.deferred.wait_for(event, phase)
        self.run_calls(self.plan.calls(type(event), type(phase)), event, phase)

    def emit_after_epoch(self, event: Event, phase: Phase) -> None:
        """Run the handlers of Trigger that are due after an epoch."""
        if self.deferred.works:
            self.deferred.wait_for(event, phase)
        self.run_calls(self.plan.epoch_triggers(type(phase)), event, phase)

    def run_calls(self, calls: Sequence[HostCall], event: Event, phase: Phase) -> None:
        """Run the host calls that are due, one after the other."""
        call = None
        lent = self._lent
        try:
            for call in calls:
                if call.schedules and not self._due(call, phase, event):
                    if lent.entries:  # the predicate of a schedule has read state
                        lent.verify()
                    continue
                try:
                    # A returned value is an error, because it usually means that the handler was written for another
                    # library.
                    if (returned := call.function(event, phase, call.learner)) is not None:
                        raise host_returned(call.handler, returned)
                # Not an error of the handler: the fit ends after this moment, as after a signal.
                except PauseFitting as request:
                    self.pause(request, call, event)
                if lent.entries:
                    lent.verify()
        # All exceptions get a note that names the handler, because the traceback shows only the engine's generic call.
        except BaseException as error:  # including KeyboardInterrupt and SystemExit
            if call is not None and (explanation := self.explain_error(error, call, event, phase)) is not error:
                raise explanation  # noqa: B904 - it has its context
            raise
        finally:
            if self._train.copies:
                self._train.forget_copies()
            if lent.entries:  # the handler raised, so its writes do not matter
                lent.forget()

    def explain_error(self, error: BaseException, call: HostCall, event: Event, phase: Phase) -> BaseException:
        """Return a handler's exception with a note that names it, or an AccessError for a forbidden Cancel."""
        # A Cancel at an event between two epochs needs no permission, because no step has been dispatched ahead there.
        if not isinstance(error, Cancel):
            error.add_note(self._note(call, event, phase))
            if isinstance(error, ValueError) and "read-only" in str(error):  # NumPy's error for `array[...] = x`
                error.add_note(
                    "fix: arrays of the Learner cannot be changed in place. Compute a new array and assign it to its "
                    "path, for example `learner.step.batch = (xs + 1, ys)`, with `Write()` in `stateaccess`"
                )
            elif ("model",) in call.handler.access and _calls_shapes(error):
                error.add_note(
                    "fix: `learner.model` has only shapes in handlers, so it cannot be called. For metrics of other "
                    "data, add an `InferenceRunner` to the callbacks. For the arrays, read `learner.params`"
                )
        elif isinstance(event, StepBegin | StepEnd):
            try:
                self._check_cancel(call, event)
            except AccessError as refusal:
                refusal.__context__ = error
                return refusal
        return error

    def run_between_steps(self, at: Phase | None) -> None:
        """Call the functions that handlers of this moment have added to `between_steps`.

        Args:
            at: The phase whose epoch is running, or None between two epochs.
        """
        # A loop and not a copy of the list, because a saver's function may add another one.
        while self.between_steps:  # removed before the call, so a failing function is not called again
            self.between_steps.pop(0)(at)

    def pause(self, request: PauseFitting, call: HostCall, event: Event) -> None:
        """End the fit between two steps, as a signal does.

        Raises:
            PauseFitting: There is no fit.
            AccessError: The handler does not declare `control`.
        """
        # Outside a fit there is nothing to end between two steps, so the caller gets the exception.
        if self.fit_phase is None:
            raise request
        if isinstance(event, StepBegin | StepEnd):
            self._check_cancel(call, event)
        self.local_interrupt.pause(str(request) or PauseFitting.__name__)

    def _due(self, call: HostCall, phase: Phase, event: Event) -> bool:
        progress = self._progress
        # All steps of a window are replayed at the same time, so a clock is read only at the last step of a window.
        if call.clock is not _ANY_STEP:
            moment = self._moment
            # A handler that matters only at a stopped step has the schedule `AtWindowEnds()`. A stop ends its window,
            # so such a handler costs nothing at the other steps.
            if moment.inside_window or (moment.ahead and call.clock is _IN_SYNC):
                return False
        number = progress.step if type(phase).trains else progress.step_in_epoch
        if isinstance(event, StepBegin):  # the beginning step is not counted yet
            number += 1
        epoch, learner = progress.epoch, call.learner
        # Periods at StepBegin count the steps that have begun, and cancelled steps have begun without finishing.
        # Counting finished steps only would cancel every third step with a period of 2.
        cancelled = progress.cancelled_of(phase) if call.begins else 0
        for schedule in call.schedules:  # a loop, because a generator is slower and this runs at every step
            if not schedule.due(number + cancelled if schedule.periodic else number, epoch, learner):
                return False
        return True

    def _note(self, call: HostCall, event: Event, phase: Phase) -> str:
        return f"raised by {handler_label(call)}, at {event!r} x {type(phase).__name__}, {self._position()}"

    def _position(self) -> str:
        progress = self._progress
        return f"epoch {progress.epoch}, step {progress.step} ({progress.step_in_epoch} in this epoch)"

    def _check_cancel(self, call: HostCall, event: Event) -> None:
        access = call.handler.access
        window = self._moment.window
        where, source = call.handler.where, access_source(call.handler)
        # The window plan ends windows only at handlers that declare `control`. A cancel by another handler would arrive
        # after the device has run further steps.
        if ("control",) not in access:
            raise AccessError(
                f"{call.handler.declared.label} raises a Cancel at {event!r} without declaring `control`.",
                where=[where, source.where] if source is call.handler.declared else source.where,
                why="steps are dispatched ahead unless a handler that may cancel is due",
                fix=source.how_to_declare(("control",), Append()),
            )
        # The plan does not end windows at such a handler, except where a traced handler stops them.
        if not call.cancels and not (window is not None and window.stop):
            raise AccessError(
                f"{call.handler.declared.label} reads `step.stop`, and cancels at a step that nothing stopped.",
                where=where,
                why="fluxcb assumes that a handler that reads `step.stop` cancels only at stopped steps",
                fix="cancel only `if learner.step.stop`, or do not read `step.stop` in this handler",
            )


def _calls_shapes(error: BaseException) -> bool:
    """Return whether an exception says that a model without arrays was called."""
    text = str(error)
    return (
        "ShapeDtypeStruct" in text
        or "'tuple' object is not callable" in text
        or type(error).__name__ == "CallCompactUnboundModuleError"  # of Flax Linen, which is not imported here
    )
