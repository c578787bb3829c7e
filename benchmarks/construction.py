"""(4) What checking, construction and explaining cost against the number of callbacks, and what the import costs."""

from __future__ import annotations

import gc
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import mlp
from figures import Figure, Table

import fluxcb
from fluxcb import Callback, Read, Write, on
from fluxcb.events import StepEnd
from fluxcb.phases import TrainingPhase

COUNTS = 10, 100, 1000


class Link(Callback):
    """Read what the link before writes, so that the set has one order."""

    def __init__(self, number: int) -> None:
        self.number = number

    def stateaccess(self) -> dict[str, Any]:
        access: dict[str, Any] = {f"x{self.number}": Write()}
        if self.number:
            access[f"x{self.number - 1}"] = Read()
        return {"cbstate": access, "step": {"loss": Read()}}

    def init(self, learner: Any) -> None:
        setattr(learner.cbstate, f"x{self.number}", 0)

    @on
    def look(self, event: StepEnd, phase: TrainingPhase, learner: Any) -> None:
        """Do nothing."""


class Reader(Callback):
    """Read the loss and nothing else, so that any order will do."""

    def stateaccess(self) -> dict[str, Any]:
        return {"step": {"loss": Read()}}

    @on
    def look(self, event: StepEnd, phase: TrainingPhase, learner: Any) -> None:
        """Do nothing."""


def measure(rounds: int) -> list[Table]:
    """Return the tables of construction, per kind of set, and of the import."""
    data = mlp.batches()[:1]
    chain = _table(
        "Callbacks in a chain: each reads what the previous one writes",
        lambda n: [Link(i) for i in range(n)],
        data,
        rounds,
    )
    apart = _table("Independent callbacks that all read the loss", lambda n: [Reader() for _ in range(n)], data, rounds)
    return [chain, apart, _import(rounds)]


def _table(title: str, make: Callable[[int], list[Any]], data: Any, rounds: int) -> Table:
    seconds: dict[str, dict[int, list[float]]] = {}

    def timed(name: str, count: int, function: Callable[[], Any]) -> Any:
        gc.collect()
        began = time.perf_counter()
        result = function()
        seconds.setdefault(name, {}).setdefault(count, []).append(time.perf_counter() - began)
        return result

    mlp.learner_for(make(1), data)  # compiles what every construction shares
    for _ in range(rounds):
        for count in COUNTS:
            callbacks, others = make(count), make(count)
            timed("fluxcb.check", count, lambda cbs=callbacks: fluxcb.check(cbs, default_callbacks=False))
            learner = timed("Learner(...)", count, lambda cbs=others: mlp.learner_for(cbs, data))
            timed("learner.explain()", count, learner.explain)
    table = Table(title)
    for name, by_count in seconds.items():
        growth = [b / a for a, b in zip(by_count[100], by_count[1000], strict=True)]
        table.rows[name] = {
            **{f"{count:,}, ms": Figure.of([s * 1e3 for s in by_count[count]]) for count in COUNTS},
            "1,000 to 100, ratio": Figure.of(growth, 1),
        }
    table.notes.append("A ratio of 10 is linear growth.")
    return table


def _import(rounds: int) -> Table:
    code = "import time; began = time.perf_counter(); import {}; print(time.perf_counter() - began)"
    names = "fluxcb", "jax"
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(min(rounds, 5)):
        for name in names:
            command = [sys.executable, "-c", code.format(name)]
            ran = subprocess.run(command, capture_output=True, text=True, check=True)
            seconds[name].append(float(ran.stdout))
    table = Table("Imports, in fresh interpreters")
    for name in names:
        table.rows[f"import {name}"] = {"ms": Figure.of([s * 1e3 for s in seconds[name]], 1)}
    return table
