"""The members of a population agree with the same Learners trained alone, and with a hand-written `vmap`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import Callback, Population, Write, on
from fluxcb.callbacks import ClipGradients, LearningRate, Metrics, ParameterEMA, Scheduler
from fluxcb.data import ArrayLoader
from fluxcb.events import BackwardEnd, StepBegin
from fluxcb.phases import AbstractTrainingPhase, TrainingPhase
from fluxcb.testing import testlearner

RATES = [0.01, 0.1, 0.3]


def population(make, *, callbacks=(), **arguments):
    return Population(make, callbacks=callbacks, default_callbacks=False, **arguments)


def examples(count=40, seed=0):
    xs = np.random.default_rng(seed).uniform(-1, 1, (count, 1)).astype(np.float32)
    return xs, 3 * xs - 1


def assert_members_equal_learners(make, arguments, epochs=2, rtol=1e-5, **options):
    """Train a population and each Learner alone, and compare parameters and histories."""
    members = population(make, **arguments, **options)
    histories = members.fit(epochs)
    for index, history in enumerate(histories):
        alone = make(**{name: values[index] for name, values in arguments.items()})
        expected = alone.fit(epochs)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-7), members[index].params, alone.params
        )
        assert list(history) == list(expected)
        for name in expected:
            np.testing.assert_allclose(history[name], expected[name], rtol=rtol, atol=1e-7)
        assert history.step == expected.step
        assert history.stop_reason == expected.stop_reason
    return members


def test_members_agree_with_learners_trained_alone():
    members = assert_members_equal_learners(
        lambda learning_rate: testlearner(Metrics(), ParameterEMA(0.9), learning_rate=learning_rate),
        {"learning_rate": RATES},
    )
    assert members.compile_counts["compiles"] == 2  # training and validation
    members.fit(1)
    assert members.compile_counts["compiles"] == 2


def test_members_agree_with_hand_written_vmap():
    xs, ys = examples(32)
    batches = [(xs[at : at + 8], ys[at : at + 8]) for at in range(0, 32, 8)]

    def step(params, rate, batch):
        def loss(params):
            return jnp.mean((params["w"] * batch[0] + params["b"] - batch[1]) ** 2)

        return jax.tree.map(lambda p, g: p - rate * g, params, jax.grad(loss)(params))

    params = {"w": jnp.zeros(3), "b": jnp.zeros(3)}
    for batch in batches * 3:
        params = jax.vmap(step, in_axes=(0, 0, None))(params, jnp.asarray(RATES), batch)
    members = population(
        lambda learning_rate: testlearner(data=batches, learning_rate=learning_rate), learning_rate=RATES
    )
    members.fit(3)
    for name in ("w", "b"):
        found = [float(member.params[name]) for member in members]
        np.testing.assert_allclose(found, params[name], rtol=1e-6)


def network(key, **options):
    """Return a Learner with a hidden layer, dropout, and Adam."""

    def init(key, xs):
        first, second = jax.random.split(key)
        return {"w": jax.random.normal(first, (1, 16)), "v": 0.1 * jax.random.normal(second, (16, 1))}

    def apply(params, xs):
        return jnp.tanh(xs @ params["w"]) @ params["v"]

    class Drop(Callback):
        def stateaccess(self):
            return {"step": {"grads": Write()}}

        @on(BackwardEnd, AbstractTrainingPhase)
        def drop(self, event, phase, learner):
            kept = jax.random.bernoulli(learner.key, 0.5, (16, 1))
            learner.step.grads = {**learner.step.grads, "v": learner.step.grads["v"] * kept}

    return fluxcb.Learner(
        (init, apply),
        lambda outputs, ys: jnp.mean((outputs - ys) ** 2),
        fluxcb.inject(optax.adam, learning_rate=0.01),
        callbacks=[Metrics(), Drop()],
        default_callbacks=False,
        key=key,
        **options,
    )


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(lambda key: ArrayLoader(examples(), batch_size=8, seed=key), id="own order"),
        pytest.param(lambda key: ArrayLoader(examples(), batch_size=16, seed=key, drop_last=False), id="short batch"),
        pytest.param(lambda key: ArrayLoader(examples(), batch_size=8, seed=key, device=True), id="on device"),
        pytest.param(lambda key: [examples(8, seed=key)] * (3 + key), id="other lengths"),
    ],
)
def test_members_with_own_keys_and_data_agree(data):
    assert_members_equal_learners(lambda key: network(key, data=data(key)), {"key": range(3)})


def test_members_share_resident_arrays():
    loader = ArrayLoader(examples(), batch_size=8, shuffle=False, device=True)
    assert_members_equal_learners(lambda key: network(key, data=loader), {"key": range(2)})


@pytest.mark.parametrize("options", [{"steps_per_call": 1}, {"steps_per_call": 3}, {"program": "straight"}], ids=str)
def test_members_agree_with_each_kind_of_program(options):
    assert_members_equal_learners(lambda key: network(key, data=[examples(8)] * 7, **options), {"key": range(2)})


def test_member_is_bit_identical_in_every_population():
    """The number of members, if there are several, does not change the bits of one, and neither does a second run."""
    of_sizes = [population(lambda key: network(key, data=[examples(8)] * 5), key=range(n)) for n in (2, 3, 3)]
    for members in of_sizes:
        members.fit(2)
    first, *others = [members[0].params for members in of_sizes]
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, first, other)


def test_numbers_in_traced_code_may_differ():
    """Plain optimizers and arguments of traced callbacks are constants of the step."""

    def make(learning_rate, norm, offset):
        return testlearner(Metrics(), ClipGradients(norm), optimizer=optax.sgd(learning_rate), data=shifted(offset))

    def shifted(offset):
        xs, ys = examples(8)
        return [(xs, ys + offset)] * 4

    arguments = {"learning_rate": RATES, "norm": [0.1, 1.0, 100.0], "offset": [0.0, 1.0, 2.0]}
    assert_members_equal_learners(make, arguments)


def test_arrays_in_traced_code_may_differ():
    def make(scale):
        weights = np.full(8, scale, np.float32).reshape(8, 1)  # a constant of the loss

        def loss(params, batch, key):
            return jnp.mean(weights * (params["w"] * batch[0] - batch[1]) ** 2)

        return fluxcb.Learner.from_loss(
            {"w": jnp.zeros(())},
            loss,
            optax.sgd(0.1),
            data=[examples(8)] * 3,
            callbacks=[Metrics()],
            default_callbacks=False,
        )

    assert_members_equal_learners(make, {"scale": [0.5, 1.0, 2.0]})


class HalveRate(Callback):
    """Halve the learning rate at the host, before each step from the third on."""

    def stateaccess(self):
        return {"hyperparams": {"learning_rate": Write()}, "progress": fluxcb.Read()}

    @on(StepBegin, TrainingPhase)
    def halve(self, event, phase, learner):
        if learner.progress.step >= 2:
            learner.hyperparams.learning_rate = float(learner.hyperparams.learning_rate) / 2


def test_host_writes_of_each_member_reach_its_next_step():
    members = assert_members_equal_learners(
        lambda learning_rate: testlearner(Metrics(), HalveRate(), learning_rate=learning_rate),
        {"learning_rate": RATES},
        epochs=1,
    )
    assert [float(member.hyperparams.learning_rate) for member in members] == pytest.approx([r / 4 for r in RATES])


def test_windows_and_single_steps_are_bit_identical():
    def make(learning_rate, *callbacks):
        return testlearner(Metrics(), *callbacks, learning_rate=learning_rate, batches=9)

    class Touch(HalveRate):
        @on(StepBegin, TrainingPhase)
        def halve(self, event, phase, learner):
            learner.hyperparams.learning_rate = learner.hyperparams.learning_rate

    windows = population(make, learning_rate=RATES)
    single = population(lambda learning_rate: make(learning_rate, Touch()), learning_rate=RATES)
    windows.fit(2)
    single.fit(2)
    assert single.compile_counts["calls"] > windows.compile_counts["calls"]
    for one, other in zip(windows, single, strict=True):
        jax.tree.map(np.testing.assert_array_equal, one.params, other.params)


def test_traced_schedules_differ_between_members():
    def make(peak):
        schedule = optax.linear_schedule(peak, 0.0, 8)
        return testlearner(Metrics(), Scheduler({LearningRate: schedule}))

    assert_members_equal_learners(make, {"peak": RATES})


def test_member_trains_further_alone():
    members = population(lambda learning_rate: testlearner(learning_rate=learning_rate), learning_rate=RATES)
    members.fit(1)
    members[1].fit(1)
    alone = testlearner(learning_rate=RATES[1])
    alone.fit(2)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), members[1].params, alone.params)
    assert [member.step for member in members] == [4, 8, 4]
