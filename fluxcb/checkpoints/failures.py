"""What made the write of a checkpoint fail, and how to fix it."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path

from fluxcb._errors import FluxcbError

__all__ = ["fix_of", "quiet_orbax", "reason_of"]

_NO_SPACE = "free some space, or use another directory"

_FIXES = {
    errno.EMFILE: "raise the limit of open files of the process: `ulimit -n 4096` before the program starts",
    errno.ENFILE: "close other programs, or raise the limit of open files of the system: `sysctl fs.file-max`",
    errno.EACCES: "make the directory writable, or use another directory",
    errno.EPERM: "make the directory writable, or use another directory",
    errno.EROFS: "make the file system writable, or use another directory",
    errno.EFBIG: "raise the limit of the size of files: `ulimit -f unlimited`, or use another file system",
}


def reason_of(error: BaseException, folder: Path) -> str:
    """Return a one-line description of an error. Orbax reports a full disk within the text of a long ValueError."""
    if isinstance(error, FluxcbError):
        return error.what.removesuffix(".")
    code = _code_of(error)
    if code is None:
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    description = os.strerror(code)
    if code == errno.ENOSPC:
        space = os.statvfs(folder)
        description += f" ({space.f_bavail * space.f_frsize / 2**20:.1f} MiB free)"
    return description


def fix_of(error: BaseException | None, folder: Path) -> str:
    """Return what to do about an error of a write to a directory.

    Args:
        error: The error, or None if another process reports it.
        folder: The directory.
    """
    if isinstance(error, FluxcbError) and error.fix:
        return error.fix[0]
    if not folder.is_dir():
        return f"if the directory was moved or renamed, move it back to {folder}; otherwise, use another directory"
    return _FIXES.get(_code_of(error) or 0, _NO_SPACE)


def _code_of(error: BaseException | None) -> int | None:
    """Return the number of the error of the operating system, which TensorStore only has in its message."""
    code = getattr(error, "errno", None)
    found = re.search(r"os_error_code='(\d+)'", str(error))
    return int(found[1]) if code is None and found is not None else code


class _OfOrbax(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return f"{os.sep}orbax{os.sep}" not in record.pathname


@contextlib.contextmanager
def quiet_orbax() -> Iterator[None]:
    """Drop the log records of Orbax. It logs an error with a traceback in each of its threads before it raises it."""
    # Orbax logs to the logger of absl, which other libraries also use.
    logger, of_orbax = logging.getLogger("absl"), _OfOrbax()
    logger.addFilter(of_orbax)
    try:
        yield
    finally:
        logger.removeFilter(of_orbax)
