"""What fluxcb costs per step, beside a loop written by hand; and what construction and import cost.

    uv run python benchmarks/overhead.py [--rounds 9] [--json FILE]

Every figure is a ratio or a difference within this one run: the variants take turns, round after
round, on the same batches, and end with the same parameters (checked). Machines are noisy; read
the quartiles.
"""

from __future__ import annotations

import argparse
import io
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.table import Table

import fluxcb
from fluxcb import Callback, Learner, Read, Write, on
from fluxcb.callbacks import Metrics, MetricsPrinter, ProgressBar, Recorder, StopOnNaNLoss
from fluxcb.events import StepEnd
from fluxcb.phases import TrainingPhase, ValidationPhase

BATCHES, STEPS = 1000, 2000

Run = Callable[[], Any]


class NoOp(Callback):
    """Do nothing at StepEnd: the cost of being asked."""

    @on
    def nothing(self, event: StepEnd, phase: TrainingPhase, learner: Any) -> None:
        """Do nothing."""


def model_and_data() -> tuple[Any, Any, Any, list[Any]]:
    """Return the 64-64-10 network, its loss, its optimizer and 1,000 batches of 32."""
    rng = np.random.default_rng(0)
    batches = [
        (rng.normal(size=(32, 64)).astype(np.float32), rng.integers(0, 10, 32).astype(np.int32)) for _ in range(BATCHES)
    ]

    def init(key: Any, xs: Any) -> Any:
        first, second = jax.random.split(key)
        return {
            "w1": jax.random.normal(first, (64, 64)) * 0.1,
            "b1": jnp.zeros(64),
            "w2": jax.random.normal(second, (64, 10)) * 0.1,
            "b2": jnp.zeros(10),
        }

    def apply(params: Any, xs: Any) -> Any:
        return jax.nn.relu(xs @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]

    def loss(outputs: Any, ys: Any) -> Any:
        return optax.softmax_cross_entropy_with_integer_labels(outputs, ys).mean()

    return (init, apply), loss, optax.adam(1e-3), batches


def by_hand(*, reads_loss: bool) -> tuple[Run, Callable[[], Any]]:
    """Return a jitted, donated loop as one writes it, and how to get its parameters."""
    (init, apply), loss, optimizer, batches = model_and_data()

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(lambda p: loss(apply(p, batch[0]), batch[1]))(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    compiled = jax.jit(step, donate_argnums=(0, 1))
    # The Learner initialises its model with this key of the run's, so both start alike.
    params = init(jax.random.fold_in(jax.random.key(0), 0), None)
    state = [params, jax.tree.map(jnp.copy, optimizer.init(params))]

    def run() -> None:
        params, opt_state = state
        for _ in range(STEPS // BATCHES):
            for batch in batches:
                params, opt_state, value = compiled(params, opt_state, batch)
                if reads_loss:
                    float(value)
        state[:] = [params, opt_state]
        jax.block_until_ready(params)

    return run, lambda: state[0]


def with_fluxcb(callbacks: list[Callback], **arguments: Any) -> tuple[Run, Callable[[], Any]]:
    """Return the same training by a Learner."""
    model, loss, optimizer, batches = model_and_data()
    learner = Learner(model, loss, optimizer, data=batches, callbacks=callbacks, **arguments)

    def run() -> None:
        learner.fit(STEPS // BATCHES)
        jax.block_until_ready(learner.params)

    return run, lambda: learner.params


def silent_defaults() -> list[Callback]:
    """Return the default callbacks, writing to memory rather than to the terminal."""
    sink = io.StringIO()
    return [Metrics(), Recorder(), ProgressBar(file=sink), MetricsPrinter(file=sink), StopOnNaNLoss()]


def measure(rounds: int) -> dict[str, list[float]]:
    """Return microseconds per step of every variant, one figure per round, taken in turns."""
    variants = {
        "by hand, loss never read": by_hand(reads_loss=False),
        "by hand, float(loss) each step": by_hand(reads_loss=True),
        "no callbacks": with_fluxcb([], default_callbacks=False),
        "1 no-op host handler": with_fluxcb([NoOp()], default_callbacks=False),
        "51 no-op host handlers": with_fluxcb([NoOp() for _ in range(51)], default_callbacks=False),
        "default callbacks": with_fluxcb(silent_defaults()),
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    for run, _ in variants.values():
        run()  # compile
    for _ in range(rounds):
        for name, (run, _) in variants.items():
            began = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - began) / STEPS * 1e6)
    _check_same_work({name: params() for name, (_, params) in variants.items()})
    return times


def _check_same_work(results: dict[str, Any]) -> None:
    reference = results["by hand, loss never read"]
    for name, params in results.items():
        for key, value in reference.items():
            if not np.allclose(params[key], value, atol=5e-3):
                raise SystemExit(f"{name} trained something else: {key} differs")


def construction() -> dict[int, float]:
    """Return seconds to check a set of n callbacks that each read what the one before writes."""

    class Link(Callback):
        def __init__(self, number: int) -> None:
            self.number = number

        def stateaccess(self) -> Any:
            access: dict[str, Any] = {f"x{self.number}": Write()}
            if self.number:
                access[f"x{self.number - 1}"] = Read()
            return {"cbstate": access, "step": {"loss": Read()}}

        @on
        def look(self, event: StepEnd, phase: TrainingPhase | ValidationPhase, learner: Any) -> None:
            """Do nothing."""

        def __repr__(self) -> str:
            return f"Link({self.number})"

    seconds = {}
    for count in (10, 200, 1000):
        callbacks = [Link(number) for number in range(count)]
        began = time.perf_counter()
        fluxcb.check(callbacks, default_callbacks=False)
        seconds[count] = time.perf_counter() - began
    return seconds


def import_seconds() -> float:
    """Return the least of five times to `import fluxcb` in a fresh interpreter, above an empty one's."""
    code = "import time; t = time.perf_counter(); import fluxcb; print(time.perf_counter() - t)"
    runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True) for _ in range(5)]
    return min(float(run.stdout) for run in runs)


def main() -> None:
    """Run everything and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", help="also write the figures to this file")
    arguments = parser.parse_args()
    console = Console(width=110)
    console.print(
        f"fluxcb {fluxcb.__version__}, jax {jax.__version__}, optax {optax.__version__}, "
        f"Python {platform.python_version()}, {jax.devices()[0].platform}"
    )
    times = measure(arguments.rounds)
    floor = times["by hand, loss never read"]
    table = Table("64-64-10 MLP, batch 32, Adam, float32", "us/step, median", "ratio to by hand: q1", "median", "q3")
    figures: dict[str, Any] = {}
    for name, values in times.items():
        ratios = [value / base for value, base in zip(values, floor, strict=True)]
        q1, median, q3 = statistics.quantiles(ratios, n=4)
        figures[name] = {"us": statistics.median(values), "ratio": median, "q1": q1, "q3": q3}
        table.add_row(name, f"{statistics.median(values):.1f}", f"{q1:.3f}", f"{median:.3f}", f"{q3:.3f}")
    console.print(table)
    slope = statistics.median(
        (many - one) / 50
        for many, one in zip(times["51 no-op host handlers"], times["1 no-op host handler"], strict=True)
    )
    console.print(f"one more no-op host handler at StepEnd: {slope:.3f} us per step")
    for count, seconds in construction().items():
        console.print(f"checking {count} callbacks: {seconds * 1e3:.1f} ms")
        figures[f"check {count} callbacks (s)"] = seconds
    figures["import (s)"] = import_seconds()
    console.print(f"import fluxcb: {figures['import (s)'] * 1e3:.1f} ms")
    figures["no-op handler (us)"] = slope
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(figures, file, indent=2)


if __name__ == "__main__":
    main()
