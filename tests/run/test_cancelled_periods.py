"""Periods of handlers that cancel steps: a cancelled step is not counted as a step, but its batch is counted."""

import numpy as np
import pytest

from fluxcb import (
    Append,
    Callback,
    CancelEpoch,
    CancelStep,
    PauseFitting,
    Read,
    RewindFitting,
    every,
    on,
    throttle,
    when,
)
from fluxcb.callbacks import (
    Checkpointer,
    ConditionalCallback,
    CustomCallback,
    FrequencyThrottle,
    PeriodicCallback,
)
from fluxcb.events import StepBegin, StepEnd
from fluxcb.phases import TrainingPhase, ValidationPhase
from fluxcb.testing import testlearner
from tests.changed_callbacks import changes_arguments

LENGTHS = pytest.mark.parametrize("steps_per_call", [1, 2, 7, "auto"])


def numbered(count, first=1):
    """Return batches that contain their number."""
    return [
        (np.full((2, 1), number, np.float32), np.ones((2, 1), np.float32)) for number in range(first, first + count)
    ]


class Journal(Callback):
    """Record the numbers of the batches that steps have used."""

    def __init__(self, phase=TrainingPhase):
        self.phase, self.noted = phase, []

    def state_dict(self):
        return {}  # a resumed run records from its start

    def stateaccess(self):
        return {"step": {"batch": Read()}}

    @on
    def note(self, event: StepEnd, phase, learner):
        if isinstance(phase, self.phase):
            self.noted.append(int(learner.step.batch[0][0, 0]))


def raising(kind, event=StepBegin, phase=TrainingPhase):
    def cancel(learner):
        raise kind

    return CustomCallback(cancel, event, phase, access={"control": Append()}, name=f"raise {kind.__name__}")


SPELLINGS = {
    "throttle": lambda callback, freq: throttle(callback, StepBegin, freq=freq),
    "every": lambda callback, freq: every(callback, steps=freq),
    "PeriodicCallback": lambda callback, freq: PeriodicCallback(callback, every_k_steps=freq),
    "ConditionalCallback": lambda callback, freq: ConditionalCallback(callback, FrequencyThrottle(freq, StepBegin)),
}


def fitted(*callbacks, batches=16, epochs=1, journal=None, **options):
    journal = journal or Journal()
    learner = testlearner(*callbacks, journal, data=numbered(batches), learning_rate=1e-3, **options)
    learner.fit(epochs)
    assert learner.step == len(journal.noted)
    return journal.noted


@LENGTHS
@pytest.mark.parametrize("freq", [2, 3, 5, 17])
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_nth_batch_is_cancelled(spelling, freq, steps_per_call):
    used = fitted(SPELLINGS[spelling](raising(CancelStep), freq), steps_per_call=steps_per_call)
    assert used == [number for number in range(1, 17) if number % freq]


@LENGTHS
def test_period_counts_across_epochs(steps_per_call):
    used = fitted(throttle(raising(CancelStep), StepBegin, freq=3), batches=7, epochs=3, steps_per_call=steps_per_call)
    turns = list(range(1, 8)) * 3
    assert used == [number for turn, number in enumerate(turns, 1) if turn % 3]


@LENGTHS
def test_cancelled_epoch_does_not_cancel_first_batch_of_next_epoch(steps_per_call):
    used = fitted(throttle(raising(CancelEpoch), StepBegin, freq=4), batches=7, epochs=3, steps_per_call=steps_per_call)
    assert used == [1, 2, 3] * 3  # each time, the fourth batch that begins


@LENGTHS
def test_validation_epoch_counts_its_own_batches(steps_per_call):
    journal = Journal(ValidationPhase)
    learner = testlearner(
        throttle(raising(CancelStep, phase=ValidationPhase), StepBegin, freq=3),
        journal,
        data=(numbered(4), numbered(7)),
        steps_per_call=steps_per_call,
    )
    learner.fit(2)
    assert learner.step == 8
    assert journal.noted == [1, 2, 4, 5, 7] * 2


@LENGTHS
def test_cancelling_at_step_end_does_not_change_count(steps_per_call):
    seen = []
    note = CustomCallback(lambda learner: seen.append(learner.progress.step), StepEnd, name="note")

    class Cancels(Callback):
        def stateaccess(self):
            return {"control": Append()}

        def runafter(self):
            return (CustomCallback,)

        @on
        def cancel(self, event: StepEnd, phase: TrainingPhase, learner):
            seen.append("cancelled")
            raise CancelStep

    used = fitted(note, throttle(Cancels(), StepEnd, freq=3), batches=7, steps_per_call=steps_per_call)
    assert used == list(range(1, 8))
    assert [x for x in seen if x != "cancelled"] == list(range(1, 8))
    assert [i for i, x in enumerate(seen) if x == "cancelled"] == [3, 7]


class Between(Callback):
    """Record the batch at the begin and the end of a step."""

    def __init__(self):
        self.begun, self.ended = [], []

    def stateaccess(self):
        return {"step": {"batch": Read()}}

    @on
    def begin(self, event: StepBegin, phase: TrainingPhase, learner):
        self.begun.append(int(learner.step.batch[0][0, 0]))

    @on
    def end(self, event: StepEnd, phase: TrainingPhase, learner):
        self.ended.append(int(learner.step.batch[0][0, 0]))


@LENGTHS
@pytest.mark.parametrize("cancelled", [[2], [3], [2, 3, 4], [1, 7]])
def test_step_end_runs_for_same_steps_as_step_begin(cancelled, steps_per_call):
    between = Between()
    skip = when(raising(CancelStep), lambda learner: int(learner.step.batch[0][0, 0]) in cancelled)
    skip.callback.access["step"] = {"batch": Read()}
    used = fitted(skip, every(between, steps=2), batches=12, steps_per_call=steps_per_call)
    assert used == [number for number in range(1, 13) if number not in cancelled]
    # The one that cancels comes last, so that the other one has seen the batch.
    assert between.begun == [2, 4, 6, 8, 10, 12]
    assert between.ended == [number for number in between.begun if number not in cancelled]


def test_manually_run_steps_are_counted():
    learner = testlearner(throttle(raising(CancelStep), StepBegin, freq=2), Journal())
    ran = [bool(learner.run_step(TrainingPhase(), batch)) for batch in numbered(6)]
    assert ran == [True, False, True, False, True, False]


class PausesAt(Callback):
    """Pause when a certain batch is next."""

    def __init__(self, number):
        self.number = number

    def stateaccess(self):
        return {"step": {"batch": Read()}, "control": Append()}

    @on
    def pause(self, event: StepBegin, phase: TrainingPhase, learner):
        if int(learner.step.batch[0][0, 0]) == self.number and learner.progress.epoch == 1:
            raise PauseFitting("later")


@pytest.mark.parametrize("steps_per_call", [1, 7])
@pytest.mark.parametrize("at", range(1, 13))
@changes_arguments("callbacks.PausesAt.number")
def test_resumed_run_cancels_same_steps(tmp_path, at, steps_per_call):
    def run(folder, number):
        journal = Journal()
        cancels = throttle(raising(CancelStep), StepBegin, freq=3)
        callbacks = [PausesAt(number), cancels, journal, Checkpointer(folder)]
        learner = testlearner(*callbacks, data=numbered(11), learning_rate=1e-3, steps_per_call=steps_per_call)
        learner.fit(2, resume=True)
        return learner, journal.noted

    whole, used = run(tmp_path / "whole", 0)
    first, begun = run(tmp_path / "paused", at)
    assert first.stop_reason == ("later" if at < 12 else None)
    second, rest = run(tmp_path / "paused", 0)
    assert begun + rest == used
    assert second.params["w"].tobytes() == whole.params["w"].tobytes()


def test_rewound_run_counts_from_checkpoint(tmp_path):
    class GoesBack(Callback):
        def stateaccess(self):
            return {"control": Append()}

        @on
        def back(self, event: StepEnd, phase: TrainingPhase, learner):
            if learner.progress.step == 6:
                raise RewindFitting("once", 4, 1)

    journal = Journal()
    learner = testlearner(
        throttle(raising(CancelStep), StepBegin, freq=3),
        GoesBack(),
        journal,
        Checkpointer(tmp_path, steps=4),
        data=numbered(20),
        learning_rate=1e-3,
    )
    with pytest.warns(match="goes back from step 6"):
        learner.fit(1)
    # Steps 1 to 6 used batches 1 to 8 without 3 and 6. Step 4 was the fifth batch to begin, so the sixth one after the
    # checkpoint, which is batch 9, is cancelled again. At step 6 the run may not go back a second time, and ends.
    assert journal.noted == [1, 2, 4, 5, 7, 8, 10, 11]
    assert learner.step == 6
