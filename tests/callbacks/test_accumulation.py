"""AccumulateGradients against training on large batches, and against `optax.MultiSteps`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import DeclarationError, Read, TraceError
from fluxcb.callbacks import (
    AccumulateGradients,
    ClipGradients,
    CustomCallback,
    DynamicLossScale,
    GradientNoise,
    Metrics,
    SkipNonFinite,
    StochasticWeightAveraging,
)
from fluxcb.events import BackwardEnd, StepEnd
from fluxcb.phases import AbstractTrainingPhase, TrainingPhase


def joined(batches):
    return tuple(np.concatenate(parts) for parts in zip(*batches, strict=True))


def losses_of(learner, phase="training"):
    return learner.cbstate["metrics_step"][phase]["loss"]


@pytest.mark.parametrize("steps_per_call", [1, 7, "auto"])
def test_updates_equal_those_of_large_batches(build, make_batches, steps_per_call):
    small = make_batches([4, 4, 2, 4, 4, 2, 4, 1, 4])
    large = [joined(small[i : i + 3]) for i in (0, 3, 6)]
    adam = fluxcb.inject(optax.adam, learning_rate=0.1)
    ours = build([AccumulateGradients(3)], data=small, optimizer=adam, steps_per_call=steps_per_call)
    theirs = build([], data=large, optimizer=adam)
    ours.fit(2)
    theirs.fit(2)
    np.testing.assert_allclose(ours.params["w"], theirs.params["w"], rtol=2e-5, atol=1e-7)
    assert {name: ours.cbstate["accumulation"][name].item() for name in ("examples", "steps", "updates")} == {
        "examples": 0,
        "steps": 0,
        "updates": 6,
    }
    assert not ours.cbstate["accumulation"]["grads"]["w"].any()


def test_equal_batch_sizes_match_optax_multisteps(build, make_batches):
    batches, schedule = make_batches([4] * 7), optax.linear_schedule(0.5, 0.1, 3)  # counts updates
    ours = build([AccumulateGradients(2)], data=batches, optimizer=optax.adam(schedule))
    multi = optax.MultiSteps(optax.adam(schedule), 2).gradient_transformation()
    theirs = build([], data=batches, optimizer=multi)
    for _ in range(3):  # the remaining gradients of an epoch are carried into the next epoch
        ours.fit(1)
        theirs.fit(1)
        np.testing.assert_allclose(ours.params["w"], theirs.params["w"], rtol=1e-5)
    assert ours.cbstate["accumulation"]["updates"] == theirs.state["opt_state"].gradient_step == 10
    assert ours.cbstate["accumulation"]["steps"] == theirs.state["opt_state"].mini_step == 1


def test_metrics_include_every_step(build, make_batches, reference):
    batches = make_batches([4, 4, 2])
    learner = build([AccumulateGradients(3), Metrics()], data=batches)
    learner.fit(1)
    expected = [reference.look(*batch)[0] for batch in batches]  # before the first update
    np.testing.assert_allclose(losses_of(learner), expected, rtol=1e-6)
    assert learner.cbstate["metrics_epoch"]["training"].last("loss") == pytest.approx(
        np.average(expected, weights=[4, 4, 2]), rel=1e-6
    )


def test_the_mean_gradient_is_clipped(build, make_batches):
    batches = make_batches([4] * 4)
    ours = build([ClipGradients(0.05), AccumulateGradients(2)], data=batches)
    chain = optax.MultiSteps(optax.chain(optax.clip_by_global_norm(0.05), optax.sgd(0.1)), 2)
    theirs = build([], data=batches, optimizer=chain.gradient_transformation())
    ours.fit(2)
    theirs.fit(2)
    np.testing.assert_allclose(ours.params["w"], theirs.params["w"], rtol=1e-6)


def test_gradient_callbacks_run_in_the_same_order_in_any_list():
    sets = [ClipGradients(1.0), GradientNoise(0.1), AccumulateGradients(2), SkipNonFinite()]
    for items in (sets, sets[::-1]):
        order = fluxcb.check(items, default_callbacks=False).order(BackwardEnd, TrainingPhase)
        assert [type(callback).__name__ for callback in order] == [
            "SkipNonFinite",
            "AccumulateGradients",
            "ClipGradients",
            "GradientNoise",
        ]


def test_a_skipped_step_adds_nothing_and_does_not_count(build, make_batches):
    good = make_batches([4] * 4)
    bad = (np.full((4, 3), np.nan, np.float32), good[0][1])
    ours = build([AccumulateGradients(2), SkipNonFinite()], data=[good[0], bad, good[1], good[2], bad, good[3]])
    theirs = build([AccumulateGradients(2)], data=good)
    ours.fit(1)
    theirs.fit(1)
    np.testing.assert_allclose(ours.params["w"], theirs.params["w"], rtol=1e-6)
    assert ours.cbstate["accumulation"]["updates"] == 2
    assert ours.cbstate["non_finite"]["skipped"] == 2


def test_float16_gradients_are_summed_in_float32():
    def loss_fn(params, batch, key):
        return params["w"] * batch[0]

    grads = []
    keep = CustomCallback(
        lambda learner: grads.append(float(learner.step.grads["w"])),
        StepEnd,
        access={"step": {"grads": {"w": Read()}}},
    )
    learner = fluxcb.Learner.from_loss(
        {"w": jnp.float16(1)},
        loss_fn,
        optax.sgd(0.0),
        data=[jnp.full(64, x, jnp.float16) for x in (2000.0, 1.0, 1.0)],
        callbacks=[AccumulateGradients(3), keep],
        default_callbacks=False,
    )
    learner.fit(1)
    assert jax.tree.leaves(learner.cbstate["accumulation"]["grads"])[0].dtype == jnp.float32
    assert grads[-1] == np.float16(2002 / 3)  # 64 * 2000 is beyond float16


def test_a_partial_sum_is_saved_and_restored(build, make_batches):
    def make():
        callbacks = [AccumulateGradients(3), DynamicLossScale(8.0, period=2), StochasticWeightAveraging(2)]
        return build(callbacks, data=make_batches([4] * 4))

    first, second = make(), make()
    first.fit(steps=4)
    second.state = first.state
    assert second.cbstate["accumulation"]["steps"] == 1
    second.fit(1)
    whole_again = make()
    whole_again.fit(steps=4)
    whole_again.fit(1)
    for one, two in zip(*(jax.tree.leaves({**x.state, "key": 0}) for x in (second, whole_again)), strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("steps", [0, 1.5, True, None])
def test_bad_arguments(steps, refused):
    with refused(
        DeclarationError,
        f"`steps` of AccumulateGradients must be a whole number of at least 1, not {steps!r}.\n"
        "  why:   periods and counts are whole numbers of steps or epochs\n"
        "  fix:   pass a positive int",
    ):
        AccumulateGradients(steps)


def test_a_fit_without_an_update_gives_a_warning(build, make_batches):
    batches = make_batches([4, 4, 2])
    learner = build([AccumulateGradients(4)], data=batches)
    with pytest.warns(UserWarning, match="has made no update") as caught:
        learner.fit(1)
    assert [str(warning.message) for warning in caught] == [
        "AccumulateGradients(4) has made no update, because the training has had only 3 steps so far. The parameters "
        "are unchanged. Train for at least 4 steps, or write `AccumulateGradients(3)` or less."
    ]
    learner.fit(1)  # the fourth step makes an update
    build([AccumulateGradients(3)], data=batches).fit(1)


def test_fits_of_a_few_steps_give_no_warning_without_an_update(build, make_batches):
    learner = build([AccumulateGradients(4)], data=make_batches([4, 4, 2]))
    for _ in range(4):
        learner.fit(steps=1)
    assert learner.cbstate["accumulation"]["updates"] == 1


class Twice(AbstractTrainingPhase):
    """Two updates with all gradients in one step."""

    provides = {BackwardEnd: ("grads",)}

    def step(self, learner, emit):
        for _ in range(2):
            learner.step.grads = learner.grad(lambda params: (params["w"] - learner.step.batch.mean()) ** 2)
            emit(BackwardEnd())
            learner.apply_updates()


class Once(AbstractTrainingPhase):
    """The fix of the error about `Twice`."""

    provides = {BackwardEnd: ("grads",)}

    def step(self, learner, emit):
        learner.step.grads = learner.grad(lambda params: (params["w"] - learner.step.batch.mean()) ** 2)
        emit(BackwardEnd())
        learner.apply_updates()


def trained_by(phase, callback):
    return fluxcb.Learner.from_loss(
        {"w": jnp.zeros(())},
        None,
        optax.sgd(0.5),
        data=[np.ones(2, np.float32)] * 2,
        phases=(phase,),
        callbacks=[callback],
        default_callbacks=False,
    )


def test_gradients_that_come_twice_per_step_are_an_error(refused):
    with refused(
        TraceError,
        "AccumulateGradients(2) got gradients twice in one step of `Twice`.\n"
        "  why:   it counts steps, and `step.hold` applies to the whole step, so the parameters may never be updated\n"
        "  fix:   in the step of the phase, assign the sum or the mean of the gradients to `learner.step.grads`, and "
        "emit BackwardEnd once",
    ):
        trained_by(Twice(), AccumulateGradients(2))
    for callback in (AccumulateGradients(2), fluxcb.switchable(AccumulateGradients(2))):
        learner = trained_by(Once(), callback)
        learner.fit(1)
        assert float(learner.params["w"]) == 1.0  # 0 - 0.5 * 2 * (0 - 1)
