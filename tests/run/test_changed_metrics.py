"""A run that resumes with another watched metric: best values of the old metric are not compared with the new one."""

import warnings

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import Learner, when
from fluxcb.callbacks import (
    Checkpointer,
    EarlyStopping,
    LearningRate,
    MaxSaver,
    Metric,
    Metrics,
    MinSaver,
    ReduceLROnPlateau,
    StatMonitorParamSetter,
)
from fluxcb.checkpoints import ResumeWarning
from fluxcb.checkpoints.run_folder import entries_of
from fluxcb.stopping import GL, NumberSinceBest


def falling(*callbacks):
    """Return a Learner whose validation loss is 50 above the training loss; both fall by 1 in each of its epochs."""
    return Learner.from_loss(
        {"w": jnp.zeros(())},
        lambda params, batch, key: params["w"] + jnp.mean(batch),
        fluxcb.inject(optax.sgd, learning_rate=0.5),
        data=([np.zeros(1, np.float32)] * 2, [np.full(1, 50, np.float32)]),
        callbacks=[Metrics(Metric(lambda loss: loss, name="score", needs=("loss",))), *callbacks],
        default_callbacks=False,
    )


def notes_of(function):
    """Return the first lines of the ResumeWarnings of a call, after the location of the checkpoint."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        function()
    assert all(warning.category is ResumeWarning for warning in caught)
    return [str(warning.message).splitlines()[0].partition(" with differences:")[2].strip() for warning in caught]


def resumed(folder, before, after, *, epochs=6, **how):
    falling(before, Checkpointer(folder)).fit(2)
    learner = falling(after, Checkpointer(folder))
    return learner, notes_of(lambda: learner.fit(epochs, resume=True, **how))


BECAME = "callbacks.EarlyStopping: training/loss (NumberSinceBest, min) became validation/loss (NumberSinceBest, min)"


@pytest.mark.parametrize("wrapped", [lambda callback: callback, lambda callback: when(callback, lambda learner: True)])
def test_early_stopping_of_another_metric_starts_over(tmp_path, wrapped):
    before, after = wrapped(EarlyStopping(2, metric="training/loss")), wrapped(EarlyStopping(2, metric="loss"))
    learner, notes = resumed(tmp_path, before, after)
    assert (learner.epoch, learner.stop_reason) == (6, None)
    assert notes == [f"{BECAME}, so its criterion starts over"]


def test_only_changed_criteria_start_over(tmp_path):
    before = EarlyStopping(("training/loss", 2), ("validation/loss", NumberSinceBest(3)), GL(500))
    after = EarlyStopping(("loss", 2), ("validation/loss", NumberSinceBest(4)), NumberSinceBest(9))
    _, notes = resumed(tmp_path, before, after, epochs=3)
    assert notes == [
        f"{BECAME}, so its criterion starts over; "
        "validation/loss (GL, min) became validation/loss (NumberSinceBest, min), so its criterion starts over"
    ]


def test_another_direction_starts_over(tmp_path):
    learner, notes = resumed(
        tmp_path, EarlyStopping(3, metric="score", mode="min"), EarlyStopping(3, metric="score"), epochs=7
    )
    assert len(notes) == 1
    assert learner.stop_reason == "validation/score: no improvement on 47 for 3 epochs"


@pytest.mark.parametrize("allow", ["callbacks", "callbacks.EarlyStopping", "callbacks.EarlyStopping.metric"])
def test_allowed_change_starts_over_without_a_warning(tmp_path, allow):
    before, after = EarlyStopping(2, metric="training/loss"), EarlyStopping(2, metric="loss")
    learner, notes = resumed(tmp_path, before, after, allow=(allow,))
    assert (learner.epoch, notes) == (6, [])


def test_the_same_metric_by_another_name_continues(tmp_path):
    before, after = EarlyStopping(2, metric="loss"), EarlyStopping(3, metric="validation/loss")
    _, notes = resumed(tmp_path, before, after)
    assert notes == [""]  # the argument differs, but not what it names


def test_learning_rate_is_not_reduced_for_the_values_of_another_metric(tmp_path):
    before, after = (ReduceLROnPlateau(0.1, patience=1, metric=metric) for metric in ("training/loss", "loss"))
    learner, notes = resumed(tmp_path, before, after)
    assert learner.hyperparams["learning_rate"] == 0.5
    assert notes == [
        "callbacks.ReduceLROnPlateau: training/loss (min) became validation/loss (min), so the best value and the "
        "count start over"
    ]


def test_setter_forgets_the_values_of_another_metric(tmp_path):
    def setter(metric):
        return StatMonitorParamSetter(LearningRate, metric, lambda rate: rate / 2, 0, 3)

    learner, notes = resumed(tmp_path, setter("training/loss"), setter("loss"))
    assert learner.hyperparams["learning_rate"] == 0.5
    assert notes == ["callbacks.StatMonitorParamSetter: training/loss became validation/loss, so its values start over"]


def test_best_checkpoint_is_that_of_the_current_metric(tmp_path):
    def made(metric):
        return falling(Checkpointer(tmp_path, keep_last=1, keep_best=1, metric=metric))

    made("training/loss").fit(3)
    learner = made("loss")
    with pytest.warns(ResumeWarning, match="callbacks.Checkpointer.metric"):
        learner.fit(5, resume=True)
    # The training losses, which are lower than all validation losses, would keep the checkpoint of step 6.
    assert [entry.step for entry in entries_of(tmp_path)] == [10]


@pytest.mark.parametrize("saver", [MinSaver, MaxSaver])
@pytest.mark.filterwarnings("ignore:`MaxSaver:UserWarning")
def test_best_value_of_a_saver_is_that_of_the_current_metric(tmp_path, saver):
    metrics = ("training/loss", "validation/loss")[:: 1 if saver is MinSaver else -1]
    before, after = (saver(tmp_path / "best", metric, name="best") for metric in metrics)
    learner, notes = resumed(tmp_path / "run", before, after, epochs=3)
    assert notes == [f"callbacks.{saver.__name__}: {metrics[0]} became {metrics[1]}, so the best value starts over"]
    assert learner.callbacks.get(saver).best[0] == 6
    assert [entry.step for entry in entries_of(tmp_path / "best" / "best")] == [6]


def test_state_without_a_metric_is_used():
    saved = EarlyStopping(2, metric="training/loss").state_dict()
    saved["states"] = ["of an earlier version"]
    del saved["watched"]
    callback = EarlyStopping(2, metric="loss")
    assert callback.load_state_dict(saved) is None
    assert callback.states == ["of an earlier version"]
