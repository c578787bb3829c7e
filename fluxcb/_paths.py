"""Detection of paths that no file can have, or that no one means."""

from __future__ import annotations

import errno
import os
from pathlib import Path

__all__ = ["why_impossible"]

_LONGEST_NAME = 255  # maximum length of a file name on all common file systems (bytes)
_TOO_LONG = "File name too long"


def why_impossible(path: Path) -> str:
    """Return the reason why no file can have a path or should have it, or an empty string.

    `Path.exists` and `Path.is_dir` raise an OSError for such a path, or return False.

    Args:
        path: The path.
    """
    if "\0" in str(path):
        return "no file's name has a null character"
    if "~" in path.parts:  # a folder with this name is hard to remove from a shell
        return "Python does not replace `~` with the home directory; `os.path.expanduser` does"
    if any(len(os.fsencode(part)) > _LONGEST_NAME for part in path.parts):
        return _TOO_LONG
    try:
        os.lstat(path)
    except OSError as error:
        return _TOO_LONG if error.errno == errno.ENAMETOOLONG else ""
    except ValueError:  # characters that the encoding of the file system does not have
        return "the file system cannot encode the name"
    return ""
