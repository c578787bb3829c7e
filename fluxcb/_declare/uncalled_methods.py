"""Methods that look like handlers, or like hooks of other libraries, but that fluxcb would never call."""

from __future__ import annotations

import contextlib
import dis
import inspect
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

from fluxcb._declare.annotations import classes_in, evaluate
from fluxcb._declare.events import Event
from fluxcb._declare.handlers import is_handler
from fluxcb._declare.phases import Phase
from fluxcb._declare.signatures import source_of
from fluxcb._errors import DeclarationError

__all__ = ["attributes_of", "refers", "refuse_foreign_hooks", "refuse_hidden", "refuse_unmarked", "unmarked"]

_TRAINING, _VALIDATION = "AbstractTrainingPhase", "AbstractValidationPhase"

_MOMENTS: Mapping[str, tuple[str, str]] = {
    # Keras, Lightning and Transformers have an event for the whole fit, for an epoch, and for a batch.
    **dict.fromkeys(("on_train_begin", "on_train_start", "on_fit_begin", "on_fit_start"), ("FitBegin", _TRAINING)),
    **dict.fromkeys(("on_train_end", "on_fit_end", "on_exception"), ("FitEnd", _TRAINING)),
    **dict.fromkeys(("on_epoch_begin", "on_epoch_start", "on_train_epoch_start"), ("EpochBegin", _TRAINING)),
    # There, the end of an epoch comes after its validation, which is the Trigger and not the EpochEnd of the training.
    **dict.fromkeys(("on_epoch_end", "on_train_epoch_end", "on_evaluate"), ("Trigger", _TRAINING)),
    **dict.fromkeys(("on_train_batch_begin", "on_train_batch_start", "on_batch_begin"), ("StepBegin", _TRAINING)),
    **dict.fromkeys(("on_batch_start", "on_step_begin", "on_step_start"), ("StepBegin", _TRAINING)),
    **dict.fromkeys(("on_train_batch_end", "on_batch_end", "on_step_end"), ("StepEnd", _TRAINING)),
    **dict.fromkeys(("on_test_begin", "on_test_start", "on_test_epoch_start"), ("EpochBegin", _VALIDATION)),
    **dict.fromkeys(("on_validation_start", "on_validation_epoch_start"), ("EpochBegin", _VALIDATION)),
    **dict.fromkeys(("on_test_end", "on_test_epoch_end"), ("EpochEnd", _VALIDATION)),
    **dict.fromkeys(("on_validation_end", "on_validation_epoch_end"), ("EpochEnd", _VALIDATION)),
    **dict.fromkeys(("on_test_batch_begin", "on_test_batch_start"), ("StepBegin", _VALIDATION)),
    "on_validation_batch_start": ("StepBegin", _VALIDATION),
    **dict.fromkeys(("on_test_batch_end", "on_validation_batch_end"), ("StepEnd", _VALIDATION)),
    "on_before_backward": ("BackwardBegin", _TRAINING),
    **dict.fromkeys(("on_after_backward", "on_before_optimizer_step"), ("BackwardEnd", _TRAINING)),
    **dict.fromkeys(("on_before_zero_grad", "on_optimizer_step"), ("UpdateEnd", _TRAINING)),
}
"""For the hooks of other libraries, the names of the event and the phase that a handler must be marked with."""

_METHODS: Mapping[str, str] = {
    "on_save_checkpoint": "def state_dict(self):",
    "on_load_checkpoint": "def load_state_dict(self, state):",
}
"""For the hooks of other libraries that correspond to another method of a callback, the definition of this method."""


def refuse_foreign_hooks(cls: type) -> None:
    """Raise an error for a method that is named like a hook of another library, because it would never run.

    Methods that override another, or that a method of the class calls as `self.<name>`, are allowed. So are all methods
    of a class that defines `handlers` and so chooses its handlers itself.

    Raises:
        DeclarationError: There is such a method.
    """
    own = vars(cls)
    if "handlers" in own:
        return
    for name, function in own.items():
        if name not in _MOMENTS and name not in _METHODS:
            continue
        if not inspect.isfunction(function) or is_handler(function):
            continue
        if any(name in vars(base) for base in cls.__mro__[1:]) or _is_called(name, cls):
            continue
        raise DeclarationError(
            f"`{cls.__name__}.{name}` has the name of a hook of other libraries, but fluxcb does not call it.",
            where=f"{cls.__name__}.{name}  {source_of(function)}",
            why="the engine calls the methods that are marked with `@on`, regardless of their names",
            fix=[_fix(name), "rename it if other code of yours calls it"],
        )


def _fix(name: str) -> str:
    if name in _METHODS:
        return f"write `{_METHODS[name]}` instead"
    event, phase = _MOMENTS[name]
    return (
        f"write `@on({event}, {phase})` above `def {name}(self, event, phase, learner):`, after "
        f"`from fluxcb import on`, `from fluxcb.events import {event}` and `from fluxcb.phases import {phase}`"
    )


# -- handlers without `@on` ----------------------------------------------------------------------


def refuse_unmarked(cls: type) -> None:
    """Raise an error for a method that looks like a handler but is not marked with `@on`, because it would never run.

    Such a method is annotated with an event class, and has either a phase class or four parameters:
    `(self, event: StepEnd, phase, learner)`. The following methods are allowed:

    - a helper that another method of the class refers to, as in `self.show(event, phase, learner)`;
    - a method whose event is annotated with `Event` itself, which does not name a moment;
    - an override, which is a handler if the overridden method is a handler;
    - all methods of a class that defines `handlers` and so chooses its handlers itself.

    Raises:
        DeclarationError: There is such a method.
    """
    own = vars(cls)
    if "handlers" in own:
        return
    for name, function in own.items():
        events = _unmarked_events(function)
        if not events or any(name in vars(base) for base in cls.__mro__[1:]) or _is_called(name, cls):
            continue
        fix = [f"put `@on` above `def {name}`"]
        if name not in _MOMENTS and name not in _METHODS:  # otherwise, `refuse_foreign_hooks` would refuse it
            parameter = _event_parameter(function)
            fix.append(f"annotate the parameter as `{parameter}: Event` if other code calls this method")
        raise DeclarationError(
            f"`{cls.__name__}.{name}` looks like a handler of {' | '.join(e.__name__ for e in events)}, "
            "but it is not marked with `@on`.",
            where=f"{cls.__name__}.{name}  {source_of(function)}",
            why="the engine calls only methods that are marked, so this method would never run",
            fix=fix,
        )


def refuse_hidden(cls: type) -> None:
    """Raise an error for a method with `@on` below a decorator that hides the mark, because it would never run.

    Raises:
        DeclarationError: There is such a method.
    """
    for name, value in vars(cls).items():
        if is_handler(value) or inspect.isclass(value):
            continue
        hidden = next((f for f in _functions_in(value) if is_handler(f) and f.__qualname__ == _member(cls, name)), None)
        if hidden is None:
            continue
        if isinstance(value, staticmethod | classmethod | property):
            fix = f"remove `@{type(value).__name__}`, and write `def {name}(self, event, phase, learner):`"
        else:
            fix = "put `@functools.wraps(function)` above the function that this decorator returns"
        raise DeclarationError(
            f"`{cls.__name__}.{name}` is marked with `@on`, but the decorator above `@on` hides the mark.",
            where=f"{cls.__name__}.{name}  {source_of(hidden)}",
            why="the engine calls only methods that are marked, so this method would never run",
            fix=fix,
        )


def _member(cls: type, name: str) -> str:
    return f"{cls.__qualname__}.{name}"


def _functions_in(value: Any) -> Iterator[Any]:
    """Yield the functions that a decorator has wrapped in its result."""
    if isinstance(value, staticmethod | classmethod):
        yield value.__func__
    elif isinstance(value, property):
        yield value.fget
    elif inspect.isfunction(value) and value.__closure__:
        for cell in value.__closure__:
            with contextlib.suppress(ValueError):  # an empty cell
                if inspect.isfunction(cell.cell_contents):
                    yield cell.cell_contents


def unmarked(cls: Any) -> list[Any]:
    """Return the methods without annotations that have the parameters of a handler and that nothing seems to call.

    The parameters are `(self, event, phase, learner)`. A helper of handlers can have the same parameters. Therefore,
    the result excludes methods that the class refers to as `self.<name>`. A base class can define a helper for its
    subclasses, so call this function for the class of an instance and not at class definition.
    For the same reason, the engine only warns about these methods.
    """
    handlers = {entry.name for entry in cls.on.entries.values()}
    methods = {name: value for base in reversed(cls.__mro__) for name, value in vars(base).items()}
    return [
        function
        for name, function in methods.items()
        if inspect.isfunction(function)
        and _parameters(function) == ("self", "event", "phase", "learner")
        and not (is_handler(function) or name in handlers or function.__annotations__.get("event"))
        and not _is_called(name, cls)
    ]


def _parameters(function: Any) -> tuple[str, ...]:
    return function.__code__.co_varnames[: function.__code__.co_argcount]


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
        members = classes_in(evaluate(annotation, function, frame))
    except Exception:  # an annotation that cannot be evaluated does not tell its class
        return ()
    return members if all(isinstance(member, type) and issubclass(member, base) for member in members) else ()


def _is_called(name: str, cls: type) -> bool:
    """Return whether a method of the class, or of a base class, refers to `self.<name>`."""
    methods = [value for base in cls.__mro__ for value in vars(base).values() if inspect.isfunction(value)]
    codes = [inspect.unwrap(method).__code__ for method in methods]
    return any(refers(code, code.co_varnames[:1], name) for code in codes)


def refers(code: types.CodeType, owner: tuple[str, ...], name: str) -> bool:
    """Return whether a function, or one inside it, reads an attribute with this name from a variable in `owner`."""
    if name in code.co_names and name in _own_attributes(code, owner):
        return True
    return any(refers(inner, owner, name) for inner in code.co_consts if isinstance(inner, types.CodeType))


def attributes_of(code: types.CodeType, owner: tuple[str, ...]) -> Iterator[str]:
    """Yield the attributes that a function, or one inside it, reads or assigns on a variable in `owner`."""
    yield from _own_attributes(code, owner, "STORE_ATTR")
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            yield from attributes_of(inner, owner)


def _own_attributes(code: types.CodeType, owner: tuple[str, ...], *more: str) -> Iterator[str]:
    """Yield the attributes that a function reads from a variable in `owner`, and those of the `more` instructions."""
    loaded: Any = None
    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_ATTR", "LOAD_METHOD", *more) and loaded in owner:
            yield instruction.argval
        if instruction.opname == "COPY":  # of the object in `self.count += 1`
            continue
        value = instruction.argval  # two names if one instruction loads both (Python 3.13)
        loaded = value[-1] if isinstance(value, tuple) and value else value
