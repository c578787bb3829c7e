"""Criteria that need no history: a number of values, a time, a value itself."""

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
        """Return None: nothing is remembered."""

    def done(self, state: State) -> bool:
        """Return False."""
        return False


@dataclass(frozen=True, repr=False)
class InvalidValue(Criterion):
    """Stop at the first value, also a training loss, that is NaN or infinite.

    Example:
        >>> from fluxcb.stopping import stopping_time
        >>> stopping_time(InvalidValue(), [2.0, 1.0, float("inf"), 0.5])
        3

    Source:
        EarlyStopping.jl, `InvalidValue`.
    """

    def update(self, state: State, loss: float, training: bool = False) -> State:
        """Return the first bad value, as text: JSON has no NaN."""
        return state if state is not None or math.isfinite(loss) else str(float(loss))

    def done(self, state: State) -> bool:
        """Tell whether there was a bad value."""
        return state is not None

    def message(self, state: State) -> str:
        """Return the reason, which names the invalid value."""
        return f"the value is {state}"


@dataclass(frozen=True, repr=False)
class NumberLimit(Criterion):
    """Stop after `n` values.

    Args:
        n: How many out-of-sample values there may be.

    Raises:
        DeclarationError: `n` is no whole number of at least 1.

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
        """Return how many values there were."""
        return state if training else (state or 0) + 1

    def done(self, state: State) -> bool:
        """Tell whether there were enough."""
        return state is not None and state >= self.n

    def message(self, state: State) -> str:
        """Return the reason, which names the number of values."""
        return f"{count_of_epochs(state)} with a value (limit {self.n})"


@dataclass(frozen=True, repr=False)
class Threshold(ComparingCriterion):
    """Stop at the first value that is better than a threshold: below it, or above it with `mode="max"`.

    Args:
        value: The threshold; to reach it is not enough.
        mode: Whether low (`min`) or high (`max`) values are good.

    Raises:
        DeclarationError: `value` is no number, or `mode` is unknown.

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
                f"`value` of `Threshold` must be a number, not {self.value!r}.", fix="e.g. `Threshold(0.1)`"
            )

    def update(self, state: State, loss: float, training: bool = False) -> State:
        """Return the latest value."""
        return state if training else float(loss)

    def done(self, state: State) -> bool:
        """Tell whether the latest value is better than the threshold."""
        return state is not None and self.better(state, self.value)

    def message(self, state: State) -> str:
        """Give the value and the threshold."""
        return f"{state:.6g} is {'below' if self.mode == 'min' else 'above'} {self.value:.6g}"


@dataclass(frozen=True, repr=False)
class TimeLimit(Criterion):
    """Stop at the first value after a time (seconds; EarlyStopping.jl counts hours).

    The clock starts at `start`, or at the first value, and measures the time of training: after a save and a resume,
    `start` makes it go on from what had passed when the last value came. It alone is no function of the losses.

    Args:
        seconds: The time (seconds).

    Raises:
        DeclarationError: `seconds` is no finite number above 0.

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
        """Start the clock, or let it go on."""
        return {"elapsed": 0.0 if state is None else state["elapsed"], "at": monotonic()}

    def update(self, state: State, loss: float, training: bool = False) -> State:
        """Return the time that has passed (seconds), and when that was."""
        now = monotonic()
        if state is None:
            return {"elapsed": 0.0, "at": now}
        return {"elapsed": state["elapsed"] + now - state["at"], "at": now}

    def done(self, state: State) -> bool:
        """Tell whether the limit was passed when the last value came."""
        return state is not None and state["elapsed"] > self.seconds

    def message(self, state: State) -> str:
        """Give the time and the limit."""
        return f"{state['elapsed']:.1f} s have passed (limit {self.seconds:g} s)"
