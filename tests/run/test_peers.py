"""If a process of several fails, stops, or is killed, the others end with an error that names the process."""

import os
import random

import pytest

from tests.run_processes import run_processes

# JAX's own timeouts are far longer than the test waits. So whatever ends a process, it is not JAX.
PROGRAM = """
import os, signal, sys, threading
number, count, port, case, at = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5])
import jax
jax.distributed.initialize(
    f"127.0.0.1:{port}", num_processes=count, process_id=number,
    heartbeat_timeout_seconds=1000, shutdown_timeout_seconds=1000,
)
import numpy as np, optax
import fluxcb
from fluxcb import Callback, Write, every, on
from fluxcb._run import host_writes
from fluxcb.callbacks.inspect import check_replicas
from fluxcb.events import StepBegin, StepEnd
from fluxcb.phases import TrainingPhase

mesh = jax.sharding.Mesh(jax.devices(), ("data",))
split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
failing = number == int(sys.argv[6])

class Data:
    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        for i in range(self.batches):
            if failing and case == "data" and i == at:
                raise OSError("no disk")
            rows = 3 if failing and case == "rows" and i >= at else 4
            xs = np.full((rows, 1), i % 5, np.float32)
            yield tuple(jax.make_array_from_process_local_data(split, array) for array in (xs, 3 * xs))

    def __len__(self):
        return self.batches

class Fails(Callback):
    @on
    def begin(self, event: StepBegin, phase: TrainingPhase, learner):
        if failing and case == "StepBegin" and learner.progress.step == at:
            raise RuntimeError("the handler failed")

    @on
    def end(self, event: StepEnd, phase: TrainingPhase, learner):
        if failing and learner.progress.step == at:
            if case == "StepEnd":
                raise RuntimeError("the handler failed")
            if case == "exit":
                sys.exit(3)
            if hasattr(signal, case):
                os.kill(os.getpid(), getattr(signal, case))

class Writes(Callback):
    def stateaccess(self):
        return {"params": Write()}

    @on
    def write(self, event: StepEnd, phase: TrainingPhase, learner):
        learner.params = learner.params

def fails(*args):
    raise MemoryError("no memory")

# These functions are called before a collective.
if failing and case == "checksums":
    check_replicas._checksums = fails
elif failing and case == "written":
    host_writes._is_spread = fails
collective = {
    "checksums": lambda: every(fluxcb.callbacks.CheckReplicas(), steps=2),
    "written": Writes,
}

class Stuck(Callback):
    @on
    def look(self, event: StepEnd, phase: TrainingPhase, learner):
        if learner.progress.step == at:
            if failing:
                raise RuntimeError("the handler failed")
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()  # never returns

learner = fluxcb.Learner.from_loss(
    jax.device_put({"w": np.zeros((1, 1), np.float32)}, whole),
    lambda params, batch: ((batch[0] @ params["w"] - batch[1]) ** 2).mean(),
    optax.sgd(0.01),
    data=Data(at if failing and case == "uneven" else 40),
    callbacks=[collective.get(case, Stuck if case == "stuck" else Fails)()],
    default_callbacks=False,
    peer_timeout=6.0,
)
try:
    learner.fit(3)
finally:
    print("stopped at", learner.step, learner.stop_reason, flush=True)
"""


def run(folder, case, *, at=7, count=2, failing=1, flags=""):
    """Train with several processes, one of which fails; return the exit code and the output of each."""
    never_ends = failing if case == "SIGSTOP" else None
    ended = run_processes(PROGRAM, count, case, at, failing, cwd=folder, flags=flags, never_ends=never_ends)
    return [(process.code, process.stdout + process.stderr) for process in ended]


CAUSES = {
    "StepBegin": "Process {} failed: RuntimeError: the handler failed\n",
    "StepEnd": "Process {} failed: RuntimeError: the handler failed\n",
    "data": "Process {} failed: OSError: no disk\n",
    "exit": "Process {} failed: SystemExit: 3\n",
    "uneven": "do not run the same steps.\n",
    "rows": "do not run the same steps.\n",
}


COLLECTIVES = dict.fromkeys(("checksums", "written"), "Process {} failed: MemoryError: no memory\n")


def check(ended, case, failing):
    """Check that the other processes name the process and the cause, and that none was aborted."""
    for number, (code, output) in enumerate(ended):
        assert code == (3 if case == "exit" and number == failing else 1), output[-3000:]
        assert "Array has been deleted" not in output
        if number != failing:
            assert "PeerError: " in output or f"fluxcb ends process {number}:" in output, output[-3000:]
            assert (CAUSES | COLLECTIVES)[case].format(failing) in output, output[-3000:]
            if case in ("uneven", "rows"):
                assert f"process {failing}: " in output


def test_other_process_raises_if_handler_fails(tmp_path):
    check(run(tmp_path, "StepEnd"), "StepEnd", 1)


@pytest.mark.long
@pytest.mark.parametrize(("case", "failing"), [(case, number % 2) for number, case in enumerate(CAUSES)])
def test_other_process_raises(case, failing, tmp_path):
    check(run(tmp_path, case, failing=failing), case, failing)


@pytest.mark.long
@pytest.mark.parametrize("case", COLLECTIVES)
def test_process_that_fails_between_collectives_is_named(case, tmp_path):
    check(run(tmp_path, case), case, 1)


def test_message_of_uneven_data(tmp_path):
    _, (_, output) = run(tmp_path, "uneven")
    message = output[output.index("fluxcb._errors.PeerError: ") :]
    assert message.startswith(
        "fluxcb._errors.PeerError: Process 0 and process 1 do not run the same steps.\n"
        "  where: process 0: continues with another step\n"
        "         process 1: the data of LossTrainingPhase ends after step 7 of epoch 1\n"
        "         reported by process 0\n"
        "  why:   each step is computed by all processes, with batches of the same shape on each\n"
        "  fix:   give all processes the same number of batches, of the same shapes\n"
    )


@pytest.mark.long
@pytest.mark.parametrize("seed", range(int(os.environ.get("FLUXCB_TRIES", "6"))))
def test_random_failures_with_two_and_four_processes(seed, tmp_path):
    draw = random.Random(seed)
    case, count = draw.choice(list(CAUSES)), draw.choice([2, 4])
    failing, at = draw.randrange(count), draw.randrange(1, 40)
    check(run(tmp_path, case, at=at, count=count, failing=failing), case, failing)


@pytest.mark.long
@pytest.mark.parametrize(("case", "failing"), [("SIGKILL", 0), ("SIGKILL", 1), ("SIGSTOP", 0)])
def test_lost_process_is_named(case, failing, tmp_path):
    ended = run(tmp_path, case, failing=failing)
    code, output = ended[1 - failing]
    assert code == 1, output[-3000:]  # and not that of SIGABRT
    assert f"Process {failing} has not responded for " in output or "Process 0 has ended, and with it" in output
    assert "Array has been deleted" not in output


@pytest.mark.long
def test_stopped_process_raises_error_if_collectives_end(tmp_path):
    """Python cannot interrupt a collective. With this flag, XLA ends it."""
    code, output = run(tmp_path, "SIGSTOP", flags="--xla_cpu_collective_timeout_seconds=8")[0]
    assert code == 1
    assert "stopped at " in output, output[-3000:]  # `finally` was run
    assert "fluxcb._errors.PeerError: Process 1 has not responded for " in output


@pytest.mark.long
@pytest.mark.parametrize("seed", range(int(os.environ.get("FLUXCB_TRIES", "4"))))
def test_sigterm_in_one_process_stops_all_at_same_step(seed, tmp_path):
    draw = random.Random(seed)
    count = draw.choice([2, 4])
    failing, at = draw.randrange(count), draw.randrange(1, 80)
    ended = run(tmp_path, "SIGTERM", at=at, count=count, failing=failing)
    lines = [next(line for line in output.splitlines() if line.startswith("stopped at ")) for _, output in ended]
    assert [code for code, _ in ended] == [0] * count
    assert len(set(lines)) == 1
    assert lines[0].endswith("preempted")
    # The handlers of a window run while the next is under way. A window has at most 10 steps here: see `AHEAD`.
    assert int(lines[0].split()[2]) <= at + 3 * 32


@pytest.mark.long
def test_process_that_cannot_be_interrupted_is_ended(tmp_path):
    """A process whose handler never returns cannot raise an error. It ends with a message."""
    code, output = run(tmp_path, "stuck")[0]
    assert code == 1
    assert "fluxcb ends process 0:\nProcess 1 failed: RuntimeError: the handler failed\n" in output, output[-3000:]


@pytest.mark.long
def test_second_fit_after_one_that_all_processes_finish(tmp_path):
    """Exit handlers of JAX run as usual: the exit code of both is 0."""
    assert [code for code, _ in run(tmp_path, "none")] == [0, 0]
