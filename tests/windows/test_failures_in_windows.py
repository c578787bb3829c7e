"""Errors of the data and of handlers at every step: what has run before, the message, and how training continues."""

import numpy as np
import pytest

from fluxcb import Append, Callback, CancelEpoch, DataError, Write, every, on
from fluxcb.callbacks import Recorder
from fluxcb.events import BackwardEnd, StepBegin, StepEnd, Trigger
from fluxcb.phases import AbstractTrainingPhase, TrainingPhase, ValidationPhase
from fluxcb.testing import EventLog, testlearner

LENGTHS = [1, 2, 7, 50, "auto"]
STEPS = 17


class TroubleError(Exception):
    pass


def batches(count):
    return [(np.full((2, 1), i / 50, np.float32), np.full((2, 1), i / 60, np.float32)) for i in range(count)]


class Fails:
    """A source that raises instead of yielding one of its batches, only the first time."""

    def __init__(self, at, count=STEPS):
        self.at, self.count = at, count

    def __iter__(self):
        for number, batch in enumerate(batches(self.count)):
            if number == self.at:
                self.at = None
                raise TroubleError(f"batch {number}")
            yield batch


def test_source_fails_at_every_batch(same, tell, keep):
    def run(length):
        kept, log = keep("step.loss", "step.batch", "params", phase=AbstractTrainingPhase), EventLog()
        source, told = Fails(None), []
        learner = testlearner(kept, log, Recorder(), data=(source, None), steps_per_call=length)
        learner.fit(1)  # from now on all programs are known
        first = learner.state
        for at in range(STEPS):
            del kept.seen[:], log.entries[:]
            learner.state, source.at = first, at
            with pytest.raises(TroubleError) as raised:
                learner.fit(3)
            assert str(raised.value) == f"batch {at}"
            (note,) = raised.value.__notes__
            assert note.startswith(f"raised by `data.training`, when batch {at + 1} of pass ")
            assert len(kept.seen) == at
            assert learner.step == int(learner.state["counters"][0]) == STEPS + at
            assert learner.stop_reason == f"TroubleError: batch {at}"
            assert log.names()[-1] == "FitEnd"
            told.append(tell(learner, kept, log))
        learner.fit(1)  # it goes on
        assert learner.step == 3 * STEPS - 1
        return told, tell(learner, kept, log)

    same(run)


class Stops(Callback):
    """Stop at one step, and optionally end the epoch there."""

    def __init__(self, step, cancels):
        self.step, self.cancels = step, cancels

    def stateaccess(self):
        return {"step": {"stop": Append()}, "control": Append()}

    @on(BackwardEnd, TrainingPhase, access={"step": {"stop": Append()}})
    def flag(self, event, phase, learner):
        learner.step.stop = learner.progress.step == self.step - 1

    @on
    def end(self, event: StepEnd, phase: TrainingPhase, learner):
        if learner.step.stop and self.cancels:
            raise CancelEpoch


class WrongShape(Fails):
    """A source with one batch of another shape, only the first time."""

    def __iter__(self):
        for number, (xs, ys) in enumerate(batches(self.count)):
            wrong, self.at = number == self.at, None if number == self.at else self.at
            yield (xs[:, [0, 0]] if wrong else xs), ys


@pytest.mark.parametrize("stop", [1, 9, 12])
@pytest.mark.parametrize("cancels", [False, True])
@pytest.mark.parametrize(("source", "kind"), [(Fails, TroubleError), (WrongShape, DataError)], ids=["source", "shape"])
def test_failure_after_stop_is_raised_in_order(source, kind, cancels, stop, same, tell, keep):
    """The twelve batches before the failure are used first, in the next epoch if the stop ended this epoch."""

    def run(length):
        kept = keep("step.batch", "params", phase=AbstractTrainingPhase)
        learner = testlearner(Stops(stop, cancels), kept, data=(source(12), None), steps_per_call=length)
        with pytest.raises(kind):
            learner.fit(2, steps_per_epoch=30)
        assert learner.step == len(kept.seen) == 12
        assert learner.epoch == (2 if cancels else 1)
        failed = tell(learner, kept)
        learner.fit(steps=20, steps_per_epoch=30)
        return failed, tell(learner, kept)

    same(run, (2, "auto"))


def test_failure_in_skipped_batches_is_not_raised(same, tell, keep):
    def run(length):
        kept = keep("step.batch", phase=AbstractTrainingPhase)
        learner = testlearner(Stops(9, True), kept, data=(Fails(12), None), steps_per_call=length)
        learner.fit(1)
        assert learner.step == 9
        return tell(learner, kept)

    same(run)


class Raises(Callback):
    """Raise at one event of one step."""

    def __init__(self, event, step):
        @on(event, TrainingPhase)
        def fail(self, event, phase, learner):
            if learner.progress.step == self.step:
                raise TroubleError(f"at step {self.step}")

        self.__class__ = type("Raises", (Raises,), {"fail": fail})
        self.step = step


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("event", [StepBegin, StepEnd])
def test_handler_fails_at_every_step(event, length, keep, windows):
    """Handlers before the failing one have run with the values of their step; later handlers have not run."""
    reference = keep("step.loss", "params", phase=AbstractTrainingPhase)
    testlearner(reference, data=(batches(STEPS), None), steps_per_call=1).fit(3)
    # One Learner for all steps: it is set back each time.
    raises = Raises(event, -1)
    before, after = (keep("step.loss", "params", phase=AbstractTrainingPhase) for _ in range(2))
    log = EventLog()
    learner = testlearner(before, raises, after, log, data=(batches(STEPS), None), steps_per_call=length)
    learner.fit(1)
    states = {STEPS: learner.state}
    ahead = 0
    for step in range(STEPS, 2 * STEPS):
        del before.seen[:], after.seen[:], log.entries[:]
        learner.state = states[STEPS]
        raises.step = step if event is StepBegin else step + 1
        with pytest.raises(TroubleError) as raised:
            learner.fit(2)
        # At StepBegin the step at hand is not finished, at StepEnd it is: `step` of the second epoch have ended before.
        assert str(raised.value) == f"at step {raises.step}"
        done = step if event is StepBegin else step + 1
        ended = [e[2] for e in log.entries if e[0] == "StepEnd"]
        assert before.seen == reference.seen[STEPS:done]
        assert after.seen == reference.seen[STEPS:step]
        assert ended == [*range(STEPS + 1, step + 1)]
        assert log.names().count("StepBegin") == len(ended) + (event is StepEnd)
        counter = int(learner.state["counters"][0])
        assert done <= learner.step == counter
        where, *note = raised.value.__notes__
        in_epoch = f"epoch 2, step {raises.step} ({raises.step - STEPS} in this epoch)"
        assert where.endswith(f"at {event.__name__} x TrainingPhase, {in_epoch}")
        told = f"the device runs ahead of host handlers: the train state is that after step {counter}"
        assert note == ([told] if counter > raises.step else [])
        assert [e[0] for e in log.entries[-1:]] == ["FitEnd"]
        ahead += counter > done
        # The train state is that of the step it is told to be.
        params = reference.seen[counter - 1][-1]
        assert keep_of(learner.params) == params
    assert ahead > STEPS / 2
    assert any(steps > 1 for _, steps in windows) == (length != 1)


def keep_of(params):
    return {name: (str(value.dtype), value.shape, np.asarray(value).tobytes()) for name, value in params.items()}


class Both(Callback):
    """Raise at a step that was stopped."""

    def stateaccess(self):
        return {"step": {"stop": Append()}}

    @on(BackwardEnd, TrainingPhase, access={"step": {"stop": Append()}})
    def flag(self, event, phase, learner):
        learner.step.stop = learner.progress.step == 8

    @on
    def fail(self, event: StepEnd, phase: TrainingPhase, learner):
        if learner.step.stop:
            raise TroubleError


def test_error_at_stopped_step_leaves_state_of_that_step(same, tell, keep):
    def run(length):
        kept = keep("step.loss", "step.batch", "params", phase=AbstractTrainingPhase)
        learner = testlearner(Both(), kept, data=(iter(batches(STEPS)), None), steps_per_call=length)
        with pytest.raises(TroubleError) as raised:
            learner.fit(1)
        assert len(raised.value.__notes__) == 1  # nothing has run ahead
        assert learner.step == int(learner.state["counters"][0]) == 9
        failed = tell(learner)
        learner.fit(1)  # with the batches that were handed back
        assert learner.step == STEPS
        return failed, tell(learner, kept)

    same(run)


def test_validation_fails_inside_training_epoch(same, tell, keep):
    """A Trigger runs validation every few steps. Its source sometimes fails, and training continues."""

    def run(length):
        class Validates(Callback):
            def __init__(self):
                self.failed = []

            def stateaccess(self):
                return {"params": Write()}

            @on
            def validate(self, event: Trigger, phase: TrainingPhase, learner):
                try:
                    box[0].run_epoch(ValidationPhase())
                except TroubleError as error:
                    self.failed.append((learner.progress.step, str(error)))

        box, validates, log = [], Validates(), EventLog()
        kept = keep("step.loss", "step.batch")
        source = Fails(3, 5)
        learner = testlearner(
            every(validates, steps=6), kept, log, data=(batches(STEPS), source), steps_per_call=length
        )
        box.append(learner)
        learner.fit(1)
        assert validates.failed == [(6, "batch 3")]
        assert learner.step == STEPS
        return tell(learner, validates, kept, log)

    same(run)
