"""Regression tests for defects that were found by using the library."""

import gc
import os
import signal

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import (
    Append,
    Callback,
    CancelEpoch,
    CancelFitting,
    DeclarationError,
    MissingStateError,
    Read,
    Write,
    every,
    on,
)
from fluxcb._errors import AccessError
from fluxcb.callbacks import ClipGradients, Metrics, Recorder, StopOnNaNLoss
from fluxcb.events import EpochBegin, FitBegin, StepBegin, StepEnd, Trigger
from fluxcb.phases import TrainingPhase, ValidationPhase

LOOP, CHECK = TrainingPhase(), ValidationPhase()


def batches(count, start=0):
    return [np.full((2, 1), float(i), np.float32) for i in range(start, start + count)]


def line(data, *callbacks, **arguments):
    """Return a Learner with loss `mean(batch * w)`, whose gradient is the number of the batch."""
    return fluxcb.Learner.from_loss(
        {"w": jnp.zeros(1)},
        lambda params, batch, key: jnp.mean(batch @ params["w"]),
        fluxcb.inject(optax.sgd, learning_rate=1.0),
        data=data,
        callbacks=callbacks,
        default_callbacks=False,
        **arguments,
    )


def test_progress_exposes_only_counters():
    class Curious(Callback):
        @on
        def look(self, event: StepEnd, phase: TrainingPhase, learner):
            return learner.progress.carry

    with pytest.raises(AccessError, match=r"reads `progress.carry`, which is not a counter"):
        line(batches(2), Curious()).fit(1)


def test_hyperparameter_array_of_user_is_not_donated():
    rate = jnp.asarray(0.5, jnp.float32)

    class Sets(Callback):
        def stateaccess(self):
            return {"hyperparams": {"learning_rate": Write()}}

        @on
        def set(self, event: EpochBegin, phase: TrainingPhase, learner):
            learner.hyperparams.learning_rate = rate

    learner = line(batches(3), Sets())
    learner.fit(2)
    assert not rate.is_deleted()
    assert learner.hyperparams == {"learning_rate": 0.5}


def test_counters_match_carry_after_validation():
    learner = line((batches(6), batches(2)))
    learner.fit(1)
    assert np.asarray(learner.state["counters"]).tolist()[:3] == [6, 1, 6]


def test_validation_inside_training_epoch_keeps_its_counters():
    class Validates(Callback):
        @on
        def validate(self, event: Trigger, phase: TrainingPhase, learner):
            box[0].run_epoch(CHECK)

    box = []
    learner = line((batches(6), batches(3)), every(Validates(), steps=2), Recorder())
    box.append(learner)
    assert learner.run_epoch(LOOP, steps=4) == 4
    history = learner.cbstate["history"]
    assert (learner.step, history["training"].steps, history["validation"].steps) == (4, 4, 6)


def test_training_inside_epoch_raises():
    class Trains(Callback):
        @on
        def train(self, event: StepEnd, phase: TrainingPhase, learner):
            box[0].run_epoch(LOOP)

    box = []
    learner = line(batches(2), Trains())
    box.append(learner)
    with pytest.raises(DeclarationError, match=r"^An epoch of LossTrainingPhase was requested while another"):
        learner.run_epoch(LOOP)


@pytest.mark.parametrize("change", ["state", "run_step", "callbacks"])
def test_changing_learner_inside_fit_raises(change):
    class Changes(Callback):
        @on
        def change(self, event: StepEnd, phase: TrainingPhase, learner):
            if change == "state":
                box[0].state = box[0].state
            elif change == "run_step":
                box[0].run_step(LOOP, batches(1)[0])
            else:
                box[0].callbacks.add(Recorder())

    box = []
    learner = line(batches(2), Changes())
    box.append(learner)
    with pytest.raises(DeclarationError):
        learner.fit(1)


def nan_at(place, count):
    return [np.full((2, 1), np.nan if i == place else 1.0, np.float32) for i in range(count)]


@pytest.mark.filterwarnings("ignore:Training stopped:RuntimeWarning")
def test_stopped_iterator_continues_with_returned_batches():
    data = iter(nan_at(96, 100))
    learner = line(data, StopOnNaNLoss())
    learner.fit(1)
    assert learner.step == 97
    learner.fit(1)
    assert learner.step == 100


def test_batches_after_invalid_batch_are_not_lost():
    good, bad = batches(60), np.ones((2, 3), np.float32)
    learner = line(iter([*good[:41], bad, *good[41:]]))
    with pytest.raises(fluxcb.DataError):
        learner.fit(1)
    learner.fit(1)
    assert learner.step == 60


def test_replacement_iterator_is_used():
    class Exchanges(Callback):
        def stateaccess(self):
            return {"data": {"training": Write()}}

        @on
        def exchange(self, event: FitBegin, phase: TrainingPhase, learner):
            learner.data.training = iter(batches(2, start=10))

    learner = line(iter(batches(3, start=1)), Exchanges())
    learner.fit(1)
    assert float(learner.params["w"][0]) == -(10 + 11)


def test_callbacks_can_be_added_at_end_of_iterator():
    learner = line(iter(batches(3)))
    learner.fit(1)
    learner.callbacks.add(Recorder())
    assert learner.step == 3


def test_dataset_with_source_attribute_can_be_reiterated():
    class Lines:
        def __init__(self):
            self.source = iter(())

        def __iter__(self):
            return iter(batches(2))

    learner = line(Lines())
    learner.fit(2)
    assert learner.step == 4


def test_replaced_model_is_applied():
    def pair(factor):
        return (lambda key, xs: {"w": jnp.ones(1)}), (lambda params, xs: factor * (xs @ params["w"]))

    learner = fluxcb.Learner(
        pair(1.0),
        lambda outputs, ys: jnp.mean(outputs),
        optax.sgd(0.0),
        data=[(np.ones((2, 1), np.float32), np.ones(2, np.float32))],
        default_callbacks=False,
    )
    batch = (np.ones((2, 1), np.float32), np.ones(2, np.float32))
    assert float(learner.run_step(LOOP, batch)["loss"]) == 1.0
    learner.set_model(pair(100.0))
    assert float(learner.run_step(LOOP, batch)["loss"]) == 100.0


def test_fit_by_steps_ends_if_no_step_runs():
    class Never(Callback):
        @on
        def cancel(self, event: EpochBegin, phase: TrainingPhase, learner):
            raise CancelEpoch

    learner = line(batches(2), Never())
    learner.fit(steps=3)
    assert learner.stop_reason == "an epoch ran no step, so `steps` would never be reached"


def test_new_data_may_have_other_shape():
    class Exchanges(Callback):
        def stateaccess(self):
            return {"data": {"training": Write()}}

        @on
        def exchange(self, event: Trigger, phase: TrainingPhase, learner):
            learner.data.training = [np.ones((8, 1), np.float32)]

    learner = line(batches(2), Exchanges())
    learner.fit(2)
    assert learner.step == 3


def test_predicate_reads_do_not_accumulate():
    class Quiet(Callback):
        def stateaccess(self):
            return {"params": Read()}

        @on
        def look(self, event: StepEnd, phase: TrainingPhase, learner):
            """A handler that is never due."""

    learner = line(batches(20), fluxcb.when(Quiet(), lambda learner: learner.params is None))
    learner.fit(2)
    assert learner._state.moment.lent.entries == []


@pytest.mark.filterwarnings("ignore:Training stopped:RuntimeWarning")
def test_list_order_does_not_change_counts_at_cancel():
    for callbacks in ([StopOnNaNLoss(), Recorder()], [Recorder(), StopOnNaNLoss()]):
        learner = line(nan_at(2, 4), *callbacks)
        learner.fit(1)
        assert learner.cbstate["history"]["training"].steps == learner.step == 3


def test_removed_metrics_do_not_record_missed_steps():
    metrics = Metrics()
    learner = line(batches(4), metrics)
    learner.fit(2)
    learner.callbacks.remove(metrics)
    learner.fit(2)
    learner.callbacks.add(metrics)
    learner.fit(1)
    assert learner.cbstate["metrics_step"]["training"].steps == [*range(1, 9), *range(17, 21)]


def test_metrics_follow_restored_state():
    learner = line(batches(4), Metrics())
    first = learner.state
    learner.fit(3)
    losses = learner.cbstate["metrics_step"]["training"]["loss"][:4]
    learner.state = first
    learner.fit(1)
    kept = learner.cbstate["metrics_step"]["training"]
    assert (kept.steps, kept["loss"]) == ([1, 2, 3, 4], losses)
    assert [epoch for epoch, _ in learner.cbstate["metrics_epoch"]["training"]["loss"]] == [1]


def test_writing_step_value_after_step_raises():
    class Fakes(Callback):
        def stateaccess(self):
            return {"step": {"loss": Write()}}

        @on
        def fake(self, event: StepEnd, phase: TrainingPhase, learner):
            learner.step.loss = 99.0

    with pytest.raises(AccessError, match=r"^Fakes\(\) writes `step.loss`, which the step has computed"):
        line(batches(2), Fakes())


def test_writing_step_value_of_another_name_after_step_raises():
    class Fakes(Callback):
        def stateaccess(self):
            return {"step": {"loss": Write()}}

        @on
        def fake(self, event: StepEnd, phase: TrainingPhase, learner):
            setattr(learner.step, "lo" + "ss", 99.0)

    learner = line(batches(2), Fakes())  # the code of the handler does not tell
    with pytest.raises(AccessError, match=r"^Fakes\(\) writes `step.loss`, which the step has computed"):
        learner.fit(1)


def test_numpy_integers_are_accepted():
    learner = line(batches(2))
    learner.fit(np.int64(2))
    assert learner.step == 4


def test_ctrl_c_during_run_epoch_keeps_train_state():
    class Presses(Callback):
        @on
        def press(self, event: StepEnd, phase: TrainingPhase, learner):
            if learner.progress.step == 5:
                os.kill(os.getpid(), signal.SIGINT)

    learner = line(batches(200), Presses())
    with pytest.raises(KeyboardInterrupt):
        learner.run_epoch(LOOP)
    assert 5 <= learner.step < 200
    learner.run_epoch(LOOP, steps=2)
    assert jnp.isfinite(learner.state["params"]["w"]).all()  # and not a StateLostError


def test_ctrl_c_with_cancel_reaches_caller():
    class Both(Callback):
        def stateaccess(self):
            return {"control": Append()}

        @on
        def both(self, event: StepBegin, phase: TrainingPhase, learner):
            os.kill(os.getpid(), signal.SIGINT)
            raise CancelFitting("enough")

    with pytest.raises(KeyboardInterrupt):
        line(batches(3), Both()).fit(1)


def test_deleted_learner_releases_callbacks():
    recorder = Recorder()
    learner = line(batches(2), recorder)
    del learner
    gc.collect()
    line(batches(2), recorder).fit(1)


def test_traced_schedules_match_host_schedules():
    class Marks(Callback):
        def stateaccess(self):
            return {"cbstate": {"marks": Write()}}

        def init(self, learner):
            if "marks" not in learner.cbstate:
                learner.cbstate.marks = jnp.int32(0)

        @on
        def mark(self, event: fluxcb.events.ComputeEnd, phase: ValidationPhase, learner):
            learner.cbstate.marks = learner.cbstate.marks + 1

    learner = line((batches(2), batches(6)), every(Marks(), steps=2, traced=True))
    learner.run_epoch(CHECK)
    assert int(learner.cbstate["marks"]) == 3


def test_phase_passed_to_run_epoch_is_compiled_once():
    class Other(TrainingPhase):
        name = "other"

    learner = fluxcb.testing.testlearner(ClipGradients(1.0))
    batch = (jnp.ones((8, 1)), jnp.ones((8, 1)))
    learner.run_step(Other(), batch)
    counts = learner.compile_counts
    learner.run_step(Other(), batch)
    assert learner.compile_counts == counts


def test_path_below_array_raises():
    class Looks(Callback):
        def stateaccess(self):
            return {"step": {"loss": {"nope": Read()}}}

        @on
        def look(self, event: StepEnd, phase: TrainingPhase, learner):
            return learner.step.loss.nope

    with pytest.raises(MissingStateError, match=r"^Looks\(\) reads `step\.loss\.nope`, which does not exist here\."):
        line(batches(2), Looks()).fit(1)
