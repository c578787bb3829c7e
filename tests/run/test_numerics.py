"""Training matches a hand-written loop, regardless of callbacks and windows."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import Append, Callback, Learner, Read, Write, on
from fluxcb.callbacks import ClipGradients, Metrics, ParameterEMA
from fluxcb.events import BackwardBegin, EpochBegin, StepBegin, StepEnd
from fluxcb.phases import TrainingPhase
from fluxcb.testing import EventLog, testlearner


def init(key, xs):
    one, two = jax.random.split(key)
    return {"in": jax.random.normal(one, (3, 8)), "out": jax.random.normal(two, (8, 2)), "bias": jnp.zeros(2)}


def apply(params, xs):
    return jnp.tanh(xs @ params["in"]) @ params["out"] + params["bias"]


def loss_fn(outputs, ys):
    return jnp.mean((outputs - ys) ** 2)


def make_batches(count=12, seed=0):
    rng = np.random.default_rng(seed)
    xs = rng.normal(size=(count, 16, 3)).astype(np.float32)
    ys = rng.normal(size=(count, 16, 2)).astype(np.float32)
    return list(zip(xs, ys, strict=True))


BATCHES = make_batches()


def make(*callbacks, optimizer=None, data=BATCHES, **kwargs):
    return Learner(
        (init, apply),
        loss_fn,
        optimizer or optax.adam(0.01),
        data=data,
        callbacks=callbacks,
        default_callbacks=False,
        **kwargs,
    )


def assert_bits_equal(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(bits(a), bits(b)), left, right)


def bits(x):
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def by_hand(params, optimizer, epochs):
    """Return the parameters and losses of a hand-written loop."""

    @jax.jit
    def step(params, opt_state, batch):
        xs, ys = batch
        loss, grads = jax.value_and_grad(lambda p: loss_fn(apply(p, xs), ys))(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_state, losses = optimizer.init(params), []
    for batch in BATCHES * epochs:
        params, opt_state, loss = step(params, opt_state, batch)
        losses.append(float(loss))
    return params, opt_state, losses


class Losses(Callback):
    def __init__(self):
        self.values = []

    def stateaccess(self):
        return {"step": {"loss": Read()}}

    @on
    def keep(self, event: StepEnd, phase: TrainingPhase, learner):
        self.values.append(float(learner.step.loss))


OPTIMIZERS = {
    "adam": lambda: optax.adam(0.01),
    "injected": lambda: fluxcb.inject(optax.adam, learning_rate=0.01),
    "chain": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9)),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("program", ["straight", "loop"])
def test_training_matches_hand_written_loop(name, program):
    losses = Losses()
    learner = make(losses, optimizer=OPTIMIZERS[name](), program=program)
    params, opt_state, expected = by_hand(learner.params, OPTIMIZERS[name](), 3)
    learner.fit(3)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), learner.params, params)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), learner.state["opt_state"], opt_state
    )
    np.testing.assert_allclose(losses.values, expected, rtol=1e-5)


def test_straight_program_matches_hand_written_step_bit_for_bit():
    learner = make(program="straight", optimizer=optax.sgd(0.1))
    params, _, _ = by_hand(learner.params, optax.sgd(0.1), 2)
    learner.fit(2)
    assert_bits_equal(learner.params, params)


@pytest.mark.parametrize("program", ["straight", "loop"])
def test_list_order_does_not_change_training(program):
    makers = [lambda: ClipGradients(0.1), Metrics, lambda: ParameterEMA(0.9), Losses]
    results = []
    for order in itertools.permutations(makers):
        learner = make(*(maker() for maker in order), program=program)
        learner.fit(1)
        results.append(learner.state)
        if len(results) > 6:  # 7 of the 24 orders; each compiles
            break
    for other in results[1:]:
        assert_bits_equal(results[0], other)


class MayCancel(Callback):
    """Limit each window to one step, without doing anything."""

    def __init__(self, event):
        self.event = event

    def stateaccess(self):
        return {"control": Append()}

    @on
    def look(self, event: StepBegin | StepEnd, phase: TrainingPhase, learner):
        pass


class LooksAtParams(Callback):
    def __init__(self):
        self.seen = []

    def stateaccess(self):
        return {"params": Read()}

    @on
    def look(self, event: StepEnd, phase: TrainingPhase, learner):
        self.seen.append(np.array(learner.params["bias"]))


class EveryValue(Callback):
    """Keep every value of each step."""

    def __init__(self):
        self.values = []

    def stateaccess(self):
        return {"step": {n: Read() for n in ("loss", "outputs", "grads", "updates", "batch")}}

    @on
    def keep(self, event: StepEnd, phase: TrainingPhase, learner):
        step = learner.step
        self.values.append(
            jax.tree.map(
                np.array, [learner.progress.step, step.loss, step.outputs, step.grads, step.updates, step.batch]
            )
        )


@pytest.mark.parametrize("program", ["straight", "loop"])
def test_limiting_windows_changes_nothing(program):
    def run(*others):
        log, values = EventLog(), EveryValue()
        learner = make(log, values, *others, program=program, data=(BATCHES, BATCHES[:2]))
        learner.fit(2)
        learner.fit(steps=7)
        return log.entries, values.values, learner.state

    entries, values, state = run()
    assert len(values) == 31
    for others in ([MayCancel(StepBegin)], [LooksAtParams()]):
        other_entries, other_values, other_state = run(*others)
        assert entries == other_entries
        jax.tree.map(np.testing.assert_array_equal, values, other_values)
        assert_bits_equal(state, other_state)


def test_each_handler_sees_values_of_its_step():
    values = EveryValue()
    learner = make(values, optimizer=optax.sgd(0.1))
    params = jax.tree.map(np.array, learner.params)
    learner.fit(1)
    for number, (step, loss, outputs, grads, updates, batch) in enumerate(values.values, 1):
        assert step == number
        np.testing.assert_array_equal(batch[0], BATCHES[number - 1][0])
        np.testing.assert_allclose(outputs, apply(params, batch[0]), rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(loss, np.mean((outputs - batch[1]) ** 2), rtol=1e-5)
        expected = jax.grad(lambda p, batch=batch: loss_fn(apply(p, batch[0]), batch[1]))(params)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5), grads, expected)
        jax.tree.map(lambda u, g: np.testing.assert_allclose(u, -0.1 * g, rtol=1e-5, atol=1e-8), updates, grads)
        params = jax.tree.map(lambda p, u: p + u, params, updates)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), learner.params, params)


def test_step_end_sees_updated_parameters():
    looks, values = LooksAtParams(), EveryValue()
    learner = make(looks, values)
    first = np.array(learner.params["bias"])
    learner.fit(1)
    steps = np.array([v[4]["bias"] for v in values.values])
    np.testing.assert_allclose(looks.seen, first + np.cumsum(steps, 0), rtol=1e-4, atol=1e-6)
    np.testing.assert_array_equal(looks.seen[-1], learner.params["bias"])


def test_same_key_gives_same_training():
    one, same, other = make(key=3), make(key=jax.random.key(3)), make(key=4)
    for learner in (one, same, other):
        learner.fit(1)
    assert_bits_equal(one.state, same.state)
    assert not np.array_equal(one.params["in"], other.params["in"])


# -- donation: what the user holds stays alive -------------------------------------------------------------------------


def test_user_parameters_are_not_donated():
    params = {"w": jnp.ones((3, 2))}
    learner = Learner.from_loss(
        params,
        lambda p, batch, key: jnp.mean((batch[0] @ p["w"] - batch[1]) ** 2),
        optax.adam(0.1),
        data=BATCHES,
        default_callbacks=False,
    )
    learner.fit(2)
    np.testing.assert_array_equal(params["w"], np.ones((3, 2)))
    assert not np.array_equal(learner.params["w"], np.ones((3, 2)))


def test_device_batches_are_not_donated():
    data = [jax.tree.map(jnp.asarray, batch) for batch in BATCHES]
    learner = make(data=data)
    learner.fit(2)
    jax.tree.map(np.testing.assert_array_equal, data, [tuple(b) for b in BATCHES])


def test_kept_references_stay_valid():
    learner = make()
    before = learner.params
    copied = jax.tree.map(np.array, before)
    learner.fit(1)
    after = learner.params
    learner.fit(1)
    jax.tree.map(np.testing.assert_array_equal, before, copied)
    assert not np.array_equal(after["in"], learner.params["in"])


class KeepsParams(Callback):
    def __init__(self):
        self.kept = []

    def stateaccess(self):
        return {"params": Read()}

    @on
    def keep(self, event: EpochBegin, phase: TrainingPhase, learner):
        self.kept.append(learner.params)


def test_values_from_host_reads_survive_next_step():
    keeps = KeepsParams()
    learner = make(keeps)
    first = jax.tree.map(np.array, learner.params)
    learner.fit(1)
    second = jax.tree.map(np.array, learner.params)
    learner.fit(1)
    jax.tree.map(np.testing.assert_array_equal, keeps.kept, [first, second])


def test_array_key_is_not_donated():
    key = jax.random.key(5)
    make(key=key).fit(1)
    assert jax.random.key_data(key).tolist() == jax.random.key_data(jax.random.key(5)).tolist()


class Reuses:
    """Yield the same buffers repeatedly with other contents."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        xs, ys = np.empty((16, 3), np.float32), np.empty((16, 2), np.float32)
        for one, two in self.batches:
            xs[:], ys[:] = one, two
            yield xs, ys


def test_source_with_reused_buffers_trains_correctly():
    learner, reference = make(data=Reuses(BATCHES)), make()
    learner.fit(2)
    reference.fit(2)
    assert_bits_equal(learner.state, reference.state)


def test_state_can_be_copied_to_other_learner():
    reference, first = make(), make()
    reference.fit(3)
    first.fit(1)
    state = first.state
    first.fit(1)  # the state taken out is a copy
    second = make(key=9)
    second.state = state
    assert (second.step, second.epoch) == (12, 1)
    second.fit(2)
    assert_bits_equal(second.state, reference.state)
    assert (second.step, second.epoch) == (36, 3)


def test_state_with_other_structure_raises():
    learner = make()
    state = learner.state
    state["params"]["bias"] = jnp.zeros(3)
    with pytest.raises(fluxcb.DeclarationError) as raised:
        learner.state = state
    assert str(raised.value) == (
        "The assigned state does not fit the Learner: ['params']['bias']: expected float32[2], got float32[3].\n"
        "  fix:   assign what `learner.state` returned, with other values"
    )
    learner.fit(1)


class Replaces(Callback):
    """Replace the parameters with new arrays at each epoch."""

    def __init__(self, params):
        self.params = params

    def stateaccess(self):
        return {"params": Write()}

    @on
    def put(self, event: EpochBegin, phase: TrainingPhase, learner):
        learner.params = self.params


def test_arrays_assigned_by_host_handler_survive_donation():
    params = make().params
    copied = jax.tree.map(np.array, params)
    learner = make(Replaces(params))
    learner.fit(2)
    jax.tree.map(np.testing.assert_array_equal, params, copied)
    reference = make()
    reference.fit(1)
    # The second epoch started from the same parameters again, but with adam's state of the first.
    assert not np.array_equal(learner.params["in"], reference.params["in"])


class PreparesBatch(Callback):
    def stateaccess(self):
        return {"step": {"batch": Write()}}

    @on
    def scale(self, event: StepBegin, phase: TrainingPhase, learner):
        xs, ys = learner.step.batch
        learner.step.batch = (xs * 2, ys)


def test_host_handler_can_prepare_batch():
    learner = make(PreparesBatch())
    reference = make(data=[(xs * 2, ys) for xs, ys in BATCHES])
    learner.fit(2)
    reference.fit(2)
    assert_bits_equal(learner.state, reference.state)


class HalvesRate(Callback):
    def __init__(self, after):
        self.after = after

    def stateaccess(self):
        return {"hyperparams": {"learning_rate": Write()}}

    @on
    def halve(self, event: StepBegin, phase: TrainingPhase, learner):
        if learner.progress.step == self.after:
            learner.hyperparams.learning_rate = learner.hyperparams.learning_rate / 2


def test_host_handler_changes_hyperparameter_before_its_step():
    learner = testlearner(HalvesRate(3), batches=6, learning_rate=0.2)
    batches = learner._state.data["training"]
    w = b = np.float32(0)
    for number, (xs, ys) in enumerate(batches):
        rate = np.float32(0.2 if number < 3 else 0.1)
        error = w * xs + b - ys
        w, b = w - rate * np.mean(2 * error * xs), b - rate * np.mean(2 * error)
    learner.fit(1)
    np.testing.assert_allclose([learner.params["w"], learner.params["b"]], [w, b], rtol=1e-5)
    assert learner.hyperparams == {"learning_rate": float(np.float32(0.1))}
    assert learner.compile_counts == {"traces": 2, "compiles": 1 + 1}  # training and validation, once each


class StopsWhenLow(Callback):
    def stateaccess(self):
        return {"step": {"loss": Read(), "stop": Append()}}

    @on
    def stop(self, event: BackwardBegin, phase: TrainingPhase, learner):
        learner.step.stop = learner.progress.step % 3 == 2


def test_stopped_windows_lose_no_batch_or_step():
    values, log = EveryValue(), EventLog()
    learner, reference = make(StopsWhenLow(), values, log), make()
    learner.fit(2)
    reference.fit(2)
    assert [v[0] for v in values.values] == list(range(1, 25))
    np.testing.assert_array_equal([v[5][0] for v in values.values], [b[0] for b in BATCHES * 2])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), learner.params, reference.params)
