"""The directory of one run: its checkpoints, and its lock."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fluxcb._errors import CheckpointCorruptError, CheckpointError
from fluxcb.checkpoints.fields import HOST
from fluxcb.checkpoints.manifest import MANIFEST, Manifest

__all__ = ["Entry", "ResumeWarning", "RunFolder", "is_checkpoint", "name_of", "newest_good", "whole"]

LOCK = "fluxcb.lock"
_SAVING, _TRASH = ".saving-", ".trash-"
_ASIDE = "superseded-"
_NAME = re.compile(r"(0|[1-9][0-9]*)(?:\.([1-9][0-9]*))?")


class ResumeWarning(UserWarning):
    """A run goes on otherwise than it was meant to: from an older checkpoint, or on another machine."""


@dataclass(frozen=True, order=True)
class Entry:
    """One checkpoint of a run; later ones are greater.

    Attributes:
        step: Finished training steps.
        number: Tells those of one step apart: at the end of an epoch's last step, and when the epoch is done.
        path: Its folder.
    """

    step: int
    number: int
    path: Path


class RunFolder:
    """A directory that one run writes its checkpoints to.

    A checkpoint is a folder with the number of its step as its name, there only when it is complete: it is written
    under another name, and renamed. One that is deleted is renamed first, too. What was written last is the newest: a
    run that went back keeps what it had come to before, under names that nothing reads.

    Args:
        path: The directory; it is made when it is locked.

    Attributes:
        found: The newest checkpoint of the step at which the fit began, with its manifest, until it is asked for.
        last: What tells the checkpoint that was last asked for from others of its step, or None.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: tuple[Entry, Manifest] | None = None
        self.last: tuple[Any, ...] | None = None
        self._lock: int | None = None

    def entries(self) -> list[Entry]:
        """Return the checkpoints, oldest first."""
        return entries_of(self.path)

    def kept(self) -> tuple[list[tuple[Entry, Manifest]], list[str]]:
        """Return the checkpoints with their manifests, oldest first, and what is wrong with those that have none."""
        kept, damaged = [], []
        for entry in self.entries():
            try:
                kept.append((entry, manifest_of(entry.path)))
            except CheckpointCorruptError as error:
                damaged.append(f"{entry.path.name}: {error.what}")
        return kept, damaged

    # -- one run at a time ------------------------------------------------------------------

    def lock(self) -> None:
        """Make the directory, keep others from writing to it, and clear away what killed runs left half-done.

        Raises:
            CheckpointError: Another run writes to it, or it cannot be written to.
        """
        if self._lock is not None:
            return
        import fcntl

        try:
            self.path.mkdir(parents=True, exist_ok=True)
            handle = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise self._not_writable(error) from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(handle, 200).decode(errors="replace").strip() or "another run"
            os.close(handle)
            raise CheckpointError(
                f"Another run is writing its checkpoints to {self.path}: {holder}.",
                why="two runs in one directory would mix their checkpoints",
                fix="give each run a directory of its own",
            ) from error
        self._lock = handle
        try:
            os.ftruncate(handle, 0)
            holder = f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}"
            os.pwrite(handle, holder.encode(), 0)
            for left in (*self.path.glob(f"{_SAVING}*"), *self.path.glob(f"{_TRASH}*")):
                shutil.rmtree(left, ignore_errors=True)
            probe = self.path / f"{_SAVING}probe"
            probe.mkdir()
            probe.rmdir()
        except OSError as error:
            self.unlock()
            raise self._not_writable(error) from error

    def _not_writable(self, error: OSError) -> CheckpointError:
        return CheckpointError(
            f"Checkpoints cannot be written to {self.path}: {error.strerror or error}.",
            why="it would be noticed at the first save, hours later",
            fix="name a directory that you may write to, with room in it",
        )

    def still_mine(self) -> None:
        """Find out whether the directory is the one that was locked.

        Raises:
            CheckpointError: It is gone, or another is in its place.
        """
        try:
            mine = self._lock is not None and os.path.samestat(os.fstat(self._lock), os.stat(self.path / LOCK))
        except OSError:
            mine = False
        if not mine:
            raise CheckpointError(f"The directory, or {LOCK} in it, was removed or replaced while the run wrote to it.")

    def unlock(self) -> None:
        """Let others write to the directory."""
        if self._lock is not None:
            os.close(self._lock)  # which releases it
            self._lock = None

    # -- writing ----------------------------------------------------------------------------

    def saving(self, step: int) -> Path:
        """Return where the checkpoint of a step is written before `commit`."""
        return self.path / f"{_SAVING}{step}"

    def clear(self, written: Path) -> None:
        """Delete what a save left half-done, so that it takes no space."""
        for left in self.path.glob(f"{written.name}*"):
            shutil.rmtree(left, ignore_errors=True)

    def commit(self, written: Path, step: int) -> Entry:
        """Make what was written a checkpoint, in one step that a kill or a power loss cannot divide."""
        _sync_tree(written)
        entries = self.entries()
        for entry in entries:
            if entry.step > step:
                self._set_aside(entry)
        number = max((entry.number for entry in entries if entry.step == step), default=-1) + 1
        while os.path.lexists(path := self.path / name_of(step, number)):
            number += 1  # something that is no checkpoint has the name
        os.rename(written, path)
        _sync(self.path)
        return Entry(step, number, path)

    def _set_aside(self, entry: Entry) -> None:
        """Give a checkpoint a name that is none of a checkpoint: the run went back to before it, or it is damaged."""
        aside = self.path / f"{_ASIDE}{entry.path.name}"
        while os.path.lexists(aside):
            aside = aside.with_name(f"{aside.name}-")
        os.rename(entry.path, aside)

    def remove(self, entry: Entry) -> None:
        """Delete a checkpoint; killed meanwhile, it is either there and whole, or no checkpoint any more."""
        trash = self.path / f"{_TRASH}{entry.path.name}"
        shutil.rmtree(trash, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            os.rename(entry.path, trash)
            shutil.rmtree(trash, ignore_errors=True)


def name_of(step: int, number: int) -> str:
    """Return the name of a checkpoint's folder."""
    return f"{step}.{number}" if number else f"{step}"


def entries_of(folder: Path) -> list[Entry]:
    """Return the checkpoints in a directory, oldest first; whether they are whole is another question.

    Raises:
        CheckpointError: The directory cannot be read.
    """
    found = []
    try:
        for path in folder.iterdir():
            match = _NAME.fullmatch(path.name)
            if match is not None and path.is_dir():
                found.append(Entry(int(match[1]), int(match[2] or 0), path))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(
            f"{folder} cannot be searched for checkpoints: {error.strerror or error}.",
            fix="name a directory that you may read",
        ) from error
    return sorted(found)


def newest_good(folder: Path) -> tuple[Entry, Manifest] | None:
    """Return the newest checkpoint that is whole; warn of the newer ones that are not, and leave them alone.

    Returns:
        It, and its manifest, verified; None if there is no checkpoint at all.

    Raises:
        CheckpointError: There are some, and none is whole.
    """
    skipped: list[str] = []
    for entry in reversed(entries_of(folder)):
        try:
            manifest = whole(entry.path)
        except CheckpointCorruptError as error:
            skipped.append(f"{entry.path.name}: {error.what}")
            continue
        if skipped:
            warnings.warn(
                f"The checkpoint {entry.path.name} in {folder} is used, because newer ones are damaged: "
                + "; ".join(skipped),
                ResumeWarning,
                stacklevel=2,
            )
        return entry, manifest
    if not skipped:
        return None
    raise CheckpointError(
        f"None of the {len(skipped)} checkpoints in {folder} is whole; nothing was deleted.",
        where=skipped,
        why="a run that began anew instead would lose what was trained without a word",
        fix=["copy good ones to it", "train in another directory"],
    )


def whole(path: Path) -> Manifest:
    """Return the manifest of a checkpoint, of which every file is what was written.

    Raises:
        CheckpointCorruptError: One is not.
    """
    manifest = manifest_of(path)
    manifest.verify(path)
    return manifest


def manifest_of(path: Path) -> Manifest:
    """Return the manifest of a checkpoint, which has the name of its step if its name is one.

    Raises:
        CheckpointCorruptError: It cannot be read, or it is another step's.
    """
    manifest, match = Manifest.read(path), _NAME.fullmatch(path.name)
    if match is not None and int(match[1]) != manifest.step:
        raise CheckpointCorruptError(
            f"{path / MANIFEST} is of step {manifest.step}: the folder was renamed, or files were exchanged.",
            where=str(path / MANIFEST),
            fix="give it back its name",
        )
    return manifest


def is_checkpoint(path: Path) -> bool:
    """Tell whether a path is that of one checkpoint, maybe damaged, and not that of a run."""
    if os.path.lexists(path / LOCK):
        return False
    if os.path.lexists(path / MANIFEST) or os.path.lexists(path / HOST):
        return True
    return _NAME.fullmatch(path.name) is not None and path.is_dir() and os.path.lexists(path.parent / LOCK)


def _sync_tree(folder: Path) -> None:
    for base, _, names in os.walk(folder, topdown=False):
        for name in names:
            _sync(Path(base) / name)
        _sync(Path(base))


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
