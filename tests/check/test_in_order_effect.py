"""An `in_order` of callbacks that never run at the same moment has no effect, which is a warning."""

import re

import pytest

from fluxcb import Callback, Read, in_order, on
from fluxcb.callbacks import ClipGradients, Metrics
from fluxcb.events import BackwardEnd, StepEnd
from fluxcb.phases import TrainingPhase
from fluxcb.testing import testlearner


class Late(Callback):
    """Read the gradients after the step."""

    def stateaccess(self):
        return {"step": {"grads": Read()}}

    @on
    def log(self, event: StepEnd, phase: TrainingPhase, learner): ...


class Early(Callback):
    """Read the gradients before the update."""

    def stateaccess(self):
        return {"step": {"grads": Read()}}

    @on
    def log(self, event: BackwardEnd, phase: TrainingPhase, learner): ...


TEXT = "`in_order` has no effect on {}: it never runs at the same event and phase as {}. Events come in a fixed order. "
CLIPS = "ClipGradients(1.0) runs at BackwardEnd x AbstractTrainingPhase"


def test_callbacks_without_a_common_moment():
    text = TEXT.format("Late()", "ClipGradients(1.0)")
    text += (
        f"Late() runs at StepEnd x TrainingPhase, and {CLIPS}. Leave Late() out of `in_order`, or give it a handler "
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(text)}of another event.$"):
        testlearner(in_order(Late(), ClipGradients(1.0)))


def test_one_of_three_callbacks_without_a_common_moment():
    text = TEXT.format("Late()", "Early() or ClipGradients(1.0)")
    with pytest.warns(UserWarning, match=f"^{re.escape(text)}"):
        testlearner(in_order(Early(), ClipGradients(1.0), Late()))


def test_effective_orders_are_no_warning():
    testlearner(in_order(Early(), ClipGradients(1.0)), Late())


class Creates(Callback):
    def init(self, learner): ...

    @on
    def act(self, event: BackwardEnd, phase: TrainingPhase, learner): ...


class CreatesToo(Creates):
    @on
    def act(self, event: StepEnd, phase: TrainingPhase, learner): ...


def test_orders_of_init_are_no_warning():
    testlearner(in_order(Creates(), CreatesToo()), Metrics())
