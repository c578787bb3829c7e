"""Effects of traced handlers that happen once, while the step is traced, and not at each step."""

from __future__ import annotations

import inspect
import pickle
import random
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import CodeType
from typing import Any

import numpy as np

from fluxcb._declare.declared import BoundHandler
from fluxcb._declare.uncalled_methods import refers
from fluxcb._tracebacks import warn_user

__all__ = ["TracedField", "traced_fields", "warn_about_changed", "warn_once_only"]


@contextmanager
def warn_once_only(handler: BoundHandler) -> Iterator[None]:
    """Warn if a traced handler draws random numbers outside JAX or counts in a field of its callback."""
    owner = getattr(handler.function, "__self__", None)
    numpy_before, python_before, fields_before = _numpy_random(), random.getstate(), _numbers(owner)
    yield
    name = f"The traced handler {handler.declared.label}.{handler.name}"
    # Another thread, such as one that prepares batches, may draw from the same generators in the meantime.
    alone = threading.active_count() == 1
    if alone and (_numpy_random() != numpy_before or random.getstate() != python_before):
        warn_user(
            f"{name} drew random numbers outside JAX. They are drawn once, while the step is traced, so every step "
            "uses the same numbers. Use `learner.key`, e.g. `jax.random.normal(learner.key, shape)`.",
            UserWarning,
        )
    for field, value in _numbers(owner).items():
        before = fields_before.get(field, value)
        if before is value or before == value:  # the same NaN is not equal to itself
            continue
        warn_user(
            f"{name} changed `self.{field}`. The change happens once, while the step is traced, and not at each step. "
            f"Keep the value in `learner.cbstate`, or change `self.{field}` in a host handler.",
            UserWarning,
        )


@dataclass(frozen=True)
class TracedField:
    """A number in a field of a callback that a traced handler reads as `self.<name>`, also in a method that it calls.

    Attributes:
        handler: The handler.
        name: The name of the field.
        value: Its value when the handler was traced, which is a constant of the compiled step.
    """

    handler: BoundHandler
    name: str
    value: float

    @property
    def now(self) -> Any:
        """The current value of the field, or None if it is no number any more."""
        return _numbers(getattr(self.handler.function, "__self__", None)).get(self.name)


def traced_fields(handlers: Iterable[BoundHandler]) -> list[TracedField]:
    """Return the fields whose values have become constants of a step, right after its handlers were traced."""
    found = []
    for handler in handlers:
        owner = getattr(handler.function, "__self__", None)
        numbers = _numbers(owner)
        if numbers:
            codes = _own_codes(owner, handler.function, {})
            found += [
                TracedField(handler, name, value)
                for name, value in numbers.items()
                if any(refers(code, code.co_varnames[:1], name) for code in codes)
            ]
    return found


def _own_codes(owner: Any, function: Any, seen: dict[CodeType, None]) -> dict[CodeType, None]:
    """Return the code of a method and of the methods of its object that it uses."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    if isinstance(code, CodeType) and code not in seen:
        seen[code] = None
        for name in _names_in(code):
            method = getattr(type(owner), name, None)
            if inspect.isfunction(method) and refers(code, code.co_varnames[:1], name):
                _own_codes(owner, method, seen)
    return seen


def _names_in(code: CodeType) -> set[str]:
    """Return the names of attributes and globals in a function and in the functions that it defines."""
    inner = (_names_in(constant) for constant in code.co_consts if isinstance(constant, CodeType))
    return {*code.co_names}.union(*inner)


def warn_about_changed(fields: Iterable[TracedField]) -> list[TracedField]:
    """Warn about each field whose value has changed since it was traced, and return the unchanged fields."""
    unchanged = []
    for field in fields:
        now = field.now
        if now is field.value or now == field.value:
            unchanged.append(field)
            continue
        label = field.handler.declared.label
        warn_user(
            f"`self.{field.name}` of {label} has changed from {field.value!r} to {now!r}, but the traced handler "
            f"{label}.{field.handler.name} still uses {field.value!r}, which is a constant of the compiled step. Keep "
            "the value in an entry of `learner.cbstate`: traced handlers read it at each step.",
            UserWarning,
        )
    return unchanged


def _numpy_random() -> bytes:
    return pickle.dumps(np.random.get_state(legacy=False))  # any bit generator; its arrays cannot be compared by `==`


def _numbers(owner: object) -> dict[str, Any]:
    """Return the fields of an object that are numbers. A field may have its first value in the class."""
    fields = {**vars(type(owner)), **getattr(owner, "__dict__", {})}
    return {name: value for name, value in fields.items() if isinstance(value, int | float)}
