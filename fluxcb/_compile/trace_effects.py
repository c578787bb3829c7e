"""Effects of traced handlers and of phases that happen once, while the step is traced, and not at each step."""

from __future__ import annotations

import datetime
import dis
import functools
import inspect
import pickle
import random
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType
from typing import Any

import numpy as np

from fluxcb._compile.field_contents import (
    UNKNOWN,
    content_of,
    function_of,
    has_changed,
    is_of_library,
    names_used,
    variables_of,
)
from fluxcb._declare.batch_parts import BatchParts
from fluxcb._declare.declared import BoundHandler
from fluxcb._declare.phases import Phase
from fluxcb._declare.signatures import names_in
from fluxcb._declare.uncalled_methods import attributes_of
from fluxcb._tracebacks import warn_user

__all__ = [
    "TracedField",
    "input_variables",
    "loss_variables",
    "phase_fields",
    "traced_fields",
    "unchanged_fields",
    "warn_about_changed",
    "warn_of_clock",
    "warn_of_loss_effects",
    "warn_of_random_numbers",
    "warn_once_only",
]


@contextmanager
def warn_once_only(handler: BoundHandler) -> Iterator[None]:
    """Warn if a traced handler draws random numbers outside JAX, reads a clock, or changes a field or a variable.

    Changes are reported for fields that hold a number or a list, and for variables that hold a number. The functions
    that the user has passed to a callback of fluxcb, such as metrics, are a part of its handlers.
    """
    owner, uses = _owner_and_uses(handler)
    # A handler of the library is the same for all users, so their mistakes are in the functions that they pass to it.
    functions = {f"The function `{f.__name__}` of {handler.declared.label}": f for f, _ in _functions_within(owner)}
    functions[f"The traced handler {handler.declared.label}.{handler.name}"] = handler.function
    counters = {called: _counters_of(f, lists=f is handler.function) for called, f in functions.items()}
    numpy_before, python_before, before = _numpy_random(), random.getstate(), _contents(owner, uses)
    # An exception of the handler is raised here, so that no warning accompanies it.
    yield
    for called, function in functions.items():
        _warn_of_counters(called, counters[called], _counters_of(function, lists=function is handler.function))
    name = f"The traced handler {handler.declared.label}.{handler.name}"
    fields, changed = _fields(owner), _changed(before, _contents(owner, uses))
    # A generator in a field belongs to the callback, so a change is reported even if other threads are running.
    generators = {field for field in changed if isinstance(fields[field], np.random.Generator)}
    # Another thread, such as one that prepares batches, may draw from the same generators in the meantime.
    alone = threading.active_count() == 1
    if generators or (alone and (_numpy_random() != numpy_before or random.getstate() != python_before)):
        warn_user(
            f"{name} drew random numbers outside JAX. They are drawn once, while the step is traced, so every step "
            "uses the same numbers. Use `learner.key`, e.g. `jax.random.normal(learner.key, shape)`.",
            UserWarning,
        )
    for field in changed - generators:
        # A dict may be a cache, which is filled once on purpose.
        if isinstance(fields[field], int | float | list):
            warn_user(
                f"{name} changed `self.{field}`. The change happens once, while the step is traced, and not at each "
                f"step. Keep the value in `learner.cbstate`, or change `self.{field}` in a host handler.",
                UserWarning,
            )
    clock = _clock_in(inspect.unwrap(handler.function))
    if clock is not None:
        warn_user(
            f"{name} uses `{clock}`. It is called once, while the step is traced, so every step gets the same time. "
            "Read the clock in a host handler, for example of StepEnd.",
            UserWarning,
        )


@contextmanager
def warn_of_random_numbers(called: str) -> Iterator[None]:
    """Warn if a function that is traced draws random numbers outside JAX.

    Args:
        called: What is called, as the beginning of a sentence, e.g. `The model`.
    """
    before = _numpy_random(), random.getstate()
    yield
    # Another thread, such as one that prepares batches, may draw from the same generators in the meantime.
    if threading.active_count() == 1 and (_numpy_random(), random.getstate()) != before:
        warn_user(
            f"{called} drew random numbers outside JAX. They are drawn once, while the step is traced, so every step "
            "uses the same numbers. Use `jax.random` with the random key that a parameter `key` receives, or with "
            "`self.make_rng` in a Linen module.",
            UserWarning,
        )


def warn_of_clock(function: Any) -> None:
    """Warn if a loss function reads a clock."""
    # `func` of a `functools.partial`, which has no code of its own.
    clock = _clock_in(inspect.unwrap(getattr(function, "func", function)))
    if clock is not None:
        warn_user(
            f"The loss function uses `{clock}`. It is called once, while the step is traced, so every step gets the "
            "same time. To use the time, pass it in the batch, for example with `fluxcb.data.map`.",
            UserWarning,
        )


def warn_of_loss_effects(variables: Iterable[TracedField]) -> None:
    """Warn about numbers that the loss function has changed while it was traced.

    Args:
        variables: What the loss function reads, before the trace; see `loss_variables`.
    """
    for variable in variables:
        if _number_changed(variable.content, variable.now):
            what = variable.label[0].lower() + variable.label[1:]
            warn_user(
                f"The loss function changed {what}. The change happens once, while the step is traced, and not at each "
                "step. Change it in a host handler, for example of StepEnd.",
                UserWarning,
            )


def _number_changed(before: Any, after: Any) -> bool:
    """Return whether a number has changed, or a number in a dict or an object."""
    if isinstance(before, int | float) and isinstance(after, int | float):
        return has_changed(before, after)
    # A list or a new entry of a dict may be a cache, which is filled once on purpose.
    if isinstance(before, dict) and isinstance(after, dict):
        return any(_number_changed(before[key], after[key]) for key in before.keys() & after.keys())
    return False


def _counters_of(function: Any, *, lists: bool) -> dict[str, Any]:
    """Return variables from outside of a function: the numbers that it assigns, and copies of lists if requested."""
    function = inspect.unwrap(getattr(function, "__func__", function))
    if not isinstance(function, FunctionType):
        return {}
    assigned, variables = _assigned_in(function.__code__), variables_of(function)
    numbers = {name: variables[name] for name in assigned if isinstance(variables.get(name), int | float)}
    return numbers | {name: list(value) for name, value in variables.items() if lists and isinstance(value, list)}


@functools.lru_cache(maxsize=512)  # reading the instructions of a function takes a millisecond
def _assigned_in(code: CodeType) -> frozenset[str]:
    """Return the variables of enclosing functions, and the global ones, that a function assigns."""
    instructions = [(i.opname, i.argval) for i in dis.get_instructions(code)]
    # A function also uses STORE_DEREF for its own variables that inner functions read. Those are not in `co_freevars`.
    outer = {name for operation, name in instructions if operation == "STORE_DEREF" and name in code.co_freevars}
    return frozenset(outer | {name for operation, name in instructions if operation == "STORE_GLOBAL"})


def _warn_of_counters(called: str, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    for name in before.keys() & after.keys():
        old, new = before[name], after[name]
        # The items of a list may be arrays, so they are not compared with `==`.
        if list(map(id, old)) != list(map(id, new)) if isinstance(old, list) and isinstance(new, list) else old != new:
            warn_user(
                f"{called} changed the variable `{name}`. The change happens once, while the step is traced, and not "
                "at each step. Change it in a host handler, for example of StepEnd.",
                UserWarning,
            )


@dataclass(frozen=True)
class TracedField:
    """A value that traced code reads from outside: a field `self.<name>` of its owner, or a variable of a function.

    Attributes:
        owner: The callback, the phase, or the function.
        label: The value in messages.
        reader: The traced code, in messages.
        advice: What to do instead of changing the value.
        name: The name of the field or the variable.
        content: Its content when the code was traced, which is a constant of the compiled step.
        names: The names in the code.
    """

    owner: object
    label: str
    reader: str
    advice: str
    name: str
    content: Any
    names: frozenset[str]

    @property
    def now(self) -> Any:
        """The current content of the field."""
        return content_of(_fields(self.owner).get(self.name), self.names)

    @property
    def changed(self) -> bool:
        """Whether the content has changed since the code was traced."""
        return has_changed(self.content, self.now)


def unchanged_fields(fields: Iterable[TracedField]) -> list[TracedField]:
    """Return the fields whose content has not changed since it was read."""
    return [field for field in fields if not field.changed]


def phase_fields(phase: Phase) -> list[TracedField]:
    """Return the fields that the step of a phase reads, before it is traced."""
    uses = _uses_of(phase, phase.step)
    name = type(phase).__name__
    advice = (
        "Keep the value in an entry of `learner.cbstate` that the `init` of a callback creates, and name the entry in "
        f"`{name}.uses`: the step reads it each time."
    )
    return [
        TracedField(phase, f"`self.{field}` of {phase!r}", f"`{name}.step`", advice, field, content, uses.names)
        for field, content in _contents(phase, uses).items()
    ]


def loss_variables(loss_fn: Any) -> list[TracedField]:
    """Return the variables that a loss function reads, before it is traced."""
    # fluxcb reads batches many steps ahead, but never beyond the end of an epoch.
    advice = (
        "To change the value at the end of epochs, change it at EpochEnd, and pass it in the batch, for example with "
        "`fluxcb.data.map`. To change it at steps, keep it in an entry of `learner.cbstate`, and read the entry in the "
        "step of a phase, which names it in `uses`."
    )
    if isinstance(call := getattr(loss_fn, "__call__", None), MethodType):  # noqa: B004 - the method is needed
        loss_fn = call  # a callable object
    # `variables_of` returns nothing for a bound method.
    variables = _variables(getattr(loss_fn, "__func__", loss_fn), "the loss function", advice)
    owner = getattr(loss_fn, "__self__", None)
    if not isinstance(loss_fn, MethodType) or is_of_library(owner):
        return variables
    uses, label = _uses_of(owner, loss_fn), type(owner).__name__
    return variables + [
        TracedField(owner, f"`self.{name}` of {label}", "the loss function", advice, name, content, uses.names)
        for name, content in _contents(owner, uses).items()
    ]


def input_variables(model: Any, split: BatchParts) -> list[TracedField]:
    """Return the variables that the `apply` of a model pair, `inputs=` and `targets=` read, before they are traced."""
    advice = "To change the value during training, keep it in the state of the model, or in the batch."
    functions = {
        "`apply` of the model": getattr(model, "function", None),
        "`inputs=`": split.inputs,
        "`targets=`": split.targets,
    }
    return [field for reader, function in functions.items() for field in _variables(function, reader, advice)]


def _variables(function: Any, reader: str, advice: str) -> list[TracedField]:
    of, variables, found = function_of(function), variables_of(function), []
    if of is None:
        return []
    names = names_used(function)
    for name, variable in variables.items():
        content = content_of(variable, names)
        if content is not UNKNOWN:
            what = "The argument" if name in of.__code__.co_varnames else "The variable"
            if isinstance(variable, FunctionType | functools.partial):  # its content consists of its variables
                what = "A variable of the function"
            found.append(TracedField(function, f"{what} `{name}`", reader, advice, name, content, names))
    return found


def traced_fields(handlers: Iterable[BoundHandler]) -> list[TracedField]:
    """Return the fields whose values have become constants of a step, right after its handlers were traced."""
    found = []
    for handler in handlers:
        owner, uses = _owner_and_uses(handler)
        contents = _contents(owner, uses)
        label = handler.declared.label
        reader = f"the traced handler {label}.{handler.name}"
        advice = "Keep the value in an entry of `learner.cbstate`: traced handlers read it at each step."
        if is_of_library(owner):
            # Users cannot change how a callback of the library stores its arguments.
            advice = f"Replace the callback: `learner.callbacks.replace({type(owner).__name__}(...))`."
            # The contents of fields include the variables of functions, but not what objects of fluxcb hold.
            for function in (function for function, of_part in _functions_within(owner) if of_part):
                found += _variables(function, f"the function `{function.__name__}` of {label}", advice)
        found += [
            TracedField(owner, f"`self.{name}` of {label}", reader, advice, name, content, uses.names)
            for name, content in contents.items()
        ]
        found += _variables(getattr(handler.function, "__func__", handler.function), reader, advice)
    return found


def _functions_within(owner: Any) -> Iterator[tuple[FunctionType, bool]]:
    """Yield the user's functions that a callback of fluxcb holds, and whether another object of fluxcb holds them.

    For example, `Scheduler` holds functions itself, and `Metrics` holds objects that hold the functions of metrics.
    """
    if not is_of_library(owner):
        return
    level, seen = [(owner, False)], set()
    # The function of a metric is three levels below `Metrics`: the tuple of metrics, the metric, the function. The
    # function for its weights is in another object.
    for _ in range(5):
        inner: list[tuple[Any, bool]] = []
        for value, of_part in level:
            seen.add(id(value))
            if isinstance(value, FunctionType):
                yield value, of_part
            elif isinstance(value, list | tuple):
                inner += [(part, of_part) for part in value]
            elif isinstance(value, Mapping):
                inner += [(part, of_part) for part in value.values()]
            elif is_of_library(value) and hasattr(value, "__dict__"):
                # fluxcb stores a reference to the Learner, and the arguments of the constructor, under such names.
                parts = [part for name, part in vars(value).items() if not name.startswith("_fluxcb_")]
                inner += [(part, value is not owner) for part in parts]
        # By `id`, because the values of fields need not be hashable.
        level = [pair for pair in {id(pair[0]): pair for pair in inner}.values() if id(pair[0]) not in seen]


@dataclass(frozen=True)
class _Uses:
    """What the code of a handler uses, including the methods of its callback that it calls.

    Attributes:
        fields: The names that it reads or changes as attributes of its callback.
        names: All names of attributes and globals.
    """

    fields: frozenset[str]
    names: frozenset[str]


def _owner_and_uses(handler: BoundHandler) -> tuple[Any, _Uses]:
    owner = getattr(handler.function, "__self__", None)
    return owner, _uses_of(owner, handler.function)


def _uses_of(owner: object, method: Any) -> _Uses:
    code = getattr(inspect.unwrap(method), "__code__", None)
    return _uses(type(owner), code) if isinstance(code, CodeType) else _Uses(frozenset(), frozenset())


@functools.lru_cache(maxsize=512)  # reading the instructions of a function takes a millisecond
def _uses(cls: type, code: CodeType) -> _Uses:
    fields, names, codes = set[str](), set[str](), [code]
    for method in codes:  # grows in the loop
        # The first variable of a method is its instance, under any name.
        own = set(attributes_of(method, method.co_varnames[:1]))
        fields |= own
        names |= names_in(method)
        members = (getattr(cls, name, None) for name in own)
        functions = (member.fget if isinstance(member, property) else member for member in members)
        called = [inspect.unwrap(function).__code__ for function in functions if inspect.isfunction(function)]
        # Without repetitions, because methods can call each other.
        codes += [inner for inner in dict.fromkeys(called) if inner not in codes]
    return _Uses(frozenset(fields), frozenset(names))


def warn_about_changed(fields: Iterable[TracedField]) -> list[TracedField]:
    """Warn about each field whose content has changed since it was traced, and return the unchanged fields."""
    unchanged = []
    for field in fields:
        # Only unchanged fields are checked again, so each change causes one warning.
        if not field.changed:
            unchanged.append(field)
            continue
        now = field.now
        change, used = "has changed", "the earlier value"
        # Other contents are copies in a form for comparisons, such as the bytes of an array.
        if isinstance(field.content, int | float) and isinstance(now, int | float):
            change, used = f"has changed from {field.content!r} to {now!r}", repr(field.content)
        warn_user(
            f"{field.label} {change}, but {field.reader} still uses {used}, which is a constant of the compiled step. "
            f"{field.advice}",
            UserWarning,
        )
    return unchanged


_CLOCKS = (time.time, time.time_ns, time.monotonic, time.perf_counter, time.process_time, datetime.datetime.now)


def _clock_in(function: Any) -> str | None:
    """Return the name of the first clock that a function reads, such as `time.time`, or None.

    Functions that it defines are left out, because `jax.debug.callback` can call them at each step.
    """
    code = getattr(function, "__code__", None)
    # Reading the instructions takes long, and hardly any handler has one of these names.
    if not isinstance(code, CodeType) or not {clock.__name__ for clock in _CLOCKS}.intersection(code.co_names):
        return None
    value, name = None, ""
    for instruction in dis.get_instructions(code):
        if instruction.opname == "LOAD_GLOBAL":
            name = instruction.argval
            value = function.__globals__.get(name)
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and any(
            value is owner for owner in (time, datetime, datetime.datetime)
        ):
            name += f".{instruction.argval}"
            value = getattr(value, instruction.argval, None)
        else:
            value = None
        # The type first, because `in` compares with `==`, which a global NumPy array answers with an array.
        if isinstance(value, BuiltinFunctionType) and value in _CLOCKS:
            return name
    return None


def _numpy_random() -> bytes:
    return pickle.dumps(np.random.get_state(legacy=False))  # any bit generator; its arrays cannot be compared by `==`


def _fields(owner: object) -> dict[str, Any]:
    """Return the fields of an object, or the variables of a function. A field may have its value in the class."""
    if isinstance(owner, FunctionType | functools.partial):
        return variables_of(owner)
    return {**vars(type(owner)), **getattr(owner, "__dict__", {})}


def _contents(owner: object, uses: _Uses) -> dict[str, Any]:
    """Return the known contents of the fields of an object that some code uses."""
    fields = _fields(owner)
    contents = {name: content_of(fields[name], uses.names) for name in uses.fields if name in fields}
    return {name: content for name, content in contents.items() if content is not UNKNOWN}


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> set[str]:
    known = {name: (before[name], content) for name, content in after.items() if name in before}
    return {name for name, (a, b) in known.items() if a is not b and a != b}  # the same NaN is not equal to itself
