"""Every public callback keeps the laws of `fluxcb.testing.check_callback`."""

import io

import jax
import optax
import pytest

import fluxcb.callbacks as library
from fluxcb import Append, Callback, Read
from fluxcb.events import StepEnd
from fluxcb.testing import check_callback, testlearner


def log_loss(learner):
    learner.cbstate.losses.append(float(learner.step.loss))


class Losses(Callback):
    def stateaccess(self):
        return {"cbstate": {"losses": Append()}}

    def init(self, learner):
        if "losses" not in learner.cbstate:
            learner.cbstate.losses = []


# What cannot be made without arguments, or needs company; the others are found by themselves.
HOW = {
    "ClipGradients": {"make": lambda: library.ClipGradients(0.5)},
    "CustomCallback": {
        "make": lambda: library.CustomCallback(
            log_loss, StepEnd, access={"step": {"loss": Read()}, "cbstate": {"losses": Append()}}
        ),
        "needs": [Losses],
    },
    "Metrics": {"make": lambda: library.Metrics(library.Metric(lambda outputs, ys: outputs.mean(), name="mean"))},
    "MetricsPrinter": {"make": lambda: library.MetricsPrinter(io.StringIO()), "needs": [library.Metrics]},
    "ModelSummary": {"make": lambda: library.ModelSummary(io.StringIO())},
    "ProgressBar": {"make": lambda: library.ProgressBar(io.StringIO(), interval=1e-9)},
    "Scheduler": {
        "make": lambda: library.Scheduler({library.LearningRate: optax.linear_schedule(0.1, 0.01, 10)}),
    },
    "ToDevice": {
        "make": lambda: library.ToDevice(jax.devices()[0]),
    },
}


def found():
    named = {name: getattr(library, name) for name in library.__all__}
    return sorted(n for n, value in named.items() if isinstance(value, type) and issubclass(value, Callback))


@pytest.mark.parametrize("name", found())
def test_a_public_callback_keeps_the_laws(name):
    how = HOW.get(name, {})
    check_callback(**{"make": getattr(library, name), **how})


def test_every_entry_is_about_a_public_callback():
    assert set(HOW) <= set(found())


def test_the_default_callbacks_keep_the_laws_of_a_set():
    learner = testlearner(default_callbacks=True)
    classes = [type(callback) for callback in learner.callbacks]
    assert classes == [type(callback) for callback in library.default_callbacks()]
