"""`[tool.fluxcb]` in pyproject.toml, which lists the callback sets of a project and how thoroughly they are checked.

```toml
[tool.fluxcb]
callbacks = ["pkg.train:callbacks", "pkg.train:make_learner"]
level = "graph"
```
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fluxcb._errors import DeclarationError, did_you_mean

__all__ = ["LEVELS", "Project", "find_project", "has_table", "read_project"]

# Levels instead of independent options, because each check is only useful if the previous ones passed.
LEVELS = ("graph", "trace", "audit", "resume")
"""The levels of a check. Each includes the previous ones: declarations, traced step, two real steps, resuming them."""


@dataclass(frozen=True)
class Project:
    """The declarations of a project.

    Attributes:
        root: The folder from which its modules are imported.
        file: Its pyproject.toml, or None if there is none.
        sets: Its callback sets, each as `module:name`.
        level: How thoroughly they are checked: one of `LEVELS`.
    """

    root: Path
    file: Path | None = None
    sets: tuple[str, ...] = ()
    level: str = LEVELS[0]


def find_project(start: Path) -> Project:
    """Return the project of a folder. It is the nearest pyproject.toml at or above the folder with `[tool.fluxcb]`.

    Without such a file, the project is the nearest pyproject.toml, or the folder itself, with no sets. A file in a
    parent folder counts only if its owner is the current user, the owner of `start`, or the superuser. Otherwise,
    another user could put a file into a shared folder, and the command line would import the modules that it names.

    Args:
        start: The folder.

    Raises:
        DeclarationError: The file has an invalid declaration.
    """
    files = [
        file
        for folder in (start, *start.parents)
        if (file := folder / "pyproject.toml").is_file() and (folder == start or _is_trusted(file, start))
    ]
    for file in files:
        project = read_project(file)
        if project is not None:
            return project
    return Project(files[0].parent, files[0]) if files else Project(start)


def _is_trusted(file: Path, start: Path) -> bool:
    return not hasattr(os, "geteuid") or _owner(file) in (os.geteuid(), _owner(start), 0)


def _owner(path: Path) -> int:
    return path.stat().st_uid


def has_table(content: bytes) -> bool:
    """Return whether the content of a pyproject.toml has `[tool.fluxcb]`, in any notation of TOML.

    A file that is not valid TOML counts if it contains the text `tool.fluxcb`.
    """
    if b"fluxcb" not in content:  # skip parsing for most files
        return False
    import tomllib

    try:
        tool = tomllib.loads(content.decode("utf-8")).get("tool")
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError):
        return b"tool.fluxcb" in content
    return isinstance(tool, dict) and "fluxcb" in tool


def read_project(file: Path) -> Project | None:
    """Return the declarations of a pyproject.toml, or None if it has no `[tool.fluxcb]`.

    Args:
        file: The pyproject.toml.

    Raises:
        DeclarationError: The file is not valid TOML, or has an invalid declaration.
    """
    import tomllib  # imported here, because the pytest plugin reads LEVELS, and most runs have no table to parse

    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError, OSError) as error:
        raise DeclarationError(f"{file.name} cannot be read: {error}.", where=str(file)) from error
    table = content.get("tool", {}).get("fluxcb") if isinstance(content.get("tool", {}), dict) else None
    if table is None:
        return None
    where = f"[tool.fluxcb] in {file}"
    if not isinstance(table, dict):
        raise DeclarationError("`tool.fluxcb` must be a table.", where=where, fix="write `[tool.fluxcb]`")
    for key in table:
        if key not in ("callbacks", "level"):
            raise DeclarationError(
                f"`[tool.fluxcb]` has no key {key!r}.{did_you_mean(key, ('callbacks', 'level'))}",
                where=where,
                fix="it has `callbacks`, a list of `module:name`, and `level`",
            )
    level = table.get("level", LEVELS[0])
    if level not in LEVELS:
        raise DeclarationError(
            f"`level` must be one of {', '.join(LEVELS)}, not {level!r}.{did_you_mean(str(level), LEVELS)}", where=where
        )
    return Project(file.parent, file, _sets(table.get("callbacks", []), where), level)


def _sets(given: Any, where: str) -> tuple[str, ...]:
    if not (isinstance(given, list) and all(isinstance(entry, str) for entry in given)):
        raise DeclarationError(
            f"`callbacks` must be a list of strings, not {given!r}.",
            where=where,
            fix='write e.g. `callbacks = ["pkg.train:callbacks"]`',
        )
    for entry in given:
        if given.count(entry) > 1:
            raise DeclarationError(f"`callbacks` names {entry!r} twice.", where=where, fix="remove one")
    return tuple(given)
