"""Callbacks that change the step, with and without batches on eight devices: windows do not change a bit."""

import json
import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.long

SCRIPT = """
import hashlib, json, sys
import jax, jax.numpy as jnp, numpy as np, optax
import fluxcb
from fluxcb._run import program_runner
from fluxcb.callbacks import (
    AccumulateGradients, CheckNumerics, ClipGradients, CutMix, DynamicLossScale, GradientNoise, LabelSmoothing,
    LossSpikeGuard, MixUp, SkipNonFinite, StochasticWeightAveraging, ToDevice,
)

program_runner.WINDOW_SECONDS = 1e9
mesh = jax.sharding.Mesh(jax.devices(), ("data",))
split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
rng = np.random.default_rng(0)
batches = [(rng.normal(size=(16, 4, 4, 1)).astype(np.float32), rng.integers(0, 3, 16)) for _ in range(23)]
batches[5][0][3] = np.nan

SETS = {
    "mixup": lambda: [MixUp(0.4), LabelSmoothing(0.1), AccumulateGradients(3), ClipGradients(0.5), GradientNoise(0.01)],
    "cutmix": lambda: [CutMix(), CheckNumerics(), StochasticWeightAveraging(4, every=2)],
    "scale": lambda: [DynamicLossScale(4.0, period=3), LossSpikeGuard(1.0, window=5), AccumulateGradients(2)],
}

def init(key, xs):
    one, two = jax.random.split(key)
    return {"in": jax.random.normal(one, (16, 8)), "out": jax.random.normal(two, (8, 3))}

def loss_fn(outputs, ys):
    return optax.softmax_cross_entropy_with_integer_labels(outputs, ys).mean()

def train(length, devices):
    place = [ToDevice(whole, batches=split)] if devices > 1 else []
    learner = fluxcb.Learner(
        (init, lambda params, xs: jnp.tanh(xs.reshape(len(xs), -1) @ params["in"]) @ params["out"]),
        loss_fn, optax.adam(0.01), data=batches, callbacks=[*SETS[sys.argv[1]](), SkipNonFinite(), *place],
        default_callbacks=False, steps_per_call=length,
    )
    learner.fit(2)
    state = {**learner.state, "key": 0}
    used = {len(leaf.devices()) for leaf in jax.tree.leaves(state["params"])}
    bits = json.dumps([np.asarray(leaf).tobytes().hex() for leaf in jax.tree.leaves(state)])
    counts = jax.tree.map(int, learner.cbstate["non_finite"])
    finite = all(bool(np.isfinite(leaf).all()) for leaf in jax.tree.leaves(learner.params))
    params = [float(np.abs(leaf).sum()) for leaf in jax.tree.leaves(learner.params)]
    return {"bits": hashlib.sha256(bits.encode()).hexdigest(), "used": sorted(used), "counts": counts,
            "finite": finite, "params": params}

lengths = (1, 7, "auto")
print(json.dumps({str(devices): [train(length, devices) for length in lengths] for devices in (1, 8)}))
"""


@pytest.mark.parametrize("callbacks", ["mixup", "cutmix", "scale"])
def test_training_techniques_with_windows_and_devices(callbacks):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", SCRIPT, callbacks],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    for devices, runs in found.items():
        assert len({run["bits"] for run in runs}) == 1
        assert all(run["used"] == [int(devices)] for run in runs)
        assert all(run["counts"] == {"skipped": 2, "in_a_row": 0} and run["finite"] for run in runs)
    # Another order of summation, but the same training.
    assert found["8"][0]["params"] == pytest.approx(found["1"][0]["params"], rel=1e-3)
