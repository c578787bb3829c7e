"""Metrics of batches that were filled up to a common size; see `ragged="pad"` of `fluxcb.Sharding`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

from fluxcb._declare.padded_batch import mask_of
from fluxcb._declare.phases import Phase
from fluxcb._errors import DeclarationError
from fluxcb._tracebacks import warn_user
from fluxcb.callbacks.metrics.recorder import leading_axis
from fluxcb.callbacks.metrics.step_functions import StepFunction

__all__ = ["examples_in", "held", "masked_mean", "reads_mask", "require_weights", "warn_of_unmasked"]

_EXAMPLES = 8
"""Number of random examples with which a metric is compared with the mean of its values for single examples."""


def examples_in(batch: Any) -> Any:
    """Return the number of examples of a batch, as an int. Without those that were added, it is a traced int32[]."""
    import jax.numpy as jnp

    mask = mask_of(batch)
    return leading_axis(batch) if mask is None else jnp.sum(mask).astype(jnp.int32)


def masked_mean(value: Any, function: StepFunction, step: Any, mask: Any, metric: str) -> Any:
    """Return the mean of a metric over the examples that a mask selects.

    Args:
        value: What the function returned for the batch: the mean over all of its examples, or over those of the mask
            if the loss function has computed it.
        function: The function of the metric.
        step: The step's values.
        mask: float32[batch].
        metric: The name of the metric.

    Raises:
        DeclarationError: The function is not a mean over examples.
    """
    import jax
    import jax.numpy as jnp

    leaves, structure = jax.tree.flatten([getattr(step, name) for name in function.needs])

    def of_leaves(*leaves: Any) -> Any:
        return jnp.asarray(function.fn(*structure.unflatten(leaves)), jnp.float32)

    jaxpr = jax.make_jaxpr(of_leaves)(*leaves).jaxpr
    used = {id(variable) for equation in jaxpr.eqns for variable in equation.invars} | set(map(id, jaxpr.outvars))
    of_example = [leaf.shape[:1] == mask.shape for leaf in leaves]
    # The loss function has computed the other values, and it has the mask.
    if not any(here and id(v) in used for here, v in zip(of_example, jaxpr.invars, strict=True)):
        return value
    if not _is_mean(of_leaves, leaves, of_example):
        raise DeclarationError(
            f"The metric `{metric}` is not the mean of its values for single examples.",
            why="`ragged='pad'` adds examples to batches, and they can only be left out of a mean over examples",
            fix=[
                "if the metric is a mean with weights, return one value per example, and pass `weight=`",
                'let the function use `batch.mask`: `Metric(fn, needs=("outputs", "batch"), weight=lambda batch: '
                "batch.mask.sum())`",
                "write `ragged='drop'`",
            ],
        )

    # The mean of one example is its value, so that the examples that were added can be left out of the mean.
    def of_one(*leaves: Any) -> Any:
        return of_leaves(*(leaf[None] if here else leaf for leaf, here in zip(leaves, of_example, strict=True)))

    values = jax.vmap(of_one, in_axes=[0 if here else None for here in of_example])(*leaves)
    weights = mask.reshape(*mask.shape, *(1 for _ in value.shape))
    # A batch has at least one example of the data source, so the sum of the mask is not 0.
    return jnp.sum(jnp.where(weights > 0, values, 0), axis=0) / jnp.sum(mask)


def _is_mean(of_leaves: Any, leaves: list[Any], of_example: list[bool]) -> bool:
    """Return whether a function of a batch is the mean of its values for single examples, for random numbers."""
    import jax
    import numpy as np

    rng = np.random.default_rng(0)

    def random(leaf: Any, here: bool) -> Any:
        shape = (_EXAMPLES, *leaf.shape[1:]) if here else leaf.shape
        if jax.numpy.issubdtype(leaf.dtype, jax.numpy.integer):
            return rng.integers(-1, 2, shape).astype(leaf.dtype)  # -1 often marks targets that do not count
        if leaf.dtype == bool:
            return rng.integers(0, 2, shape).astype(bool)
        return rng.normal(size=shape).astype(leaf.dtype)

    numbers = [random(leaf, here) for leaf, here in zip(leaves, of_example, strict=True)]

    def both(*numbers: Any) -> tuple[Any, Any]:
        singles = [
            [n[i : i + 1] if h else n for n, h in zip(numbers, of_example, strict=True)] for i in range(_EXAMPLES)
        ]
        return of_leaves(*numbers), jax.numpy.stack([of_leaves(*single) for single in singles]).mean(axis=0)

    try:
        with jax.ensure_compile_time_eval():
            whole, mean = map(np.asarray, jax.jit(both)(*numbers))
    except Exception:  # the function does not accept these numbers, so nothing is known about it
        return True
    # It can be NaN for random numbers, such as the logarithm of a negative one.
    return bool(np.isnan(whole + mean).any() or np.allclose(whole, mean, rtol=1e-3, atol=1e-5))


def held(step: Any, needs: Iterable[str]) -> Any:
    """Return an object with these values of a step, if its batch has a mask. Otherwise, return the step.

    Each read of a step returns another copy of the batch, and a copy does not show whether its mask was read.
    """
    batch = getattr(step, "batch", None)
    if mask_of(batch) is None:
        return step
    return SimpleNamespace(**{name: getattr(step, name) for name in needs if name != "batch"}, batch=batch)


def reads_mask(step: Any, call: Callable[[Any], Any]) -> tuple[Any, bool]:
    """Call a function with a step, and return its value, and whether it has read the mask or there is none."""
    batch: Any = getattr(step, "batch", None)
    if mask_of(batch) is None:
        return call(step), True
    batch.mask_was_read = False
    return call(step), batch.mask_was_read


def warn_of_unmasked(what: str, metric: str) -> None:
    """Warn that a function has computed a number for a whole batch that was filled up, without its mask.

    Args:
        what: The function, such as `weight`, as the beginning of a sentence.
        metric: The name of the metric.
    """
    warn_user(
        f"{what} of the metric `{metric}` returns one number for a batch without using `batch.mask`, so it includes "
        'the examples that `ragged="pad"` has added. Return one number per example, or use the mask, for example '
        "`batch.mask.sum()`.",
        UserWarning,
    )


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
