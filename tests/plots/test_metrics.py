"""`plot_metrics` draws the values that `Metrics` has recorded."""

import numpy as np
import pytest

from fluxcb import DataError, DeclarationError
from fluxcb.callbacks import InferenceRunner, Metric, Metrics, ScalarStats
from fluxcb.plots import plot_metrics
from fluxcb.testing import testlearner


@pytest.fixture(scope="module")
def learner():
    runner = InferenceRunner([(np.ones((2, 1), np.float32),) * 2], ScalarStats("loss"), name="test")
    below = Metric(lambda outputs, ys: (outputs < ys).mean(), name="below")
    learner = testlearner(Metrics(below), runner)
    learner.fit(3)
    return learner


def names(ax):
    return [line.get_label() for line in ax.lines]


@pytest.mark.parametrize(
    ("asked", "drawn", "label"),
    [
        ((), {"training/loss", "validation/loss", "test/loss"}, "loss"),
        (("loss",), {"training/loss", "validation/loss", "test/loss"}, "loss"),
        (("validation/loss",), {"validation/loss"}, "loss"),
        (("validation/*",), {"validation/loss", "validation/below"}, "value"),
        (("below", "test/loss"), {"training/below", "validation/below", "test/loss"}, "value"),
    ],
)
def test_metrics_per_epoch(plt, learner, asked, drawn, label):
    ax = plot_metrics(learner, *asked)
    assert set(names(ax)) == drawn
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("epoch", label)
    for line in ax.lines:
        phase, _, name = line.get_label().partition("/")
        assert line.get_xydata().tolist() == [list(pair) for pair in learner.cbstate["metrics_epoch"][phase][name]]


def test_metrics_per_step(plt, learner):
    ax = plot_metrics(learner, "training/step/loss")
    assert names(ax) == ["training/step/loss"]
    assert ax.get_xlabel() == "step"
    kept = learner.cbstate["metrics_step"]["training"]
    assert ax.lines[0].get_xdata().tolist() == list(range(1, learner.step + 1))
    assert ax.lines[0].get_ydata().tolist() == kept["loss"]


def test_mixing_steps_and_epochs_raises(learner):
    with pytest.raises(DeclarationError) as error:
        plot_metrics(learner, "training/step/loss", "validation/loss")
    assert str(error.value) == (
        "`plot_metrics` was given names of steps' values (training/step/loss) and others.\n"
        "  why:   a figure shows values either over steps or over epochs\n"
        "  fix:   call it once for each kind"
    )


def test_unknown_name_raises_with_suggestion(learner):
    with pytest.raises(DataError) as error:
        plot_metrics(learner, "validation/los")
    assert error.value.what == "The Learner has no values 'validation/los'. Did you mean `validation/loss`?"


@pytest.mark.parametrize("callbacks", [[], [Metrics()]], ids=["no metrics", "not trained"])
@pytest.mark.parametrize("name", ["loss", "training/step/loss"])
def test_missing_metrics_raise(callbacks, name):
    with pytest.raises(DataError) as error:
        plot_metrics(testlearner(*callbacks), name)
    assert str(error.value) == (
        "There are no metrics to draw.\n"
        "  why:   `Metrics` keeps values of each epoch, and of each step\n"
        "  fix:   put `Metrics()` into the list of callbacks\n"
        "     or: train first: `learner.fit(1)`"
    )


def test_file_name_instead_of_metric_raises(plt, learner, tmp_path, refused):
    path = tmp_path / "loss.svg"
    with refused(
        DeclarationError,
        f'`plot_metrics` takes names of metrics, and "{path}" is the name of a file.\n'
        f'  fix:   save the figure: `history.plot().figure.savefig("{path}")`, which needs matplotlib',
    ):
        learner.history.plot(str(path))
    learner.history.plot().figure.savefig(path)
    assert path.read_text().startswith("<?xml")


def test_wrong_type_instead_of_metric_raises(learner, refused):
    with refused(
        DeclarationError,
        'Metrics to plot are given by name, not as 3.\n  fix:   write e.g. `history.plot("loss", "accuracy")`',
    ):
        learner.history.plot(3)
