"""What users and callbacks give a Learner, in the form that the engine takes."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun

from fluxcb._compile.arrays import describe, is_key, own_copy
from fluxcb._compile.leaves import check_leaves
from fluxcb._declare.phases import Phase
from fluxcb._declare.signatures import accepts, runs_later
from fluxcb._errors import DataError, DeclarationError
from fluxcb._typing import Batch, LossFn, PyTree

__all__ = [
    "FIT_CURES",
    "LEARNER_CURES",
    "as_key",
    "as_list_of_phases",
    "as_loss",
    "as_optimizer",
    "check_params",
    "concrete",
    "first_opt_state",
    "own_params",
    "sources",
    "together",
]

_VALIDATION = ("validation_data", "val_data", "valid_data", "val_loader", "validation_loader", "val_dataloaders")
_ARRAYS = ("x", "y", "xs", "ys", "batch_size", "batchsize")

LEARNER_CURES = {
    **dict.fromkeys(("epochs", "num_epochs", "max_epochs", "n_epochs"), "pass the epochs to `fit`: `learner.fit(10)`"),
    **dict.fromkeys(("steps", "num_steps", "max_steps"), "pass the steps to `fit`: `learner.fit(steps=1000)`"),
    **dict.fromkeys(_VALIDATION, "pass it with the training data: `data=(training, validation)`"),
    **dict.fromkeys(_ARRAYS, "pass a loader of batches: `data=fluxcb.data.ArrayLoader((xs, ys), batch_size=32)`"),
    **dict.fromkeys(
        ("learning_rate", "lr"), "pass it to the optimizer: `fluxcb.inject(optax.adam, learning_rate=1e-3)`"
    ),
    **dict.fromkeys(("metrics", "metric"), "add the metrics to the callbacks: `callbacks=[Metrics(accuracy)]`"),
    **dict.fromkeys(
        ("logger", "loggers"), 'add `Monitors` to the callbacks: `callbacks=[Monitors(CSVBackend("log.csv"))]`'
    ),
    "params": "write `Learner.from_loss(params, loss_fn, optimizer)`",
    "model": "write `Learner(model, loss_fn, optimizer)`",
}
"""The fixes to suggest for arguments that a Learner does not have."""

_DATA = "pass the data to the Learner: `Learner(..., data=(training, validation))`, then write `learner.fit(10)`"

FIT_CURES = {
    **dict.fromkeys(("data", "train_data", "training_data", "train_loader", "train_dataloaders", "datamodule"), _DATA),
    **dict.fromkeys((*_VALIDATION, *_ARRAYS, "*"), _DATA),
    "callbacks": "pass the callbacks to the Learner: `Learner(..., callbacks=[...])`",
    "verbose": "leave it out; `Learner(..., default_callbacks=False)` prints nothing",
    "ckpt_path": "write `resume=True`; the `Checkpointer` among the callbacks knows the folder",
}
"""The fixes to suggest for arguments that `Learner.fit` does not have."""

_LONGEST = 60  # characters of a value that a message shows

_SEEDED = {"threefry2x32": 1, "rbg": 2, "unsafe_rbg": 2}
"""How often JAX's own implementations of random keys repeat the two words of a seed."""


def as_optimizer(optimizer: Any) -> Any:
    """Return the optimizer.

    Raises:
        DeclarationError: It is none.
    """
    if all(callable(getattr(optimizer, name, None)) for name in ("init", "update")):
        return optimizer
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    if any(cls.__module__.startswith("flax.nnx") and cls.__name__ == "Optimizer" for cls in kind.__mro__):
        raise DeclarationError(
            "`optimizer` must be an optax optimizer, not an `nnx.Optimizer`.",
            why="an `nnx.Optimizer` holds the optimizer state itself, and fluxcb keeps this state on its own",
            fix="pass the optax transformation, for example `optax.adam(1e-3)`, not the `nnx.Optimizer` around it",
        )
    shown = repr(optimizer) if optimizer is None or isinstance(optimizer, str | int | float) else ""
    if not shown or len(shown) > _LONGEST:
        shown = f"the class `{kind.__name__}`" if kind is optimizer else f"an object of type `{kind.__name__}`"
    raise DeclarationError(
        f"`optimizer` must be an optax optimizer, not {shown}.",
        fix="e.g. `fluxcb.inject(optax.adam, learning_rate=1e-3)`",
    )


def as_key(key: Any) -> Any:
    """Return a seed, or a typed random key of the user's, as the run's own key.

    Raises:
        DeclarationError: It is neither.
    """
    if isinstance(key, int) and not isinstance(key, bool):
        try:
            return _seeded(np.int64(key), jax.config.jax_default_prng_impl)  # pyright: ignore[reportAttributeAccessIssue]
        except OverflowError:
            raise DeclarationError(
                f"`key` must be a seed of at most 64 bits, not {key}.", fix="write `key=0` or `key=jax.random.key(0)`"
            ) from None
    if isinstance(key, jax.Array) and is_key(key) and key.shape == ():
        return jnp.copy(key)
    raise DeclarationError(
        f"`key` must be an int or a typed random key, not {key!r}.", fix="write `key=0` or `key=jax.random.key(0)`"
    )


def _seeded(seed: np.int64, impl: str) -> jax.Array:
    """Return `jax.random.key(seed)`, for JAX's own implementations without the programs that it compiles (30 ms)."""
    if impl not in _SEEDED:
        return jax.random.key(seed)
    high, low = divmod(int(seed) % 2**64, 2**32)
    if not jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
        high = 0  # JAX takes the lower half only
    words = np.array([high, low] * _SEEDED[impl], np.uint32)
    return jax.random.wrap_key_data(jax.device_put(words), impl=impl)


def as_loss(loss_fn: Any, arguments: tuple[str, ...], phases: Any) -> LossFn | None:
    """Return the loss function.

    Args:
        loss_fn: What was given.
        arguments: What the phases of the library call it with.
        phases: The phases that were given, or None: phases of the user's own may call it otherwise.

    Raises:
        DeclarationError: It is none.
    """
    if loss_fn is None:
        return None
    called = f"loss_fn({', '.join(arguments)})"
    if not callable(loss_fn):
        raise DeclarationError(
            f"`loss_fn` must be a function, not {type(loss_fn).__name__} {loss_fn!r}.",
            why="it is called while the step is traced",
            fix=f"write a function `{called}` that returns a number",
        )
    if later := runs_later(loss_fn):
        raise DeclarationError(
            f"`loss_fn` is {later}; it must return the loss.",
            why="its call would return at once, and nothing would ever run its body",
            fix=f"write a plain function `{called}`, without `async` and `yield`",
        )
    if phases is None and not accepts(loss_fn, len(arguments)):
        raise DeclarationError(
            f"`loss_fn` takes {inspect.signature(loss_fn)}, and is called as `{called}`.",
            why="`Learner` calls it with outputs and targets, `Learner.from_loss` with params, batch and key",
            fix=f"write `def {called}:`",
        )
    return loss_fn


def as_list_of_phases(phases: Any) -> Iterable[Any]:
    """Return what was given as phases.

    Raises:
        DeclarationError: It is no list.
    """
    if isinstance(phases, Iterable) and not isinstance(phases, str):
        return phases
    raise DeclarationError(
        f"`phases` must be a list of phase instances, not {phases!r}.", fix="e.g. `phases=[TrainingPhase()]`"
    )


def own_params(params: PyTree) -> PyTree:
    """Return a copy of the parameters.

    Raises:
        DeclarationError: They are not made of arrays.
    """
    check_leaves(params, "`params`", "params", DeclarationError)
    return own_copy(params)


def first_opt_state(optimizer: Any, params: PyTree) -> PyTree:
    """Return what the optimizer begins with.

    `optimizer.init` runs as one program, where it can: called as it is, JAX compiles a program for each shape (20 to
    30 ms each, jax 0.10.2, CPU). Where parameters are committed to devices it is called as it is, because a program
    would choose the places of its results anew.
    """
    leaves = jax.tree.leaves(params)
    if not any(leaf.committed for leaf in leaves):
        try:
            traced = jax.jit(lambda params: optimizer.init(params)).trace(params)
            structure, closed = jax.tree.structure(traced.out_info), traced.jaxpr
            if structure.num_leaves:
                # One with constants, which may be large, is not kept.
                program = jax.jit(jaxpr_as_fun(closed)) if closed.consts else _program(_Jaxpr.of(closed))
                return jax.tree.unflatten(structure, program(*leaves))
        except Exception:  # it needs values, or returns what is no array; what else is wrong with it, it says again
            pass
    return optimizer.init(params)


@dataclass(frozen=True)
class _Jaxpr:
    """A closed jaxpr without constants, equal to those that compute the same."""

    text: str
    takes: tuple[Any, ...]  # the types, for the text does not say what is weakly typed
    returns: tuple[Any, ...]
    closed: ClosedJaxpr = field(compare=False)

    @classmethod
    def of(cls, closed: ClosedJaxpr) -> _Jaxpr:
        return cls(str(closed.jaxpr), tuple(closed.in_avals), tuple(closed.out_avals), closed)


@functools.lru_cache(maxsize=16)
def _program(jaxpr: _Jaxpr) -> Any:
    return jax.jit(jaxpr_as_fun(jaxpr.closed))


def sources(data: Any, phases: tuple[Phase, ...]) -> dict[str, Any]:
    """Return the data sources by phase name.

    Raises:
        DataError: A name is that of no phase, or the data is inputs and targets.
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
        if all(isinstance(source, np.ndarray | jax.Array) for source in data):
            raise DataError(
                "`data` is a pair of arrays, which is no pair of data sources.",
                why="`data=(training, validation)` takes two things that yield batches",
                fix=[
                    "for inputs and targets, `data=fluxcb.data.ArrayLoader((xs, ys), batch_size=32)`",
                    'for arrays of batches, `data={"training": a, "validation": b}`',
                ],
            )
        return {
            name: source for name, source in zip(("training", "validation"), data, strict=True) if source is not None
        }
    return {"training": data}


def concrete(batch: Batch) -> Batch:
    """Return zeros of the batch's shapes: models are initialised from shapes, not from values."""

    def zeros(x: Any) -> Any:
        if is_key(x) or getattr(x, "committed", False):  # to where the model is to be
            return jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else jnp.zeros_like(x)
        return jax.device_put(np.zeros(x.shape, x.dtype))

    return jax.tree.map(zeros, jax.tree.map(lambda x: x if hasattr(x, "dtype") else np.asarray(x), batch))


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
