"""`@on`: marking methods as handlers, and checking their signatures and annotations."""

from __future__ import annotations

import dis
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fluxcb._declare.dispatch import Entry, Pair, check_pair, source_of
from fluxcb._declare.events import Event, HostEvent
from fluxcb._declare.phases import Phase
from fluxcb._declare.schedules import Always, EveryEpochs, EverySteps, Schedule
from fluxcb._declare.signatures import runs_later
from fluxcb._errors import DeclarationError

__all__ = ["check_options", "check_signature", "entries_of", "is_handler", "on", "refuse_unmarked"]

_MARK = "__fluxcb_on__"


@dataclass(frozen=True)
class _Mark:
    """What `@on` notes on a function."""

    pairs: tuple[Pair, ...]
    access: Mapping[str, Any] | None
    when: Schedule | None


def on(*events_and_phase: Any, access: Mapping[str, Any] | None = None, when: Schedule | None = None) -> Any:
    """Mark a method as the handler of an event in a phase.

    Bare `@on` reads the annotations of the method's `event` and `phase` parameters (classes or
    unions; a missing one means the base class). `@on(StepEnd, TrainingPhase)` says the same
    without annotations; either may be a union, and the phase may be left out.

    Args:
        *events_and_phase: Nothing, or an event class, or an event class and a phase class.
        access: Access of this handler alone, narrower than the class's `stateaccess`.
        when: When a host handler is due, e.g. `EverySteps(10)`; without it, always.

    Raises:
        DeclarationError: Wrong signature, an annotation that cannot be resolved or is no event
            or phase, or a second handler of the same name in one class body.
    """
    if len(events_and_phase) == 1 and inspect.isfunction(events_and_phase[0]):
        return _mark(events_and_phase[0], None, access, when, sys._getframe(1))
    first = events_and_phase[0] if events_and_phase else None
    if isinstance(first, staticmethod | classmethod | property):
        raise DeclarationError(
            f"`@on` marks methods, not a {type(first).__name__}.",
            fix="make it a plain method, `def name(self, event, phase, learner):`",
        )
    if len(events_and_phase) > 2:
        raise DeclarationError(
            f"`@on` takes an event and a phase, not {len(events_and_phase)} arguments.",
            fix="for several events, write a union: `@on(StepBegin | StepEnd, TrainingPhase)`",
        )

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        if not inspect.isfunction(function):
            raise DeclarationError(f"`@on` marks methods, not {function!r}.", fix="put it above a `def`")
        explicit = events_and_phase or None
        return _mark(function, explicit, access, when, sys._getframe(1))

    return decorate


def is_handler(value: Any) -> bool:
    """Tell whether `@on` has marked this object."""
    return hasattr(value, _MARK)


def entries_of(name: str, function: Any) -> list[Entry]:
    """Return the table rows of a marked function."""
    mark: _Mark = getattr(function, _MARK)
    return [Entry(event, phase, name, access=mark.access, when=mark.when) for event, phase in mark.pairs]


def _mark(function: Any, explicit: tuple[Any, ...] | None, access: Any, when: Any, frame: types.FrameType) -> Any:
    where = f"{function.__qualname__}  {source_of(function)}"
    check_signature(function, where)
    previous = frame.f_locals.get(function.__name__)
    if previous is not None and is_handler(previous):
        raise DeclarationError(
            f"Two handlers marked with `@on` in one class body are called `{function.__name__}`.",
            where=[f"{previous.__qualname__}  {source_of(previous)}", where],
            why="in a Python class body the second would silently replace the first",
            fix="give each handler a name that says what it does",
        )
    check_options(access, when, where)
    if explicit is None:
        _, event_parameter, phase_parameter, _ = inspect.signature(function).parameters.values()
        event = _annotation(function, event_parameter, HostEvent, frame, where)
        phase = _annotation(function, phase_parameter, Phase, frame, where)
    else:
        event, phase = explicit[0], explicit[1] if len(explicit) == 2 else Phase
    pairs = tuple(check_pair(e, p, where) for e in _members(event) for p in _members(phase))
    kinds = {issubclass(e, HostEvent) for e, _ in pairs}
    if len(kinds) == 2:
        raise DeclarationError(
            f"`{function.__qualname__}` names host and traced events; a handler is of one kind.",
            where=where,
            why="host handlers see values in Python, traced handlers become part of the compiled step",
            fix="write two handlers, or name HostEvent or TracedEvent",
        )
    if kinds == {False} and when is not None and not isinstance(when, Always | EverySteps | EveryEpochs):
        raise DeclarationError(
            f"The traced handler `{function.__qualname__}` cannot be scheduled by {when!r}.",
            where=where,
            why="the compiled step knows step and epoch numbers, but no clock and no Python",
            fix="use EverySteps or EveryEpochs, or a host handler",
        )
    setattr(function, _MARK, _Mark(pairs, access, when))
    return function


def check_options(access: Any, when: Any, where: str) -> None:
    """Check what `@on` and `on.register` take besides event and phase.

    Raises:
        DeclarationError: `access` is no mapping, or `when` no schedule.
    """
    if access is not None and not isinstance(access, Mapping):
        raise DeclarationError(
            f"`access` of a handler must be a mapping, not {access!r}.",
            where=where,
            fix='e.g. `access={"step": {"loss": Read()}}`',
        )
    if when is not None and not isinstance(when, Schedule):
        raise DeclarationError(
            f"`when` of a handler must be a schedule, not {when!r}.", where=where, fix="e.g. `when=EverySteps(10)`"
        )


def check_signature(function: Any, where: str) -> None:
    """Check that a handler takes `(self, event, phase, learner)`, and runs when it is called.

    Raises:
        DeclarationError: It takes something else, and the message shows both signatures; or it is a coroutine or a
            generator.
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
            fix=f"write `def {function.__name__}(self, event: StepEnd, phase: Phase, learner):`",
        )
    if later := runs_later(function):
        raise DeclarationError(
            f"The handler `{function.__qualname__}` is {later}; a handler must run when it is called.",
            where=where,
            why="its call would return at once, and nothing would ever run its body",
            fix="make it a plain method, without `async` and `yield`",
        )


def _plain(function: Any) -> str:
    signature = inspect.signature(function)
    bare = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
    return str(signature.replace(parameters=bare, return_annotation=signature.empty))


def _annotation(function: Any, parameter: inspect.Parameter, default: type, frame: types.FrameType, where: str) -> Any:
    """Return the annotation as classes; strings are evaluated where they were written."""
    annotation = parameter.annotation
    if annotation is parameter.empty:
        return default
    try:
        return _evaluated(annotation, function, frame)
    except Exception as error:
        raise DeclarationError(
            f"The annotation `{parameter.name}: {annotation}` of `{function.__qualname__}` "
            f"cannot be resolved ({error}).",
            where=where,
            fix="import the class before the callback, or name it in the decorator: `@on(StepEnd, TrainingPhase)`",
        ) from error


def _evaluated(annotation: Any, function: Any, frame: types.FrameType | None) -> Any:
    """Return the value of an annotation; names are looked up in the module and in the frames around the class."""
    if not isinstance(annotation, str):
        return annotation
    names: dict[str, Any] = {}
    # Local classes are defined in the frames that enclose the class body. Frames of other modules do not enclose it.
    while frame is not None and frame.f_globals is function.__globals__ and frame.f_code.co_name != "<module>":
        for name, value in frame.f_locals.items():
            names.setdefault(name, value)
        frame = frame.f_back
    value: Any = annotation
    while isinstance(value, str):  # with postponed annotations, a quoted annotation is a string within a string
        value = eval(value, function.__globals__, names)  # noqa: S307 - the user's own annotation
    return value


def _members(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return annotation if isinstance(annotation, tuple) else (annotation,)


# -- handlers without `@on` ----------------------------------------------------------------------


def refuse_unmarked(cls: type) -> None:
    """Raise an error for a method that looks like a handler but is not marked with `@on`, because it would never run.

    Such a method is annotated with an event class, and has either a phase class or four parameters:
    `(self, event: StepEnd, phase, learner)`. The following methods are allowed:

    - a helper that another method of the class refers to, as in `self.show(event, phase, learner)`;
    - a method whose event is annotated with `Event` itself, which does not name a moment;
    - an override, which is a handler if the overridden method is a handler;
    - all methods of a class that defines `handlers` or `entry_for` and so chooses its handlers itself.

    Raises:
        DeclarationError: There is such a method.
    """
    own = vars(cls)
    if "handlers" in own or "entry_for" in own:
        return
    for name, function in own.items():
        events = _unmarked_events(function)
        if not events or any(name in vars(base) for base in cls.__mro__[1:]) or _is_called(name, cls):
            continue
        raise DeclarationError(
            f"`{cls.__name__}.{name}` is written like a handler of {' | '.join(e.__name__ for e in events)}, "
            "but it is not marked with `@on`.",
            where=f"{cls.__name__}.{name}  {source_of(function)}",
            why="the engine calls only methods that are marked, so this method would never run",
            fix=[
                f"put `@on` above `def {name}`",
                f"annotate the parameter as `{_event_parameter(function)}: Event` if other code calls this method",
            ],
        )


def _event_parameter(function: Any) -> str:
    return function.__code__.co_varnames[1]


def _unmarked_events(function: Any) -> tuple[type[Event], ...]:
    """Return the events that an unmarked method is annotated with, if it looks like a handler."""
    # This check runs for each method of each callback class, so it must be cheap. Nearly all methods return here.
    if not inspect.isfunction(function) or is_handler(function) or function.__code__.co_argcount < 3:
        return ()
    event, phase = _named_classes(function, 1, Event), _named_classes(function, 2, Phase)
    if not event or Event in event or not (phase or function.__code__.co_argcount == 4):
        return ()
    return event


def _named_classes(function: Any, position: int, base: type) -> tuple[Any, ...]:
    """Return the classes that a parameter is annotated with, or nothing if one is not a subclass of `base`."""
    annotation = function.__annotations__.get(function.__code__.co_varnames[position])
    if annotation is None:
        return ()
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_globals is not function.__globals__:  # the frame of the `class` statement
        frame = frame.f_back
    try:
        members = _members(_evaluated(annotation, function, frame))
    except Exception:  # an annotation that cannot be evaluated does not tell its class
        return ()
    return members if all(isinstance(member, type) and issubclass(member, base) for member in members) else ()


def _is_called(name: str, cls: type) -> bool:
    """Return whether a method of the class, or of a base class, refers to `self.<name>`."""
    methods = [value for base in cls.__mro__ for value in vars(base).values() if inspect.isfunction(value)]
    return any(_refers(method.__code__, method.__code__.co_varnames[:1], name) for method in methods)


def _refers(code: types.CodeType, owner: tuple[str, ...], name: str) -> bool:
    if name in code.co_names and any(_attributes(code, owner, name)):
        return True
    return any(_refers(inner, owner, name) for inner in code.co_consts if isinstance(inner, types.CodeType))


def _attributes(code: types.CodeType, owner: tuple[str, ...], name: str) -> Iterator[bool]:
    """Yield, for each load of an attribute with this name, whether it is loaded from `self`."""
    loaded: Any = None
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and instruction.argval == name:
            yield loaded in owner
        value = instruction.argval  # two names if one instruction loads both (Python 3.13)
        loaded = value[-1] if isinstance(value, tuple) and value else value
