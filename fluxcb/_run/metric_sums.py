"""Metrics over the batches of `learner.evaluate`, outside of any epoch."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fluxcb._declare.phases import Phase
from fluxcb._errors import DeclarationError
from fluxcb._typing import PyTree
from fluxcb.callbacks.metric import AbstractMetric, Loss

__all__ = ["MetricSums"]


class MetricSums:
    """Updates metrics by batches, in a compiled program for each shape of a batch.

    Args:
        metrics: The metrics.

    Attributes:
        metrics: The metrics.
        needs: The step values that they take.
    """

    def __init__(self, metrics: tuple[AbstractMetric, ...]) -> None:
        self.metrics = metrics
        self.needs = tuple(dict.fromkeys(name for metric in metrics for name in metric.needs))
        self._update = jax.jit(self._updated, static_argnames="samples")

    def begin(self, phase: Phase, computed: Collection[str]) -> dict[str, PyTree]:
        """Return the states of the metrics before the first batch, by name.

        Args:
            phase: The phase.
            computed: The step values that it computes.

        Raises:
            DeclarationError: A metric needs another value, or no metric is left.
        """
        states = {}
        for metric in self.metrics:
            missing = [name for name in metric.needs if name not in computed]
            if not missing:
                states[metric.name] = np.int32(0), metric.init()
            elif not isinstance(metric, Loss):  # which `Metrics` has in any case
                raise DeclarationError(
                    f"The metric `{metric.name}` needs `step.{missing[0]}`, which {type(phase).__name__} does not "
                    "compute.",
                    why=f"its step has {', '.join(computed)}",
                    fix=[
                        "name other metrics, which need what there is: `learner.evaluate(data, metrics=[...])`",
                        "name another phase: `learner.evaluate(data, phase=...)`",
                    ],
                )
        if not states:
            raise DeclarationError(
                f"There is nothing to measure: {type(phase).__name__} computes no loss, and no other metric is given.",
                fix="name metrics: `learner.evaluate(data, metrics=[...])`",
            )
        return states

    def update(self, states: Mapping[str, PyTree], values: Mapping[str, Any], samples: int) -> dict[str, PyTree]:
        """Return the states after a batch, without waiting for them.

        Args:
            states: The states before.
            values: The step values of the batch, by name.
            samples: How many examples the batch has.
        """
        return self._update(dict(states), dict(values), samples=samples)

    def _updated(self, states: dict[str, PyTree], values: dict[str, Any], samples: int) -> dict[str, PyTree]:
        step, new = _Step(values), {}
        for metric in self.metrics:
            if metric.name in states:
                count, state = states[metric.name]
                new[metric.name] = count + 1, metric.update(state, step, samples)
        # As in `Metrics`: a step that is skipped does not count.
        skip = values.get("skip")
        return new if skip is None else jax.tree.map(lambda n, o: jnp.where(skip, o, n), new, states)

    def values(self, states: Mapping[str, PyTree]) -> dict[str, float]:
        """Return the values of the metrics, by name, in their order; those that no step counted in are left out."""
        held = jax.device_get(dict(states))
        found = {}
        for metric in self.metrics:
            count, state = held.get(metric.name, (0, None))
            if count:
                found[metric.name] = float(metric.compute(state))
        return found


class _Step:
    """Step values as metrics read them: `step.loss`, `"aux" in step`."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def __getattr__(self, name: str) -> Any:
        if name not in self._values:
            raise AttributeError(name)
        return self._values[name]

    def __contains__(self, name: str) -> bool:
        return name in self._values
