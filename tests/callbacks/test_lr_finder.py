"""The learning-rate finder: exact values for a quadratic loss, and the restored Learner."""

import io
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import Callback, DataError, DeclarationError, MissingStateError, Write, in_order, on
from fluxcb.callbacks import (
    ClipGradients,
    LearningRate,
    LRFinderPhase,
    LRFinderResult,
    ParameterEMA,
    ReduceLROnPlateau,
    ScheduledHyperParamSetter,
    Scheduler,
    default_callbacks,
    find_learning_rate,
)
from fluxcb.data import ArrayLoader
from fluxcb.events import BackwardEnd, HostEvent
from fluxcb.phases import AbstractTrainingPhase, Phase
from fluxcb.testing import EventLog, testlearner


def quadratic(*callbacks, curvature=1.0, optimizer=None, data=None, **kwargs):
    """Return a Learner with the loss `curvature / 2 * w**2` and the initial parameter w = 1."""
    return fluxcb.Learner.from_loss(
        {"w": jnp.ones(())},
        lambda params, batch, key: curvature / 2 * params["w"] ** 2,
        optimizer or fluxcb.inject(optax.sgd, learning_rate=0.1),
        data=[jnp.zeros(1)] * 3 if data is None else data,
        callbacks=callbacks,
        default_callbacks=False,
        **kwargs,
    )


def bits(state):
    leaves = jax.tree.leaves(state)
    typed = [jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in leaves]
    return [np.asarray(jax.random.key_data(x) if t else x).tobytes() for x, t in zip(leaves, typed, strict=True)]


@pytest.mark.parametrize("curvature", [0.01, 1.0, 100.0])
def test_the_losses_are_those_of_gradient_descent_and_the_suggestion_converges(curvature):
    result = find_learning_rate(quadratic(curvature=curvature), low=1e-7, high=1e5, steps=120, beta=0.5)
    rates = 1e-7 * 1e12 ** (np.arange(120) / 119)
    np.testing.assert_allclose(result.rates, rates[: len(result.rates)], rtol=1e-6)
    w, losses = 1.0, []
    for rate in result.rates:
        losses.append(curvature / 2 * w**2)
        w -= rate * curvature * w
    np.testing.assert_allclose(result.losses, losses, rtol=1e-3, atol=1e-12 * curvature)
    # w is multiplied by 1 - rate * curvature, so it grows if the rate is above 2 / curvature
    assert result.suggestion is not None
    assert result.suggestion < 2 / curvature < result.rates[-1] < 1e5
    assert result.suggestion > 0.01 / curvature
    learner = quadratic(curvature=curvature, optimizer=optax.sgd(result.suggestion))
    learner.fit(100)
    assert abs(float(learner.params["w"])) < 1e-3


def test_the_result_follows_its_formulas():
    rates, losses = tuple(10.0**n for n in range(-6, 3)), (9.0, 1.0, 9.0, 9.0, 9.0, 8.0, 4.0, 3.0, 99.0)
    plain = LRFinderResult(rates, losses, 0.0)
    assert plain.smoothed == losses
    assert (plain.lowest, plain.suggestion) == (7, 1.0)
    assert plain.steepest == 0.1  # from 8 to 4; the step from 9 to 1 is in the first third
    averaged = LRFinderResult(rates, losses, 0.75)
    expected = [
        sum(0.75 ** (i - j) * losses[j] for j in range(i + 1)) / sum(0.75**j for j in range(i + 1)) for i in range(9)
    ]
    assert averaged.smoothed == pytest.approx(expected)
    assert repr(plain) == "LRFinderResult(beta=0.0, suggestion=1.0, steepest=0.1)"


@pytest.mark.parametrize("losses", [(), (1.0,), (1.0, 2.0, 3.0), (1.0, 0.5)])
def test_there_is_no_suggestion_if_the_loss_never_decreases(losses):
    result = LRFinderResult(tuple(10.0**n for n in range(len(losses))), losses, 0.0)
    falls = losses == (1.0, 0.5)
    assert (result.suggestion is not None) is falls
    assert (result.steepest, result.suggestion) == ((1.0, 1.0) if falls else (None, None))


def test_the_trial_ends_when_the_loss_diverges():
    # from rate 1000 on, w is multiplied by at least 999: losses 0.5, 5e5, ...
    result = find_learning_rate(quadratic(), low=1e3, high=1e4, steps=50, beta=0.0)
    assert result.losses == pytest.approx([0.5, 0.5 * 999**2], rel=1e-4)
    assert result.suggestion is None
    # without a limit, it continues until the loss is not finite
    endless = find_learning_rate(quadratic(), low=1e3, high=1e4, steps=50, beta=0.0, stop_factor=1e300)
    assert all(map(math.isfinite, endless.losses))
    assert 2 < len(endless.losses) < 50


def test_divergence_of_a_negative_loss():
    learner = fluxcb.Learner.from_loss(
        {"w": jnp.zeros(())},
        lambda params, batch, key: jnp.cos(params["w"] + 1) - 1,  # from -2 to 0: never 3 * 2 above the minimum
        fluxcb.inject(optax.sgd, learning_rate=0.1),
        data=[jnp.zeros(1)],
        default_callbacks=False,
    )
    assert len(find_learning_rate(learner, low=1e-3, high=1e2, steps=40, beta=0.0).losses) == 40


def test_the_learner_is_restored():
    log, out = EventLog(), io.StringIO()
    items = [
        log,
        ParameterEMA(0.9),
        in_order(
            Scheduler({LearningRate: optax.cosine_decay_schedule(0.1, 50)}),
            ScheduledHyperParamSetter(LearningRate, [(0, 0.0), (3, 0.1)], "linear", step_based=True),
        ),
        *default_callbacks(),
    ]

    def build(items):
        rng = np.random.default_rng(0)
        xs = rng.normal(size=(40, 1)).astype(np.float32)
        return testlearner(
            *items,
            data=ArrayLoader((xs, 3 * xs), batch_size=8),
            optimizer=fluxcb.inject(optax.adamw, learning_rate=0.1),
        )

    sys.stdout, before_out = out, sys.stdout
    try:
        learner = build(items)
        learner.fit(2)
        state, shared, entries = bits(learner.state), repr(learner.cbstate), list(log.entries)
        fields = [callback.state_dict() for callback in learner.callbacks]
        printed = out.getvalue()
        first, second = find_learning_rate(learner), find_learning_rate(learner)
        assert bits(learner.state) == state
        assert repr(learner.cbstate) == shared
        assert [callback.state_dict() for callback in learner.callbacks] == fields
        assert (log.entries, out.getvalue(), learner.stop_reason) == (entries, printed, None)
        assert (learner.epoch, learner.step) == (2, 10)
        assert len(first.losses) == len(second.losses) > 20
        counts = learner.compile_counts
        learner.fit(2)
        assert learner.compile_counts == counts
        plain = build(
            [
                EventLog(),
                ParameterEMA(0.9),
                in_order(
                    Scheduler({LearningRate: optax.cosine_decay_schedule(0.1, 50)}),
                    ScheduledHyperParamSetter(LearningRate, [(0, 0.0), (3, 0.1)], "linear", step_based=True),
                ),
                *default_callbacks(),
            ]
        )
        plain.fit(2)
        plain.fit(2)
        assert bits(learner.state) == bits(plain.state)
        assert learner.cbstate["metrics_step"] == plain.cbstate["metrics_step"]
    finally:
        sys.stdout = before_out


def test_traced_handlers_run_in_the_trial_but_schedulers_have_no_effect():
    plain = find_learning_rate(quadratic(), low=1e-3, high=1.0, steps=20)
    scheduled = find_learning_rate(
        quadratic(Scheduler({LearningRate: lambda step: 0.5}), ParameterEMA()), low=1e-3, high=1.0, steps=20
    )
    assert scheduled == plain
    clipped = find_learning_rate(quadratic(ClipGradients(1e-6)), low=1e-3, high=1.0, steps=20)
    assert clipped.losses == pytest.approx([0.5] * 20, abs=1e-4)
    assert plain.losses[-1] < 0.1
    assert (
        find_learning_rate(
            quadratic(ReduceLROnPlateau(), fluxcb.callbacks.Metrics(), data=([jnp.zeros(1)], [jnp.zeros(1)])),
            low=1e-3,
            high=1.0,
            steps=20,
        )
        == plain
    )


def test_a_callback_can_behave_differently_in_the_trial():
    class Halve(Callback):
        def stateaccess(self):
            return {"step": {"grads": Write()}}

        @on(BackwardEnd, AbstractTrainingPhase)
        def halve(self, event, phase, learner):
            learner.step.grads = jax.tree.map(lambda g: g / 2, learner.step.grads)

        @on(BackwardEnd, LRFinderPhase)
        def leave(self, event, phase, learner):
            pass

        @on(HostEvent, Phase)
        def never(self, event, phase, learner):
            raise AssertionError(event)

    learner = quadratic(Halve())
    plain = quadratic()
    assert find_learning_rate(learner, steps=10, high=1.0) == find_learning_rate(plain, steps=10, high=1.0)


def test_the_learner_is_restored_after_a_failure():
    def batches():
        yield jnp.zeros(1)
        raise OSError("disk gone")

    class Source:
        def __iter__(self):
            return batches()

    learner = quadratic(ParameterEMA(0.9))
    learner.fit(1)
    before, callbacks = bits(learner.state), list(learner.callbacks)
    with pytest.raises(OSError, match="disk gone"):
        find_learning_rate(learner, data=Source())
    assert bits(learner.state) == before
    assert list(learner.callbacks) == callbacks


def test_custom_batches_are_repeated():
    learner = fluxcb.Learner.from_loss(
        {"w": jnp.zeros(())},
        lambda params, batch, key: jnp.mean(batch) + 0 * params["w"],
        fluxcb.inject(optax.sgd, learning_rate=0.1),
        data=iter([jnp.zeros(1)] * 3),
        default_callbacks=False,
    )
    result = find_learning_rate(learner, steps=5, beta=0.0, stop_factor=10, data=[jnp.ones(1), jnp.full(1, 2.0)])
    assert result.losses == (1, 2, 1, 2, 1)
    learner.fit(1)
    assert learner.step == 3  # no batch of its own data is missing
    with pytest.raises(DataError) as error:
        find_learning_rate(quadratic(data=iter([jnp.zeros(1)] * 3)))
    assert str(error.value) == (
        "`find_learning_rate` would use up a one-shot iterator (list_iterator).\n"
        "  why:   training would not see the batches that the trial uses\n"
        "  fix:   pass separate batches: `find_learning_rate(learner, data=list_of_batches)`"
    )


@pytest.mark.integration
def test_a_plot():
    pytest.importorskip("matplotlib")
    import matplotlib.pyplot as plt

    result = find_learning_rate(quadratic(), low=1e-4, high=100.0, beta=0.5)
    ax = result.plot()
    curve, line = ax.lines
    np.testing.assert_allclose(curve.get_xydata(), np.stack([result.rates, result.smoothed], 1))
    assert list(line.get_xdata()) == [result.suggestion] * 2
    assert (ax.get_xscale(), ax.get_xlabel(), ax.get_ylabel()) == ("log", "learning rate", "loss (averaged)")
    assert result.plot(ax) is ax
    without = plt.figure().add_subplot()
    assert len(LRFinderResult((1.0, 2.0), (1.0, 2.0), 0.0).plot(without).lines) == 1
    plt.close("all")


def test_a_plot_without_matplotlib_is_printed(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    picture = LRFinderResult((0.01, 0.1, 1.0, 10.0), (4.0, 4.0, 1.0, 9.0), beta=0.0).plot()
    assert repr(picture) == "<Picture of loss (averaged)>"
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "■ loss (averaged)   │ suggestion: 0.1"
    assert lines[-1].split() == ["0.01", "learning", "rate", "10"]
    with pytest.raises(DataError, match=r"^`loss \(averaged\)` has no point that can be drawn\."):
        LRFinderResult((), (), beta=0.0).plot()


class Bare(AbstractTrainingPhase):
    def step(self, learner, emit):
        pass


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"low": 0},
            "`low` of `find_learning_rate` must be a number above 0, not 0.\n  fix:   give a finite number above 0",
        ),
        (
            {"low": math.nan},
            "`low` of `find_learning_rate` must be a number above 0, not nan.\n  fix:   give a finite number above 0",
        ),
        (
            {"low": 1, "high": 1},
            "`high` of `find_learning_rate` must be a number above 1, not 1.\n  fix:   give a finite number above 1",
        ),
        (
            {"steps": 1},
            "`steps` of `find_learning_rate` must be a whole number of at least 2, not 1.\n"
            "  fix:   give a whole number of at least 2",
        ),
        (
            {"steps": 2.5},
            "`steps` of `find_learning_rate` must be a whole number of at least 2, not 2.5.\n"
            "  fix:   give a whole number of at least 2",
        ),
        (
            {"beta": 1},
            "`beta` of `find_learning_rate` must be a number of at least 0 and below 1, not 1.\n"
            "  fix:   give a finite number of at least 0 and below 1",
        ),
        (
            {"stop_factor": 1},
            "`stop_factor` of `find_learning_rate` must be a number above 1, not 1.\n"
            "  fix:   give a finite number above 1",
        ),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(DeclarationError) as error:
        find_learning_rate(quadratic(), **arguments)
    assert str(error.value) == message


@pytest.mark.filterwarnings("ignore:`Bare.step` changes neither:UserWarning")
def test_unsupported_learners():
    with pytest.raises(DeclarationError) as error:
        find_learning_rate(quadratic(phases=(Bare(),), example_batch=jnp.zeros(1)))
    assert str(error.value) == (
        "`find_learning_rate` needs a training phase that emits ForwardBegin.\n"
        "  why:   the learning rate of each step is set at this event\n"
        "  fix:   emit it in the phase's `step`, and add it to `provides`"
    )
    plain = quadratic(ParameterEMA(), optimizer=optax.sgd(0.1))
    with pytest.raises(MissingStateError, match=r"`hyperparams.learning_rate`, which this optimizer does not have"):
        find_learning_rate(plain)
    plain.fit(1)  # the Learner can still train
    with pytest.raises(DataError) as error:
        find_learning_rate(quadratic(data={}, example_batch=jnp.zeros(1)))
    assert str(error.value) == (
        "`find_learning_rate` has no batches.\n  fix:   pass `data=batches` to it or to the Learner"
    )
    with pytest.raises(DataError) as error:
        find_learning_rate(quadratic(), data=[])
    assert str(error.value) == (
        "The data of `find_learning_rate` yields no batches.\n  fix:   check its length and filters"
    )

    class Inside(Callback):
        @on(HostEvent, Phase)
        def find(self, event, phase, _):
            find_learning_rate(learner)

    learner = quadratic(Inside())
    with pytest.raises(DeclarationError, match="cannot be replaced while it is fitting"):
        learner.fit(1)
