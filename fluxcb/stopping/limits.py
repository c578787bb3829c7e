"""Criteria that do not compare values over time: a number of values, a duration, a threshold, an invalid value."""

from __future__ import annotations

import math
from dataclasses import dataclass
from time import monotonic

from fluxcb._errors import DeclarationError
from fluxcb.stopping.criterion import ComparingCriterion, Criterion, State, above_zero, count_of_epochs, whole

__all__ = ["InvalidValue", "Never", "NumberLimit", "Threshold", "TimeLimit"]


@dataclass(frozen=True, repr=False)
class Never(Criterion):
    """Never stop.

    Example:
        >>> from fluxcb.stopping import stopping_time
        >>> stopping_time(Never(), [1.0, 2.0, float("nan")])
        0

    Source:
        EarlyStopping.jl, `Never`.
    """

    def update(self, state: State, loss: float, training: bool = False) -> State:
        """Return None, because this criterion needs no state."""

    def done(self, state: State) -> bool:
        """Return False."""
        return False


@dataclass(frozen=True, repr=False)
class InvalidValue(Criterion):
    """Stop at the first value that is NaN or infinite, including training losses.

    Example:
        >>> from fluxcb.stopping import stopping_time
        >>> stopping_time(InvalidValue(), [2.0, 1.0, float("inf"), 0.5])
        3

    Source:
        EarlyStopping.jl, `InvalidValue`.
    """

    def update(self, state: State, loss: float, training: bool = False) -> State:
        """Return the first invalid value, as text because JSON has no NaN."""
        return state if state is not None or math.isfinite(loss) else str(float(loss))

    def done(self, state: State) -> bool:
        """Return whether a value was invalid."""
        return state is not None

    def message(self, state: State) -> str:
        """Return the reason, which names the invalid value."""
        return f"the value is {state}"


@dataclass(frozen=True, repr=False)
class NumberLimit(Criterion):
    """Stop after `n` values.

    Args:
        n: Maximum number of out-of-sample values.

    Raises:
        DeclarationError: `n` is not an integer of at least 1.

    Example:
        >>> from fluxcb.stopping import stopping_time
        >>> stopping_time(NumberLimit(3), [5.0, 4.0, 3.0, 2.0])
        3

    Source:
        EarlyStopping.jl, `NumberLimit`.
    """

    n: int = 100

    def __post_init__(self) -> None:
        whole(self.n, "`n` of `NumberLimit` (values)")

    def update(self, state: State, loss: float, training: bool = False) -> State:
        """Return the number of values."""
        return state if training else (state or 0) + 1

    def done(self, state: State) -> bool:
        """Return whether the number of values has reached the limit."""
        return state is not None and state >= self.n

    def message(self, state: State) -> str:
        """Return the reason, which names the number of values."""
        return f"{count_of_epochs(state)} with a value (limit {self.n})"


@dataclass(frozen=True, repr=False)
class Threshold(ComparingCriterion):
    """Stop at the first value that is better than a threshold: below it, or above it with `mode="max"`.

    Args:
        value: The threshold. A value that equals the threshold does not stop.
        mode: Whether low (`min`) or high (`max`) values are good.

    Raises:
        DeclarationError: `value` is not a number, or `mode` is unknown.

    Example:
        >>> from fluxcb.stopping import stopping_time
        >>> stopping_time(Threshold(2.5), [12.0, 32.0, 3.0, 2.0, 5.0])
        4
        >>> stopping_time(Threshold(0.9, mode="max"), [0.5, 0.9, 0.95])
        3

    Source:
        EarlyStopping.jl, `Threshold`.
    """

    value: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.value, bool) or not isinstance(self.value, int | float) or math.isnan(self.value):
            raise DeclarationError(
                f"`value` of `Threshold` must be a number, not {self.value!r}.", fix="write e.g. `Threshold(0.1)`"
            )

    def update(self, state: State, loss: float, training: bool = False) -> State:
        """Return the latest value."""
        return state if training else float(loss)

    def done(self, state: State) -> bool:
        """Return whether the latest value is better than the threshold."""
        return state is not None and self.better(state, self.value)

    def message(self, state: State) -> str:
        """Return the reason, which names the value and the threshold."""
        return f"{state:.6g} is {'below' if self.mode == 'min' else 'above'} {self.value:.6g}"


@dataclass(frozen=True, repr=False)
class TimeLimit(Criterion):
    """Stop at the first value after a duration (seconds; EarlyStopping.jl uses hours).

    The clock starts at `start`, or at the first value, and measures the duration of the training. After a save and a
    resume, `start` continues from the duration at the last value. Unlike the other criteria, this one does not depend
    on the losses.

    Args:
        seconds: The duration (seconds).

    Raises:
        DeclarationError: `seconds` is not a finite number above 0.

    Example:
        >>> from fluxcb.stopping import stopping_time
        >>> stopping_time(TimeLimit(3600), [3.0, 2.0, 1.0])
        0

    Source:
        EarlyStopping.jl, `TimeLimit`.
    """

    seconds: float = 1800.0

    def __post_init__(self) -> None:
        above_zero(self.seconds, "`seconds` of `TimeLimit`")

    def start(self, state: State) -> State:
        """Start the clock, or continue it after a resume."""
        return {"elapsed": 0.0 if state is None else state["elapsed"], "at": monotonic()}

    def update(self, state: State, loss: float, training: bool = False) -> State:
        """Return the elapsed duration (seconds), and the time at which it was measured."""
        now = monotonic()
        if state is None:
            return {"elapsed": 0.0, "at": now}
        return {"elapsed": state["elapsed"] + now - state["at"], "at": now}

    def done(self, state: State) -> bool:
        """Return whether the limit had passed at the last value."""
        return state is not None and state["elapsed"] > self.seconds

    def message(self, state: State) -> str:
        """Return the reason, which names the duration and the limit."""
        return f"{state['elapsed']:.1f} s have passed (limit {self.seconds:g} s)"
