"""`[tool.fluxcb]` in pyproject.toml: which callback sets a project has, and how thoroughly they are checked.

```toml
[tool.fluxcb]
callbacks = ["pkg.train:callbacks", "pkg.train:make_learner"]
level = "graph"
```
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fluxcb._errors import DeclarationError, did_you_mean

__all__ = ["LEVELS", "Project", "find_project", "read_project"]

LEVELS = ("graph", "trace", "audit", "resume")
"""From the declarations alone; with a dry run of the step; with two real steps. Each includes those before it."""


@dataclass(frozen=True)
class Project:
    """What a project declares.

    Attributes:
        root: The folder from which its modules are imported.
        file: Its pyproject.toml, or None if there is none.
        sets: Where its callback sets are, each as `module:name`.
        level: How thoroughly they are checked: one of `LEVELS`.
    """

    root: Path
    file: Path | None = None
    sets: tuple[str, ...] = ()
    level: str = LEVELS[0]


def find_project(start: Path) -> Project:
    """Return the project that a folder belongs to: the nearest pyproject.toml above it that has `[tool.fluxcb]`.

    Without one, it is the nearest pyproject.toml, or else the folder itself, with no sets.

    Args:
        start: The folder.

    Raises:
        DeclarationError: The file declares something that cannot be meant.
    """
    files = [file for folder in (start, *start.parents) if (file := folder / "pyproject.toml").is_file()]
    for file in files:
        project = read_project(file)
        if project is not None:
            return project
    return Project(files[0].parent, files[0]) if files else Project(start)


def read_project(file: Path) -> Project | None:
    """Return what a pyproject.toml declares, or None if it has no `[tool.fluxcb]`.

    Args:
        file: The pyproject.toml.

    Raises:
        DeclarationError: It is no TOML, or it declares something that cannot be meant.
    """
    import tomllib  # only here: the pytest plugin reads LEVELS, and most runs have no table to parse

    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
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
