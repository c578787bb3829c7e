"""Detection of paths that no file can have, or that no one means, and their fixes."""

from __future__ import annotations

import errno
import os
from pathlib import Path

__all__ = ["fix_of_path", "why_impossible"]

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


def fix_of_path(path: Path, otherwise: str) -> str:
    """Return the fix for a path that `why_impossible` refuses: the path in the home directory, if it contains `~`.

    Args:
        path: The path.
        otherwise: The fix for all other paths.
    """
    if "~" not in path.parts:
        return otherwise
    # A path that was made absolute contains the part after the current directory.
    meant = os.path.expanduser(os.path.join(*path.parts[path.parts.index("~") :]))
    return f"write {meant!r}"
