"""(6) Whether memory grows in a long run, beside what the history of losses needs."""

from __future__ import annotations

import gc
import os
import sys
import types
from typing import Any

from figures import Figure, Table
from fresh import in_fresh_process

from fluxcb import Read
from fluxcb.callbacks import CustomCallback
from fluxcb.events import EpochEnd
from fluxcb.phases import TrainingPhase

REPETITIONS = 3
CHECKPOINTS = 2_000, 50_000, 100_000, 200_000
KINDS = "by hand, nothing kept", "default callbacks, steps_per_call=1", 'default callbacks, "auto"'

_BLOCK = 16
"""Bytes in whose multiples CPython's allocator gives memory to small objects (its `ALIGNMENT`, on 64-bit machines)."""


def measure(rounds: int) -> list[Table]:
    """Return the table of memory."""
    runs: dict[str, list[tuple[list[float], float]]] = {kind: [] for kind in KINDS}
    for _ in range(min(rounds, REPETITIONS)):
        for kind in KINDS:
            runs[kind].append(in_fresh_process(_run_long, kind))
    table = Table(f"Resident memory over {CHECKPOINTS[-1]:,} steps, in fresh processes")
    for kind in KINDS:
        growth = [(resident[-1] - resident[0], history) for resident, history in runs[kind]]
        table.rows[kind] = {
            **{f"{at:,}, MiB": Figure.of([r[i] for r, _ in runs[kind]], 1) for i, at in enumerate(CHECKPOINTS)},
            "growth, MiB": Figure.of([grown for grown, _ in growth], 1),
            "of it the history, MiB": Figure.of([history for _, history in growth], 1),
            "the rest, MiB": Figure.of([grown - history for grown, history in growth], 1),
        }
    table.notes.append(f"Growth from {CHECKPOINTS[0]:,} to {CHECKPOINTS[-1]:,} steps.")
    table.notes.append("The history is `cbstate.metrics_step`, the loss of every step.")
    table.notes.append('Each run is one fit of known length, so "auto" uses windows from the beginning.')
    return [table]


def _run_long(kind: str) -> tuple[list[float], float]:
    """Return the resident memory at the checkpoints, and how much of the growth is the history (MiB)."""
    import mlp

    resident: list[float] = []
    if kind.startswith("by hand"):
        variant, steps = mlp.by_hand(reads="never", epochs=1), 0
        for checkpoint in CHECKPOINTS:
            while steps < checkpoint:
                variant.run()
                steps += mlp.BATCHES
            resident.append(_resident())
        return resident, 0.0
    history: list[float] = []

    def look(seen: Any) -> None:
        if seen.progress.step not in CHECKPOINTS:
            return
        resident.append(_resident())
        # Counting takes memory itself, which the allocator may keep: only where that is little, or comes last.
        if seen.progress.step in (CHECKPOINTS[0], CHECKPOINTS[-1]):
            history.append(_held(seen.cbstate.metrics_step) / 2**20)

    access = {"cbstate": {"metrics_step": Read()}}
    callbacks = [*mlp.defaults(), CustomCallback(look, EpochEnd, phase=TrainingPhase, access=access)]
    learner = mlp.learner_for(callbacks, steps_per_call="auto" if "auto" in kind else 1)
    learner.fit(CHECKPOINTS[-1] // mlp.BATCHES)
    return resident, history[-1] - history[0]


def _resident() -> float:
    """Return how much of this process is in memory (MiB)."""
    gc.collect()
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    except FileNotFoundError:  # not Linux: the most it ever had, which shows growth as well
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return (peak if sys.platform == "darwin" else peak * 1024) / 2**20


def _held(root: Any) -> int:
    """Return the bytes that an object and all it refers to take, code aside; Python gives them in blocks of 16."""
    seen: set[int] = set()
    waiting, size = [root], 0
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen or isinstance(thing, type | types.ModuleType | types.FunctionType):
            continue
        seen.add(id(thing))
        size += -(-sys.getsizeof(thing) // _BLOCK) * _BLOCK
        waiting.extend(gc.get_referents(thing))
    return size
