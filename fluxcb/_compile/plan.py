"""The plan: the host handlers of each moment in order, bound, each with its own protected learner."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from fluxcb._check.graph import CallbackGraph
from fluxcb._compile.access_source import access_source
from fluxcb._compile.protect import Backend, make_proxy
from fluxcb._compile.skip_records import SKIPS
from fluxcb._declare.access import Access, Permission
from fluxcb._declare.declared import BoundHandler, Declared
from fluxcb._declare.events import Event, FitEnd, StepBegin, StepEnd, TracedEvent, Trigger
from fluxcb._declare.phases import Phase
from fluxcb._declare.schedules import EverySeconds, EverySteps, Predicate, Schedule
from fluxcb._typing import StatePath

__all__ = ["ClockPolicy", "HostCall", "PhasePlan", "Plan"]


class ClockPolicy(Enum):
    """The steps of a window at which a handler's clock is read, because all steps of a window are replayed at once."""

    ANY_STEP = "any step"
    WINDOW_END = "the last step"
    WINDOW_END_IN_SYNC = "the last step, if the train state is that of this step"


@dataclass(frozen=True, eq=False)
class HostCall:
    """One host handler, ready to run.

    Attributes:
        handler: The handler.
        function: Its bound method.
        protect: Returns its protected learner; see `learner`.
        schedules: Its schedules, or an empty tuple if it is always due.
        cancels: Whether it may cancel at any step, instead of only at steps that a traced handler stopped.
        begins: Whether its periods count the steps that have begun. This is so for handlers of StepBegin, and for a
            handler of StepEnd with the same schedules as the StepBegin handler of its callback.
        clock: The steps of a window at which its schedules are polled. ANY_STEP unless one of them reads a clock.
        alone: Whether it must not overlap with other handlers, because all processes of a run take part in it.
    """

    handler: BoundHandler
    function: Callable[[Event, Phase, Any], Any]
    protect: Callable[[], Any]
    schedules: tuple[Schedule, ...]
    cancels: bool
    begins: bool = False
    clock: ClockPolicy = ClockPolicy.ANY_STEP
    alone: bool = False

    @functools.cached_property
    def learner(self) -> Any:
        """The protected learner of the handler. Generating its class takes 0.05 ms, so it waits for the first use."""
        return self.protect()


@dataclass(frozen=True, eq=False)
class PhasePlan:
    """The host calls around the steps of one phase.

    Attributes:
        begin: Host calls at StepBegin.
        end: Host calls at StepEnd.
        trigger: Host calls at Trigger that are due within the epoch.
    """

    begin: tuple[HostCall, ...]
    end: tuple[HostCall, ...]
    trigger: tuple[HostCall, ...]


class Plan:
    """The handlers of all moments, resolved once.

    Args:
        graph: The checked graph.
        backend: Returns the backend through which the proxies of a callback read and write the state on the host.
        timed: Wraps a handler's function, given its names, in a function that records its time. None for no timing.
        adapted: Returns a host call adapted to this process. None to use it unchanged.
    """

    def __init__(
        self,
        graph: CallbackGraph,
        backend: Callable[[Declared], Backend],
        timed: Callable[[Callable[..., Any], str, str], Callable[..., Any]] | None = None,
        adapted: Callable[[HostCall, CallbackGraph], HostCall] | None = None,
    ) -> None:
        self.graph = graph
        self._backend = backend
        self._timed = timed
        self._adapted = adapted
        self._calls: dict[tuple[type[Event], type[Phase]], tuple[HostCall, ...]] = {}
        self._phases: dict[type[Phase], PhasePlan] = {}
        self._after_epoch: dict[type[Phase], tuple[HostCall, ...]] = {}
        # Handlers of one callback with equal access share a proxy, because generating its class takes time.
        self._proxies: dict[tuple[int, tuple[tuple[StatePath, Permission], ...], bool, str], Any] = {}

    def with_timing(self, timed: Callable[[Callable[..., Any], str, str], Callable[..., Any]] | None) -> Plan:
        """Return the same plan with another `timed`."""
        return Plan(self.graph, self._backend, timed, self._adapted)

    def with_switched(self, names: Collection[str]) -> Plan:
        """Return the same plan after the callbacks with these names were disabled or enabled in a running fit."""
        plan = self.with_timing(self._timed)
        # All other calls are kept, because a call has its own clocks (`EverySeconds`), which would restart.
        for (event, phase), calls in self._calls.items():
            plan._calls[event, phase] = tuple(
                plan._host_call(call.handler, phase) if call.handler.declared.name in names else call for call in calls
            )
        return plan

    def proxy(self, declared: Declared, access: Access, *, in_init: bool = False) -> Any:
        """Return the protected learner for this access of a callback, for its handlers or for its `init`."""
        # Instances of one class need separate proxies, because each has its own backend, and messages name the
        # instance. Messages about a handler with its own access also name the handler.
        key = (declared.position, tuple(access.items()), in_init, declared.where)
        if key not in self._proxies:
            made = make_proxy(access, self._backend(declared), declared=declared, where=declared.where, in_init=in_init)
            self._proxies.setdefault(key, made)  # another thread may have made one
        return self._proxies[key]

    def calls(self, event: type[Event], phase: type[Phase]) -> tuple[HostCall, ...]:
        """Return the host calls of a moment in order. After the first call, this is a dict lookup.

        Raises:
            CheckError: The callbacks conflict at a moment whose classes were unknown at construction.
        """
        try:
            # This lookup runs for each event. An exception handler costs nothing if no exception is raised.
            return self._calls[event, phase]
        except KeyError:
            calls = tuple(self._host_call(h, phase) for h in self.graph.handlers(event, phase))
            return self._calls.setdefault((event, phase), calls)

    @functools.cached_property
    def records_skips(self) -> bool:
        """Whether a callback reads `step.skips`, so that training steps have to compute it."""
        return any(path[:2] == SKIPS for declared in self.graph.declared for path, _, _ in declared.accesses())

    def traced(self, event: type[Event], phase: type[Phase]) -> tuple[BoundHandler, ...]:
        """Return the traced handlers of a moment, in order."""
        return self.graph.handlers(event, phase)

    def epoch_triggers(self, phase: type[Phase]) -> tuple[HostCall, ...]:
        """Return the calls of the Trigger after an epoch, without those that are only due within the epoch."""
        if phase not in self._after_epoch:
            calls = self.calls(Trigger, phase)
            self._after_epoch[phase] = tuple(c for call in calls if (c := _after_epoch(call)) is not None)
        return self._after_epoch[phase]

    def phase(self, phase: type[Phase]) -> PhasePlan:
        """Return the host calls around the steps of a phase."""
        if phase not in self._phases:
            self._phases[phase] = self._plan_phase(phase)
        return self._phases[phase]

    def _plan_phase(self, phase: type[Phase]) -> PhasePlan:
        # Only phases that train emit a Trigger within their epoch.
        trigger = tuple(c for c in self.calls(Trigger, phase) if _inside_epoch(c)) if phase.trains else ()
        return PhasePlan(self.calls(StepBegin, phase), self.calls(StepEnd, phase), trigger)

    def _host_call(self, handler: BoundHandler, phase: type[Phase]) -> HostCall:
        function, schedules = handler.function, handler.schedules
        ends = handler.declared.gets_fit_end and issubclass(handler.event, FitEnd)
        if handler.declared.disabled and not ends:
            # It still ends windows and fetches values, so that the programs and their bits stay the same.
            function, schedules = _do_nothing, tuple(s for s in schedules if not isinstance(s, Predicate))
        # A traced handler runs only while the step is traced, so its time is part of the compilation.
        if self._timed is not None and not issubclass(handler.event, TracedEvent):
            moment = f"{handler.event.__name__} x {phase.__name__}"
            function = self._timed(function, f"{handler.declared.label}.{handler.name}", moment)
        # Such a handler cancels only after a traced handler has stopped the training, and then the window ends anyway.
        at_stopped_steps_only = handler.event is StepEnd and ("step", "stop") in handler.access
        call = HostCall(
            handler,
            function,
            functools.partial(self.proxy, access_source(handler), handler.access),
            tuple(schedule.for_handler() for schedule in schedules),  # each handler has its own clock
            ("control",) in handler.access and not at_stopped_steps_only,
            begins=_begins(handler),
        )
        if self._adapted is None or issubclass(handler.event, TracedEvent):
            return call
        return self._adapted(call, self.graph)


def _do_nothing(event: Event, phase: Phase, learner: Any) -> None:
    """Take the place of a handler whose callback is disabled."""


def _begins(handler: BoundHandler) -> bool:
    """Return whether the periods of a handler count the steps that have begun, see `HostCall`."""
    if not issubclass(handler.event, StepEnd):
        return issubclass(handler.event, StepBegin)
    # If both handlers of a callback are scheduled alike, they must run for the same steps, even after a cancelled step.
    first = handler.declared.handler(StepBegin, handler.phase)
    return first is not None and first.schedules == handler.schedules


def _inside_epoch(call: HostCall) -> bool:
    return any(isinstance(s, EverySteps | EverySeconds) for s in call.handler.schedules)


def _after_epoch(call: HostCall) -> HostCall | None:
    """Return a Trigger call with its schedules for the end of an epoch, or None if it is only due within the epoch."""
    # The end of an epoch coincides with its last step. A handler that was due at this step must not run again.
    schedules = [schedule.after_epoch() for schedule in call.schedules]
    if any(schedule is None for schedule in schedules):
        return None
    return replace(call, schedules=tuple(schedule for schedule in schedules if schedule is not None))
