"""Metrics over data of two processes include all examples."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import faulthandler, json, sys
faulthandler.dump_traceback_later(200, exit=True)  # a process that waits for the other in vain says where
import jax
number, port = int(sys.argv[1]), sys.argv[2]
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=number)
import jax.numpy as jnp, numpy as np, optax
import fluxcb
from fluxcb.callbacks import AUROC, Metric, Metrics, PerClassAccuracy, ToDevice

mesh = jax.sharding.Mesh(jax.devices(), ("data",))
split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
stored = np.load("data.npz")
batches = [tuple(stored[f"{name}{i}"] for name in ("xs", "ys", "mask")) for i in range(int(stored["count"]))]

def metrics():
    def error(outputs, ys):
        return jnp.abs(outputs[:, 1] - ys)

    def mask(batch):
        return batch[2]

    def scores(outputs, ys):
        return outputs[:, 1], ys == 1

    return [
        AUROC(scores),
        AUROC(scores, name="masked_auroc", weight=mask),
        PerClassAccuracy(3),
        Metric(error, name="error", weight=mask),
    ]

learner = fluxcb.Learner(
    (lambda key, xs: {"w": jnp.ones(())}, lambda params, xs: params["w"] * xs),
    lambda outputs, ys: jnp.mean(outputs),
    optax.sgd(0.0),
    data=(batches, batches),
    inputs=lambda batch: batch[0],
    targets=lambda batch: batch[1],
    callbacks=[ToDevice(whole, batches=split), Metrics(*metrics())],
    default_callbacks=False,
    steps_per_call=int(sys.argv[3]),
)
learner.fit(2)
validation = learner.cbstate["metrics_epoch"]["validation"]
names = ("auroc", "masked_auroc", "per_class_accuracy", "error")
fitted = {name: np.asarray(validation.last(name)).tolist() for name in names}
evaluated = {name: np.asarray(value).tolist() for name, value in learner.evaluate(batches, metrics=metrics()).items()}
with open(f"told{number}.json", "w") as file:
    json.dump({"fitted": fitted, "evaluated": evaluated}, file)
"""


def drawn(sizes):
    rng = np.random.default_rng(0)
    return [
        (
            (rng.integers(-6, 7, (size, 3)) / 4).astype(np.float32),  # with equal scores
            rng.integers(0, 3, size).astype(np.int32),
            rng.integers(0, 2, size).astype(np.float32),
        )
        for size in sizes
    ]


def auroc(scores, positive):
    """Return the fraction of pairs of a positive and a negative example whose positive example has the higher score."""
    above = np.sign(scores[positive][:, None] - scores[~positive][None, :])
    return float(np.mean((above + 1) / 2))


def expected(batches):
    xs, ys, mask = (np.concatenate(parts).astype(np.float64) for parts in zip(*batches, strict=True))
    counted = mask > 0
    return {
        "auroc": auroc(xs[:, 1], ys == 1),
        "masked_auroc": auroc(xs[counted, 1], ys[counted] == 1),
        "per_class_accuracy": [float(np.mean(xs[ys == c].argmax(axis=1) == c)) for c in range(3)],
        "error": float(np.mean(np.abs(xs[:, 1] - ys)[counted])),
    }


# The scores of 200 examples are fetched by themselves, those of 8 together with other values.
@pytest.mark.parametrize(("steps_per_call", "sizes"), [(1, (8, 8, 8, 6)), (2, (200, 200, 200, 72))])
def test_metrics_of_two_processes_include_all_examples(steps_per_call, sizes, tmp_path):
    batches = drawn(sizes)
    arrays = {
        f"{name}{i}": part
        for i, batch in enumerate(batches)
        for name, part in zip(("xs", "ys", "mask"), batch, strict=True)
    }
    np.savez(tmp_path / "data.npz", count=len(batches), **arrays)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = str(sock.getsockname()[1])
    running = [
        subprocess.Popen(
            [sys.executable, "-W", "error", "-c", PROGRAM, str(number), port, str(steps_per_call)],
            env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for number in (0, 1)
    ]  # fmt: skip
    try:
        output = [process.communicate(timeout=250) for process in running]
    finally:
        for process in running:
            process.kill()
    for process, (_, stderr) in zip(running, output, strict=True):
        assert process.returncode == 0, stderr[-3000:]
    for number in (0, 1):
        told = json.loads((tmp_path / f"told{number}.json").read_text())
        for values in told.values():
            for name, value in expected(batches).items():
                np.testing.assert_allclose(values[name], value, rtol=1e-6, err_msg=name)
