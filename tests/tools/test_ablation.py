"""`fluxcb.ablate` and `fluxcb ablate`."""

import json

import jax.numpy as jnp
import numpy as np
import pytest

import fluxcb
from fluxcb import DeclarationError, in_order
from fluxcb._tools.cli import main
from fluxcb.callbacks import Checkpointer, ClipGradients, Metrics, MetricsPrinter, ParameterEMA
from fluxcb.testing import testlearner
from tests.run.test_switches import clipped_descent

MODULE = """
from fluxcb.callbacks import ClipGradients, Metrics
from fluxcb.testing import testlearner

def make_learner(seed=0):
    return testlearner(ClipGradients(0.1), Metrics(), key=seed)

learner = make_learner()
"""


def test_effect_agrees_with_hand_written_trainings():
    [effect] = fluxcb.ablate(lambda: testlearner(ClipGradients(0.5), Metrics()), ["ClipGradients"], epochs=2)
    data = testlearner().data
    start = {"w": jnp.zeros(()), "b": jnp.zeros(())}
    batches = list(data["training"]) * 2

    def validated(limit):
        params = clipped_descent(start, batches, limit)
        outputs = [(params["w"] * xs + params["b"] - ys) ** 2 for xs, ys in data["validation"]]
        return np.array([params["b"], params["w"]]), np.mean(outputs)

    (clipped, clipped_loss), (plain, plain_loss) = validated(0.5), validated(np.inf)
    np.testing.assert_allclose(effect.metrics["validation/loss"], (clipped_loss, plain_loss), rtol=1e-4)
    distance = np.linalg.norm(clipped - plain) / np.linalg.norm(clipped)
    np.testing.assert_allclose(effect.params, distance, rtol=1e-4)
    assert (effect.callback, effect.seed, effect.identical) == ("ClipGradients", None, False)


def test_observer_is_identical_and_output_is_written_by_no_training(tmp_path, capsys):
    def make(seed):
        average = in_order(ParameterEMA(), Metrics())
        return testlearner(average, ClipGradients(0.5), MetricsPrinter(), Checkpointer(tmp_path / "run"), key=seed)

    result = fluxcb.ablate(make, ["ParameterEMA"], steps=4, seeds=(0, 1))
    assert [(effect.seed, effect.params, effect.identical) for effect in result] == [(0, 0.0, True), (1, 0.0, True)]
    assert not (tmp_path / "run").exists()
    assert capsys.readouterr().out == ""
    text = str(result)
    assert "identical" in text
    assert "validation/loss" in text
    assert "time (s)" in text


def test_without_names_every_callback_that_can_be_disabled_alone_is_compared():
    result = fluxcb.ablate(lambda: testlearner(ClipGradients(0.5), default_callbacks=True), epochs=1)
    assert [effect.callback for effect in result] == ["ClipGradients", "Metrics", "Recorder", "StopOnNaNLoss"]


def test_bad_arguments_raise():
    def message(*args, **kwargs):
        with pytest.raises(DeclarationError) as raised:
            fluxcb.ablate(*args, **kwargs)
        return str(raised.value)

    assert message(lambda: 3, epochs=1) == (
        "`make_learner` must return a Learner, not 3.\n  fix:   pass a function that builds a new Learner at each call"
    )
    assert message(testlearner) == (
        "`ablate` takes exactly one of epochs and steps.\n  fix:   write e.g. `ablate(make_learner, epochs=3)`"
    )
    assert message(testlearner, "Metrics", epochs=1) == (
        "`names` is a list of names, not 'Metrics'.\n  fix:   write `['Metrics']`"
    )
    assert "`steps` of `ablate` must be a whole number of at least 1, not 0." in message(testlearner, steps=0)
    assert "'Metrcs' is not the name of a callback. Did you mean `Metrics`?" in message(
        lambda: testlearner(Metrics()), ["Metrcs"], epochs=1
    )


def test_command(tmp_path, monkeypatch, capsys):
    (tmp_path / "ablated_module.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    arguments = ["ablate", "ablated_module:make_learner", "ClipGradients", "--steps", "2"]
    assert main([*arguments, "--seeds", "0", "1", "--json"]) == 0
    effects = json.loads(capsys.readouterr().out)
    assert [(effect["callback"], effect["seed"]) for effect in effects] == [("ClipGradients", 0), ("ClipGradients", 1)]
    assert main(arguments) == 0
    assert "ClipGradients" in capsys.readouterr().out
    assert main(["ablate", "ablated_module:learner", "--steps", "2"]) == 2
    assert "is not a function" in capsys.readouterr().err
