"""What users and callbacks give a Learner, in the form that the engine takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from fluxcb._compile.arrays import describe, is_key
from fluxcb._declare.phases import Phase
from fluxcb._errors import DataError, DeclarationError
from fluxcb._typing import Batch, PyTree

__all__ = ["as_key", "as_optimizer", "check_params", "concrete", "sources", "together"]


def as_optimizer(optimizer: Any) -> Any:
    """Return the optimizer.

    Raises:
        DeclarationError: It is none.
    """
    if hasattr(optimizer, "init") and hasattr(optimizer, "update"):
        return optimizer
    raise DeclarationError(
        f"`optimizer` must be an optax optimizer, not {optimizer!r}.",
        fix="e.g. `fluxcb.inject(optax.adam, learning_rate=1e-3)`",
    )


def as_key(key: Any) -> Any:
    """Return a seed, or a typed random key of the user's, as the run's own key.

    Raises:
        DeclarationError: It is neither.
    """
    if isinstance(key, int) and not isinstance(key, bool):
        return jax.random.key(key)
    if isinstance(key, jax.Array) and is_key(key) and key.shape == ():
        return jnp.copy(key)
    raise DeclarationError(
        f"`key` must be an int or a typed random key, not {key!r}.", fix="write `key=0` or `key=jax.random.key(0)`"
    )


def sources(data: Any, phases: tuple[Phase, ...]) -> dict[str, Any]:
    """Return the data sources by phase name.

    Raises:
        DataError: A name is that of no phase.
    """
    if data is None:
        return {}
    names = {type(p).name for p in phases}
    if isinstance(data, Mapping):
        for name in data:
            if name not in names:
                raise DataError(
                    f"`data` has {name!r}, but no phase is called so.",
                    fix=f"use {' or '.join(map(repr, sorted(names)))}",
                )
        return dict(data)
    if isinstance(data, tuple) and len(data) == 2:
        return {
            name: source for name, source in zip(("training", "validation"), data, strict=True) if source is not None
        }
    return {"training": data}


def concrete(batch: Batch) -> Batch:
    """Return zeros of the batch's shapes: models are initialised from shapes, not from values."""
    return jax.tree.map(
        lambda x: (
            jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else jnp.zeros_like(jnp.asarray(x))
        ),
        batch,
    )


def check_params(params: PyTree) -> None:
    """Check that there are parameters, and that they can be differentiated with respect to.

    Raises:
        DeclarationError: They cannot.
    """
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    if not leaves:
        raise DeclarationError("The model has no parameters.", fix="check what its `init` returns")
    for path, leaf in leaves:
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise DeclarationError(
                f"The parameter `params{jax.tree_util.keystr(path)}` is {describe(leaf)}; it must be floating-point.",
                why="there is no gradient with respect to an integer",
                fix="keep it in `model_state`, or in the loss function's closure",
            )


def together(carry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the carry with what the engine and other callbacks hold where a callback has put the parameters."""
    params = jax.tree.leaves(carry["params"])[0]
    if not params.committed or params.devices() == carry["counters"].devices():
        return dict(carry)
    place = params.sharding
    if isinstance(place, jax.sharding.NamedSharding):
        place = jax.sharding.NamedSharding(place.mesh, jax.sharding.PartitionSpec())
    return {**carry, **{name: jax.device_put(carry[name], place) for name in ("counters", "cbstate")}}
