"""Two processes are killed at a moment of a save: all listed checkpoints are whole, and the run resumes."""

import json
import os
import random
import signal

import numpy as np
import pytest

from fluxcb.checkpoints import load_params
from fluxcb.checkpoints.reading import resolve_checkpoint
from tests.run_processes import run_processes

pytestmark = pytest.mark.long

# JAX's own timeouts are far longer than the test waits. So whatever ends a process, it is not JAX.
PROGRAM = """
import faulthandler, json, os, pathlib, signal, sys, threading
faulthandler.dump_traceback_later(200, exit=True)
number, count, port, folder, victims, killer, event, name, at = *map(int, sys.argv[1:4]), *sys.argv[4:]
killer, at, waiting = int(killer), int(at), threading.Lock()
import jax
jax.distributed.initialize(
    f"127.0.0.1:{port}", num_processes=2, process_id=number,
    heartbeat_timeout_seconds=1000, shutdown_timeout_seconds=1000,
)
from jax._src import distributed
import jax.numpy as jnp, numpy as np, optax
import fluxcb
from fluxcb.callbacks import Checkpointer
from fluxcb.checkpoints import saving

SIZE = 1 << 18  # of `w`, so that writing it takes several operations of C++
client, seen = distributed.global_state.client, 0
client.key_value_set(f"pid/{number}", str(os.getpid()))
others = [int(client.blocking_key_value_get(f"pid/{1 - number}", 100_000))]

def operate(what, path):
    global seen
    # Process `killer` kills at the operation `at` of this kind, just before it happens.
    if number != killer or event not in (what, "any") or name not in path:
        return
    with waiting:
        seen += 1
        if seen == at:
            kill()

def kill():
    for process in others if victims == "all" else []:
        os.kill(process, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)

def watch_bytes():
    # Process `killer` kills when the files of the save have `at` bytes together: in C++, which has no audit events.
    saved = pathlib.Path(folder, name)
    while True:
        size = 0
        for base, _, names in os.walk(saved):
            for file in names:
                try:
                    size += os.path.getsize(os.path.join(base, file))
                except FileNotFoundError:  # it was renamed
                    pass
        if size >= at:
            kill()

def heard(what, args):
    if what == "open" and isinstance(args[0], str) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
        operate(what, args[0])
    elif what in ("os.rename", "os.mkdir", "os.remove", "os.rmdir"):
        # In a folder that is deleted, names are relative to the folder, whose handle comes last.
        inside = args[-1] if isinstance(args[-1], int) and args[-1] > 2 and what in ("os.remove", "os.rmdir") else None
        folder = os.readlink(f"/proc/self/fd/{inside}") if inside is not None else ""
        operate(what, os.path.join(folder, str(args[1 if what == "os.rename" else 0])))

def synced(handle, fsync=os.fsync):  # not an audited event
    operate("fsync", os.readlink(f"/proc/self/fd/{handle}"))
    fsync(handle)

def written(path, trees, write_arrays=saving._write_arrays):  # C++ writes the arrays
    operate("arrays", str(path))
    write_arrays(path, trees)

if event == "bytes" and number == killer:
    threading.Thread(target=watch_bytes, daemon=True).start()
sys.addaudithook(heard)
os.fsync, saving._write_arrays = synced, written

learner = fluxcb.Learner.from_loss(
    {"w": np.zeros(SIZE, np.float32)},
    lambda params, batch: jnp.mean((params["w"] - batch) ** 2) * SIZE,
    optax.sgd(0.125),
    data=[np.ones((2, 1), np.float32)] * 20,
    callbacks=[Checkpointer(folder, steps=2, keep_last=1)],
    default_callbacks=False,
    mesh=fluxcb.mesh(),
    sharding=fluxcb.Sharding(params=fluxcb.fsdp(min_bytes=1)),
    peer_timeout=3.0,
)
learner.fit(steps=4, resume=True)
print(json.dumps([learner.step, seen]), flush=True)
"""

SIZE = 1 << 18

# Per moment of the save of step 4: the process that reaches it, the operation and its file, and whether step 4 then has
# its name. The operations are the first of their kind, unless a number is given.
MOMENTS = {
    "before the folder": (0, "os.mkdir", ".saving-4", 1, False),
    "before the arrays of process 0": (0, "arrays", ".saving-4", 1, False),
    "before the arrays of process 1": (1, "arrays", ".saving-4", 1, False),
    "after the arrays of process 1": (1, "fsync", ".saving-4", 1, False),
    "between the arrays and the host state": (0, "open", ".saving-4/host.json", 1, False),
    "between the arrays and the host arrays": (0, "open", ".saving-4/host.npz", 1, False),
    "between the files and the manifest": (0, "open", ".saving-4/fluxcb-manifest.json", 1, False),
    "between the manifest and the sync": (0, "fsync", ".saving-4", 1, False),
    "in the sync": (0, "fsync", ".saving-4", 9, False),
    "between the sync and the name": (0, "os.rename", "run/4", 1, False),
    "between the name and the deletion": (0, "os.rename", ".trash-2", 1, True),
    "at the beginning of the deletion": (0, "os.remove", ".trash-2", 1, True),
    "in the deletion": (0, "os.remove", ".trash-2", 5, True),
    "at the end of the deletion": (0, "os.rmdir", ".trash-2", 3, True),
}


def params_after(steps):
    """Return `w` by the formula: each step adds the learning rate times twice the distance from 1."""
    return 1 - (1 - 0.125 * 2) ** steps


def check_params(folder, step):
    params = load_params(folder)
    np.testing.assert_array_equal(params["w"], np.full(SIZE, params_after(step), np.float32))


@pytest.mark.parametrize("victims", ["all", "one"])
@pytest.mark.parametrize("moment", MOMENTS)
def test_kill_at_moment_of_save_leaves_whole_checkpoint(moment, victims, tmp_path):
    folder = tmp_path / "run"
    killer, event, name, at, has_name = MOMENTS[moment]
    ended = run_processes(PROGRAM, 2, folder, victims, killer, event, name, at)
    assert ended[killer].code == -signal.SIGKILL, ended[killer].stderr[-3000:]
    survivor = ended[1 - killer]
    if victims == "all":
        assert survivor.code == -signal.SIGKILL
    else:
        assert survivor.code == 1, survivor.stderr[-3000:]
        named = f"Process {killer} has not responded for " in survivor.stderr
        assert named or "Process 0 has ended, and with it" in survivor.stderr, survivor.stderr[-3000:]
    # The new checkpoint counts as soon as it has its name. The old one is complete until then.
    step = 4 if has_name else 2
    assert resolve_checkpoint(folder)[0] == folder / str(step)  # compares all checksums
    check_params(folder, step)


@pytest.fixture(scope="module")
def operations(tmp_path_factory):
    """Return, for each process, how many operations it makes in the folder that becomes the checkpoint of step 4."""
    counts = []
    for process in (0, 1):
        folder = tmp_path_factory.mktemp("operations") / "run"
        ended = run_processes(PROGRAM, 2, folder, "all", process, "any", ".saving-4", 0)
        assert [one.code for one in ended] == [0, 0], ended[0].stderr[-3000:]
        counts.append(json.loads(ended[process].stdout.splitlines()[-1])[1])
    assert min(counts) > 0
    return counts


@pytest.mark.parametrize("seed", range(int(os.environ.get("FLUXCB_TRIES", "6"))))
def test_kill_at_random_moment_of_save_leaves_whole_checkpoint(seed, operations, tmp_path):
    draw = random.Random(seed)
    folder, killer, victims = tmp_path / "run", draw.randrange(2), draw.choice(["all", "one"])
    if draw.random() < 0.5:
        event, at = "any", draw.randint(1, operations[killer])
    else:
        event, at = "bytes", draw.randint(1, 4 * SIZE)
    ended = run_processes(PROGRAM, 2, folder, victims, killer, event, ".saving-4", at)
    assert ended[killer].code == -signal.SIGKILL, ended[killer].stderr[-3000:]
    assert ended[1 - killer].code == (-signal.SIGKILL if victims == "all" else 1), ended[1 - killer].stderr[-3000:]
    # Between the last operation in the folder and the kill, the folder may have got its name.
    path, manifest = resolve_checkpoint(folder)  # compares all checksums
    assert path in (folder / "2", folder / "4")
    check_params(folder, manifest.step)
    ended = run_processes(PROGRAM, 2, folder, "all", 0, "never", "", 1)
    assert [one.code for one in ended] == [0, 0], ended[0].stderr[-3000:]
    assert [json.loads(one.stdout.splitlines()[-1])[0] for one in ended] == [4, 4]
    check_params(folder, 4)


def test_processes_resume_after_kill_of_all(tmp_path):
    folder = tmp_path / "run"
    ended = run_processes(PROGRAM, 2, folder, "all", *MOMENTS["between the files and the manifest"][:4])
    assert [process.code for process in ended] == [-signal.SIGKILL] * 2
    ended = run_processes(PROGRAM, 2, folder, "all", 0, "never", "", 1)
    assert [process.code for process in ended] == [0, 0], ended[0].stderr[-3000:]
    assert [json.loads(process.stdout.splitlines()[-1])[0] for process in ended] == [4, 4]
    # What the killed run left behind is gone. If its checkpoint of step 4 already had its name, the new one is `4.1`.
    assert sorted(path.name for path in folder.iterdir()) in (["4", "fluxcb.lock"], ["4.1", "fluxcb.lock"])
    check_params(folder, 4)
