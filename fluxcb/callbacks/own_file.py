"""Files by which somebody asks a running program for something: whether to obey one, and taking it away."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from fluxcb._errors import DeclarationError

__all__ = ["OwnFile"]


class OwnFile:
    """A file that is obeyed only if nobody but the program's own user can have made it.

    Args:
        path: The file.
        owner: Whose it is, for messages.

    Raises:
        DeclarationError: The platform has no owners of files.
    """

    def __init__(self, path: Path, owner: str) -> None:
        if not hasattr(os, "O_NOFOLLOW") or not hasattr(os, "geteuid"):
            raise DeclarationError(
                f"`{owner}` does not work on this platform.",
                why="it cannot be told here whose a file is, so anybody's would be obeyed",
            )
        self.path = path

    def refusal(self) -> str | None:
        """Return why the file that is there is not obeyed, an empty string if it is, None if there is none."""
        try:
            # What was opened is looked at, not what has the name by then. A pipe must not be waited for.
            handle = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            return None
        except OSError as error:
            return "it is a symbolic link" if self.path.is_symlink() else f"it cannot be opened: {error.strerror}"
        try:
            found = os.fstat(handle)
        finally:
            os.close(handle)
        if not stat.S_ISREG(found.st_mode):
            return "it is no regular file"
        if found.st_uid != os.geteuid():
            return "it belongs to another user"
        if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            return "others may write to it; `chmod go-w` takes that from them"
        if found.st_nlink != 1:
            return "it has other names, too, and somebody else may have given it this one"
        return ""

    def remove(self) -> None:
        """Remove the file if it is one that is obeyed."""
        if self.refusal() == "":
            self.path.unlink(missing_ok=True)
