"""The manifest of a checkpoint: a description of its content, and the checksum of every file.

Orbax detects a damaged index, but not a flipped bit in an array: in an experiment, 30 of 30 damaged arrays were
restored without an error. Therefore, fluxcb verifies the checksum of the manifest, and those of all files in it, before
it reads a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from fluxcb._errors import CheckpointCorruptError, CheckpointError

__all__ = [
    "HOST_JSON",
    "LONGEST",
    "MANIFEST",
    "Manifest",
    "count",
    "counter",
    "mapping",
    "optional",
    "position",
    "sums_of",
    "wrong_field",
]

MANIFEST, HOST_JSON = "fluxcb-manifest.json", "host.json"
FORMAT = 4  # formats 1 to 3 were used before the first release
TREES = ("params", "model_state", "opt_state", "cbstate")
_BLOCK = 1 << 20
LONGEST = 1 << 28
"""Maximum size of a JSON file (bytes)."""


@dataclass(frozen=True)
class Manifest:
    """The description of a checkpoint.

    Attributes:
        run: Identifier of the run.
        step: Number of finished training steps.
        epoch: Number of the current epoch, or of the last one.
        at: The position within an epoch, or None between two epochs.
        ended: Why the fit ended early, or None.
        value: The value that decides which checkpoints are the best, or None.
        average: Name of the `cbstate` entry with the average that was measured, or None for the trained parameters.
        trees: For each pytree, the dtypes and shapes of its arrays by name, such as `float32[32, 10]`.
        sequences: For each pytree, the names of its lists and tuples.
        about: What the run consists of; see `Snapshot.about`.
        files: For each file, its size (bytes) and its SHA-256.
        format: Version of this format.
        metric: Name of the metric whose value `value` is, e.g. `validation/loss`, or None. Checkpoints of earlier
            versions lack it.
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
    metric: str | None = None

    def write(self, folder: Path) -> None:
        """Write the manifest to the folder of a checkpoint."""
        content = asdict(self)
        # The manifest has the checksums of all other files, so it also needs its own. This is the checksum of the
        # content and not of the text, because it is stored in the same file.
        text = json.dumps({"sha256": _sum_of_content(content), **content}, indent=1)
        (folder / MANIFEST).write_text(text, encoding="utf-8")

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Read the manifest of a checkpoint.

        Raises:
            CheckpointError: The manifest has another format.
            CheckpointCorruptError: The manifest is missing or damaged.
        """
        file = folder / MANIFEST
        try:
            info = file.lstat()
            if not stat.S_ISREG(info.st_mode) or info.st_size > LONGEST:  # reading from a pipe could block
                raise CheckpointCorruptError(
                    f"{file} is not a regular file, or is larger than {LONGEST:,} bytes.", where=str(file)
                )
            content = json.loads(file.read_bytes())
            stored_sum = content.pop("sha256")
            expected_sum = _sum_of_content(content)
        # AttributeError: the JSON is not an object. RecursionError: it is nested too deeply.
        except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
            raise CheckpointCorruptError(
                f"{file} cannot be read: {type(error).__name__}: {error}", where=str(file)
            ) from error
        if stored_sum != expected_sum:
            raise CheckpointCorruptError(f"{file} is damaged: its checksum differs.", where=str(file))
        # Check the format before the fields, because other formats have other fields.
        version = content.get("format")
        if count(version) and version != FORMAT:
            raise _other_format(folder, version)
        wrong = wrong_field(content, _FIELDS)
        if wrong is not None:
            raise CheckpointCorruptError(
                f"{file} was not written by fluxcb: the field `{wrong}` is invalid.", where=str(file)
            )
        return cls(**content)

    def verify(self, folder: Path, part: int | None = 0, parts: int = 1) -> None:
        """Compare every file of a checkpoint with the manifest.

        Args:
            folder: The folder of the checkpoint.
            part: The number of the part of the files whose checksums are computed, or None for no file. Names and sizes
                of all files are compared in any case.
            parts: The number of parts, which have about the same size.

        Raises:
            CheckpointCorruptError: A file is missing, was added, or differs. The message names the file.
        """
        existing = {_relative(path, folder): path for path in _files_in(folder)}
        largest_first = sorted(self.files.items(), key=lambda file: -file[1][0])
        for number, (name, (size, digest)) in enumerate(largest_first):
            path = existing.pop(name, None)
            why = "is missing" if path is None else _difference(path, size, digest if number % parts == part else None)
            if why:
                raise CheckpointCorruptError(f"{folder / name} {why}.", where=str(folder / name))
        existing.pop(MANIFEST, None)
        unexpected = [name for name, path in existing.items() if not _is_never_read(name, path)]
        if unexpected:
            name = min(unexpected)
            raise CheckpointCorruptError(
                f"{folder / name} does not belong to the checkpoint.",
                where=str(existing[name]),
                why="an additional file can change what Orbax reads",
                fix=f"delete the file {str(existing[name])!r}",
            )


def _other_format(folder: Path, version: int) -> CheckpointError:
    # Not a CheckpointCorruptError, because then the run would resume from an older checkpoint.
    if version > FORMAT:
        return CheckpointError(
            f"{folder} was written by a later version of fluxcb (format {version}; this version reads {FORMAT}).",
            fix="upgrade fluxcb",
        )
    return CheckpointError(
        f"{folder} was written by an earlier version of fluxcb (format {version}; this version reads {FORMAT}).",
        where=str(folder / MANIFEST),
        why="the format of checkpoints has changed, and fluxcb does not convert old checkpoints",
        fix=[
            "continue this run with the version of fluxcb that wrote the checkpoint",
            "start a new run: use another directory, or delete this one",
        ],
    )


def sums_of(folder: Path, process: int = 0) -> dict[str, list[Any]]:
    """Return the size (bytes) and the SHA-256 of the files that a process has written, keyed by relative path.

    Args:
        folder: The folder of a checkpoint.
        process: The index of the process. Process 0 has also written all files that do not name a process.
    """
    paths = [path for path in sorted(_files_in(folder)) if _writer(_relative(path, folder)) == process]
    return {_relative(path, folder): [path.stat().st_size, _sum_of_file(path)] for path in paths}


def _writer(name: str) -> int:
    """Return the process that has written a file: Orbax keeps the arrays in a folder for each process."""
    found = re.search(r"(?:^|/)(?:ocdbt\.)?process_(\d+)(?:/|$)", name)
    return int(found[1]) if found else 0


def _files_in(folder: Path) -> list[Path]:
    return [Path(base) / name for base, folders, names in os.walk(folder) for name in (*names, *_links(base, folders))]


# `os.walk` lists symbolic links to folders as folders and does not follow them, so they must be added to the files.
def _links(base: str, folders: list[str]) -> list[str]:
    return [name for name in folders if os.path.islink(os.path.join(base, name))]


def _relative(path: Path, folder: Path) -> str:
    return path.relative_to(folder).as_posix()


# Orbax 0.12 reads arrays by their names, and searches some folders for files. In the folder of the checkpoint, it reads
# the file `_CHECKPOINT_METADATA` and lists folders. The hidden files that Zarr reads begin with `.z`.
def _is_never_read(name: str, path: Path) -> bool:
    """Return whether neither fluxcb nor Orbax reads an additional file: `.DS_Store`, `.nfs0001`, or your own notes."""
    if not stat.S_ISREG(path.lstat().st_mode):
        return False
    *folders, last = PurePosixPath(name).parts
    if last.startswith("."):
        return not last.startswith(".z")
    return not folders and not last.startswith(("_", "commit_success", "host.")) and last not in TREES


def _difference(path: Path, size: int, digest: str | None) -> str:
    try:
        info = path.lstat()  # compare the size first, because hashing a large file takes seconds
        if not stat.S_ISREG(info.st_mode):
            return "is not a regular file"
        if info.st_size != size:
            return f"has {info.st_size} bytes, not {size}"
        return "" if digest is None or _sum_of_file(path) == digest else "is damaged: its checksum differs"
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


# -- validation of the JSON, because someone who changes a file can recompute its checksum -----------------------------


@dataclass(frozen=True)
class optional:  # noqa: N801  # used like a type in a specification
    """The specification of a field that may be missing, for example in the files of earlier versions."""

    kind: Any


def wrong_field(content: Any, fields: Mapping[str, Any]) -> str | None:
    """Return the name of a field of JSON that is missing, unknown or invalid, or None.

    Args:
        content: The JSON.
        fields: For each field, the specification of its value: a type, None, a function that returns whether the value
            is valid, a tuple of alternatives, a list with the specification of each item, a mapping of fields, or one
            of these in `optional`.
    """
    if not isinstance(content, dict):
        return "the top level"
    wrong = [
        name
        for name, kind in fields.items()
        if not (_fits(content[name], kind) if name in content else isinstance(kind, optional))
    ]
    wrong += [name for name in content if name not in fields]
    return wrong[0] if wrong else None


def _fits(value: Any, kind: Any) -> bool:
    if isinstance(kind, optional):
        return _fits(value, kind.kind)
    if isinstance(kind, Mapping):
        return wrong_field(value, kind) is None
    if isinstance(kind, tuple):
        return any(_fits(value, alternative) for alternative in kind)
    if isinstance(kind, list):
        return isinstance(value, list) and all(_fits(item, kind[0]) for item in value)
    if isinstance(kind, type):  # a bool is an int in Python, but not in JSON
        return isinstance(value, kind) and (kind in (bool, object) or not isinstance(value, bool))
    return value is None if kind is None else kind(value)


def count(value: Any) -> bool:
    """Return whether a value is a non-negative integer that fits into 64 bits."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def counter(value: Any) -> bool:
    """Return whether a value is a non-negative integer that fits into a counter of the carry (32 bits)."""
    return count(value) and value < 2**31


def mapping(kind: Any) -> Callable[[Any], bool]:
    """Return a function that checks for a mapping whose values meet a specification; see `wrong_field`."""
    return lambda value: isinstance(value, dict) and all(_fits(item, kind) for item in value.values())


def position(value: Any) -> bool:
    """Return whether a value is a position in an epoch; see `Position.as_list`."""
    if value is None:
        return True
    if not (isinstance(value, list) and len(value) in (3, 4) and isinstance(value[0], str)):
        return False
    return all(map(counter, value[1:3])) and all(map(mapping(counter), value[3:]))


# At most 18 digits, so that each size fits into 64 bits.
_ARRAY = re.compile(r"[\w<>]+\[(\d{1,18}(, \d{1,18})*)?\]", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{64}")


def _array(value: Any) -> bool:
    return isinstance(value, str) and _ARRAY.fullmatch(value) is not None


def _files(value: Any) -> bool:
    return mapping(_sum)(value) and all(map(_inside, value))


def _sum(value: Any) -> bool:
    if not (isinstance(value, list) and len(value) == 2 and isinstance(value[1], str)):
        return False
    return count(value[0]) and _DIGEST.fullmatch(value[1]) is not None


def _inside(name: str) -> bool:
    """Return whether a file name refers to a file inside the folder."""
    path = PurePosixPath(name)
    return not path.is_absolute() and ".." not in path.parts and str(path) == name


_FIELDS: Mapping[str, Any] = {
    "run": str,
    "step": counter,
    "epoch": counter,
    "at": position,
    "ended": (str, None),
    "value": (int, float, None),
    "average": (str, None),
    "trees": {part: mapping(_array) for part in TREES},
    "sequences": {part: [str] for part in TREES},
    "about": {
        "callbacks": mapping(str),
        "arguments": mapping(mapping(str)),
        "layouts": optional(mapping(str)),
        "optimizer": mapping(str),
        "hyperparams": mapping(list),
        "key": optional(str),
        "data": mapping({"batches": (int, None), "order": optional(mapping(str))}),
        "fit": optional(mapping(str)),
        "phases": [str],
        "unsaved_fields": optional(mapping(mapping(str))),
        "programs": mapping(str),
        "versions": mapping(str),
        "devices": list,
    },
    "files": _files,
    "format": count,
    "metric": optional((str, None)),
}
