"""Batches on eight devices: windows of every length compute the same bits."""

import json
import os
import subprocess
import sys

import pytest

SCRIPT = """
import hashlib, json, sys
import jax, jax.numpy as jnp, numpy as np, optax
import fluxcb
from fluxcb import Callback, Read, on
from fluxcb._run import program_runner
from fluxcb.callbacks import Metrics, Recorder, ToDevice
from fluxcb.data import ArrayLoader, place
from fluxcb.events import StepEnd
from fluxcb.phases import TrainingPhase

program_runner.WINDOW_SECONDS = 1e9
mesh = jax.sharding.Mesh(jax.devices(), ("data",))
split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

class Keeps(Callback):
    def __init__(self):
        self.seen = []

    def stateaccess(self):
        return {"step": {"loss": Read(), "grads": Read(), "outputs": Read(), "batch": Read()}, "params": Read()}

    @on
    def keep(self, event: StepEnd, phase: TrainingPhase, learner):
        step = learner.step
        leaves = jax.tree.leaves([step.loss, step.grads, step.outputs, step.batch, learner.params])
        self.seen.append([learner.progress.step, *(np.asarray(leaf).tobytes().hex() for leaf in leaves)])

def init(key, xs):
    one, two = jax.random.split(key)
    return {"in": jax.random.normal(one, (3, 8)), "out": jax.random.normal(two, (8, 1))}

rng = np.random.default_rng(0)
arrays = rng.normal(size=(32 * 13, 3)).astype(np.float32), rng.normal(size=(32 * 13, 1)).astype(np.float32)

def train(length, place_by):
    keeps, loader = Keeps(), ArrayLoader(arrays, 32)
    data = place(loader, split) if place_by == "place" else loader
    learner = fluxcb.Learner(
        (init, lambda params, xs: jnp.tanh(xs @ params["in"]) @ params["out"]),
        lambda outputs, ys: jnp.mean((outputs - ys) ** 2),
        optax.adam(0.01),
        data=(data, None),
        callbacks=[ToDevice(whole, batches=split), keeps, Metrics(), Recorder()],
        default_callbacks=False,
        steps_per_call=length,
    )
    learner.fit(2)
    learner.fit(steps=5)
    state = learner.state
    devices = {len(leaf.devices()) for leaf in jax.tree.leaves(state["params"])}
    history = learner.cbstate["metrics_step"]["training"]["loss"]
    state = [np.asarray(leaf).tobytes().hex() for leaf in jax.tree.leaves({**state, "key": 0})]
    steps = sorted({program.steps for program in learner._core.engine.programs.compiled})
    told = json.dumps([keeps.seen, history, state])
    return {"told": hashlib.sha256(told.encode()).hexdigest(), "steps": steps, "devices": sorted(devices),
            "seen": len(keeps.seen), "last": history[-1], "first": history[0]}

print(json.dumps({str(n): train(n, sys.argv[1]) for n in (1, 2, 7, 50)}))
"""


@pytest.mark.parametrize("placed_by", ["place", "ToDevice"])
def test_sharded_batches(placed_by):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT, placed_by],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert {key: value["steps"] for key, value in found.items()} == {"1": [1], "2": [1, 2], "7": [1, 7], "50": [1, 50]}
    assert {value["told"] for value in found.values()} == {found["1"]["told"]}
    assert all(value["devices"] == [8] and value["seen"] == 31 for value in found.values())
    assert found["1"]["last"] < found["1"]["first"]
