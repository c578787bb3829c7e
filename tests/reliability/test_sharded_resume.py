"""State on several devices, or in two processes, is saved and resumes with the same placement."""

import json
import os
import re

import pytest

from tests.run_processes import run_processes

pytestmark = pytest.mark.long

COMMON = """
import faulthandler, json, os, shutil, signal, sys, warnings
faulthandler.dump_traceback_later(200, exit=True)  # a process that waits for the other in vain says where
import jax
number, count, port, folder = *map(int, sys.argv[1:4]), sys.argv[4]
if count > 1:
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=count, process_id=number)
import jax.numpy as jnp, numpy as np, optax
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec
import fluxcb
from fluxcb import Callback, Learner, Write, on
from fluxcb.callbacks import Checkpointer, CustomCallback, Metrics, ParameterEMA, ToDevice
from fluxcb.data import ArrayLoader
from fluxcb.events import StepEnd
from fluxcb.phases import TrainingPhase

mesh = jax.sharding.Mesh(jax.devices(), ("data",))
split = NamedSharding(mesh, PartitionSpec("data"))
whole = NamedSharding(mesh, PartitionSpec())
rng = np.random.default_rng(0)
xs = rng.normal(size=(96, 8)).astype(np.float32)
ys = (xs @ np.arange(8, dtype=np.float32)).astype(np.float32)

class Places(Callback):
    '''Put `w`, and what the optimizer keeps for it, where it is told to.'''

    def __init__(self, placement):
        self.placement = placement

    def stateaccess(self):
        return {"params": Write(), "opt_state": Write()}

    def runafter(self):
        return (ToDevice,)

    def init(self, learner):
        place = lambda leaf: jax.device_put(leaf, self.placement if leaf.ndim else whole)
        learner.params = jax.tree.map(place, dict(learner.params))
        learner.opt_state = jax.tree.map(place, learner.opt_state)

def loss_fn(params, batch, key):
    xs, ys = batch
    kept = jax.random.bernoulli(key, 0.9, xs.shape)
    return jnp.mean((jnp.where(kept, xs, 0) @ params["w"] + params["b"] - ys) ** 2)

def make(name, placement, *callbacks):
    return Learner.from_loss(
        {"w": np.zeros(8, np.float32), "b": np.zeros((), np.float32)}, loss_fn, optax.adam(0.1),
        data=ArrayLoader((xs, ys), 16),
        callbacks=[
            ToDevice(whole, batches=split), Places(placement), Checkpointer(os.path.join(folder, name), steps=4),
            Metrics(), ParameterEMA(0.9), *callbacks,
        ],
        default_callbacks=False,
    )

def bits(leaf):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if not leaf.is_fully_addressable:
        leaf = multihost_utils.process_allgather(leaf, tiled=True)
    return np.asarray(leaf).tobytes().hex()

def everything(learner):
    state = learner.state
    return {jax.tree_util.keystr(path): bits(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(state)}

def shardings(learner):
    carry = learner._state.train.carry
    return {
        f"{part}{jax.tree_util.keystr(path)}": leaf.sharding
        for part in ("params", "opt_state")
        for path, leaf in jax.tree_util.tree_leaves_with_path(carry[part])
    }

def split_ones(learner):
    return sorted(name for name, held in shardings(learner).items() if not held.is_fully_replicated)

def terminated(at):
    steps = [at]  # not a number, because the resumed run would report another one
    def terminate(learner):
        if learner.progress.step in steps:
            os.kill(os.getpid(), signal.SIGTERM)
    return CustomCallback(terminate, StepEnd, phase=TrainingPhase, name="terminated")
"""

PROCESSES = (
    COMMON
    + """
told = {}
for name, placement in (("whole", whole), ("split", split)):
    straight = make(f"{name} straight", placement, terminated(0))
    straight.fit(2)
    first = make(name, placement, terminated(8 if number == 1 else 0))
    first.fit(2)
    ended = first.step, first.stop_reason
    second = make(name, placement, terminated(0))
    second.fit(2, resume=True)
    told[name] = {
        "ended": ended,
        "step": second.step,
        "same": everything(second) == everything(straight),
        "progress": everything(second) != everything(first),
        "placed": shardings(second) == shardings(straight),
        "split": split_ones(second),
    }

# The part of `w` that process 1 has becomes NaN; process 0 sees numbers only.
class Spoils(Callback):
    def stateaccess(self):
        return {"params": Write()}

    @on
    def spoil(self, event: StepEnd, phase: TrainingPhase, learner):
        if learner.progress.step == 2:
            w = jax.jit(lambda w: jnp.where(jnp.arange(8) < 4, w, jnp.nan), out_shardings=split)(learner.params["w"])
            learner.params = {**learner.params, "w": w}
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    learner = make("spoiled", split, Spoils())
    learner.fit(steps=2)
told["spoiled"] = {
    "finite here": bool(np.isfinite(np.asarray(learner._state.train.carry["params"]["w"].addressable_data(0))).all()),
    "warned": sorted({str(w.message).split(") ")[-1].split(":")[0] for w in caught if "not save" in str(w.message)}),
}
print(json.dumps(told), flush=True)
"""
)


SPLIT = ["opt_state[0].mu['w']", "opt_state[0].nu['w']", "params['w']"]


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """Return the reports of two processes that train together, and the folder of their runs."""
    folder = tmp_path_factory.mktemp("processes")
    ended = run_processes(PROCESSES, 2, folder)
    for process in ended:
        assert process.code == 0, process.stderr[-3000:]
    return [json.loads(process.stdout.splitlines()[-1]) for process in ended], folder


def checkpoints(folder):
    return sorted(name for name in os.listdir(folder) if name[0].isdigit())


@pytest.mark.parametrize("placement", ["whole", "split"])
def test_two_processes_stop_and_resume_together_after_sigterm(processes, placement):
    told, folder = processes
    for one in told:
        assert one[placement] == {
            "ended": [8, "preempted"],
            "step": 12,
            "same": True,
            "progress": True,
            "placed": True,
            "split": SPLIT if placement == "split" else [],
        }
    assert checkpoints(folder / placement) == ["12", "12.1", "8"]  # after the step, and after the epoch


def test_non_finite_state_in_one_process_is_saved_by_none(processes):
    told, folder = processes
    assert [one["spoiled"]["finite here"] for one in told] == [True, False]
    assert [one["spoiled"]["warned"] for one in told] == [["does not save the state after step 2"]] * 2
    assert checkpoints(folder / "spoiled") == ["0"]


# --- one process ------------------------------------------------------------------------------------------------------

DEVICES = (
    COMMON
    + """
trains = sys.argv[5] == "1"
if trains:  # the run, which ends in the middle of an epoch
    straight = make("straight", split, terminated(0))
    straight.fit(2)
    make("run", split, terminated(8)).fit(2)
    shutil.copytree(os.path.join(folder, "run"), os.path.join(folder, "copy"))
name = "run" if trains else "copy"
learner = make(name, split, terminated(0))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    learner.restore(os.path.join(folder, name))
told = {
    "warned": [f"{type(w.message).__name__}: {w.message}".replace(folder, "") for w in caught],
    "restored": everything(learner), "split": split_ones(learner),
}
learner.fit(2, resume=True)
told |= {"step": learner.step, "params": np.asarray(learner.params["w"]).tolist(), "split then": split_ones(learner)}
if trains:
    told["same"] = everything(learner) == everything(straight)
print(json.dumps(told), flush=True)
"""
)


@pytest.fixture(scope="module")
def on_devices(tmp_path_factory):
    """Return a function that runs a program on a number of devices; on 8 devices, it first trains the run."""
    folder = tmp_path_factory.mktemp("devices")

    def run(devices, *, trains):
        flags = f"--xla_force_host_platform_device_count={devices}"
        (done,) = run_processes(DEVICES, 1, folder, int(trains), flags=flags)
        assert done.code == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run


def test_run_on_eight_devices_resumes_on_eight_or_one(on_devices):
    eight = on_devices(8, trains=True)
    assert (eight["warned"], eight["step"], eight["same"]) == ([], 12, True)
    assert eight["split"] == eight["split then"] == SPLIT
    one = on_devices(1, trains=False)
    (warned,) = one["warned"]
    began, _, row = warned.splitlines()
    assert began == "ResumeWarning: The run resumes from /copy/8 with differences:"
    assert re.fullmatch(r"  devices +\['cpu', 8, '\w+'\]  \['cpu', 1, '\w+'\]  program", row)
    # The values are those that were saved, and lie where this Learner has them.
    assert one["restored"] == eight["restored"]
    assert (one["split"], one["step"]) == ([], 12)
    assert one["params"] == pytest.approx(eight["params"], rel=1e-4)  # sums over eight parts may round otherwise


# --- a chain of meshes ------------------------------------------------------------------------------------------------

CHAIN = (
    COMMON
    + """
# All numbers are multiples of a power of two with few digits, so sums are exact in any order.
xs, ys = (rng.integers(-2, 3, size=shape).astype(np.float32) for shape in ((32, 8), (32,)))

def exact_loss(params, batch, key):
    xs, ys = batch
    kept = jax.random.bernoulli(key, 0.5, xs.shape)
    return jnp.mean(jnp.where(kept, xs, 0) @ params["w"] + params["b"] * ys)

def exact(name):
    return Learner.from_loss(
        {"w": np.zeros(8, np.float32), "b": np.zeros((), np.float32)}, exact_loss, optax.sgd(0.5, momentum=1.0),
        data=ArrayLoader((xs, ys), 16), callbacks=[Checkpointer(os.path.join(folder, name)), ParameterEMA(0.5)],
        default_callbacks=False, mesh=fluxcb.mesh(), sharding=fluxcb.Sharding(params=fluxcb.fsdp(min_bytes=1)),
    )

def arrays(learner):
    found = {part: learner._state.train.carry[part] for part in ("params", "opt_state", "cbstate")}
    return {jax.tree_util.keystr(path): bits(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(found)}

told = {}
if sys.argv[5] == "1":
    straight = exact("straight")
    told["straight"] = []
    for epoch in range(4):
        straight.fit(1)
        told["straight"].append(arrays(straight))
learner = exact("chain")
if sys.argv[5] == "0":
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fluxcb.checkpoints.ResumeWarning)  # the mesh has changed
        learner.restore(os.path.join(folder, "chain"))
        told["restored"] = arrays(learner)
        learner.fit(learner.epoch + 1, resume=True)
else:
    learner.fit(1)
told |= {"ended": arrays(learner), "step": learner.step, "devices": len(learner.borrow("params")["w"].devices())}
print(json.dumps(told), flush=True)
"""
)


def test_run_on_8_then_2_then_1_then_8_devices_computes_same_bits(tmp_path):
    told = []
    for devices in (8, 2, 1, 8):
        flags = f"--xla_force_host_platform_device_count={devices}"
        (ended,) = run_processes(CHAIN, 1, tmp_path, int(not told), flags=flags)
        assert ended.code == 0, ended.stderr[-3000:]
        told.append(json.loads(ended.stdout.splitlines()[-1]))
    assert [one["devices"] for one in told] == [8, 2, 1, 8]
    assert [one["step"] for one in told] == [2, 4, 6, 8]
    straight = told[0]["straight"]
    assert len({one["['params']['w']"] for one in straight}) == 4
    assert [one["ended"] for one in told] == straight
    assert [one["restored"] for one in told[1:]] == straight[:3]
