"""Metrics whose values are arrays, and metrics of all examples of an epoch."""

import io
import json
import math
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import Callback, CheckError, DeclarationError, on
from fluxcb.callbacks import (
    AUROC,
    AbstractGatheredMetric,
    AbstractMetric,
    Checkpointer,
    ConfusionMatrix,
    EarlyStopping,
    EpochValues,
    LogMetrics,
    Metric,
    Metrics,
    MetricsPrinter,
    MinSaver,
    Monitors,
    PerClassAccuracy,
    SmoothLoss,
    accuracy,
)
from fluxcb.events import StepEnd
from fluxcb.phases import TrainingPhase, ValidationPhase

W = np.linspace(-1.0, 1.0, 12).reshape(3, 4)


def mask(batch):
    return batch["mask"]


def predictions(batches):
    """Return the true and predicted classes of all examples, with the model's initial weights."""
    xs, ys = (np.concatenate(parts) for parts in zip(*batches, strict=True))
    return ys, (xs.astype(np.float64) @ W).argmax(1)


def confusion_matrix(labels, predicted, weights=None):
    """Return the sum of weights for each true class (row) and predicted class (column), with 4 classes."""
    matrix = np.zeros((4, 4))
    for example, pair in enumerate(zip(labels, predicted, strict=True)):
        matrix[pair] += 1 if weights is None else weights[example]
    return matrix


def recall(labels, predicted, weights=None):
    """Return the fraction of correct predictions for each class; NaN for a class without examples."""
    matrix = confusion_matrix(labels, predicted, weights)
    return [row[index] / row.sum() if row.any() else np.nan for index, row in enumerate(matrix)]


def roc_area(labels, scores, weights=None):
    """Return the fraction of (positive, negative) pairs with a higher positive score; equal scores count half."""
    weights = np.ones(len(labels)) if weights is None else np.asarray(weights, np.float64)
    ones, zeros = labels == 1, labels == 0
    wins = np.sign(scores[ones][:, None] - scores[zeros][None, :]) / 2 + 0.5
    pairs = weights[ones][:, None] * weights[zeros][None, :]
    return (wins * pairs).sum() / pairs.sum()


def test_counts_match_a_loop_over_uneven_batches(build, make_batches):
    training, validation = make_batches([4]), make_batches([4, 4, 3, 1], seed=1)
    learner = build(
        [Metrics(accuracy, ConfusionMatrix(4), PerClassAccuracy(4, phase=ValidationPhase))],
        data=(training, validation),
        optimizer=optax.sgd(0.0),
    )
    history = learner.fit(2)
    ys, predicted = predictions(validation)
    values = learner.cbstate["metrics_epoch"]["validation"]
    matrix, shares = values.last("confusion_matrix"), values.last("per_class_accuracy")
    np.testing.assert_array_equal(matrix, confusion_matrix(ys, predicted))
    assert (matrix.dtype, matrix.flags.writeable) == (np.int32, False)
    np.testing.assert_allclose(shares, recall(ys, predicted), rtol=1e-6)
    np.testing.assert_array_equal(
        learner.cbstate["metrics_epoch"]["training"].last("confusion_matrix"),
        confusion_matrix(*predictions(training)),
    )
    # The counts start at zero in each epoch, and the accuracy metric does not change.
    assert [epoch for epoch, _ in values["confusion_matrix"]] == [1, 2]
    np.testing.assert_array_equal(values["confusion_matrix"][0][1], matrix)
    assert values.last("accuracy") == pytest.approx(np.trace(matrix) / matrix.sum())
    assert list(learner.cbstate["metrics_step"]["training"].values) == ["loss", "accuracy"]
    assert list(history) == [
        *("training/loss", "training/accuracy", "training/confusion_matrix"),
        *("validation/loss", "validation/accuracy", "validation/confusion_matrix", "validation/per_class_accuracy"),
    ]


def test_class_counts_with_weights_and_ignored_labels():
    rng = np.random.default_rng(0)
    outputs, ys = rng.normal(size=(3, 2, 5, 4)).astype(np.float32), rng.integers(-1, 5, (3, 2, 5))
    weights = rng.integers(0, 3, (3, 2, 5)).astype(np.float32)
    batches = [SimpleNamespace(outputs=o, ys=y, batch=w) for o, y, w in zip(outputs, ys, weights, strict=True)]
    known = (ys >= 0) & (ys < 4)
    ids, predicted, kept = ys[known], outputs.argmax(-1)[known], weights[known]

    def value(metric):
        state = metric.init()
        for step in batches:
            state = metric.update(state, step, 2)
        return metric.value_of(state)

    def weight(batch):
        return batch

    np.testing.assert_array_equal(value(ConfusionMatrix(4)), confusion_matrix(ids, predicted))
    np.testing.assert_allclose(value(ConfusionMatrix(4, weight=weight)), confusion_matrix(ids, predicted, kept))
    np.testing.assert_allclose(value(PerClassAccuracy(4, weight=weight)), recall(ids, predicted, kept), rtol=1e-6)
    one_hot = SimpleNamespace(outputs=outputs[0], ys=np.eye(4)[np.abs(ys[0]) % 4])
    same = SimpleNamespace(outputs=outputs[0], ys=np.abs(ys[0]) % 4)
    matrix = ConfusionMatrix(4)
    np.testing.assert_array_equal(matrix.update(matrix.init(), one_hot, 2), matrix.update(matrix.init(), same, 2))


# --- AUROC ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_auroc_is_the_fraction_of_ordered_pairs(seed):
    rng = np.random.default_rng(seed)
    scores, labels = rng.integers(0, 20, 300) / 7, rng.integers(0, 2, 300)  # many equal scores
    weights = rng.integers(0, 3, 300).astype(np.float32)
    samples = {"scores": scores, "labels": labels}
    assert AUROC().compute(samples) == pytest.approx(roc_area(labels, scores), rel=1e-12)
    expected = roc_area(labels, scores, weights)
    assert AUROC().compute({**samples, "weights": weights}) == pytest.approx(expected, rel=1e-12)


def test_auroc_of_one_class_or_of_nan_is_nan():
    ones = np.ones(3)
    assert math.isnan(AUROC().compute({"scores": ones, "labels": ones}))
    assert math.isnan(AUROC().compute({"scores": np.array([0, np.nan, 1]), "labels": np.array([0, 0, 1])}))
    padded = {"scores": np.array([0, np.nan, 1]), "labels": np.array([0, 7, 1]), "weights": np.array([1, 0, 1])}
    assert AUROC().compute(padded) == 1.0


def masked(sizes, seed=0, length=4):
    rng = np.random.default_rng(seed)
    return [
        {
            "x": rng.normal(size=(length, 3)).astype(np.float32),
            "y": np.where(np.arange(length) < size, rng.integers(0, 2, length), 9).astype(np.int32),
            "mask": (np.arange(length) < size).astype(np.float32),
        }
        for size in sizes
    ]


def binary_learner(*callbacks, data, metrics=None, **kwargs):
    def loss(params, batch, key):
        logits = batch["x"] @ params["w"]
        return jnp.mean(logits**2), logits

    auroc = AUROC(lambda aux, batch: (aux, batch["y"]), needs=("aux", "batch"), weight=mask)
    return fluxcb.Learner.from_loss(
        {"w": jnp.array([1.0, -0.5, 0.3])},
        loss,
        optax.sgd(0.0),
        data=data,
        callbacks=[Metrics(*(metrics or [auroc])), *callbacks],
        default_callbacks=False,
        **kwargs,
    )


def area(batches):
    xs, ys, kept = (np.concatenate([batch[name] for batch in batches]) for name in ("x", "y", "mask"))
    return roc_area(ys[kept > 0], (xs @ np.float32([1.0, -0.5, 0.3]))[kept > 0])


@pytest.mark.parametrize("steps_per_call", [1, 3])
def test_auroc_of_an_epoch_is_over_all_examples(steps_per_call):
    training, validation = masked([4] * 5), masked([4, 4, 4, 0, 3, 4, 4, 1], seed=1)
    learner = binary_learner(data=(training, validation), steps_per_call=steps_per_call)
    learner.fit(2)
    values = learner.cbstate["metrics_epoch"]["validation"]
    assert values["auroc"] == [(1, pytest.approx(area(validation))), (2, pytest.approx(area(validation)))]
    assert "auroc" not in learner.cbstate["metrics_epoch"]["training"]
    assert learner.evaluate(validation)["auroc"] == pytest.approx(area(validation))
    assert learner.evaluate(training)["auroc"] == pytest.approx(area(training))
    # Batches of several lengths, and no weights.
    ragged = [
        {name: array[:n] for name, array in batch.items()} for batch, n in zip(training, (4, 2, 3, 1, 4), strict=True)
    ]
    found = learner.evaluate(ragged, metrics=[AUROC(lambda aux, batch: (aux, batch["y"]), needs=("aux", "batch"))])
    assert found["auroc"] == pytest.approx(area(ragged))


def test_nothing_is_fetched_without_a_metric_that_gathers(build):
    learner = build([Metrics(accuracy, ConfusionMatrix(4))])
    assert [handler.name for handler in learner.callbacks.get(Metrics).handlers()] == [
        *("accumulate", "forget_the_future", "fetch_step_values", "end_epoch")
    ]


def test_default_scores_of_two_classes():
    rng = np.random.default_rng(0)
    outputs, ys = rng.normal(size=(6, 2)).astype(np.float32), np.array([0, 1, 1, 0, 1, 0])
    gathered = AUROC().gather(SimpleNamespace(outputs=outputs, ys=ys))
    np.testing.assert_allclose(gathered["scores"], outputs[:, 1] - outputs[:, 0])
    for one in (outputs[:, 0], outputs[:, :1]):
        gathered = AUROC().gather(SimpleNamespace(outputs=one, ys=ys))
        np.testing.assert_allclose(gathered["scores"], outputs[:, 0])


def test_labels_that_are_not_binary(refused):
    with refused(
        DeclarationError,
        "The labels of the metric `auroc` must be 0 and 1, but one is 2.\n"
        "  why:   the area under the ROC curve is defined for two classes\n"
        "  fix:   for one class against the others, write `AUROC(lambda outputs, ys: (outputs[:, 2], ys == 2))`",
    ):
        AUROC().compute({"scores": np.arange(3.0), "labels": np.array([0, 1, 2])})


def test_labels_of_minus_one_and_one(refused):
    outputs, ys = np.float32([[0.5], [-2.0], [1.0]]), np.array([[1], [-1], [-1]])
    with refused(
        DeclarationError,
        "The labels of the metric `auroc` must be 0 and 1, but one is -1.\n"
        "  why:   the area under the ROC curve is defined for two classes\n"
        "  fix:   for labels -1 and 1, write `AUROC(lambda outputs, ys: (outputs.reshape(ys.shape), ys > 0))`",
    ):
        AUROC().compute(AUROC().gather(SimpleNamespace(outputs=outputs, ys=ys)))
    fixed = AUROC(lambda outputs, ys: (outputs.reshape(ys.shape), ys > 0))
    assert fixed.compute(fixed.gather(SimpleNamespace(outputs=outputs, ys=ys))) == 0.5  # one of two pairs is in order


def test_gathering_in_a_training_phase_is_an_error(refused):
    with refused(
        DeclarationError,
        "The metric `auroc` gathers samples, but TrainingPhase trains.\n"
        "  why:   samples are gathered only in phases that do not train\n"
        "  fix:   leave out the phase, and evaluate a trained model: `learner.evaluate(data, metrics=[...])`",
    ):
        Metrics(AUROC(phase=TrainingPhase))


# --- state ----------------------------------------------------------------------------------------------------------


def test_arrays_and_samples_survive_a_checkpoint(tmp_path):
    class Pause(Callback):
        def stateaccess(self):
            return {"control": fluxcb.Append()}

        @on
        def pause(self, event: StepEnd, phase: ValidationPhase, learner):
            if learner.progress.epoch == 2 and learner.progress.step_in_epoch == 3 and self.due:
                raise fluxcb.PauseFitting

        due = True

    def build(due):
        pause = Pause()
        pause.due = due
        auroc = AUROC(lambda aux, batch: (aux, batch["y"]), needs=("aux", "batch"), weight=mask)
        means = Metric(lambda aux: jnp.stack([jnp.mean(aux), jnp.max(aux)]), "two", ("aux",), shape=(2,))
        return binary_learner(
            Checkpointer(tmp_path / "run"),
            pause,
            data=(masked([4] * 2), masked([4, 4, 3, 4, 1], seed=1)),
            metrics=[auroc, means],
        )

    assert build(True).fit(3).epoch == 2
    resumed = build(False)
    resumed.fit(3, resume=True)
    uninterrupted = binary_learner(
        data=(masked([4] * 2), masked([4, 4, 3, 4, 1], seed=1)), metrics=resumed.callbacks.get(Metrics).given
    )
    uninterrupted.fit(3)
    assert resumed.cbstate["metrics_epoch"] == uninterrupted.cbstate["metrics_epoch"]
    assert [epoch for epoch, _ in resumed.cbstate["metrics_epoch"]["validation"]["auroc"]] == [1, 2, 3]
    assert resumed.cbstate["metrics_epoch"]["validation"].last("two").shape == (2,)


def test_epoch_values_with_arrays_are_compared():
    def values(*arrays):
        made = EpochValues()
        for epoch, array in enumerate(arrays, 1):
            made.add("m", epoch, array)
        return made

    one, nan = np.ones(2), np.array([1.0, np.nan])
    assert values(one, nan) == values(one.copy(), nan.copy())
    assert values(one, nan) != values(one, one)
    assert values(one) != values(1.0)
    assert values(one) != values(one, one)
    copy = EpochValues()
    copy.load_state_dict(values(one, nan).state_dict())
    assert copy == values(one, nan)
    assert (copy.at(1), list(copy.arrays_at(1))) == ({}, ["m"])


def test_history_has_arrays(build):
    history = build([Metrics(ConfusionMatrix(4), accuracy)]).fit(2)
    assert [matrix.shape for matrix in history["training/confusion_matrix"]] == [(4, 4), (4, 4)]
    content = json.loads(json.dumps(history.to_dict()))
    column = content["per_epoch"]["training"]["confusion_matrix"]
    assert column["epochs"] == [1, 2]
    np.testing.assert_array_equal(column["values"], history["training/confusion_matrix"])
    assert "confusion_matrix" not in repr(history)


@pytest.mark.integration
def test_a_dataframe_has_no_arrays(build):
    pandas = pytest.importorskip("pandas")
    history = build([Metrics(ConfusionMatrix(4), accuracy)]).fit(2)
    frame = history.to_dataframe()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame.columns) == ["training/loss", "training/accuracy"]


def test_curves_ignore_arrays(build):
    from rich.console import Console

    from fluxcb.plots import plot_metrics

    learner = build([Metrics(ConfusionMatrix(4))])
    learner.fit(2)
    plot_metrics(learner, "training/*", ax=Console(width=60, file=(file := io.StringIO())))
    assert "training/loss" in file.getvalue()
    assert "confusion" not in file.getvalue()


def test_evaluate_returns_arrays(build, make_batches):
    learner = build([Metrics()], data=make_batches([4]))
    data = make_batches([4, 3, 1], seed=2)
    found = learner.evaluate(data, metrics=[ConfusionMatrix(4), PerClassAccuracy(4)])
    assert list(found) == ["loss", "confusion_matrix", "per_class_accuracy"]
    np.testing.assert_array_equal(found["confusion_matrix"], confusion_matrix(*predictions(data)))


# --- consumers of numbers -------------------------------------------------------------------------------------------


def test_tables_and_logs_ignore_arrays(build):
    file = io.StringIO()
    learner = build(
        [Metrics(ConfusionMatrix(4), accuracy), MetricsPrinter(file), LogMetrics(), Monitors()], steps_per_call=2
    )
    learner.fit(1)
    assert file.getvalue().split()[:6] == ["epoch", "train", "loss", "train", "accuracy", "time"]
    assert sorted(learner.cbstate["monitors"].names()) == [
        *("training/accuracy", "training/loss", "training/step/accuracy", "training/step/loss")
    ]


@pytest.mark.parametrize("watcher", [EarlyStopping(2, metric="training/m"), MinSaver("run", "training/m")])
def test_watching_an_array_is_an_error_at_construction(build, watcher, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckError) as error:
        build([Metrics(ConfusionMatrix(4, "m"), accuracy), Checkpointer("run"), watcher])
    assert str(error.value) == (
        f"{watcher!r} watches `training/m`, whose values are arrays.\n"
        "  where: the metrics whose values are numbers are `training/loss`, `training/accuracy`, "
        "`validation/loss`, `validation/accuracy`\n"
        "  why:   it compares values of different epochs, so they must be numbers\n"
        "  fix:   watch one of these metrics instead\n"
        "     or: add a metric that reduces the array to a number: a subclass that sets `self.shape = ()` after "
        "`super().__init__` and returns e.g. `super().compute(state).min()` from `compute`"
    )


def test_a_number_computed_from_an_array_can_be_watched(build):
    class WorstClass(PerClassAccuracy):
        def __init__(self, classes):
            super().__init__(classes, "worst")
            self.shape = ()

        def compute(self, state):
            return super().compute(state).min()

    learner = build(
        [Metrics(WorstClass(4), PerClassAccuracy(4)), EarlyStopping(2, metric="training/worst", mode="max")]
    )
    learner.fit(1)
    values = learner.cbstate["metrics_epoch"]["training"]
    np.testing.assert_array_equal(values.last("worst"), values.last("per_class_accuracy").min())


def test_watching_an_undeclared_array_is_an_error_during_training(build):
    class Undeclared(Metrics):
        def array_metrics(self, phase):
            return ()

    learner = build([Undeclared(ConfusionMatrix(4, "m")), EarlyStopping(2, metric="training/m", mode="min")])
    with pytest.raises(DeclarationError) as error:
        learner.fit(1)
    assert str(error.value) == (
        "EarlyStopping watches `training/m`, whose values are arrays.\n"
        "  why:   it compares values of different epochs, so they must be numbers\n"
        "  fix:   watch a metric whose values are numbers"
    )


# --- metrics of users -----------------------------------------------------------------------------------------------


class Total(AbstractMetric):
    name = "total"
    needs = ("outputs",)

    def init(self):
        return jnp.zeros(4)

    def update(self, state, step, samples):
        return state + step.outputs.sum(0)

    def compute(self, state):
        return state


def test_an_array_needs_a_declared_shape(build, refused):
    with refused(
        DeclarationError,
        "The value of the metric `total` is an array of shape (4,), not one number.\n"
        "  why:   the shape of a metric is declared, so that callbacks that need numbers can ignore arrays\n"
        "  fix:   write `shape = (4,)` in the class Total\n"
        "     or: return a scalar from `Total.compute`",
    ):
        build([Metrics(Total())])

    class Declared(Total):
        shape = (4,)

    learner = build([Metrics(Declared(), SmoothLoss())])
    learner.fit(1)
    assert learner.cbstate["metrics_epoch"]["training"].last("total").shape == (4,)

    class Wrong(Total):
        shape = (3,)

    with pytest.raises(DeclarationError, match=r"shape \(4,\), not one of shape \(3,\)"):
        build([Metrics(Wrong())])


def test_a_metric_that_gathers_needs_its_methods(refused):
    class Empty(AbstractGatheredMetric):
        name = "empty"
        needs = ("loss",)

    with refused(
        DeclarationError,
        "The metric `Empty` has no `gather(self, step)`.\n"
        "  fix:   define gather and compute, as described in `fluxcb.callbacks.AbstractGatheredMetric`",
    ):
        Empty().gather(SimpleNamespace())


def test_gather_must_return_a_dict_of_arrays(refused):
    class Mean(AbstractGatheredMetric):
        name = "mean"
        needs = ("loss",)

        def gather(self, step):
            return {"losses": step.loss}

    with refused(
        DeclarationError,
        "`Mean.gather` returned arrays of shapes {'losses': ()}.\n"
        "  why:   the arrays of all batches are concatenated along their first axes\n"
        "  fix:   return a dict of arrays with the samples along their first axes: "
        '`{"scores": step.outputs[:, 1]}`',
    ):
        Mean().gathered(SimpleNamespace(loss=jnp.float32(1.0)))


def test_auroc_of_three_outputs_names_one_class():
    xs = np.linspace(-1, 1, 12, dtype=np.float32)[:, None]
    batches = [(xs, np.arange(12) % 3)]

    def learner(metric):
        return fluxcb.Learner(
            (lambda key, xs: {"w": jnp.ones((1, 3))}, lambda params, xs: xs @ params["w"]),
            lambda outputs, ys: optax.softmax_cross_entropy_with_integer_labels(outputs, ys).mean(),
            optax.sgd(0.0),
            data=(batches, batches),
            callbacks=[Metrics(metric)],
            default_callbacks=False,
        )

    with pytest.raises(DeclarationError, match=r"has scores of shape \(12, 3\), but labels of shape") as raised:
        learner(AUROC())
    assert list(raised.value.fix) == [
        "for one class against the others, write `AUROC(lambda outputs, ys: (outputs[:, 1], ys == 1))`"
    ]
    history = learner(AUROC(lambda outputs, ys: (outputs[:, 1], ys == 1))).fit(1)
    # The share of pairs of one example of class 1 and another one in which the first one has the higher score.
    ones, others = xs[batches[0][1] == 1], xs[batches[0][1] != 1]
    assert history["validation/auroc"] == [pytest.approx((ones > others.T).mean(), abs=1e-6)]
