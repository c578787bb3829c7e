"""Write a checkpoint: Orbax writes the trees of arrays, and a manifest lists all files and their checksums."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from fluxcb._errors import CheckpointError
from fluxcb._memory import release_freed_memory
from fluxcb.checkpoints.agreement import Agreement
from fluxcb.checkpoints.failures import fix_of, quiet_orbax, reason_of
from fluxcb.checkpoints.host_file import write_host
from fluxcb.checkpoints.manifest import Manifest, sums_of
from fluxcb.checkpoints.naming import named, nested, sequences
from fluxcb.checkpoints.run_folder import Entry, RunFolder, sync
from fluxcb.checkpoints.snapshot import Snapshot, is_key, text_of

__all__ = ["finite", "save"]

T = TypeVar("T")

# Savers use the synchronous checkpointer of Orbax in their own threads, one at a time. If asynchronous saves of Orbax
# overlap in a process, one of them waits for signals of another save, and hangs (0.12.8).
_ORBAX_LOCK = threading.Lock()

# The limits of the memory that a save of several processes needs besides the snapshot. Without them, TensorStore copies
# all arrays that it cannot write from the snapshot's memory, because their chunks are not contiguous there.
_CHUNK_BYTES = 2 << 20
"""Size of the chunks into which large arrays are divided, each of which is written and read as one."""
_LARGEST_CHUNK_BYTES = 64 << 20
"""Size up to which a part of an array is one chunk, if smaller chunks would not be contiguous in memory."""
_DATA_FILE_BYTES = 8 << 20
"""Size of the data that TensorStore collects before it writes it to a file, unless a single chunk is larger."""
_BYTES_IN_FLIGHT = 16 << 20
"""Size of the arrays that are written at the same time, unless a single array is larger."""

_PIECE = 1 << 20
"""Number of elements that are checked for NaN at the same time."""


def save(
    folder: RunFolder,
    snapshot: Snapshot,
    *,
    run: str,
    value: float | None,
    metric: str | None = None,
    how_to_continue: str = "",
    agreement: Agreement | None = None,
) -> Entry | None:
    """Write a checkpoint, and return when it is complete and on disk.

    In a multi-host run, all processes must call this function, possibly on a background thread. Each process writes its
    arrays and computes the checksums of its files. Process 0 commits the checkpoint.

    Args:
        folder: The directory of the run, locked by process 0.
        snapshot: The state to save.
        run: Identifier of the run.
        value: The value that decides which checkpoints are the best, or None.
        metric: The name of the metric whose value it is, or None.
        how_to_continue: The call that continues the run from a checkpoint in the directory, for the error message.
        agreement: How the processes agree; required on a background thread.

    Returns:
        The checkpoint on process 0, and None on all other processes.

    Raises:
        CheckpointError: The checkpoint could not be written. Its incomplete files are deleted, and older checkpoints
            are not changed.
    """
    agreement = agreement or Agreement()
    path, chief = folder.saving(snapshot.step), jax.process_index() == 0
    trees: dict[str, Any] = {}
    entry, failure = None, None

    def prepare() -> None:
        trees.update(_trees(snapshot))
        if chief:
            folder.require_lock()
            folder.clear(path)
            if jax.process_count() > 1:
                path.mkdir()
                for part in trees:
                    (path / part).mkdir()

    def write() -> dict[str, list[Any]]:
        with quiet_orbax():  # the error of `save` names the cause
            _write_arrays(path, trees)
        if chief:
            return {}  # process 0 also writes the index of all files, which it can do only after the others
        sums = sums_of(path, jax.process_index())
        for name in sums:
            sync(path / name)
        return sums

    def commit(sums: dict[str, list[Any]]) -> None:
        nonlocal entry
        if jax.process_count() > 1:
            for part in trees:
                ocp.PyTreeCheckpointHandler().finalize(epath.Path(path / part))
        write_host(path, snapshot)
        manifest = make_manifest(snapshot, run, value, path)
        replace(manifest, metric=metric, files={**manifest.files, **sums}).write(path)
        entry = folder.commit(path, snapshot.step)

    def attempt(action: Callable[..., T], *args: Any) -> tuple[str, T | None]:
        """Return what made an action fail, or an empty string, and its result."""
        nonlocal failure
        try:
            return "", action(*args)
        except Exception as error:
            failure = error
            return reason_of(error, folder.path), None

    def end(texts: list[str]) -> str:
        reports = [json.loads(text) for text in texts]
        problem = _first_problem([problem for problem, _ in reports])
        problem = problem or attempt(commit, {k: v for _, sums in reports for k, v in (sums or {}).items()})[0]
        if problem:
            folder.clear(path)
        return problem

    try:
        # No process may write before process 0 has cleared the folder.
        problem = agreement.exchange(attempt(prepare)[0], _first_problem)
        problem = problem or agreement.exchange(json.dumps(attempt(write)), end)
    except CheckpointError as error:  # the agreement was abandoned
        problem, failure = error.what.removesuffix("."), error
    if problem:
        problem = reason_of(failure, folder.path) if failure is not None else problem
        fix = [fix_of(failure, folder.path)]
        with contextlib.suppress(CheckpointError):  # the directory cannot be read
            if how_to_continue and folder.entries():
                fix.append(f"continue later from the newest checkpoint: {how_to_continue}")
        raise CheckpointError(
            f"Cannot write the checkpoint of step {snapshot.step} to {folder.path}: {problem}.",
            why="older checkpoints are unchanged",
            fix=fix,
        ) from failure
    return entry


def _write_arrays(path: Path, trees: Mapping[str, Any]) -> None:
    """Write the arrays of this process."""
    if jax.process_count() > 1:
        # The checkpointers of Orbax call collectives, or wait for a process that has failed for minutes.
        for part, tree in trees.items():
            # The heaps of threads keep the memory that compiling, training, or TensorStore's copies have freed.
            release_freed_memory()
            largest = max(_local_bytes(leaf) for leaf in jax.tree.leaves(tree.item))
            # Orbax requires that each array is smaller than the limit.
            limit: Any = (max(largest, _BYTES_IN_FLIGHT) + 1) / 1e9  # Orbax declares an int, but takes fractions
            # TensorStore writes uncompressed chunks from the snapshot's memory. It would compress all chunks of an
            # array at once, and hold the results until they are written.
            handler = ocp.PyTreeCheckpointHandler(save_concurrent_gb=limit, use_compression=False)
            handler.save(epath.Path(path / part), args=tree)
        release_freed_memory()
    elif trees:
        with _ORBAX_LOCK, ocp.Checkpointer(_handler()) as checkpointer:
            checkpointer.save(path, args=ocp.args.Composite(**trees))
    else:  # a custom loop may have no train state, and Orbax refuses to save an empty checkpoint
        path.mkdir()


def _first_problem(problems: list[str]) -> str:
    found = [(process, problem) for process, problem in enumerate(problems) if problem]
    return f"process {found[0][0]} reports: {found[0][1]}" if found else ""


def make_manifest(snapshot: Snapshot, run: str, value: float | None, folder: Path) -> Manifest:
    """Return the manifest for the files that process 0 has written to a folder."""
    leaves = {name: named(tree) for name, tree in snapshot.trees.items()}
    return Manifest(
        run=run,
        step=snapshot.step,
        epoch=snapshot.epoch,
        at=snapshot.host["at"],
        ended=snapshot.host["fit"]["ended"],
        value=value,
        average=snapshot.average,
        trees={name: {".".join(n): text_of(x) for n, x in of.items()} for name, of in leaves.items()},
        sequences={name: sequences(tree) for name, tree in snapshot.trees.items()},
        about=json.loads(json.dumps(snapshot.about)),
        files=sums_of(folder),
    )


def _handler() -> Any:
    # If Orbax creates directories asynchronously and that fails, its threads wait five minutes for them (0.12.8).
    options = ocp.options.AsyncOptions(create_directories_asynchronously=False)
    return ocp.CompositeCheckpointHandler(composite_options=ocp.CompositeOptions(async_options=options))


def _trees(snapshot: Snapshot) -> dict[str, Any]:
    items: dict[str, Any] = {}
    for name, tree in snapshot.trees.items():
        leaves = {n: _data(leaf) for n, leaf in named(tree).items() if leaf.size}
        if leaves:  # Orbax refuses empty trees and arrays without elements
            tree = nested(leaves)
            sizes = jax.tree.map(_chunk_bytes, tree)
            chunks = jax.tree.map(lambda size: ocp.SaveArgs(chunk_byte_size=size), sizes)
            file_bytes = max(_DATA_FILE_BYTES, *jax.tree.leaves(sizes))
            items[name] = ocp.args.PyTreeSave(tree, save_args=chunks, ocdbt_target_data_file_size=file_bytes)
    return items


def _chunk_bytes(leaf: Any) -> int:
    """Return the largest size of the chunks into which an array is divided (bytes)."""
    if jax.process_count() == 1 or isinstance(leaf, np.ndarray):
        return _CHUNK_BYTES
    size = _local_bytes(leaf)
    if not _CHUNK_BYTES < size <= _LARGEST_CHUNK_BYTES:
        return _CHUNK_BYTES
    part = leaf.sharding.shard_shape(leaf.shape)
    # Orbax first divides the dimension that is sharded. Blocks of rows are contiguous, and blocks of columns are not.
    by_rows = part[0] < leaf.shape[0] and part[1:] == leaf.shape[1:]
    return _CHUNK_BYTES if by_rows else size


def _local_bytes(leaf: Any) -> int:
    """Return the size of the largest part of an array that this process writes at once (bytes)."""
    return leaf.nbytes if isinstance(leaf, np.ndarray) else max(shard.data.nbytes for shard in leaf.addressable_shards)


def _data(leaf: Any) -> Any:
    return np.asarray(jax.random.key_data(leaf)) if is_key(leaf) else leaf


def finite(trees: Mapping[str, Any]) -> bool:
    """Return whether all parameters and the model state are finite.

    In a multi-host run, all processes must call this function, because each process checks its own shards.
    """
    local_parts = (
        part
        for leaf in jax.tree.leaves([trees["params"], trees["model_state"]])
        if not is_key(leaf) and jax.numpy.issubdtype(leaf.dtype, np.inexact)
        for part in ([leaf] if isinstance(leaf, np.ndarray) else [shard.data for shard in leaf.addressable_shards])
    )
    problem = "" if all(map(_is_finite, local_parts)) else "not finite"
    return not Agreement().exchange(problem, _first_problem)


def _is_finite(part: Any) -> bool:
    numbers = np.asarray(part).reshape(-1)
    # In pieces, because `np.isfinite` returns an array of a quarter of the size.
    return all(np.isfinite(numbers[at : at + _PIECE]).all() for at in range(0, numbers.size, _PIECE))
