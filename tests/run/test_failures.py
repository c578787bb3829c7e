"""Errors propagate unchanged, name their origin, and FitEnd always runs."""

import os

import jax
import pytest
from jax.experimental import io_callback

import fluxcb
from fluxcb import Append, Callback, Read, StateLostError, on
from fluxcb.events import (
    BackwardBegin,
    BackwardEnd,
    EpochBegin,
    EpochEnd,
    Event,
    FitBegin,
    FitEnd,
    HostEvent,
    StepBegin,
    StepEnd,
    Trigger,
)
from fluxcb.phases import Phase, TrainingPhase, ValidationPhase
from fluxcb.testing import EventLog, testlearner


def at(function):
    return f"{os.path.relpath(function.__code__.co_filename)}:{function.__code__.co_firstlineno}"


class TroubleError(Exception):
    pass


class Fails(Callback):
    def __init__(self, event, phase=TrainingPhase, step=None, error=None):
        self.event, self.phase, self.step = event, phase, step
        self.error = error or TroubleError("as planned")

    def __repr__(self):
        return f"Fails({self.event.__name__})"

    @on(HostEvent)
    def fail(self, event: Event, phase: Phase, learner):
        if type(event) is self.event and isinstance(phase, self.phase) and self.step in (None, learner.progress.step):
            raise self.error


MOMENTS = [
    (FitBegin, TrainingPhase, "FitBegin x TrainingPhase, epoch 0, step 0 (0 in this epoch)"),
    (EpochBegin, TrainingPhase, "EpochBegin x TrainingPhase, epoch 1, step 0 (0 in this epoch)"),
    (StepBegin, TrainingPhase, "StepBegin x TrainingPhase, epoch 1, step 0 (0 in this epoch)"),
    (StepEnd, TrainingPhase, "StepEnd x TrainingPhase, epoch 1, step 1 (1 in this epoch)"),
    (EpochEnd, TrainingPhase, "EpochEnd x TrainingPhase, epoch 1, step 2 (2 in this epoch)"),
    (EpochBegin, ValidationPhase, "EpochBegin x ValidationPhase, epoch 1, step 2 (0 in this epoch)"),
    (StepBegin, ValidationPhase, "StepBegin x ValidationPhase, epoch 1, step 2 (0 in this epoch)"),
    (StepEnd, ValidationPhase, "StepEnd x ValidationPhase, epoch 1, step 2 (1 in this epoch)"),
    (EpochEnd, ValidationPhase, "EpochEnd x ValidationPhase, epoch 1, step 2 (1 in this epoch)"),
    (Trigger, TrainingPhase, "Trigger x TrainingPhase, epoch 1, step 2 (2 in this epoch)"),
    (FitEnd, TrainingPhase, "FitEnd x TrainingPhase, epoch 2, step 4 (2 in this epoch)"),
]


@pytest.mark.parametrize(("event", "phase", "where"), MOMENTS)
def test_error_propagates_unchanged_with_note(event, phase, where):
    error = TroubleError("as planned")
    log = EventLog()
    learner = testlearner(Fails(event, phase, error=error), log, batches=2, validation_batches=1)
    with pytest.raises(TroubleError) as raised:
        learner.fit(2)
    assert raised.value is error
    note = f"raised by Fails({event.__name__}) in Fails.fail  {at(Fails.fail)}, at {where}"
    # Nothing bounds windows here, and the first holds one step; its StepBegin is told after it ran.
    ahead = "the device runs ahead of host handlers: the train state is that after step 1"
    assert error.__notes__ == ([note, ahead] if (event, phase) == (StepBegin, TrainingPhase) else [note])
    assert log.names()[-1] == "FitEnd"
    assert log.names().count("FitEnd") == 1
    assert learner.stop_reason == "TroubleError: as planned"


def test_error_in_window_note_names_step_and_state(no_clock):
    fails = Fails(StepEnd, step=12)
    learner = testlearner(fails, batches=40)
    with pytest.raises(TroubleError) as raised:
        learner.fit(1)
    note, window = raised.value.__notes__
    assert (
        note
        == f"raised by Fails(StepEnd) in Fails.fail  {at(Fails.fail)}, at StepEnd x TrainingPhase, epoch 1, step 12 "
        "(12 in this epoch)"
    )
    assert window == f"the device runs ahead of host handlers: the train state is that after step {learner.step}"
    assert learner.step == int(learner.state["counters"][0]) > 12


def test_training_continues_after_error():
    fails = Fails(StepEnd, step=3)
    learner = testlearner(fails, batches=4)
    with pytest.raises(TroubleError):
        learner.fit(1)
    learner.callbacks.remove(fails)
    before = learner.step
    learner.fit(1)
    assert (learner.step, learner.stop_reason) == (before + 4, None)


def test_fit_end_runs_for_every_callback_and_errors_are_grouped():
    one, two = Fails(FitEnd, error=TroubleError("one")), Fails(FitEnd, error=OSError("two"))
    log = EventLog()
    learner = testlearner(one, two, log, batches=1)
    with pytest.raises(ExceptionGroup) as raised:
        learner.fit(1)
    assert raised.value.message == "several callbacks failed at FitEnd"
    assert raised.value.exceptions == (one.error, two.error)
    assert log.names()[-1] == "FitEnd"
    place = f"Fails.fail  {at(Fails.fail)}"
    assert [e.__notes__ for e in raised.value.exceptions] == [
        [f"raised by {label} in {place}, at FitEnd x TrainingPhase, epoch 1, step 1 (1 in this epoch)"]
        for label in ("Fails(FitEnd)", "Fails(FitEnd) #2")
    ]


def test_error_at_fit_end_becomes_note_of_first_error():
    first, last = Fails(EpochEnd, error=TroubleError("first")), Fails(FitEnd, error=OSError("last"))
    learner = testlearner(first, last, batches=1)
    with pytest.raises(TroubleError) as raised:
        learner.fit(1)
    assert raised.value is first.error
    assert raised.value.__notes__ == [
        f"raised by Fails(EpochEnd) in Fails.fail  {at(Fails.fail)}, at EpochEnd x TrainingPhase, epoch 1, step 1 "
        "(1 in this epoch)",
        "and at FitEnd: OSError: last",
    ]


KINDS = [TroubleError, KeyboardInterrupt, SystemExit]


@pytest.mark.parametrize("executor", [None, fluxcb.ThreadExecutor(2)], ids=["serial", "threads"])
@pytest.mark.parametrize("kind", KINDS)
def test_base_exceptions_have_note(kind, executor):
    error = kind("as planned")
    fails = [Fails(StepEnd, error=error), Fails(Trigger)]
    learner = testlearner(*fails, batches=1, executor=executor)
    with pytest.raises(kind) as raised:
        learner.fit(1)
    assert raised.value is error
    place = f"raised by Fails(StepEnd) in Fails.fail  {at(Fails.fail)}"
    assert error.__notes__ == [f"{place}, at StepEnd x TrainingPhase, epoch 1, step 1 (1 in this epoch)"]
    assert learner.stop_reason == f"{kind.__name__}: as planned"


class FailsInInit(Callback):
    def __init__(self, error):
        self.error = error

    def init(self, learner):
        raise self.error


@pytest.mark.parametrize("kind", KINDS)
def test_error_in_init_has_note(kind):
    with pytest.raises(kind) as raised:
        testlearner(FailsInInit(kind("early")))
    assert str(raised.value) == "early"
    assert raised.value.__notes__ == ["raised in the `init` of FailsInInit()"]


class FailsInTrace(Callback):
    def __init__(self, error):
        self.error = error

    @on
    def fail(self, event: BackwardBegin, phase: TrainingPhase, learner):
        raise self.error


@pytest.mark.parametrize("kind", KINDS)
def test_error_in_traced_handler_has_note(kind):
    with pytest.raises(kind) as raised:
        testlearner(FailsInTrace(kind("while tracing")))
    assert str(raised.value) == "while tracing"
    assert raised.value.__notes__[0] == (  # JAX adds a note of its own
        f"while tracing FailsInTrace.fail  {at(FailsInTrace.fail)}, at BackwardBegin x TrainingPhase"
    )


class FailsOnDevice(Callback):
    """Raise inside the compiled step."""

    def __init__(self, at_step):
        self.at_step = at_step

    @on
    def call(self, event: BackwardEnd, phase: TrainingPhase, learner):
        def check(step):
            if step + 1 == self.at_step:
                raise TroubleError("inside XLA")

        io_callback(check, None, learner.progress.step, ordered=True)


class ReadsLoss(Callback):
    def stateaccess(self):
        return {"step": {"loss": Read()}}

    @on
    def look(self, event: StepEnd, phase: TrainingPhase, learner):
        float(learner.step.loss)


class LooksAtAll(ReadsLoss):
    def stateaccess(self):
        return {"step": {"loss": Read()}, "control": Append()}


@pytest.mark.parametrize("callbacks", [[], [ReadsLoss], [LooksAtAll]])
@pytest.mark.parametrize("at_step", [1, 3])
def test_failed_device_call_reports_lost_state(callbacks, at_step, capfd):
    log = EventLog()
    learner = testlearner(log, FailsOnDevice(at_step), *(make() for make in callbacks))
    with pytest.raises(jax.errors.JaxRuntimeError, match="inside XLA"):
        learner.fit(1)
    assert log.names()[-1] == "FitEnd"
    with pytest.raises(StateLostError) as raised:
        learner.params  # noqa: B018 - the access is the test
    assert str(raised.value) == (
        "The train state is lost: the call that it was donated to failed (JaxRuntimeError).\n"
        "  why:   a program may overwrite a donated array, even if the program fails\n"
        "  fix:   build a new Learner, and restore a checkpoint"
    )
    assert isinstance(raised.value.__cause__, jax.errors.JaxRuntimeError)
    with pytest.raises(StateLostError):
        learner.fit(1)
