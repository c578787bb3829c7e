"""Values that a callback declares to write, and that its handlers forget to assign."""

import re
import warnings

import jax
import optax
import pytest

import fluxcb
from fluxcb import Append, Callback, Read, Write, on
from fluxcb._check.source_audit import audit_source
from fluxcb._declare.declared import declare
from fluxcb.events import BackwardBegin, BackwardEnd, EpochEnd
from fluxcb.phases import TrainingPhase
from fluxcb.testing import testlearner

GRADS = {"step": {"grads": Write()}}


class Grads(Callback):
    def stateaccess(self):
        return GRADS

    @on
    def handle(self, event: BackwardEnd, phase: TrainingPhase, learner):
        grads = learner.step.grads
        grads = jax.tree.map(lambda g: 100 * g, grads)


class Skip(Callback):
    def stateaccess(self):
        return {"step": {"grads": Read(), "skip": Append()}}

    @on
    def handle(self, event: BackwardEnd, phase: TrainingPhase, learner):
        skip = optax.tree.norm(learner.step.grads) > 0  # noqa: F841 - the mistake


class Loss(Callback):
    def stateaccess(self):
        return {"step": {"loss": Write()}, "params": Read()}

    @on
    def handle(self, event: BackwardBegin, phase: TrainingPhase, learner):
        loss = learner.step.loss
        loss += optax.tree.norm(learner.params)


class Rate(Callback):
    def stateaccess(self):
        return {"hyperparams": {"learning_rate": Write()}}

    @on
    def handle(self, event: EpochEnd, phase: TrainingPhase, learner):
        rate = learner.hyperparams["learning_rate"]
        rate = rate * 0.1


class Params(Callback):
    def stateaccess(self):
        return {"params": Write()}

    @on
    def handle(self, event: EpochEnd, phase: TrainingPhase, learner):
        changed(learner)


def changed(learner):
    return jax.tree.map(abs, learner.params)


@pytest.mark.parametrize(
    ("cls", "permission", "place", "only_reads"),
    [
        (Grads, "Write", "step.grads", True),
        (Skip, "Append", "step.skip", False),
        (Loss, "Write", "step.loss", True),
        (Rate, "Write", "hyperparams.learning_rate", True),
        (Params, "Write", "params", True),
    ],
)
def test_forgotten_assignment_is_a_warning(cls, permission, place, only_reads):
    otherwise = "If it only reads the value, declare `Read()`." if only_reads else f"Or remove it from `{cls.__name__}"
    text = (
        f"{cls.__name__}() declares {permission}() on `{place}`, but its handlers do not assign it. "
        f"Assign the new value: `learner.{place} = ...`. {otherwise}"
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(text)}"):
        testlearner(cls()).fit(1)
    (advice,) = [found for found in audit_source(declare([cls()])[0]).unused if place in found]
    assert advice.startswith(text)


class Assigns(Grads):
    @on
    def handle(self, event: BackwardEnd, phase: TrainingPhase, learner):
        learner.step.grads = jax.tree.map(lambda g: 100 * g, learner.step.grads)


class OnlyReads(Grads):
    def stateaccess(self):
        return {"step": {"grads": Read()}}


class ByName(Grads):
    @on
    def handle(self, event: BackwardEnd, phase: TrainingPhase, learner):
        setattr(learner.step, "gra" + "ds", learner.step.grads)


class ByPart(Grads):
    @on
    def handle(self, event: BackwardEnd, phase: TrainingPhase, learner):
        step = learner.step
        step.grads = step.grads


class ByHelper(Grads):
    @on
    def handle(self, event: BackwardEnd, phase: TrainingPhase, learner):
        scale(learner)


def scale(learner):
    learner.step.grads = learner.step.grads


class ByObject(Grads):
    def __init__(self):
        self.strategy = {"scale": scale}

    @on
    def handle(self, event: BackwardEnd, phase: TrainingPhase, learner):
        self.strategy["scale"](learner)


class Key(Rate):
    @on
    def handle(self, event: EpochEnd, phase: TrainingPhase, learner):
        for name in learner.hyperparams:
            learner.hyperparams[name] = 0.1


class InBase(Assigns):
    def stateaccess(self):
        return GRADS


@pytest.mark.parametrize("cls", [Assigns, OnlyReads, ByName, ByPart, ByHelper, ByObject, Key, InBase])
def test_other_callbacks_are_no_warning(cls):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        testlearner(cls()).fit(1)


def test_fixes_work():
    plain, scaled = testlearner(learning_rate=0.001), testlearner(Assigns(), learning_rate=0.001)
    plain.fit(steps=1)
    scaled.fit(steps=1)
    # Plain gradient descent from 0, so the first update is 100 times as large.
    assert float(scaled.params["w"]) == pytest.approx(100 * float(plain.params["w"]), rel=1e-5)
    assert fluxcb.check([OnlyReads()])
