"""Containers of model libraries, which users have in place of the parameters or the model state of fluxcb."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from fluxcb._typing import PyTree
from fluxcb.models.equinox import state_names
from fluxcb.models.nnx import as_dict, filled, leaf_at

__all__ = ["library_form"]


def library_form(tree: Any, part: str) -> tuple[PyTree, Callable[[PyTree], Any]]:
    """Return the form in which a Learner keeps the arrays of an NNX state, an Equinox module, or an Equinox state.

    Args:
        tree: An `nnx.State`, an `eqx.Module`, an `eqx.nn.State`, or any other pytree.
        part: "params" or "model_state". Other arrays of a `nnx.State` are left out.

    Returns:
        The pytree in the form of the Learner, and a function that returns such a pytree in the container of `tree`. Any
        other pytree is returned unchanged.
    """
    names = [f"{base.__module__.partition('.')[0]}.{base.__name__}" for base in type(tree).__mro__]
    if "flax.State" in names and type(tree).__module__.startswith("flax.nnx"):
        return _of_nnx(tree, part)
    if "equinox.State" in names:
        values, keys = tree.tree_flatten()
        ordered = state_names(keys)
        return dict(zip(ordered, values, strict=True)), lambda loaded: type(tree).tree_unflatten(
            keys, tuple(loaded[name] for name in ordered)
        )
    if "equinox.Module" in names:
        return _of_equinox(tree)
    return tree, lambda loaded: loaded


def _of_nnx(state: Any, part: str) -> tuple[PyTree, Callable[[PyTree], Any]]:
    from flax import nnx as flax_nnx

    def belongs(leaf: Any) -> bool:
        if isinstance(leaf, flax_nnx.RngState):
            return False
        return isinstance(leaf, flax_nnx.Param) == (part == "params") or not isinstance(leaf, flax_nnx.Variable)

    leaves = {path: leaf for path, leaf in flax_nnx.to_flat_state(state) if belongs(leaf)}

    def rebuilt(loaded: PyTree) -> Any:
        return flax_nnx.from_flat_state({path: filled(leaf, leaf_at(loaded, path)) for path, leaf in leaves.items()})

    return as_dict(leaves), rebuilt


def _of_equinox(module: Any) -> tuple[PyTree, Callable[[PyTree], Any]]:
    import equinox as eqx

    def is_parameter(leaf: Any) -> bool:
        return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.inexact)

    params, static = eqx.partition(module, is_parameter)
    return params, lambda loaded: eqx.combine(loaded, static)
