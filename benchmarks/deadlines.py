"""What a one-second upload after each epoch costs, with and without a deadline.

    uv run python benchmarks/deadlines.py [--epochs N]

An epoch is made to take 1.5 s, so that one upload fits into the next epoch.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

from fluxcb import Callback, Learner, Read, on
from fluxcb.events import EpochEnd, FitEnd
from fluxcb.phases import TrainingPhase

EPOCH, UPLOAD = 1.5, 1.0
"""Time of an epoch and of an upload (s)."""


class Upload(Callback):
    """Wait as an upload does, in the epoch."""

    def stateaccess(self) -> dict[str, Any]:
        return {"params": Read()}

    @on
    def upload(self, event: EpochEnd, phase: TrainingPhase, learner: Any) -> None:
        """Read the parameters, and wait."""
        np.asarray(learner.params["w"]).tobytes()
        time.sleep(UPLOAD)


class UploadLater(Upload):
    """The same, while training goes on."""

    @on(EpochEnd, TrainingPhase, deadline=FitEnd)
    def upload(self, event: EpochEnd, phase: TrainingPhase, learner: Any) -> None:
        """Read the parameters, and wait."""
        super().upload(event, phase, learner)


def seconds(steps: int, epochs: int, *callbacks: Callback) -> float:
    """Return the time of a fit without its compilation (s)."""
    learner = Learner.from_loss(
        {"w": jnp.ones((256, 256))},
        lambda params, batch, key: jnp.mean((batch @ params["w"]) ** 2),
        optax.sgd(1e-3),
        data=[np.ones((64, 256), np.float32)] * steps,
        callbacks=callbacks,
        default_callbacks=False,
    )
    learner.run_epoch(learner.phases[0], steps=100)
    began = time.perf_counter()
    learner.fit(epochs)
    return time.perf_counter() - began


def main() -> None:
    """Measure, and print the times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    epochs = parser.parse_args().epochs
    steps = int(500 * EPOCH / seconds(500, 1))
    plain = seconds(steps, epochs)
    print(f"{epochs} epochs of {steps} steps: {plain:.2f} s")
    for name, callback in (("without a deadline", Upload()), ("deadline=FitEnd", UploadLater())):
        print(f"with uploads of {UPLOAD:g} s, {name}: {seconds(steps, epochs, callback) - plain:+.2f} s")


if __name__ == "__main__":
    main()
