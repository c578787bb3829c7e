"""Remainders, short epochs, smaller last batches, second fits and streams do not depend on the window length."""

import numpy as np
import pytest

from fluxcb import Callback, EverySteps, Read, on
from fluxcb.callbacks import Metrics, Recorder
from fluxcb.data import ArrayLoader, map
from fluxcb.events import StepEnd
from fluxcb.phases import AbstractTrainingPhase, AbstractValidationPhase, TrainingPhase
from fluxcb.testing import EventLog, testlearner

STEP = ("step.loss", "step.batch", "step.grads", "params", "hyperparams.learning_rate")


def batches(count, last=8, size=8):
    rng = np.random.default_rng(3)
    xs = [rng.normal(size=(n, 1)).astype(np.float32) for n in [size] * (count - 1) + [last]]
    return [(x, 3 * x - 1) for x in xs]


class Stream:
    """Yield endless batches in its own buffers."""

    def __iter__(self):
        rng = np.random.default_rng(5)
        xs, ys = np.empty((8, 1), np.float32), np.empty((8, 1), np.float32)
        while True:
            xs[:] = rng.normal(size=(8, 1))
            ys[:] = 3 * xs
            yield xs, ys


def arrays(count):
    rng = np.random.default_rng(4)
    return rng.normal(size=(count, 1)).astype(np.float32), rng.normal(size=(count, 1)).astype(np.float32)


# What is trained on, and the fits that follow each other; how many steps that makes.
RUNS = {
    "one epoch, no remainder": (lambda: batches(15), [{"epochs": 1}], 15),
    "many epochs with remainders": (lambda: batches(17), [{"epochs": 4}], 68),
    "longer than any window": (lambda: batches(140), [{"epochs": 2}], 280),
    "epochs of one step": (lambda: batches(1), [{"epochs": 9}], 9),
    "epochs shorter than a window": (lambda: batches(3), [{"epochs": 9}], 27),
    "a smaller last batch": (lambda: batches(11, last=3), [{"epochs": 4}], 44),
    "a smaller batch of two": (lambda: batches(2, last=3), [{"epochs": 6}], 12),
    "a smaller only batch behind larger ones": (lambda: batches(9, last=1), [{"epochs": 2}, {"steps": 13}], 31),
    "two fits": (lambda: batches(10), [{"epochs": 1}, {"epochs": 2}], 30),
    "steps": (lambda: batches(10), [{"steps": 7}, {"steps": 1}, {"steps": 12}, {"epochs": 1}], 30),
    "one-shot": (lambda: iter(batches(40)), [{"steps": 9}, {"steps": 9}, {"epochs": 1}], 40),
    "one-shot with a smaller last": (lambda: iter(batches(20, last=5)), [{"steps": 18}, {"epochs": 1}], 20),
    "stream": (lambda: Stream(), [{"epochs": 3, "steps_per_epoch": 11}, {"steps": 30, "steps_per_epoch": 8}], 63),
    "list as stream": (lambda: batches(10), [{"epochs": 4, "steps_per_epoch": 7}, {"epochs": 1}], 38),
    "uneven list as stream": (lambda: batches(10, last=3), [{"epochs": 5, "steps_per_epoch": 7}], 35),
    "iterator as stream": (lambda: iter(batches(30)), [{"epochs": 2, "steps_per_epoch": 7}, {"steps": 16}], 30),
    "loader": (lambda: ArrayLoader(arrays(83), 8), [{"epochs": 2}, {"steps": 14}, {"epochs": 1}], 47),
    "mapped loader": (lambda: map(lambda b: (b[0] * 2, b[1]), ArrayLoader(arrays(80), 8)), [{"steps": 27}], 27),
}


VALIDATED = ("many epochs with remainders", "a smaller last batch", "steps", "loader")


@pytest.mark.parametrize("name", RUNS)
def test_every_run_is_independent_of_window_length(name, same, tell, keep):
    source, fits, steps = RUNS[name]

    def run(length):
        callbacks = [
            EventLog(),
            Recorder(),
            Metrics(),
            keep(*STEP, phase=AbstractTrainingPhase),
        ]
        validation = None
        if name in VALIDATED:
            validation = batches(3, last=2)
            callbacks.append(keep("step.loss", "step.batch", phase=AbstractValidationPhase))
        learner = testlearner(*callbacks, data=(source(), validation), steps_per_call=length)
        for fit in fits:
            learner.fit(**fit)
        assert learner.step == len(callbacks[3].seen) == steps
        assert all(entry[4] == entry[6][0][1][0] for entry in callbacks[3].seen)  # batch_size, and that of the batch
        return tell(learner, *callbacks)

    # A batch of another shape is in no window with the others.
    same(run, (2, 7), windows_used=name not in ("epochs of one step", "a smaller batch of two"))
    # Epochs of one step begin with a window program of two steps.
    same(run, ("auto",))


@pytest.mark.parametrize("last", [8, 3])
@pytest.mark.parametrize("length", [2, 7, 50, "auto"])
def test_window_length_adds_no_program(length, last, windows):
    learner = testlearner(data=(batches(29, last=last), batches(5)), steps_per_call=length)
    learner.fit(1)
    shapes = 1 if last == 8 else 2  # training; a smaller batch has a program of its own, and no windows
    # With validation. Cheap steps begin with the window program, and never compile one for single steps.
    programs = shapes + 1 if length == "auto" else shapes + 1 + 2
    for fit in ({"epochs": 2}, {"steps": 17}, {"steps": 1}, {"epochs": 2, "steps_per_epoch": 12}):
        learner.fit(**fit)
    assert learner.compile_counts == {"traces": shapes + 1, "compiles": programs}
    # With "auto", the buffers of both phases have the same length.
    assert len({steps for _, steps in windows}) == (shapes if length == "auto" else 2)


class Large(Callback):
    """Read large outputs at every seventh step or at every step."""

    def __init__(self):
        self.seen = []

    def stateaccess(self):
        return {"step": {"outputs": Read()}}

    @on(StepEnd, TrainingPhase, when=EverySteps(7))
    def look(self, event, phase, learner):
        self.seen.append((learner.progress.step, learner.step.outputs))


class LargeAlways(Large):
    @on(StepEnd, TrainingPhase)
    def look(self, event, phase, learner):
        self.seen.append((learner.progress.step, learner.step.outputs))


def test_smaller_last_batch_does_not_affect_values_of_larger_batches(same, tell, bits):
    """Its values are small enough to be fetched at each step. Values of a full batch are fetched when due."""

    def run(length):
        large, always = Large(), LargeAlways()
        for callback in (large, always):
            learner = testlearner(callback, data=(batches(25, last=3, size=100), None), steps_per_call=length)
            learner.fit(3)
        assert bits(large.seen) == bits(always.seen[6::7])
        return tell(learner, large, always)

    same(run, (7, "auto"))
