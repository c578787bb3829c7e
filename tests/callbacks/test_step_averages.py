"""MovingAverage, SimpleMovingAverage and LogSummaries: which numbers they log, and at which steps."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import ConflictError, DeclarationError, MissingStateError, every
from fluxcb.callbacks import LogSummaries, Monitors, MovingAverage, SimpleMovingAverage
from fluxcb.testing import testlearner

PERIODS = "\n  why:   periods and counts are whole numbers of steps or epochs\n  fix:   pass a positive int"


def with_losses(losses, *callbacks, **kwargs):
    """Build a Learner whose losses are these, and the same again in each epoch."""
    return fluxcb.Learner.from_loss(
        {"w": jnp.zeros(())},
        lambda params, batch, key: (batch + 0 * params["w"], {"double": 2 * batch, "row": jnp.stack([batch, batch])}),
        optax.sgd(0.0),
        data=[jnp.float32(loss) for loss in losses],
        callbacks=list(callbacks),
        default_callbacks=False,
        **kwargs,
    )


def history(learner, name):
    return learner.cbstate["monitors"].history(name)


def steps_of(learner, name):
    return [step for step, _ in history(learner, name)]


# --- MovingAverage ----------------------------------------------------------------------------------------------------


def debiased(values, decay):
    """Return the averages after each value, from the sums that define them."""
    averages = []
    for n in range(1, len(values) + 1):
        weights = decay ** np.arange(n - 1, -1, -1)
        averages.append(float(weights @ np.array(values[:n], float) / weights.sum()))
    return averages


@pytest.mark.parametrize("steps_per_call", [1, 7, "auto"])
def test_the_average_is_the_debiased_average_of_tensorpack(steps_per_call):
    learner = with_losses([9, 8, 7, 6], MovingAverage("step.loss"), Monitors(), steps_per_call=steps_per_call)
    learner.fit(2)
    (first, early), (second, late) = history(learner, "step/loss/EMA")
    assert (first, second) == (4, 8)
    assert early == pytest.approx(7.43593, rel=1e-6)  # measured on tensorpack
    assert late == pytest.approx(debiased([9, 8, 7, 6] * 2, 0.95)[-1], rel=1e-6)


def test_a_period_only_affects_logging_and_every_step_counts():
    learner = with_losses([9, 8, 7, 6, 5], every(MovingAverage("step.loss", 0.5), steps=2), Monitors())
    learner.fit(1)
    expected = debiased([9, 8, 7, 6, 5], 0.5)
    found = history(learner, "step/loss/EMA")
    assert [step for step, _ in found] == [2, 4]
    np.testing.assert_allclose([value for _, value in found], [expected[1], expected[3]], rtol=1e-6)


def test_the_first_average_is_the_first_value_and_a_constant_averages_to_itself():
    learner = with_losses([0.1] * 50, every(MovingAverage("step.loss", 0.999), steps=1), Monitors())
    learner.fit(1)
    assert {value for _, value in history(learner, "step/loss/EMA")} == {float(np.float32(0.1))}


def test_non_finite_values_are_ignored():
    nan, inf = float("nan"), float("inf")
    learner = with_losses([nan, 4, inf, 2, nan], every(MovingAverage("step.loss", 0.5), steps=1), Monitors())
    learner.fit(1)
    found = history(learner, "step/loss/EMA")
    assert [step for step, _ in found] == [2, 3, 4, 5]  # before there is no average
    first, second = debiased([4, 2], 0.5)
    np.testing.assert_allclose([value for _, value in found], [first, first, second, second], rtol=1e-6)


def test_the_average_continues_after_a_resume():
    losses = [9, 8, 7, 6]
    whole = with_losses(losses, MovingAverage("step.loss"), Monitors())
    whole.fit(2)
    first = with_losses(losses, MovingAverage("step.loss"), Monitors())
    first.fit(1)
    second = with_losses(losses, MovingAverage("step.loss"), Monitors())
    second.state = first.state
    second.fit(1)
    assert history(second, "step/loss/EMA") == history(whole, "step/loss/EMA")[1:]


def test_several_names_can_be_averaged_by_several_callbacks():
    learner = with_losses([1, 3], MovingAverage(["step.loss", "step.aux.double"], 0.5), Monitors())
    learner.fit(1)
    expected = debiased([1, 3], 0.5)[-1]
    assert history(learner, "step/loss/EMA") == [(2, pytest.approx(expected))]
    assert history(learner, "step/aux/double/EMA") == [(2, pytest.approx(2 * expected))]
    with pytest.raises(ConflictError, match=r"`cbstate.moving_average.step/loss`"):
        with_losses([1], MovingAverage("step.loss", 0.9), MovingAverage("step.loss", 0.5), Monitors())


# --- SimpleMovingAverage ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps_per_call", [1, 7, "auto"])
def test_means_are_logged_at_multiples_of_the_window(steps_per_call):
    losses = [3, 1, 4, 1, 5, 9, 2, 6]
    learner = with_losses(losses, SimpleMovingAverage("step.loss", 3), Monitors(), steps_per_call=steps_per_call)
    learner.fit(1)
    assert history(learner, "step/loss/SMA") == [(3, pytest.approx(8 / 3)), (6, pytest.approx(15 / 3))]
    learner.fit(1)  # steps 9, 12, 15: over the end of the epoch
    assert history(learner, "step/loss/SMA")[2:] == [
        (9, pytest.approx((2 + 6 + 3) / 3)), (12, pytest.approx((1 + 4 + 1) / 3)), (15, pytest.approx((5 + 9 + 2) / 3)),
    ]  # fmt: skip


def test_the_first_window_after_a_resume_is_complete():
    first = with_losses([3, 1], SimpleMovingAverage("step.loss", 3), Monitors())
    first.fit(1)
    second = with_losses([7, 1], SimpleMovingAverage("step.loss", 3), Monitors())
    second.state = first.state
    second.fit(1)
    assert history(second, "step/loss/SMA") == [(3, pytest.approx((3 + 1 + 7) / 3))]  # in tensorpack, 7


def test_a_window_that_began_before_the_callback_is_not_logged():
    monitors = Monitors()
    learner = with_losses([1, 2, 3, 4], monitors)
    learner.fit(1)
    learner.callbacks.add(SimpleMovingAverage("step.loss", 3))
    learner.fit(2)
    assert history(learner, "step/loss/SMA") == [(9, pytest.approx((3 + 4 + 1) / 3)), (12, pytest.approx(3))]


def test_a_nan_only_affects_the_mean_of_its_window():
    learner = with_losses([1, float("nan"), 3, 4], SimpleMovingAverage("step.loss", 2), Monitors())
    learner.fit(1)
    (_, first), (_, second) = history(learner, "step/loss/SMA")
    assert np.isnan(first)
    assert second == pytest.approx(3.5)


# --- LogSummaries -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps_per_call", [1, 7, "auto"])
@pytest.mark.parametrize(
    ("steps", "period", "expected"),
    [(5, 2, [2, 4, 5, 6, 8, 10]), (4, 2, [2, 4, 6, 8]), (4, 0, [4, 8]), (3, 100, [3, 6]), (2, 1, [1, 2, 3, 4])],
)
def test_numbers_are_logged_once_at_each_period_and_at_the_last_step_of_each_epoch(
    steps, period, expected, steps_per_call
):
    summaries = LogSummaries(["step.loss", "step.aux.double"], period)
    learner = with_losses(range(1, steps + 1), summaries, Monitors(), steps_per_call=steps_per_call)
    learner.fit(2)
    losses = [(step, float((step - 1) % steps + 1)) for step in expected]
    assert history(learner, "step/loss") == losses
    assert history(learner, "step/aux/double") == [(step, 2 * loss) for step, loss in losses]


def test_without_a_period_nothing_is_logged_within_epochs():
    learner = testlearner(LogSummaries("step.loss"), Monitors())
    titles = [handler.title() for handler in LogSummaries("step.loss").handlers()]
    assert titles == ["(ComputeEnd, AbstractTrainingPhase)", "(EpochEnd, AbstractTrainingPhase)"]
    plan = learner._core.window_plan(learner.phases[0])
    assert (plan.bounds, plan.fetch.each, plan.fetch.last) == ((), {}, {})


def test_a_hyperparameter_can_be_averaged():
    learner = testlearner(LogSummaries("hyperparams.learning_rate"), Monitors(), learning_rate=0.25)
    learner.fit(1)
    assert history(learner, "hyperparams/learning_rate") == [(4, 0.25)]


# --- all three --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [MovingAverage, LogSummaries, lambda names: SimpleMovingAverage(names, 2)])
def test_values_that_are_not_numbers_are_rejected(make, refused):
    cls = type(make("step.loss")).__name__
    with refused(
        DeclarationError,
        f"`step.aux.row` has shape (2,); `{cls}` takes single real numbers.\n"
        "  fix:   reduce it where it is computed, e.g. with `jnp.mean`, or use the path of a part that is a number",
    ):
        with_losses([1], make("step.aux.row"), Monitors())
    with refused(
        DeclarationError,
        f"`step.aux` is a dict; `{cls}` takes single real numbers.\n"
        "  fix:   reduce it where it is computed, e.g. with `jnp.mean`, or use the path of a part that is a number",
    ):
        with_losses([1], make("step.aux"), Monitors())
    with refused(
        DeclarationError,
        f"`{cls}` expects paths that begin with `step` or `hyperparams`; got 'params.w'.\n"
        '  fix:   write e.g. `"step.loss"`\n     or: write e.g. `"hyperparams.learning_rate"`',
    ):
        make("params.w")
    with pytest.raises(MissingStateError, match=r"`cbstate.monitors`, which no callback"):
        with_losses([1], make("step.loss"))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: MovingAverage("step.loss", 1),
         "`decay` of MovingAverage must be a number of at least 0 and below 1, not 1.\n"
         "  fix:   give a finite number of at least 0 and below 1"),
        (lambda: SimpleMovingAverage("step.loss", 0),
         f"`window` of SimpleMovingAverage (steps) must be a whole number of at least 1, not 0.{PERIODS}"),
        (lambda: LogSummaries("step.loss", -1),
         f"`period` of LogSummaries (steps), if it is not 0, must be a whole number of at least 1, not -1.{PERIODS}"),
        (lambda: LogSummaries("step.loss", False),
         "`period` of LogSummaries (steps), if it is not 0, must be a whole number of at least 1, not False."
         f"{PERIODS}"),
    ],
)  # fmt: skip
def test_invalid_arguments_are_rejected(make, text, refused):
    with refused(DeclarationError, text):
        make()
