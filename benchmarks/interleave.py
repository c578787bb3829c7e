"""Timing in turns: each variant runs once a round, and is compared with its neighbours of the same round.

A machine with neighbours is twice as fast in one minute as in the next, and a ratio of two figures from different
minutes says nothing. So ratios and differences are taken within a round, and their median and quartiles over rounds.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from figures import Cell, Figure, Table

__all__ = ["Times", "Variant", "comparison", "in_turns"]

MOST_WARM_UPS = 40
"""Runs after which no variant is waited for any longer."""


@dataclass
class Variant:
    """One way of doing the training that all variants do.

    Attributes:
        run: Trains `steps` steps further, and waits for the last.
        params: Returns the parameters that it has come to: a pytree of arrays.
        steps: Steps of a run.
        ready: Says whether everything has been compiled that will be.
        same_as: Name of the variant that must come to the same parameters; the first one by default.
    """

    run: Callable[[], object]
    params: Callable[[], Any]
    steps: int
    ready: Callable[[], bool] = lambda: True
    same_as: str = ""


@dataclass
class Times:
    """What the runs of one variant took, a figure per round.

    Attributes:
        wall: Wall time (microseconds per step).
        thread: CPU time of the Python thread (microseconds per step).
        settled: Whether the variant was ready when timing began.
    """

    wall: list[float] = field(default_factory=list)
    thread: list[float] = field(default_factory=list)
    settled: bool = True


def in_turns(variants: Mapping[str, Variant], rounds: int, *, tolerance: float = 1e-3) -> dict[str, Times]:
    """Warm all variants up, time them in turns, and check that they did the same work.

    All run equally often: those that are ready early train on until the last one is. Every other round goes through
    them backwards, so that none is always behind the same neighbour.

    Args:
        variants: The variants, by name.
        rounds: Rounds that are timed.
        tolerance: Largest distance to the parameters of `same_as`, relative to how far training moved these.

    Raises:
        SystemExit: A variant trained something else.
    """
    start = {name: _flat(variant.params()) for name, variant in variants.items()}
    for variant in variants.values():
        variant.run()
    _check_same_work(variants, start, tolerance)
    warm_ups = 1
    while warm_ups < MOST_WARM_UPS and not all(variant.ready() for variant in variants.values()):
        warm_ups += 1
        for variant in variants.values():
            variant.run()
    times = {name: Times(settled=variant.ready()) for name, variant in variants.items()}
    names = list(variants)
    for turn in range(rounds):
        for name in names if turn % 2 == 0 else reversed(names):
            variant = variants[name]
            gc.collect()
            began, thread_began = time.perf_counter(), time.thread_time()
            variant.run()
            thread, wall = time.thread_time() - thread_began, time.perf_counter() - began
            times[name].wall.append(wall / variant.steps * 1e6)
            times[name].thread.append(thread / variant.steps * 1e6)
    # Rounding drifts apart over tens of thousands of steps; a step too few or too many shows in the first run's check.
    _check_same_work(variants, start, 10 * tolerance)
    return times


def _flat(params: Any) -> np.ndarray:
    return np.concatenate([np.array(leaf, np.float64).ravel() for leaf in jax.tree.leaves(params)])


def _check_same_work(variants: Mapping[str, Variant], start: Mapping[str, np.ndarray], tolerance: float) -> None:
    first = next(iter(variants))
    now = {name: _flat(variant.params()) for name, variant in variants.items()}
    for name, variant in variants.items():
        reference = variant.same_as or first
        moved = np.linalg.norm(now[reference] - start[reference])
        distance = np.linalg.norm(now[name] - now[reference]) / moved
        if not distance <= tolerance:
            raise SystemExit(f"`{name}` is not the training of `{reference}`: relative distance {distance:.1e}")


def comparison(title: str, times: Mapping[str, Times], floors: Mapping[str, str], unit: str = "us/step") -> Table:
    """Return a table of variants against their floors.

    Args:
        title: Its title.
        times: What `in_turns` returned.
        floors: Per row, the name of the variant that it is compared with; a floor's floor is itself.
        unit: `us/step` or `ms/step`.
    """
    scale, digits = (1e-3, 2) if unit == "ms/step" else (1.0, 1)
    table = Table(title)
    for name, floor in floors.items():
        own, base = times[name], times[floor]
        pairs = list(zip(own.wall, base.wall, strict=True))
        itself = name == floor
        cells: dict[str, Cell] = {
            unit: Figure.of([wall * scale for wall in own.wall], digits),
            "ratio": "1" if itself else Figure.of([wall / other for wall, other in pairs], 3),
            f"difference, {unit}": "" if itself else Figure.of([(a - b) * scale for a, b in pairs], digits),
            f"Python thread, {unit}": Figure.of([thread * scale for thread in own.thread], digits),
        }
        table.rows[name] = cells
        if not own.settled:
            table.notes.append(f"{name}: had compiled no window program after {MOST_WARM_UPS} runs.")
    return table
