"""What a criterion is: an initial state of None, and pure functions of the state."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from fluxcb._errors import DeclarationError

if TYPE_CHECKING:
    from fluxcb.stopping.disjunction import Disjunction

__all__ = ["ComparingCriterion", "Criterion", "Mode", "State", "above_zero", "count_of_epochs", "whole"]

State = Any
"""What a criterion has seen: None at first, then plain data that JSON can hold."""

Mode = Literal["min", "max"]


class Criterion:
    """Base class of criteria: derive, and define `update` and `done`.

    Losses are *out-of-sample* (of a validation) or *training* ones. Criteria ignore training losses unless they say
    otherwise. `a | b` stops where `a` or `b` does.

    Attributes:
        needs_training: Whether it cannot decide without training losses.

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
        """Return the state with which a training begins or goes on; only clocks have anything to do here."""
        return state

    def update(self, state: State, loss: float, training: bool = False) -> State:
        """Return the state after one more loss.

        Args:
            state: The state before, None at first; it is not changed.
            loss: The loss.
            training: Whether it is a training loss.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say how it is updated")

    def done(self, state: State) -> bool:
        """Tell whether it is time to stop."""
        raise NotImplementedError(f"{type(self).__name__} does not say when it is done")

    def message(self, state: State) -> str:
        """Return the reason to stop, for a state for which `done` is true; one value counts as one epoch."""
        del state
        return f"{self!r} is met"

    def with_mode(self, mode: Mode) -> Criterion:
        """Return the same criterion for values of which low (`min`) or high (`max`) ones are good."""
        del mode
        return self

    def __or__(self, other: object) -> Disjunction:
        if not isinstance(other, Criterion):
            return NotImplemented
        from fluxcb.stopping.disjunction import Disjunction

        return Disjunction(self, other)

    def __repr__(self) -> str:
        own = fields(self) if is_dataclass(self) else ()
        given = [(f.name, getattr(self, f.name)) for f in own if getattr(self, f.name) != f.default]
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in given)})"


@dataclass(frozen=True, repr=False)
class ComparingCriterion(Criterion):
    """Base class of criteria that compare values.

    NaN is worse than every number, and equal values are not better than each other.

    Args:
        mode: `min` if low values are good, as losses are; `max` if high ones are.

    Raises:
        DeclarationError: `mode` is neither.
    """

    mode: Mode = field(default="min", kw_only=True)

    def __post_init__(self) -> None:
        if self.mode not in ("min", "max"):
            raise DeclarationError(
                f'`mode` of `{type(self).__name__}` must be "min" or "max", not {self.mode!r}.',
                why="it says whether low or high values are good",
                fix='leave it out for losses, and write `mode="max"` for accuracies',
            )

    def with_mode(self, mode: Mode) -> ComparingCriterion:
        """Return the same criterion with another mode."""
        return replace(self, mode=mode)

    def better(self, value: float, other: float) -> bool:
        """Tell whether a value is better than another one."""
        return self._badness(value) < self._badness(other)

    def _badness(self, value: float) -> tuple[bool, float]:
        return (True, 0.0) if math.isnan(value) else (False, value if self.mode == "min" else -value)


def count_of_epochs(number: int) -> str:
    """Return `1 epoch`, `2 epochs`."""
    return f"{number} epoch{'' if number == 1 else 's'}"


def whole(value: Any, what: str, least: int = 1) -> int:
    """Return `value` if it is a whole number of at least `least`.

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
