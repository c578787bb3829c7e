"""StopAfter, GarbageCollect, EstimatedTimeLeft, Debugger: when each acts, and what it does."""

import io
import itertools
import math
import re
import sys

import numpy as np
import pytest

from fluxcb import Append, Callback, DeclarationError, Read, every, on
from fluxcb.callbacks import Debugger, EstimatedTimeLeft, GarbageCollect, Metrics, StopAfter
from fluxcb.callbacks.progress.time_left import _in_words
from fluxcb.events import EpochBegin, EpochEnd, StepBegin, StepEnd, Trigger
from fluxcb.phases import Phase, TrainingPhase
from fluxcb.testing import testlearner

# --- StopAfter ------------------------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch):
    """Return a list whose one number is the time (seconds) for whoever asks for it."""
    now = [100.0]
    for module in ("stopping.stop_after", "progress.time_left"):
        monkeypatch.setattr(f"fluxcb.callbacks.{module}.monotonic", lambda: now[0])
    monkeypatch.setattr("fluxcb._declare.schedules.time.monotonic", lambda: now[0])
    return now


class Takes(Callback):
    """Lets time pass at each training step; nothing runs ahead of it."""

    def __init__(self, clock, seconds):
        self.clock, self.seconds = clock, seconds

    def stateaccess(self):
        return {"control": Append()}

    @on
    def pass_time(self, event: StepBegin, phase: TrainingPhase, learner):
        self.clock[0] += self.seconds


def test_the_fit_ends_in_the_middle_of_an_epoch(clock):
    stop = StopAfter(seconds=60)
    learner = testlearner(Takes(clock, 8), stop, batches=100, steps_per_call=1)
    learner.fit(3)
    assert learner.epoch == 1
    assert (learner.step, learner.stop_reason) == (8, "the fit has taken 64 s (limit 60 s)")


def test_each_fit_has_the_full_time(clock):
    learner = testlearner(Takes(clock, 8), StopAfter(60), batches=5, steps_per_call=1)
    for _ in range(4):
        learner.fit(1)
        assert learner.stop_reason is None
        clock[0] += 1000
    assert learner.step == 20


def test_a_short_fit_is_not_stopped():
    learner = testlearner(StopAfter(3600))
    learner.fit(2)
    assert (learner.epoch, learner.stop_reason) == (2, None)


def test_real_time_with_windows():
    learner = testlearner(StopAfter(0.3), Metrics(), batches=50)
    learner.fit(10**6)
    assert re.fullmatch(r"the fit has taken [\d.]+ s \(limit 0\.3 s\)", learner.stop_reason)


# --- GarbageCollect -------------------------------------------------------------------------------------------------


class Steps(Callback):
    """Knows where the training is."""

    def __init__(self):
        self.at = None

    @on
    def begin(self, event: StepEnd | EpochEnd, phase: Phase, learner):
        self.at = (type(event).__name__, type(phase).name, learner.progress.step)


@pytest.mark.parametrize(
    ("callback", "expected"),
    [
        (GarbageCollect(3), [("StepEnd", "training", n) for n in (3, 6, 9, 12)]),
        (GarbageCollect(steps=5), [("StepEnd", "training", n) for n in (5, 10)]),
        (GarbageCollect(epochs=2), [("EpochEnd", "training", 8)]),
        (GarbageCollect(epochs=1), [("EpochEnd", "training", n) for n in (4, 8, 12)]),
        (GarbageCollect(), []),
        (every(GarbageCollect(1), steps=4), [("StepEnd", "training", n) for n in (4, 8, 12)]),
    ],
    ids=repr,
)
def test_garbage_is_collected_at_its_times(callback, expected, monkeypatch):
    where, seen = Steps(), []
    monkeypatch.setattr("fluxcb.callbacks.system.garbage.gc.collect", lambda: seen.append(where.at))
    learner = testlearner(where, callback)  # 4 batches
    seen.clear()
    learner.fit(3)
    assert [at for at in seen if at is not None] == expected


def test_a_cycle_goes_at_the_collection():
    import gc
    import weakref

    class Node:
        pass

    class Leaks(Callback):
        def __init__(self):
            self.nodes, self.alive = [], []

        @on
        def leak(self, event: StepEnd, phase: TrainingPhase, learner):
            node = Node()
            node.itself = node
            self.nodes.append(weakref.ref(node))

        @on
        def count(self, event: Trigger, phase: TrainingPhase, learner):
            self.alive.append(sum(ref() is not None for ref in self.nodes))

    leaks = Leaks()
    gc.disable()
    try:
        testlearner(leaks, GarbageCollect(epochs=2)).fit(2)
    finally:
        gc.enable()
    assert leaks.alive == [4, 0]


# --- EstimatedTimeLeft ----------------------------------------------------------------------------------------------


def estimates(clock, durations, epochs, callback, wrap=lambda callback: callback):
    class Epochs(Callback):
        @on
        def take(self, event: EpochBegin, phase: TrainingPhase, learner):
            clock[0] += durations[learner.progress.epoch - 1]

    callback.file = io.StringIO()
    learner = testlearner(Epochs(), wrap(callback), batches=1, validation_batches=0)
    learner.fit(epochs)
    return callback.file.getvalue().splitlines()


# tensorpack's own estimates for these durations, measured on it (seconds)
DURATIONS = [10, 20, 300, 20, 10, 10, 10]


def test_the_median_of_the_last_epochs(clock):
    said = estimates(clock, DURATIONS, 7, EstimatedTimeLeft())
    assert said == [
        "Estimated Time Left: " + text
        for text in ("1 minute", "1 minute 15 seconds", "1 minute 20 seconds", "1 minute", "40 seconds", "20 seconds")
    ]


def test_the_mean_of_the_last_epochs(clock):
    said = estimates(clock, DURATIONS, 7, EstimatedTimeLeft(median=False))
    assert said == ["Estimated Time Left: " + _in_words(seconds) for seconds in (60, 75, 440, 262.5, 144, 72)]


def test_fewer_epochs_are_taken(clock):
    said = estimates(clock, [10, 20, 30], 3, EstimatedTimeLeft(1))
    assert said == ["Estimated Time Left: 20 seconds"] * 2


def test_a_period_around_it_estimates_all_the_same(clock):
    said = estimates(clock, [10, 20, 30, 40, 50], 5, EstimatedTimeLeft(), lambda callback: every(callback, epochs=2))
    # 30 s in 2 epochs leave 3 of 15 s; then 70 s in 2: the median of 15 and 35, for one epoch
    assert said == ["Estimated Time Left: 45 seconds", "Estimated Time Left: 25 seconds"]


def test_where_the_number_of_epochs_is_unknown_nothing_is_said(clock):
    file = io.StringIO()
    learner = testlearner(EstimatedTimeLeft(file=file), Takes(clock, 1))
    learner.fit(steps=8)
    assert file.getvalue() == ""


def test_what_it_has_measured_is_saved(clock):
    first = EstimatedTimeLeft()
    estimates(clock, [10, 20, 300], 3, first)
    second = EstimatedTimeLeft()
    second.load_state_dict(first.state_dict())
    assert estimates(clock, [20, 10], 2, second) == ["Estimated Time Left: 20 seconds"]  # of 10, 20, 300, 20


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 second"),
        (0.01, "0.01 second"),
        (1, "1 second"),
        (59.5, "59.5 seconds"),
        (60, "1 minute"),
        (61, "1 minute 1 second"),
        (3600, "1 hour"),
        (120183, "1 day 9 hours 23 minutes 3 seconds"),
    ],
)
def test_times_are_spelt_as_there(seconds, text):
    assert _in_words(seconds) == text


# --- Debugger -------------------------------------------------------------------------------------------------------


@pytest.fixture
def stopped(monkeypatch):
    """Return a list to which each stop adds what can be seen from there."""
    seen = []

    def hook():
        frame = sys._getframe(1)
        seen.append((frame.f_locals["learner"].progress.step, frame.f_locals["learner"]))

    monkeypatch.setattr(sys, "breakpointhook", hook)
    return seen


@pytest.mark.parametrize("steps_per_call", [1, 5])
def test_it_stops_at_the_steps_of_the_condition(stopped, steps_per_call):
    def looks(learner):
        return learner.progress.step in (2, 7)

    testlearner(Debugger(looks), steps_per_call=steps_per_call).fit(2)
    assert [step for step, _ in stopped] == [2, 7]


def test_without_a_condition_it_stops_where_the_loss_is_no_number(stopped):
    bad = [(np.full((8, 1), x, np.float32), np.zeros((8, 1), np.float32)) for x in (1.0, math.nan, 1.0)]
    testlearner(Debugger(), data=bad).fit(1)
    assert [step for step, _ in stopped] == [2, 3]


def test_what_access_says_can_be_looked_at(monkeypatch):
    seen = []

    def hook():
        learner = sys._getframe(1).f_locals["learner"]
        seen.append((float(learner.step.grads["b"]), float(learner.params["b"])))

    monkeypatch.setattr(sys, "breakpointhook", hook)
    access = {"step": {"loss": Read(), "grads": Read()}, "params": Read()}
    learner = testlearner(Debugger(lambda learner: learner.progress.step == 1, access=access))
    learner.fit(1)
    [(grad, bias)] = seen
    assert bias == pytest.approx(-0.1 * grad)  # of the step's own parameters, though more steps followed
    assert learner.params["b"] != bias


def test_the_debugger_of_python_is_the_one_that_comes(monkeypatch):
    import pdb

    called = []
    monkeypatch.delenv("PYTHONBREAKPOINT", raising=False)
    monkeypatch.setattr(sys, "breakpointhook", sys.__breakpointhook__)
    monkeypatch.setattr(pdb, "set_trace", lambda **kwargs: called.append(True))
    testlearner(Debugger(lambda learner: learner.progress.step == 3)).fit(1)
    assert called == [True]


def test_it_looks_at_training_only(stopped):
    testlearner(Debugger(lambda learner: True)).fit(1)
    assert [step for step, _ in stopped] == [1, 2, 3, 4]


def print_nothing():
    """Take no learner."""


# --- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: StopAfter(0), "`seconds` of `StopAfter` must be a number above 0, not 0."),
        (lambda: StopAfter("1h"), "`seconds` of `StopAfter` must be a number above 0, not '1h'."),
        (lambda: StopAfter(math.inf), "`seconds` of `StopAfter` must be a number above 0, not inf."),
        (
            lambda: GarbageCollect(5, epochs=1),
            "`GarbageCollect` was given steps and epochs, but takes only one of them.",
        ),
        (lambda: GarbageCollect(0), "The period of `EverySteps` (steps) must be a whole number of at least 1, not 0."),
        (
            lambda: GarbageCollect(epochs=-1),
            "The period of `EveryEpochs` (epochs) must be a whole number of at least 1, not -1.",
        ),
        (
            lambda: EstimatedTimeLeft(0),
            "`last_k_epochs` of `EstimatedTimeLeft` must be a whole number of at least 1, not 0.",
        ),
        (lambda: Debugger("loss > 3"), "`condition` of `Debugger` must be a function of the learner, not 'loss > 3'."),
        (
            lambda: Debugger(print_nothing),
            "`condition` of `Debugger` must be a function of the learner; `print_nothing` takes ().",
        ),
    ],
    ids=itertools.count(),  # the last text holds an address, which no two processes share
)
def test_mistakes_are_told_at_construction(make, said):
    with pytest.raises(DeclarationError) as caught:
        make()
    assert caught.value.what == said
    assert caught.value.fix
