"""Measuring on an accelerator whether windows of a step are faster than single steps."""

from __future__ import annotations

import time
from collections.abc import Sequence

import jax
import numpy as np

from fluxcb._compile.arrays import copy_tree
from fluxcb._compile.program import Program, ProgramKind
from fluxcb._run.stacker import Stacker
from fluxcb._run.train_state import TrainState
from fluxcb._typing import Batch

__all__ = ["faster_kind"]

_ROUNDS = 3  # after one that warms up both programs
_MIN_GAIN = 0.05  # minimum share of the time that windows must save


def faster_kind(
    train: TrainState, single: Program, window: Program, batches: Sequence[Batch], stacker: Stacker
) -> ProgramKind | None:
    """Run some steps with both programs, and return the kind of the faster program.

    The steps run on copies of the carry, and their values are dropped, so the training does not notice them. This also
    lets the trial compare the same steps. The alternative, using both programs for some steps of the training each,
    would leave steps of the slower program in a run that uses the other one.

    Windows must win although the trial stacks their batches while the device waits. In a training, the host does this
    while the device runs the previous window.

    Args:
        train: The train state.
        single: The single-step program.
        window: The window program.
        batches: Batches that fit into one window.
        stacker: Stacks them.

    Returns:
        The kind of the faster program, or None if a traced handler stopped the steps, so that they did not all run.
    """
    singles, windows = [], []
    for _ in range(1 + _ROUNDS):
        singles.append(_seconds_of_single_steps(train, single, batches))
        seconds = _seconds_of_window(train, window, batches, stacker)
        if seconds is None:
            return None
        windows.append(seconds)
    return "loop" if min(windows[1:]) < (1 - _MIN_GAIN) * min(singles[1:]) else "straight"


def _seconds_of_single_steps(train: TrainState, program: Program, batches: Sequence[Batch]) -> float:
    # A copy, because the program donates its argument. It is complete before the clock starts.
    carry = jax.block_until_ready(copy_tree(train.lend(program.layout)))
    began = time.perf_counter()
    for batch in batches:
        carry, _ = program.call(carry, batch)
    jax.block_until_ready(carry)
    return time.perf_counter() - began


def _seconds_of_window(train: TrainState, program: Program, batches: Sequence[Batch], stacker: Stacker) -> float | None:
    carry = jax.block_until_ready(copy_tree(train.lend(program.layout)))
    began = time.perf_counter()
    buffer, count = stacker.stack(batches)
    carry, outputs = program.call(carry, buffer, np.uint32(count))
    jax.block_until_ready(carry)
    seconds = time.perf_counter() - began
    rows = np.asarray(outputs if program.rows_only else outputs.rows)
    return seconds if rows[:count, 0].all() else None  # each row begins with a flag: whether the step ran
