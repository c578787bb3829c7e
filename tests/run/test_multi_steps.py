"""`optax.MultiSteps`, which accumulates gradients inside the optimizer, beside callbacks that count updates."""

import re

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import Learner
from fluxcb.callbacks import AccumulateGradients, LearningRate, Metrics, ParameterEMA, Scheduler

STEPS, EVERY = 8, 4


def build(optimizer, *callbacks):
    return Learner.from_loss(
        {"w": jnp.zeros(())},
        lambda params, batch: jnp.mean(params["w"] * batch),
        optimizer,
        data=[np.ones(2, np.float32)] * STEPS,
        callbacks=callbacks,
        default_callbacks=False,
    )


def scheduler():
    return Scheduler({LearningRate: optax.linear_schedule(1.0, 0.0, 2)}, count="updates")


@pytest.mark.parametrize(
    ("make", "label"),
    [(scheduler, 'Scheduler(learning_rate, count="updates")'), (lambda: ParameterEMA(0.5), "ParameterEMA(0.5)")],
)
def test_callback_that_counts_updates_is_a_warning_whose_fix_works(make, label):
    optimizer = fluxcb.inject(optax.sgd, learning_rate=1.0)
    text = (
        f"{label} counts updates, but `optax.MultiSteps` accumulates gradients inside the optimizer, where callbacks "
        "do not see it. Every step counts as an update. Remove `optax.MultiSteps`, and add `AccumulateGradients(n)` to "
        "the callbacks."
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(text)}$"):
        build(optax.MultiSteps(optimizer, EVERY), make())
    learner = build(optimizer, make(), AccumulateGradients(EVERY))
    learner.fit(1)
    (entry,) = (entry for name, entry in learner.cbstate.items() if name in ("ema", "learning_rate_updates"))
    assert (entry["updates"] if isinstance(entry, dict) else entry) == STEPS // EVERY


def test_other_callbacks_are_no_warning():
    build(optax.MultiSteps(optax.sgd(1.0), EVERY), Metrics()).fit(1)
