"""`ReduceLROnPlateau`: lower the learning rate where a metric stops getting better."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from fluxcb._declare.access import Read, Write
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import Event, Trigger
from fluxcb._declare.handlers import on
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._declare.signatures import explained
from fluxcb._errors import DeclarationError
from fluxcb.callbacks.watched import Watched, requested_mode

__all__ = ["ReduceLROnPlateau"]


class ReduceLROnPlateau(Callback):
    """Multiply the learning rate by `factor` when a metric has not got better for more than `patience` epochs.

    It looks once per epoch, after the validation. Better means better than the best value by more than `threshold`;
    NaN never is. An epoch without a value does not count. The best value and the counts are saved with a checkpoint.

    Args:
        factor: What the rate is multiplied by, between 0 and 1.
        patience: How many epochs may pass without a better value; the rate is lowered after one more (epochs).
        threshold: How much better a value must be to count.
        threshold_mode: `rel` if `threshold` is a part of the best value's size, `abs` if it is a difference.
        cooldown: Epochs after a reduction in which nothing is counted (epochs).
        min_lr: The lowest rate.
        metric: The metric: `loss`, or as it is logged, `training/loss`.
        phase: The phase whose values count where the metric's name does not say it: class, instance or name;
            `ValidationPhase` if not given.
        mode: `min` if low values are good, `max` if high ones are. If None or `auto`, it is `max` for metrics with a
            name such as `accuracy`, `auc` or `f1`, and `min` for all others, see `Watched.default_mode`.

    Access:
        cbstate.metrics_epoch: Read.
        hyperparams.learning_rate: Write.

    Runs:
        Trigger x AbstractTrainingPhase (host).

    Cost:
        A few Python operations per epoch; a reduction writes one number to the device. Nothing is recompiled.

    Raises:
        DeclarationError: A number is out of range, a mode is unknown, or two phases are given.
        MissingStateError: No callback provides the metric, its phase has no data, or the optimizer was not built with
            `fluxcb.inject` (when the Learner is built).

    Example:
        >>> import jax.numpy as jnp, optax, fluxcb
        >>> from fluxcb.callbacks import Metrics, ReduceLROnPlateau
        >>> learner = fluxcb.Learner.from_loss(
        ...     {"w": jnp.float32(1.0)},
        ...     lambda params, batch, key: jnp.abs(params["w"] - batch[0]),
        ...     fluxcb.inject(optax.sgd, learning_rate=1.0),  # jumps from 1 to 0 and back
        ...     data=([jnp.float32([0.5])],) * 2,
        ...     callbacks=[Metrics(), ReduceLROnPlateau(0.5, patience=1)],
        ...     default_callbacks=False,
        ... )
        >>> history = learner.fit(3)
        >>> learner.hyperparams
        {'learning_rate': 0.5}

    Source:
        PyTorch, `torch.optim.lr_scheduler.ReduceLROnPlateau`; Keras, `ReduceLROnPlateau`, whose `patience` is one more.
    """

    @explained()
    def __init__(
        self,
        factor: float = 0.1,
        patience: int = 10,
        threshold: float = 1e-4,
        *,
        threshold_mode: Literal["rel", "abs"] = "rel",
        cooldown: int = 0,
        min_lr: float = 0.0,
        metric: str = "loss",
        phase: Phase | type[Phase] | str | None = None,
        mode: Literal["min", "max", "auto"] | None = None,
    ) -> None:
        _require(_number(factor) and 0 < factor < 1, "factor", "a number between 0 and 1", factor)
        _require(_count(patience), "patience", "a whole number of epochs, 0 or more", patience)
        _require(_number(threshold) and threshold >= 0, "threshold", "a finite number, 0 or more", threshold)
        _require(threshold_mode in ("rel", "abs"), "threshold_mode", '"rel" or "abs"', threshold_mode)
        _require(_count(cooldown), "cooldown", "a whole number of epochs, 0 or more", cooldown)
        _require(_number(min_lr) and min_lr >= 0, "min_lr", "a finite number, 0 or more", min_lr)
        requested = requested_mode(mode, "ReduceLROnPlateau")
        self.factor, self.patience, self.threshold = factor, patience, threshold
        self.threshold_mode, self.cooldown, self.min_lr = threshold_mode, cooldown, min_lr
        self._watched = Watched.named(metric, phase, "ReduceLROnPlateau")
        self.mode: Literal["min", "max"] = requested or self._watched.default_mode
        self.best: float | None = None
        self.bad_epochs = 0
        self.cooling = 0

    def stateaccess(self) -> Mapping[str, Any]:
        """Return what it reads and writes; see the class."""
        return {"cbstate": {"metrics_epoch": Read()}, "hyperparams": {"learning_rate": Write()}}

    def watched_metrics(self) -> Iterable[Watched]:
        """Return the metric that decides when the hyperparameter is reduced."""
        return (self._watched,)

    def state_dict(self) -> dict[str, Any]:
        """Return the best value and the counts."""
        return {"best": self.best, "bad_epochs": self.bad_epochs, "cooling": self.cooling}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take them back."""
        self.best, self.bad_epochs, self.cooling = state["best"], state["bad_epochs"], state["cooling"]

    @on(Trigger, AbstractTrainingPhase)
    def look(self, event: Event, phase: Phase, learner: Any) -> None:
        """Count the epoch, and lower the rate after too many epochs without improvement."""
        value = self._watched.at(learner.cbstate.metrics_epoch, learner.progress.epoch)
        if value is None:
            return
        if self._better(value):
            self.best, self.bad_epochs = value, 0
        else:
            self.bad_epochs += 1
        if self.cooling:
            self.cooling, self.bad_epochs = self.cooling - 1, 0
        if self.bad_epochs > self.patience:
            self.cooling, self.bad_epochs = self.cooldown, 0
            old = float(learner.hyperparams.learning_rate)
            new = max(self.factor * old, self.min_lr)
            if new < old:
                learner.hyperparams.learning_rate = new

    def _better(self, value: float) -> bool:
        if math.isnan(value):
            return False
        if self.best is None:
            return value != (math.inf if self.mode == "min" else -math.inf)
        gain = self.best - value if self.mode == "min" else value - self.best
        # The best value's size, not the value: a factor on it, as PyTorch has it, lowers the bar where it is negative.
        size = abs(self.best) if self.threshold_mode == "rel" and math.isfinite(self.best) else 1.0
        return gain > self.threshold * size

    def __repr__(self) -> str:
        return f"ReduceLROnPlateau({self.factor}, patience={self.patience}, metric={str(self._watched)!r})"


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _require(holds: bool, name: str, what: str, value: Any) -> None:
    if not holds:
        raise DeclarationError(
            f"`{name}` of `ReduceLROnPlateau` must be {what}, not {value!r}.",
            fix="e.g. `ReduceLROnPlateau(0.5, patience=5)`",
        )
