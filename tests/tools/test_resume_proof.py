"""The check that a training resumes exactly: what passes, what it finds, and its messages."""

import jax.numpy as jnp
import pytest

from fluxcb import Callback, Write, on
from fluxcb._tools.resume_proof import resume_differences
from fluxcb._tools.verifying import verify
from fluxcb.callbacks import EarlyStopping, Metrics, ParameterEMA
from fluxcb.events import FitBegin, StepEnd, UpdateEnd
from fluxcb.phases import AbstractTrainingPhase
from fluxcb.testing import assert_resumes_exactly, testlearner


class Counts(Callback):
    """Count steps in the carry, and in a field on the host."""

    def __init__(self, *, resets=False, forgets=False):
        self.resets, self.forgets = resets, forgets
        self.count = 0

    def stateaccess(self):
        return {"cbstate": {"counted": Write()}}

    def init(self, learner):
        if "counted" not in learner.cbstate:
            learner.cbstate.counted = jnp.zeros((), jnp.int32)

    @on(FitBegin)
    def begin(self, event, phase, learner):
        if self.resets:
            learner.cbstate.counted = jnp.zeros((), jnp.int32)

    @on(UpdateEnd, AbstractTrainingPhase)
    def traced(self, event, phase, learner):
        learner.cbstate.counted = learner.cbstate.counted + 1

    @on(StepEnd, AbstractTrainingPhase, access={})
    def on_host(self, event, phase, learner):
        self.count += 1

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = 0 if self.forgets else state["count"]


def small(*callbacks):
    return testlearner(*callbacks, batches=2, validation_batches=1)


def test_exactly_resuming_training_passes():
    assert_resumes_exactly(lambda: small(Counts(), Metrics(), ParameterEMA(0.9), EarlyStopping(3)), epochs=1)


def test_training_resumes_from_every_possible_point():
    found = list(resume_differences(small, {"epochs": 2}, ()))
    assert found == [
        ("after epoch 0 (step 0)", []),  # FitBegin
        ("after step 1 (epoch 1)", []),
        ("after step 2 (epoch 1)", []),
        ("after epoch 1 (step 2)", []),
        ("after step 3 (epoch 2)", []),
        ("after step 4 (epoch 2)", []),
        ("after epoch 2 (step 4)", []),  # Trigger
        ("after epoch 2 (step 4)", []),  # FitStopping
    ]


def test_state_reset_at_fit_begin_is_found():
    with pytest.raises(AssertionError) as error:
        assert_resumes_exactly(lambda: small(Counts(resets=True)), epochs=1)
    # From step 1 one step is left, and the second one starts to count anew.
    assert str(error.value) == (
        "A run that is resumed after step 1 (epoch 1) differs from an uninterrupted run:\n"
        "  cbstate['counted']: ('int32', (), b'\\x02\\x00\\x00\\x00') became ('int32', (), b'\\x01\\x00\\x00\\x00')\n"
        "(and at 3 other points)"
    )


def test_unsaved_state_is_found():
    with pytest.raises(AssertionError, match=r"callbacks\['Counts'\]\['count'\]: '2' became '1'"):
        assert_resumes_exactly(lambda: small(Counts(forgets=True)), epochs=1)


MODULE = """
from fluxcb import Callback, on
from fluxcb.events import FitBegin, StepEnd
from fluxcb.phases import TrainingPhase


class Resets(Callback):
    def __init__(self):
        self.steps = 0

    @on(FitBegin)
    def begin(self, event, phase, learner):
        self.steps = 0

    @on(StepEnd, TrainingPhase)
    def count(self, event, phase, learner):
        self.steps += 1

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


def good():
    return []


def resets():
    return [Resets()]
"""


@pytest.mark.parametrize(("name", "problems"), [("good", 0), ("resets", 1)])
def test_resume_is_level_of_check(tmp_path, name, problems):
    (tmp_path / "proven.py").write_text(MODULE)
    assert verify(f"proven:{name}", tmp_path, "audit").problems == []
    verdict = verify(f"proven:{name}", tmp_path, "resume")
    assert len(verdict.problems) == problems
    if problems:
        (problem,) = verdict.problems
        assert problem.what == ("A run that is resumed after step 1 (epoch 1) differs from an uninterrupted run.")
        assert problem.where[0] == "callbacks['Resets']['steps']: '4' became '3'"
