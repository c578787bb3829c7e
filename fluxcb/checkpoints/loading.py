"""Reading checkpoints: into a Learner of the same structure, or only the model and its parameters."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fluxcb._errors import CheckpointCorruptError, CheckpointError, ResumeError, did_you_mean
from fluxcb._typing import PyTree
from fluxcb.checkpoints.fields import ARRAYS, HOST, wrong_in_host
from fluxcb.checkpoints.manifest import Manifest
from fluxcb.checkpoints.naming import Name, flat, named, nested, unflatten
from fluxcb.checkpoints.packing import PACKED, unpacked
from fluxcb.checkpoints.run_folder import is_checkpoint, newest_good, whole
from fluxcb.checkpoints.snapshot import VALIDATED, Snapshot, text_of
from fluxcb.models import adapt

__all__ = ["find", "load_model", "load_model_state", "load_params", "read_snapshot", "tree_differences"]


def load_model(path: str | os.PathLike[str], model: Any, *, average: str | None = VALIDATED) -> Any:
    """Return the trained model of a checkpoint, ready for inference, without a Learner, data or callbacks.

    The result has the form of `learner.model`: Flax NNX modules are in evaluation mode, Equinox modules are in
    inference mode, Linen modules are bound to their variables, and a pair of functions becomes a callable `model(xs)`.

    Args:
        path: The directory of a run or of one checkpoint. In the directory of a run, the newest valid checkpoint is
            read.
        model: A model with the same structure as the trained model, in any form that `Learner` takes. Its own
            parameters are ignored, and it is not changed.
        average: See `load_params`.

    Returns:
        A new model with the parameters and the model state of the checkpoint, on the default device. For Linen modules
        and pairs of functions, these are in dicts and lists. For other containers, use `load_params(path, like=...)`.

    Raises:
        CheckpointError: There is no checkpoint, all checkpoints are damaged, or the average does not exist.
        ResumeError: The arrays of the model and the checkpoint differ; the message shows the differences.
        DeclarationError: `model` is not a model that `Learner` takes.

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
    adapter = adapt(model)
    folder, manifest = find(path)
    held = getattr(adapter, "held", None)  # a custom adapter may only know its structure from inputs
    like = (None, None) if held is None else held
    params = _params(folder, manifest, like[0], average, "the model")
    model_state = _read(folder, manifest, "model_state", (), like[1], "the model")
    return adapter.rebuild(params, model_state)


def load_params(path: str | os.PathLike[str], like: PyTree | None = None, *, average: str | None = VALIDATED) -> PyTree:
    """Read the parameters of a checkpoint, for inference: no Learner, data or callbacks are needed.

    Args:
        path: The directory of a run, of which the newest good checkpoint is taken, or that of one checkpoint.
        like: A pytree with the structure of the parameters, which may hold `jax.ShapeDtypeStruct`s: for models whose
            containers are other than dicts and lists, such as Equinox modules.
        average: Which parameters to read. "validated" (the default) reads the parameters that were measured: the
            average if validation ran with one (`ParameterEMA`, `StochasticWeightAveraging`), otherwise the trained
            parameters. For checkpoints of `MinSaver` and `MaxSaver`, the measurement is that of their metric. "ema" or
            "swa" reads that average, and None reads the trained parameters. For checkpoints without a record of the
            measured parameters (format 1), "validated" reads the trained parameters.

    Returns:
        The parameters as JAX arrays, on the default device: in `like`'s containers, or in dicts and lists (tuples
        become lists).

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
    folder, manifest = find(path)
    return _params(folder, manifest, like, average, "`like`")


def load_model_state(path: str | os.PathLike[str], like: PyTree | None = None) -> PyTree:
    """Read the model state, such as batch statistics, from a checkpoint.

    Args:
        path: See `load_params`.
        like: See `load_params`.

    Returns:
        The model state, in the same containers as the result of `load_params`; `{}` if the model has no state.

    Raises:
        CheckpointError: There is no checkpoint, or all checkpoints are damaged.
        ResumeError: The arrays of `like` differ from the checkpoint; the message shows the differences.
    """
    folder, manifest = find(path)
    return _read(folder, manifest, "model_state", (), like, "`like`")


def _params(folder: Path, manifest: Manifest, like: PyTree | None, average: str | None, whose: str) -> PyTree:
    """Return the parameters, or an average of them; see `load_params`."""
    name = manifest.average if average == VALIDATED else average
    if name is None:
        return _read(folder, manifest, "params", (), like, whose)
    known = [parts[0] for text in manifest.trees["cbstate"] if (parts := text.split("."))[1:2] == ["params"]]
    if name not in known:
        raise CheckpointError(
            f"The checkpoint {folder} has no average {name!r} of the parameters.{did_you_mean(str(name), known)}",
            why=f"it has {', '.join(map(repr, dict.fromkeys(known)))}" if known else "it has none",
            fix=[f'write `average="{other}"`' for other in dict.fromkeys(known)]
            + ["write `average=None` for the parameters that were trained"],
        )
    return _read(folder, manifest, "cbstate", (name, "params"), like, whose)


def _read(folder: Path, manifest: Manifest, part: str, inside: Name, like: PyTree | None, whose: str) -> PyTree:
    """Return a pytree of a checkpoint.

    Args:
        folder: The checkpoint's folder.
        manifest: Its manifest, verified.
        part: The name of a part of the checkpoint.
        inside: The path of the pytree inside the part; `()` for the whole part.
        like: A pytree with the required structure, whose containers are used, or None.
        whose: The name of `like` in messages.
    """
    texts = {name: t for name, t in manifest.trees[part].items() if tuple(name.split("."))[: len(inside)] == inside}
    if like is not None:
        for name in reversed(inside):
            like = {name: like}
        wrong = _differences(part, texts, like)
        if wrong:
            raise ResumeError(
                f"The {'.'.join((part, *inside))} in {folder} are not those of {whose}.",
                where=wrong,
                fix=f"build {whose} as it was for training",
            )
    found = _leaves(folder, manifest, [part])[part]
    leaves = {name: jnp.array(found[name], copy=True) for name in (tuple(text.split(".")) for text in texts)}
    if like is None:
        tree = unflatten(leaves, manifest.sequences[part])
    else:
        tree = jax.tree.unflatten(jax.tree.structure(like), [leaves[name] for name in named(like)])
    for name in inside:
        tree = tree[name]
    return tree


def find(path: str | os.PathLike[str]) -> tuple[Path, Manifest]:
    """Return the folder of a checkpoint and its manifest, verified.

    Args:
        path: The directory of a run, of which the newest good one is taken, or that of one checkpoint.

    Raises:
        CheckpointError: There is none, or none that is whole.
    """
    folder = Path(path)
    if is_checkpoint(folder):
        return folder, whole(folder)
    found = newest_good(folder)
    if found is None:
        raise CheckpointError(
            f"There is no checkpoint in {folder}.",
            why="a checkpoint is a folder with a number as its name"
            if folder.is_dir()
            else "there is no such directory",
            fix="name the directory that was given to `Checkpointer`",
        )
    return found[0].path, found[1]


def tree_differences(manifest: Manifest, trees: Mapping[str, PyTree]) -> list[str]:
    """Return how the arrays of a checkpoint differ from those that are to take them; a line each."""
    return [line for part, tree in trees.items() for line in _differences(part, manifest.trees[part], tree)]


def _differences(part: str, then: Mapping[str, str], tree: PyTree) -> list[str]:
    now = {".".join(name): text_of(leaf) for name, leaf in named(tree).items()}
    lines = [f"{part}: {name} ({then[name]}) is missing now" for name in then if name not in now]
    lines += [f"{part}: {name} ({now[name]}) is new" for name in now if name not in then]
    return lines + [
        f"{part}: {name} was {then[name]}, and is {now[name]} now"
        for name in then
        if name in now and then[name] != now[name]
    ]


def read_snapshot(folder: Path, manifest: Manifest, trees: Mapping[str, PyTree]) -> Snapshot:
    """Read a checkpoint.

    Args:
        folder: Its folder.
        manifest: Its manifest, verified.
        trees: Pytrees of the same structure, whose containers are used; entries of `cbstate` may be missing on either
            side.
    """
    held = _leaves(folder, manifest, [*trees, HOST, ARRAYS])
    wrong = wrong_in_host(held[HOST])
    if wrong is None and held[HOST]["progress"]["step"] != manifest.step:
        wrong = "progress"
    if wrong is not None:
        raise CheckpointCorruptError(
            f"{folder / HOST} is no state that fluxcb wrote: see `{wrong}`.", where=str(folder)
        )
    made: dict[str, PyTree] = {}
    for part, tree in trees.items():
        leaves = held.get(part, {})
        if part == "cbstate":
            names = {name[0] for name in leaves} | {name for name in tree if not jax.tree.leaves(tree[name])}
            tree = {name: entry for name, entry in tree.items() if name in names}
        made[part] = jax.tree.unflatten(jax.tree.structure(tree), [leaves[name] for name in named(tree)])
    arrays = {name[0]: array for name, array in held.get(ARRAYS, {}).items()}
    return Snapshot(manifest.step, manifest.epoch, made, held[HOST], arrays, manifest.about)


def _leaves(folder: Path, manifest: Manifest, parts: Iterable[str]) -> dict[str, Any]:
    """Return the arrays of some parts by name, as numpy arrays (of random keys, the data); the host's JSON as it is."""
    import orbax.checkpoint as ocp

    try:
        wanted: dict[str, Any] = {part: item for part in parts if (item := _wanted(manifest, part)) is not None}
        restored: Any = {}
        if wanted:  # if nothing is requested, orbax searches for something to restore and logs warnings (0.12.8)
            with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
                restored = checkpointer.restore(folder.absolute(), args=ocp.args.Composite(**wanted))
        found: dict[str, Any] = {part: flat(restored[part]) if part != HOST else restored[part] for part in wanted}
    except Exception as error:
        raise CheckpointCorruptError(
            f"{folder} cannot be read, though its files are what was written: {type(error).__name__}: {error}",
            where=str(folder),
        ) from error
    for part in parts:
        if part == ARRAYS:
            found[part] = _host_arrays(folder, manifest.trees[part], found.get(part, {}))
        elif part != HOST:
            found[part] = _whole(folder, part, manifest.trees[part], found.get(part, {}))
    return found


def _host_arrays(folder: Path, texts: Mapping[str, str], found: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the arrays that lie in one.

    Raises:
        CheckpointCorruptError: They are not those of the manifest.
    """
    data = found.get((PACKED,), np.empty(0, np.uint8))
    arrays = unpacked(data, texts) if isinstance(data, np.ndarray) else None
    if arrays is None:
        raise CheckpointCorruptError(
            f"{folder / ARRAYS} has other arrays than its manifest says: {', '.join(texts.values()) or 'none'}.",
            where=str(folder),
        )
    return {(name,): array for name, array in arrays.items()}


def _wanted(manifest: Manifest, part: str) -> Any:
    import orbax.checkpoint as ocp

    if part == HOST:
        return ocp.args.JsonRestore()
    as_numpy = ocp.RestoreArgs(restore_type=np.ndarray)
    if part == ARRAYS:
        return ocp.args.PyTreeRestore(restore_args={PACKED: as_numpy}) if manifest.trees[part] else None
    names = [tuple(name.split(".")) for name, text in manifest.trees[part].items() if _empty(text) is None]
    return ocp.args.PyTreeRestore(restore_args=nested(dict.fromkeys(names, as_numpy))) if names else None


def _whole(folder: Path, part: str, texts: Mapping[str, str], found: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the arrays of a part, with those that are not stored because they have no elements.

    Raises:
        CheckpointCorruptError: They are not those of the manifest.
    """
    whole = dict(found)
    for name, text in texts.items():
        key = tuple(name.split("."))
        array = whole.setdefault(key, _empty(text))
        if not (_is_data(array, text) or (isinstance(array, np.ndarray) and text_of(array) == text)):
            told = text_of(array) if isinstance(array, np.ndarray) else type(array).__name__
            raise CheckpointCorruptError(
                f"{folder} has {told} for {part}: {name}, which its manifest says is {text}.", where=str(folder)
            )
    return whole


def _is_data(array: Any, text: str) -> bool:
    """Tell whether an array is the data of random keys that a text such as `key<fry>[3]` describes."""
    if not text.startswith("key<") or not isinstance(array, np.ndarray) or array.dtype != np.uint32:
        return False
    return text.endswith(f"[{', '.join(map(str, array.shape[:-1]))}]")


def _empty(text: str) -> np.ndarray | None:
    """Return the array that a text such as `float32[0, 3]` describes if it has no elements."""
    dtype, _, shape = text[:-1].partition("[")
    sizes = [int(size) for size in shape.split(", ")] if shape else []
    return np.empty(sizes, jnp.dtype(dtype)) if 0 in sizes else None
