"""The host state in a checkpoint: `host.json`, and the arrays that it refers to in `host.npz`.

Orbax only writes the trees of the carry. It takes about 1 ms per array and keeps 0.4 kB of memory for it (0.12.8),
which is too slow for callbacks with hundreds of small arrays.
"""

from __future__ import annotations

import json
import math
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fluxcb._errors import CheckpointCorruptError
from fluxcb.checkpoints.manifest import HOST_JSON, count, counter, mapping, position, wrong_field
from fluxcb.checkpoints.snapshot import Snapshot

__all__ = ["read_host", "write_host"]

HOST_ARRAYS = "host.npz"

_NPY = re.compile(
    rb"\x93NUMPY\x01\x00(..)"
    rb"\{'descr': '([<>|][biufc]\d{1,2})', 'fortran_order': (True|False), 'shape': \((\d+,|\d+(?:, \d+)+|)\), \} *\n",
    re.DOTALL,
)


def write_host(folder: Path, snapshot: Snapshot) -> None:
    """Write `Snapshot.host` and `Snapshot.arrays` to the folder of a checkpoint."""
    # The arrays are in a separate file, because they would be several times larger and slower to read as JSON.
    (folder / HOST_JSON).write_text(json.dumps(snapshot.host), encoding="utf-8")
    np.savez(folder / HOST_ARRAYS, **snapshot.arrays)


def read_host(folder: Path, step: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the host state and the arrays that `write_host` has written.

    Args:
        folder: The folder of the checkpoint.
        step: The step of the checkpoint.

    Raises:
        CheckpointCorruptError: The JSON has missing or invalid fields.
        Exception: A file does not have the right format.
    """
    host = json.loads((folder / HOST_JSON).read_bytes())
    wrong = wrong_field(host, _FIELDS)
    # A file that was copied from another step, with a matching checksum, is detected here.
    if wrong is None and host["progress"]["step"] != step:
        wrong = "progress"
    if wrong is not None:
        raise CheckpointCorruptError(
            f"{folder / HOST_JSON} was not written by fluxcb: the field `{wrong}` is invalid.", where=str(folder)
        )
    return host, _read_npz(folder / HOST_ARRAYS)


def _read_npz(path: Path) -> dict[str, np.ndarray]:
    """Return the arrays of an uncompressed `.npz` file, after comparing their sizes with the size of the file.

    `np.load` would allocate as much memory as a header requests, and decompress a small file to any size. It also
    parses headers as Python code, although a regular expression is enough.
    """
    arrays: dict[str, np.ndarray] = {}
    with zipfile.ZipFile(path) as file:
        members = file.infolist()
        # Members of a ZIP file can overlap, so each of them could be as large as the file.
        if sum(member.file_size for member in members) > path.stat().st_size:
            raise ValueError(f"the members of {path.name} are larger than the file")
        for member in members:
            where = f"{member.filename} in {path.name}"
            if member.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{where} is compressed")
            data = file.read(member)
            header = _NPY.match(data)
            if header is None or header.end() != 10 + int.from_bytes(header[1], "little"):
                raise ValueError(f"{where} is not an array of numbers in version 1.0 of the NumPy format")
            dtype, shape = np.dtype(header[2].decode()), [int(size) for size in re.findall(rb"\d+", header[4])]
            size = len(data) - header.end()  # the only size that may be allocated
            if math.prod(shape) * dtype.itemsize != size:
                raise ValueError(f"{where} has {size} bytes for {dtype}{shape}")
            array = np.frombuffer(data, dtype, offset=header.end()) if size else np.empty(0, dtype)
            name = member.filename.removesuffix(".npy")
            arrays[name] = array.reshape(shape, order="F" if header[3] == b"True" else "C")
    if len(arrays) < len(members):
        raise ValueError(f"an array appears twice in {path.name}")
    return arrays


def _entries(value: Any) -> bool:
    return isinstance(value, dict) and "$" not in value  # a dict with "$" is a single encoded value


def _data(value: Any) -> bool:
    fields = {**_DATA} | {name: kind for name, kind in _RARE_DATA.items() if isinstance(value, dict) and name in value}
    if wrong_field(value, fields) is not None or (value["state"] is None and value["ahead"]):
        return False
    return value["ahead"] <= value["consumed"] <= value["total"]


def _pairs(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(v, list) and len(v) == 2 and all(map(count, v)) for v in value)


def _rewound(value: Any) -> bool:
    return (
        isinstance(value, list)
        and [type(item) for item in value] == [int, bool, bool]
        and abs(value[0]) < 2**31  # the carry stores it as int32
    )


# Only some runs have these entries.
_RARE_DATA: Mapping[str, Any] = {"left_out": _pairs, "cut_short": bool}

_DATA: Mapping[str, Any] = {
    "open": bool,
    "pass": counter,
    "consumed": count,
    "total": count,
    "state": object,
    "ahead": count,
    "rewound": _rewound,
}

# The content is also checked, because someone who changes a file can recompute its checksum.
_FIELDS: Mapping[str, Any] = {
    "progress": {"step": counter, "epoch": counter, "step_in_epoch": counter},
    "cancelled": lambda value: isinstance(value, list) and len(value) == 2 and all(map(count, value)),
    "at": position,
    "fit": {
        "epoch": counter,
        "step": counter,
        "ended": (str, None),
        "rewinds": counter,
        "rewound_to": (counter, None),
    },
    "key": dict,
    "cbstate": _entries,
    "callbacks": _entries,
    "disabled": [str],
    "switching": ([str], None),
    "data": mapping(_data),
}
