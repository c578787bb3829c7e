"""A training with logs and dumps that is killed, forks, or is started a second time, for test_starts.py."""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

import fluxcb
from fluxcb import Append, Callback, on
from fluxcb.callbacks import Checkpointer, CustomCallback, DumpArrays, Monitors
from fluxcb.events import FitBegin, StepEnd
from fluxcb.logging import CSVBackend, JSONLinesBackend, TensorBoardBackend
from fluxcb.phases import TrainingPhase

EPOCHS, STEPS = 2, 8
CHANGES = ("os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.truncate")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


class LogSteps(Callback):
    """Log a value when a new run begins, and the number of each step."""

    def stateaccess(self):
        return {"cbstate": {"monitors": Append()}}

    @on
    def begin(self, event: FitBegin, phase: TrainingPhase, learner):
        if not event.resumes:
            learner.cbstate.monitors.put_scalar("count", 0)

    @on
    def step(self, event: StepEnd, phase: TrainingPhase, learner):
        learner.cbstate.monitors.put_scalar("count", learner.progress.step)


def nothing() -> None:
    """Do nothing after step 5."""


def parts(folder: Path, *callbacks, at_5: Callable[[], None] = nothing, saves_first=False):
    """Return the callbacks of a run, one of which calls `at_5` after step 5.

    The Checkpointer is first or last in the list.
    """
    events = TensorBoardBackend(folder / "events")
    monitors = Monitors(JSONLinesBackend(folder / "log.jsonl"), CSVBackend(folder / "log.csv"), events)
    dumps = DumpArrays(["params.w", "step.loss"], folder / "dumps")
    act = CustomCallback(
        lambda learner: at_5() if learner.progress.step == 5 else None,
        StepEnd,
        phase=TrainingPhase,
        access={"control": Append()},
        name="act",
    )
    found = [monitors, LogSteps(), dumps, act, *callbacks]
    saver = Checkpointer(folder / "run", steps=3)
    return [saver, *found] if saves_first else [*found, saver]


def make(folder: Path, *callbacks, first: Any = 0.0, **given) -> fluxcb.Learner:
    """Return a Learner with four steps per epoch, whose parameter counts them."""
    return fluxcb.Learner.from_loss(
        {"w": jnp.float32(first)},
        lambda params, batch, key: -jnp.sum(params["w"]) + 0 * jnp.sum(batch),
        optax.sgd(1.0),
        data=[np.zeros(1, np.float32)] * 4,
        callbacks=parts(folder, *callbacks, **given),
        default_callbacks=False,
    )


def train(folder: Path, **given) -> None:
    """Train to the end, or write the reason of the refusal to `refused.txt`."""
    learner = make(folder, **given)
    try:
        learner.fit(EPOCHS, resume=True)
    except fluxcb.FluxcbError as error:
        (folder / "refused.txt").write_text(str(error))
    finally:
        learner.callbacks.get(Monitors).close()


def killed_at_operation(folder: str, operations: int) -> None:
    """Train until a number of operations have changed files, and kill the process before the next one."""
    done = 0

    def heard(event, args):
        nonlocal done
        if event in CHANGES or (event == "open" and isinstance(args[0], str) and args[2] & WRITES):
            if not str(args[0]).startswith((folder, ".")) and not isinstance(args[0], int):
                return  # a file of JAX
            done += 1
            if done > operations:
                os.kill(os.getpid(), signal.SIGKILL)

    learner = make(Path(folder))
    sys.addaudithook(heard)
    learner.fit(EPOCHS, resume=True)


def second_start(folder: str) -> None:
    """Start the program a second time."""
    train(Path(folder))


def killed_with_a_child(folder: str) -> None:
    """Fork at step 5, write the id of the forked process to `child.txt`, and kill this process."""

    def fork():
        reads, writes = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(writes, b".")
            while True:
                signal.pause()
        os.read(reads, 1)
        (Path(folder) / "child.txt").write_text(str(child))
        os.kill(os.getpid(), signal.SIGKILL)

    train(Path(folder), at_5=fork)


def failing_first_save(folder: str) -> None:
    """Train on a disk that rejects large files."""
    import resource

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    noise = np.random.default_rng(0).normal(size=100_000)  # no compression makes it small
    learner = make(Path(folder), first=noise)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
    try:
        learner.fit(EPOCHS, resume=True)
    except fluxcb.CheckpointError as error:
        (Path(folder) / "refused.txt").write_text(str(error))
