"""`FitSummary` warns about fits that have not changed the parameters, and about averages of the initial parameters."""

import io

import jax.numpy as jnp
import optax
import pytest

import fluxcb
from fluxcb import Append, Callback, Read, on
from fluxcb.callbacks import FitSummary, Metrics, ParameterEMA
from fluxcb.events import BackwardEnd
from fluxcb.phases import TrainingPhase


class Skips(Callback):
    """Skip the steps whose loss is above a limit."""

    def __init__(self, limit):
        self.limit = limit

    def stateaccess(self):
        return {"step": {"loss": Read(), "skip": Append()}}

    @on
    def skip(self, event: BackwardEnd, phase: TrainingPhase, learner):
        learner.step.skip = learner.step.loss > self.limit

    def __repr__(self):
        return f"Skips({self.limit})"


def warned(*callbacks):
    """Return the warnings of a fit with 2 epochs of 2 steps. The loss begins at 1 and decreases by 0.1 in each step."""
    learner = fluxcb.Learner.from_loss(
        {"w": jnp.ones(())},
        lambda params, batch: jnp.mean(params["w"] * batch),
        optax.sgd(0.1),
        data=([jnp.ones(2)] * 2, [jnp.ones(2)]),
        callbacks=[*callbacks, FitSummary(file := io.StringIO())],
        default_callbacks=False,
    )
    learner.fit(2)
    return [line for line in file.getvalue().splitlines() if line.startswith("Warning")]


def test_fit_in_which_all_steps_are_skipped():
    assert warned(Metrics(), Skips(0.5)) == [
        "Warning: all 4 steps were skipped, so the parameters have not changed. `step.skip` is set by Skips(0.5)."
    ]
    assert warned(Metrics(), Skips(1.5)) == []
    assert warned(Skips(0.5)) == []  # without metrics, nothing tells that the steps were skipped


@pytest.mark.parametrize(
    ("average", "share"),
    [
        (ParameterEMA(0.999), "100%"),  # 0.999**4 is 0.996006
        (ParameterEMA(0.9), "66%"),  # 0.6561
        (ParameterEMA(0.8), None),  # 0.4096
        (ParameterEMA(0.999, debias=True), None),
        (ParameterEMA(0.999, validate=False), None),
    ],
)
def test_average_that_mainly_consists_of_the_initial_parameters(average, share):
    text = (
        f"Warning: after only 4 updates, the initial parameters still make up {share} of the average that validation "
        f"and `learner.model` use. Write `ParameterEMA({average.decay}, debias=True)`, or train longer."
    )
    assert warned(Metrics(), average) == ([] if share is None else [text])
