"""Checks of one callback instance: its fields, and whether the constructor of its base class ran."""

from __future__ import annotations

import dis
import inspect
import itertools
from typing import Any

from fluxcb._declare.callback import DECLARATIONS, Callback
from fluxcb._declare.signatures import source_of
from fluxcb._errors import DeclarationError

__all__ = ["check_instance"]


def check_instance(callback: Callback) -> None:
    """Check that no field hides a method that fluxcb calls, and that the constructors of base classes ran.

    Raises:
        DeclarationError: A field has the name of such a method, or a constructor does not call that of its base class.
    """
    cls = type(callback)
    fields = vars(callback)
    for name in ("handlers", *DECLARATIONS):
        # A function in a field is called like the method, so it works.
        if name in fields and not callable(fields[name]):
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
            raise DeclarationError(
                f"`{first.__name__}.__init__` does not call the constructor of its base class, `{base.__name__}`.",
                where=_constructor(first),
                why=f"only that constructor sets the fields that `{base.__name__}` needs",
                fix=f"write `super().__init__({required})` in `{first.__name__}.__init__`",
            )


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
