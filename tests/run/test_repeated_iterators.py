"""A fit of several epochs on a one-shot iterator is an error before its first step, if its second epoch has no data."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fluxcb import Append, Callback, CancelEpoch, DataError, Learner, PauseFitting, Write, on
from fluxcb.callbacks import Checkpointer, EarlyStopping, Metrics, SkipNonFinite, StopAfter
from fluxcb.events import EpochBegin, StepEnd, Trigger
from fluxcb.phases import InTurn, LossTrainingPhase, LossValidationPhase, Phase, TrainingPhase
from fluxcb.stopping import NumberLimit
from fluxcb.testing import EventLog

BATCHES = [np.full(4, i, np.float32) for i in range(1, 4)]


class Second(LossTrainingPhase):
    name = "second"


def make(data, *callbacks, **kwargs):
    return Learner.from_loss(
        {"w": jnp.zeros(())},
        lambda params, batch, key: jnp.mean((params["w"] - batch) ** 2),
        optax.sgd(0.1),
        data=data,
        callbacks=callbacks,
        default_callbacks=False,
        **kwargs,
    )


def batches():
    yield from BATCHES


def endless():
    while True:
        yield from BATCHES


def message(name, fit, *, ends=True):
    lines = [
        f"`{name}` is a one-shot iterator (generator), and it is used up after the first epoch of `{fit}`.",
        "  why:   each epoch iterates over its data source, and an iterator yields nothing the second time",
        "  fix:   pass a function that starts it again: `batches`",
        "     or: pass something that can be iterated again: a list, a dataset, a class with `__iter__`",
    ]
    length = ["     or: if it never ends, pass the length of an epoch: `fit(3, steps_per_epoch=100)`"]
    return "\n".join(lines + length * ends)


def test_training_data_for_three_epochs_is_refused_before_the_first_event(refused):
    log = EventLog()
    learner = make((batches(), BATCHES), log)
    with refused(DataError, message("data.training", "fit(3)")):
        learner.fit(3)
    assert (learner.step, learner.epoch, log.names()) == (0, 0, [])
    assert learner.stop_reason == f"DataError: {message('data.training', 'fit(3)')}"
    learner.fit(1)  # no batch is lost
    assert (learner.step, learner.epoch) == (3, 1)


def test_the_fixes_for_training_data_work():
    class Again:
        def __iter__(self):
            return batches()

    for data in (batches, BATCHES, Again()):
        assert make((data, BATCHES)).fit(3).step == 9
    assert make((endless(), BATCHES)).fit(3, steps_per_epoch=100).step == 300


@pytest.mark.parametrize(
    ("fit", "shown"),
    [({"epochs": 3}, "fit(3)"), ({"epochs": 3, "steps_per_epoch": 2}, "fit(3, steps_per_epoch=2)")],
)
def test_validation_data_for_three_epochs_is_refused(fit, shown, refused):
    learner = make((BATCHES, batches()))
    with refused(DataError, message("data.validation", shown, ends=False)):
        learner.fit(**fit)
    assert learner.step == 0
    learner.fit(1)
    assert learner.step == 3
    assert make((BATCHES, batches)).fit(**fit).epoch == 3


@pytest.mark.parametrize(
    "fits",
    [
        [{"epochs": 1}],
        [{"steps": 2}, {"epochs": 1}],
        [{"steps": 1}, {"steps": 2}],
        [{"epochs": 3, "steps_per_epoch": 1}],
        [{"steps": 3, "steps_per_epoch": 1}],
    ],
)
def test_fits_that_read_the_iterator_once_are_accepted(fits):
    learner = make(batches())
    for fit in fits:
        learner.fit(**fit)
    assert learner.step == 3


def test_an_iterator_of_which_an_earlier_fit_has_read_a_part_is_refused():
    learner = make(batches())
    learner.fit(steps=2)
    with pytest.raises(DataError, match=r"used up after the first epoch of `fit\(2\)`"):
        learner.fit(2)
    assert learner.step == 2
    learner.fit(1)
    assert learner.step == 3


def test_an_endless_iterator_needs_a_length_of_its_epochs():
    learner = make(endless())
    with pytest.raises(DataError, match=r"if it never ends, pass the length of an epoch: `fit\(2, steps_per_epoch=100"):
        learner.fit(2)
    assert learner.fit(2, steps_per_epoch=100).step == 200
    assert learner.fit(steps=7).step == 207


def test_a_callback_of_the_user_may_end_each_epoch():
    class Ends(Callback):
        def stateaccess(self):
            return {"control": Append()}

        @on
        def end(self, event: StepEnd, phase: TrainingPhase, learner):
            raise CancelEpoch

    assert make(batches(), Ends()).fit(3).step == 3


def test_a_callback_of_the_user_may_skip_validations():
    class Once(Callback):
        def __init__(self):
            self.runs = 0

        @on
        def skip(self, event: EpochBegin, phase: LossValidationPhase, learner):
            self.runs += 1
            if self.runs < 3:
                raise CancelEpoch

    assert make((BATCHES, batches()), Once()).fit(3).epoch == 3


def test_a_callback_may_assign_the_data_of_each_epoch():
    class Assigns(Callback):
        def stateaccess(self):
            return {"data": {"training": Write()}}

        @on
        def assign(self, event: Trigger, phase: TrainingPhase, learner):
            learner.data.training = batches()

    assert make(batches(), Assigns()).fit(3).step == 9


def test_a_time_limit_may_end_the_only_epoch():
    learner = make(endless(), StopAfter(seconds=1e-9))
    learner.fit(1000)
    assert (learner.stop_reason or "").startswith("the fit has taken ")


@pytest.mark.parametrize("callbacks", [[], [EarlyStopping(NumberLimit(9), metric="loss", phase="training")]])
def test_callbacks_that_end_no_epoch_early_change_nothing(callbacks):
    learner = make(batches(), Metrics(), SkipNonFinite(), *callbacks)
    with pytest.raises(DataError, match="used up after the first epoch"):
        learner.fit(2)
    assert learner.step == 0


def phases_of(second):
    return {"phases": (LossTrainingPhase(), Second()), "data": {"training": BATCHES, "second": second}}


def test_a_second_training_phase_is_checked_as_well():
    assert make(**phases_of(batches)).fit(2).step == 12
    learner = make(**phases_of(batches()))
    with pytest.raises(DataError, match=r"^`data.second` is a one-shot iterator \(generator\)"):
        learner.fit(2)
    assert learner.fit(1).step == 6


def test_only_the_first_phase_in_turn_bounds_the_epochs():
    phases = [InTurn(LossTrainingPhase(), Second())]
    assert make({"training": BATCHES, "second": endless()}, phases=phases).fit(2).epoch == 2
    learner = make({"training": batches(), "second": endless()}, phases=phases)
    with pytest.raises(DataError, match=r"^`data.training` is a one-shot iterator \(generator\)"):
        learner.fit(2)


class PausesAt(Callback):
    """Interrupt the fit once, at a step of a phase."""

    def __init__(self, phase, step):
        self.phase, self.left = phase, step

    def stateaccess(self):
        return {"control": Append()}

    @on
    def pause(self, event: StepEnd, phase: Phase, learner):
        self.left -= isinstance(phase, self.phase)
        if self.left == 0:
            self.left = -1
            raise PauseFitting


DISCARDS = pytest.mark.filterwarnings("ignore:The run resumes from .* read and discarded:UserWarning")


def pause_at(folder, phase, step):
    """Run two epochs of three batches, each followed by a validation of three batches, up to a step of a phase."""
    learner = make((BATCHES, BATCHES), Checkpointer(folder), PausesAt(phase, step), steps_per_call=1)
    learner.fit(2)
    return learner


@DISCARDS
def test_the_rest_of_a_resumed_epoch_and_a_further_epoch_need_two_passes(tmp_path):
    assert pause_at(tmp_path, LossTrainingPhase, 2).step == 2
    resumed = make((batches(), BATCHES), Checkpointer(tmp_path))
    with pytest.raises(DataError, match=r"^`data.training` .* used up after the first epoch of `fit\(2\)`"):
        resumed.fit(2, resume=True, allow=("data", "callbacks"))


@DISCARDS
def test_the_rest_of_the_last_epoch_needs_one_pass(tmp_path):
    assert pause_at(tmp_path, LossTrainingPhase, 5).step == 5
    resumed = make((iter(BATCHES * 2), iter(BATCHES * 2)), Checkpointer(tmp_path))
    resumed.fit(2, resume=True, allow=("data", "callbacks"))
    assert (resumed.step, resumed.epoch) == (6, 2)


@DISCARDS
def test_an_epoch_whose_training_is_done_needs_only_the_validation(tmp_path):
    assert pause_at(tmp_path, LossValidationPhase, 2).step == 3
    resumed = make((iter(BATCHES * 2), iter(BATCHES)), Checkpointer(tmp_path))
    with pytest.raises(DataError, match=r"^`data.validation` .* used up after the first epoch of `fit\(2\)`"):
        resumed.fit(2, resume=True, allow=("data", "callbacks"))
    resumed = make((iter(BATCHES * 2), BATCHES), Checkpointer(tmp_path))
    resumed.fit(2, resume=True, allow=("data", "callbacks"))
    assert (resumed.step, resumed.epoch) == (6, 2)


@DISCARDS
def test_a_finished_run_that_is_resumed_reads_no_data(tmp_path):
    make((BATCHES, BATCHES), Checkpointer(tmp_path)).fit(2)
    resumed = make((iter(BATCHES * 2), iter(BATCHES * 2)), Checkpointer(tmp_path))
    resumed.fit(2, resume=True, allow=("data", "callbacks"))
    assert resumed.step == 6
