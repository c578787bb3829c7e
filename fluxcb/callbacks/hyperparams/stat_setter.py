"""`StatMonitorParamSetter`, which changes a hyperparameter when a metric stops improving."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fluxcb._declare.access import Read
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import Phase
from fluxcb._declare.schedules import positive
from fluxcb._tracebacks import warn_user
from fluxcb.callbacks.arguments import finite_number, function_of
from fluxcb.callbacks.hyperparams.setters import TriggerSetter
from fluxcb.callbacks.watched import Watched, note_of_changed_metric

__all__ = ["StatMonitorParamSetter"]


class StatMonitorParamSetter(TriggerSetter):
    """Change a hyperparameter if a metric has not improved within its last `last_k` values.

    The value of the metric is recorded after each epoch. If `last_k` values are recorded, and
    `min(values) >= values[0] - threshold`, the hyperparameter is set to `value_func(current)`. The recorded values are
    then cleared, so the next change needs `last_k` new values. With `reverse=True`, high values are good, and the
    condition is `max(values) <= values[0] + threshold`.

    Epochs without a value do not count. NaN and infinite values do not count either, and the callback warns about them.
    The recorded values are saved in checkpoints. For a patience, a cooldown or a minimum learning rate, use
    `ReduceLROnPlateau`.

    Args:
        param: A `HyperParameter` class, a name in `hyperparams`, or an `ObjAttrParam`.
        metric: The name of a metric, such as `loss` or `accuracy`, or its name in logs, such as `training/loss`.
        value_func: `value_func(current) -> float | None`, the new value, or None to keep the current value.
        threshold: Smallest difference that is an improvement, at least 0.
        last_k: Number of values to compare (epochs).
        reverse: Whether high values are good.
        phase: The phase of the metric, as a class, an instance or a name, if the name of the metric does not contain
            it. `ValidationPhase` by default.

    Access:
        cbstate.metrics_epoch: Read.
        hyperparams.<name>: Write (cbstate.attributes.<name> for an `ObjAttrParam`).

    Runs:
        Trigger x AbstractTrainingPhase (host).

    Cost:
        A few Python operations per epoch. A change writes one number to the device and does not recompile.

    Raises:
        DeclarationError: An argument has a wrong type or value. During training: `value_func` returned something other
            than a finite number or None.
        MissingStateError: No callback provides the metric, its phase has no data, or the optimizer was not built with
            `fluxcb.inject` (when the Learner is built).

    Example:
        >>> import jax.numpy as jnp, optax, fluxcb
        >>> from fluxcb.callbacks import LearningRate, Metrics, StatMonitorParamSetter
        >>> learner = fluxcb.Learner.from_loss(
        ...     {"w": jnp.float32(1.0)},
        ...     lambda params, batch, key: jnp.abs(params["w"] - batch[0]),
        ...     fluxcb.inject(optax.sgd, learning_rate=1.0),  # jumps from 1 to 0 and back
        ...     data=([jnp.float32([0.5])],) * 2,
        ...     callbacks=[Metrics(), StatMonitorParamSetter(LearningRate, "loss", lambda rate: rate / 2, 0, 3)],
        ...     default_callbacks=False,
        ... )
        >>> history = learner.fit(3)
        >>> learner.hyperparams
        {'learning_rate': 0.5}

    Source:
        tensorpack, `StatMonitorParamSetter`, where a NaN can cause a change.
    """

    def __init__(
        self,
        param: Any,
        metric: str,
        value_func: Callable[[Any], Any],
        threshold: float,
        last_k: int,
        reverse: bool = False,
        *,
        phase: Phase | type[Phase] | str | None = None,
    ) -> None:
        super().__init__(param)
        owner = "StatMonitorParamSetter"
        self._watched = Watched.named(metric, phase, owner)
        self.value_func = function_of(
            value_func, f"`value_func` of `{owner}`", "value", example="lambda rate: rate / 10"
        )
        self.threshold = finite_number(threshold, f"`threshold` of `{owner}`", least=0)
        self.reverse = reverse
        self.values: deque[float] = deque(maxlen=positive(last_k, "`last_k` of `StatMonitorParamSetter`"))
        self._epoch = 0  # the epoch of the last recorded value

    def stateaccess(self) -> Mapping[str, Any]:
        """Return the paths that the callback reads and writes."""
        access = super().stateaccess()
        return {**access, "cbstate": {**access.get("cbstate", {}), "metrics_epoch": Read()}}

    def watched_metrics(self) -> Iterable[Watched]:
        """Return the metric that decides when the hyperparameter is changed."""
        return (self._watched,)

    def state_dict(self) -> dict[str, Any]:
        """Return the recorded values, the epoch of the last one, and the metric."""
        recorded = {"values": list(self.values), "epoch": self._epoch, "watched": str(self._watched)}
        return {**super().state_dict(), **recorded}

    def load_state_dict(self, state: dict[str, Any]) -> str | None:
        """Restore what `state_dict` returned, without the values of another metric."""
        super().load_state_dict(state)
        self.values.clear()
        note = note_of_changed_metric(state.get("watched"), str(self._watched), "its values start")
        if note is None:
            self.values.extend(state["values"])
        self._epoch = state["epoch"]
        return note

    def next_value(self, learner: LearnerView) -> Any:
        """Record the epoch's value, and return a new value for the hyperparameter if the metric has not improved."""
        epoch = learner.progress.epoch
        metrics = learner.cbstate.metrics_epoch
        if self._epoch and self._watched.metric not in metrics[self._watched.phase]:
            return None  # the metric had values before a resume, so `Watched.at` must not report it as missing
        value = self._watched.at(metrics, epoch)
        if value is None or epoch == self._epoch:
            return None
        if epoch < self._epoch:  # the Learner returned to an earlier epoch, and the values are of later ones
            self.values.clear()
        self._epoch = epoch
        if not math.isfinite(value):
            warn_user(f"{self!r} ignores the value {value} of epoch {epoch}", UserWarning)
            return None
        self.values.append(value)
        if len(self.values) < (self.values.maxlen or 0) or self._improved():
            return None
        self.values.clear()
        return self.value_func(self.current(learner))

    def _improved(self) -> bool:
        if self.reverse:
            return max(self.values) > self.values[0] + self.threshold
        return min(self.values) < self.values[0] - self.threshold

    def __repr__(self) -> str:
        return f"StatMonitorParamSetter({self.param_name}, {str(self._watched)!r})"
