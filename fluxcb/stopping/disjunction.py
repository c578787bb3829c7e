"""`Disjunction`: stop as soon as one of several criteria says so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fluxcb._errors import DeclarationError
from fluxcb.stopping.criterion import Criterion, Mode, State

__all__ = ["Disjunction"]


@dataclass(frozen=True, init=False)
class Disjunction(Criterion):
    """Stop where any of the criteria does; `a | b` is `Disjunction(a, b)`.

    Disjunctions inside are taken apart and a criterion that occurs twice is kept once. Without criteria it never stops.

    Args:
        *criteria: Criteria.

    Attributes:
        criteria: They.

    Raises:
        DeclarationError: One of them is no criterion.

    Example:
        >>> from fluxcb.stopping import InvalidValue, NumberLimit, stopping_time
        >>> either = NumberLimit(4) | InvalidValue()
        >>> stopping_time(either, [3.0, 2.0, float("nan")]), stopping_time(either, [3.0, 2.0, 1.0, 0.5])
        (3, 4)

    Source:
        EarlyStopping.jl, `Disjunction`.
    """

    criteria: tuple[Criterion, ...]

    def __init__(self, *criteria: Criterion) -> None:
        flat: list[Criterion] = []
        for criterion in criteria:
            if not isinstance(criterion, Criterion):
                raise DeclarationError(
                    f"`Disjunction` takes criteria, not {criterion!r}.",
                    fix="e.g. `Disjunction(GL(2), TimeLimit(60))`",
                )
            flat += criterion.criteria if isinstance(criterion, Disjunction) else (criterion,)
        object.__setattr__(self, "criteria", tuple(c for i, c in enumerate(flat) if c not in flat[:i]))

    @property
    def needs_training(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]  # depends on the parts
        """Whether one of them needs training losses."""
        return any(criterion.needs_training for criterion in self.criteria)

    def _states(self, state: State) -> list[Any]:
        return [None] * len(self.criteria) if state is None else state

    def start(self, state: State) -> State:
        """Return the states with which a training begins or goes on."""
        return [c.start(s) for c, s in zip(self.criteria, self._states(state), strict=True)]

    def update(self, state: State, loss: float, training: bool = False) -> State:
        """Return the state of each after one more loss."""
        return [c.update(s, loss, training) for c, s in zip(self.criteria, self._states(state), strict=True)]

    def done(self, state: State) -> bool:
        """Tell whether one of them is done."""
        return any(c.done(s) for c, s in zip(self.criteria, self._states(state), strict=True))

    def message(self, state: State) -> str:
        """Say why those that are done are."""
        parts = zip(self.criteria, self._states(state), strict=True)
        return "; ".join(c.message(s) for c, s in parts if c.done(s))

    def with_mode(self, mode: Mode) -> Disjunction:
        """Return the disjunction of the same criteria with another mode."""
        return Disjunction(*(criterion.with_mode(mode) for criterion in self.criteria))

    def __repr__(self) -> str:
        return f"Disjunction({', '.join(map(repr, self.criteria))})"
