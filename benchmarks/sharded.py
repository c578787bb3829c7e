"""What a step costs on eight simulated devices, beside a loop written by hand with the same shardings.

    uv run python benchmarks/sharded.py [dp fsdp tp] [--rounds 7] [--steps 60]

Prints, for data parallel, fully sharded, and tensor parallel training, the time per step of a Learner without callbacks
and with the default callbacks, as ratios to the loop by hand of the same run. The last row compiles the step without
the loop that windows need (`program="straight"`). The rounds take turns, and the ratio is the median over the rounds.
"""

from __future__ import annotations

import argparse
import io
import os
import statistics
import time
from collections.abc import Callable
from typing import Any, Literal

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

import fluxcb
from fluxcb.callbacks import FitSummary, MetricsPrinter, ProgressBar

P = PartitionSpec
WIDTH, HIDDEN, BATCH = 256, 1024, 64
TX = optax.adam(1e-3)
SPECS = {
    "dp": {"up": P(), "down": P()},
    "fsdp": {"up": P(None, "data"), "down": P("data")},
    "tp": {"up": P(None, "model"), "down": P("model")},
}
NAMES = {"dp": "data parallel", "fsdp": "fully sharded (FSDP)", "tp": "tensor parallel"}


def init(key: Any, xs: Any) -> Any:
    up, down = jax.random.split(key)
    return {
        "up": jax.random.normal(up, (WIDTH, HIDDEN)) * 0.05,
        "down": jax.random.normal(down, (HIDDEN, WIDTH)) * 0.05,
    }


def apply(params: Any, xs: Any) -> Any:
    return jnp.tanh(xs @ params["up"]) @ params["down"]


def loss_fn(outputs: Any, ys: Any) -> Any:
    return jnp.mean((outputs - ys) ** 2)


def batches(steps: int) -> list[Any]:
    rng = np.random.default_rng(0)
    shape = BATCH, WIDTH
    return [(rng.normal(size=shape).astype(np.float32), rng.normal(size=shape).astype(np.float32))] * steps


def by_hand(kind: str, data: list[Any]) -> Callable[[], None]:
    """Return a function that runs one epoch of the loop by hand."""
    mesh = mesh_of(kind)
    at = jax.tree.map(lambda spec: NamedSharding(mesh, spec), SPECS[kind])
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    opt_at: Any = (optax.ScaleByAdamState(*[whole, at, at]), optax.EmptyState())
    params = jax.jit(lambda key: init(key, None), out_shardings=at)(jax.random.key(0))
    opt_state = jax.jit(TX.init, out_shardings=opt_at)(params)

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: loss_fn(apply(p, batch[0]), batch[1]))(params)
        updates, opt_state = TX.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    run = jax.jit(step, donate_argnums=(0, 1), out_shardings=(at, opt_at, whole))
    state = [params, opt_state]

    def epoch() -> None:
        for number, batch in enumerate(data, 1):
            *state[:], loss = run(*state, jax.device_put(batch, split))
            if number % 8 == 0:  # with more collectives under way, XLA's CPU backend aborts
                loss.block_until_ready()
        jax.block_until_ready(state)

    return epoch


def mesh_of(kind: str) -> Any:
    return fluxcb.mesh(data=-1, model=2 if kind == "tp" else 1)


def by_fluxcb(
    kind: str, data: list[Any], *, default_callbacks: bool, program: Literal["straight"] | None = None
) -> Callable[[], None]:
    """Return a function that runs one epoch of a Learner."""
    silent = [kind(io.StringIO()) for kind in (ProgressBar, MetricsPrinter, FitSummary)] if default_callbacks else []
    learner = fluxcb.Learner(
        (init, apply), loss_fn, TX, data=data, callbacks=silent, default_callbacks=default_callbacks,
        mesh=mesh_of(kind), sharding=fluxcb.Sharding(params=SPECS[kind]), program=program,
    )  # fmt: skip

    def epoch() -> None:
        learner.fit(1)
        jax.block_until_ready(learner.borrow("params"))

    return epoch


def measure(kind: str, rounds: int, steps: int) -> None:
    data = batches(steps)
    epochs = {
        "by hand": by_hand(kind, data),
        "no callbacks": by_fluxcb(kind, data, default_callbacks=False),
        "default callbacks": by_fluxcb(kind, data, default_callbacks=True),
        "default callbacks, straight": by_fluxcb(kind, data, default_callbacks=True, program="straight"),
    }
    for _ in range(2):  # compile; the second epoch may compile a program for windows
        for epoch in epochs.values():
            epoch()
    clocks = {"time": time.perf_counter, "CPU time": time.process_time}
    times: dict[str, dict[str, list[float]]] = {clock: {name: [] for name in epochs} for clock in clocks}
    for turn in range(rounds):
        for name, epoch in epochs.items() if turn % 2 else reversed(epochs.items()):
            began = {clock: read() for clock, read in clocks.items()}
            epoch()
            for clock, read in clocks.items():
                times[clock][name].append((read() - began[clock]) / steps)
    hand = {clock: statistics.median(found["by hand"]) * 1e3 for clock, found in times.items()}
    print(f"{NAMES[kind]}: by hand {hand['time']:.2f} ms per step, CPU time {hand['CPU time']:.2f} ms")
    for name in list(epochs)[1:]:
        ratios = [
            statistics.median(ours / theirs for ours, theirs in zip(found[name], found["by hand"], strict=True))
            for found in times.values()
        ]
        print(f"  {name:<27} {ratios[0]:.3f} x, CPU time {ratios[1]:.3f} x")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("kinds", nargs="*", default=list(NAMES))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=60)
    arguments = parser.parse_args()
    for kind in arguments.kinds:
        measure(kind, arguments.rounds, arguments.steps)
