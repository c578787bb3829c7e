"""Checking and converting the arguments of a Learner."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fluxcb._compile.arrays import is_key, own_copy
from fluxcb._compile.leaves import check_leaves
from fluxcb._compile.named_optimizers import NamedOptimizers
from fluxcb._declare.batch_parts import BatchParts
from fluxcb._declare.losses import (
    MODEL_FORM,
    OUTPUT_NAMES,
    OUTPUTS_FORM,
    PARAMS_FORM,
    TARGET_NAMES,
    fits_batch_form,
    takes,
    takes_model,
    warn_about_order,
    warn_about_unused,
)
from fluxcb._declare.signatures import accepts, parameter_names, runs_later
from fluxcb._errors import DeclarationError
from fluxcb._run.argument_order import is_optimizer
from fluxcb._step_arguments import TRAIN_FLAGS
from fluxcb._traced_values import describe
from fluxcb._typing import Batch, LossFn, PyTree

__all__ = [
    "as_key",
    "as_list_of_phases",
    "as_loss",
    "as_optimizer",
    "as_parts",
    "check_params",
    "colocate_carry",
    "copy_params",
    "refuse_collections",
    "refuse_nnx_state",
    "zeros_of_batch",
]

_LONGEST = 60  # maximum length of a value in a message (characters)

_SEEDED = {"threefry2x32": 1, "rbg": 2, "unsafe_rbg": 2}
"""The number of times that an implementation of random keys repeats the two words of a seed."""


def as_optimizer(optimizer: Any, what: str = "optimizer") -> Any:
    """Return the optimizer, or the `NamedOptimizers` for a mapping of names to optimizers.

    Raises:
        DeclarationError: It is not an optimizer.
    """
    if isinstance(optimizer, Mapping):
        if not optimizer or not all(isinstance(name, str) and name for name in optimizer):
            raise DeclarationError(
                f"`optimizer` must map names to optax optimizers, not be {dict(optimizer)!r}.",
                fix='e.g. `optimizer={"generator": optax.adam(1e-4), "discriminator": optax.adam(4e-4)}`',
            )
        return NamedOptimizers({name: as_optimizer(tx, f"optimizer[{name!r}]") for name, tx in optimizer.items()})
    if is_optimizer(optimizer):
        return optimizer
    kind = optimizer if isinstance(optimizer, type) else type(optimizer)
    # By name, because Flax may not be installed.
    if any(cls.__module__.startswith("flax.nnx") and cls.__name__ == "Optimizer" for cls in kind.__mro__):
        raise DeclarationError(
            f"`{what}` must be an optax optimizer, not an `nnx.Optimizer`.",
            why="an `nnx.Optimizer` holds the optimizer state itself, and fluxcb keeps this state on its own",
            fix="pass the optax transformation, for example `optax.adam(1e-3)`, not the `nnx.Optimizer` around it",
        )
    shown = repr(optimizer) if optimizer is None or isinstance(optimizer, str | int | float) else ""
    if not shown or len(shown) > _LONGEST:
        shown = f"the class `{kind.__name__}`" if kind is optimizer else f"an object of type `{kind.__name__}`"
    raise DeclarationError(
        f"`{what}` must be an optax optimizer, not {shown}.",
        fix="write e.g. `fluxcb.inject(optax.adam, learning_rate=1e-3)`",
    )


def as_key(key: Any) -> Any:
    """Return the typed key of the run for a seed or a random key.

    Raises:
        DeclarationError: It is neither.
    """
    # A bool is an int for Python, but `key=True` is a mistake.
    if isinstance(key, int | np.integer) and not isinstance(key, bool):
        try:
            return _seeded(np.int64(int(key)), jax.config.jax_default_prng_impl)  # pyright: ignore[reportAttributeAccessIssue]
        except OverflowError:
            raise DeclarationError(
                f"`key` must be a seed of at most 64 bits, not {key}.", fix="write `key=0` or `key=jax.random.key(0)`"
            ) from None
    if isinstance(key, jax.Array) and is_key(key) and key.shape == ():
        return jnp.copy(key)
    # Much code still uses keys without a type.
    if _is_raw_key(key):
        return jax.random.wrap_key_data(jnp.array(key, copy=True))
    raise DeclarationError(
        f"`key` must be an int or one random key, not {key!r}.", fix="write `key=0` or `key=jax.random.key(0)`"
    )


def _is_raw_key(key: Any) -> bool:
    """Return whether a value is a raw key of `jax.random.PRNGKey` for JAX's default implementation."""
    # Shapes only, because creating a key would compile a program.
    words = jax.eval_shape(lambda: jax.random.key_data(jax.random.key(0)))
    return isinstance(key, jax.Array | np.ndarray) and (key.shape, key.dtype) == (words.shape, words.dtype)


def _seeded(seed: np.int64, impl: str) -> jax.Array:
    """Return `jax.random.key(seed)`. For JAX's own implementations, NumPy computes it, without compiling (30 ms)."""
    if impl not in _SEEDED:
        return jax.random.key(seed)
    # As in JAX, a negative seed is its two's complement.
    high, low = divmod(int(seed) % 2**64, 2**32)
    if not jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
        high = 0  # JAX uses only the lower half
    words = np.array([high, low] * _SEEDED[impl], np.uint32)
    return jax.random.wrap_key_data(jax.device_put(words), impl=impl)


def as_loss(loss_fn: Any, form: str, phases: Any, model_state: Any = None) -> LossFn | None:
    """Return the loss function.

    Args:
        loss_fn: The user's argument.
        form: The form in which the library's phases call it, unless its signature determines another form:
            `OUTPUTS_FORM` for a Learner with a model, or `PARAMS_FORM`.
        phases: The user's phases, or None. The signature is checked only without them, because a user's phase may call
            the function in any form.
        model_state: The user's initial state, for `PARAMS_FORM`.

    Raises:
        DeclarationError: It is not a loss function, or its signature fits no form.
    """
    if loss_fn is None:
        return None
    # The signature decides, so that users need no argument for it.
    form = MODEL_FORM if form == OUTPUTS_FORM and callable(loss_fn) and takes_model(loss_fn) else form
    if not callable(loss_fn):
        raise DeclarationError(
            f"`loss_fn` must be a function, not {type(loss_fn).__name__} {loss_fn!r}.",
            why="it is called while the step is traced",
            fix=f"write a function `{form}` that returns a number",
        )
    # Async functions and generators return without running their body.
    if later := runs_later(loss_fn):
        raise DeclarationError(
            f"`loss_fn` is {later}; it must return the loss.",
            why="calling it would return immediately, without running its body",
            fix=f"write a plain function `{form}`, without `async` and `yield`",
        )
    if phases is not None:
        return loss_fn
    if not (accepts(loss_fn, 2) if form == OUTPUTS_FORM else fits_batch_form(loss_fn, "train", "model_state")):
        other = [f"to get the model itself, write `def {MODEL_FORM}:`"] if form == OUTPUTS_FORM else []
        raise DeclarationError(
            f"`loss_fn` takes {inspect.signature(loss_fn)}, and is called as `{form}`.",
            why="`Learner` calls it with outputs and targets, or with the model and the batch; `Learner.from_loss` "
            "calls it with parameters and batch",
            fix=[*_renamed_flags(loss_fn, form), f"write `def {form}:`", *other],
        )
    _refuse_other_names(loss_fn, form)
    if form == OUTPUTS_FORM:
        warn_about_order(loss_fn, "The loss function", "lambda outputs, ys: {}(ys, outputs)")
    warn_about_unused(loss_fn, form)
    if form == PARAMS_FORM and takes(loss_fn, "model_state") and model_state is None:
        raise DeclarationError(
            "`loss_fn` takes `model_state`, and `Learner.from_loss` was not given any.",
            why="the loss function gets the state that its last call returned, and the first call needs one",
            fix="pass it: `Learner.from_loss(params, loss_fn, optimizer, model_state=...)`",
        )
    if form == PARAMS_FORM and model_state is not None and not takes(loss_fn, "model_state"):
        raise DeclarationError(
            "`model_state` was given, and `loss_fn` does not take it.",
            why="only the loss function reads and changes it",
            fix="write `def loss_fn(params, batch, key, *, model_state):`, and return `loss, new_model_state` "
            "or `loss, aux, new_model_state`",
        )
    return loss_fn


def _renamed_flags(loss_fn: LossFn, form: str) -> list[str]:
    """Return how to rename the train flag of a loss function, if it has another name than `train`."""
    # Whatever their names are, the first two parameters receive the model or the parameters, and the batch.
    flag = next((name for name in parameter_names(loss_fn)[2:] if name in TRAIN_FLAGS.keys() - {"train"}), None)
    if flag is None or form == OUTPUTS_FORM:
        return []
    inverted = ", which is true in training" if TRAIN_FLAGS[flag] else ""
    return [f"call the parameter `train` instead of `{flag}`{inverted}"]


def _refuse_other_names(loss_fn: LossFn, form: str) -> None:
    """Raise an error if the names of the parameters say that a loss function was written for another form."""
    names = parameter_names(loss_fn)
    if names[1:2] == ["model"] or (form == PARAMS_FORM and names[1:2] == ["params"]):
        raise DeclarationError(
            f"`loss_fn` takes {inspect.signature(loss_fn)}, and is called as "
            f"`{form if form == PARAMS_FORM else MODEL_FORM}`.",
            why=f"the {'model is' if names[1] == 'model' else 'parameters are'} the first argument, as in `jax.grad`",
            fix=f"write `def loss_fn({names[1]}, {names[0]}):`",
        )
    if form == OUTPUTS_FORM and names[:1] == ["params"]:
        raise DeclarationError(
            f"`loss_fn` takes {inspect.signature(loss_fn)}, and is called as `{form}`.",
            why="`Learner` has a model, and computes its outputs",
            fix=[
                "pass the function to `Learner.from_loss(params, loss_fn, optimizer)`, which calls it with parameters",
                "write `def loss_fn(model, batch):`, and call `model(xs)`",
            ],
        )
    if form == MODEL_FORM and (names[0] in OUTPUT_NAMES or not TARGET_NAMES.isdisjoint(names[1:2])):
        needed = next((name for name in ("train", "key") if name in names), None)
        signature, added = ("model, batch", "") if needed is None else (f"model, batch, *, {needed}", f" `{needed}`")
        raise DeclarationError(
            f"`loss_fn` takes {inspect.signature(loss_fn)}, and is called as `{form}`.",
            why=f"a loss function with the parameter{added or ' `model`'} gets the model and the batch",
            fix=[
                f"remove{added} from the parameters of `loss_fn`"
                if needed
                else f"rename the first parameter: `def loss_fn(outputs, {names[1]}):`",
                f"write `def loss_fn({signature}):`, and call the model in it",
            ],
        )


def refuse_collections(params: PyTree) -> None:
    """Raise an error for the variables of a Flax Linen module with running averages, given as parameters.

    Raises:
        DeclarationError: `params` has the entries `params` and `batch_stats`.
    """
    if isinstance(params, Mapping) and {"params", "batch_stats"} <= params.keys():
        raise DeclarationError(
            "`params` contains the collections `params` and `batch_stats` of a Flax Linen module.",
            why="the optimizer would change the running averages in `batch_stats` like trained parameters",
            fix='pass `variables["params"]`, and `model_state={"batch_stats": variables["batch_stats"]}` to '
            "`Learner.from_loss`. The loss function takes `model_state`, and returns `loss, new_model_state`",
        )


def refuse_nnx_state(params: PyTree) -> None:
    """Raise an error for a Flax NNX module, or its state, with running averages or random streams, as parameters.

    Raises:
        DeclarationError: `params` has such a variable.
    """
    nnx = sys.modules.get("flax.nnx")  # without importing Flax
    if nnx is None:
        return
    kinds = (nnx.BatchStat, nnx.RngState, nnx.Cache, nnx.Intermediate)
    try:
        leaves = jax.tree_util.tree_flatten_with_path(params, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))[0]
    except (ValueError, TypeError):  # keys of a dict that cannot be sorted, which `copy_params` refuses
        return
    for path, leaf in leaves:
        if isinstance(leaf, kinds):
            where, kind = jax.tree_util.keystr(path), type(leaf).__name__
            raise DeclarationError(
                f"`params{where}` is a `{kind}` of Flax NNX, which is not trained by gradients.",
                why="`Learner.from_loss` passes all of `params` to the optimizer",
                fix="pass the module as a model: `Learner(model, loss_fn, optimizer)` with "
                "`def loss_fn(model, batch):`",
            )


def as_parts(inputs: Any, targets: Any) -> BatchParts:
    """Return the object that splits batches into inputs and targets.

    Raises:
        DeclarationError: `inputs` or `targets` is not a function.
    """
    for name, function in (("inputs", inputs), ("targets", targets)):
        if function is not None and not (callable(function) and accepts(function, 1)):
            shown = inspect.signature(function) if callable(function) else f"{type(function).__name__} {function!r}"
            raise DeclarationError(
                f"`{name}` must be a function of a batch, not {shown}.",
                fix=f'e.g. `{name}=lambda batch: batch["{"image" if name == "inputs" else "label"}"]`',
            )
    return BatchParts(inputs, targets)


def as_list_of_phases(phases: Any) -> Iterable[Any]:
    """Return the argument `phases` if it is iterable.

    Raises:
        DeclarationError: It is not iterable.
    """
    # A string is iterable, but its letters are no phases.
    if isinstance(phases, Iterable) and not isinstance(phases, str):
        return phases
    raise DeclarationError(
        f"`phases` must be a list of phase instances, not {phases!r}.", fix="write e.g. `phases=[TrainingPhase()]`"
    )


def copy_params(params: PyTree) -> PyTree:
    """Return a copy of the parameters.

    Raises:
        DeclarationError: A leaf is not an array.
    """
    try:
        check_leaves(params, "`params`", "params", DeclarationError)
    except DeclarationError as error:
        module = _equinox_module_in(params)
        if module is not None:
            # A module can have functions as leaves, so the general message would not show the cause.
            error.why = f"the Equinox module `{type(module).__name__}` has leaves that are not arrays"
            error.fix = (
                "pass the module as a model: `Learner(model, loss_fn, optimizer)` with `def loss_fn(model, batch):`",
                "pass only its arrays: `params, static = eqx.partition(model, eqx.is_inexact_array)`, and begin the "
                "loss function with `model = eqx.combine(params, static)`",
            )
        raise
    return own_copy(params)


def _equinox_module_in(params: PyTree) -> Any:
    def is_module(value: Any) -> bool:  # by name, because Equinox may not be installed
        return any(base.__name__ == "Module" and base.__module__.startswith("equinox.") for base in type(value).__mro__)

    try:
        return next(filter(is_module, jax.tree.leaves(params, is_leaf=is_module)), None)
    except (ValueError, TypeError):  # keys of a dict that cannot be sorted
        return None


def zeros_of_batch(batch: Batch) -> Batch:
    """Return zeros with the shapes of a batch, because models are initialized from shapes and not from values."""

    def zeros(x: Any) -> Any:
        if is_key(x) or getattr(x, "committed", False):  # keep the placement, which determines that of the model
            return jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else jnp.zeros_like(x)
        # NumPy, because `jnp.zeros` would compile a program for each shape (20 to 100 ms).
        return jax.device_put(np.zeros(x.shape, x.dtype))

    return jax.tree.map(zeros, jax.tree.map(lambda x: x if hasattr(x, "dtype") else np.asarray(x), batch))


def check_params(params: PyTree) -> None:
    """Check that there are parameters, and that all of them are floating-point.

    Raises:
        DeclarationError: There are none, or one is not floating-point.
    """
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    if not leaves:
        raise DeclarationError(
            "The model has no parameters.",
            fix=["check what its `init` returns", "in a module of Flax NNX, put its arrays into `nnx.Param(...)`"],
        )
    for path, leaf in leaves:
        # Complex parameters are allowed, because they have gradients.
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise DeclarationError(
                f"The parameter `params{jax.tree_util.keystr(path)}` is {describe(leaf)}; it must be floating-point.",
                why="there is no gradient with respect to an integer",
                fix="keep it in the model state, or in a closure of the model or the loss function",
            )


def colocate_carry(carry: Mapping[str, Any]) -> dict[str, Any]:
    """Return the carry with counters and `cbstate` on the devices of the parameters, which callbacks can change."""
    # A program takes all its arguments on the same devices, so any parameter shows which.
    params = jax.tree.leaves(carry["params"])[0]
    if not params.committed or params.devices() == carry["counters"].devices():
        return dict(carry)
    place = params.sharding
    # Counters and `cbstate` are replicated over the mesh; they have no axis to split.
    if isinstance(place, jax.sharding.NamedSharding):
        place = jax.sharding.NamedSharding(place.mesh, jax.sharding.PartitionSpec())
    return {**carry, **{name: jax.device_put(carry[name], place) for name in ("counters", "cbstate")}}
