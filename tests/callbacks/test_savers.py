"""Checkpointer, ModelSaver, MinSaver, MaxSaver: which states are on disk, and when."""

import errno
import itertools
import math
import os
import shutil
import signal
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fluxcb import Append, Callback, CancelFitting, CheckpointError, DeclarationError, Learner, Write, on
from fluxcb._run.snapshots import Snapshots
from fluxcb.callbacks import Checkpointer, InferenceRunner, MaxSaver, MinSaver, ModelSaver, ScalarStats
from fluxcb.checkpoints import load_params
from fluxcb.checkpoints.saving import make_manifest
from fluxcb.events import EpochEnd, Event, StepEnd
from fluxcb.phases import AbstractTrainingPhase, ValidationPhase


class Told(Callback):
    """Measure, for each validation, what was said beforehand; stands for `Metrics`."""

    def __init__(self, *values, name="loss"):
        self.values, self.name = values, name

    def stateaccess(self):
        return {"cbstate": {"metrics_epoch": Write()}}

    def init(self, learner):
        if "metrics_epoch" not in learner.cbstate:
            learner.cbstate.metrics_epoch = {}

    @on
    def tell(self, event: EpochEnd, phase: ValidationPhase, learner):
        epoch = learner.progress.epoch
        learner.cbstate.metrics_epoch = {"validation": _Values(self.name, self.values[:epoch])}


class _Values(dict):
    def __init__(self, name, values):
        super().__init__({name: values})

    def at(self, epoch):
        return {name: values[epoch - 1] for name, values in self.items()}

    def arrays_at(self, epoch):
        return {}


def training(*callbacks, steps=2):
    """Return a Learner whose parameter counts the finished steps: each subtracts a gradient of -1."""
    return Learner.from_loss(
        {"w": jnp.zeros(())},
        lambda params, batch, key: -params["w"] + 0 * jnp.sum(batch),
        optax.sgd(1.0),
        data=([np.zeros(1, np.float32)] * steps, [np.zeros(1, np.float32)]),
        callbacks=callbacks,
        default_callbacks=False,
    )


def steps_in(folder):
    return sorted(int(name) for name in os.listdir(folder) if name.isdigit())


def kept(tmp_path, saver: type[MinSaver | MaxSaver] = MinSaver, *values, name="min-validation-loss", **kwargs):
    training(saver(tmp_path, "loss", **kwargs), Told(*values)).fit(len(values))
    return steps_in(tmp_path / name) if (tmp_path / name).exists() else []


@pytest.mark.parametrize(
    ("values", "best"),
    [
        ((3.0, 1.0, 2.0), 4),
        ((1.0, 1.0, 1.0), 2),  # of equal ones the first
        ((math.nan, 2.0, 3.0), 4),  # NaN is never the best, and nothing has to be better than it
        ((2.0, math.nan, 1.0), 6),
        ((math.inf, 2.0, 3.0), 4),
        ((0.0, -1.0, 5.0), 4),
    ],
)
def test_the_smallest_value_is_kept(tmp_path, values, best):
    assert kept(tmp_path, MinSaver, *values) == [best]
    assert float(load_params(tmp_path / "min-validation-loss")["w"]) == best


@pytest.mark.filterwarnings("ignore:`MaxSaver:UserWarning")
@pytest.mark.parametrize(("values", "best"), [((3.0, 5.0, 4.0), 4), ((math.nan, -2.0, -3.0), 4), ((1.0, 1.0), 2)])
def test_the_largest_value_is_kept(tmp_path, values, best):
    assert kept(tmp_path, MaxSaver, *values, name="max-validation-loss") == [best]


@pytest.mark.parametrize(
    ("cls", "metric", "size", "watched", "other"),
    [
        (MinSaver, "accuracy", "smallest", "validation/accuracy", "MaxSaver"),
        (MinSaver, "training/f1", "smallest", "training/f1", "MaxSaver"),
        (MaxSaver, "loss", "largest", "validation/loss", "MinSaver"),
        (MaxSaver, "top5_error", "largest", "validation/top5_error", "MinSaver"),
    ],
)
def test_a_saver_that_keeps_the_worst_value_warns(tmp_path, cls, metric, size, watched, other):
    with pytest.warns(UserWarning, match="keeps the checkpoint") as caught:
        cls(tmp_path, metric)
    assert [str(warning.message) for warning in caught] == [
        f'`{cls.__name__}(..., "{metric}")` keeps the checkpoint with the {size} `{watched}`, which is usually the '
        f'worst one. To keep the best one, write `{other}(..., "{metric}")`.'
    ]
    assert caught[0].filename == __file__


@pytest.mark.parametrize(
    ("cls", "metric"),
    [(MinSaver, "loss"), (MinSaver, "mae"), (MaxSaver, "accuracy"), (MaxSaver, "reward"), (MaxSaver, "training/top/5")],
)
def test_a_saver_of_a_good_or_unknown_metric_does_not_warn(tmp_path, cls, metric):
    cls(tmp_path, metric)  # warnings are errors


@pytest.mark.parametrize("folder", ["accuracy", "runs/1"])
def test_a_max_saver_without_a_metric_is_an_error_whose_fix_works(folder, refused):
    with refused(
        DeclarationError,
        "`MaxSaver` was not given `metric`.\n"
        "  why:   it takes folder, metric, name\n"
        '  fix:   pass the folder first and then the metric: `MaxSaver("runs/1", "accuracy")`',
    ):
        MaxSaver(folder)
    assert [str(watched) for watched in MaxSaver("runs/1", "accuracy").watched_metrics()] == ["validation/accuracy"]
    assert [str(watched) for watched in MinSaver("runs/1").watched_metrics()] == ["validation/loss"]


@pytest.mark.filterwarnings("ignore:`M..Saver:UserWarning")
@pytest.mark.parametrize("name", ["accuracy", "loss", "val_loss", "validation/top5_acc"])
@pytest.mark.parametrize("cls", [MinSaver, MaxSaver])
def test_a_metric_instead_of_the_folder_is_rejected(cls, name, refused, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with refused(
        DeclarationError,
        f'`{cls.__name__}` received "{name}" as its folder, which is the name of a metric.\n'
        "  why:   the first argument is the directory of the run, and the second one is the metric\n"
        f'  fix:   write `{cls.__name__}("runs/1", "{name.removeprefix("val_")}")`\n'
        f'     or: write "./{name}" if you mean a directory',
    ):
        cls(name, "loss")
    cls("runs/1", name)
    cls(f"./{name}", "loss")
    cls(tmp_path / name, "loss")
    for folder in ("runs/loss", "accuracy-runs", "best"):
        cls(folder, "loss")
    (tmp_path / name).mkdir(parents=True)
    cls(name, "loss")  # the directory of an earlier run


def test_folder_may_have_the_name_of_a_metric_if_the_metric_is_given(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert [str(watched) for watched in MaxSaver("r2", "accuracy").watched_metrics()] == ["validation/accuracy"]


def test_nothing_is_saved_if_all_values_are_nan(tmp_path):
    assert kept(tmp_path, MinSaver, math.nan, math.nan) == []


def test_the_best_checkpoint_has_the_current_state(tmp_path):
    # Seven epochs of two steps: the best of all at step 4, and one at step 14 that only ends like it.
    values = (9.0, 1.0, 8.0, 7.0, 6.0, 5.0, 4.0)
    training(Checkpointer(tmp_path / "all", keep_last=9), MinSaver(tmp_path), Told(*values)).fit(7)
    assert steps_in(tmp_path / "all") == [0, 2, 4, 6, 8, 10, 12, 14]
    assert steps_in(tmp_path / "min-validation-loss") == [4]
    assert float(load_params(tmp_path / "min-validation-loss")["w"]) == 4


def test_a_metric_name_can_contain_a_slash(tmp_path):
    saver = MinSaver(tmp_path, "validation/rank/5")
    training(saver, Told(2.0, 1.0, name="rank/5")).fit(2)
    assert sorted(os.listdir(tmp_path)) == ["min-validation-rank-5"]
    assert saver.best == (4, 1.0)
    assert float(load_params(tmp_path / "min-validation-rank-5")["w"]) == 4


class Full:
    """A disk that is full at some steps."""

    def __init__(self, monkeypatch, *steps):
        self.steps = set(steps)
        monkeypatch.setattr("fluxcb.checkpoints.saving.make_manifest", self)

    def __call__(self, snapshot, run, value, folder):
        if snapshot.step in self.steps:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return make_manifest(snapshot, run, value, folder)


def test_a_state_that_could_not_be_saved_is_not_the_best(tmp_path, monkeypatch):
    disk = Full(monkeypatch, 4)
    saver = MinSaver(tmp_path)
    learner = training(saver, Told(3.0, 1.0, 2.0))
    with pytest.raises(CheckpointError, match=r"^Cannot write the checkpoint of step 4 to .*No space left"):
        learner.fit(2)
    assert saver.best == (2, 3.0)
    assert steps_in(saver.folder) == [2]
    disk.steps.clear()
    learner.fit(1)
    assert saver.best == (6, 2.0)
    assert steps_in(saver.folder) == [6]


class Breaks(Callback):
    """Make the parameters NaN in one epoch."""

    def __init__(self, epoch):
        self.epoch = epoch

    def stateaccess(self):
        return {"params": Write()}

    @on(EpochEnd, AbstractTrainingPhase)
    def spoil(self, event, phase, learner):
        learner.params = {"w": jnp.full((), math.nan if learner.progress.epoch == self.epoch else 1.0)}


def test_a_state_that_is_not_finite_is_not_the_best(tmp_path):
    saver = MinSaver(tmp_path)
    with pytest.warns(UserWarning, match="does not save the state after step 4: some parameters are NaN or infinite"):
        training(saver, Breaks(2), Told(3.0, 1.0, 2.0)).fit(3)
    assert saver.best == (6, 2.0)
    assert steps_in(saver.folder) == [6]


def test_the_best_state_of_a_killed_run_is_saved_at_the_resume(tmp_path):
    def made():
        return training(Checkpointer(tmp_path), MinSaver(tmp_path), Told(3.0, 1.0, 2.0))

    best = tmp_path / "min-validation-loss"
    made().fit(1)
    shutil.copytree(best, tmp_path / "before")
    made().fit(2, resume=True)
    assert steps_in(best) == [4]
    shutil.rmtree(best)  # as if the process had been killed between the two savers' writing
    shutil.copytree(tmp_path / "before", best)
    again = made()
    again.fit(3, resume=True)
    assert again.step == 6
    assert steps_in(best) == [4]
    assert float(load_params(best)["w"]) == 4


def test_errors_of_savers_end_the_training(tmp_path, monkeypatch):
    Full(monkeypatch, 4)
    learner = training(ModelSaver(tmp_path))
    with pytest.raises(CheckpointError) as raised:
        learner.fit(5)
    assert raised.value.what.startswith(f"Cannot write the checkpoint of step 4 to {tmp_path}: No space left")
    assert steps_in(tmp_path) == [0, 2]
    assert learner.epoch == 3  # at the next save at the latest, which waits for this one


def test_model_saver_keeps_ten_checkpoints(tmp_path):
    training(ModelSaver(tmp_path), steps=1).fit(12)
    assert steps_in(tmp_path) == list(range(3, 13))


class Ends(Callback):
    def __init__(self, how, step):
        self.how, self.step = how, step

    def stateaccess(self):
        return {"control": Append()}

    @on(StepEnd, AbstractTrainingPhase)
    def end(self, event: Event, phase, learner):
        if learner.progress.step == self.step:
            self.how()


def cancel():
    raise CancelFitting


def press():
    signal.raise_signal(signal.SIGINT)


def preempt():
    signal.raise_signal(signal.SIGTERM)


@pytest.mark.filterwarnings("ignore:SIGTERM ended the fit:RuntimeWarning")
@pytest.mark.parametrize(("how", "step"), [(cancel, 5), (press, 5), (preempt, 5)])
def test_a_fit_that_ends_early_is_saved_at_its_end(tmp_path, how, step):
    learner = training(Checkpointer(tmp_path, epochs=100), Ends(how, step), steps=3)
    if how is press:
        with pytest.raises(KeyboardInterrupt):
            learner.fit(9)
    else:
        learner.fit(9)
    assert learner.step == step
    assert steps_in(tmp_path) == [0, step]
    assert float(load_params(tmp_path)["w"]) == step


@pytest.mark.parametrize(("epochs", "copies"), [(1, [0, 2, 4]), (2, [0, 4]), (3, [0, 4])])
def test_the_state_is_copied_again_at_the_end_only_if_it_was_not_just_saved(tmp_path, monkeypatch, epochs, copies):
    taken, take = [], Snapshots.take
    monkeypatch.setattr(Snapshots, "take", lambda self, phase: taken.append(take(self, phase)) or taken[-1])
    training(Checkpointer(tmp_path, epochs=epochs)).fit(2)
    assert [snapshot.step for snapshot in taken] == steps_in(tmp_path) == copies


def test_the_end_is_saved_for_every_period(tmp_path):
    training(Checkpointer(tmp_path, steps=4), steps=3).fit(steps=10)
    assert steps_in(tmp_path) == [4, 8, 10]


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_the_best_model_is_saved_in_every_order_of_the_callbacks(tmp_path, order):
    def loss(params, batch, key):  # in training each step adds 1 to w; the data of the runner find 4 the best
        return jnp.mean(jnp.where(batch > 0, (params["w"] - 4) ** 2, -params["w"]))

    saver = MinSaver(tmp_path, "test/loss")
    tutorial = [
        ModelSaver(tmp_path),
        saver,
        InferenceRunner([np.ones(1, np.float32)], ScalarStats("loss"), name="test"),
    ]
    learner = Learner.from_loss(
        {"w": jnp.zeros(())},
        loss,
        optax.sgd(1.0),
        data=[np.zeros(1, np.float32)] * 2,
        callbacks=[tutorial[i] for i in order],
        default_callbacks=False,
    )
    learner.fit(3)
    assert learner.cbstate["metrics_epoch"]["test"]["loss"] == [(1, 4.0), (2, 0.0), (3, 4.0)]
    assert saver.best == (4, 0.0)
    assert steps_in(tmp_path / "min-test-loss") == [4]
    assert float(load_params(tmp_path / "min-test-loss")["w"]) == 4
    assert steps_in(tmp_path) == [0, 2, 4, 6]
    assert float(load_params(tmp_path)["w"]) == 6


class Layer(NamedTuple):
    w: jnp.ndarray
    b: jnp.ndarray


def test_parameters_are_read_without_their_container_classes(tmp_path):
    first = {"layers": [Layer(jnp.arange(3.0), jnp.ones(2)), Layer(jnp.zeros((2, 2)), jnp.full(1, 7.0))]}
    learner = Learner.from_loss(
        first,
        lambda params, batch, key: sum(jnp.sum(layer.w) + jnp.sum(layer.b) for layer in params["layers"]),
        optax.sgd(0.5),  # all gradients are 1
        data=[np.zeros(1, np.float32)],
        callbacks=[Checkpointer(tmp_path)],
        default_callbacks=False,
    )
    learner.fit(1)
    plain = load_params(tmp_path)
    assert {name: array.tolist() for name, array in plain["layers"][0].items()} == {
        "w": [-0.5, 0.5, 1.5],
        "b": [0.5] * 2,
    }
    assert plain["layers"][1]["b"].tolist() == [6.5]
    filled = load_params(tmp_path, like=first)
    assert type(filled["layers"][1]) is Layer
    assert filled["layers"][1].w.tolist() == [[-0.5, -0.5], [-0.5, -0.5]]
