"""Views for `learner.cbstate`, `learner.hyperparams` and `learner.data` outside handlers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from fluxcb._calls import entry_point
from fluxcb._declare.access import Write, dotted
from fluxcb._declare.callback import Callback
from fluxcb._declare.state import PROVIDERS
from fluxcb._errors import AccessError, did_you_mean
from fluxcb._run.shared_parts import is_hub

__all__ = ["StateView"]

_WIDTH = 88  # maximum width of a one-line repr (characters)
_SHOWN = 6  # maximum number of names in the description of an entry


class StateView(Mapping[str, Any]):
    """A part of the Learner's state as a mapping whose entries are also attributes.

    Printing it shows a short description of each entry instead of whole arrays.

    Args:
        name: The name of the Learner's attribute, such as `cbstate`.
        entries: The entries.
        assign: Assigns an entry in the Learner, and returns its new value; None if the mapping is read-only. A copy of
            the view (`copy`, `pickle`) is read-only.
    """

    __slots__ = ("_assign", "_entries", "_name")

    _assign: Callable[[str, Any], Any] | None
    _entries: Mapping[str, Any]
    _name: str

    def __init__(self, name: str, entries: Mapping[str, Any], assign: Callable[[str, Any], Any] | None = None) -> None:
        # The class overrides `__setattr__` to assign entries of the state.
        object.__setattr__(self, "_name", name)
        object.__setattr__(self, "_entries", dict(entries))
        object.__setattr__(self, "_assign", assign)

    @entry_point
    def __getitem__(self, name: str) -> Any:
        if name not in self._entries:
            hint = self._hint(str(name))
            # A KeyError, because `get` and `in` of a mapping expect it.
            raise KeyError(f"`learner.{self._name}` has no {name!r}.{hint}")
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    @entry_point
    def __getattr__(self, name: str) -> Any:  # called only for names that are not methods
        if name.startswith("_") or name not in self._entries:
            hint = self._hint(name)
            # An AttributeError, because `hasattr` expects it.
            raise AttributeError(f"`learner.{self._name}` has no `{name}`.{hint}", name=name, obj=self)
        return self._entries[name]

    def _hint(self, name: str) -> str:
        if self._name == "cbstate" and name in PROVIDERS:
            return f" `{PROVIDERS[name]}` creates it if it is among the callbacks."
        return did_you_mean(name, self._entries)

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._entries]

    @entry_point
    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    @entry_point
    def __setitem__(self, name: str, value: Any) -> None:
        if self._assign is None:
            self._refuse(name)
        # The view shows the assigned value without reading the state again.
        object.__setattr__(self, "_entries", {**self._entries, name: self._assign(name, value)})

    @entry_point
    def __delattr__(self, name: str) -> None:
        del self[name]

    @entry_point
    def __delitem__(self, name: str) -> None:
        if self._assign is None:
            self._refuse(name)
        raise AccessError(
            f"`learner.{self._name}.{name}` cannot be deleted.",
            fix=f"assign another value: `learner.{self._name}[{name!r}] = value`",
        )

    def _refuse(self, name: str) -> NoReturn:
        path = self._name, name
        raise AccessError(
            f"`learner.{self._name}` is read-only outside handlers, so `{name}` cannot be changed there.",
            why="it is a new mapping each time it is read, so the change would be lost",
            fix=f"assign `learner.{dotted(path)}` in a handler, and {Callback().how_to_declare(path, Write())}",
        )

    def __reduce__(self) -> tuple[Any, ...]:
        # Without the function, which would tie a pickled copy to this Learner.
        return type(self), (self._name, dict(self._entries))

    def __repr__(self) -> str:
        entries = [f"{name!r}: {_described(value)}" for name, value in self._entries.items()]
        line = f"{{{', '.join(entries)}}}"
        return line if len(line) <= _WIDTH else "{\n    " + ",\n    ".join(entries) + ",\n}"


def _described(value: Any) -> str:
    """Return a short description of a value; numbers and short strings are shown in full."""
    if value is None or isinstance(value, bool | int | float):
        return repr(value)
    kind = type(value).__name__
    if isinstance(value, str):
        return repr(value) if len(value) <= _WIDTH // 2 else f"{kind} of {len(value)} characters"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return f"{value.dtype}[{', '.join(map(str, value.shape))}]"
    if not hasattr(value, "__len__"):
        return kind
    # A hub such as `Monitors` is not a Mapping, but its parts have names.
    if not (isinstance(value, Mapping) or is_hub(value)):
        return f"{kind} of {len(value)}"
    names = list(map(str, value))
    rest = [f"{len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
    return f"{kind} with {', '.join([*names[:_SHOWN], *rest])}" if names else f"empty {kind}"
