"""`ByPhase`, a mapping from phases to entries that callbacks store in `cbstate`."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any, Generic, TypeVar

from fluxcb._calls import Constructed
from fluxcb._declare.phases import Phase
from fluxcb._errors import DeclarationError, did_you_mean, nearest

__all__ = ["ByPhase"]

T = TypeVar("T")


class ByPhase(Constructed, Generic[T]):
    """A mapping from phases to entries. For a phase without an entry, it returns a new one, such as an empty list.

    A phase is given as an instance, a class or a name. Phases with the same name share an entry. For example,
    `TrainingPhase` and its subclasses are all called `training` by default.

    Args:
        make: Function without arguments that creates an entry. Use a class, so that the mapping can be pickled.
        values: The place of the values by name, if it is another mapping. The error for `val_loss` names it.

    Example:
        >>> from fluxcb.phases import TrainingPhase
        >>> values = ByPhase(list)
        >>> values.entry("training").append(3)
        >>> values[TrainingPhase], values[TrainingPhase()], values["validation"], list(values)
        ([3], [3], [], ['training'])
        >>> values.training
        [3]
    """

    def __init__(self, make: Callable[[], T], *, values: str = "") -> None:
        self.make, self.values = make, values
        self.entries: dict[str, T] = {}

    def entry(self, phase: Phase | type[Phase] | str) -> T:
        """Return the entry of a phase for writing. If the phase has no entry, create one."""
        name = phase.name if isinstance(phase, Phase) else phase if isinstance(phase, str) else _name_of(phase)
        entry = self.entries.get(name)
        if entry is None:
            entry = self.entries[name] = self.make()
        return entry

    def cbstate_part(self, name: str, *, writable: bool) -> T:
        """Return the entry of a phase, for access to `cbstate.<entry>.<name>`."""
        return self.entry(name) if writable else self[name]

    def __getitem__(self, phase: Phase | type[Phase] | str) -> T:
        name = phase if isinstance(phase, str) else _name_of(phase)
        if name in self.entries:
            return self.entries[name]
        if isinstance(phase, str):
            known = {*self.entries, *_phase_names(Phase)}
            # Other names are allowed, such as that of an `InferenceRunner` that has not run yet.
            if name not in known and (meant := _meant(name, known)):
                raise KeyError(f"`{name}` has no entry yet. Did you mean {meant.replace('`[', f'`{self.values}[')}?")
        return self.make()  # reading does not add an entry

    def __getattr__(self, name: str) -> T:  # `values.training`
        # `vars(self)` may be empty, because `copy` and `pickle` call this method before `__init__` has run.
        if not name.startswith("_") and (name in vars(self).get("entries", ()) or name in _phase_names(Phase)):
            return self[name]
        raise AttributeError(f"{type(self).__name__} has no `{name}`.{did_you_mean(name, _phase_names(Phase))}")

    def __contains__(self, phase: object) -> bool:
        return (phase if isinstance(phase, str) else _name_of(phase)) in self.entries

    def __iter__(self) -> Iterator[str]:
        return iter(list(self.entries))

    def __len__(self) -> int:
        return len(self.entries)

    def items(self) -> ItemsView[str, T]:
        """Return the names of phases and their entries."""
        return self.entries.items()

    def state_dict(self) -> dict[str, Any]:
        """Return the entries as plain data, by phase name."""
        return {name: _plain(entry) for name, entry in self.entries.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the entries by what `state_dict` returned."""
        self.entries.clear()
        for name, saved in state.items():
            self.entries[name] = _filled(self.make(), saved)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByPhase) and self.entries == other.entries

    def __hash__(self) -> int:
        raise TypeError("a ByPhase is mutable, so it cannot be hashed")

    def __repr__(self) -> str:
        return f"ByPhase({self.entries!r})"


def _meant(name: str, known: set[str]) -> str:
    """Return the entry that a name such as `validaton`, `validation/loss` or `val_loss` means, or an empty string."""
    phase, _, entry = name.partition("/")
    if not entry:  # the names of Keras
        prefix, _, entry = name.partition("_")
        short = {"val": "validation", "valid": "validation", "eval": "validation", "train": "training"}
        phase, entry = (short[prefix], entry) if prefix in short else (name, "")
    meant = phase if phase in known else nearest(phase, known)
    if not meant:
        return ""
    return f'`["{meant}"]["{entry}"]`' if entry else f"`{meant}`"


def _phase_names(phase: type[Phase]) -> set[str]:
    """Return the names of a phase class and of all its subclasses."""
    return {phase.name}.union(*map(_phase_names, phase.__subclasses__()))


def _filled(entry: Any, saved: Any) -> Any:
    """Load a saved state into a new entry, and return it; the inverse of `_plain`."""
    if hasattr(entry, "load_state_dict"):
        entry.load_state_dict(saved)
    elif is_dataclass(entry):
        if not isinstance(saved, Mapping):  # `update` would accept an empty string or list
            raise TypeError(f"the state of a {type(entry).__name__} is a {type(saved).__name__}, not a mapping")
        vars(entry).update(saved)
    else:
        return saved
    return entry


def _plain(entry: Any) -> Any:
    """Return the state of an entry as plain data."""
    if hasattr(entry, "state_dict"):
        return entry.state_dict()
    return dict(vars(entry)) if is_dataclass(entry) else entry


def _name_of(phase: Any) -> str:
    if isinstance(phase, Phase) or (isinstance(phase, type) and issubclass(phase, Phase)):
        return phase.name
    raise DeclarationError(
        f"{phase!r} is not a phase.", fix="use a phase instance, a phase class or a name such as 'training'"
    )
