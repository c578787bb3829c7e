"""`plot_schedule` draws the values that training will use."""

import io
import math
import sys

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import rich
from rich.console import Console

from fluxcb import DeclarationError, TraceError
from fluxcb.callbacks import HyperParameter, LearningRate, Scheduler, onecycle
from fluxcb.plots import plot_schedule
from fluxcb.testing import testlearner


def test_short_schedule_has_every_step(plt):
    ax = plot_schedule(lambda step: 0.1 * 0.5**step, 4)
    np.testing.assert_allclose(ax.lines[0].get_xydata(), [(0, 0.1), (1, 0.05), (2, 0.025), (3, 0.0125)], rtol=1e-6)
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_legend()) == ("step", "schedule", None)


def test_long_schedule_is_sampled_at_2000_steps(plt):
    ax = plot_schedule({"rate": optax.cosine_decay_schedule(1.0, 100_000)}, 100_000)
    steps, values = ax.lines[0].get_xydata().T
    assert (len(steps), steps[0], steps[-1]) == (2000, 0, 99_999)
    assert set(np.diff(steps)) == {50.0, 51.0}  # 99999 / 1999 is 50.02
    np.testing.assert_allclose(values, (1 + np.cos(math.pi * steps / 100_000)) / 2, atol=1e-6)


def test_plot_matches_scheduler(plt):
    schedule = optax.join_schedules([optax.linear_schedule(0.0, 0.1, 3), optax.constant_schedule(0.02)], [5])
    learner = testlearner(Scheduler({LearningRate: schedule}))
    ax = plot_schedule({LearningRate: schedule}, 8)
    seen = []
    for _ in range(8):
        learner.fit(steps=1)
        seen.append(learner.hyperparams["learning_rate"])
    np.testing.assert_allclose(ax.lines[0].get_ydata(), seen, rtol=1e-6)
    assert ax.get_ylabel() == "learning rate"


class Momentum(HyperParameter):
    name = "momentum"


def test_several_hyperparameters_have_separate_axes(plt):
    both = {LearningRate: onecycle(100, 1e-3), Momentum: 0.9}
    upper, lower = plot_schedule(both, 100)
    assert upper.figure is lower.figure
    assert (upper.get_ylabel(), lower.get_ylabel()) == ("learning rate", "momentum")
    assert (upper.get_xlabel(), lower.get_xlabel()) == ("", "step")
    np.testing.assert_allclose(lower.lines[0].get_ydata(), [0.9] * 100, rtol=1e-6)
    own = plt.figure().add_subplot()
    assert plot_schedule(both, 100, ax=own) is own
    assert [text.get_text() for text in own.get_legend().get_texts()] == ["learning_rate", "momentum"]


def test_terminal_chart(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    console = Console(file=(file := io.StringIO()), width=60)
    monkeypatch.setattr(rich, "get_console", lambda: console)
    assert repr(plot_schedule({LearningRate: onecycle(100, 1e-3), "b1": 0.9}, 100)) == "<Picture of learning_rate, b1>"
    lines = file.getvalue().splitlines()
    assert [line for line in lines if "■" in line] == ["■ learning_rate", "■ b1"]
    assert [line.split() for line in lines if "step" in line] == [["0", "step", "99"]] * 2


def in_python(step):
    return 0.1 if step < 100 else 0.01


@pytest.mark.parametrize(
    ("schedule", "steps", "error", "message"),
    [
        ({}, 10, DeclarationError, "`plot_schedule` was given no schedule."),
        (0.1, 0, DeclarationError, "`steps` of `plot_schedule` must be a whole number of at least 1, not 0."),
        (
            {3: 0.1},
            10,
            DeclarationError,
            "`plot_schedule` was given a schedule for 3, which is not a hyperparameter or already has a schedule.",
        ),
        (
            {"learning_rate": 0.1, LearningRate: 0.2},
            10,
            DeclarationError,
            f"`plot_schedule` was given a schedule for {LearningRate!r}, which is not a hyperparameter or already "
            "has a schedule.",
        ),
        (
            {HyperParameter: 0.1},
            10,
            DeclarationError,
            f"`plot_schedule` was given a schedule for {HyperParameter!r}, which is not a hyperparameter or already "
            "has a schedule.",
        ),
        (
            "cosine",
            10,
            DeclarationError,
            "The schedule must be a number, or a function that returns one for a step, not a str.",
        ),
        (
            {"rate": lambda step: jnp.ones(2)},
            10,
            DeclarationError,
            "The schedule of `rate` must be a number, or a function that returns one for a step, not an array of "
            "shape (2,).",
        ),
        (
            optax.constant_schedule,  # its maker, not called
            10,
            DeclarationError,
            "The schedule must be a number, or a function that returns one for a step, not a function.",
        ),
        (
            {"rate": in_python},
            10,
            TraceError,
            "The schedule of `rate` cannot be compiled, because Python control flow depends on the step.",
        ),
    ],
)
def test_invalid_schedules_raise(schedule, steps, error, message):
    with pytest.raises(error) as caught:
        plot_schedule(schedule, steps)
    assert caught.value.what == message
