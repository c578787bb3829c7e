"""The manifest of a checkpoint: what it holds, and the checksum of every file in it.

Orbax notices a damaged index, but not a flipped bit in an array (measured: 30 of 30 restored silently wrong), so
nothing is read from a checkpoint before all its files have been compared with the manifest, and that with its own sum.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fluxcb._errors import CheckpointCorruptError, CheckpointError
from fluxcb.checkpoints.fields import wrong_field

__all__ = ["MANIFEST", "Manifest", "sums_of"]

MANIFEST = "fluxcb-manifest.json"
FORMAT = 2
_BLOCK = 1 << 20
_LONGEST = 1 << 28


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint holds.

    Attributes:
        run: Tells runs apart: that of the callback which wrote it.
        step: Finished training steps.
        epoch: Number of the epoch at hand, or of the last one.
        at: Where in an epoch it was written, or None between two epochs.
        ended: Why the fit ended before its time, if it did.
        value: The value that decides which checkpoints are the best, or None.
        average: Name of the `cbstate` entry with the average that was measured, or None for the trained parameters.
        trees: For each pytree of arrays, and for those beside the host's JSON, the arrays by name: `float32[32, 10]`.
        sequences: For each pytree the names of its lists and tuples.
        about: What the run is made of; see `Snapshot.about`.
        files: For each file its size (bytes) and SHA-256.
        format: Version of this format. Format 1 had no `average`.
    """

    run: str
    step: int
    epoch: int
    at: list[Any] | None
    ended: str | None
    value: float | None
    average: str | None
    trees: Mapping[str, Mapping[str, str]]
    sequences: Mapping[str, list[str]]
    about: Mapping[str, Any]
    files: Mapping[str, list[Any]]
    format: int = FORMAT

    def write(self, folder: Path) -> None:
        """Write it into a checkpoint's folder."""
        content = asdict(self)
        text = json.dumps({"sha256": _sum_of_content(content), **content}, indent=1)
        (folder / MANIFEST).write_text(text, encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read a checkpoint's manifest.

        Raises:
            CheckpointError: It is of a later version of fluxcb.
            CheckpointCorruptError: There is none, or it is not what was written.
        """
        file = folder / MANIFEST
        try:
            info = file.lstat()
            if not stat.S_ISREG(info.st_mode) or info.st_size > _LONGEST:  # a pipe would be read from for ever
                raise CheckpointCorruptError(f"{file} is no manifest, but something else.", where=str(file))
            content = json.loads(file.read_bytes())
            written = content.pop("sha256")
            expected = _sum_of_content(content)
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise CheckpointCorruptError(
                f"{file} is no manifest that can be read: {type(error).__name__}: {error}", where=str(file)
            ) from error
        if written != expected:
            raise CheckpointCorruptError(f"{file} is not what was written: its checksum differs.", where=str(file))
        version = content.get("format")
        if isinstance(version, int) and version > FORMAT:
            raise CheckpointError(
                f"{folder} was written by a later version of fluxcb (format {version}, this one knows {FORMAT}).",
                fix="upgrade fluxcb",
            )
        if version == 1:
            content.setdefault("average", None)
        wrong = wrong_field(content)
        if wrong is not None:
            raise CheckpointCorruptError(f"{file} is no manifest that fluxcb wrote: see `{wrong}`.", where=str(file))
        return cls(**content)

    def verify(self, folder: Path) -> None:
        """Compare every file of a checkpoint with what was written.

        Raises:
            CheckpointCorruptError: One is missing, was added, or differs; the message names it.
        """
        there = {_relative(path, folder): path for path in _files_in(folder)}
        for name, (size, digest) in self.files.items():
            path = there.pop(name, None)
            why = "is missing" if path is None else _difference(path, size, digest)
            if why:
                raise CheckpointCorruptError(f"{folder / name} {why}.", where=str(folder / name))
        there.pop(MANIFEST, None)
        if there:
            name = min(there)
            raise CheckpointCorruptError(f"{folder / name} does not belong to the checkpoint.", where=str(there[name]))


def sums_of(folder: Path) -> dict[str, list[Any]]:
    """Return the size (bytes) and the SHA-256 of each file in a folder, by its relative path."""
    return {_relative(p, folder): [p.stat().st_size, _sum_of_file(p)] for p in sorted(_files_in(folder))}


def _files_in(folder: Path) -> list[Path]:
    return [Path(base) / name for base, folders, names in os.walk(folder) for name in (*names, *_links(base, folders))]


def _links(base: str, folders: list[str]) -> list[str]:
    return [name for name in folders if os.path.islink(os.path.join(base, name))]


def _relative(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix()


def _difference(path: Path, size: int, digest: str) -> str:
    try:
        info = path.lstat()
        if not stat.S_ISREG(info.st_mode):
            return "is no plain file"
        if info.st_size != size:
            return f"has {info.st_size} bytes, not {size}"
        return "" if _sum_of_file(path) == digest else "is not what was written: its checksum differs"
    except OSError as error:
        return f"cannot be read: {error.strerror or error}"


def _sum_of_file(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()


def _sum_of_content(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
