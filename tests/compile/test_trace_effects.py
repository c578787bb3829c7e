"""Effects of traced handlers that happen once, while the step is traced."""

import math
import random
import re
import warnings

import jax
import numpy as np
import pytest

from fluxcb import Callback, Read, Write, on
from fluxcb.events import BackwardEnd, StepEnd
from fluxcb.phases import TrainingPhase
from fluxcb.testing import testlearner


@pytest.mark.parametrize("draw", [np.random.normal, random.random])
def test_random_numbers_outside_jax_are_a_warning(draw, monkeypatch):
    class Noise(Callback):
        def stateaccess(self):
            return {"step": {"grads": Write()}}

        @on(BackwardEnd, TrainingPhase)
        def add(self, event, phase, learner):
            noise = draw()
            learner.step.grads = jax.tree.map(lambda g: g + noise, learner.step.grads)

    monkeypatch.setattr("threading.active_count", lambda: 1)
    text = (
        "The traced handler Noise().add drew random numbers outside JAX. They are drawn once, while the step is "
        "traced, so every step uses the same numbers. Use `learner.key`, e.g. `jax.random.normal(learner.key, shape)`."
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(text)}$"):
        testlearner(Noise())
    # Another thread may have drawn the numbers.
    monkeypatch.setattr("threading.active_count", lambda: 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        testlearner(Noise())


@pytest.mark.parametrize("first_in_class", [True, False])
def test_counting_in_a_field_is_a_warning(first_in_class):
    class Counts(Callback):
        count = 0
        unknown = math.nan

        def __init__(self):
            if not first_in_class:
                self.count = 0

        def stateaccess(self):
            return {"step": {"loss": Read()}}

        @on(BackwardEnd, TrainingPhase)
        def add(self, event, phase, learner):
            self.count += 1

    text = (
        "The traced handler Counts().add changed `self.count`. The change happens once, while the step is traced, and "
        "not at each step. Keep the value in `learner.cbstate`, or change `self.count` in a host handler."
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(text)}$"):
        testlearner(Counts())


def test_host_handlers_may_do_both():
    class Counts(Callback):
        def __init__(self):
            self.count = 0

        @on(StepEnd, TrainingPhase)
        def add(self, event, phase, learner):
            self.count += round(random.random()) * 0 + 1

    counts = Counts()
    testlearner(counts).fit(1)
    assert counts.count == 4
