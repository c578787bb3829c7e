"""Find a checkpoint and read its parts."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from fluxcb._errors import CheckpointCorruptError, CheckpointError, DeclarationError
from fluxcb._interruptions import is_interruption
from fluxcb._paths import fix_of_path, why_impossible
from fluxcb._typing import PyTree
from fluxcb.checkpoints.agreement import Agreement
from fluxcb.checkpoints.headers import check_headers, check_json, check_sizes, is_key_data, nbytes_of
from fluxcb.checkpoints.host_file import read_host
from fluxcb.checkpoints.manifest import Manifest
from fluxcb.checkpoints.naming import Name, flat, named, nested, shown_name
from fluxcb.checkpoints.run_folder import entries_of, is_checkpoint, is_run
from fluxcb.checkpoints.savers import StoredCheckpoint
from fluxcb.checkpoints.snapshot import Snapshot, is_key, text_of
from fluxcb.checkpoints.verification import newest_good, verify_checkpoint

__all__ = [
    "FolderCheckpoint",
    "LoadedCheckpoint",
    "array_differences",
    "part_differences",
    "read_found",
    "resolve_checkpoint",
]

T = TypeVar("T")


def read_found(path: str | os.PathLike[str], read: Callable[[FolderCheckpoint], T], *, together: bool = False) -> T:
    """Find a checkpoint with `resolve_checkpoint`, and return the result of a function that reads it.

    A run that is still training can delete the checkpoint while it is being read. In that case, the newest checkpoint
    is read instead.

    Args:
        path: The directory of a run or of one checkpoint.
        read: The function. If the checkpoint was deleted, the function is called again with another checkpoint.
        together: Whether all processes call the function; see `newest_good`. All of them then raise an error or none.
    """
    while True:  # a run that saves often may delete several checkpoints in a row
        folder, manifest = resolve_checkpoint(path, together=together)
        try:
            return read(FolderCheckpoint(folder, manifest))
        except CheckpointCorruptError:
            exists = Agreement().of_first(folder.is_dir) if together else folder.is_dir()
            if exists or folder == Path(path):
                raise


def resolve_checkpoint(path: str | os.PathLike[str], *, together: bool = False) -> tuple[Path, Manifest]:
    """Return the folder of a checkpoint and its verified manifest.

    Args:
        path: The directory of a run or of one checkpoint. In the directory of a run, the newest valid checkpoint is
            used.
        together: Whether all processes call the function; see `newest_good`.

    Raises:
        CheckpointError: There is no checkpoint, or all checkpoints are damaged.
        DeclarationError: `path` is not a path.
    """
    folder = _folder(path)
    if is_checkpoint(folder):
        try:
            return folder, verify_checkpoint(folder, together=together)
        except CheckpointCorruptError as error:
            if not error.fix:
                error.fix = _instead_of(folder)
            raise
    found = newest_good(folder, together=together)
    if found is None and folder.is_file():
        parent = next((parent for parent in folder.parents if is_checkpoint(parent)), None)
        raise CheckpointError(
            f"{folder} is a file, but a checkpoint is a directory.",
            fix="use the directory that was passed to `Checkpointer`"
            if parent is None
            else f"use the directory of the checkpoint: {str(parent)!r}",
        )
    if found is None and is_run(folder):
        raise CheckpointError(
            f"There is no checkpoint in {folder}: the saver of this directory has not saved any.",
            why="a `Checkpointer` saves when a fit begins, and a `MinSaver` or `MaxSaver` after an epoch in which its "
            "metric is finite and better than before",
            fix=["train until it has saved a checkpoint", "use the directory of another saver"],
        )
    if found is None:
        # If the last part of the path is wrong, the run is its parent or a sibling.
        near = folder if folder.is_dir() else folder.parent
        candidates = [near, *sorted(near.iterdir())] if near.is_dir() else []
        runs = [candidate for candidate in candidates if candidate.is_dir() and entries_of(candidate)]
        raise CheckpointError(
            f"There is no checkpoint in {folder}.",
            why="a checkpoint is a folder with a number as its name"
            if folder.is_dir()
            else why_impossible(folder) or "there is no such directory",
            fix=[
                *(f"use a directory that contains checkpoints: {str(run)!r}" for run in runs[:3]),
                fix_of_path(folder, "use the directory that was passed to `Checkpointer`"),
            ],
        )
    return found[0].path, found[1]


def _instead_of(folder: Path) -> tuple[str, ...]:
    """Return the fixes for a damaged checkpoint."""
    copy = f"copy the checkpoint to {folder} again, if it is a copy or if you have one"
    run = folder.parent
    if len(entries_of(run)) < 2:
        return (copy,)
    return f"use the newest valid checkpoint of the run: pass the directory {str(run)!r}", copy


def _folder(path: Any) -> Path:
    if not isinstance(path, str | os.PathLike) or "\0" in os.fsdecode(path):
        raise DeclarationError(
            f"The location of a checkpoint must be a path, not {path!r}.",
            fix="use the directory that was passed to `Checkpointer`",
        )
    folder = Path(os.fsdecode(path))
    try:
        folder.is_dir()
    except OSError as error:  # for example, a name that is too long for the file system
        raise CheckpointError(f"{folder} cannot be read: {error.strerror}.", fix="use another directory") from None
    return folder


def array_differences(then: Mapping[str, Mapping[str, str]], trees: Mapping[str, PyTree]) -> list[str]:
    """Return the differences between the arrays of a checkpoint and those of pytrees, one line for each difference.

    Args:
        then: The arrays of the checkpoint; see `StoredCheckpoint.arrays`.
        trees: The pytrees, keyed by the name of the part.
    """
    return [line for part, tree in trees.items() for line in part_differences(part, then.get(part, {}), tree)]


def part_differences(part: str, then: Mapping[str, str], tree: PyTree) -> list[str]:
    """Return the differences in one part; see `array_differences`."""
    now = {".".join(name): text_of(leaf) for name, leaf in named(tree).items()}
    lines = [f"{part}: {shown_name(name)} ({then[name]}) is missing now" for name in then if name not in now]
    lines += [f"{part}: {shown_name(name)} ({now[name]}) is new" for name in now if name not in then]
    return lines + [
        f"{part}: {shown_name(name)} was {then[name]}, and is {now[name]} now"
        for name in then
        if name in now and then[name] != now[name]
    ]


class FolderCheckpoint(StoredCheckpoint):
    """A checkpoint in the format of `Checkpointer`.

    Args:
        path: The folder of the checkpoint.
        manifest: Its manifest, with which the files have been compared.
    """

    def __init__(self, path: Path, manifest: Manifest) -> None:
        self.path, self.manifest = path, manifest
        self.step, self.about = manifest.step, manifest.about

    def __str__(self) -> str:
        return str(self.path)

    def arrays(self) -> Mapping[str, Mapping[str, str]]:
        """Return the arrays of each tree by name."""
        return self.manifest.trees

    def read(self, trees: Mapping[str, PyTree]) -> Snapshot:
        """Return the contents of the checkpoint."""
        folder, manifest = self.path, self.manifest
        # With `allow=("callbacks",)`, a checkpoint may have entries that the Learner does not know.
        unknown = [
            part for part, tree in trees.items() if set(manifest.trees[part]) - {".".join(name) for name in named(tree)}
        ]
        # The host state comes first. It is small, so a malicious checkpoint is refused before gigabytes are read.
        with _refusing(folder):
            check_json(manifest, folder)
            host, arrays = read_host(folder, manifest.step)
        like = {part: named(tree) for part, tree in trees.items()}
        restored = _with_containers(trees, self.read_arrays(list(trees), unknown=unknown, like=like))
        return Snapshot(manifest.step, manifest.epoch, restored, host, arrays, manifest.about)

    def read_arrays(
        self,
        parts: Collection[str],
        *,
        unknown: Collection[str] = (),
        like: Mapping[str, Mapping[Name, Any]] | None = None,
    ) -> dict[str, dict[Name, Any]]:
        """Return the arrays of some parts, keyed by name. Random keys are returned as their data.

        Args:
            parts: Names of parts.
            unknown: The parts whose shapes are only known from the manifest.
            like: The arrays of the Learner, by part and name. Arrays that lie on several devices there are read with
                the same sharding, so that each process reads only its own shards. All others are NumPy arrays.
        """
        import orbax.checkpoint as ocp

        folder, manifest = self.path, self.manifest
        with _refusing(folder):
            check_json(manifest, folder)
            requested: dict[str, Any] = {}
            for part in parts:
                texts = manifest.trees[part]
                # Arrays without elements are not stored.
                names = [tuple(name.split(".")) for name, text in texts.items() if _empty(text) is None]
                if not names:
                    continue
                # Orbax allocates the sizes in the headers of the arrays, so compare them with the manifest first.
                if part in unknown:
                    check_sizes(folder, manifest, part, sum(map(nbytes_of, texts.values())))
                chunks = check_headers(folder, part, {name: texts[".".join(name)] for name in names})
                live = (like or {}).get(part, {})
                args = {name: _restore_args(live.get(name), chunks[name]) for name in names}
                requested[part] = ocp.args.PyTreeRestore(restore_args=nested(args))
            restored: Any = {}
            if requested:  # for an empty request, Orbax searches for something to restore and logs warnings (0.12.8)
                with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
                    restored = checkpointer.restore(folder.absolute(), args=ocp.args.Composite(**requested))
            arrays = {part: flat(restored[part]) if part in requested else {} for part in parts}
        return {part: _with_empty(folder, part, manifest.trees[part], arrays[part]) for part in parts}


class LoadedCheckpoint(StoredCheckpoint):
    """A checkpoint whose `Snapshot` is in memory, for simple subclasses of `RunSaver`.

    Args:
        snapshot: A snapshot from `learner.snapshots.request` or from `Snapshot.unpack`.
        place: The location where the checkpoint is stored, for messages.
    """

    def __init__(self, snapshot: Snapshot, place: str) -> None:
        self.snapshot, self.place = snapshot, place
        self.step, self.about = snapshot.step, snapshot.about

    def __str__(self) -> str:
        return self.place

    def arrays(self) -> Mapping[str, Mapping[str, str]]:
        """Return the arrays of each tree by name."""
        return {
            part: {".".join(name): text_of(leaf) for name, leaf in named(tree).items()}
            for part, tree in self.snapshot.trees.items()
        }

    def read(self, trees: Mapping[str, PyTree]) -> Snapshot:
        """Return the snapshot, with the containers of the Learner."""
        leaves = {part: named(tree) for part, tree in self.snapshot.trees.items()}
        return replace(self.snapshot, trees=_with_containers(trees, leaves))


def _with_containers(trees: Mapping[str, PyTree], leaves: Mapping[str, Mapping[Name, Any]]) -> dict[str, PyTree]:
    """Return pytrees of the same structure with other leaves. Entries of `cbstate` may be missing on either side."""
    filled: dict[str, PyTree] = {}
    for part, tree in trees.items():
        by_name = leaves.get(part, {})
        if part == "cbstate":  # entries that the checkpoint does not have keep their initial state
            names = {name[0] for name in by_name} | {name for name in tree if not jax.tree.leaves(tree[name])}
            tree = {name: entry for name, entry in tree.items() if name in names}
        filled[part] = jax.tree.unflatten(jax.tree.structure(tree), [by_name[name] for name in named(tree)])
    return filled


def _restore_args(like: Any, chunks: tuple[int, ...]) -> Any:
    """Return how Orbax reads an array: with the sharding of a live array on several devices, or as a NumPy array."""
    import orbax.checkpoint as ocp

    # Without a sharding, Orbax would place JAX arrays on the devices that the checkpoint names.
    as_numpy = ocp.RestoreArgs(restore_type=np.ndarray)
    sharding = getattr(like, "sharding", None)
    if sharding is None or is_key(like) or len(sharding.device_set) == 1:
        return as_numpy
    if _size_of_reads(sharding, like.shape, chunks) > like.size:  # reading the array once is cheaper
        return as_numpy
    return ocp.ArrayRestoreArgs(sharding=sharding, global_shape=like.shape)


def _size_of_reads(sharding: Any, shape: tuple[int, ...], chunks: tuple[int, ...]) -> int:
    """Return the number of elements that this process reads if it reads each of its shards once, in whole chunks."""
    total = 0
    for index in {str(index): index for index in sharding.addressable_devices_indices_map(shape).values()}.values():
        sizes = []
        for part, chunk, size in zip(index, chunks, shape, strict=True):
            start, stop, _ = part.indices(size)
            sizes.append(min(-(-stop // chunk) * chunk, size) - start // chunk * chunk)
        total += math.prod(sizes)
    return total


@contextlib.contextmanager
def _refusing(folder: Path) -> Iterator[None]:
    """Convert errors from reading the files of a checkpoint to CheckpointCorruptError."""
    try:
        yield
    except Exception as error:
        if isinstance(error, CheckpointCorruptError) or is_interruption(error):
            raise
        raise CheckpointCorruptError(
            f"{folder} cannot be read, although its checksums are correct: {type(error).__name__}: {error}",
            where=str(folder),
        ) from error


def _with_empty(folder: Path, part: str, texts: Mapping[str, str], found: Mapping[Any, Any]) -> dict[Any, Any]:
    """Return the arrays of a part, including those that are not stored because they have no elements.

    Raises:
        CheckpointCorruptError: The arrays do not match the manifest.
    """
    # The result is compared again, because Orbax may return arrays that do not match the headers.
    arrays = dict(found)
    for name, text in texts.items():
        key = tuple(name.split("."))
        array = arrays.setdefault(key, _empty(text))
        is_array = isinstance(array, np.ndarray | jax.Array)
        if not is_array or not (text_of(array) == text or is_key_data(array.dtype, array.shape, text)):
            kind = text_of(array) if is_array else type(array).__name__
            raise CheckpointCorruptError(
                f"{folder} has {kind} for {part}: {name}, but its manifest lists {text}.", where=str(folder)
            )
    return arrays


def _empty(text: str) -> np.ndarray | None:
    """Return the array that a text such as `float32[0, 3]` describes if it has no elements, otherwise None."""
    dtype, _, shape = text[:-1].partition("[")
    sizes = [int(size) for size in shape.split(", ")] if shape else []
    return np.empty(sizes, jnp.dtype(dtype)) if 0 in sizes else None
