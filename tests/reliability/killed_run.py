"""A training that test_kills.py kills and restarts until it is done. It then reports its result.

It contains everything that a resume could lose: dropout, a schedule, an average of the parameters, early stopping,
metrics, logs, data in a new order each epoch, and saves within epochs.
"""

import hashlib
import json
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

import fluxcb
from fluxcb._tools.resume_proof import state_of
from fluxcb.callbacks import (
    Checkpointer,
    CustomCallback,
    EarlyStopping,
    LearningRate,
    LogHyperParams,
    LogMetrics,
    Metrics,
    MinSaver,
    Monitors,
    ParameterEMA,
    Scheduler,
)
from fluxcb.data import ArrayLoader
from fluxcb.events import StepEnd
from fluxcb.logging import CSVBackend, JSONLinesBackend
from fluxcb.phases import TrainingPhase

EPOCHS = 6


def digits():
    """Return the 8 x 8 images of the shipped digits in stored order: `(float32[1797, 64], int32[1797])`."""
    with np.load(Path(fluxcb.__file__).parent / "data" / "digits.npz") as stored:
        return (stored["images"] / 16).astype(np.float32), stored["labels"].astype(np.int32)


def loss_fn(params, batch, key):
    """Return the loss of a small network with dropout, and its outputs."""
    xs, ys = batch
    hidden = jax.nn.relu(xs @ params["w1"] + params["b1"])
    kept = jax.random.bernoulli(key, 0.8, hidden.shape)
    logits = jnp.where(kept, hidden / 0.8, 0) @ params["w2"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, ys).mean()


def make(folder: Path, steps_per_call, delay: float = 0.0) -> fluxcb.Learner:
    """Return the Learner."""
    xs, ys = digits()
    rng = np.random.default_rng(0)
    params = {
        "w1": rng.normal(0, 0.1, (64, 32)).astype(np.float32),
        "b1": np.zeros(32, np.float32),
        "w2": rng.normal(0, 0.1, (32, 10)).astype(np.float32),
    }
    callbacks = [
        Checkpointer(folder / "run", steps=7),
        MinSaver(folder / "run"),
        Metrics(),
        ParameterEMA(0.95),
        EarlyStopping(50),
        Scheduler({LearningRate: optax.cosine_decay_schedule(3e-3, 120)}),
        Monitors(JSONLinesBackend(folder / "log.jsonl"), CSVBackend(folder / "log.csv")),
        LogMetrics(),
        LogHyperParams(LearningRate),
        CustomCallback(lambda learner: time.sleep(delay), StepEnd, phase=TrainingPhase, name="slow"),
    ]
    return fluxcb.Learner.from_loss(
        params,
        loss_fn,
        fluxcb.inject(optax.adamw, learning_rate=3e-3),
        data=(ArrayLoader((xs[:640], ys[:640]), 32), ArrayLoader((xs[640:896], ys[640:896]), 64, shuffle=False)),
        callbacks=callbacks,
        default_callbacks=True,
        steps_per_call=steps_per_call,
        key=7,
    )


def outcome(learner: fluxcb.Learner, folder: Path) -> dict[str, str]:
    """Return digests of all state and of the logs by name, without times."""
    learner.callbacks.get(Monitors).close()
    found = {name: _digest(repr(bits)) for name, bits in state_of(learner, ("Monitors",)).items()}
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    found["log.jsonl"] = _digest(json.dumps([{k: v for k, v in line.items() if k != "time"} for line in lines]))
    header, *rows = (folder / "log.csv").read_text().splitlines()
    time_at = header.split(",").index("time")
    found["log.csv"] = _digest("\n".join(",".join(c for i, c in enumerate(r.split(",")) if i != time_at) for r in rows))
    best = fluxcb.checkpoints.load_params(folder / "run" / "min-validation-loss")
    found["best"] = _digest(repr([np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(best)]))
    return found


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def main(folder: str, steps_per_call: str, delay: str) -> None:
    """Start or resume the training, and write `outcome.json`."""
    given = steps_per_call if steps_per_call == "auto" else int(steps_per_call)
    learner = make(Path(folder), given, float(delay))
    (Path(folder) / "begun").touch()
    learner.fit(EPOCHS, resume=True)
    (Path(folder) / "outcome.json").write_text(json.dumps(outcome(learner, Path(folder))))


if __name__ == "__main__":
    main(*sys.argv[1:])
