"""`NumberedFiles`: files named by step, written atomically, of which only the newest are kept."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO, Any

from fluxcb._declare.schedules import positive
from fluxcb._errors import DeclarationError
from fluxcb._paths import fix_of_path, why_impossible
from fluxcb.callbacks.arguments import require

__all__ = ["NumberedFiles"]

_UNFINISHED = ".unfinished"


class NumberedFiles:
    """The files `<prefix>-00000012<ending>` of one run in a directory.

    Args:
        folder: The directory. It is created when the first file is written.
        prefix: The beginning of the file names.
        keep: Number of most recent steps whose files are kept; None keeps all.
        owner: Name of the callback, for messages.

    Raises:
        DeclarationError: The directory is not writable, the prefix is invalid, or `keep` is not a positive integer.
    """

    def __init__(self, folder: str | os.PathLike[str], prefix: str, keep: int | None, owner: str) -> None:
        require(isinstance(folder, str | os.PathLike), folder, f"`folder` of `{owner}`", "a path", '"runs/1/dumps"')
        self.folder = Path(folder)
        fits = isinstance(prefix, str) and re.fullmatch(r"[^./\\\0][^/\\\0]*", prefix)
        require(bool(fits), prefix, f"`prefix` of `{owner}`", "the beginning of a file name", '"samples"')
        self.prefix = prefix
        self.keep = None if keep is None else positive(keep, f"`keep` of `{owner}`")
        self._owner = owner
        self._require_writable()

    def _require_writable(self) -> None:
        folder = self.folder
        # Check the longest file name: that of an image while it is being written.
        why = why_impossible(folder / f".{self.prefix}-{0:08d}-00.png{_UNFINISHED}")
        if why:
            raise DeclarationError(
                f"`{self._owner}` cannot write files named `{self.prefix}-...` to the folder `{folder}`.",
                why=why,
                fix=fix_of_path(folder, "use another folder or prefix"),
            )
        while not folder.exists() and folder != folder.parent:
            folder = folder.parent
        if not folder.is_dir() or not os.access(folder, os.W_OK):
            raise DeclarationError(
                f"`{self._owner}` cannot write to the folder `{self.folder}`.",
                why=f"`{folder}` is not a writable folder",
                fix="use another folder",
            )

    def begin(self, step: int, *, resumes: bool) -> None:
        """Begin or resume a run. Files of later steps are removed, because the run will write them again.

        Args:
            step: Number of finished steps.
            resumes: Whether existing files belong to this run.

        Raises:
            DeclarationError: There are files of another run.
        """
        existing = self._existing()
        if existing and not resumes:
            raise DeclarationError(
                f"`{self._owner}` would write to `{self.folder}`, which contains files of another run.",
                where=str(sorted(path for paths in existing.values() for path in paths)[0]),
                why="this is a new run, which would overwrite them",
                fix=["use another folder, e.g. one per run", "move the old files away"],
            )
        for number in existing:
            if number > step:
                self._remove(existing[number])
        if self.folder.is_dir():
            for path in self.folder.glob(f".{self.prefix}-*{_UNFINISHED}"):  # left by a run that was killed
                path.unlink(missing_ok=True)

    def write(self, step: int, files: Mapping[str, Callable[[IO[bytes]], Any]]) -> None:
        """Write the files of a step atomically.

        Args:
            step: The step.
            files: A function that writes the file, keyed by the ending of its name, e.g. `.npz` or `-1.png`.
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
            existing = self._existing()
            for number in sorted(existing)[: -self.keep]:
                self._remove(existing[number])

    def _existing(self) -> dict[int, list[Path]]:
        """Return the existing files, keyed by step."""
        pattern = re.compile(rf"{re.escape(self.prefix)}-(\d{{8,}})(-\d+)?\.(npz|png)")
        existing: dict[int, list[Path]] = {}
        for path in self.folder.iterdir() if self.folder.is_dir() else ():
            if found := pattern.fullmatch(path.name):
                existing.setdefault(int(found[1]), []).append(path)
        return existing

    def _remove(self, paths: list[Path]) -> None:
        for path in paths:
            path.unlink(missing_ok=True)
