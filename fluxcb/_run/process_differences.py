"""How the programs of several processes differ, and the error about it, which all of the processes raise."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from fluxcb._compile.placement import Placement
from fluxcb._errors import DeclarationError
from fluxcb._terminal import escape_line
from fluxcb.checkpoints.agreement import Agreement

__all__ = ["Difference", "check_same_key", "find_difference", "key_text"]

_ABSENT = "-"
_MOST_ROWS = 10  # of an error


@dataclass(frozen=True)
class Difference:
    """A process whose description differs from that of process 0.

    Attributes:
        process: The number of the process.
        rows: The rows that differ, each with the texts of process 0 and of this process.
    """

    process: int
    rows: Mapping[str, tuple[str, str]]

    def error(self) -> DeclarationError:
        """Return the error that all processes raise."""
        lines = [f"{name}: {a} in process 0, {b} in process {self.process}" for name, (a, b) in self.rows.items()]
        more = len(lines) - _MOST_ROWS
        shown = [escape_line(line) for line in lines[:_MOST_ROWS]] + [f"and {more} more"] * (more > 0)
        missing = [name for name, texts in self.rows.items() if name.startswith("callbacks.") and _ABSENT in texts]
        fix = [
            f"put `{name.removeprefix('callbacks.')}` in the list of all processes; a callback whose class sets "
            "`chief_only = True` acts only in process 0"
            for name in missing[:1]
        ]
        fix += [f"use the same value of `{name}` in all processes" for name in self.rows if name not in missing][:1]
        return DeclarationError(
            f"Process 0 and process {self.process} do not run the same program: `{next(iter(self.rows))}` differs.",
            where=shown,
            why="all processes compute each step together, and otherwise wait for each other or train different models",
            fix=fix,
        )


def find_difference(rows: Mapping[str, str]) -> Difference | None:
    """Compare descriptions between all processes, which must all call this function at the same place.

    Args:
        rows: The description of the program of this process.

    Returns:
        The difference between process 0 and the first process whose description differs, in all processes.
    """
    from jax.experimental import multihost_utils  # it takes time to import, and a single process never needs it

    text = json.dumps(rows)
    # Checksums first, in one small collective. Process 0 would need time to read the texts of many processes.
    checksum = np.frombuffer(hashlib.blake2b(text.encode(), digest_size=8).digest(), np.uint8)
    checksums = np.asarray(multihost_utils.process_allgather(checksum))
    process = next((p for p, other in enumerate(checksums) if not np.array_equal(other, checksums[0])), None)
    if process is None:
        return None
    # The other processes take part in the exchange, but process 0 needs only these two texts.
    own = text if jax.process_index() in (0, process) else ""
    first, other = map(json.loads, Agreement().exchange(own, lambda texts: [texts[0], texts[process]]))
    names = [name for name in {**first, **other} if first.get(name) != other.get(name)]
    return Difference(process, {name: (first.get(name, _ABSENT), other.get(name, _ABSENT)) for name in names})


def check_same_key(placement: Placement, key: Any) -> None:
    """Check that all processes build a Learner with the same random key.

    Otherwise `device_put` onto the mesh would raise an error about an array that the user has never seen.

    Raises:
        DeclarationError: A process has another key.
    """
    if placement.processes > 1 and (found := find_difference({"key": key_text(key)})) is not None:
        raise found.error()


def key_text(key: Any) -> str:
    """Return the implementation and the words of a random key."""
    return f"{jax.random.key_impl(key)} {np.asarray(jax.random.key_data(key)).tolist()}"
