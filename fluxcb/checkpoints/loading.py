"""Load the model or its parameters from a checkpoint without a Learner."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from fluxcb._calls import entry_point
from fluxcb._errors import CheckpointError, DeclarationError, ResumeError, did_you_mean
from fluxcb._typing import PyTree
from fluxcb.checkpoints.naming import Name, named, unflatten
from fluxcb.checkpoints.reading import FolderCheckpoint, part_differences, read_found
from fluxcb.checkpoints.snapshot import VALIDATED
from fluxcb.models import adapt
from fluxcb.models.library_states import library_form
from fluxcb.models.pair import PairAdapter

__all__ = ["load_model", "load_model_state", "load_params"]


@entry_point
def load_model(path: str | os.PathLike[str], model: Any, *, average: str | None = VALIDATED) -> Any:
    """Return the trained model of a checkpoint for inference, without a Learner, data or callbacks.

    The result has the form of `learner.model`: Flax NNX modules are in evaluation mode, Equinox modules are in
    inference mode, Linen modules are bound to their variables, and a pair of functions becomes a callable `model(xs)`.

    Args:
        path: The directory of a run or of one checkpoint. In the directory of a run, the newest valid checkpoint is
            read.
        model: A model with the same structure as the trained model, in any form that `Learner` accepts. Its own
            parameters are ignored, and it is not modified.
        average: See `load_params`.

    Returns:
        A new model with the parameters and the model state of the checkpoint, on the default device. For Linen modules
        and pairs of functions, these are in dicts and lists. For other containers, use `load_params(path, like=...)`.

    Raises:
        CheckpointError: There is no checkpoint, all checkpoints are damaged, or the average does not exist.
        ResumeError: The arrays of the model and the checkpoint differ; the message shows the differences. A pair of
            functions and a Linen module whose arrays depend on the inputs are not checked.
        DeclarationError: `model` is not a model that `Learner` accepts.

    Example:
        >>> import tempfile, jax.numpy as jnp, optax, fluxcb
        >>> from fluxcb.callbacks import Checkpointer
        >>> from fluxcb.checkpoints import load_model
        >>> folder = tempfile.mkdtemp()
        >>> model = (lambda key, xs: {"w": jnp.zeros(())}, lambda params, xs: params["w"] * xs)
        >>> learner = fluxcb.Learner(
        ...     model,
        ...     lambda outputs, ys: jnp.mean((outputs - ys) ** 2),
        ...     optax.sgd(0.5),
        ...     data=[(jnp.ones(4), 3 * jnp.ones(4))],
        ...     callbacks=[Checkpointer(folder)],
        ...     default_callbacks=False,
        ... )
        >>> history = learner.fit(1)
        >>> load_model(folder, model)(jnp.array([1.0, 2.0])).tolist()
        [3.0, 6.0]
    """
    _refuse_swapped("load_model", path, model=model)
    adapter = adapt(model)
    held = getattr(adapter, "held", None)  # None if an adapter only knows its structure after it has seen inputs
    if held is None and isinstance(adapter, PairAdapter):
        held = _specs_of(adapter)
    like = (None, None) if held is None else held

    def read(checkpoint: FolderCheckpoint) -> tuple[PyTree, PyTree]:
        params = _params(checkpoint, like[0], average, "the model")
        return params, _read(checkpoint, "model_state", (), like[1], "the model")

    return adapter.rebuild(*read_found(path, read))


@entry_point
def load_params(path: str | os.PathLike[str], like: PyTree | None = None, *, average: str | None = VALIDATED) -> PyTree:
    """Return the parameters of a checkpoint for inference, without a Learner, data or callbacks.

    Args:
        path: The directory of a run or of one checkpoint. In the directory of a run, the newest valid checkpoint is
            read.
        like: A pytree with the structure of the parameters, whose leaves can be `jax.ShapeDtypeStruct`s. It is required
            for models whose parameters are not dicts and lists. It may also be an Equinox module, or an NNX state such
            as `nnx.state(model, nnx.Param)`.
        average: Which parameters to read. "validated" (the default) reads the parameters that were measured: the
            average if validation ran with one (`ParameterEMA`, `StochasticWeightAveraging`), otherwise the trained
            parameters. For checkpoints of `MinSaver` and `MaxSaver`, the measurement is that of their metric. "ema" or
            "swa" reads that average, and None reads the trained parameters.

    Returns:
        The parameters as JAX arrays on the default device, in the containers of `like`, or otherwise in dicts and lists
        (tuples become lists).

    Raises:
        CheckpointError: There is no checkpoint, all checkpoints are damaged, or the average does not exist.
        ResumeError: The arrays of `like` differ from the checkpoint; the message shows the differences.

    Example:
        >>> import tempfile, jax.numpy as jnp, optax, fluxcb
        >>> from fluxcb.callbacks import Checkpointer
        >>> from fluxcb.checkpoints import load_params
        >>> folder = tempfile.mkdtemp()
        >>> learner = fluxcb.Learner.from_loss(
        ...     {"w": jnp.ones(2)},
        ...     lambda params, batch, key: jnp.sum(params["w"] * batch),
        ...     optax.sgd(0.25),
        ...     data=[jnp.ones(2)],
        ...     callbacks=[Checkpointer(folder)],
        ...     default_callbacks=False,
        ... )
        >>> history = learner.fit(2)
        >>> load_params(folder)["w"].tolist()
        [0.5, 0.5]

    Source:
        FluxTraining.jl, `loadmodel`.
    """
    _refuse_swapped("load_params", path, like=like)
    return read_found(path, lambda checkpoint: _params(checkpoint, like, average, "`like`"))


@entry_point
def load_model_state(path: str | os.PathLike[str], like: PyTree | None = None) -> PyTree:
    """Return the model state of a checkpoint, such as batch statistics.

    Args:
        path: See `load_params`.
        like: See `load_params`. It may also be an `eqx.nn.State`, or an NNX state such as
            `nnx.state(model, nnx.BatchStat)`.

    Returns:
        The model state, in the same containers as the result of `load_params`; `{}` if the model has no state.

    Raises:
        CheckpointError: There is no checkpoint, or all checkpoints are damaged.
        ResumeError: The arrays of `like` differ from the checkpoint; the message shows the differences.
    """
    _refuse_swapped("load_model_state", path, like=like)
    return read_found(path, lambda checkpoint: _read(checkpoint, "model_state", (), like, "`like`"))


def _specs_of(adapter: PairAdapter) -> tuple[PyTree, PyTree] | None:
    """Return the specs of what `init` of a pair returns, or None if it needs inputs, which a checkpoint does not have.

    Many functions `init` ignore the inputs, because the sizes of the layers are constants in them.
    """
    try:
        return jax.eval_shape(lambda: adapter.init(jax.random.key(0), object()))
    except Exception:  # raised by the user's function when it uses the object
        return None


def _refuse_swapped(call: str, path: Any, **second: Any) -> None:
    (name, value), *_ = second.items()
    if isinstance(value, str | os.PathLike) and not isinstance(path, str | os.PathLike):
        raise DeclarationError(
            f"`path` and `{name}` of `{call}` are swapped: `{name}` is the path {os.fspath(value)!r}.",
            fix=f"write `{call}({os.fspath(value)!r}, {name})`",
        )


def _params(checkpoint: FolderCheckpoint, like: PyTree | None, average: str | None, whose: str) -> PyTree:
    """Return the parameters, or an average of them; see `load_params`."""
    manifest = checkpoint.manifest
    name = manifest.average if average == VALIDATED else average
    if name is None:
        return _read(checkpoint, "params", (), like, whose)
    known = [parts[0] for text in manifest.trees["cbstate"] if (parts := text.split("."))[1:2] == ["params"]]
    if name not in known:
        raise CheckpointError(
            f"The checkpoint {checkpoint} has no average {name!r} of the parameters.{did_you_mean(str(name), known)}",
            why=f"its averages are {', '.join(map(repr, dict.fromkeys(known)))}" if known else "it has no averages",
            fix=[f'write `average="{other}"`' for other in dict.fromkeys(known)]
            + ["write `average=None` to load the trained parameters"],
        )
    return _read(checkpoint, "cbstate", (name, "params"), like, whose)


def _check_arrays(like: PyTree, whose: str) -> None:
    """Check that `like` has arrays or specs of arrays as its leaves."""
    for path, leaf in jax.tree_util.tree_flatten_with_path(like)[0]:
        if not (hasattr(leaf, "dtype") and hasattr(leaf, "shape")):
            raise DeclarationError(
                f"{whose} has {leaf!r} at `like{jax.tree_util.keystr(path)}`, which is not an array.",
                why="its arrays are compared with those of the checkpoint, by shape and dtype",
                fix="pass an array, or e.g. `jax.ShapeDtypeStruct((3,), jnp.float32)`",
            )


def _read(checkpoint: FolderCheckpoint, part: str, inside: Name, like: PyTree | None, whose: str) -> PyTree:
    """Return a pytree of a checkpoint.

    Args:
        checkpoint: The checkpoint.
        part: The name of a part of the checkpoint.
        inside: The path of the pytree inside the part; `()` for the whole part.
        like: A pytree with the required structure, whose containers are used for the result, or None.
        whose: The name of `like` in messages.
    """
    manifest = checkpoint.manifest
    texts = {name: t for name, t in manifest.trees[part].items() if tuple(name.split("."))[: len(inside)] == inside}
    as_passed: Callable[[PyTree], Any] = lambda loaded: loaded  # noqa: E731
    if like is not None:
        if [(*inside, *name) for name in named(like)] != [tuple(text.split(".")) for text in texts]:
            # The parameters of an average have the form of the parameters.
            like, as_passed = library_form(like, "model_state" if part == "model_state" else "params")
        _check_arrays(like, whose)
        for name in reversed(inside):
            like = {name: like}
        differences = part_differences(part, texts, like)
        if differences:
            raise ResumeError(
                f"The {'.'.join((part, *inside))} in {checkpoint} do not match {whose}.",
                where=differences,
                fix=f"build {whose} as it was for training",
            )
    arrays = checkpoint.read_arrays([part], unknown=[part] if like is None else ())[part]
    leaves = {name: jnp.array(arrays[name], copy=True) for name in (tuple(text.split(".")) for text in texts)}
    if like is None:
        tree = unflatten(leaves, manifest.sequences[part])
    else:
        tree = jax.tree.unflatten(jax.tree.structure(like), [leaves[name] for name in named(like)])
    for name in inside:
        tree = tree[name]
    return as_passed(tree)
