"""`ReduceLROnPlateau`, which reduces the learning rate when a metric stops improving."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from fluxcb._calls import entry_point
from fluxcb._declare.access import Permission, Read, Write
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import Event, Trigger
from fluxcb._declare.handlers import on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._tracebacks import warn_user
from fluxcb._typing import StatePath
from fluxcb.callbacks.arguments import choice, finite_number, whole_number
from fluxcb.callbacks.hyperparams.lost_changes import LostChanges
from fluxcb.callbacks.keyword_fixes import PLATEAU_FIXES
from fluxcb.callbacks.watched import Watched, note_of_changed_metric, resolved_mode

__all__ = ["ReduceLROnPlateau"]


class ReduceLROnPlateau(Callback):
    """Multiply the learning rate by `factor` if a metric has not improved for more than `patience` epochs.

    The metric is checked once per epoch, after validation. A value is an improvement if it is better than the best
    value so far by more than `threshold`. NaN is never an improvement. Epochs without a value do not count. The best
    value and the counts are saved in checkpoints, and kept for a later `fit` of the same Learner. To start over, as in
    Keras, write `learner.callbacks.replace(ReduceLROnPlateau(...))` before `fit`. If another callback overwrites a
    reduced rate, a UserWarning is issued at the next reduction.

    Args:
        factor: Factor of each reduction, between 0 and 1.
        patience: Number of epochs without an improvement that are allowed. One more reduces the rate (epochs).
        threshold: Smallest difference from the best value that is an improvement.
        threshold_mode: With `rel`, `threshold` is relative to the absolute value of the best value. With `abs`, it is
            an absolute difference.
        cooldown: Number of epochs after a reduction in which epochs without an improvement are not counted (epochs).
        min_lr: Lower bound of the learning rate.
        metric: The name of the metric, such as `loss`, or its name in logs, such as `training/loss`.
        phase: The phase of the metric, as a class, an instance or a name, if the name of the metric does not contain
            it. `ValidationPhase` by default.
        mode: `min` if low values are good, `max` if high values are good. If None or `auto`, it is `max` for metrics
            with a name such as `accuracy`, `auc` or `score`, and `min` for all others; see `Watched.default_mode`.
            A UserWarning is issued for a mode that the name contradicts, and without a mode for a name that implies
            none (when the Learner is built).

    Access:
        cbstate.metrics_epoch: Read.
        hyperparams.learning_rate: Write.

    Runs:
        Trigger x AbstractTrainingPhase (host).

    Cost:
        A few Python operations per epoch. A reduction writes one number to the device and does not recompile.

    Raises:
        DeclarationError: A number is out of range, a mode is unknown, or `metric` and `phase` name different phases.
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
        PyTorch, `torch.optim.lr_scheduler.ReduceLROnPlateau`; Keras, `ReduceLROnPlateau`, where the same `patience`
        waits one epoch less.
    """

    @entry_point(fixes=PLATEAU_FIXES)
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
        owner = "of `ReduceLROnPlateau`"
        self.factor = finite_number(factor, f"`factor` {owner}", above=0, below=1)
        self.patience = whole_number(patience, f"`patience` {owner} (epochs)", 0)
        self.threshold = finite_number(threshold, f"`threshold` {owner}", least=0)
        self.threshold_mode = choice(threshold_mode, ("rel", "abs"), f"`threshold_mode` {owner}")
        self.cooldown = whole_number(cooldown, f"`cooldown` {owner} (epochs)", 0)
        self.min_lr = finite_number(min_lr, f"`min_lr` {owner}", least=0)
        watched = Watched.named(metric, phase, "ReduceLROnPlateau")
        self.mode: Literal["min", "max"]
        self._watched, self.mode = resolved_mode(mode, watched)
        self.best: float | None = None
        self.bad_epochs = 0
        self.cooling = 0
        self._changes = LostChanges()

    def stateaccess(self) -> Mapping[str, Any]:
        """Return the paths that the callback reads and writes."""
        return {"cbstate": {"metrics_epoch": Read()}, "hyperparams": {"learning_rate": Write()}}

    def how_to_declare(self, path: StatePath, permission: Permission) -> str:
        """Return the edit that declares a path: for a hyperparameter of a group, the callback that can set it."""
        if path[0] == "hyperparams" and len(path) == 2 and "." in path[1]:
            arguments = f"{path[1]!r}, {str(self._watched)!r}, lambda rate: {self.factor} * rate, 0.0, {self.patience}"
            return f"for each group, write `StatMonitorParamSetter({arguments})` instead of `ReduceLROnPlateau`"
        return super().how_to_declare(path, permission)

    def watched_metrics(self) -> Iterable[Watched]:
        """Return the metric that decides when the hyperparameter is reduced."""
        return (self._watched,)

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, the counts, the metric, and the last reduction if another callback can undo it."""
        counts = {"best": self.best, "bad_epochs": self.bad_epochs, "cooling": self.cooling}
        return {**counts, "watched": f"{self._watched} ({self.mode})", **self._changes.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> str | None:
        """Restore what `state_dict` returned. The best value and the count start over for another metric or mode."""
        self.best, self.bad_epochs, self.cooling = state["best"], state["bad_epochs"], state["cooling"]
        self._changes.load_state_dict(state)
        now = f"{self._watched} ({self.mode})"
        note = note_of_changed_metric(state.get("watched"), now, "the best value and the count start")
        if note is not None:  # the rest of the cooldown follows from the last reduction, whatever the metric was
            self.best, self.bad_epochs = None, 0
        return note

    @on(Trigger, AbstractTrainingPhase)
    def look(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Update the counts, and reduce the rate after more than `patience` epochs without an improvement."""
        value = self._watched.at(learner.cbstate.metrics_epoch, learner.progress.epoch)
        if value is None:
            return
        if self._better(value):
            self.best, self.bad_epochs = value, 0
        else:
            self.bad_epochs += 1
        # As in PyTorch, the best value is also updated during the cooldown, but bad epochs are not counted.
        if self.cooling:
            self.cooling, self.bad_epochs = self.cooling - 1, 0
        if self.bad_epochs > self.patience:
            self.cooling, self.bad_epochs = self.cooldown, 0
            old = float(learner.hyperparams.learning_rate)
            new = max(self.factor * old, self.min_lr)
            if new < old:
                self._changes.note(self, "learning_rate", learner, old, new)
                learner.hyperparams.learning_rate = new
            elif old < self.min_lr * (1 - 1e-6):  # float32 rounds a rate that equals the bound
                warn_user(
                    f"{self!r} does not reduce the learning rate, because it is {old:g} and `min_lr` is "
                    f"{self.min_lr:g}. Pass a smaller `min_lr`.",
                    UserWarning,
                )

    def _better(self, value: float) -> bool:
        if math.isnan(value):
            return False
        if self.best is None:
            return value != (math.inf if self.mode == "min" else -math.inf)
        gain = self.best - value if self.mode == "min" else value - self.best
        # PyTorch uses `best * (1 - threshold)`. If `best` is negative, a worse value then counts as an improvement, so
        # the threshold is relative to the absolute value here.
        scale = abs(self.best) if self.threshold_mode == "rel" and math.isfinite(self.best) else 1.0
        return gain > self.threshold * scale

    def __repr__(self) -> str:
        return f"ReduceLROnPlateau({self.factor}, patience={self.patience}, metric={str(self._watched)!r})"
