"""`Handler`, the description of one handler, and the decorator `@on`, which creates handlers from methods."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from fluxcb._calls import Constructed, entry_point
from fluxcb._declare.annotations import annotated, classes_in, evaluate, is_subclass, with_annotations
from fluxcb._declare.control import refuse_unraised
from fluxcb._declare.events import Event, HostEvent, TracedEvent
from fluxcb._declare.phases import Phase
from fluxcb._declare.schedules import Always, EveryEpochs, EverySteps, Schedule
from fluxcb._declare.signatures import runs_later, source_of
from fluxcb._errors import DeclarationError

if TYPE_CHECKING:
    from fluxcb._declare.callback import Callback

__all__ = [
    "Handler",
    "Pair",
    "check_options",
    "check_pair",
    "check_signature",
    "handlers_of",
    "is_handler",
    "on",
    "shown",
]

_MARK = "__fluxcb_on__"

Pair = tuple[type[Event], type[Phase]]


@dataclass(frozen=True, init=False)
class Handler(Constructed):
    """One handler of a callback: its method, event, phase, access, and schedule.

    `@on` creates one `Handler` for each event and phase that it names. `Callback.handlers` returns the handlers of an
    instance. Override `Callback.handlers` if the handlers depend on the constructor arguments.

    Args:
        event: Event class.
        phase: Phase class.
        name: Name of the method `(self, event, phase, learner)`.
        access: The handler's own access, narrower than `stateaccess`, or None to use `stateaccess`.
        when: Schedule or tuple of schedules, stored as a tuple. The handler is due when all schedules are due. Without
            a schedule, the handler is always due.
        owner: The callback that has the method. None means the callback whose `handlers` returns the handler. Wrappers
            set it.
        function: A function that is called with the owner instead of the method. `on.register` sets it.
        deadline: Event class, or None. The handler runs on a thread, and this event waits for it; see `on`.

    Raises:
        DeclarationError: One of the arguments has the wrong type.

    Example:
        >>> from dataclasses import replace
        >>> from fluxcb import EverySteps, Handler
        >>> from fluxcb.events import StepEnd
        >>> from fluxcb.phases import TrainingPhase
        >>> show = Handler(StepEnd, TrainingPhase, "show")
        >>> rarely = replace(show, when=EverySteps(10))
        >>> rarely.title(), rarely.when
        ('(StepEnd, TrainingPhase)', (EverySteps(steps=10),))
    """

    event: type[Event]
    phase: type[Phase]
    name: str
    access: Mapping[str, Any] | None
    when: tuple[Schedule, ...]
    owner: Callback | None
    function: Callable[..., None] | None
    deadline: type[Event] | None

    def __init__(
        self,
        event: type[Event],
        phase: type[Phase],
        name: str,
        access: Mapping[str, Any] | None = None,
        when: Schedule | tuple[Schedule, ...] | None = None,
        owner: Callback | None = None,
        function: Callable[..., None] | None = None,
        deadline: type[Event] | None = None,
    ) -> None:
        where = f"the handler `{name}`"
        event, phase = check_pair(event, phase, where)
        schedules = when if isinstance(when, tuple) else () if when is None else (when,)
        check_options(access, None, where)
        for schedule in schedules:
            check_options(None, schedule, where)
        values: dict[str, Any] = {"event": event, "phase": phase, "name": name, "access": access, "when": schedules}
        values |= {"owner": owner, "function": function, "deadline": deadline}
        vars(self).update(values)  # a frozen dataclass refuses `self.event = event`

    @property
    def traced(self) -> bool:
        """Whether the handler is traced into the step."""
        return issubclass(self.event, TracedEvent)

    def bind(self, callback: Callback) -> Callable[..., None]:
        """Return the handler as a bound method.

        Args:
            callback: The callback whose `handlers` method returned this handler.
        """
        owner = callback if self.owner is None else self.owner
        # By name, so that a method that overrides another is called in its place.
        return getattr(owner, self.name) if self.function is None else types.MethodType(self.function, owner)

    def schedules(self, event: type[Event], phase: type[Phase]) -> tuple[Schedule, ...]:
        """Return the schedules that apply at one moment."""
        if not self.when:
            return ()
        found = (schedule.for_moment(event, phase) for schedule in self.when)
        return tuple(schedule for schedule in found if schedule is not None)

    def title(self) -> str:
        """Return `(StepEnd, TrainingPhase)`."""
        return f"({self.event.__name__}, {self.phase.__name__})"


def check_pair(event: Any, phase: Any, where: str) -> Pair:
    """Return the pair after checking that it consists of an event class and a phase class. `Event` means `HostEvent`.

    Raises:
        DeclarationError: One of the two is not such a class.
    """
    for value, base, role in ((event, Event, "event"), (phase, Phase, "phase")):
        if not is_subclass(value, base):
            raise DeclarationError(
                f"A handler's {role} must be a subclass of `{base.__name__}`, not {shown(value)}.",
                where=where,
                fix=f"name one of `fluxcb.{role}s`, or a class derived from `fluxcb.{role}s.{base.__name__}`",
            )
    if event is Event:
        return HostEvent, phase
    if not issubclass(event, HostEvent | TracedEvent):
        raise DeclarationError(
            f"`{event.__name__}` is neither a host nor a traced event, so its handlers would never run.",
            where=where,
            fix=f"derive `{event.__name__}` from HostEvent or TracedEvent",
        )
    return event, phase


def shown(value: Any) -> str:
    """Return the text with which a message shows a value that should be a class."""
    return f"the class `{value.__name__}`" if isinstance(value, type) else f"{value!r}"


_WHEN = "write it as a schedule, e.g. `when=EverySteps(10)` or `when=EveryEpochs(2)`"
_FIXES: dict[str, str] = dict.fromkeys(
    ("every", "steps", "epochs", "seconds", "freq", "frequency", "period", "schedule", "interval", "n"), _WHEN
)
"""The fixes to suggest for arguments that `on` does not have."""


@entry_point(fixes=_FIXES)
def on(
    *events_and_phase: Any,
    access: Mapping[str, Any] | None = None,
    when: Schedule | None = None,
    deadline: type[Event] | None = None,
) -> Any:
    """Mark a method as the handler of an event in a phase.

    Without arguments, `@on` reads the annotations of the method's `event` and `phase` parameters. An annotation may be
    a class or a union. Without an annotation of `phase`, the handler is for all phases. `@on(StepEnd, TrainingPhase)`
    states the same without annotations. Either argument may be a union. If the phase is omitted, the annotation of
    `phase` names it. A class in `@on` that contradicts the annotation is an error.

    Args:
        *events_and_phase: Nothing, an event class, or an event class and a phase class.
        access: Access of this handler alone, narrower than the `stateaccess` of the class.
        when: Schedule of a host handler, e.g. `EverySteps(10)`. Without it, the handler is always due.
        deadline: For a host handler that only reads: run it on a thread with a copy of what it declares, while
            training goes on, until the next event of this class: `EpochBegin`, `EpochEnd`, `Trigger`, `FitStopping`,
            `FitEnd`, or the event of the handler. The calls of a callback run in order. If a call fails, the
            exception is raised at the deadline. Outside a fit, the handler runs at once.

    Raises:
        DeclarationError: The signature is wrong, the event is not stated, an annotation cannot be resolved, is not an
            event or phase, or contradicts `@on`, or the class body has a second handler of the same name.
    """
    # The frame of the class body is the caller of the frame that `entry_point` adds.
    if len(events_and_phase) == 1 and inspect.isfunction(events_and_phase[0]):
        return _mark(events_and_phase[0], None, access, when, deadline, sys._getframe(2))
    first = events_and_phase[0] if events_and_phase else None
    if isinstance(first, staticmethod | classmethod | property):
        raise DeclarationError(
            f"`@on` marks methods, not a {type(first).__name__}.",
            fix="make it a plain method, `def name(self, event, phase, learner):`",
        )
    if _wraps_function(first):
        raise _not_a_function(first)
    if len(events_and_phase) > 2:
        raise DeclarationError(
            f"`@on` takes an event and a phase, not {len(events_and_phase)} arguments.",
            fix="for several events, write a union: `@on(StepBegin | StepEnd, TrainingPhase)`",
        )

    @entry_point
    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        if not inspect.isfunction(function):
            raise _not_a_function(function)
        explicit = events_and_phase or None
        return _mark(function, explicit, access, when, deadline, sys._getframe(2))

    return decorate


def _wraps_function(value: Any) -> bool:
    """Return whether a value is what another decorator made of a method, such as `jax.jit`."""
    return callable(value) and inspect.isfunction(getattr(value, "__wrapped__", None))


def _not_a_function(value: Any) -> DeclarationError:
    if not _wraps_function(value):
        return DeclarationError(f"`@on` marks methods, not {value!r}.", fix="put it above a `def`")
    return DeclarationError(
        f"`@on` marks methods, and `{value.__wrapped__.__qualname__}` has another decorator, which made a "
        f"`{type(value).__name__}` of it.",
        where=source_of(value.__wrapped__),
        why="a handler is called with the learner, which JAX cannot trace as an argument",
        fix="remove the other decorator; handlers of traced events, such as BackwardEnd, are compiled with the step",
    )


def is_handler(value: Any) -> bool:
    """Return whether an object was marked by `@on`."""
    return hasattr(value, _MARK)


def handlers_of(name: str, function: Any) -> list[Handler]:
    """Return the handlers that a marked function defines under its name in a class.

    Raises:
        DeclarationError: `jax.jit` or another decorator of JAX is above `@on`.
    """
    if type(function).__module__.partition(".")[0] in ("jax", "jaxlib"):  # it has a copy of the mark
        raise _not_a_function(function)
    return [handler if handler.name == name else replace(handler, name=name) for handler in getattr(function, _MARK)]


def _mark(
    function: Any, explicit: tuple[Any, ...] | None, access: Any, when: Any, deadline: Any, frame: types.FrameType
) -> Any:
    where = f"{function.__qualname__}  {source_of(function)}"
    check_signature(function, where, in_class="__qualname__" in frame.f_locals)  # a name of every class body
    previous = frame.f_locals.get(function.__name__)
    if previous is not None and is_handler(previous):
        raise DeclarationError(
            f"Two handlers marked with `@on` in one class body are called `{function.__name__}`.",
            where=[f"{previous.__qualname__}  {source_of(previous)}", where],
            why="in a Python class body, the second would silently replace the first",
            fix="give each handler a unique name",
        )
    check_options(access, when, where)
    refuse_unraised(function)
    parameters = tuple(inspect.signature(function).parameters.values())
    if explicit is None:
        event, phase = annotated(function, frame, where)
    else:
        event, phase = with_annotations(function, explicit, frame, where)
    if explicit is None and any(is_subclass(p, Event) for p in classes_in(phase)):
        raise DeclarationError(
            f"The handler `{function.__qualname__}` takes ({', '.join(p.name for p in parameters)}), "
            "but the third parameter must be the phase.",
            where=where,
            why="the engine passes the event, the phase and the learner by position",
            fix=f"write `{_corrected(function)}`",
        )
    if explicit is None and parameters[1].annotation is inspect.Parameter.empty:
        raise DeclarationError(
            f"The handler `{function.__qualname__}` does not name its event.",
            where=where,
            why="`@on` reads the event from the annotation of the second parameter, which has none",
            fix=[
                f"annotate it, e.g. `{_corrected(function)}`",
                "write `@on(StepEnd, TrainingPhase)` instead of `@on`",
                "annotate it as `event: HostEvent` if the handler is for all host events",
            ],
        )
    pairs = tuple(check_pair(e, p, where) for e in classes_in(event) for p in classes_in(phase))
    kinds = {issubclass(e, HostEvent) for e, _ in pairs}
    if len(kinds) == 2:
        raise DeclarationError(
            f"`{function.__qualname__}` names both host and traced events, but a handler must be one or the other.",
            where=where,
            why="host handlers run in Python with concrete values, and traced handlers become part of the compiled "
            "step",
            fix="write two handlers, or name HostEvent or TracedEvent",
        )
    if kinds == {False} and when is not None and not isinstance(when, Always | EverySteps | EveryEpochs):
        raise DeclarationError(
            f"The traced handler `{function.__qualname__}` cannot be scheduled by {when!r}.",
            where=where,
            why="the compiled step has the step and epoch numbers, but cannot read a clock or call Python",
            fix="use EverySteps or EveryEpochs, or a host handler",
        )
    name = function.__name__
    found = tuple(Handler(e, p, name, access=access, when=when, deadline=deadline) for e, p in pairs)
    if is_handler(function):
        raise _marked_twice(function, (*found, *getattr(function, _MARK)), where)
    setattr(function, _MARK, found)
    return function


def _marked_twice(function: Any, found: tuple[Handler, ...], where: str) -> DeclarationError:
    """Return the error for a method with two `@on`, whose handlers are `found`."""
    events = dict.fromkeys(handler.event for handler in found)
    phases = dict.fromkeys(handler.phase for handler in found)
    options = {(id(handler.access), handler.when, handler.deadline) for handler in found}
    fix = f"write a method for each `@on`; one can call the other: `self.{function.__name__}(event, phase, learner)`"
    # One `@on` names every event in every phase.
    if len(options) == 1 and len({(h.event, h.phase) for h in found}) == len(events) * len(phases):
        fix = f"write `@on({', '.join(' | '.join(cls.__name__ for cls in classes) for classes in (events, phases))})`"
    return DeclarationError(
        f"`{function.__qualname__}` is marked with `@on` twice.",
        where=where,
        why="a method has one `@on`, which names all its events and phases",
        fix=fix,
    )


def check_options(access: Any, when: Any, where: str) -> None:
    """Check the `access` and `when` arguments of `@on` and `on.register`.

    Raises:
        DeclarationError: `access` is not a mapping, or `when` is not a schedule.
    """
    if access is not None and not isinstance(access, Mapping):
        raise DeclarationError(
            f"`access` of a handler must be a mapping, not {access!r}.",
            where=where,
            fix='write e.g. `access={"step": {"loss": Read()}}`',
        )
    if when is not None and not isinstance(when, Schedule):
        raise DeclarationError(
            f"`when` of a handler must be a schedule, not {when!r}.",
            where=where,
            fix=_schedule_fix(when),
        )


def _schedule_fix(when: Any) -> str:
    if type(when) is int and when > 0:
        return f"write `when=EverySteps({when})`"
    if callable(when) and not isinstance(when, type):
        return "write `when=Predicate(function)` with this function, which gets the learner"
    return "write e.g. `when=EverySteps(10)`"


def check_signature(function: Any, where: str, *, in_class: bool = True) -> None:
    """Check that a handler takes `(self, event, phase, learner)` and is a regular function.

    Args:
        function: The handler.
        where: Its location.
        in_class: Whether it is defined in a class.

    Raises:
        DeclarationError: The signature differs, and the message shows both signatures. Or the function is a coroutine
            or a generator.
    """
    try:
        signature = inspect.signature(function)
        signature.bind(None, None, None, None)
        fits = len(signature.parameters) == 4 and not any(
            p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in signature.parameters.values()
        )
    except TypeError:
        fits = False
    if not fits:
        raise DeclarationError(
            f"The handler `{function.__qualname__}{_plain(function)}` must take (self, event, phase, learner).",
            where=where,
            fix=f"write `{_corrected(function)}`"
            if in_class
            else f"make it a method of a callback: `class MyCallback(Callback):`, with `{_corrected(function)}`",
        )
    if later := runs_later(function):
        raise DeclarationError(
            f"The handler `{function.__qualname__}` is {later}; a handler must run when it is called.",
            where=where,
            why="calling it would return immediately, without running its body",
            fix="make it a plain method, without `async` and `yield`",
        )


def _corrected(function: Any) -> str:
    """Return the first line of a handler with the parameters that it must have, and the user's own annotations."""
    annotations = {"event": "StepEnd", "phase": "Phase", "learner": ""}
    for parameter in inspect.signature(function).parameters.values():
        annotation = parameter.annotation
        if annotation is parameter.empty or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        try:
            classes = classes_in(evaluate(annotation, function, None))
        except Exception:  # a name that only the function around the class knows
            classes = ()
        roles = [role for role, of in (("event", Event), ("phase", Phase)) if any(is_subclass(c, of) for c in classes)]
        role = roles[0] if roles else parameter.name
        if role in annotations:
            # With postponed annotations, the text is what the user wrote.
            names = " | ".join(getattr(cls, "__name__", str(cls)) for cls in classes)
            annotations[role] = annotation if isinstance(annotation, str) else names
    shown = [f"{name}: {text}" if text else name for name, text in annotations.items()]
    return f"def {function.__name__}(self, {', '.join(shown)}):"


def _plain(function: Any) -> str:
    signature = inspect.signature(function)
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))
