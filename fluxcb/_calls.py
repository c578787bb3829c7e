"""Calls from the user's code: wrong arguments are explained, and tracebacks end in the user's line.

Decorate public functions and methods with `entry_point`, and derive public classes from `Constructed`.
"""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from fluxcb._errors import DeclarationError
from fluxcb._keyword_fixes import Fix, fix_of, own_fix
from fluxcb._tracebacks import VARIABLE, remove_own_frames

__all__ = ["Constructed", "entry_point"]

P = ParamSpec("P")
R = TypeVar("R")

_MARK = "__fluxcb_entry_point__"
_WRAPPED = "__fluxcb_constructors_wrapped__"


@overload
def entry_point(function: Callable[P, R], /) -> Callable[P, R]: ...
@overload
def entry_point(*, fixes: Mapping[str, Fix]) -> Callable[[Callable[P, R]], Callable[P, R]]: ...
def entry_point(function: Callable[P, R] | None = None, /, *, fixes: Mapping[str, Fix] | None = None) -> Any:
    """Wrap a public function so that wrong arguments are explained and fluxcb's frames are removed from tracebacks.

    A call that does not match the signature raises a DeclarationError with a fix instead of Python's TypeError. All
    other exceptions stay the same, with the same notes, cause and context. A correct call costs only one additional
    Python call, because the signature is inspected only after a TypeError.

    Args:
        function: A function or method that users call.
        fixes: For each argument that is missing or that the function does not have, the fix to suggest. The key is the
            name of the argument, `*` for arguments that were passed by position, or `*numbers` if all of these are
            numbers. A fix is a text, or a function that returns it; see `Fix`.

    Returns:
        The wrapped function; a decorator if only `fixes` is given.
    """
    if function is None:
        return lambda decorated: _wrapped(decorated, fixes or {})
    return _wrapped(function, {})


def _wrapped(function: Callable[P, R], fixes: Mapping[str, Fix]) -> Callable[P, R]:
    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except BaseException as error:
            mismatch = _mismatch(function, args, kwargs, fixes) if _was_not_entered(error) else None
            if mismatch is None:
                _remove_frames(error)
                raise  # a bare `raise` keeps the modified traceback and does not add this frame
        try:
            raise mismatch
        except DeclarationError:
            _remove_frames(mismatch)
            raise

    vars(call)[_MARK] = True
    return call


def _was_not_entered(error: BaseException) -> bool:
    """Return whether the only frame is that of the wrapper, because the arguments do not match the signature."""
    return isinstance(error, TypeError) and error.__traceback__ is not None and error.__traceback__.tb_next is None


def _remove_frames(error: BaseException) -> None:
    if os.environ.get(VARIABLE) != "full":
        remove_own_frames(error)


def _wrap_constructors(cls: Any) -> None:
    """Explain wrong arguments of the constructors of a class and of its base classes."""
    for base in cls.__mro__:
        constructor = vars(base).get("__init__")
        is_own = inspect.isfunction(constructor) and issubclass(base, Constructed)
        if is_own and not hasattr(constructor, _MARK):
            base.__init__ = entry_point(constructor)
    setattr(cls, _WRAPPED, True)


class Constructed:
    """Base class of public classes, which explains wrong arguments of their constructors as `entry_point` does.

    The first call of a class wraps its constructors. A metaclass could do the same, but it would conflict with the
    metaclasses of users' classes, and `__init_subclass__` would miss the constructors that `dataclass` adds.
    """

    def _record_arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Do nothing; callbacks record the arguments of their constructor."""

    # pytest takes a class for a test by its name (`TestPhase`), and warns that it cannot call one with a `__new__`.
    __test__ = False

    if not TYPE_CHECKING:  # type checkers must see the constructors of the subclasses

        @entry_point
        def __new__(cls, *args: Any, **kwargs: Any) -> Any:
            if _WRAPPED not in vars(cls):
                _wrap_constructors(cls)
            made = cls._created(super().__new__, args, kwargs)
            if isinstance(made, cls):
                made._record_arguments(args, kwargs)
            return made

        @classmethod
        def _created(cls, create: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
            if create is not object.__new__ or cls.__new__ is not Constructed.__new__:
                return create(cls, *args, **kwargs)
            if (args or kwargs) and cls.__init__ is object.__init__:
                raise _mismatch(_without_arguments, (cls, *args), kwargs, {})
            try:
                return create(cls)
            except TypeError as error:  # an abstract class
                raise TypeError(*error.args) from None

        def __init_subclass__(cls, **kwargs: Any) -> None:
            super().__init_subclass__(**kwargs)
            create = vars(cls).get("__new__")  # Python calls it before the method above could wrap it
            if isinstance(create, staticmethod):
                cls.__new__ = staticmethod(entry_point(create.__func__))

        # The signature that `inspect.signature` shows for a class without a constructor.
        __new__.__signature__ = inspect.Signature([inspect.Parameter("cls", inspect.Parameter.POSITIONAL_ONLY)])


def _without_arguments(cls: type) -> None:
    """Provide the signature of a class without a constructor."""


def _mismatch(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], fixes: Mapping[str, Fix]
) -> DeclarationError | None:
    """Return the error for a call that does not match a function's signature, or None if it matches."""
    parameters = list(inspect.signature(function).parameters.values())
    if _is_method(function):
        parameters, given = parameters[1:], args[1:]  # without `self` or `cls`
    else:
        given = args
    owner = _called(function, args)
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    by_position = [p.name for p in named if p.kind is not p.KEYWORD_ONLY]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)
    any_name = any(p.kind is p.VAR_KEYWORD for p in parameters)
    by_name = [p.name for p in named if p.kind is not p.POSITIONAL_ONLY]
    unknown = [] if any_name else [name for name in kwargs if name not in by_name]
    twice = [name for name in by_position[: len(given)] if name in kwargs and name in by_name]
    missing = [p.name for p in named if p.default is p.empty and p.name not in kwargs]
    missing = [name for name in missing if name not in by_position[: len(given)]]
    why = f"it takes {', '.join(map(_shown, parameters)) or 'no arguments'}"
    only_numbers = all(isinstance(value, int | float) for value in given)
    positional = own_fix("*numbers", kwargs, fixes) if only_numbers else None
    positional = positional or own_fix("*", kwargs, fixes)
    if unknown:
        names = " and ".join(f"`{name}`" for name in unknown)
        what = f"`{owner}` has no argument{'s' if len(unknown) > 1 else ''} {names}."
        known = [name for name in by_name if name not in by_position[: len(given)]]
        suggested = dict.fromkeys(fix_of(name, kwargs, known, rest, fixes) for name in unknown)
        if all(fix.startswith("leave out") for fix in suggested):
            suggested |= dict.fromkeys(f"pass `{name}`" for name in missing)
        return DeclarationError(what, why=why, fix=", and ".join(sorted(suggested, key=_has_explanation)))
    if twice:
        what = f"`{owner}` was given `{twice[0]}` twice: by position and by name."
        return DeclarationError(what, why=why, fix=positional or f"leave out one of the two `{twice[0]}`")
    if rest is None and len(given) > len(by_position):
        takes = f"{len(by_position) or 'no'} argument{'s' if len(by_position) != 1 else ''} by position"
        others = [p.name for p in named if p.kind is p.KEYWORD_ONLY][: len(given) - len(by_position)]
        call = f"`{owner}({', '.join([*by_position, *(f'{name}=...' for name in others)])})`"
        what = f"`{owner}` takes {takes}, and was given {len(given)}."
        return DeclarationError(
            what, why=why, fix=positional or (f"pass the others by name: {call}" if others else f"write {call}")
        )
    if missing:
        call = ", ".join(
            f"{p.name}=..." if p.kind is p.KEYWORD_ONLY else _shown(p) for p in parameters if p.default is p.empty
        )
        what = f"`{owner}` was not given {' and '.join(f'`{name}`' for name in missing)}."
        return DeclarationError(what, why=why, fix=own_fix(missing[0], kwargs, fixes) or f"write `{owner}({call})`")
    return None


def _has_explanation(fix: str) -> bool:
    return "; " in fix


def _shown(parameter: inspect.Parameter) -> str:
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}
    return stars.get(parameter.kind, "") + parameter.name


def _is_method(function: Callable[..., Any]) -> bool:
    return function is _without_arguments or "." in function.__qualname__.rpartition("<locals>.")[2]


def _called(function: Callable[..., Any], args: tuple[Any, ...]) -> str:
    """Return the name of the called function or class. A class can inherit its constructor and its methods."""
    if function is _without_arguments:
        return args[0].__name__
    if not _is_method(function):
        return function.__name__
    cls = args[0] if isinstance(args[0], type) else type(args[0])
    if function.__name__ not in ("__init__", "__new__"):
        return f"{cls.__name__}.{function.__name__}"
    owner = function.__qualname__.split(".")[-2]
    is_own = inspect.unwrap(getattr(cls, function.__name__)) is function  # otherwise a subclass called it
    return cls.__name__ if is_own else owner
