"""Two processes on one machine save and resume together."""

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import faulthandler, sys
faulthandler.dump_traceback_later(200, exit=True)  # a process that waits for the other in vain says where
import jax
number, port, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=number)
import jax.numpy as jnp, numpy as np, optax
from fluxcb import Learner
from fluxcb.callbacks import Checkpointer, ToDevice

mesh = jax.sharding.Mesh(jax.devices(), ("data",))
whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
for epochs in (1, 2, 2):
    learner = Learner.from_loss(
        {"w": jnp.zeros(())},
        lambda params, batch, key: -params["w"] + 0 * jnp.sum(batch),
        optax.sgd(1.0),
        data=[np.zeros(2, np.float32)] * 3,
        callbacks=[ToDevice(whole), Checkpointer(folder)],
        default_callbacks=False,
    )
    learner.fit(epochs, resume=True)
    print(learner.step, float(learner.params["w"].addressable_data(0)), flush=True)
"""


def test_two_processes_resume_and_finished_run_saves_nothing(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    program = [sys.executable, "-c", PROGRAM]
    processes = [
        subprocess.Popen(
            [*program, number, port, str(tmp_path)],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in "01"
    ]
    try:
        told = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (out, err) in zip(processes, told, strict=True):
        assert process.returncode == 0, err
        assert [line for line in out.splitlines() if line[0].isdigit()] == ["3 3.0", "6 6.0", "6 6.0"]
    assert sorted(name for name in os.listdir(tmp_path) if name[0].isdigit()) == ["0", "3", "6"]
