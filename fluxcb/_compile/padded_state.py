"""A warning about model state that is computed from the examples that were added to a batch."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters.partial_eval import dce_jaxpr

from fluxcb._compile.loss_calls import bound_model, call_model_loss
from fluxcb._compile.step_setup import StepSetup
from fluxcb._declare.padded_batch import mask_of
from fluxcb._tracebacks import warn_user
from fluxcb._typing import PyTree

__all__ = ["warn_of_padded_state"]


def warn_of_padded_state(setup: StepSetup, carry: Mapping[str, Any], batch: PyTree) -> None:
    """Warn if a training step computes numbers of the model's state from the batch, but without its mask.

    Such numbers are the running averages of batch normalization.

    Args:
        setup: The fixed inputs of the step.
        carry: The specs of the carry.
        batch: The specs of the batch. Without a mask, nothing is checked.
    """
    model, loss_fn = setup.model, setup.loss_fn
    if model is None or loss_fn is None or mask_of(batch) is None:
        return
    if not any(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in jax.tree.leaves(carry["model_state"])):
        return

    def new_state(params: PyTree, model_state: PyTree, batch: PyTree) -> list[Any]:
        # Only the dependencies matter, so any key will do.
        key: Any = jax.random.key(0)
        bound = bound_model(model, params, model_state, train=True, key=key)
        state = call_model_loss(loss_fn, bound, batch, key=key, train=True)[2]
        return [leaf for leaf in jax.tree.leaves(state) if jnp.issubdtype(leaf.dtype, jnp.floating)]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the step has given them
        jaxpr = jax.make_jaxpr(new_state)(carry["params"], carry["model_state"], batch).jaxpr
    specs = carry["params"], carry["model_state"], batch
    of_batch = jax.tree.unflatten(jax.tree.structure(specs), range(len(jaxpr.invars)))[2]
    for at in range(len(jaxpr.outvars)):
        used = dce_jaxpr(jaxpr, [at == output for output in range(len(jaxpr.outvars))])[1]
        if any(used[leaf] for leaf in jax.tree.leaves(of_batch)) and not used[mask_of(of_batch)]:
            warn_user(
                "The model computes its state, such as the running averages of batch normalization, from all examples "
                'of a batch, including those that `ragged="pad"` has added. Pass `batch.mask` to the model, and call '
                'its batch normalization with `mask=mask[:, None] > 0`, or write `ragged="drop"`.',
                UserWarning,
            )
            return
