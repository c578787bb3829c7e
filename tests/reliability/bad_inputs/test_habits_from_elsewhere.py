"""Habits from Keras, PyTorch Lightning and plain JAX: the message gives the fluxcb equivalent."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fluxcb import (
    CheckpointError,
    DeclarationError,
    Learner,
    MissingStateError,
    TraceError,
    callbacks_as_hook,
    every,
    phases,
)
from fluxcb.callbacks import (
    Checkpointer,
    ClipGradients,
    EarlyStopping,
    Metrics,
    MinSaver,
    ParameterEMA,
    Recorder,
    ReduceLROnPlateau,
)
from fluxcb.checkpoints import load_params
from fluxcb.phases import TrainingPhase, ValidationPhase
from fluxcb.testing import testlearner

XS, YS = np.ones((8, 3), np.float32), np.zeros(8, np.float32)


def init(key, xs):
    return {"w": jnp.zeros(3), "b": jnp.zeros(())}


def apply(params, xs):
    return xs @ params["w"] + params["b"]


def mse(outputs, ys):
    return jnp.mean((outputs - ys) ** 2)


def learner(loss_fn=mse, optimizer=None, callbacks=()):
    optimizer = optax.sgd(0.1) if optimizer is None else optimizer
    data = ([(XS, YS)], [(XS, YS)])
    return Learner((init, apply), loss_fn, optimizer, data=data, callbacks=callbacks, default_callbacks=False)


def test_key_is_not_passed_as_targets(refused):
    with refused(
        DeclarationError,
        "`loss_fn` takes (model, xs, ys), and is called as `loss_fn(model, batch, *, key, train)`.\n"
        "  why:   `Learner` calls it with outputs and targets, or with the model and the batch; `Learner.from_loss` "
        "calls it with parameters and batch\n"
        "  fix:   write `def loss_fn(model, batch, *, key, train):`",
    ):
        learner(lambda model, xs, ys: mse(model(xs), ys))
    learner(lambda model, batch, *, key, train: mse(model(batch[0]), batch[1])).fit(1)


def test_loss_with_extra_values_raises(refused):
    with pytest.raises(TraceError) as raised:
        learner(lambda outputs, ys: (mse(outputs, ys), outputs)).fit(1)
    assert str(raised.value).endswith(
        "  fix:   return only the loss; a loss function `loss_fn(model, batch)` can also return `(loss, aux)`"
    )
    learner(lambda model, batch: (mse(model(batch[0]), batch[1]), batch[0])).fit(1)


def test_optimizer_of_misspelled_part_raises(refused):
    with refused(
        TraceError,
        "`TrainingPhase.step` calls `learner.apply_updates()`, and the optimizers 'bias' and 'w' both own `params.w`.\n"
        "  why:   `params` has no part 'bias', so this optimizer owns all of it\n"
        "  fix:   name 'bias' after the part that it updates: 'b' or 'w'\n"
        "     or: call `learner.update(grads, wrt=..., optimizer=...)` in a phase of your own",
    ):
        learner(optimizer={"bias": optax.sgd(0.1), "w": optax.sgd(0.1)}).fit(1)
    learner(optimizer={"b": optax.sgd(0.1), "w": optax.sgd(0.1)}).fit(1)


def test_evaluate_with_positional_inputs_and_targets_raises(refused):
    trained = learner()
    with refused(
        DeclarationError,
        "`metrics` of `learner.evaluate` is an array.\n"
        "  why:   the second argument has the metrics; the data is the first one\n"
        "  fix:   for inputs and targets, write a tuple: `learner.evaluate((xs, ys))`",
    ):
        trained.evaluate(XS, YS)
    assert trained.evaluate((XS, YS)) == {"loss": 0.0}


@pytest.mark.parametrize(
    ("phase", "shown", "fix"),
    [
        ("validation", "'validation'", "ValidationPhase"),
        (ValidationPhase, "The class `ValidationPhase`", "ValidationPhase"),
        ("training", "'training'", "TrainingPhase"),
        (TrainingPhase, "The class `TrainingPhase`", "TrainingPhase"),
    ],
)
def test_phase_class_raises(refused, phase, shown, fix):
    text = shown + " is not a phase instance.\n  fix:   pass an instance, e.g. `fluxcb.phases.{}()`"
    with refused(DeclarationError, text.format("ValidationPhase")):  # `evaluate` does not train
        learner().evaluate(phase=phase)
    learner().evaluate(phase=phases.ValidationPhase())
    with refused(DeclarationError, text.format(fix)):
        learner().run_epoch(phase)
    learner().run_epoch(phases.TrainingPhase())


@pytest.mark.parametrize("metric", ["val_los", "training/los", "los"])
def test_abbreviated_metrics_raise(metric):
    with pytest.raises(MissingStateError) as raised:
        testlearner(Metrics(), EarlyStopping(3, metric=metric))
    meant = "training/loss" if metric.startswith("training") else "validation/loss"
    assert str(raised.value).splitlines()[0].endswith(f"Did you mean `{meant}`?")
    testlearner(Metrics(), EarlyStopping(3, metric=meant))


BEST = (
    '; to load the best model, which is often not the newest one, also add `MinSaver("runs/1", "loss")`, '
    'and load `"runs/1/min-validation-loss"`'
)


@pytest.mark.parametrize(
    ("call", "fix"),
    [
        (lambda: Checkpointer("runs/1", every=5), "write `steps=5` instead of `every=...`"),
        (
            lambda: Checkpointer("runs/1", save_best_only=True),
            f"write `keep_best=1` instead of `save_best_only=...`{BEST}",
        ),
        (lambda: every(Recorder(), n=5), "write `steps=5` instead of `n=...`"),
        (lambda: Checkpointer("runs/1", every_n_epochs=7), "write `epochs=7` instead of `every_n_epochs=...`"),
        (lambda: Checkpointer("runs/1", save_freq=7), "write `steps=7` instead of `save_freq=...`"),
        (
            lambda: Checkpointer("runs/1", save_top_k=-1),
            "write `keep_every=1` instead of `save_top_k=...`, which keeps all checkpoints",
        ),
        (lambda: Checkpointer(dirpath="a/b"), 'write `folder="a/b"` instead of `dirpath=...`'),
        (
            lambda: ReduceLROnPlateau(min_delta=0.1),
            'write `threshold=0.1, threshold_mode="abs"` instead of `min_delta=...`',
        ),
        (lambda: ClipGradients(clip_norm=5), "write `max_norm=5` instead of `clip_norm=...`"),
        (lambda: ClipGradients(clip_norm="5"), "write `max_norm=1.0` instead of `clip_norm=...`"),
    ],
)
def test_other_names_of_periods_raise(call, fix):
    with pytest.raises(DeclarationError) as raised:
        call()
    assert str(raised.value).endswith(f"fix:   {fix}")


def test_folder_of_saver_instead_of_checkpoint_raises(tmp_path, refused):
    testlearner(Metrics(), MinSaver(tmp_path)).fit(1)
    best = tmp_path / "min-validation-loss"
    with refused(
        CheckpointError,
        f"There is no checkpoint in {tmp_path}.\n"
        "  why:   a checkpoint is a folder with a number as its name\n"
        f"  fix:   use a directory that contains checkpoints: {str(best)!r}\n"
        "     or: use the directory that was passed to `Checkpointer`",
    ):
        load_params(tmp_path)
    load_params(best)


@pytest.mark.parametrize(("saved", "wrong"), [("run", "run/best"), ("run/best", "run/bets")])
def test_directory_that_does_not_exist_raises_with_its_neighbors(saved, wrong, tmp_path):
    testlearner(Checkpointer(tmp_path / saved)).fit(1)
    with pytest.raises(CheckpointError) as raised:
        load_params(tmp_path / wrong)
    assert f"  fix:   use a directory that contains checkpoints: {str(tmp_path / saved)!r}\n" in str(raised.value)
    load_params(tmp_path / saved)


def test_hook_without_state_raises():
    with pytest.raises(DeclarationError) as raised:
        callbacks_as_hook([ParameterEMA(0.9, validate=False)], {"loss": 0.0})
    assert "  fix:   write `callbacks_as_hook(callbacks, values, state=get, set_state=put)`\n" in str(raised.value)
    state = {"params": {"w": jnp.zeros(())}}
    callbacks_as_hook([ParameterEMA(0.9, validate=False)], {"loss": 0.0}, state=lambda: state, set_state=state.update)


def test_hook_with_gradient_callback_raises():
    state = {"params": {"w": jnp.zeros(())}}
    with pytest.raises(DeclarationError) as raised:
        callbacks_as_hook([ClipGradients(1.0)], {"loss": 0.0}, state=lambda: state, set_state=state.update)
    first = str(raised.value).splitlines()[0]
    assert first == "ClipGradients(1.0) writes `step.grads`, which belongs to the hand-written loop."
