"""`StatMonitorParamSetter`: change a hyperparameter where a metric no longer improves."""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fluxcb._declare.access import Read
from fluxcb._declare.phases import Phase
from fluxcb._declare.schedules import positive
from fluxcb._errors import DeclarationError
from fluxcb.callbacks.setters import TriggerSetter
from fluxcb.callbacks.watched import Watched

__all__ = ["StatMonitorParamSetter"]


class StatMonitorParamSetter(TriggerSetter):
    """Change a hyperparameter where a metric has not got better within its last `last_k` values.

    After each epoch the metric's value joins the last ones. If there are `last_k` of them and none is below the first
    by more than `threshold`, `min(values) >= values[0] - threshold`, the hyperparameter becomes `value_func(current)`,
    and the values are forgotten: the next change takes `last_k` new ones. With `reverse=True` high values are good, and
    the rule is `max(values) <= values[0] + threshold`.

    An epoch in which the metric has no value does not count. NaN and infinite values do not count either, and give a
    warning. The values are saved with a checkpoint. They come from `Metrics`; who watches with a patience, a cooldown
    or a lowest rate uses `ReduceLROnPlateau`.

    Args:
        param: A `HyperParameter` class, a name in `hyperparams`, or an `ObjAttrParam`.
        metric: The metric's name, as `Metrics` has it: `loss`, `accuracy`; or as it is logged, `training/loss`.
        value_func: `value_func(current) -> float`, or None to leave the value as it is.
        threshold: How much better a value must be, 0 or more.
        last_k: How many values are compared.
        reverse: Whether high values are good.
        phase: The phase whose values count where the metric's name does not say it: class, instance or name;
            `ValidationPhase` if not given.

    Access:
        cbstate.metrics_epoch: Read.
        hyperparams.<name>: Write (cbstate.attributes.<name> for an `ObjAttrParam`).

    Runs:
        Trigger x AbstractTrainingPhase (host).

    Cost:
        A few Python operations per epoch; a change writes one number to the device. Nothing is recompiled.

    Raises:
        DeclarationError: An argument has a wrong type or value. While training: `value_func` does not return a finite
            number.
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
        tensorpack, `StatMonitorParamSetter`, where a NaN may fire.
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
        if not callable(value_func):
            raise DeclarationError(
                f"`value_func` of `StatMonitorParamSetter` must be a function of the value, not {value_func!r}.",
                fix="e.g. `lambda rate: rate / 10`",
            )
        number = isinstance(threshold, int | float) and not isinstance(threshold, bool)
        if not number or not 0 <= threshold < math.inf:
            raise DeclarationError(
                f"`threshold` of `StatMonitorParamSetter` must be a finite number, 0 or more, not {threshold!r}.",
                fix="give the change of the value that counts as one, e.g. `0.01`",
            )
        self._watched = Watched.named(metric, phase, "StatMonitorParamSetter")
        self.value_func = value_func
        self.threshold = threshold
        self.reverse = reverse
        self.values: deque[float] = deque(maxlen=positive(last_k, "`last_k` of `StatMonitorParamSetter`"))
        self._epoch = 0  # of the last value taken

    def stateaccess(self) -> Mapping[str, Any]:
        """Return what it reads and writes; see the class."""
        access = super().stateaccess()
        return {**access, "cbstate": {**access.get("cbstate", {}), "metrics_epoch": Read()}}

    def watched_metrics(self) -> Iterable[Watched]:
        """Return the metric that decides when the hyperparameter is changed."""
        return (self._watched,)

    def state_dict(self) -> dict[str, Any]:
        """Return the last values."""
        return {**super().state_dict(), "values": list(self.values), "epoch": self._epoch}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take them back."""
        super().load_state_dict(state)
        self.values.clear()
        self.values.extend(state["values"])
        self._epoch = state["epoch"]

    def next_value(self, learner: Any) -> Any:
        """Take in the epoch's value, and return the new value if the metric stands still."""
        epoch = learner.progress.epoch
        metrics = learner.cbstate.metrics_epoch
        if self._epoch and self._watched.metric not in metrics[self._watched.phase]:
            return None  # it had values, before a resume
        value = self._watched.at(metrics, epoch)
        if value is None or epoch == self._epoch:
            return None
        if epoch < self._epoch:  # the Learner was set back, and these values lie ahead
            self.values.clear()
        self._epoch = epoch
        if not math.isfinite(value):
            warnings.warn(f"{self!r} passes over the value {value} of epoch {epoch}", UserWarning, stacklevel=2)
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
