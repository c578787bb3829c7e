"""Windows: what limits their length, and what they wait for."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fluxcb import Append, Callback, EverySteps, Learner, Read, Write, every, on, throttle, when
from fluxcb._run import program_runner, step_loop
from fluxcb.data import ArrayLoader
from fluxcb.events import StepBegin, StepEnd, Trigger, UpdateEnd
from fluxcb.phases import Phase, TrainingPhase
from fluxcb.testing import EventLog, testlearner


@pytest.fixture
def windows(monkeypatch, no_clock):
    """Return a function that trains for an epoch and returns (length, whether the next one waited) of its windows."""

    def run(*callbacks, batches=64, **arguments):
        seen, look = [], step_loop.StepLoop._finish_window

        def spy(self, window, stream, *, following=None):
            look(self, window, stream, following=following)
            seen.append((window.length, window.blocks))

        monkeypatch.setattr(step_loop.StepLoop, "_finish_window", spy)
        learner = testlearner(*callbacks, batches=batches, validation_batches=0, **arguments)
        learner.fit(1)
        monkeypatch.setattr(step_loop.StepLoop, "_finish_window", look)
        return seen

    return run


# The first is short, because nobody knows yet how long a step takes; then as many as JAX runs ahead.
FREE = [(1, False), (32, False), (31, False)]
ONES = [(1, True)] * 64
# What runs before its step sees the state before it, so the step before has ended; but nothing waits for its end.
LIVE = [(1, False)] * 64


@pytest.mark.parametrize(
    ("device", "expected"),
    [(False, [1, 32, 100, 67, 32, 100, 68]), (True, [1, 32, 100, 67, 100, 100])],
    ids=["batches", "rows of resident arrays"],
)
def test_first_windows_of_stacked_batches_are_short(monkeypatch, no_clock, device, expected):
    lengths, call = [], program_runner.ProgramRunner.call

    def spy(self, window, stream, **others):
        call(self, window, stream, **others)
        lengths.append(window.length)

    monkeypatch.setattr(program_runner.ProgramRunner, "call", spy)
    xs = np.arange(400, dtype=np.float32)[:, None]
    learner = Learner.from_loss(
        {"w": jnp.ones(1)},
        lambda params, batch, key: jnp.mean(params["w"] * batch[0]),
        optax.sgd(0.1),
        data=ArrayLoader((xs,), 2, shuffle=False, device=device),
        callbacks=[every(made(StepEnd, {"step": {"loss": Read()}}), steps=1)],
        default_callbacks=False,
        steps_per_call=100,
    )
    learner.fit(2)
    assert lengths == expected


def made(event, access, schedule=None, phase=TrainingPhase):
    class Made(Callback):
        def stateaccess(self):
            return access

        @on(event, phase, when=schedule)
        def handle(self, event, phase, learner):
            pass

    return Made()


@pytest.mark.parametrize(
    ("callbacks", "expected"),
    [
        ([], FREE),
        ([made(StepEnd, {"step": {"loss": Read(), "grads": Read(), "batch": Read()}})], FREE),
        ([made(StepEnd, {"step": {"note": Append()}})], FREE),
        ([made(StepEnd, {"step": {"stop": Read()}, "control": Append()})], FREE),
        ([made(StepEnd, {"params": Read()})], FREE),  # so small that they are fetched for each step
        ([made(StepEnd, {"hyperparams": {"learning_rate": Read()}})], FREE),
        ([made(StepEnd, {"params": Read(borrow=True)})], ONES),  # the arrays themselves, which the next step takes
        ([made(StepEnd, {"*": Read()})], FREE),
        ([made(StepBegin, {"step": {"batch": Read()}})], FREE),
        ([made(Trigger, {"params": Read()})], FREE),
        ([made(StepEnd, {"control": Append()})], ONES),
        ([made(StepEnd, {"hyperparams": {"learning_rate": Write()}})], ONES),
        ([made(StepBegin, {"control": Append()})], LIVE),
        ([made(StepBegin, {"step": {"batch": Write()}})], LIVE),
        ([made(StepBegin, {"params": Read()})], LIVE),
    ],
)
def test_window_bounds(windows, callbacks, expected):
    assert windows(*callbacks, steps_per_call=1) == expected


@pytest.mark.parametrize("every_step", [True, False])
@pytest.mark.parametrize("kib", [3, 32, 128])
def test_carry_parts_are_fetched_copied_or_awaited_by_size(windows, kib, every_step):
    import jax.numpy as jnp

    class Holds(Callback):
        def __init__(self):
            self.seen = []

        def stateaccess(self):
            return {"cbstate": {"held": Write()}}

        def init(self, learner):
            learner.cbstate.held = jnp.zeros(kib * 256)

        @on
        def add(self, event: UpdateEnd, phase: TrainingPhase, learner):
            learner.cbstate.held = learner.cbstate.held + 1

        @on(StepEnd, TrainingPhase, access={"cbstate": {"held": Read()}}, when=None if every_step else EverySteps(5))
        def look(self, event, phase, learner):
            self.seen.append((learner.progress.step, learner.cbstate.held[-1]))

    holds = Holds()
    seen = windows(holds, batches=20, steps_per_call=10)
    assert holds.seen == [(step, step) for step in range(1, 21, 1) if every_step or step % 5 == 0]
    if every_step:
        assert seen == ([(1, False), (10, False), (9, False)] if kib == 3 else [(1, kib == 128)] * 20)
    else:
        assert seen == [(1, False), (4, kib == 128), *[(5, kib == 128)] * 3]


def ends(seen):
    return {sum(length for length, _ in seen[: i + 1]) for i in range(len(seen))}


@pytest.mark.parametrize(
    ("callback", "period", "offset"),
    [
        (made(StepEnd, {"control": Append()}, EverySteps(10)), 10, 0),
        (every(made(StepEnd, {"hyperparams": Write()}), steps=10), 10, 0),
        (throttle(made(StepEnd, {"control": Append()}), StepEnd, freq=7), 7, 0),
        (every(made(Trigger, {}), steps=12), 12, 0),
        # before step 10 runs, its StepBegin looks
        (every(made(StepBegin, {"params": Read()}), steps=10), 10, -1),
        (every(made(StepBegin, {"control": Append()}), steps=6), 6, -1),
    ],
)
@pytest.mark.parametrize("steps_per_call", [1, 50])
def test_schedule_ends_windows_when_due(windows, callback, period, offset, steps_per_call):
    seen = windows(callback, steps_per_call=steps_per_call)
    due = {step + offset for step in range(period, 65, period)}
    assert due <= ends(seen)
    assert len(seen) < 64 / 2  # and hardly anywhere else


def test_predicate_is_evaluated_at_every_step(windows):
    never = when(made(StepEnd, {"control": Append()}), lambda learner: False)
    assert windows(never, steps_per_call=50) == ONES


def test_large_values_due_rarely_are_not_stacked(windows):
    seen = []

    class Looks(Callback):
        def stateaccess(self):
            return {"step": {"outputs": Read()}}

        @on(StepEnd, TrainingPhase, when=EverySteps(7))
        def look(self, event, phase, learner):
            seen.append((learner.progress.step, learner.step.outputs.copy()))

    plain = []

    class LooksAlways(Looks):
        @on(StepEnd, TrainingPhase)
        def look(self, event, phase, learner):
            plain.append(learner.step.outputs.copy())

    lengths = [length for length, _ in windows(Looks(), batches=21, batch_size=100, steps_per_call=20)]
    assert lengths == [1, 6, 7, 7]
    windows(LooksAlways(), batches=21, batch_size=100, steps_per_call=20)
    assert [(step, values.tobytes()) for step, values in seen] == [(s, plain[s - 1].tobytes()) for s in (7, 14, 21)]


class LooksAtStart(Callback):
    def __init__(self):
        self.seen = []

    def stateaccess(self):
        return {"params": Read()}

    @on
    def look(self, event: StepBegin, phase: TrainingPhase, learner):
        self.seen.append((learner.progress.step, float(learner.params["w"])))


def test_scheduled_step_begin_sees_state_before_its_step():
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


def test_trigger_runs_at_period_instead_of_end_of_epoch():
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
    # FitBegin, FitStopping, FitEnd and the epochs' own events are not counted in steps; Trigger comes at the period.
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
        ("FitStopping", 8),
        ("FitEnd", 8),
    ]


def test_epoch_schedules_cover_whole_epochs():
    log = EventLog()
    testlearner(every(log, epochs=2), batches=1, validation_batches=0).fit(3)
    assert [(name, epoch) for name, _, _, epoch, _ in log.entries] == [
        ("FitBegin", 0),
        *[(name, 2) for name in ("EpochBegin", "StepBegin", "StepEnd", "EpochEnd", "Trigger")],
        ("FitStopping", 3),
        ("FitEnd", 3),
    ]
