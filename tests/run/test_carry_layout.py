"""Packing the carry into few arrays is invisible to host handlers and users."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import Callback, Read, StateLostError, Write, every, on
from fluxcb._compile.carry_layout import CarryLayout
from fluxcb.callbacks import Metrics, ParameterEMA, StopOnNaNLoss
from fluxcb.events import EpochBegin, StepEnd
from fluxcb.phases import TrainingPhase, ValidationPhase

LENGTHS = [1, 4, "auto"]

pytestmark = pytest.mark.usefixtures("no_clock")


def learner_of(*callbacks, **arguments):
    rng = np.random.default_rng(0)
    batches = [(rng.normal(size=(8, 6)).astype(np.float32), rng.integers(0, 3, 8).astype(np.int32)) for _ in range(12)]

    def init(key, xs):
        key, other = jax.random.split(key)
        first, last = jax.random.normal(key, (6, 20)) / 4, jax.random.normal(other, (20, 3)) / 4
        wide = jnp.zeros((40, 40))  # lies by itself
        return {"w1": first, "b1": jnp.zeros(20), "w2": last, "b2": jnp.zeros(3), "wide": wide}

    def apply(params, xs):
        hidden = jnp.tanh(xs @ params["w1"] + params["b1"] + params["wide"].sum())
        return hidden @ params["w2"] + params["b2"]

    return fluxcb.Learner(
        (init, apply),
        lambda outputs, ys: optax.softmax_cross_entropy_with_integer_labels(outputs, ys).mean(),
        arguments.pop("optimizer", fluxcb.inject(optax.adam, learning_rate=0.01)),
        data=(batches, batches[:3]),
        callbacks=callbacks,
        default_callbacks=False,
        **arguments,
    )


@pytest.fixture
def as_it_is(monkeypatch):
    """Return a function that disables packing for new Learners."""
    return lambda: monkeypatch.setattr(CarryLayout, "of", classmethod(lambda cls, carry: None))


class Notes(Callback):
    """Record copies of everything that the callback may read."""

    def __init__(self):
        self.seen = []

    def stateaccess(self):
        return {
            "params": Read(),
            "opt_state": Read(),
            "hyperparams": {"learning_rate": Read()},
            "cbstate": {"ema": Read(), "metrics_now": Read()},
        }

    def state_dict(self):
        return {}

    @on
    def note(self, event: StepEnd, phase: TrainingPhase, learner):
        parts = [learner.params, learner.opt_state, learner.hyperparams.learning_rate]
        parts += [learner.cbstate.ema, learner.cbstate.metrics_now]
        self.seen.append(jax.tree.map(np.array, jax.tree.leaves(parts)))


class Writes(Callback):
    def stateaccess(self):
        return {"hyperparams": {"learning_rate": Write()}, "params": {"b2": Write()}, "progress": {"step": Read()}}

    @on
    def write(self, event: StepEnd, phase: TrainingPhase, learner):
        learner.hyperparams.learning_rate = 0.02 / (1 + learner.progress.step)
        learner.params.b2 = learner.params.b2 * 0.5


def trained(steps_per_call, writes):
    notes = Notes()
    more = [every(Writes(), steps=7)] if writes else []
    callbacks = [ParameterEMA(0.9), Metrics(), StopOnNaNLoss(), *more, every(notes, steps=5)]
    learner = learner_of(*callbacks, steps_per_call=steps_per_call)
    learner.fit(3)
    return learner, notes.seen


@pytest.mark.parametrize("steps_per_call", LENGTHS)
@pytest.mark.parametrize("writes", [False, True], ids=["reads", "writes"])
def test_packing_does_not_change_results(as_it_is, steps_per_call, writes):
    learner, seen = trained(steps_per_call, writes)
    assert learner._state.train.layout is not None
    one, seen_one = trained(1, writes)
    assert len(seen) == 36 // 5
    for a, b in zip(jax.tree.leaves((learner.state, seen)), jax.tree.leaves((one.state, seen_one)), strict=True):
        assert a.dtype == b.dtype
        assert np.array_equal(*(jax.random.key_data(x) if a.dtype == learner.state["key"].dtype else x for x in (a, b)))
    as_it_is()
    other, seen_there = trained(steps_per_call, writes)
    assert other._state.train.layout is None
    for a, b in zip(jax.tree.leaves((learner.params, seen)), jax.tree.leaves((other.params, seen_there)), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6)  # another program: the last bits may differ


def test_programs_take_few_arrays():
    learner = learner_of(Metrics(), ParameterEMA(0.9), steps_per_call=1)
    learner.fit(1)
    # One vector of floats, one of integers; `wide` with its two averages and its moving average, each by itself.
    taken = learner._state.train.lend(learner._state.train.layout)
    assert sorted(x.shape for x in taken if x.ndim == 2) == [(40, 40)] * 4
    assert sorted(str(x.dtype) for x in taken if x.ndim == 1) == ["float32", "int32"]
    assert len(taken) == 6


def test_straight_program_takes_unpacked_train_state(as_it_is):
    straight = [learner_of(Metrics(), program="straight") for _ in range(2)]
    straight[0].fit(2)
    assert [p.layout for p in straight[0]._core.engine.programs.compiled] == [None, None]
    as_it_is()
    straight[1].fit(2)
    jax.tree.map(np.testing.assert_array_equal, straight[0].params, straight[1].params)


def test_long_step_takes_unpacked_train_state():
    width, rows = 400, 64  # 2 * 64 * 400 * 400 operations in the forward pass alone: more than 2e7
    batches = [(np.ones((rows, width), np.float32), np.zeros((rows, width), np.float32))] * 3
    small = {f"b{number}": jnp.zeros(width) for number in range(8)}

    def apply(params, xs):
        return xs @ params["w"] + sum(params[name] for name in small)

    learner = fluxcb.Learner(
        (lambda key, xs: {"w": jnp.zeros((width, width)), **small}, apply),
        lambda outputs, ys: jnp.mean((outputs - ys) ** 2),
        fluxcb.inject(optax.adam, learning_rate=0.01),
        data=(batches, [(xs[:8], ys[:8]) for xs, ys in batches]),  # the validation step is short
    )
    assert learner._state.train.layout is not None
    learner.fit(2)
    programs = learner._core.engine.programs.compiled
    assert {type(program.step.phase) for program in programs} == {TrainingPhase, ValidationPhase}
    assert {program.layout for program in programs} == {None}


def test_large_batch_does_not_change_packing():
    phase = TrainingPhase()
    learner = learner_of(phases=(phase, ValidationPhase()), steps_per_call=1)
    rows = 100_000  # 2 * 100,000 * (6 * 20 + 20 * 3) operations in the forward pass: more than 2e7
    for examples in (8, rows, 8):
        learner.run_step(phase, (np.zeros((examples, 6), np.float32), np.zeros(examples, np.int32)))
    programs = learner._core.engine.programs.compiled
    assert [program.step.small for program in programs] == [True, False]
    assert programs[0].layout is not None
    assert programs[0].layout == programs[1].layout


class Rates(Callback):
    def stateaccess(self):
        return {"hyperparams": {"learning_rate": Write()}, "progress": {"step": Read()}}

    @on
    def set_rate(self, event: StepEnd, phase: TrainingPhase, learner):
        learner.hyperparams.learning_rate = 0.02 / (1 + learner.progress.step)


@pytest.mark.parametrize("others", [[], [Rates()]], ids=["alone", "beside a write"])
def test_borrowed_arrays_are_deleted_after_next_step(others):
    borrowed, gone = [], []

    class Borrows(Callback):
        def stateaccess(self):
            return {"params": Read(borrow=True)}

        @on
        def look(self, event: StepEnd, phase: TrainingPhase, learner):
            gone.append([leaf.is_deleted() for leaf in jax.tree.leaves(borrowed)])
            borrowed[:] = jax.tree.leaves(learner.params)

    learner_of(Borrows(), *others).fit(1)
    assert gone[0] == []
    assert gone[1:] == [[True] * 5] * 11


def test_handler_may_move_train_state():
    class Moves(Callback):
        def stateaccess(self):
            return {"params": Write(), "progress": {"epoch": Read()}}

        @on
        def move(self, event: EpochBegin, phase: TrainingPhase, learner):
            if learner.progress.epoch == 2:
                params = jax.device_put(learner.params, jax.devices()[0])
                assert all(leaf.committed for leaf in jax.tree.leaves(params))
                learner.params = params

    for steps_per_call in LENGTHS:
        learner, still = (learner_of(*given, steps_per_call=steps_per_call) for given in ([Moves()], []))
        learner.fit(1)
        assert learner._state.train.layout is not None
        learner.fit(2)
        assert learner._state.train.layout is None
        assert learner._state.train.carry["params"]["b1"].committed
        still.fit(3)
        for a, b in zip(jax.tree.leaves(learner.params), jax.tree.leaves(still.params), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_reading_between_manually_run_steps(as_it_is):
    def by_hand(learner):
        batch, losses = (np.ones((8, 6), np.float32), np.arange(8, dtype=np.int32) % 3), []
        for _ in range(4):
            losses.append(float(learner.run_step(learner.phases[0], batch)["loss"]))
            losses += [float(leaf.sum()) for leaf in jax.tree.leaves(learner.params)]
            learner.state = learner.state
        return losses, learner.compile_counts

    losses, counts = by_hand(learner_of(Metrics()))
    as_it_is()
    expected, counts_there = by_hand(learner_of(Metrics()))
    assert losses == pytest.approx(expected, rel=1e-5, abs=1e-6)
    assert counts == counts_there


@pytest.mark.parametrize("steps_per_call", [1, 4])
@pytest.mark.parametrize("donated", [False, True])
def test_failing_call_keeps_previous_state(steps_per_call, donated):
    learner = learner_of(Metrics(), steps_per_call=steps_per_call)
    learner.fit(1)
    before = learner.params
    runner = learner._core.engine.step_loop(learner.phases[0]).runner
    program = runner._step_program if steps_per_call == 1 else runner.window_program
    call = program.call

    def failing(*arguments):
        if donated:
            call(*arguments)
        raise RuntimeError("the device is gone")

    object.__setattr__(program, "call", failing)
    with pytest.raises(RuntimeError, match="the device is gone"):
        learner.fit(1)
    object.__setattr__(program, "call", call)
    if donated:
        with pytest.raises(StateLostError):
            _ = learner.params
        return
    for a, b in zip(jax.tree.leaves(learner.params), jax.tree.leaves(before), strict=True):
        assert np.array_equal(a, b)
    learner.fit(1)
    assert learner.step == 24


class Smooths(ValidationPhase):
    """A phase with a convolution, which runs straight, while training runs in a loop."""

    def step(self, learner, emit):
        super().step(learner, emit)
        learner.step.loss = jnp.convolve(learner.step.outputs[:, 0], jnp.ones(3)).mean()


def test_failing_call_of_straight_program():
    learner = learner_of(Metrics(), steps_per_call=4, phases=(TrainingPhase(), Smooths()))
    learner.fit(1)
    layouts = {program.layout is None for program in learner._core.engine.programs.compiled}
    assert layouts == {True, False}
    runner = learner._core.engine.step_loop(learner.phases[1]).runner
    program = runner._step_program
    assert program.layout is None
    call = program.call

    def failing(*arguments):
        call(*arguments)  # takes what it was given
        raise RuntimeError("the device is gone")

    object.__setattr__(program, "call", failing)
    with pytest.raises(RuntimeError, match="the device is gone"):
        learner.fit(1)
    with pytest.raises(StateLostError):
        _ = learner.params


@pytest.mark.parametrize("optimizer", [optax.adam(0.01), optax.sgd(0.01)], ids=["packed counters", "separate counters"])
def test_counters_written_by_the_host_are_jax_arrays_in_the_carry(optimizer):
    # With SGD, the counters are the only integers of the carry, so they are a separate array and not part of a vector.
    learner = learner_of(optimizer=optimizer)
    learner.fit(1)
    train = learner._core.state.train
    arrays, layout = train._arrays, train._layout
    assert isinstance(layout, CarryLayout)
    train.set_counters(learner._core.state.progress)
    assert not all(isinstance(array, jax.Array) for array in train._arrays)  # the next call transfers them
    parts = layout.unpack(train._arrays), layout.extract(train._arrays, layout.indices)
    for carry in parts:
        assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(carry))
        np.testing.assert_array_equal(carry["counters"][:3], [12, 1, 12])
    assert train._arrays[0] is arrays[0]
    learner.fit(1)
    assert (learner.step, learner.epoch) == (24, 2)
