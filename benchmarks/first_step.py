"""(5) How long it takes until the first step is done, traced and compiled, in processes that have compiled nothing."""

from __future__ import annotations

import gc
import time

from figures import Figure, Table
from fresh import in_fresh_process

REPETITIONS = 5
WINDOW = 100

STEP_BY_HAND, SCAN_BY_HAND = "by hand, jitted step", f"by hand, lax.scan of {WINDOW}"
WATCHED = "by hand, sums the loss and stops at NaN"
ONE_PROGRAM = "by hand, jax.jit(optimizer.init)"
FLOORS = {
    STEP_BY_HAND: STEP_BY_HAND,
    ONE_PROGRAM: STEP_BY_HAND,
    WATCHED: STEP_BY_HAND,
    "no callbacks": STEP_BY_HAND,
    "default callbacks": STEP_BY_HAND,
    SCAN_BY_HAND: SCAN_BY_HAND,
    f"no callbacks, steps_per_call={WINDOW}": SCAN_BY_HAND,
    f"default callbacks, steps_per_call={WINDOW}": SCAN_BY_HAND,
}


def measure(rounds: int) -> list[Table]:
    """Return the table of first steps."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in FLOORS}
    for _ in range(min(rounds, REPETITIONS)):
        for name in FLOORS:
            taken[name].append(in_fresh_process(_until_first_step, name))
    table = Table("The first step, in fresh processes")
    totals = {name: [prepared + first for prepared, first in pairs] for name, pairs in taken.items()}
    for name, floor in FLOORS.items():
        ratios = [own / base for own, base in zip(totals[name], totals[floor], strict=True)]
        table.rows[name] = {
            "construction, s": Figure.of([prepared for prepared, _ in taken[name]]),
            "first call, s": Figure.of([first for _, first in taken[name]]),
            "both, s": Figure.of(totals[name]),
            "ratio": "1" if name == floor else Figure.of(ratios),
            "difference, s": ""
            if name == floor
            else Figure.of([own - base for own, base in zip(totals[name], totals[floor], strict=True)]),
        }
    table.notes.append("Sums the loss and stops at NaN: a part of what the default callbacks add to the step.")
    table.notes.append(
        "Construction by hand creates the parameters and the optimizer state. A Learner also checks the callbacks and "
        "traces the step. Before the clock starts, JAX and fluxcb are imported, the backend is initialized, and all "
        "existing objects are excluded from garbage collection. A Learner computes the optimizer state with one "
        "compiled program. The hand-written code calls `optimizer.init(params)` without `jax.jit`, unless a row says "
        "otherwise."
    )
    return [table]


def _until_first_step(name: str) -> tuple[float, float]:
    """Return seconds until everything is constructed, and seconds from then until the first call is done."""
    import jax
    import jax.numpy as jnp
    import mlp

    gc.collect()
    gc.freeze()  # else some variants meet a full collection of what the imports have left, and others don't
    steps = WINDOW if str(WINDOW) in name else 1
    data = mlp.batches()[:WINDOW]
    jax.block_until_ready(jnp.asarray(data[0][0]))  # the backend is up
    if name.startswith("by hand"):
        began = time.perf_counter()
        if steps > 1:
            variant = mlp.by_hand_in_windows(steps, data=data, epochs=1)
        elif name == WATCHED:
            step, first = mlp.hand_step_watched, mlp.hand_state_watched
            variant = mlp.by_hand(reads="never", data=data[:1], epochs=1, step=step, first=first)
        else:
            first = mlp.hand_state_in_one_program if name == ONE_PROGRAM else mlp.hand_state
            variant = mlp.by_hand(reads="never", data=data[:1], epochs=1, first=first)
        constructed = time.perf_counter()
        variant.run()
        return constructed - began, time.perf_counter() - constructed
    callbacks = mlp.defaults() if name.startswith("default") else []
    arguments = {"steps_per_call": steps} if steps > 1 else {}
    began = time.perf_counter()
    learner = mlp.learner_for(callbacks, data, **arguments)
    constructed = time.perf_counter()
    learner.fit(steps=steps)
    jax.block_until_ready(learner.params)
    return constructed - began, time.perf_counter() - constructed
