"""`History`: what `fit` returns."""

import io
import json

import numpy as np
import pytest

from fluxcb import CancelFitting, DeclarationError, History
from fluxcb.callbacks import CustomCallback, Metric, Metrics
from fluxcb.events import EpochEnd
from fluxcb.phases import TrainingPhase
from fluxcb.testing import testlearner


def losses_by_hand(epochs, batches=4, batch_size=8, rate=0.1):
    """Train the model of `testlearner` with NumPy, and return the loss of each step."""
    xs = np.random.default_rng(0).uniform(-1.5, 1.5, (batches, batch_size, 1))
    w = b = 0.0
    losses = []
    for _ in range(epochs):
        for x in xs:
            error = w * x + b - (3 * x - 1)
            losses.append(float(np.mean(error**2)))
            w, b = w - rate * 2 * np.mean(error * x), b - rate * 2 * np.mean(error)
    return losses


def test_fit_returns_metrics_per_epoch_and_step():
    learner = testlearner(Metrics())
    history = learner.fit(3)
    expected = losses_by_hand(3)
    np.testing.assert_allclose([v for _, v in history.per_step["training"]["loss"]], expected, rtol=1e-5)
    assert [step for step, _ in history.per_step["training"]["loss"]] == list(range(1, 13))
    np.testing.assert_allclose(history["training/loss"], np.reshape(expected, (3, 4)).mean(axis=1), rtol=1e-5)
    assert [epoch for epoch, _ in history.per_epoch["validation"]["loss"]] == [1, 2, 3]
    assert (history.epoch, history.step, history.stop_reason) == (3, 12, None)


def test_history_is_mapping():
    history = testlearner(Metrics()).fit(2)
    assert dict(history) == {name: history[name] for name in ("training/loss", "validation/loss")}
    assert len(history) == 2
    assert "training/loss" in history
    assert history.get("training/accuracy") is None
    with pytest.raises(KeyError, match="Did you mean `training/loss`"):
        history["training/los"]
    with pytest.raises(KeyError) as caught:
        history["loss"]
    assert caught.value.args == (
        "'loss' is not among ['training/loss', 'validation/loss']. Did you mean `training/loss` or `validation/loss`?",
    )


@pytest.mark.parametrize("series", ["per_epoch", "per_step"])
def test_missing_name_of_series_suggests_another(series):
    values = getattr(testlearner(Metrics()).fit(1), series)
    with pytest.raises(KeyError, match=r"'trainig' is not among \['training'.*\]\. Did you mean `training`\?"):
        values["trainig"]
    with pytest.raises(KeyError, match=r"'los' is not among \['loss'\]\. Did you mean `loss`\?"):
        values["training"]["los"]


def test_history_does_not_change_later():
    learner = testlearner(Metrics())
    before, first = learner.history, learner.fit(1)
    second = learner.fit(1)
    assert len(before) == 0
    assert len(first["training/loss"]) == 1
    assert len(second["training/loss"]) == 2
    assert dict(learner.history) == dict(second)


def test_history_has_stop_reason():
    def stop(learner):
        raise CancelFitting("enough")

    learner = testlearner(Metrics(), CustomCallback(stop, EpochEnd, TrainingPhase))
    assert learner.fit(5).stop_reason == learner.stop_reason == "enough"


def test_history_without_metrics_is_empty():
    history = testlearner().fit(1)
    assert (dict(history), history.per_step) == ({}, {})
    assert repr(history) == "History(epoch=1, step=4)"


def test_history_to_dict():
    history = History(
        {"training": {"loss": [(1, 0.5), (2, 0.25)]}},
        {"training": {"loss": [(1, 0.5), (2, 0.5)]}},
        epoch=2,
        step=2,
        stop_reason="enough",
    )
    assert json.loads(json.dumps(history.to_dict())) == {
        "epoch": 2,
        "step": 2,
        "stop_reason": "enough",
        "commands": [],
        "per_epoch": {"training": {"loss": {"epochs": [1, 2], "values": [0.5, 0.25]}}},
        "per_step": {"training": {"loss": {"steps": [1, 2], "values": [0.5, 0.5]}}},
    }
    assert repr(history) == "History(epoch=2, step=2, training/loss=0.25, stop_reason='enough')"


def test_history_shows_the_epoch_of_an_earlier_value():
    learner = testlearner(Metrics())
    learner.fit(1)
    losses = dict(learner.history)
    learner.callbacks.set([])  # nothing measures the next epochs
    learner.fit(2)
    assert repr(learner.history) == (
        f"History(epoch=3, step=12, training/loss={losses['training/loss'][0]:.4g} (epoch 1), "
        f"validation/loss={losses['validation/loss'][0]:.4g} (epoch 1))"
    )


@pytest.mark.integration
def test_history_to_dataframe():
    pandas = pytest.importorskip("pandas")

    history = History(
        {"training": {"loss": [(1, 0.5), (2, 0.25)]}, "validation": {"loss": [(2, 0.75)]}},
        {"training": {"loss": [(1, 0.5), (2, 0.125)]}},
        epoch=2,
        step=2,
    )
    nan = float("nan")
    expected = pandas.DataFrame(
        {"training/loss": [0.5, 0.25], "validation/loss": [nan, 0.75]}, index=pandas.Index([1, 2], name="epoch")
    )
    pandas.testing.assert_frame_equal(history.to_dataframe(), expected)
    assert history.to_dataframe(per="step")["training/loss"].tolist() == [0.5, 0.125]
    with pytest.raises(DeclarationError, match=r"`per` of `History\.to_dataframe`"):
        history.to_dataframe(per="epochs")


def test_history_plot_matches_learner_plot():
    from rich.console import Console

    learner = testlearner(Metrics(Metric(lambda outputs, ys: (outputs < ys).mean(), name="below")))
    history = learner.fit(3)
    console = Console(record=True, width=60, file=io.StringIO())
    assert history.plot("validation/below", ax=console) is None
    assert "validation/below" in console.export_text()
