"""Schedules that count updates instead of steps, and averages in validation."""

import io

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import Append, Callback, ConflictError, DeclarationError, Read, every, in_order, on
from fluxcb.callbacks import (
    AccumulateGradients,
    Checkpointer,
    LearningRate,
    Metrics,
    MetricsPrinter,
    ParameterEMA,
    Scheduler,
    StochasticWeightAveraging,
)
from fluxcb.events import BackwardEnd, StepEnd
from fluxcb.phases import AbstractTrainingPhase, TrainingPhase

SCHEDULE = optax.linear_schedule(1.0, 0.0, 10)


class Rates(Callback):
    """Record the learning rate of each step."""

    def __init__(self):
        self.rates = []

    def stateaccess(self):
        return {"hyperparams": {"learning_rate": Read()}}

    def state_dict(self):
        return {"rates": list(self.rates)}

    def load_state_dict(self, state):
        self.rates = state["rates"]

    @on
    def keep(self, event: StepEnd, phase: TrainingPhase, learner):
        self.rates.append(round(float(learner.hyperparams.learning_rate), 6))


class SkipThird(Callback):
    """Skip every third step."""

    def stateaccess(self):
        return {"step": {"skip": Append()}}

    @on
    def skip(self, event: BackwardEnd, phase: AbstractTrainingPhase, learner):
        learner.step.skip = learner.progress.step % 3 == 2


def build(*callbacks, optimizer=None, batches=8, **options):
    data = [jnp.asarray([1.0, float(i)]) for i in range(batches)]
    return fluxcb.Learner.from_loss(
        {"w": jnp.float32(1.0)},
        lambda params, batch, key: jnp.mean((params["w"] - batch) ** 2),
        optimizer or fluxcb.inject(optax.sgd, learning_rate=9.0),
        data=data,
        callbacks=list(callbacks),
        default_callbacks=False,
        **options,
    )


def rates(*counts):
    """Return the rates of steps with the given numbers of previous updates."""
    return [round(1 - count / 10, 6) for count in counts]


@pytest.mark.parametrize("steps_per_call", [1, 3, 8])
@pytest.mark.parametrize(
    ("count", "other", "expected"),
    [
        ("updates", lambda: AccumulateGradients(4), rates(0, 0, 0, 0, 1, 1, 1, 1)),
        ("steps", lambda: AccumulateGradients(4), rates(0, 1, 2, 3, 4, 5, 6, 7)),
        ("updates", SkipThird, rates(0, 1, 2, 2, 3, 4, 4, 5)),
    ],
)
def test_held_and_skipped_steps_are_not_updates(count, other, expected, steps_per_call):
    kept = Rates()
    learner = build(Scheduler({LearningRate: SCHEDULE}, count=count), other(), kept, steps_per_call=steps_per_call)
    learner.fit(1)
    assert kept.rates == expected


@pytest.mark.parametrize("others", [lambda: [AccumulateGradients(4)], lambda: [SkipThird(), AccumulateGradients(2)]])
def test_updates_are_counted_like_in_an_optax_optimizer(others):
    ours = build(Scheduler({LearningRate: SCHEDULE}, count="updates"), *others())
    theirs = build(*others(), optimizer=optax.sgd(SCHEDULE))
    for learner in (ours, theirs):
        learner.fit(2)
    np.testing.assert_allclose(ours.params["w"], theirs.params["w"], rtol=1e-6)
    assert float(ours.params["w"]) != 1.0


def test_the_count_does_not_shorten_windows():
    learner = build(Scheduler({LearningRate: SCHEDULE}, count="updates"), steps_per_call=8)
    learner.fit(1)
    assert "ended by  nothing" in learner.explain_windows()


def test_the_count_survives_a_resume(tmp_path):
    def made():
        kept = Rates()
        scheduler = Scheduler({LearningRate: SCHEDULE}, count="updates")
        return build(scheduler, AccumulateGradients(3), Checkpointer(tmp_path / "run"), kept), kept

    made()[0].fit(1)
    learner, kept = made()
    learner.fit(2, resume=True)
    assert kept.rates == rates(*(step // 3 for step in range(16)))
    learner.fit(1)
    assert kept.rates == rates(*(step // 3 for step in range(24)))


def test_plain_schedulers_keep_no_state():
    learner = build(Scheduler({LearningRate: SCHEDULE}))
    assert dict(learner.cbstate) == {}
    assert [handler.name for handler in Scheduler({LearningRate: 0.1}).handlers()] == ["set_hyperparams"]


@pytest.mark.parametrize("arrange", [list, lambda pair: [in_order(*pair)]], ids=["list", "in_order"])
@pytest.mark.parametrize("counts", [("steps", "steps"), ("updates", "updates"), ("steps", "updates")])
def test_two_schedulers_of_one_hyperparameter_are_refused(counts, arrange):
    pair = [Scheduler({LearningRate: SCHEDULE}, count=count) for count in counts]
    with pytest.raises(ConflictError) as raised:
        build(*arrange(pair))
    first, second = (repr(scheduler) for scheduler in pair)
    assert str(raised.value) == (
        f"{first} and {second}{' #2' if first == second else ''} both set `hyperparams.learning_rate` at every step.\n"
        "  why:   the value of the first one would never have an effect, so no order would help\n"
        "  fix:   if one schedule follows the other, use a single callback with both: "
        "`optax.join_schedules([first, second], [steps])`\n"
        "     or: leave one of the two out of the callbacks list"
    )


def test_two_scheduled_schedulers_with_the_same_count_are_refused(refused):
    one, two = (every(Scheduler({LearningRate: SCHEDULE}, count="updates"), steps=2, traced=True) for _ in range(2))
    with refused(
        ConflictError,
        'Scheduler(learning_rate, count="updates") and Scheduler(learning_rate, count="updates") both set '
        "`hyperparams.learning_rate` and count updates.\n"
        '  where: Scheduler(learning_rate, count="updates")\n'
        '         Scheduler(learning_rate, count="updates")\n'
        "  why:   both would count each update in `cbstate.learning_rate_updates`\n"
        "  fix:   join the schedules into one: `optax.join_schedules([first, second], [updates])`",
    ):
        build(in_order(one, two))


def test_joined_schedules_work():
    joined = optax.join_schedules([SCHEDULE, optax.constant_schedule(0.5)], [2])
    kept = Rates()
    build(Scheduler({LearningRate: joined}, count="updates"), kept, batches=4).fit(1)
    assert kept.rates == [1.0, 0.9, 0.5, 0.5]


def test_an_unknown_count(refused):
    with refused(
        DeclarationError,
        '`count` of `Scheduler` must be "steps" or "updates", not \'epochs\'.\n  fix:   write `"steps"`',
    ):
        Scheduler({LearningRate: SCHEDULE}, count="epochs")


# --- which parameters a printed validation uses -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("average", "note"),
    [
        (ParameterEMA(0.5), ["validation uses the average `ema` of ParameterEMA(0.5)"]),
        (StochasticWeightAveraging(1), ["validation uses the average `swa` of StochasticWeightAveraging(1, every=1)"]),
        (
            StochasticWeightAveraging(300),
            [
                "validation uses the average `swa` of StochasticWeightAveraging(300, every=1) from update 300 on, and "
                "the trained parameters before"
            ],
        ),
        (ParameterEMA(0.5, validate=False), []),
        (AccumulateGradients(2), []),
    ],
)
def test_the_table_names_the_average_that_validation_uses(average, note):
    file = io.StringIO()
    learner = fluxcb.testing.testlearner(Metrics(), MetricsPrinter(file), average)
    learner.fit(2)
    lines = file.getvalue().splitlines()
    assert lines[: len(note)] == note
    assert lines[len(note)].split() == ["epoch", "train", "loss", "valid", "loss", "time"]
    assert file.getvalue().count("average") == len(note)


def test_without_validation_there_is_no_note():
    file = io.StringIO()
    fluxcb.testing.testlearner(Metrics(), MetricsPrinter(file), ParameterEMA(0.5), validation_batches=0).fit(1)
    assert "average" not in file.getvalue()


def test_check_callback():
    fluxcb.testing.check_callback(lambda: Scheduler({LearningRate: SCHEDULE}, count="updates"))
