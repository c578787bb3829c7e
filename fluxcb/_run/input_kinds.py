"""A warning about inputs that are integers where the training has floating-point numbers, or the reverse."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from fluxcb._compile.arrays import is_key
from fluxcb._declare.batch_parts import BatchParts
from fluxcb._tracebacks import warn_user
from fluxcb._traced_values import shapes
from fluxcb._typing import Batch, PyTree

__all__ = ["inputs_of_specs", "warn_of_other_kind"]


def inputs_of_specs(split: BatchParts, batch: Batch | None) -> PyTree | None:
    """Return the specs of the inputs in a batch, or None if the batch is not known.

    Args:
        split: Splits batches into inputs and targets.
        batch: The batch, or its specs.
    """
    if split.inputs is not None and batch is not None:
        return jax.eval_shape(split.inputs, batch)  # the user's function may compute with arrays
    return split.inputs_of(batch) if batch is not None else None


def warn_of_other_kind(inputs: PyTree, trained: PyTree | None, what: str) -> None:
    """Warn about inputs of another kind than those of the training, such as images that were not scaled.

    Args:
        inputs: The inputs, or their specs.
        trained: The specs of the inputs of the training, or None if they are not known.
        what: The name of the inputs in the message, as the beginning of a sentence.
    """
    # True if `trained` is None, because None has no leaves.
    if jax.tree.structure(inputs) != jax.tree.structure(trained):
        return
    for found, expected in zip(jax.tree.leaves(inputs), jax.tree.leaves(trained), strict=True):
        if is_key(found) or is_key(expected) or _is_floating(found) == _is_floating(expected):
            continue
        warn_user(
            f"{what} has the inputs {shapes(inputs)}, and the training has {shapes(trained)}. Prepare both "
            "in the same way: images that are scaled only for the training, for example, give wrong outputs. If the "
            "values are right, convert the dtype.",
            UserWarning,
        )
        return


def _is_floating(leaf: Any) -> bool:
    # NumPy's function does not count bfloat16 as a floating-point type.
    return jnp.issubdtype(leaf.dtype, jnp.inexact)
