"""Warnings about epochs that do not end or have no Trigger: endless data, and loops of single steps or epochs."""

import contextlib
import itertools
import re

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fluxcb import CancelFitting, Learner, every
from fluxcb.callbacks import Checkpointer, EarlyStopping, InferenceRunner, Metrics, MinSaver, ScalarStats
from fluxcb.phases import TrainingPhase, ValidationPhase

BATCH = np.ones(2, np.float32)


def endless():
    return itertools.repeat(BATCH)


def build(*callbacks, data=endless):
    return Learner.from_loss(
        {"w": jnp.ones(())},
        lambda params, batch: jnp.mean((params["w"] * batch) ** 2),
        optax.sgd(1e-12),
        data=data,
        callbacks=[Metrics(), *callbacks],
        default_callbacks=False,
    )


def runner():
    return every(InferenceRunner([BATCH], ScalarStats("loss"), name="test"), steps=2)


@pytest.mark.parametrize(
    ("callbacks", "validates", "waiting"),
    [
        (lambda folder: [], True, "validation waits"),
        (lambda folder: [Checkpointer(folder)], False, "Checkpointer({folder}) waits"),
        (
            lambda folder: [runner(), EarlyStopping(2, metric="test/loss")],
            False,
            "EarlyStopping(('test/loss', NumberSinceBest(n=2))) waits",
        ),
        (
            lambda folder: [runner(), MinSaver(folder, "test/loss")],
            True,
            "validation and MinSaver({folder}, 'test/loss') wait",
        ),
    ],
    ids=["validation", "Checkpointer", "EarlyStopping", "MinSaver"],
)
def test_fit_of_steps_that_may_be_one_epoch_is_a_warning_whose_fix_works(tmp_path, callbacks, validates, waiting):
    data = (endless, [BATCH]) if validates else endless
    text = (
        "`data.training` has no length. If it never ends, `fit(steps=20)` is a single epoch, and "
        f"{waiting.format(folder=repr(str(tmp_path)))} for its end. To end epochs earlier, pass `steps_per_epoch=`, "
        "e.g. `fit(steps=20, steps_per_epoch=2)`."
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(text)}$"):
        build(*callbacks(tmp_path), data=data).fit(steps=20)
    learner = build(*callbacks(tmp_path / "fixed"), data=data)
    learner.fit(steps=20, steps_per_epoch=2)
    stopped = learner.stop_reason is not None  # the loss does not change, so early stopping acts
    assert learner.epoch == (learner.step // 2 if stopped else 10)
    assert stopped == ("EarlyStopping" in waiting)


@pytest.mark.parametrize(
    "callbacks",
    [
        lambda folder: [],
        lambda folder: [Checkpointer(folder, steps=5)],
        lambda folder: [runner(), every(EarlyStopping(2, metric="test/loss"), steps=2)],
    ],
    ids=["nothing waits", "Checkpointer by steps", "EarlyStopping by steps"],
)
def test_nothing_that_waits_is_no_warning(tmp_path, callbacks):
    build(*callbacks(tmp_path)).fit(steps=20)


def test_data_with_a_length_or_a_finished_epoch_is_no_warning(tmp_path):
    build(Checkpointer(tmp_path / "list"), data=[BATCH] * 3).fit(steps=4)
    learner = build(Checkpointer(tmp_path / "function"), data=lambda: iter([BATCH] * 3))
    learner.fit(1)
    learner.fit(steps=4)


def test_watched_training_metric_in_a_loop_of_single_steps_is_a_warning():
    learner = build(EarlyStopping(1, metric="training/loss"), data=[BATCH])
    learner.run_step(TrainingPhase(), BATCH)
    text = (
        "EarlyStopping(('training/loss', NumberSinceBest(n=1))) watches `training/loss`, which has no value: "
        "`learner.run_step` belongs to no epoch, and training metrics are means over epochs. Train with "
        "`learner.run_epoch(phase)`, or watch a metric of a validation phase."
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(text)}$"):
        learner.trigger()


def test_metric_of_validation_has_a_value_in_a_loop_of_single_steps():
    learner = build(EarlyStopping(1), data=([BATCH], [BATCH]))
    learner.run_step(TrainingPhase(), BATCH)
    learner.run_epoch(ValidationPhase())
    learner.trigger()
    learner.run_epoch(ValidationPhase())
    with pytest.raises(CancelFitting, match="no improvement"):
        learner.trigger()


def count_up():
    return (np.full(2, number, np.float32) for number in itertools.count())


def numbers_seen(learner):
    """Return the numbers of the batches that a fit of `identity` trained on."""
    return [int(loss) for _, loss in learner.history.per_step["training"]["loss"]]


def identity(data, *callbacks):
    return Learner.from_loss(
        {"w": jnp.zeros(())},
        lambda params, batch: jnp.mean(batch) + 0 * params["w"],
        optax.sgd(0.1),
        data=data,
        callbacks=[Metrics(), *callbacks],
        default_callbacks=False,
    )


RESTARTS = (
    "`data.training` has no length, and its last epoch did not read it to its end. This fit starts it again from its "
    "first batch. To continue it instead, pass `steps_per_epoch=` to every fit, e.g. "
    "`fit(steps=5, steps_per_epoch=5)`."
)


def test_second_fit_of_steps_that_starts_endless_data_again_is_a_warning_whose_fix_works():
    learner = identity(count_up)
    learner.fit(steps=5)
    with pytest.warns(UserWarning, match=f"^{re.escape(RESTARTS)}$"):
        learner.fit(steps=5)
    assert numbers_seen(learner) == [0, 1, 2, 3, 4] * 2
    learner = identity(count_up)
    learner.fit(steps=5, steps_per_epoch=5)
    learner.fit(steps=5, steps_per_epoch=5)
    assert numbers_seen(learner) == list(range(10))


def test_resumed_fit_that_starts_endless_data_again_is_a_warning(tmp_path):
    identity(count_up, Checkpointer(tmp_path, steps=5)).fit(steps=5, resume=True)
    identity(count_up, Checkpointer(tmp_path, steps=5)).fit(steps=5, resume=True)  # the run is finished: no warning
    learner = identity(count_up, Checkpointer(tmp_path, steps=5))
    with pytest.warns(UserWarning, match=f"^{re.escape(RESTARTS.replace('5', '10'))}$"):
        learner.fit(steps=10, resume=True)
    assert numbers_seen(learner) == [0, 1, 2, 3, 4] * 2


@pytest.mark.parametrize("data", [[BATCH] * 9, lambda: iter([BATCH] * 5)], ids=["length", "ended"])
def test_data_that_ends_starts_again_without_a_warning(data):
    learner = identity(data)
    learner.fit(steps=6)
    learner.fit(1)
    learner.fit(steps=6)


def test_validation_on_endless_data_is_a_warning():
    def validation():
        yield from itertools.repeat(BATCH, 1005)
        raise StopAsyncIteration

    text = "`data.validation` has no length and has yielded 1000 batches in this epoch."
    with pytest.warns(UserWarning, match=f"^{re.escape(text)}"), pytest.raises(StopAsyncIteration):
        build(data=([BATCH], validation)).fit(1)
    build(data=([BATCH], lambda: itertools.islice(validation(), 100))).fit(1)


def test_loop_of_epochs_without_trigger_is_a_warning_whose_fix_works():
    learner = build(EarlyStopping(1), data=([BATCH], [BATCH]))
    learner.run_epoch(TrainingPhase())
    learner.run_epoch(ValidationPhase())
    text = (
        "The loop runs `learner.run_epoch` of the phase `training` again without `learner.trigger()` in between, so "
        "EarlyStopping(NumberSinceBest(n=1)) does nothing. Call `learner.trigger()` at the end of each epoch, after "
        "the validation."
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(text)}$"):
        learner.run_epoch(TrainingPhase())
    learner = build(EarlyStopping(1), data=([BATCH], [BATCH]))
    for _ in range(2):
        learner.run_epoch(TrainingPhase())
        learner.run_epoch(ValidationPhase())
        with pytest.raises(CancelFitting) if learner.epoch == 2 else contextlib.nullcontext():
            learner.trigger()


@pytest.mark.parametrize("trigger", [lambda learner: learner.trigger(), lambda learner: learner.fit(1)])
def test_trigger_after_each_epoch_or_nothing_that_waits_is_no_warning(trigger):
    learner = build(EarlyStopping(5), data=([BATCH], [BATCH]))
    for _ in range(2):
        learner.run_epoch(TrainingPhase())
        learner.run_epoch(ValidationPhase())
        trigger(learner)
    learner = build(data=[BATCH])
    for _ in range(2):
        learner.run_epoch(TrainingPhase())
