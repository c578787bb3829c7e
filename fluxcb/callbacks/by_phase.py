"""`ByPhase`: what callbacks keep for each phase, looked up by instance, class or name."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any, Generic, TypeVar

from fluxcb._declare.phases import Phase
from fluxcb._errors import DeclarationError, did_you_mean

__all__ = ["ByPhase"]

T = TypeVar("T")


class ByPhase(Generic[T]):
    """Map phases to what was kept for them; a phase that never ran has what the factory makes.

    Phases that share a name (`training`: `TrainingPhase` and the training phases derived from it) share an entry.

    Args:
        make: Makes the entry of a phase that has none yet; a class, so that this object can be pickled.

    Example:
        >>> from fluxcb.phases import TrainingPhase
        >>> kept = ByPhase(list)
        >>> kept.entry("training").append(3)
        >>> kept[TrainingPhase], kept[TrainingPhase()], kept["validation"], list(kept)
        ([3], [3], [], ['training'])
        >>> kept.training
        [3]
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self.make = make
        self.entries: dict[str, T] = {}

    def entry(self, phase: Phase | type[Phase] | str) -> T:
        """Return a phase's entry to write into, made now if there is none."""
        name = phase.name if isinstance(phase, Phase) else phase if isinstance(phase, str) else _name_of(phase)
        found = self.entries.get(name)
        if found is None:
            found = self.entries[name] = self.make()
        return found

    def cbstate_part(self, name: str, *, writable: bool) -> T:
        """Return the entry of a phase, for access to `cbstate.<entry>.<name>`."""
        return self.entry(name) if writable else self[name]

    def __getitem__(self, phase: Phase | type[Phase] | str) -> T:
        name = phase if isinstance(phase, str) else _name_of(phase)
        return self.entries[name] if name in self.entries else self.make()  # looking leaves no trace

    def __getattr__(self, name: str) -> T:  # `kept.training`
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
        """Return phase names with their entries."""
        return self.entries.items()

    def state_dict(self) -> dict[str, Any]:
        """Return the entries as plain data, by phase name."""
        return {name: _plain(entry) for name, entry in self.entries.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` returned, in place of what is there."""
        self.entries.clear()
        for name, saved in state.items():
            self.entries[name] = _filled(self.make(), saved)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ByPhase) and self.entries == other.entries

    def __hash__(self) -> int:
        raise TypeError("a ByPhase changes, and cannot be hashed")

    def __repr__(self) -> str:
        return f"ByPhase({self.entries!r})"


def _phase_names(phase: type[Phase]) -> set[str]:
    """Return the names of a phase and of all phases derived from it."""
    return {phase.name}.union(*map(_phase_names, phase.__subclasses__()))


def _filled(made: Any, saved: Any) -> Any:
    if hasattr(made, "load_state_dict"):
        made.load_state_dict(saved)
    elif is_dataclass(made):
        vars(made).update(saved)
    else:
        return saved
    return made


def _plain(entry: Any) -> Any:
    if hasattr(entry, "state_dict"):
        return entry.state_dict()
    return dict(vars(entry)) if is_dataclass(entry) else entry


def _name_of(phase: Any) -> str:
    if isinstance(phase, Phase) or (isinstance(phase, type) and issubclass(phase, Phase)):
        return phase.name
    raise DeclarationError(
        f"{phase!r} is no phase.", fix="look up with a phase instance, a phase class or a name such as 'training'"
    )
