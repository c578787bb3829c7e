"""Prechelt's criteria: `GL`, generalization loss, and `PQ`, generalization loss over training progress."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from fluxcb.stopping.criterion import ComparingCriterion, State, above_zero, whole

__all__ = ["GL", "PQ"]


class _Generalization(ComparingCriterion):
    """The measures that both criteria use."""

    def generalization_loss(self, value: float, best: float) -> float:
        """Return how much worse a value is than the best one (percent)."""
        if not self.better(best, value):
            return 0.0
        if math.isnan(value) or best == 0 or math.isinf(best):
            return math.inf
        return 100 * abs(value - best) / abs(best)

    def progress(self, training: Sequence[float]) -> float:
        """Return how much worse the mean of the training losses is than the best of them (per mille)."""
        mean = sum(training) / len(training)
        best = min(training) if self.mode == "min" else max(training)
        if mean == best:
            return 0.0
        if best == 0:
            return math.inf
        return 1000 * abs(mean - best) / abs(best)


@dataclass(frozen=True, repr=False)
class GL(_Generalization):
    """Stop at the first value whose generalization loss exceeds `alpha`.

    The generalization loss is `100 (E - E_best) / |E_best|`, where `E` is the value and `E_best` the best so far.

    Args:
        alpha: The limit (percent).
        mode: Whether low (`min`) or high (`max`) values are good.

    Raises:
        DeclarationError: `alpha` is not a finite number above 0, or `mode` is unknown.

    Example:
        >>> from fluxcb.stopping import stopping_time
        >>> stopping_time(GL(20), [10.0, 8.0, 9.0, 10.0])  # 0, 0, 12.5 and 25 %
        4

    Source:
        Prechelt (1998), Early Stopping - But When?, criterion GL_alpha; EarlyStopping.jl, `GL`, whose code differs from
        its documentation for negative losses.
    """

    alpha: float = 2.0

    def __post_init__(self) -> None:
        super().__post_init__()
        above_zero(self.alpha, "`alpha` of `GL` (percent)")

    def update(self, state: State, loss: float, training: bool = False) -> State:
        """Return the latest value and the best value."""
        if training:
            return state
        if state is None or self.better(loss, state["best"]):
            return {"last": float(loss), "best": float(loss)}
        return {"last": float(loss), "best": state["best"]}

    def done(self, state: State) -> bool:
        """Return whether the generalization loss exceeds the limit."""
        return state is not None and self.generalization_loss(state["last"], state["best"]) > self.alpha

    def message(self, state: State) -> str:
        """Return the reason, which names the generalization loss and the values that it was computed from."""
        loss = self.generalization_loss(state["last"], state["best"])
        return f"{state['last']:.6g} is {loss:.4g} % worse than the best, {state['best']:.6g} (limit {self.alpha:g} %)"


@dataclass(frozen=True, repr=False)
class PQ(_Generalization):
    """Stop when the generalization loss is large relative to the training progress, or when training stalls.

    The progress is `1000 |M - m| / |m|` of the last `k` training losses, where `M` is their mean and `m` their best.
    The criterion stops at an out-of-sample value if there have been at least `k` training losses, and one of two
    conditions holds: the generalization loss (see `GL`) divided by the progress exceeds `alpha`, or the progress is not
    above `tol` (or NaN).

    Args:
        alpha: The limit (percent per per mille).
        k: Number of training losses over which progress is measured, at least 2.
        tol: Progress at which training has stalled (per mille).
        mode: Whether low (`min`) or high (`max`) values are good, also for training losses.

    Raises:
        DeclarationError: A number is not positive, `k` is not an integer of at least 2, or `mode` is unknown.

    Example:
        >>> from fluxcb.stopping import stopping_time
        >>> losses = [9.5, 9.3, 10.0, 8.3, 8.4, 12.0]
        >>> is_training = [True, True, False, True, True, False]
        >>> stopping_time(PQ(2.0, k=2), losses, is_training)  # 0 / 10.8, then 20 / 6.02
        2

    Source:
        Prechelt (1998), Early Stopping - But When?, criterion PQ_alpha; EarlyStopping.jl, `PQ`.
    """

    needs_training: ClassVar[bool] = True

    alpha: float = 0.75
    k: int = 5
    tol: float = sys.float_info.epsilon

    def __post_init__(self) -> None:
        super().__post_init__()
        above_zero(self.alpha, "`alpha` of `PQ`")
        whole(self.k, "`k` of `PQ` (training losses)", least=2)
        above_zero(self.tol, "`tol` of `PQ` (per mille)")

    def update(self, state: State, loss: float, training: bool = False) -> State:
        """Return the last training losses, the latest and best values, and whether a training loss came last."""
        old = state or {"training": [], "last": None, "best": None}
        if training:
            return {**old, "training": [*old["training"], float(loss)][-self.k :], "waiting": True}
        better = old["best"] is None or self.better(loss, old["best"])
        return {**old, "last": float(loss), "best": float(loss) if better else old["best"], "waiting": False}

    def done(self, state: State) -> bool:
        """Return whether training stalls, or the quotient exceeds the limit."""
        if state is None or state["waiting"] or len(state["training"]) < self.k:
            return False
        progress = self.progress(state["training"])
        return not progress > self.tol or self._quotient(state) > self.alpha

    def message(self, state: State) -> str:
        """Return the reason, which names the quotient or states that training stalls."""
        progress = self.progress(state["training"])
        if not progress > self.tol:
            return f"training makes no progress: its last {self.k} values are {state['training']}"
        return (
            f"generalization loss over training progress is {self._quotient(state):.4g} at {state['last']:.6g} "
            f"(limit {self.alpha:g})"
        )

    def _quotient(self, state: State) -> float:
        return self.generalization_loss(state["last"], state["best"]) / self.progress(state["training"])
