"""An append-only file of records."""

from __future__ import annotations

import contextlib
import itertools
import os
import stat
from collections.abc import Callable
from pathlib import Path

from fluxcb._declare.signatures import shown_path
from fluxcb._errors import DeclarationError
from fluxcb._paths import fix_of_path, why_impossible
from fluxcb._tracebacks import warn_user

__all__ = ["RecordFile", "checked_path", "locations", "unused_path"]

_BLOCK = 65536


class RecordFile:
    """Append records to a file. Each record ends with a newline, and is written completely or not at all.

    Several records are appended with one write. If a write fails, its partial output is removed. If a process was
    killed during a write, the incomplete last record is removed when the file is opened again.

    If a new run opens a file that has the records of another run, this file is renamed before the first record is
    written. If the new run fails before its first record, the file stays as it is.

    Args:
        path: The file. Missing folders are created when it is opened.
        owner: The name of the backend in messages.
        append: Whether a new run may append to an existing file.

    Attributes:
        starts_anew: Whether the file belongs to another run and is to be renamed. Assign it before `open` if a
            checkpoint contains this information.
        previous: The new path of another run's file that was renamed, or None.

    Raises:
        DeclarationError: The file cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str], *, owner: str, append: bool = False) -> None:
        self.path = checked_path(path, owner=owner, folder=False)
        self._owner = owner
        self._append = append
        self._handle: int | None = None
        self.starts_anew = False
        self.previous: Path | None = None

    def open(self, *, resumes: bool, position: int | None = None) -> None:
        """Open the file.

        Args:
            resumes: Whether the run continues the run that wrote the records.
            position: The end of the records to keep (bytes), or None to keep all records.
        """
        size = self.path.stat().st_size if self.path.exists() else 0
        self.starts_anew = size > 0 and not self._append and (self.starts_anew or not resumes)
        if self.starts_anew:
            return
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
        """Warn that records will be duplicated or missing, because something else changed the file."""
        warn_user(
            f"{self._owner}: {self.path} has changed since the checkpoint was written; "
            "new records are appended, and no records are removed.",
            UserWarning,
        )

    @property
    def is_open(self) -> bool:
        """Whether the file is open."""
        return self._handle is not None or self.starts_anew

    @property
    def position(self) -> int:
        """The end of the records (bytes)."""
        return os.fstat(self._opened()).st_size

    def write(self, records: bytes) -> None:
        """Append records. If that fails, restore the file to its previous size.

        Raises:
            OSError: The records could not be written.
        """
        handle = self._opened()
        before = os.fstat(handle).st_size
        try:
            written = os.write(handle, records)
            while written < len(records):  # an almost full disk accepts a part, and the next write raises the error
                written += os.write(handle, records[written:])
        except BaseException:
            with contextlib.suppress(OSError):  # pipes and devices cannot be truncated
                os.ftruncate(handle, before)
            raise

    def require_in_place(self) -> None:
        """Check that the path still refers to the open file.

        Raises:
            FileNotFoundError: The file was renamed or deleted, for example by another run that logs to the same path.
        """
        if not (self.path.exists() and os.path.samestat(os.fstat(self._opened()), self.path.stat())):
            raise FileNotFoundError(f"{self.path} was renamed or deleted during the run")

    def close(self) -> None:
        """Close the file. Calling it again has no effect."""
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _opened(self) -> int:
        if self.starts_anew:
            self.starts_anew, self.previous = False, _renamed(self.path)
            self.open(resumes=True)
        if self._handle is None:
            raise DeclarationError(
                f"{self._owner} is not open.", fix="to use a backend without a Learner, open it with `with`"
            )
        return self._handle


def checked_path(path: str | os.PathLike[str], *, owner: str, folder: bool) -> Path:
    """Return a path after checking that it can be written.

    Args:
        path: The path.
        owner: The name of the backend in messages.
        folder: Whether the path is a folder.

    Raises:
        DeclarationError: The path cannot be written.
    """
    if not isinstance(path, str | os.PathLike) or not os.fspath(path):
        raise DeclarationError(f"{owner} takes a path, not {path!r}.", fix='write e.g. "runs/1/log.jsonl"')
    found = Path(path)
    existing = found
    try:
        if why := why_impossible(found):
            raise OSError(None, why)
        os.stat(found) if found.exists() else None
    except OSError as error:
        raise DeclarationError(
            f"{owner} cannot write to {str(found)!r}: {error.strerror}.",
            fix=fix_of_path(found, 'name a file such as "runs/1/log.jsonl"'),
        ) from None
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    mode = existing.stat().st_mode
    why = ""
    if existing == found and stat.S_ISDIR(mode) != folder:
        why = "is a folder" if not folder else "is a file"
    elif existing != found and not stat.S_ISDIR(mode):
        why = "is a file, so no folder can be created in it"
    elif not os.access(existing, os.W_OK | (os.X_OK if stat.S_ISDIR(mode) else 0)):
        why = "is not writable"
    if why:
        raise DeclarationError(
            f"{owner} cannot write to {found}: {existing} {why}.",
            why="without this check, training would fail at its beginning or later",
            fix="name a folder that you may write to" if folder else "name a file in a folder that you may write to",
        )
    return found


def _renamed(path: Path) -> Path:
    """Rename the file of another run, `log.jsonl`, to the first unused name of `log-1.jsonl`, `log-2.jsonl`, ..."""
    unused = unused_path(lambda number: path.with_name(f"{path.stem}-{number}{path.suffix}"))
    os.rename(path, unused)
    return unused


def unused_path(numbered: Callable[[int], Path]) -> Path:
    """Return the first path with a number, starting at 1, that does not exist."""
    return next(path for path in map(numbered, itertools.count(1)) if not os.path.lexists(path))


def locations(path: Path, previous: Path | None) -> tuple[Path | str, ...]:
    """Return the location that a backend writes to, together with the new location of an earlier run's log."""
    if previous is None:
        return (path,)
    return (f"{shown_path(str(path))}, after moving the log of an earlier run to {shown_path(str(previous))}",)


def _end_of_records(handle: int, size: int) -> int:
    """Return the end of the last complete record within the first `size` bytes."""
    end = size
    while end > 0:
        start = max(0, end - _BLOCK)
        found = os.pread(handle, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0
