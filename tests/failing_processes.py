"""Trainings of several processes, one of which fails: for tests/run/test_peers.py and benchmarks/failures.py."""

import random
from typing import NamedTuple

from tests.run_processes import run_processes

__all__ = [
    "CAUSES",
    "COLLECTIVES",
    "Try",
    "check",
    "check_lost",
    "check_stopped",
    "latest_stop",
    "random_try",
    "run",
    "seconds_to_stop",
]

# JAX's own timeouts are far longer than the test waits. So whatever ends a process, it is not JAX.
PROGRAM = """
import os, signal, sys, threading, time
number, count, port, case = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
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
at, failing = 0, False

def note_failure():
    print("fails at", time.time(), flush=True)

class Data:
    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        for i in range(self.batches):
            if failing and case in ("data", "rows") and i == at:
                note_failure()
            if failing and case == "data" and i == at:
                raise OSError("no disk")
            rows = 3 if failing and case == "rows" and i >= at else 4
            xs = np.full((rows, 1), i % 5, np.float32)
            yield tuple(jax.make_array_from_process_local_data(split, array) for array in (xs, 3 * xs))
        if failing and case == "uneven":
            note_failure()

    def __len__(self):
        return self.batches

class Fails(Callback):
    @on
    def begin(self, event: StepBegin, phase: TrainingPhase, learner):
        if failing and case == "StepBegin" and learner.progress.step == at:
            note_failure()
            raise RuntimeError("the handler failed")

    @on
    def end(self, event: StepEnd, phase: TrainingPhase, learner):
        if failing and learner.progress.step == at:
            note_failure()
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

def train():
    # These functions are called before a collective.
    if failing and case == "checksums":
        check_replicas._checksums = fails
    elif failing and case == "written":
        host_writes._is_spread = fails
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
        print("stopped at", learner.step, learner.stop_reason, time.time(), flush=True)

for argument in sys.argv[5:]:
    at, process = map(int, argument.split(":"))
    failing = number == process
    train()
"""


def run(folder, case, *, at=7, count=2, failing=1, flags="", more=()):
    """Train with several processes, one of which fails; return the exit code and the output of each.

    Args:
        folder: The working directory.
        case: How the process fails.
        at: The step, or the batch, of the failure.
        count: The number of processes.
        failing: The process that fails.
        flags: Flags of XLA.
        more: The step and the process of further failures, each in a new training. The processes must survive them.
    """
    never_ends = failing if case == "SIGSTOP" else None
    failures = [f"{step}:{process}" for step, process in ((at, failing), *more)]
    ended = run_processes(PROGRAM, count, case, *failures, cwd=folder, flags=flags, never_ends=never_ends)
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


class Try(NamedTuple):
    """A training of several processes, one of which fails.

    Attributes:
        case: How it fails: a key of `CAUSES`, or the name of a signal.
        at: The step, or the batch, of the failure.
        count: The number of processes.
        failing: The process that fails.
    """

    case: str
    at: int
    count: int
    failing: int


def random_try(seed, cases):
    """Return the try that a seed determines.

    Args:
        seed: The seed.
        cases: The cases to choose from.
    """
    draw = random.Random(seed)
    case, count = draw.choice(list(cases)), draw.choice([2, 4])
    # Data has 40 batches per epoch. A signal may also come in the second epoch, or between the two.
    return Try(case, draw.randrange(1, 40 if case in CAUSES else 80), count, draw.randrange(count))


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


def check_lost(ended, failing):
    """Check that the other processes name the process that was killed or stopped, and that none was aborted."""
    for number, (code, output) in enumerate(ended):
        if number != failing:
            assert code == 1, output[-3000:]  # and not that of SIGABRT
            named = f"Process {failing} has not responded for " in output
            assert named or (failing == 0 and "Process 0 has ended, and with it" in output), output[-3000:]
            assert "Array has been deleted" not in output


def check_stopped(ended):
    """Check that all processes have stopped as preempted at the same steps, and return the step of each training."""
    assert [code for code, _ in ended] == [0] * len(ended), ended
    lines = [line.split()[2:4] for line in ended[0][1].splitlines() if line.startswith("stopped at ")]
    for _, output in ended:
        assert [line.split()[2:4] for line in output.splitlines() if line.startswith("stopped at ")] == lines
    assert {reason for _, reason in lines} == {"preempted"}
    return [int(step) for step, _ in lines]


def seconds_to_stop(ended):
    """Return the time from each signal until the last process has stopped (s)."""
    failed, stopped = [], []
    for _, output in ended:
        lines = [line.split() for line in output.splitlines()]
        failed += [float(words[-1]) for words in lines if words[:2] == ["fails", "at"]]
        stopped.append([float(words[-1]) for words in lines if words[:2] == ["stopped", "at"]])
    return [max(ends) - begin for begin, *ends in zip(sorted(failed), *stopped, strict=True)]


def latest_stop(at):
    """Return the last step after which all processes may stop, if the handler of step `at` gets a signal.

    The handlers of a window run while the next window is under way, and the processes stop at most two windows after
    that one. The state is on several devices, so a window has 8 steps, but the first one of all has 1. An epoch has 40.
    """
    first = 1 if at <= 40 else 0
    return first - (first - at) // 8 * 8 + 3 * 8
