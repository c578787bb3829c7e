"""The plan: per moment, the host handlers in order, bound, each with its own protected learner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from fluxcb._check.graph import CallbackGraph
from fluxcb._compile.protect import Backend, make_proxy
from fluxcb._declare.access import Access
from fluxcb._declare.declared import Declared, Handler
from fluxcb._declare.events import Event, StepBegin, StepEnd, TracedEvent, Trigger
from fluxcb._declare.phases import Phase
from fluxcb._declare.schedules import EverySeconds, EverySteps, Schedule

__all__ = ["AT_END", "IN_SYNC", "HostCall", "PhasePlan", "Plan"]

AT_END, IN_SYNC = 1, 2


@dataclass(frozen=True, eq=False)
class HostCall:
    """One host handler, ready to run.

    Attributes:
        handler: The handler.
        function: Its bound method.
        learner: Its protected learner.
        schedules: When it is due; empty for always.
        cancels: Whether it may cancel at any step, not only at those that a traced handler stopped.
        begins: Whether its periods count the steps that have begun. This is so for handlers of StepBegin, and for a
            handler of StepEnd with the same schedules as the StepBegin handler of its callback.
        asks: Where in a window its clock is asked: 0 at each step, AT_END at the last one only, IN_SYNC at the last one
            if the train state is that of this step.
    """

    handler: Handler
    function: Callable[[Event, Phase, Any], None]
    learner: Any
    schedules: tuple[Schedule, ...]
    cancels: bool
    begins: bool = False
    asks: int = 0


@dataclass(frozen=True, eq=False)
class PhasePlan:
    """What happens around the steps of one phase.

    Attributes:
        begin: Host calls at StepBegin.
        end: Host calls at StepEnd.
        trigger: Host calls at Trigger that are due inside the epoch.
    """

    begin: tuple[HostCall, ...]
    end: tuple[HostCall, ...]
    trigger: tuple[HostCall, ...]


class Plan:
    """The handlers of all moments, resolved once.

    Args:
        graph: The checked graph.
        backend: Makes the way of one callback's proxies into the host's state.
        timed: Wraps a handler's function in one that notes its time, given what to call it; None to measure nothing.
        adapted: Makes of a host call what it is on this process; None to take it as it is.
    """

    def __init__(
        self,
        graph: CallbackGraph,
        backend: Callable[[Declared], Backend],
        timed: Callable[[Callable[..., None], str, str], Callable[..., None]] | None = None,
        adapted: Callable[[HostCall], HostCall] | None = None,
    ) -> None:
        self.graph = graph
        self._backend = backend
        self._timed = timed
        self._adapted = adapted
        self._calls: dict[tuple[type[Event], type[Phase]], tuple[HostCall, ...]] = {}
        self._phases: dict[type[Phase], PhasePlan] = {}
        self._after_epoch: dict[type[Phase], tuple[HostCall, ...]] = {}
        self._proxies: dict[tuple[int, int], Any] = {}

    def again(self, timed: Callable[[Callable[..., None], str, str], Callable[..., None]] | None) -> Plan:
        """Return the same plan, measured otherwise."""
        return Plan(self.graph, self._backend, timed, self._adapted)

    def proxy(self, declared: Declared, access: Access) -> Any:
        """Return the protected learner for this access of a callback."""
        key = (declared.position, id(access))
        if key not in self._proxies:
            self._proxies[key] = make_proxy(access, self._backend(declared), declared=declared, where=declared.where)
        return self._proxies[key]

    def calls(self, event: type[Event], phase: type[Phase]) -> tuple[HostCall, ...]:
        """Return the host calls of a moment, in order; a dict lookup once it is known.

        Raises:
            CheckError: The classes were unknown at construction, and the callbacks conflict there.
        """
        try:
            return self._calls[event, phase]
        except KeyError:
            calls = tuple(self._host_call(h, phase) for h in self.graph.handlers(event, phase))
            return self._calls.setdefault((event, phase), calls)

    def traced(self, event: type[Event], phase: type[Phase]) -> tuple[Handler, ...]:
        """Return the traced handlers of a moment, in order."""
        return self.graph.handlers(event, phase)

    def epoch_triggers(self, phase: type[Phase]) -> tuple[HostCall, ...]:
        """Return the calls of the Trigger after an epoch: those whose schedules do not all lie inside it."""
        if phase not in self._after_epoch:
            calls = self.calls(Trigger, phase)
            self._after_epoch[phase] = tuple(c for call in calls if (c := _after_epoch(call)) is not None)
        return self._after_epoch[phase]

    def phase(self, phase: type[Phase]) -> PhasePlan:
        """Return what happens around the steps of a phase."""
        if phase not in self._phases:
            self._phases[phase] = self._plan_phase(phase)
        return self._phases[phase]

    def _plan_phase(self, phase: type[Phase]) -> PhasePlan:
        trigger = tuple(c for c in self.calls(Trigger, phase) if _inside_epoch(c)) if phase.trains else ()
        return PhasePlan(self.calls(StepBegin, phase), self.calls(StepEnd, phase), trigger)

    def _host_call(self, handler: Handler, phase: type[Phase]) -> HostCall:
        function = handler.function
        if self._timed is not None and not issubclass(handler.event, TracedEvent):
            moment = f"{handler.event.__name__} x {phase.__name__}"
            function = self._timed(function, f"{handler.declared.label}.{handler.name}", moment)
        at_stopped_steps_only = handler.event is StepEnd and ("step", "stop") in handler.access
        call = HostCall(
            handler,
            function,
            self.proxy(handler.declared, handler.access),
            tuple(schedule.for_handler() for schedule in handler.schedules),
            ("control",) in handler.access and not at_stopped_steps_only,
            begins=_begins(handler),
        )
        return call if self._adapted is None or issubclass(handler.event, TracedEvent) else self._adapted(call)


def _begins(handler: Handler) -> bool:
    if not issubclass(handler.event, StepEnd):
        return issubclass(handler.event, StepBegin)
    first = handler.declared.handler(StepBegin, handler.phase)
    return first is not None and first.schedules == handler.schedules


def _inside_epoch(call: HostCall) -> bool:
    return any(isinstance(s, EverySteps | EverySeconds) for s in call.handler.schedules)


def _after_epoch(call: HostCall) -> HostCall | None:
    """Return a call of Trigger as it is asked after an epoch, or None if it is asked inside only."""
    schedules = [schedule.after_epoch() for schedule in call.schedules]
    if any(schedule is None for schedule in schedules):
        return None
    return replace(call, schedules=tuple(schedule for schedule in schedules if schedule is not None))
