"""A training that waits for signals at one of its moments, for test_signals.py, and reports its result."""

import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fluxcb import Callback, Learner, data, on
from fluxcb.callbacks import (
    Checkpointer,
    EarlyStopping,
    LearningRate,
    Metrics,
    MinSaver,
    ParameterEMA,
    Recorder,
    Scheduler,
)
from fluxcb.checkpoints import saving
from fluxcb.checkpoints.run_folder import RunFolder
from fluxcb.data import ArrayLoader
from fluxcb.events import HostEvent
from fluxcb.phases import Phase

EPOCHS, STEPS = 3, 6

PLACES = {
    # The first word of the place: whose function, and its name. A step follows if it is told one.
    "compiling": (jax.stages.Lowered, "compile"),
    "writing": (saving, "make_manifest"),
    "deleting": (RunFolder, "remove"),
}
"""What of the library may be waited in: a compilation, writing a checkpoint, deleting an old one."""


class AtMoments(Callback):
    """Record the host events, and call a function at one or two of them."""

    name = "moments"

    def __init__(self, act: Callable[[str], None]) -> None:
        self.act = act
        self.met: list[str] = []

    @on(HostEvent, Phase)
    def note(self, event, phase, learner):
        self.met.append(f"{type(event).__name__} {type(phase).name} {learner.progress.step}")
        self.act(self.met[-1])

    def state_dict(self):
        return {}  # a resumed run records its own events


def loss_fn(params, batch, key):
    """Return the loss of a linear model with dropout."""
    xs, ys = batch
    kept = jax.random.bernoulli(key, 0.9, xs.shape)
    return jnp.mean((jnp.where(kept, xs / 0.9, 0) @ params["w"] + params["b"] - ys) ** 2)


class Asked:
    """Report when a batch is requested."""

    def __init__(self, act):
        self._act, self._asked = act, 0

    def __call__(self, batch):
        self._asked += 1
        self._act(f"batch {self._asked}")
        return batch


def make(folder: Path, act: Callable[[str], None] = lambda moment: None, steps_per_call=1) -> Learner:
    """Return the Learner; `act` is called with each moment and each requested batch."""
    rng = np.random.default_rng(0)
    xs = rng.normal(size=(96, 5)).astype(np.float32)
    ys = (xs @ np.arange(5, dtype=np.float32)).astype(np.float32)
    return Learner.from_loss(
        {"w": np.zeros(5, np.float32), "b": np.zeros((), np.float32)},
        loss_fn,
        optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
        data=(data.map(Asked(act), ArrayLoader((xs, ys), 96 // STEPS)), ArrayLoader((xs[:32], ys[:32]), 16)),
        callbacks=[
            AtMoments(act),
            Checkpointer(folder / "run", steps=4, keep_last=2),
            MinSaver(folder / "run"),
            Metrics(),
            ParameterEMA(0.9),
            EarlyStopping(20),
            Scheduler({LearningRate: optax.cosine_decay_schedule(0.1, EPOCHS * STEPS)}),
            Recorder(),
        ],
        default_callbacks=False,
        steps_per_call=steps_per_call,
        key=3,
    )


class Waiting:
    """Wait at given places until signals have been sent, each time that a place is reached.

    Args:
        folder: The folder of the files that report that it waits, and that a signal was sent.
        places: Where to wait.
        times: The number of signals at each place.
    """

    def __init__(self, folder: Path, places: list[str], times: int) -> None:
        self._folder, self._places, self._times, self._sent = folder, places, times, 0

    def __call__(self, place: str) -> None:
        if self._places and place == self._places[0]:
            self._places.pop(0)
            for _ in range(self._times):
                self._sent += 1
                (self._folder / f"waits {self._sent}").touch()
                while not (self._folder / f"sent {self._sent}").exists():
                    time.sleep(0.002)

    def within(self, place: str) -> None:
        """Wait inside a function of the library."""
        word, _, step = place.partition(" ")
        owner, name = PLACES[word]
        original = getattr(owner, name)

        def waiting(first, *args, **kwargs):
            if not step or first.step == int(step):
                self(place)
            return original(first, *args, **kwargs)

        setattr(owner, name, waiting)


def main(folder: str, places: list[str], times: int, steps_per_call) -> None:
    """Train, write `told.json`, and exit with 0, or with 130 after KeyboardInterrupt."""
    handlers = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    for number, handler in handlers.items():
        signal.signal(number, handler)
    wait = Waiting(Path(folder), places, times)
    for place in places:
        if place.split()[0] in PLACES:
            wait.within(place)
    learner, raised = make(Path(folder), wait, steps_per_call), ""
    try:
        learner.fit(EPOCHS)
    except KeyboardInterrupt as error:
        raised = "\n".join([repr(error), *getattr(error, "__notes__", ())])
    told = {
        "step": learner.step,
        "reason": learner.stop_reason,
        "raised": raised,
        "moments": learner.callbacks.get(AtMoments).met,
        "given back": all(signal.getsignal(number) is handler for number, handler in handlers.items()),
        "unmet": places,
    }
    (Path(folder) / "told.json").write_text(json.dumps(told))
    sys.exit(130 if raised else 0)
