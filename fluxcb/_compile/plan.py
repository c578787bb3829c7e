"""The plan: per moment, the host handlers in order, bound, each with its own protected learner."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fluxcb._check.graph import CallbackGraph
from fluxcb._compile.protect import Backend, make_proxy
from fluxcb._declare.access import Access, Append, Read, overlap, writes
from fluxcb._declare.declared import Declared, Handler
from fluxcb._declare.events import Event, StepBegin, StepEnd, TracedEvent, Trigger
from fluxcb._declare.phases import Phase
from fluxcb._declare.schedules import EverySeconds, EverySteps, Schedule

__all__ = ["HostCall", "PhasePlan", "Plan"]

# What the compiled step reads: who writes one of these between two steps has to run between them.
_STEP_READS = (("params",), ("model_state",), ("opt_state",), ("key",), ("hyperparams",), ("data",), ("model",))
_CARRY = (("params",), ("model_state",), ("opt_state",), ("key",), ("hyperparams",))


@dataclass(frozen=True, eq=False)
class HostCall:
    """One host handler, ready to run.

    Attributes:
        handler: The handler.
        function: Its bound method.
        learner: Its protected learner.
        schedules: When it is due; empty for always.
        bounds: Why a window must end where it is due, or an empty string.
        reads_steps: Whether it reads values that the step computes.
    """

    handler: Handler
    function: Callable[[Event, Phase, Any], None]
    learner: Any
    schedules: tuple[Schedule, ...]
    bounds: str
    reads_steps: bool


@dataclass
class PhasePlan:
    """What happens around the steps of one phase.

    Attributes:
        begin: Host calls at StepBegin.
        end: Host calls at StepEnd.
        trigger: Host calls at Trigger that are due inside the epoch.
        fetch: Names of the step values that some host handler may read.
        everything_fetched: Whether some host handler may read any of them.
        stops: Whether some traced handler may set `step.stop`.
        waits: Whether the host waits for a window's values, because it stops or somebody reads them.
        bounding: The calls that bound a window, with whether they run before the step.
    """

    begin: tuple[HostCall, ...]
    end: tuple[HostCall, ...]
    trigger: tuple[HostCall, ...]
    fetch: tuple[str, ...]
    everything_fetched: bool
    stops: bool
    waits: bool = field(init=False)
    bounding: tuple[tuple[tuple[HostCall, ...], bool], ...] = field(init=False)

    def __post_init__(self) -> None:
        self.waits = self.stops or any(c.reads_steps for c in self.end)
        groups = ((self.begin, True), (self.end, False), (self.trigger, False))
        bounding = ((tuple(c for c in calls if c.bounds), before) for calls, before in groups)
        self.bounding = tuple((calls, before) for calls, before in bounding if calls)


class Plan:
    """The handlers of all moments, resolved once.

    Args:
        graph: The checked graph.
        backend: Makes the way of one callback's proxies into the host's state.
        in_carry: Names of the `cbstate` entries that ride in the carry.
    """

    def __init__(self, graph: CallbackGraph, backend: Callable[[Declared], Backend], in_carry: frozenset[str]) -> None:
        self.graph = graph
        self._backend = backend
        self._in_carry = in_carry
        self._calls: dict[tuple[type[Event], type[Phase]], tuple[HostCall, ...]] = {}
        self._phases: dict[type[Phase], PhasePlan] = {}
        self._proxies: dict[tuple[int, int], Any] = {}

    def proxy(self, declared: Declared, access: Access) -> Any:
        """Return the protected learner for this access of a callback."""
        key = (declared.position, id(access))
        if key not in self._proxies:
            self._proxies[key] = make_proxy(access, self._backend(declared), who=declared.label, where=declared.where)
        return self._proxies[key]

    def calls(self, event: type[Event], phase: type[Phase]) -> tuple[HostCall, ...]:
        """Return the host calls of a moment, in order; a dict lookup once it is known.

        Raises:
            CheckError: The classes were unknown at construction, and the callbacks conflict there.
        """
        try:
            return self._calls[event, phase]
        except KeyError:
            calls = tuple(self._host_call(h) for h in self.graph.handlers(event, phase))
            return self._calls.setdefault((event, phase), calls)

    def traced(self, event: type[Event], phase: type[Phase]) -> tuple[Handler, ...]:
        """Return the traced handlers of a moment, in order."""
        return self.graph.handlers(event, phase)

    def epoch_triggers(self, phase: type[Phase]) -> tuple[HostCall, ...]:
        """Return the calls of the Trigger after an epoch: those without a schedule of their own inside it."""
        return tuple(c for c in self.calls(Trigger, phase) if not _inside_epoch(c))

    def phase(self, phase: type[Phase]) -> PhasePlan:
        """Return what happens around the steps of a phase."""
        if phase not in self._phases:
            self._phases[phase] = self._plan_phase(phase)
        return self._phases[phase]

    def _plan_phase(self, phase: type[Phase]) -> PhasePlan:
        begin, end = self.calls(StepBegin, phase), self.calls(StepEnd, phase)
        trigger = tuple(c for c in self.calls(Trigger, phase) if _inside_epoch(c)) if phase.trains else ()
        names: dict[str, None] = {}
        everything = False
        for call in end:
            for path in call.handler.access:
                if path in (("step",), ("*",)):
                    everything = True
                elif path[0] == "step" and path[1] not in ("batch", "stop"):
                    names[path[1]] = None
        stops = any(
            writes(permission) and overlap(path, ("step", "stop"))
            for (event, of), handlers in self.graph.orders.items()
            if of is phase and issubclass(event, TracedEvent)
            for handler in handlers
            for path, permission in handler.access.items()
        )
        return PhasePlan(begin, end, trigger, tuple(names), everything, stops)

    def _host_call(self, handler: Handler) -> HostCall:
        learner = self.proxy(handler.declared, handler.access)
        return HostCall(
            handler,
            handler.function,
            learner,
            tuple(schedule.for_handler() for schedule in handler.schedules),
            self._why_bounding(handler),
            any(path[0] in ("step", "*") and path[1:] != ("batch",) for path in handler.access),
        )

    def _why_bounding(self, handler: Handler) -> str:
        """Return why a window must end at a step where this handler is due, or an empty string."""
        access = handler.access
        at_step = issubclass(handler.event, StepBegin | StepEnd)
        for path, permission in access.items():
            if path == ("control",) and not (handler.event is StepEnd and ("step", "stop") in access):
                return "may cancel (`control`)"
            if (
                writes(permission)
                and not isinstance(permission, Append)
                and path[0] == "step"
                and handler.event is StepBegin
            ):
                return f"writes `{'.'.join(path)}` before the step"
            if writes(permission) and any(overlap(path, p) for p in _STEP_READS):
                return f"writes `{'.'.join(path)}`, which the step reads"
            touches_carry = any(overlap(path, p) for p in _CARRY) or (
                path[0] == "cbstate" and (len(path) == 1 or path[1] in self._in_carry)
            )
            if touches_carry:
                kind = "reads" if isinstance(permission, Read) else "writes"
                return f"{kind} `{'.'.join(path)}`, which is in the carry"
        return "" if at_step or not _inside_epoch_handler(handler) else "is triggered inside the epoch"


def _inside_epoch(call: HostCall) -> bool:
    return _inside_epoch_handler(call.handler)


def _inside_epoch_handler(handler: Handler) -> bool:
    return handler.event is Trigger and any(isinstance(s, EverySteps | EverySeconds) for s in handler.schedules)
