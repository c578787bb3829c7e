"""Small programs that raise an error, and the edited programs after each fix that the message suggests.

A fix often contains code between backticks. The edited program must contain this code literally, where `...` matches
anything, so that the tested program always matches the message.
"""

import contextlib
import re
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import DeclarationError, FluxcbError, Learner

XS = np.linspace(-1, 1, 16, dtype=np.float32)[:, None]
BATCHES = [(x, 3 * x) for x in np.split(XS, 4)]
PAIR = (lambda key, xs: {"w": jnp.zeros((1, 1))}, lambda params, xs: xs @ params["w"])


def loss_fn(outputs: Any, ys: Any) -> Any:
    return jnp.mean((outputs - ys) ** 2)


@dataclass(frozen=True)
class Row:
    """A program that raises an error, and one program for each line of the error's `fix`.

    Attributes:
        says: A part of the first line of the message.
        broken: The source of the program.
        mended: For each fix, the source of the program with this edit.
        kind: The class of the error.
    """

    says: str
    broken: str
    mended: tuple[str, ...]
    kind: type[FluxcbError]


def row(says: str, broken: str, *mended: str, kind: type[FluxcbError] = DeclarationError) -> Row:
    return Row(says, broken, mended, kind)


def accuracy(outputs: Any, ys: Any) -> Any:
    """Return the fraction of outputs near the target; the metric of fluxcb needs two or more classes."""
    return (abs(outputs - ys) < 0.5).mean()


def learner(*callbacks: Any, **options: Any) -> Learner:
    """Return a Learner whose model has one parameter."""
    model, loss = options.pop("model", PAIR), options.pop("loss_fn", loss_fn)
    optimizer = options.pop("optimizer", None) or fluxcb.inject(optax.sgd, learning_rate=0.1)
    given = {"data": BATCHES, "callbacks": callbacks, "default_callbacks": False, **options}
    return Learner(model, loss, optimizer, **given)


def fit(*callbacks: Any, epochs: int = 1, **options: Any) -> Learner:
    """Return the Learner after one epoch."""
    made = learner(*callbacks, **options)
    made.fit(epochs)
    return made


def from_loss(loss: Any, *callbacks: Any, **options: Any) -> Learner:
    """Return a Learner of one parameter, with a loss function of params, batch and key."""
    params, optimizer = {"w": jnp.ones((1, 1))}, fluxcb.inject(optax.sgd, learning_rate=0.1)
    given = {"data": BATCHES, "callbacks": callbacks, "default_callbacks": False, **options}
    return Learner.from_loss(params, loss, optimizer, **given)


class Tick(fluxcb.Callback):
    """Do nothing at two moments."""

    @fluxcb.on(fluxcb.events.StepEnd | fluxcb.events.Trigger, fluxcb.phases.TrainingPhase)
    def tick(self, event: Any, phase: Any, learner: Any) -> None: ...


def _public(*modules: Any) -> dict[str, Any]:
    return {name: getattr(module, name) for module in modules for name in module.__all__}


def run(source: str, folder: Path) -> None:
    """Run a program with all public names in an empty directory."""
    from fluxcb import callbacks, checkpoints, data, events, logging, phases, plots, stopping

    names = _public(fluxcb, callbacks, checkpoints, data, events, logging, phases, plots, stopping)
    names |= {"fluxcb": fluxcb, "jax": jax, "jnp": jnp, "np": np, "optax": optax}
    names |= {"learner": learner, "fit": fit, "Tick": Tick, "BATCHES": BATCHES, "XS": XS, "PAIR": PAIR}
    names |= {"loss_fn": loss_fn, "from_loss": from_loss}
    folder.mkdir()
    with contextlib.chdir(folder):
        names["accuracy"] = accuracy
        exec(textwrap.dedent(source), names)  # the programs of the tests


def code(line: str) -> list[str]:
    """Return the code between backticks, except code that the fix removes."""
    return re.findall(
        r"`(.+?)`(?!`)", re.sub(r"(leave out|remove|drop|without|instead of) (`.+?`(,? (or|and) )?)+", "", line)
    )


def contains(source: str, found: str) -> bool:
    """Return whether a program contains a piece of code, in which `...` matches anything."""
    pattern = ".*?".join(re.escape(piece) for piece in found.split("..."))
    return re.search(pattern, source, re.DOTALL) is not None


def error_of(source: str, folder: Path) -> FluxcbError:
    """Return the error that a program raises."""
    with pytest.raises(FluxcbError) as raised:
        run(source, folder)
    return raised.value


def check_row(row: Row, folder: Path) -> None:
    """Check that the broken program raises its error, and that each fix in the message resolves it."""
    error = error_of(row.broken, folder / "broken")
    assert type(error) is row.kind
    assert row.says in error.what
    assert len(error.fix) == len(row.mended), error.fix
    for position, (line, mended) in enumerate(zip(error.fix, row.mended, strict=True)):
        absent = [found for found in code(line) if not contains(mended, found)]
        assert not absent, f"{line!r} is not what the mended program does"
        run(mended, folder / f"mended{position}")
