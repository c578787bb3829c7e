"""StochasticWeightAveraging against the mean of the parameters after the updates that it averages."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fluxcb import Append, Callback, DeclarationError, Learner, Read, on
from fluxcb.callbacks import AccumulateGradients, Checkpointer, Metrics, ParameterEMA, StochasticWeightAveraging
from fluxcb.events import BackwardEnd, EpochBegin, StepEnd
from fluxcb.phases import AbstractTrainingPhase, TrainingPhase, ValidationPhase
from fluxcb.testing import testlearner


class Collect(Callback):
    def __init__(self):
        self.params, self.validated = [], []

    def stateaccess(self):
        return {"params": Read()}

    @on
    def step(self, event: StepEnd, phase: TrainingPhase, learner):
        self.params.append(np.array([learner.params["w"], learner.params["b"]]))

    @on
    def validate(self, event: EpochBegin, phase: ValidationPhase, learner):
        self.validated.append(np.array([learner.params["w"], learner.params["b"]]))


class SkipSecond(Callback):
    def stateaccess(self):
        return {"step": {"skip": Append()}}

    @on
    def skip(self, event: BackwardEnd, phase: AbstractTrainingPhase, learner):
        learner.step.skip = learner.progress.step == 1


def average_of(learner):
    params = learner.cbstate["swa"]["params"]
    return np.array([params["w"], params["b"]])


@pytest.mark.parametrize("steps_per_call", [1, 7, "auto"])
def test_the_average_is_the_mean_over_every_third_update_from_the_fourth(steps_per_call):
    collect = Collect()
    learner = testlearner(collect, StochasticWeightAveraging(4, every=3), steps_per_call=steps_per_call)
    learner.fit(3)
    seen = np.array(collect.params, np.float64)[[3, 6, 9]]  # updates 4, 7 and 10 of 12
    np.testing.assert_allclose(average_of(learner), seen.mean(axis=0), rtol=1e-6)


def test_the_average_before_the_start_and_in_validation():
    collect, plain = Collect(), Collect()
    learner = testlearner(collect, StochasticWeightAveraging(7, every=2), Metrics())
    testlearner(plain, Metrics()).fit(3)
    learner.fit(1)
    np.testing.assert_array_equal(average_of(learner), collect.params[3])
    learner.fit(2)
    np.testing.assert_array_equal(collect.params, plain.params)  # training uses its own parameters, bit for bit
    np.testing.assert_array_equal(collect.validated[0], plain.validated[0])
    np.testing.assert_array_equal(collect.validated[1], collect.params[6])
    np.testing.assert_allclose(collect.validated[2], np.mean([collect.params[i] for i in (6, 8, 10)], axis=0), 1e-6)


def test_skipped_steps_do_not_count_as_updates():
    collect = Collect()
    learner = testlearner(collect, SkipSecond(), StochasticWeightAveraging(2, every=2, validate=False))
    learner.fit(1)
    np.testing.assert_array_equal(average_of(learner), collect.params[2])  # the second update is that of step 3
    assert learner.cbstate["swa"]["updates"] == 3
    assert [entry.title() for entry in StochasticWeightAveraging(1, validate=False).handlers()] == [
        "(UpdateEnd, AbstractTrainingPhase)"
    ]


def test_held_steps_do_not_count_as_updates():
    collect = Collect()
    average = StochasticWeightAveraging(1)
    learner = testlearner(collect, average, ParameterEMA(0.5, validate=False), AccumulateGradients(2))
    learner.fit(1)  # four steps, two updates: after the second and the fourth
    np.testing.assert_allclose(average_of(learner), np.mean([collect.params[1], collect.params[3]], axis=0), rtol=1e-6)
    assert learner.cbstate["swa"]["updates"] == learner.cbstate["ema"]["updates"] == 2


@pytest.mark.parametrize(
    ("arguments", "name", "value"), [((0,), "start", "0"), ((1, 0.5), "every", "0.5"), ((True,), "start", "True")]
)
def test_bad_arguments(arguments, name, value, refused):
    with refused(
        DeclarationError,
        f"`{name}` of StochasticWeightAveraging (updates) must be a whole number of at least 1, not {value}.\n"
        "  why:   periods and counts are whole numbers of steps or epochs\n"
        "  fix:   pass a positive int",
    ):
        StochasticWeightAveraging(*arguments)


@pytest.mark.parametrize(
    "build",
    [lambda: ParameterEMA(0.9), lambda: ParameterEMA(0.9, debias=True), lambda: StochasticWeightAveraging(2)],
    ids=["ema", "debiased", "swa"],
)
@pytest.mark.parametrize("epochs", [0, 2])
@pytest.mark.parametrize("assigned", ["params", "model"])
def test_assigned_parameters_restart_the_average(build, epochs, assigned):
    other = testlearner()
    other.params = {"w": np.float32(1), "b": np.float32(5)}
    xs = np.float32([[0], [2]])
    learner = testlearner(build())
    if epochs:
        learner.fit(epochs)
    if assigned == "params":
        learner.params = other.params
    else:
        learner.model = other.model
    np.testing.assert_array_equal(learner.predict(xs), [[5], [7]])
    assert learner.evaluate() == learner.evaluate(average=None)
    assert learner.cbstate[build().entry]["updates"] == 0
    # The average continues like that of a new Learner with these parameters.
    fresh = testlearner(build())
    fresh.params = other.params
    learner.run_epoch(TrainingPhase())
    fresh.run_epoch(TrainingPhase())
    np.testing.assert_array_equal(learner.predict(xs), fresh.predict(xs))


def test_assigned_parameters_restart_an_average_that_validation_does_not_use():
    learner = testlearner(ParameterEMA(0.9, validate=False))
    learner.fit(1)
    learner.params = {"w": np.float32(1), "b": np.float32(5)}
    np.testing.assert_array_equal(learner.predict(np.float32([[2]]), average="ema"), [[7]])


@pytest.mark.parametrize("build", [lambda: ParameterEMA(0.9), lambda: StochasticWeightAveraging(2)], ids=["ema", "swa"])
def test_average_added_to_a_resumed_run_begins_with_the_restored_parameters(build, tmp_path):
    testlearner(Checkpointer(tmp_path)).fit(2)
    learner = testlearner(Checkpointer(tmp_path), build())
    learner.restore(tmp_path / "8", allow=("callbacks",))
    assert learner.params["w"] != 0
    assert learner.evaluate() == learner.evaluate(average=None)
    # The average continues like that of a new Learner with these parameters.
    fresh = testlearner(build())
    fresh.params = learner.params
    learner.run_epoch(TrainingPhase())
    fresh.run_epoch(TrainingPhase())
    xs = np.float32([[0], [2]])
    np.testing.assert_array_equal(learner.predict(xs), fresh.predict(xs))


def test_average_of_a_resumed_run_is_restored(tmp_path):
    saved = testlearner(Checkpointer(tmp_path), ParameterEMA(0.9))
    saved.fit(2)
    learner = testlearner(Checkpointer(tmp_path), ParameterEMA(0.9))
    learner.restore(tmp_path / "8")
    assert learner.evaluate() == saved.evaluate() != saved.evaluate(average=None)


def of_dtype(dtype, decay):
    return Learner.from_loss(
        {"w": jnp.ones(3, dtype)},
        lambda params, batch: jnp.sum(params["w"] * batch).astype(jnp.float32),
        optax.sgd(0.1),
        data=[jnp.ones(3, dtype)],
        callbacks=[ParameterEMA(decay)],
        default_callbacks=False,
    )


@pytest.mark.parametrize(
    ("dtype", "decay", "share", "fixed"), [("bfloat16", 0.999, "0.001", 0.992), ("float16", 0.9999, "0.0001", 0.999)]
)
def test_an_average_that_rounds_to_no_change_is_a_warning(dtype, decay, share, fixed):
    with pytest.warns(UserWarning, match="keeps the average") as caught:
        of_dtype(dtype, decay)
    assert [str(warning.message) for warning in caught] == [
        f"ParameterEMA({decay}) keeps the average in {dtype}, like the parameters. An update moves it by {share} of "
        f"the difference to the parameters, which {dtype} mostly rounds to no change. Keep the parameters in float32 "
        f"and convert them in the model, e.g. with `w.astype(jnp.{dtype})`, or write `ParameterEMA({fixed})`."
    ]
    of_dtype(dtype, fixed)
    of_dtype("float32", decay)


class SlowEMA(ParameterEMA):
    entry = "slow_ema"


def test_two_averages_in_their_own_entries_follow_their_own_decay():
    collect = Collect()
    initial = testlearner().params
    learner = testlearner(collect, ParameterEMA(0.5), SlowEMA(0.9, validate=False), Metrics())
    learner.fit(2)
    for entry, decay in (("ema", 0.5), ("slow_ema", 0.9)):
        expected = np.array([initial["w"], initial["b"]], np.float64)
        for params in collect.params:
            expected = decay * expected + (1 - decay) * params
        average = learner.cbstate[entry]["params"]
        np.testing.assert_allclose([average["w"], average["b"]], expected, rtol=1e-6)
        x = np.float32([[2]])
        predicted = learner.predict(x, average=entry)
        np.testing.assert_allclose(predicted, 2 * expected[0] + expected[1], rtol=1e-5, atol=1e-6)
    assert learner.evaluate() == learner.evaluate(average="ema")  # that with `validate=True`


@pytest.mark.parametrize(
    ("decay", "percent", "fixed"), [(0.001, "0.1", "0.999"), (0.005, "0.5", "0.995"), (0.1, "10", "0.9")]
)
def test_a_decay_that_looks_like_the_weight_of_the_new_parameters_is_a_warning(decay, percent, fixed):
    with pytest.warns(UserWarning, match="keeps only") as caught:
        ParameterEMA(decay)
    assert [str(warning.message) for warning in caught] == [
        f"`ParameterEMA({decay})` keeps only {percent} % of the average at each update, so it is nearly equal to the "
        f"current parameters. If {decay} is meant as the weight of the new parameters, like `step_size` of "
        f"`optax.incremental_update`, write `ParameterEMA({fixed})`."
    ]
    # `ema <- ema + step_size * (params - ema)`, as in Optax
    collect, initial = Collect(), testlearner().params
    learner = testlearner(collect, ParameterEMA(float(fixed)))
    learner.fit(1)
    expected = np.array([initial["w"], initial["b"]])
    for params in collect.params:
        expected = optax.incremental_update(params, expected, step_size=decay)
    average = learner.cbstate["ema"]["params"]
    np.testing.assert_allclose([average["w"], average["b"]], expected, rtol=1e-5)


@pytest.mark.parametrize("decay", [0, 0.0, 0.2, 0.5])
def test_no_average_and_a_fast_average_are_no_warning(decay):
    ParameterEMA(decay)
