"""Attributes and methods of other libraries that a Learner does not have: the error names the replacement."""

import re
import traceback
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from fluxcb import AccessError, Append, Callback, CancelFitting, Learner, on
from fluxcb.callbacks import Checkpointer, Metrics, ModelSummary, Recorder
from fluxcb.events import EpochEnd
from fluxcb.phases import TrainingPhase
from fluxcb.testing import testlearner


def same(a, b):
    return jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), a, b))


STOP = (
    '`raise CancelFitting("reason")` in a handler of a host event; its callback declares `control`: '
    '`def stateaccess(self): return {"control": Append()}`'
)
RATE = 'write `learner.hyperparams["learning_rate"] = value`'


@pytest.mark.parametrize(
    ("name", "fix"), [("stop_training", STOP), ("should_stop", STOP), ("lr", RATE), ("learning_rate", RATE)]
)
def test_attributes_of_other_libraries_name_replacement(name, fix, refused):
    with refused(
        AccessError,
        f"A Learner has no attribute `{name}` that could be assigned.\n"
        f"  why:   the training would not use it\n"
        f"  fix:   {fix}",
    ):
        setattr(testlearner(), name, 1)


def test_suggested_replacements_work():
    class Stops(Callback):
        def stateaccess(self):
            return {"control": Append()}

        @on
        def stop(self, event: EpochEnd, phase: TrainingPhase, learner):
            raise CancelFitting("reason")

    learner = testlearner(Stops())
    learner.hyperparams["learning_rate"] = 0.25
    learner.fit(3)
    assert (learner.epoch, learner.stop_reason, learner.hyperparams.learning_rate) == (1, "reason", 0.25)


# -- methods of other libraries ----------------------------------------------------------------

CALLS = {
    "save": 'add `Checkpointer("runs/1")` to the callbacks before `fit`; it saves the state at the end of each epoch',
    "save_weights": 'add `Checkpointer("runs/1")` to the callbacks before `fit`, which also saves the parameters',
    "load_weights": 'write `learner.params = fluxcb.checkpoints.load_params("runs/1")`',
    "parameters": "read `learner.params`",
    "load": 'call `learner.restore("runs/1")` with the folder of a `Checkpointer`',
    "compile": "leave the call out; pass the optimizer and the loss function to `Learner`, which compiles the step",
    "summary": "add `ModelSummary()` to the callbacks; it prints the parameters when the fit begins",
    "validate": "call `learner.evaluate()`",
    "train": "call `learner.fit(10)`",
    "state_dict": "read `learner.state`",
    "load_state_dict": "write `learner.state = state`",
}


@pytest.mark.parametrize("name", CALLS)
def test_unknown_method_raises_with_suggestion(name, refused):
    learner = testlearner()
    text = f"A Learner has no attribute `{name}`.\n  fix:   {CALLS[name]}"
    with refused(AttributeError, text):
        getattr(learner, name)
    with pytest.raises(AttributeError) as caught:
        getattr(learner, name)
    assert traceback.format_exception(caught.value)[-1] == f"AttributeError: {text}\n"  # Python adds no suggestion
    assert not hasattr(learner, name)


READ = {
    "train_state": "read `learner.state`",
    "variables": "read `learner.params` and `learner.model_state`",
    "weights": "read `learner.params`",
    "batch_stats": "read `learner.model_state`",
    "tx": "read `learner.opt_state`; the optimizer itself is what you passed to `Learner`",
    "rng": "read `learner.key`",
    "lr": 'read `learner.hyperparams["learning_rate"]`',
    "learning_rate": 'read `learner.hyperparams["learning_rate"]`',
    "progress": "read `learner.step` and `learner.epoch`",
    "global_step": "read `learner.step`",
    "current_epoch": "read `learner.epoch`",
    "loss": 'add `Metrics()` to the callbacks before `fit`, and read `learner.history["training/loss"]`',
    "metrics": 'add `Metrics()` to the callbacks before `fit`, and read e.g. `learner.history["training/loss"]`',
    "test": "call `learner.evaluate(batches)`",
    "eval": "call `learner.evaluate()`",
    "apply_fn": "call `learner.predict(xs)`",
    "train_step": "call `learner.run_step(TrainingPhase(), batch)`",
    "train_epoch": "call `learner.run_epoch(TrainingPhase())`",
    "apply_gradients": "call `learner.run_step(TrainingPhase(), batch)`, which computes and applies the gradients",
    "add_callback": "call `learner.callbacks.add(callback)`",
}


@pytest.mark.parametrize("name", READ)
def test_unknown_attribute_names_code_that_works(name, refused):
    learner = testlearner(Metrics())
    learner.fit(1)
    with refused(AttributeError, f"A Learner has no attribute `{name}`.\n  fix:   {READ[name]}"):
        getattr(learner, name)
    batches = list(learner.data["training"])
    names = {"learner": learner, "TrainingPhase": TrainingPhase, "batches": batches, "batch": batches[0]}
    for code in re.findall("`(learner.+?)`", READ[name]):
        eval(code, {**names, "xs": batches[0][0], "callback": Recorder()})  # noqa: S307 - of this file


def test_other_missing_attributes_raise_attribute_error(refused):
    with refused(AttributeError, "'Learner' object has no attribute 'qqq'"):
        _ = testlearner().qqq  # pyright: ignore[reportAttributeAccessIssue]
    assert not hasattr(Learner.__new__(Learner), "_core")  # as `copy` and `pickle` ask it


def test_attribute_error_inside_property_keeps_message(refused):
    class Own(Learner):
        @property
        def broken(self):
            return getattr(None, "missing")  # noqa: B009

    learner: Any = Own.from_loss({"w": jnp.zeros(())}, lambda params, batch, key: params["w"] ** 2, optax.sgd(0.1))
    with refused(AttributeError, "'NoneType' object has no attribute 'missing'"):
        _ = learner.broken


def test_suggested_methods_exist(tmp_path, capsys):
    learner = testlearner(Checkpointer(tmp_path), Metrics(), ModelSummary())
    learner.fit(1)
    assert "float32" in capsys.readouterr().out
    again = testlearner(Checkpointer(tmp_path), Metrics(), ModelSummary())
    again.restore(tmp_path)
    assert same(again.params, learner.params)
    assert "loss" in again.evaluate()
    again.state = learner.state
    assert again.step == learner.step
