"""`plot_metrics`: the values that `Metrics` has kept, by the names under which they are logged."""

import numpy as np
import pytest

from fluxcb import DataError, DeclarationError
from fluxcb.callbacks import InferenceRunner, Metric, Metrics, ScalarStats
from fluxcb.plots import plot_metrics
from fluxcb.testing import testlearner


@pytest.fixture
def plt():
    pytest.importorskip("matplotlib").use("agg")
    import matplotlib.pyplot as plt

    yield plt
    plt.close("all")


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
def test_metrics_of_epochs(plt, learner, asked, drawn, label):
    ax = plot_metrics(learner, *asked)
    assert set(names(ax)) == drawn
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("epoch", label)
    for line in ax.lines:
        phase, _, name = line.get_label().partition("/")
        assert line.get_xydata().tolist() == [list(pair) for pair in learner.cbstate["metrics_epoch"][phase][name]]


def test_metrics_of_steps(plt, learner):
    ax = plot_metrics(learner, "training/step/loss")
    assert names(ax) == ["training/step/loss"]
    assert ax.get_xlabel() == "step"
    kept = learner.cbstate["metrics_step"]["training"]
    assert ax.lines[0].get_xdata().tolist() == list(range(1, learner.step + 1))
    assert ax.lines[0].get_ydata().tolist() == kept["loss"]


def test_steps_and_epochs_do_not_share_an_axis(learner):
    with pytest.raises(DeclarationError) as error:
        plot_metrics(learner, "training/step/loss", "validation/loss")
    assert str(error.value) == (
        "`plot_metrics` was given names of steps' values (training/step/loss) and others.\n"
        "  why:   those are over steps, and these over epochs\n"
        "  fix:   call it for each kind"
    )


def test_a_name_that_fits_nothing(learner):
    with pytest.raises(DataError) as error:
        plot_metrics(learner, "validation/los")
    assert error.value.what == "The Learner has no values 'validation/los'. Did you mean `validation/loss`?"


@pytest.mark.parametrize("callbacks", [[], [Metrics()]], ids=["no metrics", "not trained"])
@pytest.mark.parametrize("name", ["loss", "training/step/loss"])
def test_no_values(callbacks, name):
    with pytest.raises(DataError) as error:
        plot_metrics(testlearner(*callbacks), name)
    assert str(error.value) == (
        "There are no metrics to draw.\n"
        "  why:   `Metrics` keeps values of each epoch, and of each step\n"
        "  fix:   put `Metrics()` into the list of callbacks\n"
        "     or: train before: `learner.fit(1)`"
    )
