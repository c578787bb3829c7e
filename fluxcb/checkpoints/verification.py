"""Finding the newest good checkpoint of a run, and comparing its files with their checksums."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fluxcb._errors import CheckpointCorruptError, CheckpointError
from fluxcb._terminal import escape_line
from fluxcb._tracebacks import warn_user
from fluxcb.checkpoints.agreement import Agreement
from fluxcb.checkpoints.manifest import Manifest
from fluxcb.checkpoints.run_folder import Entry, ResumeWarning, entries_of, name_of, read_manifest, refuse_runs

__all__ = ["newest_good", "verify_checkpoint"]


def newest_good(
    folder: Path, *, together: bool = False, damaged: set[Path] | None = None
) -> tuple[Entry, Manifest] | None:
    """Return the newest undamaged checkpoint, and warn about newer ones that are damaged, which are not changed.

    Args:
        folder: The directory of the run.
        together: Whether all processes call the function. They then use the checkpoint that process 0 finds, because a
            shared file system may be out of date on another host. Each of them verifies a part of the files.
        damaged: A set to which the folders of damaged checkpoints are added.

    Returns:
        The checkpoint and its verified manifest, or None if there are no checkpoints.

    Raises:
        CheckpointError: There are checkpoints, but all are damaged.
    """
    of_first = Agreement().of_first if together else _called
    skipped: list[str] = []
    fixes: dict[str, None] = {}
    for step, number in of_first(lambda: [(entry.step, entry.number) for entry in reversed(entries_of(folder))]):
        entry = Entry(step, number, folder / name_of(step, number))
        try:
            manifest = verify_checkpoint(entry.path, together=together)
        except CheckpointCorruptError as error:
            if not of_first(entry.path.is_dir):  # deleted by a running fit, which has written a newer one before that
                return newest_good(folder, together=together, damaged=damaged)
            skipped.append(f"{entry.path.name}: {error.what}")
            fixes.update(dict.fromkeys(error.fix))
            if damaged is not None:
                damaged.add(entry.path)
            continue
        if skipped:
            warn_user(
                f"Using the checkpoint {entry.path.name} in {folder}, because newer ones are damaged: "
                + escape_line("; ".join(skipped)),
                ResumeWarning,
            )
        return entry, manifest
    if not skipped:
        of_first(lambda: refuse_runs(folder))
        return None
    raise CheckpointError(
        f"All checkpoints in {folder} are damaged ({len(skipped)} in total). No files were deleted.",
        where=skipped,
        why="starting a new run instead would silently discard the earlier training",
        fix=[*fixes, "restore valid checkpoints from a copy", "start a new run in another directory"],
    )


def verify_checkpoint(path: Path, *, together: bool = False) -> Manifest:
    """Compare every file of a checkpoint with its manifest, and return the manifest.

    Args:
        path: The folder of the checkpoint.
        together: Whether all processes call the function. Each of them verifies a part of the files.

    Raises:
        CheckpointCorruptError: A file is missing, was added, or differs.
    """

    def verified() -> Manifest:
        manifest = read_manifest(path)
        manifest.verify(path, *share)
        return manifest

    share = (0, 1)
    if not together:
        return verified()
    import jax

    share = jax.process_index(), jax.process_count()
    return Agreement().on_all(verified)


def _called(function: Callable[[], Any]) -> Any:
    return function()
