"""Read-only views for `learner.cbstate` and `learner.hyperparams` outside handlers, with entries as attributes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from fluxcb._declare.access import Write, line_to_add
from fluxcb._errors import AccessError, did_you_mean

__all__ = ["StateView"]

_WIDTH = 88  # maximum width of a one-line repr (characters)
_SHOWN = 6  # maximum number of names in the description of an entry


class StateView(Mapping[str, Any]):
    """A part of the Learner's state as a mapping whose entries are also attributes.

    Printing it shows a short description of each entry instead of whole arrays.

    Args:
        name: The name of the Learner's attribute, such as `cbstate`.
        entries: The entries.
    """

    __slots__ = ("_entries", "_name")

    _entries: Mapping[str, Any]
    _name: str

    def __init__(self, name: str, entries: Mapping[str, Any]) -> None:
        object.__setattr__(self, "_name", name)
        object.__setattr__(self, "_entries", entries)

    def __getitem__(self, name: str) -> Any:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __getattr__(self, name: str) -> Any:  # only called for names that are not methods
        if name.startswith("_") or name not in self._entries:
            hint = did_you_mean(name, self._entries)
            raise AttributeError(f"`learner.{self._name}` has no `{name}`.{hint}", name=name, obj=self)
        return self._entries[name]

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *self._entries]

    def __setattr__(self, name: str, value: Any) -> None:
        self._refuse(name)

    def __setitem__(self, name: str, value: Any) -> None:
        self._refuse(name)

    def __delattr__(self, name: str) -> None:
        self._refuse(name)

    def __delitem__(self, name: str) -> None:
        self._refuse(name)

    def _refuse(self, name: str) -> NoReturn:
        access, path = line_to_add((self._name, name), Write()), f"learner.{self._name}.{name}"
        fix = [f"assign `{path}` in a handler of a callback that declares `{access}`"]
        if self._name == "hyperparams":
            example = f"learner.callbacks.add(CustomCallback(function, FitBegin, access={access}))"
            fix.append(f"for the next fit: `{example}`, where `function(learner)` assigns it")
        raise AccessError(
            f"`learner.{self._name}` is read-only outside handlers, and `{name}` is changed there.",
            why="it is a new mapping each time it is read, so the change would be lost",
            fix=fix,
        )

    def __reduce__(self) -> tuple[Any, ...]:
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
    keyed = isinstance(value, Mapping) or hasattr(type(value), "cbstate_part")
    if not keyed:
        return f"{kind} of {len(value)}"
    names = list(map(str, value))
    rest = [f"{len(names) - _SHOWN} more"] if len(names) > _SHOWN else []
    return f"{kind} with {', '.join([*names[:_SHOWN], *rest])}" if names else f"empty {kind}"
