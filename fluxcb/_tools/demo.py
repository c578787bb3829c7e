"""`fluxcb demo`: a small training run that shows what callbacks do, and writes the measured values to files."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import rich

from fluxcb._compile.hyperparams import inject
from fluxcb._declare.access import Read, Write
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import BackwardEnd, EpochEnd, Event
from fluxcb._declare.handlers import on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import Phase, TrainingPhase, ValidationPhase
from fluxcb._run.learner import Learner
from fluxcb.callbacks import (
    ClipGradients,
    LearningRate,
    Metrics,
    ModelSummary,
    ParameterEMA,
    Scheduler,
    accuracy,
    onecycle,
)
from fluxcb.data import ArrayLoader, digits
from fluxcb.plots.panel import Panel
from fluxcb.plots.picture import Picture

__all__ = ["apply", "build", "cross_entropy", "init", "new_folder", "run_demo"]

_HIDDEN = 128


class GradientNorm(Callback):
    """Store the norm of the latest gradients. Runs inside the compiled training step."""

    def stateaccess(self) -> Mapping[str, Any]:
        return {"step": {"grads": Read()}, "cbstate": {"gradient_norm": Write()}}

    def init(self, learner: LearnerView) -> None:
        learner.cbstate.gradient_norm = jnp.zeros(())

    @on(BackwardEnd, TrainingPhase)
    def measure(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        learner.cbstate.gradient_norm = optax.tree.norm(learner.step.grads)


class EpochNotes(Callback):
    """Record the learning rate and the gradient norm at the end of each epoch, on the host.

    Args:
        notes: The list to append to.
    """

    def __init__(self, notes: list[dict[str, float]]) -> None:
        self.notes = notes

    def stateaccess(self) -> Mapping[str, Any]:
        return {"hyperparams": {"learning_rate": Read()}, "cbstate": {"gradient_norm": Read()}}

    @on(EpochEnd, TrainingPhase)
    def note(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        rate, norm = learner.hyperparams.learning_rate, learner.cbstate.gradient_norm
        self.notes.append({"learning_rate": float(rate), "gradient_norm": float(norm)})

    def __repr__(self) -> str:
        return "EpochNotes()"


def build(*, epochs: int, seed: int, notes: list[dict[str, float]]) -> Learner:
    """Return the demo's Learner: an MLP for handwritten digits.

    Args:
        epochs: Length of the learning rate's cycle (epochs).
        seed: Seed of the parameters and of the data's order.
        notes: Receives the learning rate and the gradient norm at the end of each epoch.
    """
    training, validation = digits()
    batches = ArrayLoader(training, batch_size=32, seed=seed)
    return Learner(
        (init, apply),
        cross_entropy,
        inject(optax.adam, learning_rate=1e-3),
        data=(batches, ArrayLoader(validation, batch_size=120, shuffle=False)),
        callbacks=[
            ModelSummary(),
            GradientNorm(),
            EpochNotes(notes),
            Metrics(accuracy),
            Scheduler({LearningRate: onecycle(epochs * len(batches), 1e-2)}),
            ClipGradients(1.0),
            ParameterEMA(0.98),
        ],
        key=seed,
    )


def run_demo(*, epochs: int = 20, out: str | Path = "runs", seed: int = 0) -> Path:
    """Train, show the progress, and write the history, the loss curve and the callback graph.

    Args:
        epochs: Epochs to train.
        out: Folder in which the folder for this run is created.
        seed: Seed of the run.

    Returns:
        The run's folder.
    """
    console = rich.get_console()
    folder = new_folder(Path(out), "demo")  # before training, to report a folder that cannot be written immediately
    notes: list[dict[str, float]] = []
    learner = build(epochs=epochs, seed=seed, notes=notes)
    graph = learner.callbacks.graph
    console.print("Which callback runs when, and why, derived from what each callback declares:\n", style="bold")
    console.print(str(graph), highlight=False, markup=False, soft_wrap=True)
    console.print()
    learner.fit(epochs)
    history = _history(learner, notes)
    reached = history["epochs"][-1]["validation"]["accuracy"]
    console.print(
        f"\n{reached:.1%} of the validation digits are classified correctly.",
        style="bold",
        highlight=False,
        soft_wrap=True,
    )
    files = {
        "history.json": f"{json.dumps(history, indent=1)}\n",
        "graph.svg": graph.render("svg"),
        "graph.html": graph.render("html"),
    }
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8")
    _curves(history).save(folder / "loss.svg")
    contents = {
        "history.json": "metrics of each epoch and step",
        "loss.svg": "the loss curves",
        "graph.svg": "the callback graph",
        "graph.html": "the callback graph, by moment",
    }
    for name, content in contents.items():
        console.print(f"wrote {folder / name}: {content}", highlight=False, markup=False, soft_wrap=True)
    # `uv run` sets this variable. Its environment is usually not activated in the shell.
    run = "uv run fluxcb" if "UV_RUN_RECURSION_DEPTH" in os.environ else "fluxcb"
    console.print(f"Draw the metrics with `{run} plot {folder}`.", highlight=False, markup=False, soft_wrap=True)
    return folder


def init(key: Any, xs: Any) -> Any:
    """Return the initial parameters of the network."""
    first, second = jax.random.split(key)
    he = jax.nn.initializers.he_normal()
    return {
        "hidden": {"w": he(first, (xs.shape[-1], _HIDDEN)), "b": jnp.zeros(_HIDDEN)},
        "out": {"w": he(second, (_HIDDEN, 10)), "b": jnp.zeros(10)},
    }


def apply(params: Any, xs: Any) -> Any:
    """Return the outputs of the network, `float32[batch, 10]`."""
    hidden = jax.nn.relu(xs @ params["hidden"]["w"] + params["hidden"]["b"])
    return hidden @ params["out"]["w"] + params["out"]["b"]


def cross_entropy(outputs: Any, ys: Any) -> Any:
    """Return the mean cross entropy (nats)."""
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(outputs, ys))


def _history(learner: Learner, notes: list[dict[str, float]]) -> dict[str, Any]:
    per_step = learner.cbstate["metrics_step"][TrainingPhase]
    per_epoch = learner.cbstate["metrics_epoch"]
    rows = [
        {
            "epoch": epoch,
            **noted,
            "training": per_epoch[TrainingPhase].at(epoch),
            "validation": per_epoch[ValidationPhase].at(epoch),
        }
        for epoch, noted in enumerate(notes, 1)
    ]
    return {"epochs": rows, "steps": per_step.steps, **{name: per_step[name] for name in per_step}}


def _curves(history: dict[str, Any]) -> Picture:
    per_epoch = len(history["steps"]) / len(history["epochs"])

    def of_epochs(phase: str) -> list[tuple[float, float]]:
        return [(row["epoch"] * per_epoch, row[phase]["loss"]) for row in history["epochs"]]

    curves = {
        "training, each step": list(zip(history["steps"], history["loss"], strict=True)),
        "training, mean of each epoch": of_epochs("training"),
        "validation": of_epochs("validation"),
    }
    return Picture(Panel(curves, "step", "loss (nats)"), title="fluxcb demo: handwritten digits")


def new_folder(out: Path, name: str) -> Path:
    """Create and return a new folder whose name is followed by the current time."""
    stamp = time.strftime(f"{name}-%Y%m%d-%H%M%S")
    for suffix in ("", *(f"-{n}" for n in range(2, 1000))):
        folder = out / f"{stamp}{suffix}"
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise FileExistsError(f"{out / stamp} and its successors exist")
