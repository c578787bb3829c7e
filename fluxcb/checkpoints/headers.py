"""Compare the headers of stored arrays with the expected ones before Orbax allocates memory for the arrays.

Checksums do not protect against deliberate changes, because they can be recomputed. Orbax allocates the size in the
header, and TensorStore aborts the process if there is not enough memory (Orbax 0.12.8).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fluxcb._errors import CheckpointCorruptError
from fluxcb.checkpoints.manifest import HOST_JSON, LONGEST, Manifest
from fluxcb.checkpoints.naming import Name

__all__ = ["check_headers", "check_json", "check_sizes", "is_key_data", "nbytes_of"]

_INDEX = "_METADATA"
_ALWAYS_ALLOWED = 1 << 30  # size of arrays that is never refused (bytes)
_MOST_RATIO = 1000  # beyond that, the maximum ratio between arrays and their files; zeros compress this well
_KEY_WORDS = 4  # the most that any random key implementation of JAX has (`rbg`)
_HEADER_BYTES, _HEADER_DEPTH = 1 << 16, 8  # limits; real headers have a few hundred bytes and a depth of 3


def check_sizes(folder: Path, manifest: Manifest, part: str, nbytes: int) -> None:
    """Refuse arrays whose claimed size is implausible for the size of their files.

    This check is for arrays whose shapes are only known from the checkpoint itself.

    Args:
        folder: The folder of the checkpoint.
        manifest: Its verified manifest.
        part: The name of a part of the checkpoint.
        nbytes: The size of the arrays of the part in memory (bytes).

    Raises:
        CheckpointCorruptError: The size is above 1 GiB and above 1,000 times the size of the files.
    """
    stored = sum(size for name, (size, _) in manifest.files.items() if name.startswith(f"{part}/"))
    if nbytes > max(_ALWAYS_ALLOWED, _MOST_RATIO * stored):
        raise CheckpointCorruptError(
            f"{folder / part} claims to contain {nbytes:,} bytes of arrays in {stored:,} bytes of files.",
            where=str(folder / part),
            why="fluxcb allocates this much memory only if the Learner or `like` confirms the shapes of the arrays",
            fix="restore a valid checkpoint from a copy",
        )


def check_headers(folder: Path, part: str, texts: Mapping[Name, str]) -> dict[Name, tuple[int, ...]]:
    """Refuse the arrays of a part if their headers differ from the expected ones.

    Args:
        folder: The folder of the checkpoint.
        part: The name of the part.
        texts: The expected dtype and shape of each stored array, such as `float32[32, 10]`.

    Returns:
        The shape of the chunks of each array. A chunk is the smallest part of an array that can be read.

    Raises:
        CheckpointCorruptError: An array is missing or unknown, has another shape or dtype, or has chunks that are
            larger than the array.
    """
    import tensorstore as ts

    _check_index(folder / part, set(texts))
    base = f"file://{(folder / part).absolute()}/"
    store = ts.KvStore.open({"driver": "ocdbt", "base": base}).result()
    # Start all reads before waiting for their results, because TensorStore runs them in parallel.
    headers = {name: store.read(f"{'.'.join(name)}/.zarray") for name in texts}
    for name, header in headers.items():
        if not _can_be_parsed(header.result().value):
            raise _refused(folder / part, name, "a header that is too long or nested too deeply", texts[name])
    opened = {
        name: ts.open(
            {"driver": "zarr", "kvstore": {"driver": "ocdbt", "base": base, "path": f"{'.'.join(name)}/"}},
            open=True,
            read=True,
        )
        for name in texts
    }
    shapes: dict[Name, tuple[int, ...]] = {}
    for name, future in opened.items():
        array = future.result()
        chunks = array.chunk_layout.read_chunk.shape or ()
        dtype, shape = array.dtype.numpy_dtype, array.shape
        # TensorStore allocates whole chunks, so a chunk must not be larger than the array.
        if any(chunk is None or chunk > size for chunk, size in zip(chunks, shape, strict=True)):
            raise _refused(folder / part, name, f"chunks of {list(chunks)}", texts[name])
        shapes[name] = tuple(chunk or 1 for chunk in chunks)
        found = f"{dtype}[{', '.join(map(str, shape))}]"
        if found != texts[name] and not is_key_data(dtype, shape, texts[name]):
            raise _refused(folder / part, name, found, texts[name])
    return shapes


def _can_be_parsed(header: bytes) -> bool:
    """Return whether TensorStore can parse a header. Deep nesting would overflow its stack and crash the process."""
    depth = deepest = 0
    for byte in header[:_HEADER_BYTES]:
        depth += (byte in b"[{") - (byte in b"]}")
        deepest = max(deepest, depth)
    return len(header) <= _HEADER_BYTES and deepest <= _HEADER_DEPTH


def is_key_data(dtype: np.dtype, shape: tuple[int, ...], text: str) -> bool:
    """Return whether an array can be the data of random keys that a text such as `key<fry>[3]` describes."""
    if not text.startswith("key<") or dtype != np.uint32 or not shape or shape[-1] > _KEY_WORDS:
        return False
    return text.endswith(f">[{', '.join(map(str, shape[:-1]))}]")


def nbytes_of(text: str) -> int:
    """Return the size (bytes) of the array that a text such as `float32[32, 10]` describes."""
    import jax.numpy as jnp

    dtype, _, shape = text[:-1].partition("[")
    sizes = [int(size) for size in shape.split(", ")] if shape else []
    itemsize = 4 * _KEY_WORDS if dtype.startswith("key<") else jnp.dtype(dtype).itemsize
    return math.prod(sizes) * itemsize


def check_json(manifest: Manifest, folder: Path) -> None:
    """Refuse JSON files that are too large to parse.

    Raises:
        CheckpointCorruptError: A file other than those with arrays has more than 256 MiB.
    """
    for name, (size, _) in manifest.files.items():
        if name.endswith((HOST_JSON, "metadata", "METADATA")) and size > LONGEST:
            raise CheckpointCorruptError(
                f"{folder / name} has {size:,} bytes, and the maximum is {LONGEST:,}.", where=str(folder / name)
            )


def _check_index(folder: Path, names: set[Name]) -> None:
    """Refuse an Orbax index that refers to unexpected arrays or formats."""
    index: Any = json.loads((folder / _INDEX).read_bytes())
    formats = index.get("use_ocdbt"), index.get("use_zarr3")
    if formats != (True, False) or not (folder / "manifest.ocdbt").exists():
        raise CheckpointCorruptError(f"{folder / _INDEX} has a format that fluxcb does not write.", where=str(folder))
    entries = index["tree_metadata"].values()
    found = [tuple(str(part["key"]) for part in entry["key_metadata"]) for entry in entries]
    kinds = {entry["value_metadata"]["value_type"] for entry in entries}
    if len(found) != len(names) or set(found) != names or not kinds <= {"np.ndarray", "jax.Array"}:
        raise CheckpointCorruptError(
            f"{folder / _INDEX} does not match the manifest; it lists {', '.join(sorted(map('.'.join, found)))}.",
            where=str(folder),
        )


def _refused(folder: Path, name: Name, found: str, expected: str) -> CheckpointCorruptError:
    return CheckpointCorruptError(
        f"{folder.parent} has {found} for {folder.name}: {'.'.join(name)}, but its manifest lists {expected}.",
        where=str(folder.parent),
    )
