"""ToDevice, in a process that has two CPU devices."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fluxcb import DeclarationError
from fluxcb.callbacks import ToDevice

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
import sys
import warnings

warnings.simplefilter("error")
import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import fluxcb
from fluxcb.callbacks import Metrics, ParameterEMA, StopOnNaNLoss, ToDevice, accuracy

rng = np.random.default_rng(0)
batches = [(rng.normal(size=(8, 4)).astype(np.float32), rng.integers(0, 3, 8).astype(np.int32)) for _ in range(10)]


def loss_fn(outputs, ys):
    return optax.softmax_cross_entropy_with_integer_labels(outputs, ys).mean()


def build(callbacks):
    return fluxcb.Learner(
        (lambda key, xs: {"w": jax.random.normal(key, (4, 3))}, lambda params, xs: xs @ params["w"]),
        loss_fn,
        fluxcb.inject(optax.adam, learning_rate=0.01),
        data=(batches, batches[:3]),
        callbacks=[*callbacks, Metrics(accuracy), ParameterEMA(0.9), StopOnNaNLoss()],
        default_callbacks=False,
    )


def where(learner):
    leaves = jax.tree.leaves({k: v for k, v in learner._state.train.carry.items()})
    return {tuple(sorted(d.id for d in leaf.devices())) for leaf in leaves}


def state_of(learner):
    return [np.asarray(x) for x in jax.tree.leaves({k: v for k, v in learner.state.items() if k != "key"})]


def same(a, b, close=False):
    compare = (lambda x, y: np.allclose(x, y, rtol=1e-5, atol=1e-5)) if close else np.array_equal
    return all(compare(x, y) for x, y in zip(state_of(a), state_of(b), strict=True))


reference = build([])
reference.fit(3)
first, second = jax.devices()
moved = build([ToDevice(second)])
batch_devices = {x.devices().pop().id for batch in moved._core.streams["validation"].source for x in batch}
moved.fit(3)
assert (where(moved), batch_devices) == ({(1,)}, {1}), (where(moved), batch_devices)
assert same(moved, reference)
assert moved.compile_counts == reference.compile_counts

mesh = Mesh(np.array(jax.devices()), ("batch",))
spread = build([ToDevice(NamedSharding(mesh, PartitionSpec()), batches=NamedSharding(mesh, PartitionSpec("batch")))])
spread.fit(3)
assert where(spread) == {(0, 1)}, where(spread)
assert same(spread, reference, close=True)

later = build([])
later.fit(1)
later.callbacks.add(ToDevice(second))
later.fit(2)
assert where(later) == {(1,)}, where(later)
assert same(later, reference)
later.callbacks.set(list(later.callbacks))  # `init` runs again
later.fit(1)
assert where(later) == {(1,)}
print("done")
"""


def test_the_whole_state_and_the_batches_move(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    run = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert (run.returncode, run.stdout) == (0, "done\n"), run.stderr


def test_a_placement_must_be_one(build):
    with pytest.raises(DeclarationError, match="`placement` must be a device or a sharding, not of type `str`"):
        build([ToDevice("gpu")])
