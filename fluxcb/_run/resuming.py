"""Resuming: a Learner goes to where a checkpoint on disk was written."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from fluxcb._declare.callback import unwrap
from fluxcb._errors import CheckpointError, DeclarationError, ResumeError
from fluxcb._run.assembly import Assembly
from fluxcb._run.snapshots import DIFFERENCES
from fluxcb._tracebacks import stacklevel_of_user
from fluxcb.callbacks.checkpointer import Checkpointer
from fluxcb.checkpoints.manifest import Manifest
from fluxcb.checkpoints.run_folder import ResumeWarning, name_of, newest_good

__all__ = ["own_checkpointer", "restore_run", "resume_run"]


def resume_run(parts: Assembly) -> None:
    """Go to the newest good checkpoint of the Learner's own Checkpointer, if there is one and it is further on.

    Raises:
        CheckpointError: There is not exactly one Checkpointer, or no checkpoint is whole.
        ResumeError: It is another run's.
    """
    if parts.state.fit.restored:  # by `learner.restore`, and nothing has been trained since
        return
    found = _checkpointers(parts)
    if len(found) != 1:
        raise CheckpointError(
            f"`fit(resume=True)` continues the run of a Checkpointer, and this Learner has {len(found) or 'none'}.",
            fix=[
                "keep one Checkpointer in the callbacks" if found else 'add `Checkpointer("runs/1")` to the callbacks',
                "to continue from a checkpoint that exists, call `learner.restore(path)` before `fit`",
            ],
        )
    newest = _newest(found[0].folder)
    if newest is not None:
        restore_run(parts, newest, ())


def _newest(folder: Path) -> Path | None:
    """Return the newest good checkpoint, as process 0 sees it: a shared file system may show another one elsewhere."""
    found = newest_good(folder) if jax.process_index() == 0 else None
    entry = found[0] if found is not None else None
    if jax.process_count() == 1:
        return entry.path if entry is not None else None
    from jax.experimental import multihost_utils

    number = np.array((entry.step, entry.number) if entry is not None else (-1, 0), np.int32)
    step, number = (int(part) for part in multihost_utils.broadcast_one_to_all(number))
    return folder / name_of(step, number) if step >= 0 else None


def own_checkpointer(parts: Assembly) -> Checkpointer | None:
    """Return the callback that saves the run, if there is exactly one."""
    found = _checkpointers(parts)
    return found[0] if len(found) == 1 else None


def _checkpointers(parts: Assembly) -> list[Checkpointer]:
    return [c for d in parts.graph.declared if isinstance(c := unwrap(d.callback), Checkpointer)]


def restore_run(
    parts: Assembly, path: str | os.PathLike[str], allow: Collection[str], *, staying: Collection[str] = ()
) -> None:
    """Go to where a checkpoint was written.

    Args:
        parts: The parts of the Learner.
        path: The directory of a run, or that of one checkpoint.
        allow: What may differ, of `DIFFERENCES`.
        staying: Names of data that stays where it is.

    Raises:
        CheckpointError: There is none, or none that is whole.
        ResumeError: It is another run's.
    """
    from fluxcb.checkpoints.loading import find, read_snapshot, tree_differences  # orbax, when it is needed

    if isinstance(allow, str) or not set(allow) <= set(DIFFERENCES):
        raise DeclarationError(
            f"`allow` takes some of {DIFFERENCES}, not {allow!r}.", fix='e.g. `learner.restore(path, allow=("data",))`'
        )
    folder, manifest = find(path)
    snapshots = parts.state.snapshots
    trees = snapshots.trees()
    wrong, inexact = snapshots.differences(manifest.about, allow)
    wrong += tree_differences(manifest, _compared(manifest, trees, allow))
    if wrong:
        raise ResumeError(
            f"{folder} is a checkpoint of another run than this one.",
            where=wrong,
            why="going on would give neither this run nor that one",
            fix=[
                "build the Learner as it was when the run began",
                f"say what is meant to differ: `learner.restore({str(path)!r}, allow=(...))`, of {DIFFERENCES}",
                f"take the parameters only: `fluxcb.checkpoints.load_params({str(path)!r})`",
            ],
        )
    inexact += snapshots.put_back(read_snapshot(folder, manifest, trees), staying)
    if inexact:
        warnings.warn(
            f"The run goes on from {folder}, and not everything is as it was: {'; '.join(inexact)}",
            ResumeWarning,
            stacklevel=stacklevel_of_user(),
        )


def _compared(manifest: Manifest, trees: Mapping[str, Any], allow: Collection[str]) -> dict[str, Any]:
    """Return what has to be the same in the checkpoint: without the entries of callbacks that may differ."""
    if "callbacks" not in allow:
        return dict(trees)
    saved = {name.split(".")[0] for name in manifest.trees["cbstate"]}
    return {**trees, "cbstate": {name: entry for name, entry in trees["cbstate"].items() if name in saved}}
