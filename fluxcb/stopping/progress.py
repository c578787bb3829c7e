"""Criteria that wait for improvement: `Patience` and `NumberSinceBest`."""

from __future__ import annotations

from dataclasses import dataclass

from fluxcb.stopping.criterion import ComparingCriterion, State, count_of_epochs, whole

__all__ = ["NumberSinceBest", "Patience"]


@dataclass(frozen=True, repr=False)
class Patience(ComparingCriterion):
    """Stop at the `n`-th value in a row that is worse than the one before it.

    A value that is equal or better resets the count. A loss that alternates therefore never stops the training: see
    `NumberSinceBest`.

    Args:
        n: Number of consecutive worse values at which to stop.
        mode: Whether low (`min`) or high (`max`) values are good.

    Raises:
        DeclarationError: `n` is not an integer of at least 1, or `mode` is unknown.

    Example:
        >>> from fluxcb.stopping import stopping_time
        >>> stopping_time(Patience(3), [10.0, 8.0, 9.0, 10.0, 11.0, 12.0])
        5

    Source:
        EarlyStopping.jl, `Patience`; Prechelt (1998), Early Stopping - But When?, criterion UP_s.
    """

    n: int = 5

    def __post_init__(self) -> None:
        super().__post_init__()
        whole(self.n, "`n` of `Patience` (values)")

    def update(self, state: State, loss: float, training: bool = False) -> State:
        """Return the latest value and the number of consecutive worse values."""
        if training:
            return state
        if state is None or not self.better(state["last"], loss):
            return {"last": float(loss), "worse": 0}
        return {"last": float(loss), "worse": state["worse"] + 1}

    def done(self, state: State) -> bool:
        """Return whether `n` consecutive values were worse."""
        return state is not None and state["worse"] >= self.n

    def message(self, state: State) -> str:
        """Return the reason, which names the number of worse values and the last value."""
        return (
            f"worse than the previous epoch for {count_of_epochs(state['worse'])}; the last value is "
            f"{state['last']:.6g}"
        )


@dataclass(frozen=True, repr=False)
class NumberSinceBest(ComparingCriterion):
    """Stop at the `n`-th value after the best one. Other libraries call this patience.

    Args:
        n: Number of values after the best one at which to stop.
        mode: Whether low (`min`) or high (`max`) values are good.

    Raises:
        DeclarationError: `n` is not an integer of at least 1, or `mode` is unknown.

    Example:
        >>> from fluxcb.stopping import stopping_time
        >>> stopping_time(NumberSinceBest(2), [10.0, 9.0, 8.0, 9.0, 10.0, 7.0])
        5

    Source:
        EarlyStopping.jl, `NumberSinceBest`.
    """

    n: int = 6

    def __post_init__(self) -> None:
        super().__post_init__()
        whole(self.n, "`n` of `NumberSinceBest` (values)")

    def update(self, state: State, loss: float, training: bool = False) -> State:
        """Return the best value and the number of values since then."""
        if training:
            return state
        if state is None or self.better(loss, state["best"]):
            return {"best": float(loss), "since": 0}
        return {"best": state["best"], "since": state["since"] + 1}

    def done(self, state: State) -> bool:
        """Return whether there were `n` values since the best one."""
        return state is not None and state["since"] >= self.n

    def message(self, state: State) -> str:
        """Return the reason, which names the best value and the number of values since then."""
        return f"no improvement on {state['best']:.6g} for {count_of_epochs(state['since'])}"
