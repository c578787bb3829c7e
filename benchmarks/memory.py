"""(6) Whether memory grows in a long run, beside what the history of losses needs."""

from __future__ import annotations

import gc
import os
import sys
import types
from typing import Any

from figures import Figure, Table
from fresh import in_fresh_process

REPETITIONS = 3
CHECKPOINTS = 2_000, 50_000, 100_000, 200_000
KINDS = "by hand, nothing kept", "default callbacks, steps_per_call=1", 'default callbacks, "auto"'


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
    table.notes.append("The history: what `cbstate.metrics_step` holds, the loss of every step.")
    table.notes.append('"auto" compiles the program of its windows after some ten thousand steps.')
    return [table]


def _run_long(kind: str) -> tuple[list[float], float]:
    """Return the resident memory at the checkpoints, and how much of the growth is the history (MiB)."""
    import mlp

    if kind.startswith("by hand"):
        variant, learner = mlp.by_hand(reads="never", epochs=1), None
    else:
        steps_per_call = "auto" if "auto" in kind else 1
        learner = mlp.learner_for(mlp.defaults(), steps_per_call=steps_per_call)
        variant = None
    resident, history, steps = [], [], 0
    for checkpoint in CHECKPOINTS:
        while steps < checkpoint:
            if variant is not None:
                variant.run()
            elif learner is not None:
                learner.fit(1)
            steps += mlp.BATCHES
        gc.collect()
        resident.append(_resident() / 2**20)
        # Counting takes memory itself, which the allocator may keep: only where that is little, or comes last.
        if learner is not None and checkpoint in (CHECKPOINTS[0], CHECKPOINTS[-1]):
            history.append(_held(learner.cbstate["metrics_step"]) / 2**20)
    return resident, history[-1] - history[0] if history else 0.0


def _resident() -> float:
    """Return the bytes of this process that are in memory."""
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:  # not Linux: the most it ever had, which shows growth as well
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def _held(root: Any) -> int:
    """Return the bytes of an object and of all it refers to, code aside."""
    seen: set[int] = set()
    waiting, size = [root], 0
    while waiting:
        thing = waiting.pop()
        if id(thing) in seen or isinstance(thing, type | types.ModuleType | types.FunctionType):
            continue
        seen.add(id(thing))
        size += sys.getsizeof(thing)
        waiting.extend(gc.get_referents(thing))
    return size
