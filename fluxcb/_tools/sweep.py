"""`fluxcb sweep`: the demo's network with several learning rates, trained in one program."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import optax
import rich

from fluxcb._compile.hyperparams import inject
from fluxcb._run.learner import Learner
from fluxcb._tools.demo import apply, cross_entropy, init, new_folder
from fluxcb.callbacks import ClipGradients, Metrics, accuracy
from fluxcb.data import ArrayLoader, digits
from fluxcb.populations.population import Population

__all__ = ["RATES", "run_sweep"]

RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 3e-1)
"""The learning rates of the sweep by default."""


def run_sweep(rates: Sequence[float], *, epochs: int, seed: int, out: Path) -> Path:
    """Train the network with each learning rate, and write the history and the loss curves.

    Args:
        rates: The learning rates.
        epochs: Epochs to train.
        seed: Seed of the parameters and of the data's order.
        out: Folder in which the folder for this run is created.

    Returns:
        The run's folder.
    """
    console = rich.get_console()
    folder = new_folder(out, "sweep")
    training, validation = digits()

    def make_learner(learning_rate: float) -> Learner:
        return Learner(
            (init, apply),
            cross_entropy,
            inject(optax.adam, learning_rate=learning_rate),
            data=(
                ArrayLoader(training, batch_size=32, seed=seed),
                ArrayLoader(validation, batch_size=120, shuffle=False),
            ),
            callbacks=[Metrics(accuracy), ClipGradients(1.0)],
            key=seed,
        )

    population = Population(make_learner, learning_rate=list(rates))
    histories = population.fit(epochs)
    best = population.best("accuracy")
    reached = histories[best]["validation/accuracy"][-1]
    console.print(
        f"\nBest: learning_rate={rates[best]:g}. {reached:.1%} of the validation digits are classified correctly.",
        style="bold",
        highlight=False,
        soft_wrap=True,
    )
    rows = [{"learning_rate": rate, **history.to_dict()} for rate, history in zip(rates, histories, strict=True)]
    (folder / "members.json").write_text(f"{json.dumps(rows, indent=1)}\n", encoding="utf-8")
    population.plot("validation/loss").save(folder / "loss.svg")
    for name, content in {"members.json": "the history of each member", "loss.svg": "the loss curves"}.items():
        console.print(f"wrote {folder / name}: {content}", highlight=False, markup=False, soft_wrap=True)
    return folder
