"""The initial parameters, model state, and optimizer state, in arrays of the Learner's own."""

from __future__ import annotations

from typing import Any

import jax
from jax.extend.core import jaxpr_as_fun

from fluxcb._compile.arrays import copy_tree, own_copy
from fluxcb._compile.call_errors import model_advice, noting, noting_optimizer
from fluxcb._compile.loss_calls import call_model_loss
from fluxcb._declare.batch_parts import BatchParts
from fluxcb._declare.losses import takes_model
from fluxcb._interruptions import is_interruption
from fluxcb._run.arguments import check_params, copy_params, zeros_of_batch
from fluxcb._run.initial_programs import cached_program, compiled_opt_state
from fluxcb._typing import Batch, LossFn, ModelAdapter, PyTree

__all__ = ["initial_opt_state", "initial_params", "initialized"]


def initialized(
    adapter: ModelAdapter, key: Any, batch: Batch | None, loss_fn: LossFn | None, split: BatchParts
) -> tuple[PyTree, PyTree]:
    """Return the `(params, model_state)` of a model, in arrays that no other object holds.

    A loss function of the form `loss_fn(model, batch)` calls the model with its own choice of arguments. If the model
    is initialized from its arguments, the loss function therefore has to run for that.

    Args:
        adapter: The model's adapter.
        key: The random key (typed).
        batch: A batch, or its specs, or None if its shape is unknown.
        loss_fn: The loss function.
        split: Splits a batch into inputs and targets.

    Raises:
        DeclarationError: A leaf is not an array.
        Exception: An error of the model, for example because it needs a batch.
    """
    # Zeros, so that the parameters do not depend on the first batch.
    batch = zeros_of_batch(batch) if batch is not None else None
    init_by = getattr(adapter, "init_by", None)
    if init_by is not None and loss_fn is not None and takes_model(loss_fn) and batch is not None:
        params, model_state = init_by(
            key, lambda bound, batch: call_model_loss(loss_fn, bound, batch, key=key, train=True), batch
        )
        # A bound module returns its own arrays, which the training must not donate.
        if getattr(adapter, "held", None) is not None:
            return initial_params(params), own_copy(model_state)
        check_params(params)
        return params, model_state
    # Some models need no batch, so a missing one is passed on as None.
    with noting("`inputs`", batch):
        xs = split.inputs_of(batch) if batch is not None else None
    with noting("the model's `init`", xs, advice=model_advice(xs, batch)):
        return _by_inputs(adapter, key, xs)


def _by_inputs(adapter: ModelAdapter, key: Any, xs: PyTree) -> tuple[PyTree, PyTree]:
    """Return the result of `adapter.init`, in arrays that no other object holds.

    It runs as one program if it can be traced. Otherwise JAX compiles a program for each operation and shape, and the
    arrays have to be copied, because the model may hold them.
    """
    traced = _traced(adapter, key, xs)
    if traced is None:
        made, fresh = adapter.init(key, xs), False
    else:
        closed = traced.jaxpr
        # A jaxpr with constants returns arrays that the model holds, and a program would contain copies of them.
        fresh = not closed.consts
        evaluate = cached_program(closed) if fresh else jaxpr_as_fun(closed)
        made = jax.tree.unflatten(jax.tree.structure(traced.out_info), evaluate(*jax.tree.leaves((key, xs))))
    params, model_state = made
    if not fresh:
        return initial_params(params), own_copy(model_state)
    check_params(params)
    return params, model_state


def _traced(adapter: ModelAdapter, key: Any, xs: PyTree) -> Any:
    """Return the trace of `adapter.init`, or None if it has to be called directly."""
    # The module already holds the arrays.
    if getattr(adapter, "held", None) is not None:
        return None
    if any(getattr(leaf, "committed", False) for leaf in jax.tree.leaves((key, xs))):
        return None  # a program would choose the placement of its results
    try:
        traced = jax.jit(lambda key, xs: adapter.init(key, xs)).trace(key, xs)
    except Exception as error:
        if is_interruption(error):
            raise
        return None  # it needs values or does not return arrays; other errors are raised again by the direct call
    return traced


def initial_params(params: PyTree) -> PyTree:
    """Return a copy of parameters that another object holds.

    Raises:
        DeclarationError: They are not made of arrays.
    """
    copies = copy_params(params)
    check_params(copies)
    return copies


def initial_opt_state(optimizer: Any, params: PyTree) -> PyTree:
    """Return the initial state of an optimizer, in arrays that no other object holds."""
    compiled = compiled_opt_state(optimizer, params)
    if compiled is None:
        with noting_optimizer("init", params):
            return own_copy(optimizer.init(params))
    # Some versions of JAX return an unchanged argument of a program without copying it.
    seen = {id(leaf) for leaf in jax.tree.leaves(params)}

    def unshared(leaf: Any) -> Any:
        new = copy_tree(leaf) if id(leaf) in seen else leaf
        # This includes an array that appears twice in the state, because a program cannot donate it twice.
        seen.add(id(leaf))
        return new

    return jax.tree.map(unshared, compiled[0])
