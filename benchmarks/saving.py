"""The host memory that checkpoints of two processes need, relative to the state that each process holds.

    uv run python benchmarks/saving.py [--size 768] [--saves 3] [--rounds 3]

Two processes train with a state of random numbers, which cannot be compressed: the parameters and the two moments of
Adam, divided over the processes. The same training runs with and without a `Checkpointer`. Prints the difference of the
peak memory of a process, from the second step until the end of the fit, divided by the state that the process holds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.run_processes import run_processes

PROGRAM = """
import json, sys
number, count, port, folder = *map(int, sys.argv[1:4]), sys.argv[4]
mebibytes, layers, saves, checkpoints = map(int, sys.argv[5:])
import jax
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=count, process_id=number)
import jax.numpy as jnp, numpy as np, optax
import orbax.checkpoint  # importing it takes memory as well
import fluxcb
from fluxcb.callbacks import Checkpointer, CustomCallback
from fluxcb.events import StepBegin

WIDTH, STEPS = 1024, 3
rows = mebibytes * 2**20 // (3 * 4 * layers * WIDTH)

def init(key, xs):
    return {f"layer{i}": jax.random.normal(jax.random.fold_in(key, i), (rows, WIDTH)) for i in range(layers)}

def apply(params, xs):
    return [jnp.sin(layer * (1 + xs[0, 0])) for layer in params.values()]

def loss_fn(outputs, ys):
    return sum(jnp.mean(output ** 2) for output in outputs)

def memory(name):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name + ":")) / 1024

def begin(learner):
    if learner.progress.step == 1:  # all programs have been compiled
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")  # forget the peak so far

learner = fluxcb.Learner(
    (init, apply), loss_fn, optax.adam(1e-3),
    data=[(np.ones((1, 1), np.float32), np.ones((1, 1), np.float32))] * STEPS,
    callbacks=[CustomCallback(begin, StepBegin), *([Checkpointer(folder)] if checkpoints else [])],
    default_callbacks=False, mesh=fluxcb.mesh(), sharding=fluxcb.Sharding(params=fluxcb.fsdp(min_bytes=0)),
    steps_per_call=1,
)
learner.fit(saves)
state = jax.tree.leaves([learner.borrow("params"), learner.borrow("opt_state")])
local = sum(shard.data.nbytes for leaf in state for shard in leaf.addressable_shards) / 2**20
print(json.dumps({"local": local, "peak": memory("VmHWM")}), flush=True)
"""


def measure(size: int, layers: int, saves: int, *, checkpoints: bool) -> list[dict[str, Any]]:
    """Return the memory of each process (MiB)."""
    with tempfile.TemporaryDirectory() as folder:
        ended = run_processes(PROGRAM, 2, Path(folder) / "run", size, layers, saves, int(checkpoints))
    for process in ended:
        if process.code != 0:
            raise SystemExit(process.stderr)
    return [json.loads(process.stdout.splitlines()[-1]) for process in ended]


def main() -> None:
    """Measure, and print the figures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--size", type=int, default=768, help="size of the state of all processes (MiB)")
    parser.add_argument("--layers", type=int, default=12, help="number of arrays that the parameters consist of (12)")
    parser.add_argument("--saves", type=int, default=3, help="epochs, each of which ends with a save")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    ratios = []
    for _ in range(arguments.rounds):
        without = measure(arguments.size, arguments.layers, arguments.saves, checkpoints=False)
        with_them = measure(arguments.size, arguments.layers, arguments.saves, checkpoints=True)
        for number, (before, after) in enumerate(zip(without, with_them, strict=True)):
            ratios.append((after["peak"] - before["peak"]) / after["local"])
            print(
                f"process {number}: {after['local']:.0f} MiB of state; peak {before['peak']:.0f} MiB without "
                f"checkpoints, {after['peak']:.0f} MiB with them: {ratios[-1]:.2f} x the state",
                flush=True,
            )
    print(f"median {statistics.median(ratios):.2f} x, between {min(ratios):.2f} and {max(ratios):.2f} x")


if __name__ == "__main__":
    main()
