"""SkipNonFinite, DynamicLossScale and CheckNumerics, alone, together, and with StopOnNaNLoss."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import Append, Callback, ConflictError, DeclarationError, Read, Write, on
from fluxcb.callbacks import (
    AccumulateGradients,
    CheckNumerics,
    ClipGradients,
    DynamicLossScale,
    GradientNoise,
    LossSpikeGuard,
    MixUp,
    SkipNonFinite,
    StopOnNaNLoss,
)
from fluxcb.events import BackwardBegin, BackwardEnd, StepEnd
from fluxcb.phases import AbstractTrainingPhase, TrainingPhase

NAN, INF = float("nan"), float("inf")


class Keep(Callback):
    """Record the losses and gradients of all steps."""

    def __init__(self):
        self.losses, self.grads = [], []

    def stateaccess(self):
        return {"step": {"loss": Read(), "grads": Read()}}

    @on
    def keep(self, event: StepEnd, phase: TrainingPhase, learner):
        self.losses.append(float(learner.step.loss))
        self.grads.append(np.array(learner.step.grads["w"]))


def weighted(values, callbacks, *, rate=0.125, **options):
    """Return a Learner whose loss at each step is `w * value`, with w = 1 at first: every update is `-rate * value`."""
    options = {"default_callbacks": False, **options}
    return fluxcb.Learner.from_loss(
        {"w": jnp.float32(1.0)},
        lambda params, batch, key: params["w"] * batch,
        optax.sgd(rate),
        data=[jnp.float32(v) for v in values],
        callbacks=callbacks,
        **options,
    )


# -- SkipNonFinite -----------------------------------------------------------------------------


@pytest.mark.parametrize("steps_per_call", [1, 7, "auto"])
@pytest.mark.parametrize("defaults", [False, True])
def test_bad_steps_are_skipped_and_counted(steps_per_call, defaults, capsys):
    learner = weighted(
        [1, NAN, 2, INF, -INF, 1], [SkipNonFinite(3)], steps_per_call=steps_per_call, default_callbacks=defaults
    )
    learner.fit(1)
    assert learner.stop_reason is None
    assert learner.params["w"] == 1 - 0.125 * 4
    assert jax.tree.map(int, learner.cbstate["non_finite"]) == {"skipped": 3, "in_a_row": 0}
    assert any(type(callback) is StopOnNaNLoss for callback in learner.callbacks) is False


@pytest.mark.filterwarnings("ignore:Training stopped:RuntimeWarning")
@pytest.mark.parametrize("steps_per_call", [1, 7, "auto"])
def test_too_many_in_a_row_end_the_fit(steps_per_call):
    learner = weighted([1, NAN, 1, NAN, NAN, 1, 1], [SkipNonFinite(2)], steps_per_call=steps_per_call)
    learner.fit(3)
    assert learner.stop_reason == "loss or gradients were not finite at 2 steps in a row, up to step 5"
    assert (learner.step, float(learner.params["w"])) == (5, 0.75)


def test_a_single_non_finite_gradient_skips_the_update():
    learner = fluxcb.Learner.from_loss(
        {"w": jnp.float32(0.0)},
        lambda params, batch, key: jnp.sqrt(params["w"]),  # 0, with an infinite slope
        optax.sgd(0.1),
        data=[jnp.float32(1)] * 2,
        callbacks=[SkipNonFinite(), ClipGradients(1.0)],
        default_callbacks=False,
    )
    learner.fit(1)
    assert (learner.params["w"], learner.cbstate["non_finite"]["skipped"]) == (0, 2)


def test_gradients_are_checked_before_other_callbacks_change_them():
    class Bound(Callback):
        def stateaccess(self):
            return {"step": {"grads": Write()}}

        @on
        def bound(self, event: BackwardEnd, phase: AbstractTrainingPhase, learner):
            learner.step.grads = jax.tree.map(lambda g: jnp.clip(g, -1, 1), learner.step.grads)

    for callbacks in ([Bound(), SkipNonFinite()], [SkipNonFinite(), Bound()]):
        learner = weighted([INF, 1], callbacks)
        learner.fit(1)
        assert learner.params["w"] == 0.875


def test_skipping_does_not_wait_for_the_device(no_clock):
    learner = weighted([1.0] * 40, [SkipNonFinite()], steps_per_call=20)
    learner.callbacks.measure()
    learner.fit(1)
    rows = {row.handler: row for row in learner.callbacks.timings()}
    windows = 3  # of 1, 20 and 19 steps
    assert (rows["SkipNonFinite(10).cancel"].calls, rows["SkipNonFinite(10).cancel"].syncs) == (windows, 0)
    assert "ended by  nothing" in learner.explain_windows()


def test_two_callbacks_for_nan_losses_are_refused(refused):
    with refused(
        ConflictError,
        "SkipNonFinite(10) and StopOnNaNLoss() can never be used together.\n"
        "  where: SkipNonFinite.resolveconflict returns Unresolvable()\n"
        "  fix:   remove one of the two from the callbacks list",
    ):
        fluxcb.check([SkipNonFinite(), StopOnNaNLoss()])


# -- DynamicLossScale --------------------------------------------------------------------------


def adjusted(scale, finite, *, period, factor, minimum):
    """Return the scale after each step according to Micikevicius et al. (2018)."""
    scales, good = [], 0
    for fine in finite:
        if fine:
            good += 1
            if good == period:
                scale, good = min(scale * factor, float(np.finfo(np.float32).max)), 0
        else:
            scale, good = max(scale / factor, minimum), 0
        scales.append(scale)
    return scales


class Scales(Callback):
    def __init__(self):
        self.seen = []

    def stateaccess(self):
        return {"cbstate": {"loss_scale": Read()}}

    @on
    def keep(self, event: StepEnd, phase: TrainingPhase, learner):
        self.seen.append(float(learner.cbstate.loss_scale["scale"]))


@pytest.mark.parametrize("steps_per_call", [1, 7, "auto"])
@pytest.mark.parametrize(("period", "factor", "minimum"), [(2, 2.0, 1.0), (3, 4.0, 2.0), (1, 2.0, 1.0)])
def test_the_scale_grows_and_shrinks(steps_per_call, period, factor, minimum):
    values = np.random.default_rng(period).choice([1.0, NAN, INF], 60, p=[0.7, 0.2, 0.1])
    scales = Scales()
    scaling = DynamicLossScale(16.0, period=period, factor=factor, minimum=minimum)
    learner = weighted(values, [scaling, scales], steps_per_call=steps_per_call)
    learner.fit(1)
    expected = adjusted(16.0, np.isfinite(values), period=period, factor=factor, minimum=minimum)
    assert scales.seen == expected
    assert learner.cbstate["loss_scale"]["overflows"] == (~np.isfinite(values)).sum()
    assert learner.params["w"] == 1 - 0.125 * np.isfinite(values).sum()


def test_the_scale_stays_finite():
    scales = Scales()
    weighted([0.0] * 3, [DynamicLossScale(2.0**126, period=1), scales]).fit(1)
    assert scales.seen == [2.0**127] * 3


def half(callbacks, value, initial=1.0, **options):
    """Return a Learner with a float32 master weight and a float16 model. The loss is `w * value`."""

    def loss_fn(params, batch, key):
        return (params["w"].astype(jnp.float16) * jnp.float16(1e-4)) * batch.astype(jnp.float16)

    return fluxcb.Learner.from_loss(
        {"w": jnp.float32(initial)},
        loss_fn,
        optax.sgd(1.0),
        data=[jnp.float32(value)] * 4,
        callbacks=callbacks,
        **{"default_callbacks": False, **options},
    )


def test_scaling_prevents_underflow_without_changing_the_loss():
    with_scale, without = Keep(), Keep()
    half([DynamicLossScale(), with_scale], 1e-4).fit(1)
    half([without], 1e-4).fit(1)
    assert without.losses == with_scale.losses
    # 1e-4 * 1e-4 is less than half of the smallest float16 above 0, 6e-8.
    assert [float(g) for g in without.grads] == [0.0] * 4
    np.testing.assert_allclose(with_scale.grads, 1e-8, rtol=2e-3)


def test_an_overflow_of_the_scale_does_not_trigger_stop_on_nan_loss(capsys):
    learner = half([DynamicLossScale(2.0**15)], 6.0, default_callbacks=True)
    learner.fit(1)
    assert learner.stop_reason is None
    found = jax.tree.map(float, learner.cbstate["loss_scale"])
    # The scaled gradient is 6 times the scale. The float16 maximum is 65504, between 6 * 2**13 and 6 * 2**14.
    assert found == {"scale": 2.0**13, "good_steps": 2, "overflows": 2}
    assert learner.params["w"] == pytest.approx(1 - 2 * 6e-4, rel=1e-6)


@pytest.mark.filterwarnings("ignore:Training stopped:RuntimeWarning")
def test_a_nan_loss_still_stops_the_fit(capsys):
    learner = weighted([1, NAN, 1], [DynamicLossScale()], default_callbacks=True)
    learner.fit(1)
    assert learner.stop_reason == "the loss was nan at step 2"


def test_the_scale_runs_after_loss_writers_and_before_gradient_writers():
    class Penalty(Callback):
        def stateaccess(self):
            return {"step": {"loss": Write()}, "params": Read()}

        @on
        def add(self, event: BackwardBegin, phase: AbstractTrainingPhase, learner):
            learner.step.loss = learner.step.loss + 2 * learner.params["w"]

    class Halve(Callback):
        def stateaccess(self):
            return {"step": {"grads": Write()}}

        @on
        def halve(self, event: BackwardEnd, phase: AbstractTrainingPhase, learner):
            learner.step.grads = jax.tree.map(lambda g: jnp.where(g > 100, 0, g / 2), learner.step.grads)

    for callbacks in ([Halve(), DynamicLossScale(), Penalty()], [Penalty(), DynamicLossScale(), Halve()]):
        keep = Keep()
        weighted([1.0], [*callbacks, keep]).fit(1)
        assert (keep.losses, keep.grads) == ([3.0], [1.5])
    callbacks = [AccumulateGradients(2), DynamicLossScale(), MixUp(), ClipGradients(1.0)]
    graph = fluxcb.check(callbacks, default_callbacks=False)
    names = [
        [type(callback).__name__ for callback in graph.order(event, TrainingPhase)]
        for event in (BackwardBegin, BackwardEnd)
    ]
    assert names == [
        ["MixUp", "DynamicLossScale"],
        ["DynamicLossScale", "AccumulateGradients", "ClipGradients"],
    ]


def test_a_callback_that_writes_loss_and_gradients_needs_a_declared_order():
    class Both(Callback):
        def stateaccess(self):
            return {"step": {"loss": Write(), "grads": Write()}}

        @on
        def change(self, event: BackwardEnd, phase: AbstractTrainingPhase, learner):
            learner.step.grads = learner.step.grads

    with pytest.raises(ConflictError, match=r"both write `step.grads` and no order is declared"):
        fluxcb.check([DynamicLossScale(), Both()], default_callbacks=False)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: DynamicLossScale(0.5),
            "`initial` of DynamicLossScale must be a number of at least 1.0, not 0.5.\n"
            "  fix:   give a finite number of at least 1.0",
        ),
        (
            lambda: DynamicLossScale(factor=1),
            "`factor` of DynamicLossScale must be a number above 1, not 1.\n  fix:   give a finite number above 1",
        ),
        (
            lambda: DynamicLossScale(minimum=0),
            "`minimum` of DynamicLossScale must be a number above 0, not 0.\n  fix:   give a finite number above 0",
        ),
        (
            lambda: DynamicLossScale(period=0),
            "`period` of DynamicLossScale (steps) must be a whole number of at least 1, not 0.\n"
            "  why:   periods and counts are whole numbers of steps or epochs\n"
            "  fix:   pass a positive int",
        ),
        (
            lambda: SkipNonFinite(0),
            "`limit` of SkipNonFinite (steps) must be a whole number of at least 1, not 0.\n"
            "  why:   periods and counts are whole numbers of steps or epochs\n"
            "  fix:   pass a positive int",
        ),
        (
            lambda: CheckNumerics("epoch"),
            '`at` of CheckNumerics must be "step" or "trigger", not \'epoch\'.\n  fix:   write `"step"`',
        ),
        (
            lambda: LossSpikeGuard(0),
            "`threshold` of LossSpikeGuard must be a number above 0, not 0.\n  fix:   give a finite number above 0",
        ),
        (
            lambda: LossSpikeGuard(window=2),
            "`window` of LossSpikeGuard (steps) must be a whole number of at least 3, not 2.\n"
            "  why:   an outlier cannot be identified among fewer than three losses\n"
            "  fix:   give a whole number of at least 3",
        ),
    ],
)
def test_bad_arguments(make, message, refused):
    with refused(DeclarationError, message):
        make()


# -- CheckNumerics -----------------------------------------------------------------------------


def rooted(callbacks, values, **options):
    """Return a Learner with nested parameters; the gradient of `deep.root` is infinite where a value is 0."""

    def loss_fn(params, batch, key):
        return params["w"] * batch + jnp.sqrt(params["deep"]["root"] + batch) + params["deep"]["scale"].sum()

    return fluxcb.Learner.from_loss(
        {"w": jnp.float32(1), "deep": {"root": jnp.float32(0), "scale": jnp.ones(3)}},
        loss_fn,
        options.pop("optimizer", optax.sgd(0.0)),
        data=[jnp.float32(v) for v in values],
        callbacks=callbacks,
        **{"default_callbacks": False, **options},
    )


@pytest.mark.parametrize("steps_per_call", [1, 7, "auto"])
def test_a_bad_gradient_is_named_at_its_step_and_not_applied(steps_per_call):
    learner = rooted(
        [CheckNumerics()], [1, 1, 0, 1, 1], steps_per_call=steps_per_call, optimizer=optax.sgd(0.0, momentum=0.9)
    )
    with pytest.raises(FloatingPointError) as error:
        learner.fit(1)
    assert str(error.value) == "not finite at step 3: the gradient of ['deep']['root']"
    assert learner.step == 3
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(learner.state["opt_state"]))


@pytest.mark.parametrize("steps_per_call", [1, 7])
def test_a_bad_parameter_is_named(steps_per_call):
    learner = weighted([1, 1e38, 1, 1], [CheckNumerics()], rate=100.0, steps_per_call=steps_per_call)
    with pytest.raises(FloatingPointError) as error:
        learner.fit(1)
    assert str(error.value) == "not finite at step 2: the parameter ['w']"


def test_it_says_more_than_the_default_that_stops(capsys):
    learner = weighted([1, NAN], [CheckNumerics()], default_callbacks=True)
    with pytest.raises(FloatingPointError) as error:
        learner.fit(1)
    assert str(error.value) == "not finite at step 2: the gradient of ['w']"


def test_many_leaves_are_counted():
    learner = fluxcb.Learner.from_loss(
        {name: jnp.ones(()) for name in "abcdefgh"},
        lambda params, batch, key: sum(params.values()) * batch,
        optax.sgd(0.1),
        data=[jnp.float32(NAN)],
        callbacks=[CheckNumerics()],
        default_callbacks=False,
    )
    with pytest.raises(FloatingPointError) as error:
        learner.fit(1)
    expected = "not finite at step 1: the gradient of ['a'], ['b'], ['c'], ['d'], ['e'] and 3 more"
    assert str(error.value) == expected


@pytest.mark.parametrize("who", [SkipNonFinite, DynamicLossScale, lambda: LossSpikeGuard(window=3)])
def test_steps_that_somebody_skips_are_no_error(who):
    learner = weighted([1, NAN, 1], [CheckNumerics(), who()])
    learner.fit(1)
    assert (learner.step, float(learner.params["w"])) == (3, 0.75)


@pytest.mark.parametrize("defaults", [False, True])
@pytest.mark.parametrize("steps_per_call", [1, 7])
def test_a_bad_gradient_does_not_enter_the_sum_over_batches(steps_per_call, defaults, capsys):
    callbacks = [AccumulateGradients(3), CheckNumerics()]
    learner = weighted([1, 2, 3, 8, NAN], callbacks, steps_per_call=steps_per_call, default_callbacks=defaults)
    with pytest.raises(FloatingPointError) as error:
        learner.fit(1)
    assert str(error.value) == "not finite at step 5: the gradient of ['w']"
    held = learner.cbstate["accumulation"]
    # One update with the mean of the first three, and then the fourth batch alone.
    assert float(learner.params["w"]) == 1 - 0.125 * (1 + 2 + 3) / 3
    assert (held["grads"]["w"], held["steps"], held["updates"]) == (8.0, 1, 1)


@pytest.mark.parametrize("other", [lambda: ClipGradients(1.0), lambda: GradientNoise(0.01)])
@pytest.mark.parametrize("steps_per_call", [1, 7])
def test_only_the_leaf_that_failed_is_named_whatever_changes_the_gradients_later(other, steps_per_call):
    learner = rooted([other(), CheckNumerics()], [1, 1, 0, 1], steps_per_call=steps_per_call)
    with pytest.raises(FloatingPointError) as error:
        learner.fit(1)
    assert str(error.value) == "not finite at step 3: the gradient of ['deep']['root']"


def test_the_gradients_that_another_callback_makes_are_checked_too():
    class Divide(Callback):
        def stateaccess(self):
            return {"step": {"grads": Write()}}

        @on
        def divide(self, event: BackwardEnd, phase: AbstractTrainingPhase, learner):
            learner.step.grads = jax.tree.map(lambda g: g / (2 - learner.progress.step), learner.step.grads)

    learner = weighted([1.0] * 4, [CheckNumerics(), Divide()])
    with pytest.raises(FloatingPointError) as error:
        learner.fit(1)
    assert str(error.value) == "not finite at step 3: the gradient of ['w']"
    assert float(learner.params["w"]) == 1 - 0.125 * (1 / 2 + 1)


def test_others_may_stop_the_window():
    class StopAtTwo(Callback):
        def stateaccess(self):
            return {"step": {"stop": Append()}}

        @on
        def stop(self, event: BackwardEnd, phase: AbstractTrainingPhase, learner):
            learner.step.stop = learner.progress.step == 1

    learner = weighted([1.0] * 4, [CheckNumerics(), StopAtTwo()], steps_per_call=4)
    learner.fit(1)
    assert learner.step == 4


def test_at_triggers_it_looks_at_the_parameters_once_an_epoch():
    learner = weighted([1, NAN, 1], [CheckNumerics("trigger")])
    with pytest.raises(FloatingPointError) as error:
        learner.fit(2)
    assert str(error.value) == "not finite at step 3: the parameter ['w']"
    assert [entry.title() for entry in CheckNumerics("trigger").handlers()] == ["(Trigger, AbstractTrainingPhase)"]
    weighted([1, 1], [CheckNumerics("trigger")]).fit(2)


def test_checking_every_step_bounds_no_window_and_waits_for_nothing():
    learner = weighted([1.0] * 40, [CheckNumerics()], steps_per_call=20)
    learner.callbacks.measure()
    learner.fit(1)
    assert "ended by  nothing" in learner.explain_windows()
    (row,) = [row for row in learner.callbacks.timings() if row.handler == "CheckNumerics().tell"]
    assert (row.calls, row.syncs) == (40, 0)
