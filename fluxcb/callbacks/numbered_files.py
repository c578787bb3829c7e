"""`NumberedFiles`: files of a run, named by the step, written in one move and not more of them than wanted."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from fluxcb._declare.schedules import positive
from fluxcb._errors import DeclarationError

__all__ = ["NumberedFiles"]

_UNFINISHED = ".unfinished"


class NumberedFiles:
    """The files `<prefix>-00000012<ending>` of a folder, which belong to one run.

    Args:
        folder: The folder; made when the first file is written.
        prefix: What the names begin with.
        keep: Of how many steps files are kept, the newest; None for all.
        owner: Who writes them, for messages.

    Raises:
        DeclarationError: The folder cannot be written to, the prefix is none, or `keep` no number above 0.
    """

    def __init__(self, folder: str | os.PathLike[str], prefix: str, keep: int | None, owner: str) -> None:
        if not isinstance(folder, str | os.PathLike):
            raise DeclarationError(f"`folder` of `{owner}` must be a path, not {folder!r}.", fix='e.g. "runs/1/dumps"')
        self.folder = Path(folder)
        if not isinstance(prefix, str) or not prefix or not re.fullmatch(r"[^/\\\0]+", prefix) or prefix[0] == ".":
            raise DeclarationError(
                f"`prefix` of `{owner}` must be the beginning of a file's name, not {prefix!r}.", fix='e.g. "samples"'
            )
        self.prefix = prefix
        self.keep = None if keep is None else positive(keep, f"`keep` of `{owner}`")
        self._owner = owner
        self._require_writable()

    def _require_writable(self) -> None:
        folder = self.folder
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            raise DeclarationError(
                f"`{self._owner}` cannot write to the folder `{self.folder}`.",
                why=f"`{folder}` is no folder that can be written to",
                fix="give another folder",
            )

    def begin(self, step: int, *, resumes: bool) -> None:
        """Begin or resume a run: drop files that were written after this step, which will be written again.

        Args:
            step: Steps that the run has done.
            resumes: Whether the files that are there are this run's.

        Raises:
            DeclarationError: They are not.
        """
        there = self._there()
        if there and not resumes:
            raise DeclarationError(
                f"`{self._owner}` is to write to `{self.folder}`, where there are files of another run.",
                where=str(sorted(path for paths in there.values() for path in paths)[0]),
                why="this run is a new one, and would replace them",
                fix=["give another folder, e.g. one per run", "move the old files away"],
            )
        for number in there:
            if number > step:
                self._remove(there[number])
        if self.folder.is_dir():
            for path in self.folder.glob(f".{self.prefix}-*{_UNFINISHED}"):  # of a run that was killed
                path.unlink(missing_ok=True)

    def write(self, step: int, files: Mapping[str, Callable[[IO[bytes]], Any]]) -> None:
        """Write the files of a step: each is complete, or not there.

        Args:
            step: The step.
            files: What writes each, by its ending, e.g. `.npz` or `-1.png`.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        for ending, write in files.items():
            path = self.folder / f"{self.prefix}-{step:08d}{ending}"
            unfinished = path.with_name(f".{path.name}{_UNFINISHED}")
            try:
                with open(unfinished, "wb") as file:
                    write(file)
                    file.flush()
                    os.fsync(file.fileno())
                os.replace(unfinished, path)
            finally:
                unfinished.unlink(missing_ok=True)
        if self.keep is not None:
            there = self._there()
            for number in sorted(there)[: -self.keep]:
                self._remove(there[number])

    def _there(self) -> dict[int, list[Path]]:
        """Return the files that are there, by step."""
        named = re.compile(rf"{re.escape(self.prefix)}-(\d{{8,}})(-\d+)?\.(npz|png)")
        there: dict[int, list[Path]] = {}
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if found := named.fullmatch(path.name):
                there.setdefault(int(found[1]), []).append(path)
        return there

    def _remove(self, paths: list[Path]) -> None:
        for path in paths:
            path.unlink(missing_ok=True)
