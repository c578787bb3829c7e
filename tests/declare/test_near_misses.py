"""Calls in the style of other libraries work, or raise an error whose fix works."""

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import DeclarationError, Learner
from fluxcb._calls import entry_point
from fluxcb.callbacks import (
    Checkpointer,
    EarlyStopping,
    MaxSaver,
    Metrics,
    MinSaver,
    Monitors,
    ReduceLROnPlateau,
)
from fluxcb.data import ArrayLoader
from fluxcb.logging import CSVBackend
from fluxcb.stopping import GL, NumberSinceBest
from fluxcb.testing import testlearner

xs = ys = np.zeros((8, 1), np.float32)
model = (lambda key, xs: {"w": jnp.zeros(())}, lambda params, xs: params["w"] * xs)
params, optimizer = {"w": jnp.zeros(())}, optax.sgd(0.1)
training = validation = ArrayLoader(xs, ys, batch_size=4)
LEARNER = (
    "{}, data, callbacks, key, phases, default_callbacks, example_batch, {}steps_per_call, window_bytes, program, "
    "executor, mesh, sharding, peer_timeout, exact_observers"
)
TAKES = {
    "Learner": LEARNER.format("model, loss_fn, optimizer", "inputs, targets, "),
    "Learner.from_loss": LEARNER.format("params, loss_fn, optimizer, model_state", ""),
    "Learner.fit": "epochs, steps, steps_per_epoch, resume, allow",
    "EarlyStopping": "*criteria, patience, metric, phase, mode, train_metric, train_phase",
    "Checkpointer": "folder, steps, epochs, seconds, keep_last, keep_best, keep_every, metric, mode",
    "ArrayLoader": "arrays, *more, batch_size, shuffle, seed, drop_last, device",
}


def loss_fn(outputs, ys):
    return jnp.mean((outputs - ys) ** 2)


def plain_loss(params, batch, key):
    return jnp.mean(params["w"] * batch[0])


def accuracy(outputs, ys):
    """Return the fraction of outputs near the target; the metric of fluxcb needs two or more classes."""
    return (abs(outputs - ys) < 0.5).mean()


def learner(**kwargs: Any) -> Learner:
    return Learner(model, loss_fn, optimizer, data=training, default_callbacks=False, **kwargs)


DATA = "pass the data to the Learner: `Learner(..., data=(training, validation))`, then write `learner.fit(10)`"


def restored_to_the_best():
    learner = testlearner(Metrics(), EarlyStopping(3), MinSaver("runs/1", "loss"))
    learner.fit(3)
    best = learner.callbacks.get(MinSaver).best
    learner.restore("runs/1/min-validation-loss")
    assert best is not None
    assert learner.step == best[0]


@pytest.mark.parametrize(
    ("call", "owner", "what", "fix", "fixed"),
    [
        (
            lambda: Learner(model, loss=loss_fn, optimizer=optimizer),
            "Learner",
            "has no argument `loss`.",
            "write `loss_fn=loss_fn` instead of `loss=...`",
            lambda: Learner(model, loss_fn=loss_fn, optimizer=optimizer),
        ),
        (
            lambda: Learner.from_loss(params, loss=plain_loss, optimizer=optimizer),
            "Learner.from_loss",
            "has no argument `loss`.",
            "write `loss_fn=loss_fn` instead of `loss=...`",
            lambda: Learner.from_loss(params, loss_fn=plain_loss, optimizer=optimizer),
        ),
        (
            lambda: Learner(model, loss_fn, tx=optimizer),
            "Learner",
            "has no argument `tx`.",
            "write `optimizer=optax.adam(1e-3)` instead of `tx=...`",
            lambda: Learner(model, loss_fn, optimizer=optax.adam(1e-3)),
        ),
        (
            lambda: Learner(model, loss_fn, optimizer, training),
            "Learner",
            "takes 3 arguments by position, and was given 4.",
            "pass the others by name: `Learner(model, loss_fn, optimizer, data=...)`",
            lambda: Learner(model, loss_fn, optimizer, data=training),
        ),
        (
            lambda: Learner(model, loss_fn),
            "Learner",
            "was not given `optimizer`.",
            "write `Learner(model, loss_fn, optimizer)`",
            lambda: Learner(model, loss_fn, optimizer),
        ),
        (
            lambda: learner(epochs=10),
            "Learner",
            "has no argument `epochs`.",
            "pass the epochs to `fit`: `learner.fit(10)`",
            lambda: learner().fit(10),
        ),
        (
            lambda: learner(metrics=["accuracy"]),
            "Learner",
            "has no argument `metrics`.",
            "add the metrics to the callbacks: `callbacks=[Metrics(accuracy)]`",
            lambda: learner(callbacks=[Metrics(accuracy)]),
        ),
        (
            lambda: learner(logger="csv"),
            "Learner",
            "has no argument `logger`.",
            'add `Monitors` to the callbacks: `callbacks=[Monitors(CSVBackend("log.csv"))]`',
            lambda: Learner(model, loss_fn, optimizer, data=training, callbacks=[Monitors(CSVBackend("log.csv"))]),
        ),
        (
            lambda: learner(validation_data=validation),
            "Learner",
            "has no argument `validation_data`.",
            "pass it with the training data: `data=(training, validation)`",
            lambda: Learner(model, loss_fn, optimizer, data=(training, validation)),
        ),
        (
            lambda: Learner(model, loss_fn, optimizer, train_data=training, seed=1),
            "Learner",
            "has no arguments `train_data` and `seed`.",
            "write `data=training` instead of `train_data=...`, and write `key=1` instead of `seed=...`",
            lambda: Learner(model, loss_fn, optimizer, data=training, key=1),
        ),
        (
            lambda: learner(step_per_call=1),
            "Learner",
            "has no argument `step_per_call`.",
            "write `steps_per_call=...` instead of `step_per_call=...`",
            lambda: learner(steps_per_call=1),
        ),
        (
            lambda: learner(strategy="ddp"),
            "Learner",
            "has no argument `strategy`.",
            "pass a mesh of devices to the Learner: `mesh=fluxcb.mesh(data=-1)`",
            lambda: learner(mesh=fluxcb.mesh(data=-1)),
        ),
        (
            lambda: learner().fit(training, epochs=3),
            "Learner.fit",
            "was given `epochs` twice: by position and by name.",
            DATA,
            lambda: learner().fit(10),
        ),
        (
            lambda: learner().fit(xs, ys),
            "Learner.fit",
            "takes 1 argument by position, and was given 2.",
            DATA,
            lambda: learner().fit(10),
        ),
        (
            lambda: learner().fit(epochs=3, validation_data=validation, batch_size=3),
            "Learner.fit",
            "has no arguments `validation_data` and `batch_size`.",
            f"{DATA}, and pass a loader of batches to the Learner: "
            "`data=fluxcb.data.ArrayLoader((xs, ys), batch_size=3)`",
            lambda: learner().fit(epochs=3),
        ),
        (
            lambda: learner().fit(max_epochs=3),
            "Learner.fit",
            "has no argument `max_epochs`.",
            "write `epochs=3` instead of `max_epochs=...`",
            lambda: learner().fit(epochs=3),
        ),
        (
            lambda: EarlyStopping(monitor="val_loss", patience=3),
            "EarlyStopping",
            "has no argument `monitor`.",
            'write `metric="loss"` instead of `monitor=...`',
            lambda: testlearner(Metrics(), EarlyStopping(metric="loss", patience=3)),
        ),
        (
            lambda: EarlyStopping(3, min_delta=0.1),
            "EarlyStopping",
            "has no argument `min_delta`.",
            "leave out `min_delta=...`; every better value counts as an improvement",
            lambda: testlearner(Metrics(), EarlyStopping(3)),
        ),
        (
            lambda: EarlyStopping(3, restore_best_weights=True),
            "EarlyStopping",
            "has no argument `restore_best_weights`.",
            'leave out `restore_best_weights=...`, add `MinSaver("runs/1", "loss")` to the callbacks, and call '
            '`learner.restore("runs/1/min-validation-loss")` after `fit`; for another metric, write its name, or '
            "`MaxSaver` if high values of it are good",
            restored_to_the_best,
        ),
        (
            lambda: Checkpointer(dirpath="runs/1"),
            "Checkpointer",
            "has no argument `dirpath`.",
            'write `folder="runs/1"` instead of `dirpath=...`',
            lambda: Checkpointer(folder="runs/1"),
        ),
        (
            lambda: Checkpointer("runs/1", monitor="val_loss", save_top_k=1),
            "Checkpointer",
            "has no arguments `monitor` and `save_top_k`.",
            'write `keep_best=1, metric="loss"` instead of `monitor=...` and `save_top_k=...`; to load the best model, '
            'which is often not the newest one, also add `MinSaver("runs/1", "loss")`, and load '
            '`"runs/1/min-validation-loss"`',
            lambda: testlearner(Metrics(), Checkpointer("runs/1", keep_best=1, metric="loss")),
        ),
        (
            lambda: ArrayLoader((xs, ys), batchsize=4),
            "ArrayLoader",
            "has no argument `batchsize`.",
            "write `batch_size=...` instead of `batchsize=...`",
            lambda: ArrayLoader((xs, ys), batch_size=4),
        ),
        (
            lambda: ArrayLoader(x=xs, y=ys, batch_size=4),
            "ArrayLoader",
            "has no arguments `x` and `y`.",
            "pass the arrays by position: `ArrayLoader(xs, ys, batch_size=32)`",
            lambda: ArrayLoader(xs, ys, batch_size=32),
        ),
    ],
)
def test_similar_call_raises_with_working_fix(call, owner, what, fix, fixed, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with refused(DeclarationError, f"`{owner}` {what}\n  why:   it takes {TAKES[owner]}\n  fix:   {fix}"):
        call()
    fixed()


@pytest.mark.parametrize("cls", [MinSaver, MaxSaver])
def test_error_names_class_that_inherits_constructor(cls, refused):
    with refused(
        DeclarationError,
        f"`{cls.__name__}` has no argument `filepath`.\n"
        "  why:   it takes folder, metric, name\n"
        '  fix:   write `folder="runs/1"` instead of `filepath=...`',
    ):
        cls(filepath="runs/1")


@pytest.mark.parametrize(
    ("call", "what", "fix"),
    [
        (lambda: Metrics(metrics=[accuracy]), "`Metrics` has no argument `metrics`.", "metrics"),
        (lambda: Monitors(backends=[]), "`Monitors` has no argument `backends`.", "backends"),
    ],
)
def test_positional_values(call, what, fix):
    with pytest.raises(DeclarationError) as caught:
        call()
    assert caught.value.what == what
    assert caught.value.fix == (f"pass the values by position, without `{fix}=`",)


def test_patience_is_accepted_by_early_stopping(refused):
    assert EarlyStopping(patience=3).criteria == EarlyStopping(3).criteria == (NumberSinceBest(3),)
    assert EarlyStopping(GL(5), patience=3, metric="accuracy", mode="max").criteria == (
        GL(5).with_mode("max"),
        NumberSinceBest(3, mode="max"),
    )
    with refused(
        DeclarationError,
        "`patience` of `EarlyStopping` must be a number of epochs, not 2.5.\n"
        "  fix:   write e.g. `EarlyStopping(3)`, `EarlyStopping(GL(5), TimeLimit(3600))`, "
        '`EarlyStopping(("accuracy", 3))`',
    ):
        EarlyStopping(patience=2.5)


def test_type_error_inside_constructor_is_unchanged():
    class Owner:
        @entry_point
        def method(self, value: int) -> str:
            return value + "text"  # pyright: ignore[reportOperatorIssue]  # this is the point

    with pytest.raises(TypeError, match="unsupported operand") as caught:
        Owner().method(1)
    assert caught.value.__context__ is None
    assert fluxcb.FluxcbError not in type(caught.value).__mro__


def test_call_error_has_no_context():
    with pytest.raises(DeclarationError) as caught:
        ReduceLROnPlateau(monitor="loss")
    assert caught.value.__context__ is None
    assert [Path(entry.path) for entry in caught.traceback] == [Path(__file__)]
