"""A population of 8 members, compared with 8 runs one after the other: the 64-64-10 network, default callbacks.

    uv run python benchmarks/population.py [--rounds N] [--epochs N] [--members N]

A run builds its Learner or its population, compiles, and trains. Each round does both, in alternating order, and their
ratio is taken within the round. The ratio of further epochs, in which nothing is compiled, is printed as well. Wall
time depends on what else runs on the machine, so the CPU time of the process is printed next to it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import mlp
import numpy as np
import optax

import fluxcb
from fluxcb import Learner, Population
from fluxcb.phases import TrainingPhase

BATCHES = mlp.batches()


def make_learner(learning_rate: float, key: int) -> Learner:
    """Return the Learner of one member."""
    return Learner(
        (mlp.init, mlp.apply),
        mlp.loss_fn,
        fluxcb.inject(optax.adam, learning_rate=learning_rate),
        data=BATCHES,
        callbacks=mlp.defaults(),
        default_callbacks=False,
        phases=(TrainingPhase(),),
        key=key,
    )


def seconds(function: Callable[[], Any]) -> tuple[Any, float, float]:
    """Return the result of a function, its wall time (s), and its CPU time (s)."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = function()
    return result, time.perf_counter() - wall, time.process_time() - cpu


def one_after_the_other(rates: list[float], epochs: int) -> list[Learner]:
    """Build and train the Learners, each completely before the next one."""
    learners = []
    for key, rate in enumerate(rates):
        learner = make_learner(rate, key)
        learner.fit(epochs)
        learners.append(learner)
    return learners


def together(rates: list[float], epochs: int) -> Population:
    """Build and train a population."""
    population = Population(make_learner, learning_rate=rates, key=range(len(rates)), default_callbacks=False)
    population.fit(epochs)
    return population


def check_same_work(learners: list[Learner], population: Population) -> None:
    """Check that both have trained the same.

    Raises:
        SystemExit: The parameters differ by more than rounding.
    """
    for learner, member in zip(learners, population, strict=True):
        for a, b in zip(jax.tree.leaves(learner.params), jax.tree.leaves(member.params), strict=True):
            if not np.allclose(a, b, rtol=1e-2, atol=1e-4):
                raise SystemExit(f"a member differs from its Learner by {np.abs(a - b).max():.1e}")


def main() -> None:
    """Measure, and print the times and ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--members", type=int, default=8)
    chosen = parser.parse_args()
    rates = np.geomspace(1e-4, 1e-3, chosen.members).tolist()
    ratios: dict[str, list[float]] = {}
    one_after_the_other(rates[:1], 1)  # loads the libraries
    for number in range(chosen.rounds):
        both = {
            "runs": lambda: one_after_the_other(rates, chosen.epochs),
            "population": lambda: together(rates, chosen.epochs),
        }
        names = list(both) if number % 2 == 0 else list(reversed(both))
        whole = {name: seconds(both[name]) for name in names}
        learners, population = whole["runs"][0], whole["population"][0]
        check_same_work(learners, population)
        further: dict[str, Callable[[], Any]] = {
            "runs": lambda learners=learners: [learner.fit(chosen.epochs) for learner in learners],
            "population": lambda population=population: population.fit(chosen.epochs),
        }
        later = {name: seconds(further[name]) for name in names}
        for what, times in (("whole", whole), ("further epochs", later)):
            for kind, at in (("wall", 1), ("CPU", 2)):
                runs, joint = times["runs"][at], times["population"][at]
                ratios.setdefault(f"{what}, {kind} time", []).append(joint / runs)
                print(f"{what}, {kind} time: {chosen.members} runs {runs:.2f} s, population {joint:.2f} s")
    print(f"\npopulation / {chosen.members} runs, {chosen.epochs} epochs of {len(BATCHES)} steps, median:")
    for name, values in ratios.items():
        print(f"{name}: {statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})")


if __name__ == "__main__":
    main()
