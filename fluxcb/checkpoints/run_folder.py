"""The directory of one run: its checkpoints, and its lock."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fluxcb._errors import CheckpointCorruptError, CheckpointError
from fluxcb.checkpoints.failures import fix_of
from fluxcb.checkpoints.manifest import HOST_JSON, MANIFEST, Manifest

__all__ = [
    "Entry",
    "ResumeWarning",
    "RunFolder",
    "entries_of",
    "is_checkpoint",
    "is_run",
    "name_of",
    "read_manifest",
    "refuse_runs",
    "sync",
]

LOCK = "fluxcb.lock"
_SAVING, _TRASH = ".saving-", ".trash-"
_SUPERSEDED = "superseded-"
_NAME = re.compile(r"(0|[1-9][0-9]*)(?:\.([1-9][0-9]*))?")
_HOLDER = re.compile(r"process ([0-9]+) on (.*), since .*")

_locked: set[RunFolder] = set()
# A fork waits until no lock is being taken, so that `_locked` contains every lock that the forked process inherits.
_taking = threading.RLock()


class ResumeWarning(UserWarning):
    """A run resumes under unexpected conditions, for example from an older checkpoint or on another machine."""


@dataclass(frozen=True, order=True)
class Entry:
    """One checkpoint of a run. Entries are ordered from oldest to newest.

    Attributes:
        step: Number of finished training steps.
        number: Distinguishes checkpoints of the same step, for example after the last step of an epoch and after its
            validation.
        path: The folder of the checkpoint.
    """

    step: int
    number: int
    path: Path


class RunFolder:
    """A directory to which one run writes its checkpoints.

    A checkpoint is a folder whose name is the number of its step. It is written under another name and renamed when it
    is complete, and it is renamed again before it is deleted. Therefore, a folder with such a name is always complete.
    When a run rewinds, checkpoints of later steps are renamed so that they are no longer read. Therefore, the last
    written checkpoint is always the one with the highest step.

    Args:
        path: The directory. It is created when it is locked.

    Attributes:
        found: The newest checkpoint of the step at which the fit began, with its manifest, until the first save.
        damaged: The folders of checkpoints that were found to be damaged.
        last: Position of the last requested save, or None. It prevents a second checkpoint of the same state.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.found: tuple[Entry, Manifest] | None = None
        self.last: tuple[Any, ...] | None = None
        self.damaged: set[Path] = set()
        self._lock: int | None = None

    def entries(self) -> list[Entry]:
        """Return the checkpoints, oldest first."""
        return entries_of(self.path)

    def kept(self) -> tuple[list[tuple[Entry, Manifest]], list[str]]:
        """Return the checkpoints with their manifests, oldest first, and a message for each unreadable manifest."""
        kept, damaged = [], []
        for entry in self.entries():
            try:
                kept.append((entry, read_manifest(entry.path)))
            except CheckpointCorruptError as error:
                damaged.append(f"{entry.path.name}: {error.what}")
        return kept, damaged

    def undamaged(self) -> list[tuple[Entry, Manifest]]:
        """Return the checkpoints to which a run could go back, oldest first.

        Checksums are not computed, because reading all files after each save would take too long. A checkpoint whose
        checksums differ is left out if it was found before, for example when the run resumed.
        """
        found = []
        for entry, manifest in self.kept()[0]:
            if entry.path in self.damaged:
                continue
            with contextlib.suppress(CheckpointCorruptError):
                manifest.verify(entry.path, part=None)
                found.append((entry, manifest))
        return found

    def older(self, than: Entry) -> list[Entry]:
        """Return all older checkpoints, including damaged ones."""
        return [entry for entry in self.entries() if entry < than]

    # -- locking ----------------------------------------------------------------------------

    def lock(self) -> None:
        """Create the directory, and prevent other runs from writing to it.

        Raises:
            CheckpointError: Another run writes to the directory, or it is not writable.
        """
        if self._lock is not None:
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with _taking:
                handle = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
                self._take(handle)
        except OSError as error:
            raise self._not_writable(error) from error
        try:
            os.ftruncate(handle, 0)
            holder = f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}"
            os.pwrite(handle, holder.encode(), 0)
            probe = self.path / f"{_SAVING}probe"  # fails now, and not at the first save, if there is no space
            probe.mkdir(exist_ok=True)
            probe.rmdir()
        except OSError as error:
            self.unlock()
            raise self._not_writable(error) from error

    def clear_unfinished(self) -> None:
        """Delete incomplete saves and deletions of killed runs. The directory must be locked."""
        for incomplete in (*self.path.glob(f"{_SAVING}*"), *self.path.glob(f"{_TRASH}*")):
            shutil.rmtree(incomplete, ignore_errors=True)

    def _take(self, handle: int) -> None:
        import fcntl

        # The kernel releases an `flock` when the process ends, even if it is killed. A record lock of `fcntl.lockf`
        # would be lost as soon as any code in the process closes the lock file, for example code that copies the
        # directory.
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            holder = _holder(handle)
            os.close(handle)
            raise CheckpointError(
                f"Another run is writing checkpoints to {self.path}: {holder}.",
                why="two runs in one directory would mix their checkpoints",
                fix="use a separate directory for each run",
            ) from None
        self._lock = handle
        _locked.add(self)

    def _not_writable(self, error: OSError) -> CheckpointError:
        lock = self.path / LOCK
        if error.errno == errno.EISDIR and lock.is_dir():
            fix = f"delete the directory {str(lock)!r}, where fluxcb writes a file"
        elif error.errno in (errno.EMFILE, errno.ENFILE):
            fix = fix_of(error, self.path)
        else:
            fix = "use a directory that is writable and has free space"
        return CheckpointError(
            f"Cannot write checkpoints to {self.path}: {error.strerror or error}.",
            why="otherwise the first save would fail, possibly hours later",
            fix=fix,
        )

    def require_lock(self) -> None:
        """Check that the directory is still the one that was locked.

        Raises:
            CheckpointError: The directory was removed or replaced.
        """
        try:
            locked = self._lock is not None and os.path.samestat(os.fstat(self._lock), os.stat(self.path / LOCK))
        except OSError:
            locked = False
        if not locked:
            moved = (
                f"if the directory was moved or renamed, move it back to {self.path}; otherwise, use another directory"
            )
            raise CheckpointError(f"The directory, or {LOCK} in it, was removed or replaced during the run.", fix=moved)

    def unlock(self) -> None:
        """Allow other runs to write to the directory."""
        if self._lock is not None:
            with contextlib.suppress(OSError):  # the file system is read-only
                os.ftruncate(self._lock, 0)  # otherwise, the next run could be refused with this process as the holder
            self.forget_lock()

    def forget_lock(self) -> None:
        """Close the lock file. This releases the lock unless another process has inherited it."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
            _locked.discard(self)

    # -- writing ----------------------------------------------------------------------------

    def saving(self, step: int) -> Path:
        """Return the path to which the checkpoint of a step is written before `commit`."""
        return self.path / f"{_SAVING}{step}"

    def clear(self, written: Path) -> None:
        """Delete an incomplete save, which would otherwise occupy space."""
        for incomplete in self.path.glob(f"{written.name}*"):
            shutil.rmtree(incomplete, ignore_errors=True)

    def commit(self, written: Path, step: int) -> Entry:
        """Turn a written folder into a checkpoint atomically."""
        # All files are flushed to disk before the rename. Therefore, a folder with a number as its name is always
        # complete, even after a power failure.
        _sync_tree(written)
        entries = self.entries()
        for entry in entries:
            if entry.step > step:  # the run was rewound; keep these checkpoints under another name
                self._set_aside(entry)
        number = max((entry.number for entry in entries if entry.step == step), default=-1) + 1
        while os.path.lexists(path := self.path / name_of(step, number)):
            number += 1  # the name is taken by something that is not a checkpoint
        os.rename(written, path)
        self.damaged.discard(path)  # a damaged checkpoint of this name has been set aside
        sync(self.path)
        return Entry(step, number, path)

    def _set_aside(self, entry: Entry) -> None:
        """Rename a checkpoint so that it is no longer read."""
        target = self.path / f"{_SUPERSEDED}{entry.path.name}"
        while os.path.lexists(target):
            target = target.with_name(f"{target.name}-")
        os.rename(entry.path, target)

    def remove(self, entry: Entry) -> None:
        """Delete a checkpoint."""
        # Rename it first, because a kill during the deletion would leave a damaged checkpoint.
        trash = self.path / f"{_TRASH}{entry.path.name}"
        shutil.rmtree(trash, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            os.rename(entry.path, trash)
            shutil.rmtree(trash, ignore_errors=True)


def name_of(step: int, number: int) -> str:
    """Return the name of the folder of a checkpoint."""
    return f"{step}.{number}" if number else f"{step}"


def entries_of(folder: Path) -> list[Entry]:
    """Return the checkpoints in a directory, oldest first, without verifying them.

    Raises:
        CheckpointError: The directory cannot be read.
    """
    entries = []
    try:
        for path in folder.iterdir():
            match = _NAME.fullmatch(path.name)
            # A run can have a number as its name, too, as in `runs/1`.
            if match is not None and path.is_dir() and not is_run(path):
                entries.append(Entry(int(match[1]), int(match[2] or 0), path))
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(
            f"Cannot search {folder} for checkpoints: {error.strerror or error}.",
            fix="use a directory that is readable",
        ) from error
    return sorted(entries)


def read_manifest(path: Path) -> Manifest:
    """Return the manifest of a checkpoint, whose step must match the name of the folder if that is a number.

    Raises:
        CheckpointCorruptError: The manifest cannot be read, or it is from another step.
    """
    manifest, match = Manifest.read(path), _NAME.fullmatch(path.name)
    if match is not None and int(match[1]) != manifest.step:
        raise CheckpointCorruptError(
            f"{path / MANIFEST} is from step {manifest.step}: the folder was renamed, or its files were replaced.",
            where=str(path / MANIFEST),
            fix="restore the original name of the folder",
        )
    return manifest


def refuse_runs(folder: Path) -> None:
    """Check that a directory does not contain runs whose names could be those of checkpoints.

    Raises:
        CheckpointError: It does.
    """
    names = [path.name for path in folder.glob("[0-9]*") if is_run(path) and _NAME.fullmatch(path.name)]
    runs = sorted(names, key=float, reverse=True)[:3]
    if runs:
        raise CheckpointError(
            f"{folder} is not the directory of a run, because it contains the run{'s' if len(runs) > 1 else ''} "
            f"{' and '.join(map(repr, runs))}.",
            why="the checkpoints in the directory of a run have numbers as their names, too",
            fix=[f"use the directory of a run: {str(folder / run)!r}" for run in runs],
        )


def is_run(path: Path) -> bool:
    """Return whether a path is that of a run, which may have no checkpoint yet."""
    return os.path.lexists(path / LOCK)


def is_checkpoint(path: Path) -> bool:
    """Return whether a path is that of a single checkpoint, which may be damaged, instead of a run."""
    if is_run(path):
        return False
    if os.path.lexists(path / MANIFEST) or os.path.lexists(path / HOST_JSON):
        return True
    return _NAME.fullmatch(path.name) is not None and path.is_dir() and os.path.lexists(path.parent / LOCK)


def _holder(handle: int) -> str:
    """Return the process that holds a lock, according to the lock file."""
    text = os.pread(handle, 200, 0).decode(errors="replace").strip()
    match = _HOLDER.fullmatch(text)
    # The file can still name an earlier process, because a lock is taken before the file is written.
    if match is None or (match[2] == socket.gethostname() and not _is_alive(int(match[1]))):
        return "an unknown process"
    return text


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def _forget_inherited() -> None:
    """Close the inherited lock files in a forked process. Otherwise, it would hold the locks after its parent exits."""
    _taking.release()
    for folder in tuple(_locked):
        folder.forget_lock()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(before=_taking.acquire, after_in_parent=_taking.release, after_in_child=_forget_inherited)


def _sync_tree(folder: Path) -> None:
    for base, _, names in os.walk(folder, topdown=False):
        for name in names:
            sync(Path(base) / name)
        sync(Path(base))


def sync(path: Path) -> None:
    """Flush a file or a folder to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
