"""Targets of the shape of the outputs that have no class are a warning, if a metric compares classes."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fluxcb import Learner
from fluxcb.callbacks import ConfusionMatrix, Metric, Metrics, MixUp, PerClassAccuracy, accuracy
from fluxcb.data import ArrayLoader

RNG = np.random.default_rng(0)
XS = RNG.normal(size=(12, 4)).astype(np.float32)
LABELS = np.float32([[1, 1, 0], [0, 0, 0], [0, 1, 0], [1, 1, 1]] * 3)
VALUES = RNG.normal(size=(12, 3)).astype(np.float32)
ONE_HOT = np.eye(3, dtype=np.float32)[np.arange(12) % 3]
SMOOTH = 0.9 * ONE_HOT + np.float32(0.1 / 3)


def mse(outputs, ys):
    return jnp.mean((outputs - ys.astype(jnp.float32)) ** 2)


def learner(ys, *callbacks, validation=None):
    def init(key, xs):
        return {"w": 0.1 * jax.random.normal(key, (xs.shape[-1], 3))}

    data = ArrayLoader((XS, ys), 4)
    if validation is not None:
        data = data, [(XS, validation)]
    model = (init, lambda params, xs: xs @ params["w"])
    return Learner(model, mse, optax.sgd(0.1), data=data, callbacks=callbacks, default_callbacks=False)


def beginning(phase, problem, metric):
    return (
        f"The targets in `data.{phase}` have the shape of the outputs, but are neither one-hot vectors nor "
        f"probabilities: {problem}. The metric `{metric}` compares only the positions of the largest numbers of the "
        "outputs and the targets. "
    )


SEVERAL = (
    "For any number of labels per example, and logits as outputs, write "
    '`Metrics(Metric(lambda outputs, ys: jnp.mean((outputs > 0) == ys), name="accuracy"))`.'
)
ERROR = (
    "For regression, write "
    '`Metrics(Metric(lambda outputs, ys: jnp.mean(jnp.abs(outputs - ys)), name="mean_absolute_error"))`.'
)
LARGEST = (
    " If the largest number of a row is at its class, write "
    '`Metrics(Metric(lambda outputs, ys: accuracy(outputs, jnp.argmax(ys, axis=-1)), name="accuracy"))`.'
)
NEGATIVE = "they contain negative numbers"
POSITIVE = np.float32([[2, 0.5, 0.75]] * 12)


@pytest.mark.parametrize(
    ("ys", "metric", "problem", "fix"),
    [
        (LABELS, accuracy, "a row sums to 2, and not to 1", SEVERAL),
        (LABELS.astype(bool), accuracy, "a row sums to 2, and not to 1", SEVERAL),
        (LABELS.astype(np.int32), ConfusionMatrix(3), "a row sums to 2, and not to 1", SEVERAL),
        (VALUES, accuracy, NEGATIVE, ERROR + LARGEST),
        (VALUES, PerClassAccuracy(3), NEGATIVE, ERROR),
        (POSITIVE, accuracy, "a row sums to 3.25, and not to 1", ERROR + LARGEST),
        (np.full((12, 3), np.nan, np.float32), accuracy, "a row sums to nan, and not to 1", ERROR + LARGEST),
    ],
)
def test_targets_without_a_class_are_a_warning(ys, metric, problem, fix):
    name = "accuracy" if metric is accuracy else metric.name
    with pytest.warns(UserWarning, match="neither one-hot") as caught:
        learner(ys, Metrics(metric), validation=ys).fit(1)
    texts = [str(warning.message) for warning in caught if "neither one-hot" in str(warning.message)]
    assert texts == [beginning("training", problem, name) + fix]


def test_targets_of_validation_are_checked():
    with pytest.warns(UserWarning, match="neither one-hot") as caught:
        learner(ONE_HOT, Metrics(accuracy), validation=LABELS).fit(1)
    assert [str(warning.message) for warning in caught] == [
        beginning("validation", "a row sums to 2, and not to 1", "accuracy") + SEVERAL
    ]


@pytest.mark.parametrize(
    "ys",
    [
        ONE_HOT,
        ONE_HOT.astype(bool),
        ONE_HOT.astype(np.int32),
        SMOOTH,
        np.asarray(jnp.bfloat16(SMOOTH)),
        np.full((12, 3), 0.3331, np.float32),
    ],
)
@pytest.mark.parametrize("callbacks", [(), (MixUp(0.4),)])
def test_one_hot_vectors_and_probabilities_are_no_warning(ys, callbacks):
    learner(ys, *callbacks, Metrics(accuracy, ConfusionMatrix(3)), validation=ys).fit(1)


@pytest.mark.parametrize(
    ("ys", "metric", "expected"),
    [
        (
            LABELS,
            Metric(lambda outputs, ys: jnp.mean((outputs > 0) == ys), name="accuracy"),
            lambda outputs: np.mean((outputs > 0) == LABELS),
        ),
        (
            VALUES,
            Metric(lambda outputs, ys: jnp.mean(jnp.abs(outputs - ys)), name="mean_absolute_error"),
            lambda outputs: np.mean(np.abs(outputs - VALUES)),
        ),
        (
            VALUES,
            Metric(lambda outputs, ys: accuracy(outputs, jnp.argmax(ys, axis=-1)), name="accuracy"),
            lambda outputs: np.mean(outputs.argmax(-1) == VALUES.argmax(-1)),
        ),
    ],
)
def test_suggested_metrics_work(ys, metric, expected):
    trained = learner(ys, Metrics(metric), validation=ys)
    trained.fit(1)
    outputs = XS @ np.asarray(trained.params["w"])
    assert trained.evaluate([(XS, ys)])[metric.name] == pytest.approx(expected(outputs), rel=1e-5)
