"""A file of records that is only ever appended to, and never holds a torn one for long."""

from __future__ import annotations

import contextlib
import os
import stat
import warnings
from pathlib import Path

from fluxcb._errors import DeclarationError

__all__ = ["RecordFile", "checked_path", "refuse_to_overwrite"]

_BLOCK = 65536


class RecordFile:
    """Append records, each of which ends with a newline, whole or not at all.

    Several records go out in one write, in append mode. A write that fails is taken back. What a killed process left
    behind the last newline is cut off when the file is opened again.

    Args:
        path: The file; folders are made when it is opened.
        owner: What messages call the backend.
        append: Whether a new run may append to a file that exists.

    Raises:
        DeclarationError: It cannot be written there.
    """

    def __init__(self, path: str | os.PathLike[str], *, owner: str, append: bool = False) -> None:
        self.path = checked_path(path, owner=owner, folder=False)
        self._owner = owner
        self._append = append
        self._handle: int | None = None

    def open(self, *, resumes: bool, position: int | None = None) -> None:
        """Open the file.

        Args:
            resumes: Whether the run goes on whose records it has.
            position: Where the records end that are to stay (bytes); None to keep all.

        Raises:
            DeclarationError: It has records of another run.
        """
        size = self.path.stat().st_size if self.path.exists() else 0
        if size and not (resumes or self._append):
            refuse_to_overwrite(self.path, self._owner)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            keep = _end_of_records(handle, size)
            if position is not None and position != keep:
                if position < keep and _end_of_records(handle, position) == position:
                    keep = position
                else:
                    self.warn_of_change()
            if keep < size:
                os.ftruncate(handle, keep)
        except BaseException:
            os.close(handle)
            raise
        self._handle = handle

    def warn_of_change(self) -> None:
        """Warn that records will stand twice or be missing, because somebody changed the file."""
        warnings.warn(
            f"{self._owner}: {self.path} is not what it was when the checkpoint was written; "
            "records are appended, and none is cut off.",
            stacklevel=2,
        )

    @property
    def is_open(self) -> bool:
        """Whether it can be written to."""
        return self._handle is not None

    @property
    def position(self) -> int:
        """Where its records end (bytes)."""
        return os.fstat(self._opened()).st_size

    def write(self, records: bytes) -> None:
        """Append records; if that fails, the file is as it was before.

        Raises:
            OSError: It failed.
        """
        handle = self._opened()
        before = os.fstat(handle).st_size
        try:
            written = os.write(handle, records)
            while written < len(records):  # a disk that is nearly full takes a part; the next write says why
                written += os.write(handle, records[written:])
        except BaseException:
            with contextlib.suppress(OSError):  # pipes and devices cannot be cut
                os.ftruncate(handle, before)
            raise

    def close(self) -> None:
        """Close it; twice is once."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _opened(self) -> int:
        if self._handle is None:
            raise DeclarationError(
                f"{self._owner} is not open.", fix="`with` opens and closes a backend that is used by hand"
            )
        return self._handle


def checked_path(path: str | os.PathLike[str], *, owner: str, folder: bool) -> Path:
    """Return a path that can be written to.

    Args:
        path: The path.
        owner: What messages call the backend.
        folder: Whether it is to be a folder.

    Raises:
        DeclarationError: It cannot be.
    """
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise DeclarationError(f"{owner} takes a path, not {path!r}.", fix='e.g. "runs/1/log.jsonl"')
    found = Path(path)
    there = found
    try:
        if "\0" in os.fspath(found):
            raise OSError(None, "no file's name has a null character")
        os.stat(found) if found.exists() else None
    except OSError as error:
        raise DeclarationError(
            f"{owner} cannot write to {str(found)!r}: {error.strerror}.", fix='name a file such as "runs/1/log.jsonl"'
        ) from None
    while not there.exists() and there != there.parent:
        there = there.parent
    mode = there.stat().st_mode
    why = ""
    if there == found and stat.S_ISDIR(mode) != folder:
        why = "is a folder" if not folder else "is a file"
    elif there != found and not stat.S_ISDIR(mode):
        why = "is a file, and no folder can be made in it"
    elif not os.access(there, os.W_OK | (os.X_OK if stat.S_ISDIR(mode) else 0)):
        why = "may not be written to"
    if why:
        raise DeclarationError(
            f"{owner} cannot write to {found}: {there} {why}.",
            why="it would be noticed when the training begins, or later",
            fix="name a folder that you may write to" if folder else "name a file in a folder that you may write to",
        )
    return found


def refuse_to_overwrite(path: Path, owner: str) -> None:
    """Raise the error about a new run where the log of another is."""
    raise DeclarationError(
        f"{owner}: there is a log at {path} already, and this run is a new one.",
        why="a log is appended to when its run resumes, and never overwritten",
        fix=["name another path, e.g. one per run", "move the old log away", "`append=True`, to have both in one log"],
    )


def _end_of_records(handle: int, size: int) -> int:
    """Return where the last whole record ends within the first `size` bytes."""
    end = size
    while end > 0:
        start = max(0, end - _BLOCK)
        found = os.pread(handle, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0
