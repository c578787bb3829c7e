"""A Learner, its callbacks, a population, and what handlers see of a Learner can be neither copied nor pickled."""

import copy
import pickle

import jax
import numpy as np
import pytest

import fluxcb
from fluxcb import Callback, DeclarationError, Read, on
from fluxcb.callbacks import Checkpointer, Metrics
from fluxcb.events import BackwardEnd, EpochEnd
from fluxcb.phases import TrainingPhase
from fluxcb.testing import testlearner

WAYS = [copy.copy, copy.deepcopy, pickle.dumps]
FIXES = (
    "  fix:   copy the values that you need: `params = learner.params` is a copy\n"
    '     or: save the run to a directory: add `Checkpointer("runs/1")` to the callbacks\n'
    "     or: for another Learner, write a function that builds it, and call the function again"
)


@pytest.mark.parametrize("way", WAYS)
def test_a_learner_and_a_population_refuse_to_be_copied(way, refused):
    why = "  why:   it holds compiled programs, and its callbacks belong to it alone\n"
    with refused(DeclarationError, f"A Learner can be neither copied nor pickled.\n{why}{FIXES}"):
        way(testlearner())
    population = fluxcb.Population(lambda key: testlearner(key=key), key=[0, 1])
    with refused(DeclarationError, f"A Population can be neither copied nor pickled.\n{why}{FIXES}"):
        way(population)
    with refused(
        DeclarationError,
        f"A CallbackSet can be neither copied nor pickled.\n{why}"
        "  fix:   create the callbacks again, because an instance belongs to one Learner",
    ):
        way(testlearner(Metrics()).callbacks)


def test_the_fixes_for_a_copy_of_a_learner_work(tmp_path):
    def make():
        return testlearner(Checkpointer(tmp_path))

    learner = make()
    before = learner.params
    learner.fit(1)
    after, saved = learner.params, fluxcb.checkpoints.load_params(tmp_path)
    assert not np.array_equal(before["w"], after["w"])  # training has not changed the copy
    jax.tree.map(np.testing.assert_array_equal, after, saved)
    assert make().step == 0


class Copies(Callback):
    def __init__(self, way):
        self.way, self.errors = way, []

    def stateaccess(self):
        return {"params": Read()}

    def _try(self, learner):
        for part in (learner, learner.progress):
            with pytest.raises(DeclarationError) as raised:
                self.way(part)
            self.errors.append((raised.value.what, raised.value.fix))
        assert isinstance(copy.deepcopy(learner.params), dict)


class InStep(Copies):
    @on
    def look(self, event: BackwardEnd, phase: TrainingPhase, learner):
        self._try(learner)


class AtEnd(Copies):
    @on
    def look(self, event: EpochEnd, phase: TrainingPhase, learner):
        self._try(learner)


@pytest.mark.parametrize("cls", [InStep, AtEnd])
@pytest.mark.parametrize("way", WAYS)
def test_the_view_of_a_handler_refuses_to_be_copied(cls, way):
    callback = cls(way)
    testlearner(callback).fit(1)
    fix = ("copy single values, e.g. `copy.deepcopy(learner.params)`",)
    assert callback.errors[:2] == [
        (f"`learner`, as {cls.__name__}() sees it, can be neither copied nor pickled.", fix),
        (f"`learner.progress`, as {cls.__name__}() sees it, can be neither copied nor pickled.", fix),
    ]
