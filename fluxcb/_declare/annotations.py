"""The annotations of a handler, which say at which events and in which phases it runs."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Iterable
from typing import Any

from fluxcb._declare.events import Event, HostEvent
from fluxcb._declare.phases import Phase
from fluxcb._errors import DeclarationError

__all__ = ["annotated", "classes_in", "evaluate", "is_subclass", "with_annotations"]


def annotated(function: Any, frame: types.FrameType, where: str) -> tuple[Any, Any]:
    """Return the event and the phase that the annotations of a handler name: classes, unions or tuples.

    Raises:
        DeclarationError: An annotation cannot be resolved.
    """
    _, event, phase, _ = inspect.signature(function).parameters.values()
    return _annotation(function, event, HostEvent, frame, where), _annotation(function, phase, Phase, frame, where)


def with_annotations(function: Any, named: tuple[Any, ...], frame: types.FrameType, where: str) -> tuple[Any, Any]:
    """Return the event and the phase of a handler whose decorator names the event and possibly the phase.

    If the decorator does not name the phase, the annotation does.

    Raises:
        DeclarationError: The decorator and an annotation contradict each other.
    """
    _, *parameters, _ = inspect.signature(function).parameters.values()
    found = []
    for i, (parameter, base) in enumerate(zip(parameters, (Event, Phase), strict=True)):
        classes = _known_classes(function, parameter, base, frame)
        if i >= len(named):
            found.append(classes or base)
            continue
        outside = [c for c in classes_in(named[i]) if is_subclass(c, base) and not issubclass(c, classes or (base,))]
        if outside:
            raise DeclarationError(
                f"`@on` of the handler `{function.__qualname__}` names {_names(outside)}, but its `{parameter.name}` "
                f"is annotated as {_names(classes)}.",
                where=where,
                fix=f"name the same class in both, or remove the annotation of `{parameter.name}`",
            )
        found.append(named[i])
    event, phase = found
    return event, phase


def _known_classes(function: Any, parameter: inspect.Parameter, base: type, frame: types.FrameType) -> tuple[type, ...]:
    """Return the classes of an annotation, or nothing if it is not one of events or phases, such as `Any`."""
    if parameter.annotation is parameter.empty:
        return ()
    try:
        classes = classes_in(evaluate(parameter.annotation, function, frame))
    except Exception:  # the decorator names the classes, so a name for type checkers alone is no mistake
        return ()
    return classes if all(is_subclass(c, base) for c in classes) else ()


def _names(classes: Iterable[type]) -> str:
    return " | ".join(c.__name__ for c in classes)


def is_subclass(value: Any, base: type) -> bool:
    """Return whether a value is a class that is derived from `base`."""
    return isinstance(value, type) and issubclass(value, base)


def _annotation(function: Any, parameter: inspect.Parameter, default: type, frame: types.FrameType, where: str) -> Any:
    """Return the annotation as a tuple of classes. String annotations are evaluated in the scope of the class body."""
    annotation = parameter.annotation
    if annotation is parameter.empty:
        return default
    try:
        return evaluate(annotation, function, frame)
    except Exception as error:
        raise DeclarationError(
            f"The annotation `{parameter.name}: {annotation}` of `{function.__qualname__}` "
            f"cannot be resolved ({error}).",
            where=where,
            fix="import the class before the callback, or name it in the decorator: `@on(StepEnd, TrainingPhase)`",
        ) from error


def evaluate(annotation: Any, function: Any, frame: types.FrameType | None) -> Any:
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


def classes_in(annotation: Any) -> tuple[Any, ...]:
    """Return the members of a union or of a tuple, or the class itself."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return typing.get_args(annotation)
    return annotation if isinstance(annotation, tuple) else (annotation,)
