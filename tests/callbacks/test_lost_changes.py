"""Setters of hyperparameters whose changes another callback overwrites."""

import re
import warnings

import jax.numpy as jnp
import pytest

from fluxcb import Callback, Write, on
from fluxcb.callbacks import (
    Checkpointer,
    HyperParamSetterWithFunc,
    LearningRate,
    Metrics,
    ReduceLROnPlateau,
    ScheduledHyperParamSetter,
)
from fluxcb.events import ForwardBegin, StepBegin
from fluxcb.phases import TrainingPhase
from fluxcb.testing import testlearner

RATE = 0.01
STEPS = 4


class Writes(Callback):
    def stateaccess(self):
        return {"hyperparams": {"learning_rate": Write()}}


class Traced(Writes):
    """Set the same rate in each step, after a warm-up in the first epoch."""

    @on
    def set_rate(self, event: ForwardBegin, phase: TrainingPhase, learner):
        learner.hyperparams.learning_rate = RATE * jnp.minimum(1.0, (learner.progress.step + 1) / STEPS)


class OnHost(Writes):
    @on
    def set_rate(self, event: StepBegin, phase: TrainingPhase, learner):
        learner.hyperparams.learning_rate = RATE * min(1.0, (learner.progress.step + 1) / STEPS)


class TracedWarmUp(Writes):
    """The same, with the fix of the warning."""

    @on
    def set_rate(self, event: ForwardBegin, phase: TrainingPhase, learner):
        value, n = RATE * (learner.progress.step + 1) / STEPS, STEPS
        learner.hyperparams.learning_rate = jnp.where(
            learner.progress.step < n, value, learner.hyperparams.learning_rate
        )


class HostWarmUp(Writes):
    @on
    def set_rate(self, event: StepBegin, phase: TrainingPhase, learner):
        value, n = RATE * (learner.progress.step + 1) / STEPS, STEPS
        learner.hyperparams.learning_rate = jnp.where(
            learner.progress.step < n, value, learner.hyperparams.learning_rate
        )


class Decays(Writes):
    """Scale the current value."""

    @on
    def set_rate(self, event: ForwardBegin, phase: TrainingPhase, learner):
        learner.hyperparams.learning_rate = 0.5 * learner.hyperparams.learning_rate


class Raises(Writes):
    """Set a rate that still rises in the last epoch."""

    @on
    def set_rate(self, event: ForwardBegin, phase: TrainingPhase, learner):
        learner.hyperparams.learning_rate = RATE * (learner.progress.step + 1)


class Fails(Callback):
    def __init__(self, failing):
        self.failing = failing

    def state_dict(self):
        return {}

    @on
    def fail(self, event: StepBegin, phase: TrainingPhase, learner):
        if self.failing and learner.progress.epoch == 3:
            raise RuntimeError("in the third epoch")


def plateau():
    # A relative threshold that no loss reaches, so each epoch after the first one reduces the rate.
    return ReduceLROnPlateau(0.1, patience=0, threshold=1e9, metric="training/loss")


def table():
    return ScheduledHyperParamSetter(LearningRate, [(0, RATE), (2, RATE / 10), (4, RATE / 100)])


def learner_of(*callbacks):
    return testlearner(Metrics(), *callbacks, batches=STEPS, validation_batches=0, learning_rate=RATE)


def warnings_of(run):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(warning.message) for warning in caught]


def text_of(setter, writer, before, after, epoch, now):
    return (
        f"{setter!r} changed `hyperparams.learning_rate` from {before} to {after} after epoch {epoch}, but the value "
        f"is {before} after epoch {now}, so the change was lost. {writer}() also writes `hyperparams.learning_rate`. "
        f"Remove one of these callbacks. Or, if {writer}() is a warm-up of n steps, assign "
        "`jnp.where(learner.progress.step < n, value, learner.hyperparams.learning_rate)` in it, which loses only "
        "changes during these steps."
    )


@pytest.mark.parametrize("writer", [Traced, OnHost])
@pytest.mark.parametrize(("make", "epoch", "now"), [(plateau, 2, 3), (table, 2, 4)])
def test_a_lost_change_is_one_warning(writer, make, epoch, now):
    setter = make()
    learner = learner_of(writer(), setter)
    assert warnings_of(lambda: learner.fit(8)) == [text_of(setter, writer.__name__, 0.01, 0.001, epoch, now)]


@pytest.mark.parametrize("writer", [TracedWarmUp, HostWarmUp])
@pytest.mark.parametrize(("make", "last"), [(plateau, RATE / 10**5), (table, RATE / 100)])
def test_the_fix_keeps_the_changes(writer, make, last):
    learner = learner_of(writer(), make())
    assert warnings_of(lambda: learner.fit(6)) == []
    assert learner.hyperparams["learning_rate"] == pytest.approx(last)
    alone = learner_of(make())
    alone.fit(6)
    assert alone.hyperparams["learning_rate"] == pytest.approx(last)


def test_a_rate_above_the_one_before_a_reduction_is_a_lost_change():
    learner = learner_of(Raises(), plateau())
    with pytest.warns(
        UserWarning, match=re.escape("from 0.08 to 0.008 after epoch 2, but the value is 0.12 after epoch")
    ):
        learner.fit(3)


def test_a_lost_increase_is_found_by_the_same_value():
    setter = HyperParamSetterWithFunc(LearningRate, lambda epoch, rate: 2 * rate if epoch >= 2 else None)
    learner = learner_of(Traced(), setter)
    assert warnings_of(lambda: learner.fit(4)) == [text_of(setter, "Traced", 0.01, 0.02, 2, 3)]


def test_scaling_the_current_value_is_no_lost_change():
    assert warnings_of(lambda: learner_of(Decays(), plateau()).fit(4)) == []


def test_a_rate_that_the_program_sets_between_fits_is_no_lost_change():
    learner = learner_of(TracedWarmUp(), plateau())

    def run():
        for _ in range(3):
            learner.fit(3)
            learner.hyperparams["learning_rate"] = RATE

    assert warnings_of(run) == []


def test_setters_read_the_rate_only_if_another_callback_of_the_user_writes_it():
    def reads(*callbacks):
        learner = learner_of(*callbacks)
        learner.callbacks.measure()
        warnings_of(lambda: learner.fit(6))
        rows = [row for row in learner.callbacks.timings() if "Setter" in str(row.handler)]
        return sum(row.reads.get("hyperparams.learning_rate", 0) for row in rows)

    assert reads(table()) == 0
    assert reads(table(), TracedWarmUp()) == 3  # one for each point of the table


@pytest.mark.parametrize("make", [plateau, table])
def test_the_last_change_is_saved_and_old_states_are_loaded(make):
    learner, setter = learner_of(Traced(), one := make()), make()
    warnings_of(lambda: learner.fit(2))
    saved = one.state_dict()
    changes = {"before": RATE, "after": RATE / 10, "epoch": 2, "last_epoch": 2, "warned": False}
    assert saved["changes"] == pytest.approx(changes)
    setter.load_state_dict(saved)
    assert setter.state_dict() == saved
    setter.load_state_dict({name: value for name, value in saved.items() if name != "changes"})
    assert setter.state_dict().get("changes") is None
    alone = make()
    learner_of(alone).fit(2)
    assert "changes" not in alone.state_dict()


@pytest.mark.parametrize("writer", [Traced, TracedWarmUp])
def test_a_resumed_fit_gives_the_warnings_of_the_uninterrupted_one(writer, tmp_path):
    whole = warnings_of(lambda: learner_of(writer(), plateau()).fit(5))

    def interrupted():
        with pytest.raises(RuntimeError, match="in the third epoch"):
            learner_of(writer(), plateau(), Checkpointer(tmp_path), Fails(True)).fit(5)

    first = warnings_of(interrupted)
    rest = warnings_of(
        lambda: learner_of(writer(), plateau(), Checkpointer(tmp_path), Fails(False)).fit(
            5, resume=True, allow=["callbacks"]
        )
    )
    assert first == []
    assert [text for text in rest if "so the change was lost" in text] == whole
    assert len(whole) == (writer is Traced)
