"""CheckReplicas: which copies of the training state differ, and what the error says."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fluxcb import Callback, Write, every
from fluxcb.callbacks import CheckReplicas
from fluxcb.callbacks.inspect.check_replicas import _checksums, _drifts
from fluxcb.testing import testlearner

# Four devices on one machine. The program replaces copies on single devices, as a faulty device would.
PROGRAM = """
import json, jax, jax.numpy as jnp, numpy as np, fluxcb, optax
from fluxcb.callbacks import CheckReplicas, ToDevice
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)

def learner(spec):
    params = {"w": jnp.arange(8.0), "k": jnp.zeros(8, jnp.bfloat16)}
    sharding = NamedSharding(mesh, spec)
    return fluxcb.Learner.from_loss(
        jax.device_put(params, sharding),
        lambda params, batch: jnp.sum((params["w"] - batch.mean()) ** 2) + jnp.sum(params["k"]).astype(jnp.float32),
        optax.sgd(0.1, momentum=0.9),
        data=[np.ones(8, np.float32)] * 3,
        callbacks=[ToDevice(sharding, batches=NamedSharding(mesh, P())), CheckReplicas()],
        default_callbacks=False,
    )

def drifted(array, changes):
    shards = [np.array(shard.data) for shard in array.addressable_shards]
    for device, by in changes.items():
        shards[device][1] += by
    placed = [jax.device_put(x, s.device) for x, s in zip(shards, array.addressable_shards)]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, placed)

def tell(spec, **changes):
    trained = learner(spec)
    trained.fit(2)
    trained.params = {**trained.params, **{name: drifted(trained.params[name], c) for name, c in changes.items()}}
    try:
        trained.fit(1)
    except fluxcb.FluxcbError as error:
        return str(error)

print(json.dumps([
    tell(P(), w={3: 0.25}),
    tell(P(), w={1: 0.25, 2: -0.5}, k={0: 1.0}),
    tell(P("a"), w={3: 0.25}),
    tell(P("a")),
    tell(P(("a", "b")), w={3: 0.25}),  # no two devices have the same shard
]))
"""


@pytest.mark.long
def test_drift_between_devices_raises():
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    ran = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    one, several, shard, *equal = json.loads(ran.stdout)
    why_and_fix = (
        "  why:   replicas are updated in the same way, so those that differ once stay different, and the results are "
        "wrong\n"
        "  fix:   give all processes the same parameters, assignments and key when the fit begins\n"
        "     or: if the replicas were equal when the fit began, resume from the last checkpoint, and test the devices"
    )
    assert one == (
        "The replicas of `params.w` differ between devices.\n"
        "  where: `params.w` has 2 different values: device 0, 1, 2 | device 3\n"
        "         the largest difference between two of them is 0.25\n" + why_and_fix
    )
    assert several == (
        "The replicas of `params.k` and `params.w` differ between devices.\n"
        "  where: `params.k` has 2 different values: device 0 | device 1, 2, 3\n"
        "         the largest difference between two of them is 1\n" + why_and_fix
    )
    assert shard == (
        "The replicas of `params.w` differ between devices.\n"
        "  where: `params.w` has 2 different values: device 2 | device 3\n"
        "         the largest difference between two of them is 0.25\n" + why_and_fix
    )
    assert equal == [None, None]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32", "uint8", "int4", "bool", "complex64"])
def test_any_changed_element_changes_checksum(dtype):
    array = jnp.arange(4).astype(dtype)
    other = [array.at[i].set(array[(i + 1) % 4]) for i in range(4) if (array[i] != array[(i + 1) % 4]).all()]
    rows = np.stack([_checksums([x]) for x in (array, array.copy(), *other)])
    assert other
    assert not list(_drifts(rows[:2]))
    for row in rows[2:]:
        (drift,) = _drifts(np.stack([rows[0], row]))
        assert [[replica.process for replica in group] for group in drift.groups] == [[0], [1]]


def test_order_of_elements_and_sign_of_zero_count():
    rows = [_checksums([jnp.array(x)]) for x in ([0.0, 1.0], [1.0, 0.0], [-0.0, 1.0])]
    assert len(list(_drifts(np.stack(rows[:2])))) == len(list(_drifts(np.stack(rows[::2])))) == 1


def test_one_device_has_equal_replicas():
    with_check, without = testlearner(every(CheckReplicas(), steps=2)), testlearner()
    with_check.fit(2)
    without.fit(2)
    assert {k: float(v) for k, v in with_check.params.items()} == {k: float(v) for k, v in without.params.items()}


def test_objects_on_host_are_not_compared():
    class Keeps(Callback):
        def stateaccess(self):
            return {"cbstate": {"keys": Write(), "object": Write()}}

        def init(self, learner):
            learner.cbstate.keys = {"a": jax.random.key(0)}
            learner.cbstate.object = object()

    learner = testlearner(Keeps(), CheckReplicas())
    learner.fit(1)
    assert learner.epoch == 1
