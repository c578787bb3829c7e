"""ReduceLROnPlateau against an implementation of PyTorch's algorithm according to its documentation."""

import json
import math
import re

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import fluxcb
from fluxcb import DeclarationError, MissingStateError
from fluxcb.callbacks import ByPhase, EpochValues, Metrics, ReduceLROnPlateau, StatMonitorParamSetter
from fluxcb.phases import TrainingPhase
from fluxcb.testing import testlearner

NAN, INF = math.nan, math.inf


def rates(
    values, *, lr=1.0, factor=0.1, patience=10, threshold=1e-4, threshold_mode="rel", cooldown=0, min_lr=0.0, mode="min"
):
    """Return the rate after each value as PyTorch's scheduler would set it, for values that are not negative."""
    best = INF if mode == "min" else -INF
    bad = cooling = 0
    found = []
    for a in values:
        if mode == "min":
            better = a < (best * (1 - threshold) if threshold_mode == "rel" else best - threshold)
        else:
            better = a > (best * (1 + threshold) if threshold_mode == "rel" else best + threshold)
        if better:
            best, bad = a, 0
        else:
            bad += 1
        if cooling > 0:
            cooling -= 1
            bad = 0
        if bad > patience:
            lr = max(lr * factor, min_lr)
            cooling, bad = cooldown, 0
        found.append(lr)
    return found


class Stub:
    """The part of a Learner that the handler uses."""

    def __init__(self, lr, metric="loss"):
        self.metric = metric
        self.hyperparams = type("Hyperparams", (), {"learning_rate": lr})()
        self.cbstate = type("State", (), {"metrics_epoch": ByPhase(EpochValues)})()
        self.progress = type("Progress", (), {"epoch": 0})()

    def epoch(self, callback, value):
        self.progress.epoch += 1
        self.cbstate.metrics_epoch.entry("validation").add(self.metric, self.progress.epoch, value)
        callback.look(None, TrainingPhase(), self)
        return self.hyperparams.learning_rate


def ours(values, *, lr=1.0, save_at=None, **options):
    if options.get("mode") == "max":  # high values of a loss would be a warning
        options.setdefault("metric", "score")
    callback, stub, found = ReduceLROnPlateau(**options), Stub(lr, options.get("metric", "loss")), []
    for number, value in enumerate(values):
        if number == save_at:
            fresh = ReduceLROnPlateau(**options)
            fresh.load_state_dict(json.loads(json.dumps(callback.state_dict())))
            callback = fresh
        found.append(stub.epoch(callback, value))
    return found


@pytest.mark.parametrize(
    ("values", "options", "expected"),
    [
        # after the best value, the rate is reduced at each third epoch: patience 2, and one more
        ([1.0] * 8, {"patience": 2}, [1, 1, 1, 0.1, 0.1, 0.1, 0.01, 0.01]),
        ([1.0] * 4, {"patience": 0}, [1, 0.1, 0.01, 0.001]),
        ([1.0] * 4, {"patience": 0, "factor": 0.5, "min_lr": 0.2}, [1, 0.5, 0.25, 0.2]),
        ([1.0] * 7, {"patience": 0, "cooldown": 2}, [1, 0.1, 0.1, 0.1, 0.01, 0.01, 0.01]),
        ([1.0, 0.95, 0.9, 0.85], {"patience": 0, "threshold": 0.1}, [1, 0.1, 0.01, 0.01]),
        ([10.0, 9.95, 9.85], {"patience": 0, "threshold": 0.1, "threshold_mode": "abs"}, [1, 0.1, 0.1]),
        ([1.0, 1.2, 1.2, 1.3], {"patience": 0, "mode": "max"}, [1, 1, 0.1, 0.1]),
        # high accuracies are good unless `mode` is given
        ([0.5, 0.6, 0.6, 0.7], {"patience": 0, "metric": "accuracy"}, [1, 1, 0.1, 0.1]),
        ([0.5, 0.6, 0.6, 0.7], {"patience": 0, "metric": "accuracy", "mode": "auto"}, [1, 1, 0.1, 0.1]),
        ([0.5, 0.6, 0.6, 0.4], {"patience": 0, "metric": "accuracy", "mode": "min"}, [1, 0.1, 0.01, 0.01]),
        ([0.5, 0.6, 0.6, 0.4], {"patience": 0, "mode": "auto"}, [1, 0.1, 0.01, 0.01]),
        ([1.0, NAN, NAN, 0.5], {"patience": 1}, [1, 1, 0.1, 0.1]),
        ([NAN, NAN, 0.5], {"patience": 1}, [1, 0.1, 0.1]),
        # for negative values, the threshold is relative to the absolute value; PyTorch's threshold is at -0.9 here
        ([-1.0, -0.95, -1.05, -1.2], {"patience": 0, "threshold": 0.1}, [1, 0.1, 0.01, 0.01]),
    ],
)
@pytest.mark.filterwarnings("ignore:.* values are good:UserWarning")  # the mode contradicts the name
def test_values_computed_by_hand(values, options, expected):
    assert ours(values, **options) == pytest.approx(expected)


def test_bound_above_the_rate_is_a_warning():
    text = "does not reduce the learning rate, because it is 0.1 and `min_lr` is 1. Pass a smaller `min_lr`."
    with pytest.warns(UserWarning, match=f"{re.escape(text)}$"):
        assert ours([1.0, 1.0], lr=0.1, patience=0, min_lr=1.0) == [0.1, 0.1]


numbers = st.one_of(st.integers(0, 6).map(float), st.sampled_from([NAN, INF]))


@given(
    values=st.lists(numbers, max_size=30),
    patience=st.integers(0, 3),
    cooldown=st.integers(0, 3),
    threshold=st.sampled_from([0.0, 1e-4, 0.25, 0.9]),  # PyTorch starts by multiplying infinity by 1 - threshold
    threshold_mode=st.sampled_from(["rel", "abs"]),
    mode=st.sampled_from(["min", "max"]),
    min_lr=st.sampled_from([0.0, 0.2]),
    save_at=st.integers(0, 30),
)
def test_it_matches_pytorch(values, save_at, **options):
    assert ours(values, save_at=save_at, factor=0.5, **options) == rates(values, factor=0.5, **options)


def plateau(**options):
    return fluxcb.Learner.from_loss(
        {"w": jnp.float32(1.0)},
        lambda params, batch, key: jnp.abs(params["w"] - batch[0]),
        fluxcb.inject(optax.sgd, learning_rate=1.0),
        data=([np.float32([0.5])],) * 2,
        callbacks=[Metrics(), ReduceLROnPlateau(0.5, patience=1, **options)],
        default_callbacks=False,
    )


def test_the_rate_changes_without_recompilation():
    # With rate 1, w is 1, 0, 1, 0, ... and the loss is always 0.5. With rate 0.5, w becomes 0.5 and the loss stays 0.
    learner = plateau()
    learner.fit(2)
    counts = learner.compile_counts
    seen = []
    for _ in range(6):
        learner.fit(1)
        seen.append((float(learner.params["w"]), learner.hyperparams["learning_rate"]))
    assert [rate for _, rate in seen] == rates([0.5, 0.5, 0.5, 0.0] + [0.0] * 4, factor=0.5, patience=1)[2:]
    assert seen[:2] == [(0.0, 0.5), (0.5, 0.5)]
    assert learner.compile_counts == counts


def test_epochs_without_a_value_do_not_count():
    callback, stub = ReduceLROnPlateau(patience=0), Stub(1.0)
    stub.epoch(callback, 1.0)
    for _ in range(5):
        stub.progress.epoch += 1
        callback.look(None, TrainingPhase(), stub)
    assert stub.hyperparams.learning_rate == 1.0
    assert stub.epoch(callback, 1.0) == pytest.approx(0.1)


def test_missing_requirements_are_errors_at_construction():
    with pytest.raises(MissingStateError, match=r"`cbstate\.metrics_epoch`"):
        fluxcb.testing.testlearner(ReduceLROnPlateau())
    with pytest.raises(MissingStateError, match=r"needs `hyperparams\.learning_rate`"):
        fluxcb.testing.testlearner(Metrics(), ReduceLROnPlateau(), optimizer=optax.sgd(0.1))


def test_a_metric_can_be_named_as_in_logs():
    callback, stub = ReduceLROnPlateau(0.5, patience=0, metric="training/loss"), Stub(1.0)
    for epoch, (training, validation) in enumerate([(2.0, 9.0), (1.0, 9.0), (1.0, 8.0)], 1):
        stub.progress.epoch = epoch
        stub.cbstate.metrics_epoch.entry("training").add("loss", epoch, training)
        stub.cbstate.metrics_epoch.entry("validation").add("loss", epoch, validation)
        callback.look(None, TrainingPhase(), stub)
    assert stub.hyperparams.learning_rate == 0.5  # the training loss stops improving in the third epoch only
    assert repr(callback) == "ReduceLROnPlateau(0.5, patience=0, metric='training/loss')"


def test_a_metric_that_does_not_exist_is_an_error():
    with pytest.raises(
        MissingStateError, match=r"ReduceLROnPlateau.* watches `validation/lss`, .* mean `valid.*/loss`"
    ):
        fluxcb.testing.testlearner(Metrics(), ReduceLROnPlateau(metric="lss"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"factor": 1.0}, "`factor` of `ReduceLROnPlateau` must be a number above 0 and below 1, not 1.0."),
        ({"factor": 0}, "`factor` of `ReduceLROnPlateau` must be a number above 0 and below 1, not 0."),
        ({"factor": NAN}, "`factor` of `ReduceLROnPlateau` must be a number above 0 and below 1, not nan."),
        ({"patience": -1}, "`patience` of `ReduceLROnPlateau` (epochs) must be a whole number of at least 0, not -1."),
        (
            {"patience": 1.5},
            "`patience` of `ReduceLROnPlateau` (epochs) must be a whole number of at least 0, not 1.5.",
        ),
        ({"threshold": -0.1}, "`threshold` of `ReduceLROnPlateau` must be a number of at least 0, not -0.1."),
        ({"threshold_mode": "x"}, '`threshold_mode` of `ReduceLROnPlateau` must be "rel" or "abs", not \'x\'.'),
        (
            {"cooldown": True},
            "`cooldown` of `ReduceLROnPlateau` (epochs) must be a whole number of at least 0, not True.",
        ),
        ({"min_lr": INF}, "`min_lr` of `ReduceLROnPlateau` must be a number of at least 0, not inf."),
        ({"mode": "low"}, '`mode` of `ReduceLROnPlateau` must be "min", "max" or "auto", not \'low\'.'),
        ({"metric": 3}, "`ReduceLROnPlateau` takes the name of a metric, not 3."),
        ({"phase": 3}, "`ReduceLROnPlateau` takes a phase class with a name, not 3."),
        (
            {"metric": "training/loss", "phase": "validation"},
            '`ReduceLROnPlateau` was given the metric "training/loss" and the phase validation.',
        ),
    ],
)
def test_bad_arguments(options, said):
    with pytest.raises(DeclarationError) as caught:
        ReduceLROnPlateau(**options)
    assert caught.value.what == said


def test_learning_rates_of_groups_are_an_error_whose_fix_works():
    groups = {"w": fluxcb.inject(optax.sgd, learning_rate=0.5), "b": fluxcb.inject(optax.sgd, learning_rate=0.25)}
    optimizer = optax.partition(groups, {"w": "w", "b": "b"})
    with pytest.raises(MissingStateError) as caught:
        testlearner(Metrics(), ReduceLROnPlateau(0.5, patience=2), optimizer=optimizer)
    assert str(caught.value).splitlines()[-1] == (
        "  fix:   for each group, write `StatMonitorParamSetter('b.learning_rate', 'validation/loss', lambda rate: "
        "0.5 * rate, 0.0, 2)` instead of `ReduceLROnPlateau`"
    )
    setters = [
        StatMonitorParamSetter(f"{group}.learning_rate", "validation/loss", lambda rate: 0.5 * rate, 0.0, 2)
        for group in groups
    ]
    testlearner(Metrics(), *setters, optimizer=optimizer).fit(2)
