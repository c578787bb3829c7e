"""Warnings about a handler of a class and an inherited handler of another name of which only one runs at a moment."""

from __future__ import annotations

import inspect
from collections.abc import Iterable

from fluxcb._declare.handlers import Handler
from fluxcb._tracebacks import warn_user

__all__ = ["warn_about_shadowed"]


def warn_about_shadowed(
    owner: type, own: Iterable[Handler], cls: type, rows: Iterable[Handler], inherited: Iterable[Handler]
) -> None:
    """Warn if a handler of a class and an inherited handler of another name share a moment.

    A callback has at most one handler at each moment, so only the more specific one runs there, and the author of a
    subclass may not know which events the base class handles. There is no warning if the handler that runs refers to
    the other by name, e.g. to call it.

    Args:
        owner: The class whose table is being filled.
        own: The handlers that it defines.
        cls: The owner, or one of its base classes.
        rows: The handlers that `cls` defines.
        inherited: The handlers of the classes after `cls` in the MRO of the owner.
    """
    if "handlers" in vars(owner):  # it chooses its handlers itself
        return
    # A handler that is set to None is removed. `on.register` replaces handlers on purpose.
    mine, theirs = ([h for h in hs if not h.function and getattr(owner, h.name, None)] for hs in (rows, inherited))
    for handler in mine:
        for base in theirs:
            # If neither covers the other, a moment that both fit is ambiguous, which is an error.
            if handler.name == base.name or not (_covers(base, handler) or _covers(handler, base)):
                continue
            runs, other = (handler, base) if _covers(base, handler) else (base, handler)
            calls_both = any(
                (o.event, o.phase) == (runs.event, runs.phase) and {runs.name, other.name} <= {*_names_in(o, owner)}
                for o in own
            )
            if not calls_both and other.name not in _names_in(runs, owner):
                _warn(owner, cls, runs, other)


def _covers(a: Handler, b: Handler) -> bool:
    """Return whether a handler fits all moments of another."""
    return issubclass(b.event, a.event) and issubclass(b.phase, a.phase)


def _names_in(handler: Handler, owner: type) -> tuple[str, ...]:
    """Return the names that the code of a handler uses."""
    code = getattr(inspect.unwrap(getattr(owner, handler.name)), "__code__", None)
    return code.co_names if code else ()


def _warn(owner: type, cls: type, runs: Handler, other: Handler) -> None:
    classes = [next(c for c in owner.__mro__ if h.name in vars(c)) for h in (runs, other)]
    if any({*classes} <= {*base.__mro__} for base in owner.__bases__):
        return  # the warning came when this base class was defined
    if cls is owner is classes[0]:
        fix = f"To run both, call `self.{other.name}(event, phase, learner)` in `{runs.name}`."
        if _covers(runs, other):  # with other pairs, the same name would also replace the handler at other moments
            fix += f" To replace it, rename `{runs.name}` to `{other.name}`."
    else:
        both = f"def both(self, event: {runs.event.__name__}, phase: {runs.phase.__name__}, learner):"
        calls = " and ".join(f"`self.{h.name}(event, phase, learner)`" for h in (runs, other))
        fix = f"To run both, write `@on` above `{both}` in `{owner.__name__}`, and call {calls} in it."
    names = [f"`{c.__name__}.{h.name}`" for c, h in zip(classes, (runs, other), strict=True)]
    warn_user(
        f"At {runs.title()}, `{owner.__name__}` runs {names[0]} instead of {names[1]}, because a callback has one "
        f"handler at each moment. {fix}",
        UserWarning,
    )
