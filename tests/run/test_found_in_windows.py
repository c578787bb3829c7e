"""Regression tests for defects of windows."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fluxcb import Append, Callback, CancelStep, DataError, EverySeconds, EverySteps, Learner, Read, Write, on
from fluxcb.callbacks import ToDevice
from fluxcb.data import ArrayLoader, place
from fluxcb.events import BackwardEnd, EpochBegin, StepBegin, StepEnd, Trigger, UpdateEnd
from fluxcb.phases import TrainingPhase
from fluxcb.testing import testlearner

LENGTHS = [1, 8, 64]


def learner_of(data, *callbacks, **arguments):
    """Return a Learner with one weight that stays 0."""
    return Learner.from_loss(
        {"w": jnp.zeros(())},
        lambda params, batch, key: jnp.mean(params["w"] * batch),
        optax.sgd(0.0),
        data=data,
        callbacks=list(callbacks),
        default_callbacks=False,
        **arguments,
    )


class Batches(Callback):
    """Keep the first number of each batch."""

    def __init__(self):
        self.seen = []

    def stateaccess(self):
        return {"step": {"batch": Read()}}

    @on
    def note(self, event: StepEnd, phase: TrainingPhase, learner):
        self.seen.append(int(np.ravel(learner.step.batch)[0]))


class StopsAt(Callback):
    """Stop the window at one batch without a cancel."""

    def __init__(self, number):
        self.number = number

    def stateaccess(self):
        return {"step": {"batch": Read(), "stop": Append()}}

    @on
    def stop(self, event: BackwardEnd, phase: TrainingPhase, learner):
        learner.step.stop = learner.step.batch[0, 0] == self.number


def numbered(count):
    return [np.full((4, 2), i, np.float32) for i in range(count)]


@pytest.mark.parametrize("steps_per_call", LENGTHS)
@pytest.mark.parametrize("number", [0, 1, 2, 3, 9, 40, 99])
def test_stop_without_cancel_keeps_order_of_batches(steps_per_call, number):
    batches = Batches()
    learner_of(numbered(100), StopsAt(number), batches, steps_per_call=steps_per_call).fit(1)
    assert batches.seen == list(range(100))


@pytest.mark.parametrize("steps_per_call", LENGTHS)
@pytest.mark.parametrize("fails_at", [20, 21, 25, 30, 34])
def test_source_error_is_raised_after_returned_batches(steps_per_call, fails_at):
    class Breaks:
        def __iter__(self):
            yield from numbered(fails_at)
            raise OSError("gone")

    batches = Batches()
    learner = learner_of(Breaks(), StopsAt(19), batches, steps_per_call=steps_per_call, example_batch=numbered(1)[0])
    with pytest.raises(OSError, match="gone"):
        learner.fit(1)
    assert batches.seen == list(range(fails_at))


class Clock:
    """A clock that advances when it is read."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        self.now += 1.0
        return self.now


@pytest.fixture
def ticking(monkeypatch):
    monkeypatch.setattr("fluxcb._declare.schedules.time.monotonic", Clock())


def weights_by_step(count):
    """Return the weight after each step of the test Learner, computed in single steps."""
    learner, found = testlearner(batches=count, validation_batches=0), [0.0]
    for _ in range(count):
        learner.fit(steps=1, steps_per_epoch=count)
        found.append(float(learner.params["w"]))
    return found


class Weights(Callback):
    """Keep (steps finished, weight)."""

    def __init__(self):
        self.seen = []

    def stateaccess(self):
        return {"params": Read()}

    def note(self, learner):
        self.seen.append((learner.progress.step, float(learner.params["w"])))


@pytest.mark.parametrize("steps_per_call", LENGTHS)
@pytest.mark.parametrize("event", [Trigger, StepBegin, StepEnd])
def test_time_scheduled_handlers_see_state_of_their_step(ticking, event, steps_per_call):
    class ByClock(Weights):
        @on(event, TrainingPhase, when=EverySeconds(1))
        def look(self, event, phase, learner):
            self.note(learner)

    by_clock, truth = ByClock(), weights_by_step(60)
    testlearner(by_clock, batches=60, validation_batches=0, steps_per_call=steps_per_call).fit(1)
    assert by_clock.seen
    assert by_clock.seen == [(step, truth[step]) for step, _ in by_clock.seen]


@pytest.mark.parametrize("steps_per_call", LENGTHS)
def test_time_scheduled_cancel_skips_only_its_step(ticking, steps_per_call):
    class Skips(Callback):
        count = 0

        def stateaccess(self):
            return {"control": Append()}

        @on(StepBegin, TrainingPhase, when=EverySeconds(5))
        def skip(self, event, phase, learner):
            self.count += 1
            raise CancelStep

    skips = Skips()
    learner = testlearner(skips, batches=60, validation_batches=0, steps_per_call=steps_per_call)
    learner.fit(1)
    assert skips.count > 0
    assert learner.step == 60 - skips.count


@pytest.mark.parametrize("steps_per_call", LENGTHS)
def test_write_before_step_does_not_hide_result_of_step(steps_per_call):
    class Writes(Callback):
        def stateaccess(self):
            return {"params": Write()}

        @on(StepBegin, TrainingPhase, when=EverySteps(5))
        def write(self, event, phase, learner):
            learner.params = {**learner.params, "b": jnp.float32(0.5)}

    class Reads(Weights):
        @on
        def look(self, event: StepEnd, phase: TrainingPhase, learner):
            self.note(learner)

    reads, one = Reads(), Reads()
    testlearner(Writes(), reads, batches=40, validation_batches=0, steps_per_call=steps_per_call).fit(1)
    by_hand = testlearner(Writes(), one, batches=40, validation_batches=0)
    for batch in by_hand._core.streams["training"].source:
        by_hand.run_step(TrainingPhase(), batch)
    assert reads.seen == one.seen


@pytest.mark.parametrize("program", ["loop", "straight"])
@pytest.mark.parametrize("steps_per_call", LENGTHS)
def test_large_value_at_stopped_step_is_correct(ticking, steps_per_call, program):
    class Large(Callback):
        def __init__(self):
            self.seen = []

        def stateaccess(self):
            return {"step": {"batch": Read(), "large": Write()}}

        @on
        def make(self, event: BackwardEnd, phase: TrainingPhase, learner):
            learner.step.large = jnp.full(200, learner.step.batch[0, 0] + 1)

        @on(StepEnd, TrainingPhase, when=EverySeconds(3), access={"step": {"large": Read()}})
        def look(self, event, phase, learner):
            self.seen.append((learner.progress.step, learner.step.large[7]))

    class StopsOften(StopsAt):
        @on
        def stop(self, event: BackwardEnd, phase: TrainingPhase, learner):
            learner.step.stop = learner.step.batch[0, 0] % 3 == 0

    large = Large()
    learner_of(numbered(60), StopsOften(0), large, steps_per_call=steps_per_call, program=program).fit(1)
    assert large.seen
    assert large.seen == [(step, step) for step, _ in large.seen]


def test_placed_loader_with_reused_buffer_is_copied():
    class Reuses:
        def __init__(self):
            raw = np.zeros(4096, np.uint8)
            start = -raw.ctypes.data % 64
            self.buffer = raw[start : start + 32].view(np.float32).reshape(4, 2)

        def __iter__(self):
            for i in range(40):
                self.buffer[:] = i
                yield self.buffer

    batches = Batches()
    learner_of(place(Reuses(), jax.devices()[0]), batches).fit(1)
    assert batches.seen == list(range(40))


def test_error_of_earlier_pass_is_not_raised_again():
    class BreaksOnce:
        passes = 0

        def __iter__(self):
            self.passes += 1
            yield from numbered(20)
            if self.passes == 1:
                raise OSError("once")

    class Fails(Callback):
        @on
        def fail(self, event: StepEnd, phase: TrainingPhase, learner):
            if learner.progress.step == 5:
                raise RuntimeError("at step 5")

    learner = learner_of(BreaksOnce(), Fails(), example_batch=numbered(1)[0], steps_per_call=64)
    with pytest.raises(RuntimeError, match="at step 5"):
        learner.fit(1)
    before = learner.step
    learner.fit(1)
    assert learner.step == before + 20


@pytest.mark.parametrize("steps_per_call", LENGTHS)
def test_batches_without_arrays_run_steps_but_none_raises(steps_per_call):
    learner = Learner.from_loss(
        {"w": jnp.ones(())},
        lambda params, batch, key: params["w"] ** 2,
        optax.sgd(0.1),
        data=[()] * 20,
        default_callbacks=False,
        steps_per_call=steps_per_call,
    )
    learner.fit(1)
    assert learner.step == 20
    with pytest.raises(DataError) as raised:
        learner_of([numbered(1)[0], None], steps_per_call=steps_per_call).fit(1)
    assert str(raised.value).splitlines()[0] == "`data.training` yields None, which is not a batch."


def test_replaced_data_uses_windows_and_frees_old_data(no_clock):
    xs = np.arange(400, dtype=np.float32).reshape(200, 2)

    class Exchanges(Callback):
        def stateaccess(self):
            return {"data": {"training": Write()}}

        @on
        def exchange(self, event: EpochBegin, phase: TrainingPhase, learner):
            if learner.progress.epoch == 1:
                learner.data.training = ArrayLoader(xs, 4, shuffle=False)

    learner = learner_of(ArrayLoader(xs, 2, device=True), Exchanges(), steps_per_call=8)
    learner.fit(3)
    runner = learner._core.engine.step_loop(learner.phases[0]).runner
    assert runner.window_program is not None
    assert runner.window_program.step.batch_spec.shape == (4, 2)
    assert runner.calls < learner.step / 4


def test_train_state_moves_to_second_device():
    device = jax.devices()[0]
    learner = testlearner(ToDevice(device))
    learner.fit(1)
    assert learner._state.train.carry["counters"].committed
    learner.callbacks.replace(ToDevice(device))
    learner.fit(1)
    assert learner.step == 8


@pytest.mark.parametrize("steps_per_call", LENGTHS)
def test_random_key_in_carry_can_be_read(steps_per_call):
    class Keys(Callback):
        def __init__(self):
            self.seen = []

        def stateaccess(self):
            return {"cbstate": {"random": Write()}}

        def init(self, learner):
            learner.cbstate.random = jax.random.key(0)

        @on
        def split(self, event: UpdateEnd, phase: TrainingPhase, learner):
            learner.cbstate.random = jax.random.split(learner.cbstate.random)[0]

        @on(StepEnd, TrainingPhase, access={"cbstate": {"random": Read()}})
        def look(self, event, phase, learner):
            self.seen.append(jax.random.key_data(learner.cbstate.random).tolist())

    keys, key, expected = Keys(), jax.random.key(0), []
    testlearner(keys, batches=6, validation_batches=0, steps_per_call=steps_per_call).fit(1)
    for _ in range(6):
        key = jax.random.split(key)[0]
        expected.append(jax.random.key_data(key).tolist())
    assert keys.seen == expected


def test_appending_to_batch_changes_step():
    class Doubles(Callback):
        def stateaccess(self):
            return {"step": {"batch": Append()}}

        @on
        def double(self, event: StepBegin, phase: TrainingPhase, learner):
            learner.step.batch = np.full((4, 2), 7, np.float32)

    batches = Batches()
    learner_of(numbered(10), Doubles(), batches).fit(1)
    assert batches.seen == [7] * 10


def test_replaced_callbacks_and_programs_are_freed():
    import gc
    import weakref

    learner = testlearner(batches=4)
    references = []
    for limit in range(4):
        from fluxcb.callbacks import ClipGradients

        clip = ClipGradients(1.0 + limit)
        learner.callbacks.set([clip])
        references.append(weakref.ref(clip))
        learner.fit(1)
    del clip
    learner.callbacks.set([])
    learner.fit(1)
    gc.collect()
    assert [reference() for reference in references] == [None] * 4
    assert len(learner._core.engine.programs.compiled) <= 4  # training and validation, no matter how often


def test_kept_part_neither_copies_nor_holds_rest():
    class Reads(Callback):
        def stateaccess(self):
            return {"params": {"b": Read()}}

        @on
        def look(self, event: StepEnd, phase: TrainingPhase, learner):
            self.last = learner.params.b

    reads = Reads()
    learner = Learner(
        (
            lambda key, xs: {"w": jnp.zeros((512, 512)), "b": jnp.zeros(2048)},
            lambda params, xs: xs * params["b"][0] + params["w"][0, 0],
        ),
        lambda outputs, ys: jnp.mean((outputs - ys) ** 2),
        optax.sgd(0.1),
        data=[(np.ones((4, 1), np.float32), np.ones((4, 1), np.float32))] * 6,
        callbacks=[reads],
        default_callbacks=False,
    )
    learner.fit(1)
    plan = learner._core.engine.step_loop(learner.phases[0]).runner.plan
    assert [(bound.keeps, bound.blocks) for bound in plan.bounds] == [((("params", "b"),), False)]
    np.testing.assert_array_equal(reads.last, learner.params["b"])


@pytest.mark.parametrize(("steps_per_call", "most"), [(1, 4), (16, 4)])
def test_byte_limit_applies_to_single_steps(steps_per_call, most, monkeypatch, no_clock):
    from fluxcb._run import step_loop

    lengths, look = [], step_loop.StepLoop._finish_window

    def spy(self, window, stream, *, following=None):
        lengths.append(window.length)
        look(self, window, stream, following=following)

    monkeypatch.setattr(step_loop.StepLoop, "_finish_window", spy)
    batch_and_row = 4 * 2 * 4 + 4 * 2
    learner_of(numbered(40), steps_per_call=steps_per_call, window_bytes=most * batch_and_row).fit(1)
    assert max(lengths) == most


def test_interrupt_from_source_loses_no_batch(no_clock):
    class Goes:
        left, pressed = numbered(10), False

        def __iter__(self):
            return self

        def __next__(self):
            if self.left:
                return self.left.pop(0)
            if not self.pressed:
                self.pressed = True
                raise KeyboardInterrupt
            raise StopIteration

    batches = Batches()
    learner = learner_of(Goes(), batches, example_batch=numbered(1)[0], steps_per_call=1)
    with pytest.raises(KeyboardInterrupt):
        learner.fit(1)
    first = list(batches.seen)
    learner.fit(1)
    assert batches.seen == list(range(10))
    assert len(first) < 10


def test_kept_slice_does_not_keep_window():
    class Keeps(Callback):
        def __init__(self):
            self.kept = []

        def stateaccess(self):
            return {"step": {"grads": Read()}}

        @on
        def keep(self, event: StepEnd, phase: TrainingPhase, learner):
            self.kept.append(learner.step.grads["w"])

    keeps = Keeps()
    learner = Learner.from_loss(
        {"w": jnp.zeros(1000)},
        lambda params, batch, key: jnp.sum(params["w"]) * jnp.mean(batch),
        optax.sgd(0.1),
        data=numbered(30),
        callbacks=[keeps],
        default_callbacks=False,
        steps_per_call=10,
    )
    learner.fit(1)
    assert [float(value[3]) for value in keeps.kept] == [float(i) for i in range(30)]
    assert {value.nbytes if value.base is None else value.base.nbytes for value in keeps.kept[1:]} == {4000}
    assert not any(value.flags.writeable for value in keeps.kept)
