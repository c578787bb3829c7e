"""`Criterion`, the base class of stopping criteria, and its combinations."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, ClassVar, Literal, cast

from fluxcb._calls import Constructed
from fluxcb._errors import DeclarationError

__all__ = ["ComparingCriterion", "Criterion", "Disjunction", "Mode", "State", "above_zero", "count_of_epochs", "whole"]

State = Any
"""The state of a criterion: None at first, then plain data that JSON can hold."""

Mode = Literal["min", "max"]


class Criterion(Constructed):
    """Base class of stopping criteria. A subclass defines `update` and `done`.

    A loss is either *out-of-sample* (from validation) or a *training* loss. Criteria ignore training losses unless
    documented otherwise. `a | b` stops when `a` or `b` stops.

    Attributes:
        needs_training: Whether the criterion requires training losses.

    Example:
        >>> from dataclasses import dataclass
        >>> from fluxcb.stopping import stopping_time
        >>> @dataclass(frozen=True)
        ... class Odd(Criterion):
        ...     def update(self, state, loss, training=False):
        ...         return state if training else loss
        ...
        ...     def done(self, state):
        ...         return state is not None and state % 2 == 1
        >>> stopping_time(Odd(), [4.0, 2.0, 1.0, 2.0])
        3
    """

    needs_training: ClassVar[bool] = False

    def start(self, state: State) -> State:
        """Return the state at the start or resume of a training. Only criteria with a clock override this method."""
        return state

    def update(self, state: State, loss: float, training: bool = False) -> State:
        """Return the state after one more loss.

        Args:
            state: The previous state, None at first. It is not changed.
            loss: The loss.
            training: Whether the loss is a training loss.
        """
        raise NotImplementedError(f"{type(self).__name__} does not define how it is updated")

    def done(self, state: State) -> bool:
        """Return whether training should stop."""
        raise NotImplementedError(f"{type(self).__name__} does not define when it is done")

    def message(self, state: State) -> str:
        """Return the reason to stop, for a state for which `done` is true. One value counts as one epoch."""
        del state
        return f"{self!r} is met"

    def with_mode(self, mode: Mode) -> Criterion:
        """Return the same criterion for values of which low (`min`) or high (`max`) ones are good."""
        del mode
        return self

    def with_default_mode(self, mode: Mode) -> Criterion:
        """Return the same criterion with this mode, unless a mode was passed to its constructor."""
        del mode
        return self

    def __or__(self, other: object) -> Disjunction:
        if not isinstance(other, Criterion):
            return NotImplemented
        return Disjunction(self, other)

    def __repr__(self) -> str:
        own = fields(self) if is_dataclass(self) else ()
        changed = [(f.name, getattr(self, f.name)) for f in own if getattr(self, f.name) != f.default]
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in changed)})"


@dataclass(frozen=True, init=False)
class Disjunction(Criterion):
    """Stop when any of several criteria stops. `a | b` is `Disjunction(a, b)`.

    Nested disjunctions are flattened, and duplicate criteria are removed. Without criteria, it never stops.

    Args:
        *criteria: Criteria.

    Attributes:
        criteria: The flattened criteria without duplicates.

    Raises:
        DeclarationError: One of them is not a criterion.

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
                    fix="write e.g. `Disjunction(GL(2), TimeLimit(60))`",
                )
            flat += criterion.criteria if isinstance(criterion, Disjunction) else (criterion,)
        object.__setattr__(self, "criteria", tuple(c for i, c in enumerate(flat) if c not in flat[:i]))

    @property
    def needs_training(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]  # depends on the parts
        """Whether one of the criteria requires training losses."""
        return any(criterion.needs_training for criterion in self.criteria)

    def _states(self, state: State) -> list[Any]:
        return [None] * len(self.criteria) if state is None else state

    def start(self, state: State) -> State:
        """Return the states of all criteria at the start or resume of a training."""
        return [c.start(s) for c, s in zip(self.criteria, self._states(state), strict=True)]

    def update(self, state: State, loss: float, training: bool = False) -> State:
        """Return the states of all criteria after one more loss."""
        return [c.update(s, loss, training) for c, s in zip(self.criteria, self._states(state), strict=True)]

    def done(self, state: State) -> bool:
        """Return whether one of the criteria is done."""
        return any(c.done(s) for c, s in zip(self.criteria, self._states(state), strict=True))

    def message(self, state: State) -> str:
        """Return the reasons of the criteria that are done."""
        parts = zip(self.criteria, self._states(state), strict=True)
        return "; ".join(c.message(s) for c, s in parts if c.done(s))

    def with_mode(self, mode: Mode) -> Disjunction:
        """Return the disjunction of the same criteria with another mode."""
        return Disjunction(*(criterion.with_mode(mode) for criterion in self.criteria))

    def with_default_mode(self, mode: Mode) -> Disjunction:
        """Return the disjunction of the same criteria, with this mode for those constructed without a mode."""
        return Disjunction(*(criterion.with_default_mode(mode) for criterion in self.criteria))

    def __repr__(self) -> str:
        return f"Disjunction({', '.join(map(repr, self.criteria))})"


class _DefaultMode(str):
    """The mode of a criterion that was constructed without a mode. It equals the plain string."""

    __slots__ = ()


@dataclass(frozen=True, repr=False)
class ComparingCriterion(Criterion):
    """Base class of criteria that compare values.

    NaN is worse than every number. Equal values are not better than each other.

    Args:
        mode: `min` if low values are good, such as losses, or `max` if high values are good. The default is `min`.
            `EarlyStopping` changes the default to `max` for metrics with a name such as `accuracy`.

    Raises:
        DeclarationError: `mode` is neither `min` nor `max`.
    """

    mode: Mode = field(default=cast("Mode", _DefaultMode("min")), kw_only=True)

    def __post_init__(self) -> None:
        if self.mode not in ("min", "max"):
            raise DeclarationError(
                f'`mode` of `{type(self).__name__}` must be "min" or "max", not {self.mode!r}.',
                why="it determines whether lower or higher values are better",
                fix='leave it out for losses, and write `mode="max"` for accuracies',
            )

    def with_mode(self, mode: Mode) -> ComparingCriterion:
        """Return the same criterion with another mode."""
        return replace(self, mode=mode)

    def with_default_mode(self, mode: Mode) -> ComparingCriterion:
        """Return the same criterion with this mode if it was constructed without a mode."""
        return self.with_mode(mode) if isinstance(self.mode, _DefaultMode) else self

    def better(self, value: float, other: float) -> bool:
        """Return whether a value is better than another value."""
        return self._badness(value) < self._badness(other)

    def _badness(self, value: float) -> tuple[bool, float]:
        return (True, 0.0) if math.isnan(value) else (False, value if self.mode == "min" else -value)


def count_of_epochs(number: int) -> str:
    """Return `1 epoch`, `2 epochs`."""
    return f"{number} epoch{'' if number == 1 else 's'}"


def whole(value: Any, what: str, least: int = 1) -> int:
    """Return `value` if it is an integer of at least `least`.

    Raises:
        DeclarationError: It is not.
    """
    if isinstance(value, bool) or not hasattr(value, "__index__") or operator.index(value) < least:
        raise DeclarationError(
            f"{what} must be a whole number of at least {least}, not {value!r}.",
            fix=f"give an int, e.g. {max(least, 5)}",
        )
    return operator.index(value)


def above_zero(value: Any, what: str) -> float:
    """Return `value` if it is a finite number above 0.

    Raises:
        DeclarationError: It is not.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise DeclarationError(f"{what} must be a finite number above 0, not {value!r}.", fix="give a positive number")
    return value
