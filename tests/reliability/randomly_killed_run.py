"""A training that is killed or stopped after a number of Python calls, for test_random_kills.py."""

import contextlib
import hashlib
import os
import sys
import threading
import warnings
from multiprocessing.connection import Connection
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import starting_run

import fluxcb
from fluxcb._tools.resume_proof import state_of
from fluxcb.callbacks import CustomCallback, Monitors
from fluxcb.data import ArrayLoader
from fluxcb.events import StepEnd
from fluxcb.phases import TrainingPhase

EPOCHS, STEPS = 3, 24


class Calls:
    """Count the calls of Python functions in all threads, and send a signal to this process at one of them.

    Args:
        connection: Receives the text "starting" or "training" before the signal is sent.

    Attributes:
        made: The number of calls since the last `restart`.
        training: Whether this start has finished a step.
    """

    def __init__(self, connection: Connection) -> None:
        self.made, self._last, self._signal = 0, -1, 0
        self.training = False
        self._pid, self._connection = os.getpid(), connection

    def restart(self, last: int = -1, number: int = 0) -> None:
        """Restart counting from 0, and send signal `number` at call `last`."""
        self.made, self._last, self._signal = 0, last, number

    def start(self) -> None:
        """Start counting."""
        threading.setprofile(self._count)
        sys.setprofile(self._count)

    def _count(self, frame, event, argument) -> None:
        if event == "call":
            self.made += 1
            if self.made == self._last and os.getpid() == self._pid:
                self._connection.send("training" if self.training else "starting")
                os.kill(self._pid, self._signal)


def loss_fn(params, batch, key):
    xs, ys = batch
    noise = jax.random.normal(key, ys.shape)
    return jnp.mean((xs @ params["w"] + params["b"] + 0.1 * noise - ys) ** 2)


def make(folder: Path, each_step) -> fluxcb.Learner:
    """Return a Learner with eight steps per epoch that calls a function after each step."""
    xs = np.random.default_rng(0).normal(size=(32, 3)).astype(np.float32)
    act = CustomCallback(lambda learner: each_step(), StepEnd, phase=TrainingPhase, name="each step")
    return fluxcb.Learner.from_loss(
        {"w": jnp.zeros(3), "b": jnp.zeros(())},
        loss_fn,
        optax.adam(0.1),
        data=ArrayLoader((xs, xs.sum(1)), 4),
        callbacks=starting_run.parts(folder, act),
        default_callbacks=False,
        key=7,
    )


def outcome(learner: fluxcb.Learner, folder: Path) -> dict[str, str]:
    """Return digests of all state and of the dumped arrays, by name."""
    found = {name: repr(bits).encode() for name, bits in state_of(learner, ("Monitors",)).items()}
    for path in sorted((folder / "dumps").iterdir()):
        with np.load(path) as arrays:
            found |= {f"{path.name} {name}": array.tobytes() for name, array in arrays.items()}
    return {name: hashlib.sha256(content).hexdigest() for name, content in found.items()}


def train(folder: str, cache: str, connection: Connection, origin="first line", last=-1, number=0, forks=False) -> None:
    """Train to the end and send the outcome, or the text of the error that refused the run.

    Args:
        folder: Directory of the run.
        cache: Directory for compiled programs. A kill may damage it, so it is not that of other tests.
        connection: Connection to the test. A forked process lives until it receives something.
        origin: Where counting starts: at the "first line" of the program or at the "first step" of this start.
        last: The call at which this process gets the signal.
        number: The signal.
        forks: Whether to fork a process at the first step of this start.
    """
    calls = Calls(connection)
    if origin == "first line":
        calls.restart(last, number)
    calls.start()
    warnings.filterwarnings("ignore", message="os.fork")  # JAX warns, but the forked process does nothing but wait
    jax.config.update("jax_compilation_cache_dir", cache)
    begun = 0

    def each_step():
        nonlocal begun
        if calls.training:
            return
        begun, calls.training = calls.made, True
        if forks and os.fork() == 0:
            sys.setprofile(None)
            with contextlib.suppress(BaseException):
                connection.recv_bytes()
            os._exit(0)
        if origin == "first step":
            calls.restart(last, number)

    learner = make(Path(folder), each_step)
    try:
        learner.fit(EPOCHS, resume=True)
    except fluxcb.CheckpointError as error:
        connection.send(str(error))
        return
    learner.callbacks.get(Monitors).close()
    sys.setprofile(None)
    connection.send((outcome(learner, Path(folder)), begun, calls.made))
