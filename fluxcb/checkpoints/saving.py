"""Writing one checkpoint: orbax writes the arrays, and a manifest says what must be there."""

from __future__ import annotations

import errno
import json
import os
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from fluxcb._errors import CheckpointError, FluxcbError
from fluxcb.checkpoints.fields import ARRAYS, HOST
from fluxcb.checkpoints.manifest import Manifest, sums_of
from fluxcb.checkpoints.naming import named, nested, sequences
from fluxcb.checkpoints.packing import PACKED, packed
from fluxcb.checkpoints.run_folder import Entry, RunFolder
from fluxcb.checkpoints.snapshot import Snapshot, is_key, text_of

__all__ = ["finite", "save"]

# Orbax numbers the saves of a process, and one waits for signals under the number of another if they overlap (0.12.8).
_ONE_AT_A_TIME = threading.Lock()


def save(folder: RunFolder, snapshot: Snapshot, *, run: str, value: float | None) -> Entry | None:
    """Write a checkpoint, and return when it is there to stay.

    In a training of several processes all of them call this, and share in writing; process 0 commits.

    Args:
        folder: The directory of the run, locked by process 0.
        snapshot: What to save.
        run: Tells runs apart.
        value: The value that decides which checkpoints are the best, or None.

    Returns:
        What was written; None in other processes than 0.

    Raises:
        CheckpointError: It could not be written; what there was of it is deleted, and older ones are untouched.
    """
    path, entry, failure = folder.saving(snapshot.step), None, None
    chief = jax.process_index() == 0
    try:
        if chief:
            folder.still_mine()
            folder.clear(path)
        _agree(None)
        with _ONE_AT_A_TIME, ocp.Checkpointer(_handler()) as checkpointer:
            checkpointer.save(path, args=_items(snapshot))
        if chief:
            manifest_of(snapshot, run, value, path).write(path)
            entry = folder.commit(path, snapshot.step)
    except Exception as error:
        failure = error
    told = _agree(f"{_told(failure, folder.path)}" if failure is not None else None)
    if told is not None:
        if chief:
            folder.clear(path)
        raise CheckpointError(
            f"The checkpoint of step {snapshot.step} could not be written to {folder.path}: {told}.",
            why="older checkpoints are as they were",
            fix=["make room, or name another directory", "go on later with `learner.fit(..., resume=True)`"],
        ) from failure
    return entry


def manifest_of(snapshot: Snapshot, run: str, value: float | None, folder: Path) -> Manifest:
    """Return the manifest of what has been written to a folder."""
    trees = {**snapshot.trees, ARRAYS: snapshot.arrays}
    leaves = {name: named(tree) for name, tree in trees.items()}
    return Manifest(
        run=run,
        step=snapshot.step,
        epoch=snapshot.epoch,
        at=snapshot.host["at"],
        ended=snapshot.host["fit"]["ended"],
        value=value,
        average=snapshot.average,
        trees={name: {".".join(n): text_of(x) for n, x in of.items()} for name, of in leaves.items()},
        sequences={name: sequences(tree) for name, tree in trees.items()},
        about=json.loads(json.dumps(snapshot.about)),
        files=sums_of(folder),
    )


def _handler() -> Any:
    # With folders that are made beside, threads wait for five minutes for a folder that could not be made (0.12.8).
    at_once = ocp.options.AsyncOptions(create_directories_asynchronously=False)
    return ocp.CompositeCheckpointHandler(composite_options=ocp.CompositeOptions(async_options=at_once))


def _items(snapshot: Snapshot) -> Any:
    items: dict[str, Any] = {HOST: ocp.args.JsonSave(dict(snapshot.host))}
    trees = {name: {n: x for n, x in named(tree).items() if x.size} for name, tree in snapshot.trees.items()}
    trees[ARRAYS] = {(PACKED,): packed(snapshot.arrays)} if snapshot.arrays else {}
    for name, leaves in trees.items():
        if leaves:  # orbax refuses empty trees, and arrays without elements
            items[name] = ocp.args.PyTreeSave(nested({n: _data(leaf) for n, leaf in leaves.items()}))
    return ocp.args.Composite(**items)


def _data(leaf: Any) -> Any:
    return np.asarray(jax.random.key_data(leaf)) if is_key(leaf) else leaf


def finite(trees: Mapping[str, Any]) -> bool:
    """Tell whether all parameters and the model's state are finite: what others are not worth going back to.

    In a training of several processes all of them call this, because each looks at the parts that it has.
    """
    held = (
        part
        for leaf in jax.tree.leaves([trees["params"], trees["model_state"]])
        if not is_key(leaf) and jax.numpy.issubdtype(leaf.dtype, np.inexact)
        for part in ([leaf] if isinstance(leaf, np.ndarray) else [shard.data for shard in leaf.addressable_shards])
    )
    return _agree(None if all(np.isfinite(part).all() for part in held) else "not finite") is None


def _agree(failure: str | None) -> str | None:
    """Wait for the other processes; return what failed in one of them, or here, or None."""
    if jax.process_count() == 1:
        return failure
    from jax.experimental import multihost_utils

    failed = np.asarray(multihost_utils.process_allgather(np.int32(failure is not None))).nonzero()[0]
    return failure or (f"process {failed[0]} failed" if len(failed) else None)


def _told(error: BaseException, folder: Path) -> str:
    """Return what went wrong in a line; orbax tells of a full disk in the middle of a long ValueError."""
    if isinstance(error, FluxcbError):
        return error.what.removesuffix(".")
    code = getattr(error, "errno", None)
    found = re.search(r"os_error_code='(\d+)'", str(error))
    if code is None and found is not None:
        code = int(found[1])
    if code is None:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    told = os.strerror(code)
    if code == errno.ENOSPC:
        space = os.statvfs(folder)
        told += f" ({space.f_bavail * space.f_frsize / 2**20:.1f} MiB free)"
    return told
