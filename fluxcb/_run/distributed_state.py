"""What a training on a mesh begins with: no device ever has the whole parameters or optimizer state.

`initial_state.py` has the same for trainings without a mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from fluxcb._compile.arrays import copy_tree, own_copy
from fluxcb._compile.call_errors import model_advice, noting, noting_optimizer
from fluxcb._compile.leaves import check_leaves
from fluxcb._compile.loss_calls import call_model_loss
from fluxcb._compile.placement import Placement, distributed_copy, leaf_paths
from fluxcb._declare.batch_parts import BatchParts
from fluxcb._declare.losses import takes_model
from fluxcb._errors import DeclarationError
from fluxcb._interruptions import is_interruption
from fluxcb._run.arguments import check_params
from fluxcb._typing import Batch, LossFn, ModelAdapter, PyTree

__all__ = ["check_padding", "distributed_model", "distributed_opt_state", "distributed_params", "placed_carry"]


def distributed_params(placement: Placement, params: PyTree, model_state: PyTree) -> tuple[PyTree, PyTree]:
    """Return copies of parameters and a model state that the user holds, divided over the mesh.

    Raises:
        DeclarationError: They are not made of arrays.
    """
    check_leaves(params, "`params`", "params", DeclarationError)
    check_params(params)
    # Arrays of the user have no annotations. Only modules have them.
    return _divided(placement, params, model_state, {})


def distributed_model(
    placement: Placement,
    adapter: ModelAdapter,
    key: Any,
    batch: Batch | None,
    loss_fn: LossFn | None,
    split: BatchParts,
) -> tuple[PyTree, PyTree]:
    """Return a model's `(params, model_state)`, divided over the mesh. See `initialized` for the arguments.

    Raises:
        DeclarationError: They are not made of arrays.
        Exception: What the model raised; without a batch, because it needs one.
    """
    held = getattr(adapter, "held", None)
    # The module has its parameters already, so it needs neither the key nor a batch.
    if held is not None:
        params, model_state = held
        check_params(params)
        return _divided(placement, params, model_state, _annotations(adapter, params))
    make = _initializer(adapter, batch, loss_fn, split)
    xs = split.inputs_of(batch) if batch is not None else None
    with placement.context(), noting("the model's `init`", xs, advice=model_advice(xs, batch)):
        try:
            traced = jax.jit(make).trace(key)
        except Exception as error:
            if is_interruption(error):
                raise
            traced = None  # it needs values; all other errors are raised again by the call
        if traced is None or traced.jaxpr.consts:
            # With constants, it returns arrays that the model holds. A program would contain copies of them.
            params, model_state = make(key) if traced is None else _evaluated(traced)(key)
            check_params(params)
            return _divided(placement, params, model_state, _annotations(adapter, params))
        params, model_state = traced.out_info
        check_params(params)
        shardings = (
            placement.of_params(params, _annotations(adapter, params)),
            placement.of_others(model_state, "model_state"),
        )
        # With `out_shardings`, each device computes and stores only its part.
        return jax.jit(_evaluated(traced), out_shardings=shardings)(key)


def distributed_opt_state(placement: Placement, optimizer: Any, params: PyTree) -> PyTree:
    """Return what the optimizer begins with, divided over the mesh."""
    try:
        traced = jax.jit(lambda params: optimizer.init(params)).trace(params)
    except Exception as error:
        if is_interruption(error):
            raise
        traced = None
    if traced is None or traced.jaxpr.consts:
        # If the trace failed, `init` needs values. This call raises all other errors again, with a note.
        with noting_optimizer("init", params):
            made = own_copy(optimizer.init(params))
        return distributed_copy(made, placement.of_others(made, "opt_state"))
    shardings = placement.of_others(traced.out_info, "opt_state")
    made = jax.jit(lambda params: optimizer.init(params), out_shardings=shardings)(params)
    # JAX may return an argument of a program as it is, if the program does not change it.
    seen = {id(leaf) for leaf in jax.tree.leaves(params)}
    return jax.tree.map(lambda leaf: copy_tree(leaf) if id(leaf) in seen else leaf, made)


def placed_carry(placement: Placement, carry: Mapping[str, PyTree]) -> dict[str, PyTree]:
    """Return a carry whose arrays all have their shardings. Arrays that have them already are not copied.

    Raises:
        DeclarationError: A callback has moved the parameters to other devices.
    """
    for path, leaf in leaf_paths(carry["params"]):
        # An array that is not committed was assigned without a place.
        if leaf.committed and not getattr(leaf.sharding, "mesh", None) == placement.mesh:
            raise DeclarationError(
                f"A callback has moved `params.{'.'.join(path)}` to {leaf.sharding}.",
                why="this Learner has a `mesh`, which decides where the train state is",
                fix=["remove `ToDevice` from the callbacks", "leave out `mesh` and `sharding`"],
            )

    def placed(leaf: Any, sharding: Any) -> Any:
        if leaf.committed and leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
            return leaf
        return distributed_copy(leaf, sharding)

    shardings = placement.of_carry(carry)
    return {name: jax.tree.map(placed, part, shardings[name]) for name, part in carry.items()}


def check_padding(placement: Placement, loss_fn: LossFn | None, adapter: ModelAdapter | None) -> None:
    """Check that a loss function can take the mask of batches into account, if batches are filled up.

    Raises:
        DeclarationError: It gets outputs and targets only.
    """
    if placement.sharding.ragged != "pad" or adapter is None or loss_fn is None or takes_model(loss_fn):
        return
    raise DeclarationError(
        "`ragged='pad'` needs a loss function that gets the batch.",
        why="`loss_fn(outputs, ys)` gets no mask, and would count the examples that were added",
        fix=[
            "write `def loss_fn(model, batch):`, and average with `batch.mask`: "
            "`jnp.sum(losses * batch.mask) / jnp.sum(batch.mask)`",
            "write `ragged='drop'`",
        ],
    )


def _divided(
    placement: Placement, params: PyTree, model_state: PyTree, annotations: Mapping[tuple[str, ...], Any]
) -> tuple[PyTree, PyTree]:
    # Arrays that the user has already divided over this mesh keep their shardings, unless there are rules.
    params_at = placement.of_params(params, {**annotations, **placement.specs_on_mesh(params)})
    return distributed_copy(params, params_at), distributed_copy(
        model_state, placement.of_others(model_state, "model_state")
    )


def _initializer(
    adapter: ModelAdapter, batch: Batch | None, loss_fn: LossFn | None, split: BatchParts
) -> Callable[[Any], tuple[PyTree, PyTree]]:
    """Return a function of the random key that initializes a model; see `initialized`."""
    init_by = getattr(adapter, "init_by", None)

    def make(key: Any) -> tuple[PyTree, PyTree]:
        # Models are initialized from shapes, not from values.
        zeros = None if batch is None else jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), batch)
        if init_by is not None and loss_fn is not None and takes_model(loss_fn) and zeros is not None:
            loss = loss_fn
            return init_by(key, lambda bound, batch: call_model_loss(loss, bound, batch, key=key, train=True), zeros)
        return adapter.init(key, split.inputs_of(zeros) if zeros is not None else None)

    return make


def _evaluated(traced: Any) -> Callable[[Any], PyTree]:
    """Return a function that evaluates a traced function of one argument, without running its Python again."""
    structure = jax.tree.structure(traced.out_info)
    return lambda key: jax.tree.unflatten(structure, jaxpr_as_fun(traced.jaxpr)(key))


def _annotations(adapter: ModelAdapter, params: PyTree) -> dict[tuple[str, ...], Any]:
    """Return the `PartitionSpec`s in the annotations of a Flax module, by the paths of the parameters."""
    of_adapter = getattr(adapter, "annotations", None)
    if of_adapter is not None:
        return of_adapter()

    def is_box(node: Any) -> bool:  # `flax.linen.Partitioned` and `LogicallyPartitioned`
        return hasattr(node, "get_partition_spec")

    found = {}
    for path, box in jax.tree_util.tree_flatten_with_path(params, is_leaf=is_box)[0]:
        if is_box(box):
            names = tuple(jax.tree_util.keystr((key,), simple=True) for key in path)
            # The array is the field `value` of the box.
            found[*names, "value"] = _mesh_axes(box)
    return found


def _mesh_axes(box: Any) -> Any:
    spec = box.get_partition_spec()
    # A `LogicallyPartitioned` box names logical axes, which its rules map to the axes of the mesh.
    if not hasattr(box, "rules"):
        return spec
    from flax import linen  # the module has annotated it, so Flax is installed

    return linen.spmd.logical_to_mesh_axes(tuple(spec), rules=box.rules)
