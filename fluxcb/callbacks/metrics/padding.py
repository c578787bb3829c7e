"""Metrics of batches that were filled up to a common size; see `ragged="pad"` of `fluxcb.Sharding`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fluxcb._declare.phases import Phase
from fluxcb._errors import DeclarationError
from fluxcb.callbacks.metrics.step_functions import StepFunction

__all__ = ["masked_mean", "require_weights"]


def masked_mean(value: Any, function: StepFunction, step: Any, mask: Any) -> Any:
    """Return the mean of a metric over the examples that a mask selects.

    Args:
        value: What the function returned for the batch: the mean over all of its examples, or over those of the mask
            if the loss function has computed it.
        function: The function of the metric.
        step: The step's values.
        mask: float32[batch].
    """
    import jax
    import jax.numpy as jnp

    arguments = [getattr(step, name) for name in function.needs]
    if any(leaf.shape[:1] != mask.shape for leaf in jax.tree.leaves(arguments)):
        return value

    # The mean of one example is its value, so that the examples that were added can be left out of the mean.
    def of_one(*arguments: Any) -> Any:
        one = jax.tree.map(lambda leaf: leaf[None], arguments)
        return jnp.asarray(function.fn(*one), jnp.float32)

    values = jax.vmap(of_one)(*arguments)
    weights = mask.reshape(*mask.shape, *(1 for _ in value.shape))
    # A batch has at least one example of the data source, so the sum of the mask is not 0.
    return jnp.sum(jnp.where(weights > 0, values, 0), axis=0) / jnp.sum(mask)


def require_weights(metrics: Iterable[Any], phase: Phase) -> None:
    """Check that metrics that count examples themselves get the mask.

    Args:
        metrics: Metrics other than those that average a function.
        phase: The phase of the step.

    Raises:
        DeclarationError: One has no weights.
    """
    for metric in metrics:
        if getattr(metric, "weight", True) is None and isinstance(phase, metric.phases):
            name = type(metric).__name__
            raise DeclarationError(
                f"The metric `{metric.name}` would count examples that were added by `ragged='pad'`.",
                why="it counts the examples of a batch itself, without a mask",
                fix=f"pass the mask: `{name}(..., weight=lambda batch: batch.mask)`",
            )
