"""Complete sequences of events, with the counters at every moment."""

import numpy as np
import pytest

from fluxcb import Callback, on
from fluxcb.events import Event, HostEvent, StepEnd
from fluxcb.phases import Phase, TrainingPhase, ValidationPhase
from fluxcb.testing import EventLog, testlearner


def epoch(phase, number, steps, step):
    """Return the entries of one epoch; `step` is the number of training steps before it."""
    trains = phase == "training"
    entries = [("EpochBegin", phase, step, number, 0)]
    for done in range(steps):
        before = step + done if trains else step
        entries.append(("StepBegin", phase, before, number, done))
        entries.append(("StepEnd", phase, before + trains, number, done + 1))
    return [*entries, ("EpochEnd", phase, step + steps * trains, number, steps)]


def logged(*callbacks, **kwargs):
    log = EventLog()
    return log, testlearner(log, *callbacks, **kwargs)


def test_two_epochs_with_validation():
    log, learner = logged(batches=3, validation_batches=2)
    learner.fit(2)
    assert log.entries == [
        ("FitBegin", "training", 0, 0, 0),
        *epoch("training", 1, 3, 0),
        *epoch("validation", 1, 2, 3),
        ("Trigger", "training", 3, 1, 3),
        *epoch("training", 2, 3, 3),
        *epoch("validation", 2, 2, 6),
        ("Trigger", "training", 6, 2, 3),
        ("FitStopping", "training", 6, 2, 3),
        ("FitEnd", "training", 6, 2, 3),
    ]
    assert (learner.step, learner.epoch, learner.stop_reason) == (6, 2, None)


def test_second_fit_continues_counting():
    log, learner = logged(batches=2, validation_batches=0)
    learner.fit(1)
    log.entries.clear()
    learner.fit(1)
    assert log.entries == [
        ("FitBegin", "training", 2, 1, 2),
        *epoch("training", 2, 2, 2),
        ("Trigger", "training", 4, 2, 2),
        ("FitStopping", "training", 4, 2, 2),
        ("FitEnd", "training", 4, 2, 2),
    ]


def test_fit_by_steps_ends_within_epoch():
    log, learner = logged(batches=3, validation_batches=0)
    learner.fit(steps=5)
    assert log.entries == [
        ("FitBegin", "training", 0, 0, 0),
        *epoch("training", 1, 3, 0),
        ("Trigger", "training", 3, 1, 3),
        *epoch("training", 2, 2, 3),
        ("Trigger", "training", 5, 2, 2),
        ("FitStopping", "training", 5, 2, 2),
        ("FitEnd", "training", 5, 2, 2),
    ]


@pytest.mark.parametrize(("steps_per_epoch", "lengths"), [(2, [2, 2, 1]), (4, [4, 1]), (9, [5])])
def test_steps_per_epoch_divides_stream_into_epochs(steps_per_epoch, lengths):
    log, learner = logged(batches=3, validation_batches=0)
    learner.fit(steps=5, steps_per_epoch=steps_per_epoch)
    expected, step = [("FitBegin", "training", 0, 0, 0)], 0
    for number, steps in enumerate(lengths, 1):
        expected += epoch("training", number, steps, step)
        step += steps
        expected.append(("Trigger", "training", step, number, steps))
    end = [(name, "training", 5, len(lengths), lengths[-1]) for name in ("FitStopping", "FitEnd")]
    assert log.entries == [*expected, *end]


class Batches(Callback):
    """Keep the first input of each batch, which identifies it."""

    def __init__(self):
        self.seen = []

    def stateaccess(self):
        from fluxcb import Read

        return {"step": {"batch": Read()}}

    @on
    def look(self, event: StepEnd, phase: TrainingPhase, learner):
        self.seen.append(float(learner.step.batch[0][0, 0]))


def numbered(count):
    return [(np.full((2, 1), i, np.float32), np.zeros((2, 1), np.float32)) for i in range(count)]


def test_stream_continues_across_epochs_and_restarts_at_end():
    seen = Batches()
    testlearner(seen, data=numbered(3)).fit(3, steps_per_epoch=2)
    assert seen.seen == [0, 1, 2, 0, 1, 2]


def test_each_epoch_restarts_data_without_steps_per_epoch():
    seen = Batches()
    testlearner(seen, data=numbered(3)).fit(steps=5)
    assert seen.seen == [0, 1, 2, 0, 1]


class Totals(Callback):
    def __init__(self):
        self.seen = []

    @on(HostEvent)
    def look(self, event: Event, phase: Phase, learner):
        self.seen.append((repr(event), learner.progress.epochs, learner.progress.steps_in_epoch))


def test_lengths_are_known_during_fit_and_epoch():
    totals = Totals()
    learner = testlearner(totals, batches=1, validation_batches=0)
    learner.fit(2)
    assert [t[1:] for t in totals.seen] == [(2, 0), *[(2, 1)] * 5, *[(2, 1)] * 7]
    totals.seen.clear()
    learner.fit(steps=1)
    assert [t[1] for t in totals.seen] == [0] * 8


def test_run_epoch_emits_epoch_without_trigger():
    log, learner = logged(batches=2, validation_batches=1)
    assert learner.run_epoch(TrainingPhase()) == 2
    assert learner.run_epoch(ValidationPhase()) == 1
    assert learner.run_epoch(TrainingPhase(), steps=1) == 1
    learner.trigger()
    assert log.entries == [
        *epoch("training", 1, 2, 0),
        *epoch("validation", 1, 1, 2),
        *epoch("training", 2, 1, 2),
        ("Trigger", "training", 3, 2, 1),
    ]


def test_run_step_emits_step_and_returns_loss():
    log, learner = logged(batches=2, validation_batches=1)
    xs = np.array([[1.0], [2.0]], np.float32)
    values = learner.run_step(TrainingPhase(), (xs, 3 * xs - 1))
    assert list(values) == ["loss"]
    assert float(values["loss"]) == (2.0**2 + 5.0**2) / 2  # w = b = 0
    value = learner.run_step(ValidationPhase(), (xs, 3 * xs - 1))["loss"]
    # gradient descent by hand: dw = mean(-2 y x), db = mean(-2 y), rate 0.1
    w, b = 0.1 * (2 * 1 + 5 * 2), 0.1 * (2 + 5)
    np.testing.assert_allclose(value, np.mean((w * xs + b - (3 * xs - 1)) ** 2), rtol=1e-6)
    assert log.entries == [
        ("StepBegin", "training", 0, 0, 0),
        ("StepEnd", "training", 1, 0, 1),
        ("StepBegin", "validation", 1, 0, 1),
        ("StepEnd", "validation", 1, 0, 2),
    ]


class Interlude(HostEvent):
    def __init__(self, word):
        self.word = word


class Louder(Interlude):
    pass


class Hears(Callback):
    def __init__(self):
        self.heard = []

    @on
    def hear(self, event: Interlude, phase: TrainingPhase, learner):
        self.heard.append((type(event).__name__, event.word, learner.progress.step))


def test_custom_host_event():
    hears = Hears()
    log, learner = logged(hears, batches=1)
    learner.emit(Interlude("one"), TrainingPhase())
    learner.fit(1)
    learner.emit(Louder("two"), TrainingPhase())
    learner.emit(Interlude("three"), ValidationPhase())
    assert hears.heard == [("Interlude", "one", 0), ("Louder", "two", 1)]
    assert [e for e in log.names() if e in ("Interlude", "Louder")] == ["Interlude", "Louder", "Interlude"]


def test_only_phases_with_data_are_validated():
    class Test(ValidationPhase):
        name = "test"

    log, learner = logged(
        phases=(TrainingPhase(), ValidationPhase(), Test()), data={"training": numbered(1), "test": numbered(2)}
    )
    learner.fit(1)
    assert log.entries == [
        ("FitBegin", "training", 0, 0, 0),
        *epoch("training", 1, 1, 0),
        *epoch("test", 1, 2, 1),
        ("Trigger", "training", 1, 1, 1),
        ("FitStopping", "training", 1, 1, 1),
        ("FitEnd", "training", 1, 1, 1),
    ]
