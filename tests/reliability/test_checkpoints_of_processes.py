"""Checkpoints of several processes: who reads and hashes what, and resuming with fewer processes."""

import json
import os
import re
import signal

import numpy as np
import orbax.checkpoint as ocp
import pytest
from etils import epath

from fluxcb.checkpoints.reading import _size_of_reads, resolve_checkpoint
from tests.run_processes import run_processes


class Divided:
    """Stands in for a sharding: the indices of the shards of this process, by device."""

    def __init__(self, *indices):
        self.indices = dict(enumerate(indices))

    def addressable_devices_indices_map(self, shape):
        return self.indices


@pytest.mark.parametrize("chunks", [(8, 6), (4, 6), (3, 5), (1, 6), (8, 1)])
@pytest.mark.parametrize(
    "indices",
    [
        [np.s_[0:4, :], np.s_[4:8, :]],
        [np.s_[:, :], np.s_[:, :]],  # a replicated array is read once
        [np.s_[2:4, 0:3], np.s_[2:4, 3:6]],
    ],
)
def test_size_of_reads_counts_whole_chunks_of_each_shard(chunks, indices):
    shape = (8, 6)
    expected = 0
    for index in {str(index): index for index in indices}.values():
        needed, read = np.zeros(shape, bool), np.zeros(shape, bool)
        needed[index] = True
        for row in range(0, shape[0], chunks[0]):
            for column in range(0, shape[1], chunks[1]):
                chunk = np.s_[row : row + chunks[0], column : column + chunks[1]]
                read[chunk] |= needed[chunk].any()
        expected += read.sum()
    assert _size_of_reads(Divided(*indices), shape, chunks) == expected


PROGRAM = """
import faulthandler, json, os, sys, warnings
faulthandler.dump_traceback_later(200, exit=True)  # a process that waits for the others in vain says where
number, count, port, folder, resumes = *map(int, sys.argv[1:4]), sys.argv[4], sys.argv[5] == "1"
import jax
if count > 1:
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=count, process_id=number)
import jax.numpy as jnp, numpy as np, optax, tensorstore
from jax.experimental import multihost_utils
import fluxcb
from fluxcb._run.snapshots import Snapshots
from fluxcb.callbacks import Checkpointer
from fluxcb.checkpoints import manifest
from fluxcb.events import StepEnd
from fluxcb.phases import TrainingPhase

hashed, threads, copies = [], set(), []
sum_of_file, take = manifest._sum_of_file, Snapshots.take
def counted(path):
    import threading
    threads.add(threading.current_thread() is threading.main_thread())
    hashed.append(str(path.relative_to(folder)))
    return sum_of_file(path)
def taken(self, phase):
    copies.append(1)
    return take(self, phase)
manifest._sum_of_file, Snapshots.take = counted, taken

class Noise(fluxcb.Callback):
    '''Give every array random numbers, which cannot be compressed.'''
    def stateaccess(self):
        return {"params": fluxcb.Write(), "opt_state": fluxcb.Write()}

    @fluxcb.on
    def write(self, event: StepEnd, phase: TrainingPhase, learner):
        def noisy(leaf):
            if leaf.ndim < 2:
                return leaf
            numbers = np.random.default_rng(learner.progress.step).normal(size=leaf.shape).astype(np.float32)
            return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: numbers[index])
        learner.params = jax.tree.map(noisy, dict(learner.params))
        learner.opt_state = jax.tree.map(noisy, learner.opt_state)

def bytes_read():
    found = tensorstore.experimental_collect_matching_metrics("/tensorstore/kvstore/file/bytes_read")
    return sum(entry["value"] for metric in found for entry in metric["values"])

def digest(learner):
    import hashlib
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(learner._core.snapshots.trees()):
        leaf = leaf if leaf.is_fully_addressable else multihost_utils.process_allgather(leaf, tiled=True)
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()

learner = fluxcb.Learner.from_loss(
    {"w": np.zeros((512, 512), np.float32), "b": np.zeros((), np.float32)},
    lambda params, batch: jnp.mean((batch @ params["w"] + params["b"]) ** 2),
    optax.adam(1e-3),
    data=[np.ones((8 // count, 512), np.float32)] * 2,
    callbacks=[Noise(), Checkpointer(folder)],
    default_callbacks=False,
    mesh=fluxcb.mesh(),
    sharding=fluxcb.Sharding(params=fluxcb.fsdp(min_bytes=1)),
)
leaves = jax.tree.leaves({part: learner._core.snapshots.trees()[part] for part in ("params", "opt_state")})
told = {"local": sum(shard.data.nbytes for leaf in leaves for shard in leaf.addressable_shards)}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    if resumes:
        before = bytes_read()
        learner.restore(folder)
        told |= {"read": bytes_read() - before, "verified": hashed[:], "restored": digest(learner)}
told["warned"] = [str(w.message) for w in caught]
hashed.clear(); threads.clear()
learner.fit(learner.epoch + 1, resume=True)
told |= {"step": learner.step, "hashed": hashed, "copies": len(copies), "on main": sorted(threads)}
told["ended"] = digest(learner)
print(json.dumps(told), flush=True)
"""


def run(folder, count, *, resumes):
    """Run the program in several processes, and return what each of them tells."""
    ended = run_processes(PROGRAM, count, folder, int(resumes))
    assert [process.code for process in ended] == [0] * count, [process.stderr[-3000:] for process in ended]
    return [json.loads(process.stdout.splitlines()[-1]) for process in ended]


def files_of(folder, step):
    return json.loads((folder / str(step) / "fluxcb-manifest.json").read_text())["files"]


def writer(name):
    """Return the process that has written a file of a checkpoint. Process 0 writes the files that name none."""
    return int([*name.split("process_"), "0"][1][0])


@pytest.mark.long
def test_run_of_four_processes_resumes_in_two_and_in_one(tmp_path):
    folder = tmp_path / "run"
    before, mesh = None, None
    for step, count in ((2, 4), (4, 2), (6, 1)):
        told = run(folder, count, resumes=before is not None)
        assert [one["step"] for one in told] == [step] * count
        assert len({one["ended"] for one in told}) == 1
        # Each process has hashed the files that it wrote, in the background.
        for number, one in enumerate(told):
            names = [name.split("/", 1)[1] for name in one["hashed"] if name.startswith(f".saving-{step}/")]
            assert sorted(names) == sorted(name for name in files_of(folder, step) if number == writer(name))
            assert one["on main"] == [False]
            # The state is copied when the run begins and after the epoch, but not again when the fit stops there.
            assert one["copies"] == (2 if before is None else 1)
        mesh_now = f"data={count}, model=1 ({count} {'processes' if count > 1 else 'process'})"
        if before is not None:
            assert [one["restored"] for one in told] == [before] * count
            # All processes together have verified each file of the checkpoint once, and each has read its own shards.
            verified = sorted(name for one in told for name in one["verified"])
            assert verified == sorted(f"{step - 2}/{name}" for name in files_of(folder, step - 2))
            for one in told:
                assert one["read"] <= 1.1 * one["local"]
                (row,) = [line for line in one["warned"][0].splitlines() if line.startswith("  mesh ")]
                assert re.split("  +", row)[2:] == [mesh, mesh_now, "program"]
        before, mesh = told[0]["ended"], mesh_now


FAILING = """
import errno, faulthandler, json, os, signal, sys
faulthandler.dump_traceback_later(200, exit=True)
number, port, folder = int(sys.argv[1]), sys.argv[3], sys.argv[4]
import jax
jax.distributed.initialize(
    f"127.0.0.1:{port}", num_processes=2, process_id=number,
    heartbeat_timeout_seconds=1000, shutdown_timeout_seconds=1000,
)
import jax.numpy as jnp, numpy as np, optax
import fluxcb
from fluxcb.callbacks import Checkpointer
from fluxcb.checkpoints import saving

write_arrays = saving._write_arrays
def failing(path, trees):
    step = int(path.name.removeprefix(".saving-"))
    if number == 1 and step == 4:
        raise OSError(errno.EIO, "as ordered")
    if number == 1 and step == 8:
        os.kill(os.getpid(), signal.SIGKILL)
    write_arrays(path, trees)
saving._write_arrays = failing

learner = fluxcb.Learner.from_loss(
    {"w": np.zeros(4, np.float32)},
    lambda params, batch: jnp.mean((params["w"] - batch) ** 2),
    optax.sgd(0.1),
    data=[np.ones((2, 4), np.float32)] * 20,
    callbacks=[Checkpointer(folder, steps=2)],
    default_callbacks=False,
    mesh=fluxcb.mesh(),
    sharding=fluxcb.Sharding(params=fluxcb.fsdp(min_bytes=1)),
    peer_timeout=6.0,
)
try:
    learner.fit(steps=12)
except fluxcb.CheckpointError as error:
    print(json.dumps([learner.step, error.what]), flush=True)
learner.fit(steps=12)
"""


@pytest.mark.long
def test_failing_save_is_an_error_in_all_processes_and_killed_one_leaves_whole_checkpoint(tmp_path):
    folder = tmp_path / "run"
    ended = run_processes(FAILING, 2, folder)
    told = [[line for line in stdout.splitlines() if line.startswith("[6")] for _, stdout, _ in ended]
    message = f"Cannot write the checkpoint of step 4 to {folder}: "
    # The next save raises the error, at the same step in both processes.
    assert [json.loads(line) for (line,) in told] == [
        [6, f"{message}process 1 reports: {os.strerror(5)}."],
        [6, f"{message}{os.strerror(5)}."],
    ]
    assert [ended[0].code > 0, ended[1].code] == [True, -signal.SIGKILL], ended[0].stderr[-3000:]
    # A process that waits inside a JAX operation is ended by its watcher, which prints the same text.
    assert re.search("(PeerError: |fluxcb ends process 0:\n)Process 1 ", ended[0].stderr), ended[0].stderr[-3000:]
    # The checkpoint that was being written does not count, and the one before is whole.
    assert resolve_checkpoint(folder)[0] == folder / "2"


WIDE = """
import sys
number, port, folder = int(sys.argv[1]), sys.argv[3], sys.argv[4]
import jax
jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=number)
import jax.numpy as jnp, numpy as np, optax
from jax.sharding import PartitionSpec as P
import fluxcb
from fluxcb.callbacks import Checkpointer

fluxcb.Learner.from_loss(
    {name: np.ones((1024, 2048), np.float32) for name in ("rows", "columns", "whole")},
    lambda params, batch: sum(jnp.mean(w * jnp.mean(batch)) for w in params.values()),
    optax.sgd(0.1),
    data=[np.ones((2, 4), np.float32)],
    callbacks=[Checkpointer(folder)],
    default_callbacks=False,
    mesh=fluxcb.mesh(),
    sharding=fluxcb.Sharding(params={"rows": P("data"), "columns": P(None, "data")}),
).fit(1)
"""


@pytest.mark.long
def test_parts_that_are_columns_are_one_chunk_and_others_have_chunks_of_two_mebibytes(tmp_path):
    ended = run_processes(WIDE, 2, tmp_path / "run")
    assert [process.code for process in ended] == [0, 0], [process.stderr[-3000:] for process in ended]
    stored = ocp.PyTreeCheckpointHandler().metadata(epath.Path(resolve_checkpoint(tmp_path / "run")[0] / "params"))
    chunks = {name: leaf.storage.chunk_shape for name, leaf in stored.items()}
    # A chunk of 4 MiB for the half of an array, which is contiguous in the memory of its process.
    assert chunks["columns"] == (1024, 1024)
    # 2 MiB = 256 rows of 2,048 numbers.
    assert chunks["rows"] == (256, 2048)
    # Each process writes half of an array that both have, as one chunk of 4 MiB.
    assert chunks["whole"] == (512, 2048)
