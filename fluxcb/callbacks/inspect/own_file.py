"""Files that control a running program: a file is trusted only if its owner is the user who runs the program."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from fluxcb._errors import DeclarationError

__all__ = ["OwnFile", "UntrustedFileError"]

_ATTEMPTS = 3
_WRITABLE_BY_OTHERS = stat.S_IWGRP | stat.S_IWOTH
# A named pipe must not block the program, and a symbolic link may lead to any file. Windows has none of these flags.
_FLAGS = sum(getattr(os, name, 0) for name in ("O_RDONLY", "O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_NOCTTY"))


class UntrustedFileError(Exception):
    """A file is not trusted. The message is the reason, without a period."""


class OwnFile:
    """A file that is trusted only if no other user can have written it.

    It must be a regular file with one name, belong to the user who runs the program, and not be writable by others. On
    platforms without file owners, it only has to be a regular file.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @staticmethod
    def require_owners(user: str) -> None:
        """Require a platform on which files have owners.

        Args:
            user: The callback, for the message.

        Raises:
            DeclarationError: Files have no owners on this platform.
        """
        if not hasattr(os, "O_NOFOLLOW") or not hasattr(os, "geteuid"):
            raise DeclarationError(
                f"`{user}` does not work on this platform.",
                why="files have no owners on this platform, so any user could open a shell in the training",
            )

    def read(self, longest: int) -> bytes | None:
        """Return the content of the file, or None if the file keeps changing while it is read.

        Args:
            longest: The maximum size (bytes).

        Raises:
            FileNotFoundError: The file does not exist.
            UntrustedFileError: The file is not trusted, or it is too long.
        """
        for _ in range(_ATTEMPTS):
            with self._opened() as handle:
                before = os.fstat(handle)
                if before.st_size > longest:
                    raise UntrustedFileError(f"it has {before.st_size} bytes, and the maximum is {longest}")
                content = b""
                while len(content) <= longest and (block := os.read(handle, longest + 1 - len(content))):
                    content += block
                after = os.fstat(handle)
            unchanged = (before.st_mtime_ns, before.st_size) == (after.st_mtime_ns, after.st_size)
            if unchanged and len(content) == after.st_size:
                return content
        return None

    def require_alone(self) -> None:
        """Require that the file is trusted, and that no other user can create or rename files in its directory.

        Without the second requirement, another user could rename any file of this user to the expected name.

        Raises:
            FileNotFoundError: The file does not exist.
            UntrustedFileError: The file or its directory is not trusted.
        """
        with self._opened():
            directory = os.stat(self.path.parent)
        if directory.st_uid != os.geteuid():
            raise UntrustedFileError("its directory belongs to another user")
        if directory.st_mode & _WRITABLE_BY_OTHERS:
            raise UntrustedFileError(
                "others may write to its directory, so they could have renamed another file; "
                "run `chmod go-w` on the directory"
            )

    def remove(self) -> None:
        """Remove the file if it meets the requirements of `require_alone`."""
        with contextlib.suppress(FileNotFoundError, UntrustedFileError):
            self.require_alone()
            self.path.unlink()

    @contextlib.contextmanager
    def _opened(self) -> Iterator[int]:
        """Open the file and check the open handle, because another file could take over the path after a check."""
        try:
            handle = os.open(self.path, _FLAGS)
        except FileNotFoundError:
            raise
        except OSError as error:
            link = self.path.is_symlink()
            raise UntrustedFileError(
                "it is a symbolic link" if link else f"it cannot be opened: {error.strerror}"
            ) from None
        try:
            _require_own(os.fstat(handle))
            yield handle
        finally:
            os.close(handle)


def _require_own(found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        raise UntrustedFileError("it is not a regular file")
    if not hasattr(os, "geteuid"):
        return
    if found.st_uid != os.geteuid():
        raise UntrustedFileError("it belongs to another user")
    if found.st_mode & _WRITABLE_BY_OTHERS:
        raise UntrustedFileError("others may write to it; run `chmod go-w` on it")
    if found.st_nlink != 1:
        raise UntrustedFileError("it has more than one name (hard links), and another user may have added this one")
