"""Metrics that are plain means of a number over the samples: their states are kept together, as vectors.

The state is a pair of float32[means]: the sums, and their compensations. XLA's CPU backend compiles a kernel for each
operand of a long concatenation (15 ms, jax 0.10.2). As three scalars for each metric, the states of three metrics
doubled the compilation time of the validation step of a small autoencoder.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

from fluxcb.callbacks.metrics.metric import AbstractMetric, Metric, compensated

__all__ = ["initial_means", "plain_means", "updated_means"]

_METHODS = ("init", "update", "compute", "step_value")


def plain_means(metrics: Sequence[AbstractMetric]) -> tuple[Metric, ...]:
    """Return the metrics that are plain means, computed as `Metric` does."""
    return tuple(metric for metric in metrics if _is_plain_mean(metric))


def initial_means(count: int) -> tuple[Any, Any]:
    """Return the state of metrics that have seen nothing."""
    import numpy as np

    zeros = np.zeros(count, np.float32)
    return zeros, zeros


def updated_means(state: tuple[Any, Any], values: Sequence[Any], samples: Any) -> tuple[tuple[Any, Any], Any]:
    """Add the values of one batch.

    Args:
        state: The state.
        values: The values of the metrics, float32[] each, or None for a metric that is not computed.
        samples: Samples in the batch; traced if the batch has a mask.

    Returns:
        The state, and the step values, which are NaN for metrics that are not computed: float32[means].
    """
    import jax.numpy as jnp
    import numpy as np

    absent = np.array([value is None for value in values])
    # A state that begins with zeros and gets zeros keeps them.
    terms = jnp.stack([np.float32(0) if value is None else value for value in values]) * samples
    row = terms / (np.float32(samples) if isinstance(samples, int) else samples)
    return compensated(*state, terms), jnp.where(absent, np.float32(np.nan), row) if absent.any() else row


def _is_plain_mean(metric: AbstractMetric) -> TypeGuard[Metric]:
    if not isinstance(metric, Metric) or metric.weight is not None or metric.shape != ():
        return False
    return all(getattr(type(metric), name) is getattr(Metric, name) for name in _METHODS)
