"""Reading checkpoints: into a Learner of the same structure, or the parameters alone."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fluxcb._errors import CheckpointCorruptError, CheckpointError, ResumeError
from fluxcb._typing import PyTree
from fluxcb.checkpoints.fields import ARRAYS, HOST, wrong_in_host
from fluxcb.checkpoints.manifest import Manifest
from fluxcb.checkpoints.naming import flat, named, nested, unflatten
from fluxcb.checkpoints.packing import PACKED, unpacked
from fluxcb.checkpoints.run_folder import is_checkpoint, newest_good, whole
from fluxcb.checkpoints.snapshot import Snapshot, text_of

__all__ = ["find", "load_model_state", "load_params", "read_snapshot", "tree_differences"]


def load_params(path: str | os.PathLike[str], like: PyTree | None = None) -> PyTree:
    """Read the parameters of a checkpoint, for inference: no Learner, data or callbacks are needed.

    Args:
        path: The directory of a run, of which the newest good checkpoint is taken, or that of one checkpoint.
        like: A pytree with the structure of the parameters, which may hold `jax.ShapeDtypeStruct`s: for models whose
            containers are other than dicts and lists, such as Equinox modules.

    Returns:
        The parameters as JAX arrays, on the default device: in `like`'s containers, or in dicts and lists (tuples
        become lists).

    Raises:
        CheckpointError: There is none, or none that is whole.
        ResumeError: `like` has other arrays; the message shows which.

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
    return _load(path, "params", like)


def load_model_state(path: str | os.PathLike[str], like: PyTree | None = None) -> PyTree:
    """Read what the model keeps itself, such as batch statistics, from a checkpoint; otherwise like `load_params`."""
    return _load(path, "model_state", like)


def _load(path: str | os.PathLike[str], part: str, like: PyTree | None) -> PyTree:
    folder, manifest = find(path)
    if like is not None:
        wrong = tree_differences(manifest, {part: like})
        if wrong:
            raise ResumeError(
                f"The {part} in {folder} are not those of `like`.",
                where=wrong,
                fix="build `like` as it was for training",
            )
    leaves = _leaves(folder, manifest, [part]).get(part, {})
    leaves = {name: jnp.array(leaf, copy=True) for name, leaf in leaves.items()}
    if like is None:
        return unflatten(leaves, manifest.sequences[part])
    return jax.tree.unflatten(jax.tree.structure(like), [leaves[name] for name in named(like)])


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
    lines = []
    for part, tree in trees.items():
        then = manifest.trees[part]
        now = {".".join(name): text_of(leaf) for name, leaf in named(tree).items()}
        lines += [f"{part}: {name} ({then[name]}) is missing now" for name in then if name not in now]
        lines += [f"{part}: {name} ({now[name]}) is new" for name in now if name not in then]
        lines += [
            f"{part}: {name} was {then[name]}, and is {now[name]} now"
            for name in then
            if name in now and then[name] != now[name]
        ]
    return lines


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
