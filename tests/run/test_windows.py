"""How far the engine runs ahead: what bounds a window, and that nothing else does."""

import functools

import numpy as np
import pytest

from fluxcb import Append, Callback, EverySteps, Read, Write, every, on, throttle, when
from fluxcb._run import engine
from fluxcb.events import StepBegin, StepEnd, Trigger
from fluxcb.phases import Phase, TrainingPhase
from fluxcb.testing import EventLog, testlearner


def run_ahead(monkeypatch, *callbacks, batches=64):
    """Return for each step how many steps the device had been given when its StepEnd ran."""

    # Long windows are cut by the clock, too, to keep progress bars alive: not here.
    monkeypatch.setattr(engine, "_WINDOW_SECONDS", 1e9)

    class Watches(Callback):
        def __init__(self):
            self.seen = []

        @on
        def look(self, event: StepEnd, phase: TrainingPhase, learner):
            self.seen.append(int(owner[0]._state.carry["counters"][0]))

    watches = Watches()
    owner = [testlearner(watches, *callbacks, batches=batches, validation_batches=0)]
    owner[0].fit(1)
    return watches.seen


def windows(lengths):
    """Return what `ahead` would return for windows of these lengths."""
    ends = np.cumsum(lengths)
    return [int(end) for end, length in zip(ends, lengths, strict=True) for _ in range(length)]


@pytest.fixture
def ahead(monkeypatch):
    return functools.partial(run_ahead, monkeypatch)


FREE = [1, 2, 4, 8, 16, 32, 1]  # they double, up to 32, to learn how long a step takes
ONES = [1] * 64


def made(event, access, schedule=None, phase=TrainingPhase):
    class Made(Callback):
        def stateaccess(self):
            return access

        @on(event, phase, when=schedule)
        def handle(self, event, phase, learner):
            pass

    return Made()


@pytest.mark.parametrize(
    ("callbacks", "lengths"),
    [
        ([], FREE),
        ([made(StepEnd, {"step": {"loss": Read(), "grads": Read(), "batch": Read()}})], FREE),
        ([made(StepEnd, {"step": {"note": Append()}})], FREE),
        ([made(StepEnd, {"step": {"stop": Read()}, "control": Append()})], FREE),
        ([made(StepBegin, {"step": {"batch": Read()}})], FREE),
        ([made(StepEnd, {"control": Append()})], ONES),
        ([made(StepBegin, {"control": Append()})], ONES),
        ([made(StepEnd, {"params": Read()})], ONES),
        ([made(StepEnd, {"params": Read(borrow=True)})], ONES),
        ([made(StepEnd, {"hyperparams": {"learning_rate": Write()}})], ONES),
        ([made(StepBegin, {"step": {"batch": Write()}})], ONES),
        ([made(StepEnd, {"*": Read()})], ONES),
        ([made(Trigger, {"params": Read()})], FREE),
    ],
)
def test_what_bounds_windows(ahead, callbacks, lengths):
    assert ahead(*callbacks) == windows(lengths)[:64]


def ends(seen):
    return sorted(set(seen))


@pytest.mark.parametrize(
    ("callback", "period", "offset"),
    [
        (made(StepEnd, {"params": Read()}, EverySteps(10)), 10, 0),
        (every(made(StepEnd, {"params": Read()}), steps=10), 10, 0),
        (throttle(made(StepEnd, {"control": Append()}), StepEnd, freq=7), 7, 0),
        (every(made(Trigger, {}), steps=12), 12, 0),
        # before step 10 runs, its StepBegin looks
        (every(made(StepBegin, {"params": Read()}), steps=10), 10, -1),
        (every(made(StepBegin, {"control": Append()}), steps=6), 6, -1),
    ],
)
def test_a_schedule_bounds_windows_where_it_is_due(ahead, callback, period, offset):
    seen = ahead(callback)
    due = {step + offset for step in range(period, 65, period)}
    assert due <= set(ends(seen))
    assert len(ends(seen)) < 64 / 2  # and hardly anywhere else


def test_a_predicate_is_asked_at_every_step(ahead):
    assert ahead(when(made(StepEnd, {"params": Read()}), lambda learner: False)) == windows(ONES)


class LooksAtStart(Callback):
    def __init__(self):
        self.seen = []

    def stateaccess(self):
        return {"params": Read()}

    @on
    def look(self, event: StepBegin, phase: TrainingPhase, learner):
        self.seen.append((learner.progress.step, float(learner.params["w"])))


def test_a_scheduled_step_begin_sees_the_state_before_its_step():
    looks, plain = LooksAtStart(), LooksAtStart()
    testlearner(every(looks, steps=5), batches=20).fit(1)
    testlearner(plain, batches=20).fit(1)
    assert looks.seen == [plain.seen[i] for i in (4, 9, 14, 19)]


class Triggered(Callback):
    def __init__(self):
        self.seen = []

    def stateaccess(self):
        return {"params": Read()}

    @on
    def look(self, event: Trigger, phase: Phase, learner):
        self.seen.append((learner.progress.step, learner.progress.epoch, float(learner.params["w"])))


def test_triggers_come_at_the_period_and_no_longer_at_the_epochs_end():
    triggered, plain, starts = Triggered(), Triggered(), LooksAtStart()
    testlearner(every(triggered, steps=4), plain, starts, batches=6, validation_batches=0).fit(2)
    after = dict(starts.seen)
    assert [t[:2] for t in triggered.seen] == [(4, 1), (8, 2), (12, 2)]
    assert [t[:2] for t in plain.seen] == [(6, 1), (12, 2)]
    for step, _, w in triggered.seen[:2]:
        assert w == after[step]
    every_other = Triggered()
    testlearner(every(every_other, epochs=2), batches=2, validation_batches=0).fit(5)
    assert [t[:2] for t in every_other.seen] == [(4, 2), (8, 4)]


def test_scheduled_step_events():
    log = EventLog()
    testlearner(every(log, steps=3), batches=4, validation_batches=0).fit(2)
    # FitBegin, FitEnd and the epochs' own events are not counted in steps; Trigger comes at the period.
    assert [(name, step) for name, _, step, _, _ in log.entries] == [
        ("FitBegin", 0),
        ("EpochBegin", 0),
        ("StepBegin", 2),
        ("StepEnd", 3),
        ("Trigger", 3),
        ("EpochEnd", 4),
        ("EpochBegin", 4),
        ("StepBegin", 5),
        ("StepEnd", 6),
        ("Trigger", 6),
        ("EpochEnd", 8),
        ("FitEnd", 8),
    ]


def test_schedules_by_epoch_cover_whole_epochs():
    log = EventLog()
    testlearner(every(log, epochs=2), batches=1, validation_batches=0).fit(3)
    assert [(name, epoch) for name, _, _, epoch, _ in log.entries] == [
        ("FitBegin", 0),
        *[(name, 2) for name in ("EpochBegin", "StepBegin", "StepEnd", "EpochEnd", "Trigger")],
        ("FitEnd", 3),
    ]
