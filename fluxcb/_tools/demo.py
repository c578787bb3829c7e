"""`fluxcb demo`: a small training that shows what callbacks do, and leaves its history behind."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import rich

from fluxcb._compile.hyperparams import inject
from fluxcb._declare.access import Read
from fluxcb._declare.events import EpochEnd
from fluxcb._declare.phases import TrainingPhase, ValidationPhase
from fluxcb._run.learner import Learner
from fluxcb._tools.curve import curve_svg
from fluxcb.callbacks import (
    CustomCallback,
    LearningRate,
    Metrics,
    ModelSummary,
    ParameterEMA,
    Scheduler,
    SmoothLoss,
    accuracy,
    onecycle,
)
from fluxcb.data import ArrayLoader, digits

__all__ = ["build", "run_demo"]

_HIDDEN = 128


def build(*, epochs: int, seed: int, rates: list[float]) -> Learner:
    """Return the demo's Learner: an MLP for handwritten digits.

    Args:
        epochs: Length of the learning rate's cycle (epochs).
        seed: Seed of the parameters and of the data's order.
        rates: Gets the learning rate at the end of each epoch.
    """
    training, validation = digits()
    batches = ArrayLoader(training, batch_size=32, seed=seed)
    return Learner(
        (_init, _apply),
        _cross_entropy,
        inject(optax.adam, learning_rate=1e-3),
        data=(batches, ArrayLoader(validation, batch_size=120, shuffle=False)),
        callbacks=[
            ModelSummary(),
            Metrics(accuracy, SmoothLoss()),
            Scheduler({LearningRate: onecycle(epochs * len(batches), 1e-2)}),
            ParameterEMA(0.98),
            CustomCallback(
                lambda learner: rates.append(float(learner.hyperparams.learning_rate)),
                EpochEnd,
                TrainingPhase,
                access={"hyperparams": {"learning_rate": Read()}},
                name="note_rate",
            ),
        ],
        key=seed,
    )


def run_demo(*, epochs: int = 20, out: str | Path = "runs", seed: int = 0) -> Path:
    """Train, show what happens, and write the history and the loss curve.

    Args:
        epochs: Epochs to train.
        out: Folder in which a folder for this run is made.
        seed: Seed of the run.

    Returns:
        The run's folder.
    """
    console = rich.get_console()
    folder = _folder(Path(out))  # before training, so that a folder that cannot be written is told at once
    rates: list[float] = []
    learner = build(epochs=epochs, seed=seed, rates=rates)
    console.print("Who runs when, and why; derived from what each callback declares:\n", style="bold")
    console.print(learner.explain(), highlight=False, markup=False, soft_wrap=True)
    console.print()
    began = time.perf_counter()
    learner.fit(epochs)
    seconds = time.perf_counter() - began
    history = _history(learner, rates)
    (folder / "history.json").write_text(json.dumps(history, indent=1) + "\n", encoding="utf-8")
    (folder / "loss.svg").write_text(_curve(history), encoding="utf-8")
    reached = history["epochs"][-1]["validation"]["accuracy"]
    console.print(
        f"\n{learner.epoch} epochs, {learner.step} steps in {seconds:.1f} s (compiling included): "
        f"{reached:.1%} of the validation digits are right.",
        style="bold",
        highlight=False,
        soft_wrap=True,
    )
    for name in ("history.json", "loss.svg"):
        console.print(f"wrote {folder / name}", highlight=False, soft_wrap=True)
    return folder


def _init(key: Any, xs: Any) -> Any:
    first, second = jax.random.split(key)
    he = jax.nn.initializers.he_normal()
    return {
        "hidden": {"w": he(first, (xs.shape[-1], _HIDDEN)), "b": jnp.zeros(_HIDDEN)},
        "out": {"w": he(second, (_HIDDEN, 10)), "b": jnp.zeros(10)},
    }


def _apply(params: Any, xs: Any) -> Any:
    hidden = jax.nn.relu(xs @ params["hidden"]["w"] + params["hidden"]["b"])
    return hidden @ params["out"]["w"] + params["out"]["b"]


def _cross_entropy(outputs: Any, ys: Any) -> Any:
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(outputs, ys))


def _history(learner: Learner, rates: list[float]) -> dict[str, Any]:
    per_step = learner.cbstate["metrics_step"][TrainingPhase]
    per_epoch = learner.cbstate["metrics_epoch"]
    rows = [
        {
            "epoch": epoch,
            "learning_rate": rate,
            "training": per_epoch[TrainingPhase].at(epoch),
            "validation": per_epoch[ValidationPhase].at(epoch),
        }
        for epoch, rate in enumerate(rates, 1)
    ]
    return {"epochs": rows, "steps": per_step.steps, **{name: per_step[name] for name in per_step}}


def _curve(history: dict[str, Any]) -> str:
    per_epoch = len(history["steps"]) / len(history["epochs"])
    validation = [(row["epoch"] * per_epoch, row["validation"]["loss"]) for row in history["epochs"]]
    return curve_svg(
        {
            "training, each step": list(zip(history["steps"], history["loss"], strict=True)),
            "training, smoothed": list(zip(history["steps"], history["smooth_loss"], strict=True)),
            "validation": validation,
        },
        title="fluxcb demo: handwritten digits",
        x_label="step",
        y_label="loss (nats)",
    )


def _folder(out: Path) -> Path:
    """Make and return a folder that is not there yet, named after the time."""
    stamp = time.strftime("demo-%Y%m%d-%H%M%S")
    for suffix in ("", *(f"-{n}" for n in range(2, 1000))):
        folder = out / f"{stamp}{suffix}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise FileExistsError(f"{out / stamp} and its successors exist")
