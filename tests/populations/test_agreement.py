"""The members of a population agree with the same Learners trained alone, and with a hand-written `vmap`."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import Callback, EverySteps, Population, Read, Write, every, on
from fluxcb.callbacks import (
    Checkpointer,
    ClipGradients,
    InferenceRunner,
    LearningRate,
    LogMetrics,
    Metrics,
    Monitors,
    ParameterEMA,
    ScalarStats,
    Scheduler,
    StopOnNaNLoss,
)
from fluxcb.data import ArrayLoader
from fluxcb.events import BackwardEnd, EpochEnd, StepBegin, StepEnd
from fluxcb.logging import JSONLinesBackend
from fluxcb.phases import AbstractTrainingPhase, TrainingPhase, ValidationPhase
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


def test_convolutions_agree():
    """On CPU, a step with convolutions runs without a loop."""
    random = np.random.default_rng(0)
    data = [(random.normal(size=(8, 6, 6, 1)).astype(np.float32), random.integers(0, 2, 8)) for _ in range(5)]

    def init(key, xs):
        return {"k": 0.1 * jax.random.normal(key, (3, 3, 1, 4)), "w": jnp.zeros((4, 2))}

    def apply(params, xs):
        numbers = ("NHWC", "HWIO", "NHWC")
        hidden = jax.lax.conv_general_dilated(xs, params["k"], (1, 1), "SAME", dimension_numbers=numbers)
        return jax.nn.relu(hidden).mean((1, 2)) @ params["w"]

    def make(key):
        return fluxcb.Learner(
            (init, apply),
            lambda logits, ys: optax.softmax_cross_entropy_with_integer_labels(logits, ys).mean(),
            optax.sgd(0.5),
            data=data,
            callbacks=[Metrics(), StopOnNaNLoss()],
            default_callbacks=False,
            key=key,
        )

    assert_members_equal_learners(make, {"key": range(3)})


@pytest.mark.parametrize("length", [{"steps": 10}, {"steps": 7, "steps_per_epoch": 3}, {"epochs": 2}], ids=str)
def test_members_train_as_long_as_learners(length):
    members = population(lambda learning_rate: testlearner(learning_rate=learning_rate), learning_rate=RATES[:2])
    alone = testlearner(learning_rate=RATES[1])
    members.fit(**length)
    alone.fit(**length)
    assert [(member.step, member.epoch) for member in members] == [(alone.step, alone.epoch)] * 2
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), members[1].params, alone.params)


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


class Look(Callback):
    """Read large and small values of each step on the host."""

    def __init__(self):
        self.seen = []

    def stateaccess(self):
        return {"step": {"grads": Read(), "outputs": Read()}, "progress": Read()}

    @on(StepEnd, TrainingPhase)
    def look(self, event, phase, learner):
        self.seen.append(float(optax.tree.norm(learner.step.grads)) + float(np.abs(learner.step.outputs).max()))


class Keep(Look):
    """Read the carry every third step, without making the next steps wait."""

    def stateaccess(self):
        return {"params": Read(), "hyperparams": {"learning_rate": Read()}}

    @on(StepEnd, TrainingPhase, when=EverySteps(3))
    def look(self, event, phase, learner):
        self.seen += [float(learner.params["w"]), float(learner.hyperparams.learning_rate)]


class Borrow(Look):
    """Borrow the parameters at the end of each epoch."""

    def stateaccess(self):
        return {"params": Read(borrow=True), "opt_state": Read()}

    @on(EpochEnd, TrainingPhase)
    def look(self, event, phase, learner):
        self.seen.append(float(learner.params["b"]))


def test_host_handlers_of_members_see_what_they_see_alone(tmp_path):
    def make(learning_rate, member=9):
        folder = tmp_path / str(member)
        return testlearner(
            Metrics(),
            Look(),
            Keep(),
            Borrow(),
            LogMetrics(),
            Monitors(JSONLinesBackend(folder / "log.json")),
            Checkpointer(folder / "run", steps=5),
            InferenceRunner([examples(8)] * 2, ScalarStats("loss")),
            every(ParameterEMA(0.9), steps=1, traced=True),
            learning_rate=learning_rate,
            batches=7,
        )

    members = population(make, learning_rate=RATES)
    histories = members.fit(2)
    for index, rate in enumerate(RATES):
        alone = make(rate)
        expected = alone.fit(2)
        for one, other in zip(members[index].callbacks, alone.callbacks, strict=False):
            if isinstance(one, Look):
                np.testing.assert_allclose(one.seen, other.seen, rtol=1e-4, atol=1e-6)
        assert list(histories[index]) == list(expected)
        for name in expected:
            np.testing.assert_allclose(histories[index][name], expected[name], rtol=1e-4)
        saved = sorted(path.name for path in (tmp_path / str(index) / "run").iterdir() if path.name.isdigit())
        assert saved == sorted(p.name for p in (tmp_path / "9" / "run").iterdir() if p.name.isdigit()) != []
        # A restored checkpoint of a member continues as the member itself would have.
        shutil.rmtree(tmp_path / "9")


def test_epoch_in_handler_of_one_member():
    """A handler of one member runs a validation of its own, while the others wait."""

    class Extra(Callback):
        def __init__(self, active):
            self.active, self.learner, self.losses = active, None, []

        def stateaccess(self):
            return {"params": Read(borrow=True)}

        @on(EpochEnd, TrainingPhase)
        def run(self, event, phase, learner):
            if self.active:
                self.learner.run_epoch(ValidationPhase())

    def make(active):
        extra = Extra(active)
        extra.learner = testlearner(Metrics(), extra)
        return extra.learner

    members = population(make, active=[False, True, False])
    histories = members.fit(2)
    assert [len(history.per_epoch["validation"]["loss"]) for history in histories] == [2, 4, 2]
    expected = make(True).fit(2).per_epoch["validation"]["loss"]
    found = histories[1].per_epoch["validation"]["loss"]
    assert [epoch for epoch, _ in found] == [epoch for epoch, _ in expected]
    np.testing.assert_allclose([loss for _, loss in found], [loss for _, loss in expected], rtol=1e-5)


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
