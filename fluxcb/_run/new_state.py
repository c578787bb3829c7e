"""The first train state of a Learner, on one device or divided over a mesh.

Here a Learner chooses between `initial_state.py`, for one device, and `distributed_state.py`, for a mesh.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fluxcb._compile.arrays import differences, own_copy, placed_as
from fluxcb._compile.leaves import check_leaves
from fluxcb._compile.placement import Placement
from fluxcb._declare.batch_parts import BatchParts
from fluxcb._errors import DeclarationError
from fluxcb._interruptions import is_interruption
from fluxcb._run.arguments import colocate_carry, refuse_collections, refuse_nnx_state
from fluxcb._run.distributed_state import distributed_model, distributed_opt_state, distributed_params, placed_carry
from fluxcb._run.initial_state import initial_opt_state, initial_params, initialized
from fluxcb._typing import Batch, LossFn, ModelAdapter, PyTree

__all__ = ["in_place", "new_opt_state", "params_of_model", "params_of_user", "with_other_model"]


def params_of_user(placement: Placement | None, params: PyTree, model_state: PyTree) -> tuple[PyTree, PyTree]:
    """Return copies of the `(params, model_state)` that the user passed.

    Raises:
        DeclarationError: They are not made of arrays, or contain running averages.
    """
    refuse_collections(params)
    refuse_nnx_state(params)
    if placement is None:
        params, model_state = initial_params(params), own_copy(model_state)
    else:
        params, model_state = distributed_params(placement, params, model_state)
    check_leaves(model_state, "`model_state`", "model_state", DeclarationError)
    return params, model_state


def params_of_model(
    placement: Placement | None,
    adapter: ModelAdapter,
    key: Any,
    batch: Batch | None,
    loss_fn: LossFn | None,
    split: BatchParts,
) -> tuple[PyTree, PyTree] | None:
    """Return the initial `(params, model_state)` of a model, or None if it needs a batch and there is none.

    See `initialized` for the arguments and the errors.
    """
    try:
        if placement is None:
            return initialized(adapter, key, batch, loss_fn, split)
        return distributed_model(placement, adapter, key, batch, loss_fn, split)
    # A model that needs no batch is initialized now. Only the attempt shows whether it needs one.
    except Exception as error:
        if batch is None and not is_interruption(error):  # the first step will show the shape of a batch
            return None
        raise


def new_opt_state(placement: Placement | None, optimizer: Any, params: PyTree) -> PyTree:
    """Return the initial state of the optimizer."""
    if placement is None:
        return initial_opt_state(optimizer, params)
    return distributed_opt_state(placement, optimizer, params)


def in_place(placement: Placement | None, carry: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """Return a carry whose arrays are all where the programs expect them."""
    return colocate_carry(carry) if placement is None else placed_carry(placement, carry)


def with_other_model(
    placement: Placement | None, carry: Mapping[str, PyTree], params: PyTree, model_state: PyTree
) -> dict[str, PyTree]:
    """Return a carry with copies of the parameters and the model state of another model.

    Raises:
        DeclarationError: They have another structure, shape or dtype.
    """
    wrong = differences(carry["params"], params) + differences(carry["model_state"], model_state)
    if wrong:
        raise DeclarationError(
            f"The new model does not fit the Learner: {wrong[0]}.",
            where=wrong[1:5],
            fix="build a new Learner for a model of another structure",
        )
    new = {"params": params, "model_state": model_state}
    # Programs were compiled for the shardings of the old arrays.
    copies = own_copy(new) if placement is None else placed_as({name: carry[name] for name in new}, new)
    return {**carry, **copies}
