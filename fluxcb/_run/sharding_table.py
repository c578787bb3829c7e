"""The table that `Learner.shardings` returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fluxcb._compile.placement import bytes_per_device, leaf_paths, spec_text
from fluxcb._typing import PyTree

__all__ = ["ShardingRow", "ShardingTable"]

# Without the key, whose words are in `counters`.
_PARTS = ("params", "model_state", "opt_state", "cbstate", "counters")


@dataclass(frozen=True)
class ShardingRow:
    """One array of the train state.

    Attributes:
        path: Dotted path, such as `params.dense.kernel`.
        spec: The sharding, such as `P('data', None)`; `one device` without a mesh.
        bytes_per_device: Size of the part that one device holds (bytes).
    """

    path: str
    spec: str
    bytes_per_device: int


@dataclass(frozen=True)
class ShardingTable:
    """The shardings of all arrays of a train state. It prints as a table.

    Attributes:
        rows: One row for each array, in the order of the train state.
    """

    rows: tuple[ShardingRow, ...]

    @classmethod
    def of(cls, carry: Mapping[str, PyTree]) -> ShardingTable:
        """Return the table of a carry."""
        return cls(
            tuple(
                ShardingRow(".".join((part, *path)), spec_text(leaf.sharding), bytes_per_device(leaf))
                for part in _PARTS
                for path, leaf in leaf_paths(carry[part])
            )
        )

    @property
    def bytes_per_device(self) -> int:
        """Size of the train state on one device (bytes)."""
        return sum(row.bytes_per_device for row in self.rows)

    def __str__(self) -> str:
        """Return the table as text."""
        lines = [("path", "spec", "bytes per device")]
        lines += [(row.path, row.spec, f"{row.bytes_per_device:,}") for row in self.rows]
        lines.append(("total", "", f"{self.bytes_per_device:,}"))
        wide, middle, right = (max(map(len, column)) for column in zip(*lines, strict=True))
        return "\n".join(f"{path:<{wide}}  {spec:<{middle}}  {size:>{right}}" for path, spec, size in lines)

    # A notebook and the Python prompt then show the table.
    __repr__ = __str__
