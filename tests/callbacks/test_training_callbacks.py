"""StopOnNaNLoss, ClipGradients, ParameterEMA, Scheduler: each against a formula or optax."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import Append, Callback, DeclarationError, MissingStateError, Read, on
from fluxcb.callbacks import (
    ClipGradients,
    CustomCallback,
    HyperParameter,
    LearningRate,
    Metrics,
    ParameterEMA,
    Scheduler,
    StochasticWeightAveraging,
    StopOnNaNLoss,
    onecycle,
)
from fluxcb.events import BackwardEnd, EpochBegin, FitEnd, StepEnd
from fluxcb.phases import AbstractTrainingPhase, TrainingPhase, ValidationPhase


class Collect(Callback):
    """Keep a copy of the parameters after every step, and at the begin of every validation."""

    def __init__(self):
        self.params, self.validated = [], []

    def stateaccess(self):
        return {"params": Read()}

    @on
    def step(self, event: StepEnd, phase: TrainingPhase, learner):
        self.params.append(np.array(learner.params["w"]))

    @on
    def validate(self, event: EpochBegin, phase: ValidationPhase, learner):
        self.validated.append(np.array(learner.params["w"]))


def weighted(values, stop_at=None):
    """Return a Learner whose loss at each step is `w * value`, with w = 1 at first and a rate of 0.1."""

    class StopSometimes(Callback):
        def stateaccess(self):
            return {"step": {"stop": Append()}}

        @on
        def stop(self, event: BackwardEnd, phase: AbstractTrainingPhase, learner):
            learner.step.stop = learner.progress.step + 1 == (stop_at or -1)

    return fluxcb.Learner.from_loss(
        {"w": jnp.float32(1.0)},
        lambda params, batch, key: params["w"] * batch[0],
        optax.sgd(0.1),
        data=[np.array([value], np.float32) for value in values],
        callbacks=[StopOnNaNLoss(), Metrics(), StopSometimes()],
        default_callbacks=False,
    )


@pytest.mark.filterwarnings("ignore:Training stopped:RuntimeWarning")
@pytest.mark.parametrize(("bad", "said"), [(np.nan, "nan"), (np.inf, "inf"), (-np.inf, "-inf")])
@pytest.mark.parametrize("at", [1, 2, 40, 124])
def test_a_loss_that_is_no_number_ends_the_fit_at_its_step(bad, said, at):
    values = [0.01] * 130
    values[at - 1] = bad
    learner = weighted(values)
    learner.fit(3)
    assert learner.stop_reason == f"the loss was {said} at step {at}"
    assert (learner.step, learner.epoch) == (at, 1)
    assert float(learner.params["w"]) == pytest.approx(1 - 0.001 * (at - 1), rel=1e-5)
    log = learner.cbstate["metrics_step"]["training"]
    assert log.steps == list(range(1, at + 1))
    assert not math.isfinite(log["loss"][-1])
    assert all(map(math.isfinite, log["loss"][:-1]))


def test_another_callbacks_stop_does_not_cancel():
    learner = weighted([1.0] * 50, stop_at=20)
    learner.fit(1)
    assert (learner.stop_reason, learner.step) == (None, 50)


@pytest.mark.parametrize("max_norm", [1e-3, 0.5, 1e3])
def test_clipping_is_that_of_optax(build, max_norm):
    ours = build([ClipGradients(max_norm)], optimizer=optax.sgd(0.1))
    theirs = build([], optimizer=optax.chain(optax.clip_by_global_norm(max_norm), optax.sgd(0.1)))
    ours.fit(3)
    theirs.fit(3)
    np.testing.assert_allclose(ours.params["w"], theirs.params["w"], rtol=1e-6)


def test_clipping_bounds_the_norm(build):
    norms = []
    note = CustomCallback(
        lambda learner: norms.append(float(np.linalg.norm(learner.step.grads["w"]))),
        StepEnd,
        access={"step": {"grads": Read()}},
        name="note",
    )
    build([note, ClipGradients(0.01)]).fit(1)
    assert norms == pytest.approx([0.01] * 3, rel=1e-5)


@pytest.mark.parametrize("debias", [False, True])
def test_the_average_follows_its_formula(build, debias):
    collect = Collect()
    learner = build([collect, ParameterEMA(0.9, debias=debias)])
    start = np.array(learner.params["w"], np.float64)
    learner.fit(3)
    average = np.zeros_like(start) if debias else start
    for params in collect.params:
        average = 0.9 * average + 0.1 * params
    if debias:
        average /= 1 - 0.9 ** len(collect.params)
    ema = learner.cbstate["ema"]
    np.testing.assert_allclose(ema["params"]["w"], average, rtol=1e-5)
    assert int(ema["updates"]) == len(collect.params) == 9


def test_the_debiased_average_is_that_of_optax(build):
    collect = Collect()
    learner = build([collect, ParameterEMA(0.8, debias=True)])
    learner.fit(2)
    reference = optax.ema(0.8, debias=True)
    state = reference.init(jnp.asarray(collect.params[0]))
    for params in collect.params:
        average, state = reference.update(jnp.asarray(params), state)
    np.testing.assert_allclose(learner.cbstate["ema"]["params"]["w"], average, rtol=1e-5)


def test_validation_runs_with_the_average_and_training_goes_on_bit_for_bit(build, make_batches):
    data = make_batches([4, 4, 2]), make_batches([3], seed=1)
    with_average, without = Collect(), Collect()
    averaged = build([ParameterEMA(0.9), with_average, Metrics()], data=data)
    averaged.fit(1)
    np.testing.assert_array_equal(with_average.validated[0], averaged.cbstate["ema"]["params"]["w"])
    averaged.fit(2)
    plain = build([without, Metrics()], data=data)
    plain.fit(3)
    np.testing.assert_array_equal(with_average.params, without.params)
    assert not np.array_equal(with_average.validated, without.validated)
    only_kept = build([ParameterEMA(0.9, validate=False), aside := Collect()], data=data)
    only_kept.fit(3)
    np.testing.assert_array_equal(aside.validated, without.validated)
    assert [entry.title() for entry in ParameterEMA(validate=False).handlers()] == [
        "(UpdateEnd, AbstractTrainingPhase)"
    ]


def test_a_failing_validation_leaves_the_training_parameters(build, make_batches):
    class Fail(Callback):
        @on
        def fail(self, event: StepEnd, phase: ValidationPhase, learner):
            raise RuntimeError("no")

    collect = Collect()
    learner = build([ParameterEMA(0.9), collect, Fail()], data=(make_batches([4, 4]), make_batches([3])))
    with pytest.raises(RuntimeError, match="no"):
        learner.fit(1)
    np.testing.assert_array_equal(learner.params["w"], collect.params[-1])


def test_two_averages_would_both_replace_the_parameters(build, refused):
    error = (
        "ParameterEMA(0.9) and StochasticWeightAveraging(2, every=1) both replace the parameters for validation.\n"
        "  where: ParameterEMA(validate=True)\n"
        "         StochasticWeightAveraging(validate=True)\n"
        "  why:   one validation can use only one average\n"
        "  fix:   pass `validate=False` to ParameterEMA or to StochasticWeightAveraging; it still averages"
    )
    with refused(fluxcb.ConflictError, error):
        build([ParameterEMA(0.9), StochasticWeightAveraging(2)])


@pytest.mark.parametrize("validated", ["ema", "swa"])
def test_two_averages_of_which_one_is_validated(build, make_batches, validated):
    data = make_batches([4, 4, 2]), make_batches([3], seed=1)
    averages = [
        ParameterEMA(0.5, validate=validated == "ema"),
        StochasticWeightAveraging(2, validate=validated == "swa"),
    ]
    collect = Collect()
    learner = build([*averages, collect, Metrics()], data=data)
    start = np.array(learner.params["w"], np.float64)
    learner.fit(1)
    ema = start
    for params in collect.params:
        ema = 0.5 * ema + 0.5 * params
    np.testing.assert_allclose(learner.cbstate["ema"]["params"]["w"], ema, rtol=1e-5)
    np.testing.assert_allclose(learner.cbstate["swa"]["params"]["w"], np.mean(collect.params[1:], 0), rtol=1e-5)
    np.testing.assert_array_equal(collect.validated[0], learner.cbstate[validated]["params"]["w"])
    np.testing.assert_array_equal(learner.params["w"], collect.params[-1])


def test_skipped_steps_leave_the_average_alone(build):
    class SkipAll(Callback):
        def stateaccess(self):
            return {"step": {"skip": Append()}}

        @on
        def skip(self, event: BackwardEnd, phase: AbstractTrainingPhase, learner):
            learner.step.skip = learner.progress.step >= 2

    collect = Collect()
    learner = build([ParameterEMA(0.5), SkipAll(), collect])
    start = np.array(learner.params["w"])
    learner.fit(2)
    average = 0.5 * (0.5 * start + 0.5 * collect.params[0]) + 0.5 * collect.params[1]
    np.testing.assert_allclose(learner.cbstate["ema"]["params"]["w"], average, rtol=1e-6)
    assert int(learner.cbstate["ema"]["updates"]) == 2


class Momentum(HyperParameter):
    name = "momentum"


def test_schedules_set_what_they_say_at_every_step(build):
    schedule, seen = optax.cosine_decay_schedule(0.3, 6), []
    note = CustomCallback(
        lambda learner: seen.append(tuple(float(learner.hyperparams[n]) for n in ("learning_rate", "momentum"))),
        StepEnd,
        access={"hyperparams": Read()},
        name="note",
    )
    ours = build(
        [note, Scheduler({LearningRate: schedule, Momentum: 0.5})],
        optimizer=fluxcb.inject(optax.sgd, learning_rate=9.0, momentum=0.9),
    )
    ours.fit(1)
    ours.fit(1)
    assert seen == [(pytest.approx(float(schedule(step)), rel=1e-6), 0.5) for step in range(6)]
    theirs = build([], optimizer=optax.sgd(schedule, momentum=0.5))
    theirs.fit(2)
    np.testing.assert_allclose(ours.params["w"], theirs.params["w"], rtol=1e-6)
    assert ours.compile_counts["traces"] == theirs.compile_counts["traces"]


def test_two_schedulers_of_different_hyperparameters_do_not_conflict(build):
    learner = build(
        [Scheduler({"momentum": 0.2}), Scheduler({"learning_rate": lambda step: 0.1 / (1 + step)})],
        optimizer=fluxcb.inject(optax.sgd, learning_rate=9.0, momentum=0.9),
    )
    learner.fit(1)
    assert learner.hyperparams == pytest.approx({"learning_rate": 0.1 / 3, "momentum": 0.2})
    assert learner.graph.number_of_edges() == 0


def test_a_scheduler_needs_an_injected_hyperparameter(build):
    with pytest.raises(MissingStateError) as error:
        build([Scheduler({LearningRate: 0.1})], optimizer=optax.sgd(0.1))
    first, *rest = str(error.value).splitlines()
    assert first == ("Scheduler(learning_rate) needs `hyperparams.learning_rate`, which this optimizer does not have.")
    assert rest[-1] == ("  fix:   write `fluxcb.inject(optax.sgd, learning_rate=1e-3)` instead of `optax.sgd(...)`")


def test_onecycle_is_that_of_optax():
    ours = onecycle(50, 0.3, warmup=0.2, start_factor=10, end_factor=100)
    steps = np.arange(60)
    values = np.array([float(ours(step)) for step in steps])
    theirs = optax.cosine_onecycle_schedule(50, 0.3, pct_start=0.2, div_factor=10, final_div_factor=100)
    np.testing.assert_allclose(values, [float(theirs(step)) for step in steps])
    up = 0.03 + (0.3 - 0.03) * (1 - np.cos(np.pi * steps[:11] / 10)) / 2
    np.testing.assert_allclose(values[:11], up, rtol=1e-5)
    assert values[50] == values[59] == pytest.approx(0.3 / 10 / 100)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: ClipGradients(0),
            "`max_norm` of ClipGradients must be a number above 0, not 0.\n  fix:   give a finite number above 0",
        ),
        (
            lambda: ParameterEMA(1),
            "`decay` of ParameterEMA must be a number of at least 0 and below 1, not 1.\n"
            "  fix:   give a finite number of at least 0 and below 1",
        ),
        (
            lambda: Scheduler({}),
            "`Scheduler` takes a mapping of hyperparameters to schedules, not {}.\n"
            "  fix:   write `Scheduler({LearningRate: optax.cosine_decay_schedule(1e-3, 1000)})`",
        ),
        (
            lambda: Scheduler({"momentum": 0.1, Momentum: 0.2}),
            "`Scheduler` has two schedules for `momentum`.\n  fix:   remove one of them",
        ),
        (
            lambda: Scheduler({HyperParameter: 0.1}),
            "The class `HyperParameter` does not name a hyperparameter.\n"
            '  fix:   use LearningRate, a subclass of HyperParameter with a `name`, or a name such as "weight_decay"',
        ),
        (
            lambda: Scheduler({LearningRate: "warmup"}),
            "The schedule of `learning_rate` must be a number or a function of the step, not 'warmup'.\n"
            "  fix:   write e.g. `optax.cosine_decay_schedule(1e-3, 1000)`",
        ),
    ],
)
def test_arguments_that_cannot_be_meant(make, message):
    with pytest.raises(DeclarationError) as error:
        make()
    assert str(error.value) == message


def test_custom_callbacks_run_at_their_event_only(build, make_batches):
    calls = []

    def note(learner):
        calls.append((learner.progress.epoch, learner.progress.step))

    data = make_batches([2, 2]), make_batches([2])
    build([CustomCallback(note, FitEnd), CustomCallback(note, StepEnd, TrainingPhase)], data=data).fit(1)
    assert calls == [(1, 1), (1, 2), (1, 2)]
    calls.clear()
    build([CustomCallback(note, StepEnd)], data=data).fit(1)
    assert calls == [(1, 1), (1, 2), (1, 2)]


def test_a_traced_custom_callback_is_part_of_the_step(build):
    def halve(learner):
        learner.step.grads = jax.tree.map(lambda g: g / 2, learner.step.grads)

    access = {"step": {"grads": fluxcb.Write()}}
    halved = build([CustomCallback(halve, BackwardEnd, access=access)], optimizer=optax.sgd(0.2))
    plain = build([], optimizer=optax.sgd(0.1))
    halved.fit(2)
    plain.fit(2)
    np.testing.assert_allclose(halved.params["w"], plain.params["w"], rtol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: CustomCallback(3, StepEnd),
            "`fn` of `CustomCallback` must be a function of the learner, not 3.\n"
            "  fix:   write e.g. `lambda learner: ...`",
        ),
        (
            lambda: CustomCallback(lambda event, phase, learner: None, StepEnd, name="three"),
            "`fn` of `CustomCallback` must be a function of the learner; `<lambda>` takes (event, phase, learner).\n"
            "  fix:   write `lambda learner: ...`",
        ),
        (
            lambda: CustomCallback(print, fluxcb.events.HostEvent),
            "`CustomCallback` requires a single event, but HostEvent stands for several.\n"
            "  where: CustomCallback(print, ...)\n"
            "  fix:   pass an event such as `StepEnd`",
        ),
        (
            lambda: CustomCallback(print, TrainingPhase),
            "A handler's event must be a subclass of `Event`, not the class `TrainingPhase`.\n"
            "  where: CustomCallback(print, ...)\n"
            "  fix:   name one of `fluxcb.events`, or a class derived from `fluxcb.events.Event`",
        ),
    ],
)
def test_custom_callbacks_check_their_arguments(make, message):
    with pytest.raises(DeclarationError) as error:
        make()
    assert str(error.value) == message
