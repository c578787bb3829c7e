"""Checks of one item of a callbacks list: it is a callback, and its fields and constructors are right."""

from __future__ import annotations

import dis
import inspect
import itertools
from collections.abc import Sequence
from typing import Any

from fluxcb._declare.callback import DECLARATIONS, Callback
from fluxcb._declare.handlers import is_handler
from fluxcb._declare.signatures import example_call, names_in, source_of
from fluxcb._errors import DeclarationError
from fluxcb._tracebacks import warn_user

__all__ = ["check_instance"]

_METHODS = frozenset(("handlers", *DECLARATIONS))

# How to use a function, which is no callback: `callbacks=[accuracy]` is a common mistake.
_FUNCTIONS = (
    "for a metric, write `Metrics(function)`",
    "for any other function, write `CustomCallback(function, StepEnd)`",
)


def check_instance(callback: Any) -> None:
    """Check an item of a callbacks list.

    Raises:
        DeclarationError: It is not a callback instance, a field has the name of a method that fluxcb calls, or its
            constructor does not call that of its base class.
    """
    if not isinstance(callback, Callback):
        hint = example_call(callback) if isinstance(callback, type) and issubclass(callback, Callback) else None
        shown = f"the class `{callback.__name__}`" if isinstance(callback, type) else repr(callback)
        raise DeclarationError(
            f"The callbacks list contains {shown}, which is not a callback instance.",
            fix=[f"write `{hint}`"] if hint else _how_to_list(callback),
        )
    cls = type(callback)
    fields = vars(callback)
    for name in _METHODS.intersection(fields):
        # A function in a field is called like the method, so it works.
        if not callable(fields[name]):
            raise DeclarationError(
                f"A `{cls.__name__}` has a field `{name}`, a {type(fields[name]).__name__}, but `{name}` is a method "
                "of every callback.",
                where=_constructor(cls),
                why="fluxcb calls this method, and the field hides it",
                fix=f"rename the field, e.g. to `self.my_{name}`",
            )
    constructors = [base for base in cls.__mro__ if inspect.isfunction(vars(base).get("__init__"))]
    for first, base in itertools.pairwise(constructors):
        # A base class of the user may have fields that the subclass does not need.
        if not base.__module__.startswith("fluxcb.") or first.__module__.startswith("fluxcb."):
            continue
        needed = _fields_set(vars(base)["__init__"])
        names = inspect.unwrap(vars(first)["__init__"]).__code__.co_names
        if "__init__" not in names and needed and not needed & fields.keys():
            parameters = list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]
            required = ", ".join(p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_POSITIONAL)
            fix = f"write `super().__init__({required})` in `{first.__name__}.__init__`"
            if any(p.kind is p.VAR_POSITIONAL for p in parameters):  # e.g. EarlyStopping needs at least one criterion
                fix = f"call `super().__init__` in `{first.__name__}.__init__`, with the arguments of `{base.__name__}`"
            raise DeclarationError(
                f"`{first.__name__}.__init__` does not call the constructor of its base class, `{base.__name__}`.",
                where=_constructor(first),
                why=f"only that constructor sets the fields that `{base.__name__}` needs",
                fix=fix,
            )
    for method in ("state_dict", "load_state_dict"):
        _warn_of_lost_state(cls, method)


def _warn_of_lost_state(cls: type, method: str) -> None:
    """Warn if a class of the user replaces the saved state of a callback of fluxcb instead of extending it."""
    defined = [base for base in cls.__mro__ if inspect.isfunction(vars(base).get(method))]
    for own, base in itertools.pairwise(defined):
        # The methods of `Callback` itself save nothing.
        if own.__module__.startswith("fluxcb.") or not base.__module__.startswith("fluxcb.") or base is Callback:
            continue
        if method not in names_in(inspect.unwrap(vars(own)[method]).__code__):
            extended = (
                "return {**super().state_dict(), ...}" if method == "state_dict" else "super().load_state_dict(state)"
            )
            warn_user(
                f"`{own.__name__}.{method}` does not call that of `{base.__name__}`, so a resumed run loses what "
                f"`{base.__name__}` saves. Write `{extended}` in `{own.__name__}.{method}`.",
                UserWarning,
            )


def _how_to_list(item: Any) -> Sequence[str]:
    """Return what to write instead of an item of a callbacks list that is not a callback."""
    if isinstance(item, list | tuple) and any(isinstance(part, Callback) for part in item):
        return ["unpack its callbacks into the list: `callbacks=[*group, ...]`"]
    # By name, because the declarations do not import the library.
    if any(cls.__name__ == "LoggerBackend" for cls in type(item).__mro__):
        return ["write `Monitors(backend)`"]
    if item is None:
        return ["leave it out; for an optional callback, write `callbacks=[*([callback] if condition else [])]`"]
    if is_handler(item):
        return ["make it a method of a callback: `class MyCallback(Callback):`, and list `MyCallback()`"]
    cls = item if isinstance(item, type) else type(item)
    if any(map(is_handler, vars(cls).values())):
        return [f"derive the class from Callback: `class {cls.__name__}(Callback):`, and list `{cls.__name__}()`"]
    if getattr(type(item), "_fields", ()) == ("init", "update"):  # an Optax transformation
        return ["chain it with the optimizer: `optax.chain(transformation, optimizer)`"]
    return _FUNCTIONS


def _fields_set(constructor: Any) -> set[str]:
    """Return the attributes that a constructor assigns to `self`."""
    code = inspect.unwrap(constructor).__code__
    instructions = list(dis.get_instructions(code))
    return {
        later.argval
        for earlier, later in itertools.pairwise(instructions)
        if later.opname == "STORE_ATTR" and code.co_varnames[:1] == (_last(earlier.argval),)
    }


def _last(argval: Any) -> Any:
    return argval[-1] if isinstance(argval, tuple) and argval else argval  # two names in one instruction (Python 3.13)


def _constructor(cls: type) -> str:
    function = vars(cls).get("__init__")
    place = f"  {source_of(inspect.unwrap(function))}" if inspect.isfunction(function) else ""
    return f"{cls.__name__}.__init__{place}" if place else f"{cls.__module__}.{cls.__qualname__}"
