"""The layout of `cbstate.metrics_now`: the states of metrics, and a ring buffer of step values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fluxcb._declare.phases import Phase
from fluxcb.callbacks.metrics.packing import Packing

__all__ = ["RunningSums"]


class RunningSums:
    """The layout of the vectors that store the states of metrics and the values of the last steps.

    There is one vector per dtype, and usually only one dtype. Each vector has slots with the states of all metrics. The
    first slot is for training phases, and the second slot for all other phases. Each further phase of an `InTurn` has
    its own slot, because its epoch runs at the same time.

    The float32 vector ends with a ring buffer, which has one row per training step. With an `InTurn`, the last column
    of a row is the slot of the phase that ran the step.

    Args:
        template: The state of all metrics at the start of an epoch.
        ring: Number of rows of the ring buffer.
        columns: Number of values in a row.
        in_turn: Names of the phases that run in turn, one tuple for each `InTurn`.

    Attributes:
        packing: The layout of a slot.
    """

    def __init__(self, template: Any, ring: int, columns: int, in_turn: Sequence[Sequence[str]]) -> None:
        self.packing = Packing(template)
        self._ring, self._in_turn = ring, in_turn
        self._width = columns + bool(in_turn)
        # The first phase of an `InTurn` uses slot 0. The others use the slots from 2 on, because slot 1 is for phases
        # that do not train.
        self._slots = {name: i + (i > 0) for names in in_turn for i, name in enumerate(names)}
        self._count = 1 + max(1, *self._slots.values()) if in_turn else 2

    def fresh(self) -> dict[str, Any]:
        """Return the vectors at the beginning of a run, filled with zeros."""
        import jax
        import jax.numpy as jnp
        import numpy as np

        ring = {"float32": self._ring * self._width}
        sizes = {d: self._count * size + ring.get(d, 0) for d, size in self.packing.sizes.items()}
        # Unlike `jnp.zeros`, NumPy and `device_put` do not compile a program.
        return jax.device_put({d: np.zeros(size, jnp.dtype(d)) for d, size in sizes.items()})

    def together(self, phase: Phase) -> dict[str, int]:
        """Return the slots of a training phase and of the phases that run in turn with it, by name."""
        own = type(phase).name
        names = next((names for names in self._in_turn if own in names), (own,))
        return {name: self._slots.get(name, 0) for name in names}

    def slot(self, phase: Phase) -> int:
        """Return the slot of a phase."""
        return self._slots.get(type(phase).name, 0) if type(phase).trains else 1

    def read_slot(self, vectors: Mapping[str, Any], slot: int) -> dict[str, Any]:
        """Return one slot of the vectors, which are on the host."""
        return {d: vectors[d][slot * size : (slot + 1) * size] for d, size in self.packing.sizes.items()}

    def put_row(self, vectors: Mapping[str, Any], step: Any, slot: int, row: Any) -> dict[str, Any]:
        """Return the vectors with the values of a step written to the ring buffer; traced.

        Args:
            vectors: The vectors.
            step: The number of training steps before this step, int32[].
            slot: The slot of the phase of this step.
            row: The values of this step, float32[columns].
        """
        import jax
        import jax.numpy as jnp
        import numpy as np

        if self._in_turn:
            row = jnp.append(row, jnp.float32(slot))
        # For signed indices, JAX adds a kernel that handles negative ones.
        index = jax.lax.rem(step.astype(np.uint32), np.uint32(self._ring))
        start = np.uint32(self._count * self.packing.sizes["float32"]) + index * np.uint32(self._width)
        return {**vectors, "float32": jax.lax.dynamic_update_slice(vectors["float32"], row, (start,))}

    def rows(self, vectors: Mapping[str, Any], first: int, last: int, slot: int) -> tuple[list[int], Any]:
        """Return the numbers and the values of the steps of a phase after step `first`, up to and including `last`.

        Args:
            vectors: The vectors, on the host.
            first: A step number, which is less than `last` by at most the number of rows of the ring buffer.
            last: A step number.
            slot: The slot of the phase.
        """
        import numpy as np

        ring = vectors["float32"][len(vectors["float32"]) - self._ring * self._width :].reshape(self._ring, self._width)
        begin, end = first % self._ring, last % self._ring
        rows = ring[begin:end] if begin < end else np.concatenate((ring[begin:], ring[:end]))
        steps = list(range(first + 1, last + 1))
        if not self._in_turn:
            return steps, rows
        own = rows[:, -1] == slot
        return [step for step, is_own in zip(steps, own, strict=True) if is_own], rows[own]
