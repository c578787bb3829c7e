"""Each cancel at each moment: what is skipped, and what still runs."""

import inspect
import os

import pytest

from fluxcb import (
    AccessError,
    Append,
    Callback,
    CancelEpoch,
    CancelFitting,
    CancelStep,
    EverySteps,
    Read,
    every,
    on,
)
from fluxcb.events import (
    BackwardBegin,
    EpochBegin,
    EpochEnd,
    Event,
    FitBegin,
    FitEnd,
    FitStopping,
    HostEvent,
    StepBegin,
    StepEnd,
    Trigger,
)
from fluxcb.phases import Phase, TrainingPhase, ValidationPhase
from fluxcb.testing import EventLog, testlearner

CANCELS = [CancelStep, CancelEpoch, CancelFitting]


def at(function):
    function = inspect.unwrap(function)
    return f"{os.path.relpath(function.__code__.co_filename)}:{function.__code__.co_firstlineno}"


class Cancels(Callback):
    """Raise a cancel at the first moment of an event."""

    def __init__(self, cancel, event, phase=Phase, step=None, message="enough"):
        self.cancel, self.event, self.phase, self.step, self.message = cancel, event, phase, step, message
        self.raised = False

    def stateaccess(self):
        return {"control": Append()}

    @on(HostEvent)
    def raise_it(self, event: Event, phase: Phase, learner):
        wanted = isinstance(event, self.event) and isinstance(phase, self.phase)
        if wanted and not self.raised and self.step in (None, learner.progress.step):
            self.raised = True
            raise self.cancel(self.message)


class After(EventLog):
    """A log that runs after the callback that cancels."""

    def runafter(self):
        return (Cancels,)


def run(cancel, event, phase=TrainingPhase, step=None, epochs=1):
    """Return the logs of callbacks before and after the cancelling callback, and the Learner."""
    before, after = EventLog(), After()
    learner = testlearner(before, Cancels(cancel, event, phase, step), after, batches=2, validation_batches=1)
    learner.fit(epochs)
    return before.entries, after.entries, learner


STEPS = [
    ("StepBegin", "training", 0, 1, 0),
    ("StepEnd", "training", 1, 1, 1),
    ("StepBegin", "training", 1, 1, 1),
    ("StepEnd", "training", 2, 1, 2),
]
WHOLE = [
    ("FitBegin", "training", 0, 0, 0),
    ("EpochBegin", "training", 0, 1, 0),
    *STEPS,
    ("EpochEnd", "training", 2, 1, 2),
    ("EpochBegin", "validation", 2, 1, 0),
    ("StepBegin", "validation", 2, 1, 0),
    ("StepEnd", "validation", 2, 1, 1),
    ("EpochEnd", "validation", 2, 1, 1),
    ("Trigger", "training", 2, 1, 2),
    ("FitStopping", "training", 2, 1, 2),
    ("FitEnd", "training", 2, 1, 2),
]


def without(*indices):
    return [entry for index, entry in enumerate(WHOLE) if index not in indices]


def test_without_cancel_all_events_are_emitted():
    before, after, learner = run(CancelStep, EpochEnd, phase=type("Never", (Phase,), {}))
    assert before == after == WHOLE
    assert learner.stop_reason is None


def test_cancel_step_at_step_begin():
    before, after, learner = run(CancelStep, StepBegin)
    # the batch is consumed, the step does not run, progress.step does not advance
    rest = [
        ("StepBegin", "training", 0, 1, 0),
        ("StepEnd", "training", 1, 1, 1),
        ("EpochEnd", "training", 1, 1, 1),
        ("EpochBegin", "validation", 1, 1, 0),
        ("StepBegin", "validation", 1, 1, 0),
        ("StepEnd", "validation", 1, 1, 1),
        ("EpochEnd", "validation", 1, 1, 1),
        ("Trigger", "training", 1, 1, 1),
        ("FitStopping", "training", 1, 1, 1),
        ("FitEnd", "training", 1, 1, 1),
    ]
    assert before == [*WHOLE[:3], *rest]
    assert after == [*WHOLE[:2], *rest]
    assert (learner.step, learner.stop_reason) == (1, None)


def test_cancel_step_at_step_end():
    before, after, learner = run(CancelStep, StepEnd)
    assert before == WHOLE  # the update stays
    assert after == without(3)  # the rest of the moment is skipped
    assert (learner.step, learner.stop_reason) == (2, None)


def test_cancel_epoch_at_step_begin():
    before, after, learner = run(CancelEpoch, StepBegin)
    rest = [
        (name, phase, 0, epoch, min(done, 1) if phase == "validation" else 0)
        for name, phase, _, epoch, done in WHOLE[6:]
    ]
    assert before == [*WHOLE[:3], *rest]
    assert after == [*WHOLE[:2], *rest]
    assert (learner.step, learner.epoch, learner.stop_reason) == (0, 1, None)


def test_cancel_epoch_at_step_end():
    before, after, learner = run(CancelEpoch, StepEnd)
    rest = [(name, phase, 1, epoch, min(done, 1)) for name, phase, _, epoch, done in WHOLE[6:]]
    assert before == [*WHOLE[:4], *rest]
    assert after == [*WHOLE[:3], *rest]
    assert learner.step == 1


def test_cancel_fitting_at_step_begin():
    before, after, learner = run(CancelFitting, StepBegin)
    rest = [(name, "training", 0, 1, 0) for name in ("EpochEnd", "FitStopping", "FitEnd")]
    assert before == [*WHOLE[:3], *rest]
    assert after == [*WHOLE[:2], *rest]
    assert (learner.step, learner.stop_reason) == (0, "enough")


def test_cancel_fitting_at_step_end():
    before, after, learner = run(CancelFitting, StepEnd, step=2)
    rest = [(name, "training", 2, 1, 2) for name in ("EpochEnd", "FitStopping", "FitEnd")]
    assert before == [*WHOLE[:6], *rest]
    assert after == [*WHOLE[:5], *rest]
    assert (learner.step, learner.stop_reason) == (2, "enough")


@pytest.mark.parametrize("cancel", [CancelStep])
@pytest.mark.parametrize(
    ("event", "index"),
    [(FitBegin, 0), (EpochBegin, 1), (EpochEnd, 6), (Trigger, 11), (FitStopping, 12), (FitEnd, 13)],
)
def test_cancel_step_outside_step_skips_rest_of_moment(cancel, event, index):
    before, after, learner = run(cancel, event)
    assert before == WHOLE
    # FitEnd runs for every callback, whatever happened
    assert after == (WHOLE if event is FitEnd else without(index))
    assert learner.stop_reason is None


@pytest.mark.parametrize(
    ("event", "index"), [(FitBegin, 0), (EpochEnd, 6), (Trigger, 11), (FitStopping, 12), (FitEnd, 13)]
)
def test_cancel_epoch_after_last_step_skips_rest_of_moment(event, index):
    before, after, learner = run(CancelEpoch, event)
    assert before == WHOLE
    assert after == (WHOLE if event is FitEnd else without(index))
    assert learner.stop_reason is None


def test_cancel_epoch_at_epoch_begin():
    before, after, _ = run(CancelEpoch, EpochBegin)
    rest = [
        (name, phase, 0, epoch, min(done, 1) if phase == "validation" else 0)
        for name, phase, _, epoch, done in WHOLE[6:]
    ]
    assert before == [*WHOLE[:2], *rest]
    assert after == [WHOLE[0], *rest]


ENDING = [("FitStopping", "training", 0, 0, 0), ("FitEnd", "training", 0, 0, 0)]
CUT_SHORT = [(name, "training", 0, 1, 0) for name in ("EpochEnd", "FitStopping", "FitEnd")]


@pytest.mark.parametrize(
    ("event", "before", "after"),
    [
        (FitBegin, [WHOLE[0], *ENDING], ENDING),
        (EpochBegin, [*WHOLE[:2], *CUT_SHORT], [WHOLE[0], *CUT_SHORT]),
        (EpochEnd, [*WHOLE[:7], *WHOLE[12:]], [*WHOLE[:6], *WHOLE[12:]]),
        (Trigger, WHOLE, without(11)),
        (FitStopping, WHOLE, without(12)),
        (FitEnd, WHOLE, WHOLE),
    ],
)
def test_cancel_fitting_at_other_events(event, before, after):
    ends_anyway = event in (FitStopping, FitEnd)
    assert run(CancelFitting, event, epochs=1 if ends_anyway else 2)[:2] == (before, after)


class Reasons(Callback):
    """Keep the reason of `FitStopping`."""

    def __init__(self):
        self.seen = []

    @on
    def look(self, event: FitStopping, phase: TrainingPhase, learner):
        self.seen.append(event.reason)


@pytest.mark.parametrize("event", [FitBegin, EpochBegin, StepBegin, StepEnd, EpochEnd, Trigger])
@pytest.mark.parametrize("message", ["enough", ""])
def test_stop_reason_is_message_of_cancel_fitting(event, message):
    reasons = Reasons()
    learner = testlearner(Cancels(CancelFitting, event, message=message), reasons, batches=2)
    learner.fit(3)
    assert learner.stop_reason == (message or "CancelFitting")
    learner.fit(1)
    assert learner.stop_reason is None
    assert reasons.seen == [message or "CancelFitting", None]


def test_cancel_epoch_in_validation_ends_only_validation():
    before, after, learner = run(CancelEpoch, StepBegin, ValidationPhase)
    rest = [("EpochEnd", "validation", 2, 1, 0), *WHOLE[11:]]
    assert before == [*WHOLE[:9], *rest]
    assert after == [*WHOLE[:8], *rest]
    assert learner.stop_reason is None


def test_cancel_fitting_in_validation_ends_fit():
    before, after, learner = run(CancelFitting, StepEnd, ValidationPhase, epochs=3)
    rest = [("EpochEnd", "validation", 2, 1, 1), *WHOLE[12:]]
    assert before == [*WHOLE[:10], *rest]
    assert after == [*WHOLE[:9], *rest]
    assert learner.stop_reason == "enough"


def test_next_epoch_follows_cancelled_epoch():
    log = EventLog()
    learner = testlearner(log, Cancels(CancelEpoch, StepEnd, TrainingPhase), batches=2, validation_batches=0)
    learner.fit(2)
    assert log.names() == [
        *("FitBegin", "EpochBegin", "StepBegin", "StepEnd", "EpochEnd", "Trigger"),
        *("EpochBegin", "StepBegin", "StepEnd", "StepBegin", "StepEnd", "EpochEnd", "Trigger"),
        *("FitStopping", "FitEnd"),
    ]
    assert (learner.step, learner.epoch) == (3, 2)


@pytest.mark.parametrize("cancel", [CancelEpoch, CancelFitting])
def test_trigger_inside_epoch_can_cancel(cancel):
    log = EventLog()
    cancels = every(Cancels(cancel, Trigger), steps=2)
    learner = testlearner(log, cancels, batches=4, validation_batches=0)
    learner.fit(1)
    rest = [*(["Trigger"] if cancel is CancelEpoch else []), "FitStopping", "FitEnd"]
    assert log.names() == ["FitBegin", "EpochBegin", *["StepBegin", "StepEnd"] * 2, "EpochEnd", *rest]


def test_cancel_step_at_trigger_inside_epoch_skips_rest_of_trigger():
    log = EventLog()
    learner = testlearner(log, every(Cancels(CancelStep, Trigger), steps=2), batches=4, validation_batches=0)
    learner.fit(1)
    rest = ["EpochEnd", "Trigger", "FitStopping", "FitEnd"]
    assert log.names() == ["FitBegin", "EpochBegin", *["StepBegin", "StepEnd"] * 4, *rest]


@pytest.mark.parametrize("cancel", CANCELS)
def test_run_step_raises_all_cancels_except_cancel_step(cancel):
    for event in (StepBegin, StepEnd):
        learner = testlearner(Cancels(cancel, event))
        batch = learner._state.data["training"][0]
        ran = event is StepEnd
        if cancel is CancelStep:
            assert list(learner.run_step(TrainingPhase(), batch)) == (["loss"] if ran else [])
        else:
            with pytest.raises(cancel, match=r"^enough$"):
                learner.run_step(TrainingPhase(), batch)
        assert learner.step == ran


def test_run_epoch_raises_cancel_fitting_after_epoch_end():
    log = EventLog()
    learner = testlearner(log, Cancels(CancelFitting, StepEnd), batches=3)
    with pytest.raises(CancelFitting, match=r"^enough$"):
        learner.run_epoch(TrainingPhase())
    assert log.names() == ["EpochBegin", "StepBegin", "StepEnd", "EpochEnd"]
    learner = testlearner(Cancels(CancelEpoch, StepEnd), batches=3)
    assert learner.run_epoch(TrainingPhase()) == 1


class Undeclared(Callback):
    def __init__(self, event):
        self.event = event

    @on
    def give_up(self, event: StepBegin | StepEnd, phase: TrainingPhase, learner):
        if isinstance(event, self.event):
            raise CancelFitting


@pytest.mark.parametrize("event", [StepBegin, StepEnd])
def test_cancel_without_control_access_raises(event):
    with pytest.raises(AccessError) as raised:
        testlearner(Undeclared(event)).fit(1)
    assert str(raised.value) == (
        f"Undeclared() raises a Cancel at {event.__name__} without declaring `control`.\n"
        f"  where: Undeclared.give_up  {at(Undeclared.give_up)}\n"
        f"         Undeclared, which has no stateaccess  {at(Undeclared.__init__)}\n"
        "  why:   steps are dispatched ahead unless a handler that may cancel is due\n"
        '  fix:   add `{"control": Append()}` to `stateaccess`'
    )


class StopsAt(Callback):
    """Stop after the step with this number, in the compiled step; cancel on the host."""

    def __init__(self, step, cancel_always=False):
        self.step, self.cancel_always = step, cancel_always

    def stateaccess(self):
        return {"step": {"stop": Append()}, "control": Append()}

    @on
    def stop(self, event: BackwardBegin, phase: TrainingPhase, learner):
        learner.step.stop = learner.progress.step + 1 == self.step

    @on(StepEnd, TrainingPhase, access={"step": {"stop": Read()}, "control": Append()})
    def cancel(self, event, phase, learner):
        if self.cancel_always or learner.step.stop:
            raise CancelFitting(f"stopped at step {learner.progress.step}")


@pytest.mark.parametrize("step", [1, 5, 7, 8])
def test_stopped_step_is_last_step(step):
    log = EventLog()
    learner = testlearner(log, StopsAt(step), batches=8, validation_batches=0)
    learner.fit(3)
    assert (learner.step, learner.stop_reason) == (step, f"stopped at step {step}")
    assert log.names("training") == [
        "FitBegin",
        "EpochBegin",
        *["StepBegin", "StepEnd"] * step,
        "EpochEnd",
        "FitStopping",
        "FitEnd",
    ]


def test_handler_reading_step_stop_cancels_only_at_stopped_steps():
    with pytest.raises(AccessError) as raised:
        testlearner(StopsAt(3, cancel_always=True), batches=4).fit(1)
    assert str(raised.value) == (
        "StopsAt() reads `step.stop`, and cancels at a step that nothing stopped.\n"
        f"  where: StopsAt.cancel  {at(StopsAt.cancel)}\n"
        "  why:   fluxcb assumes that a handler that reads `step.stop` cancels only at stopped steps\n"
        "  fix:   cancel only `if learner.step.stop`, or do not read `step.stop` in this handler"
    )


class SometimesCancels(Callback):
    def stateaccess(self):
        return {"control": Append()}

    @on(StepEnd, TrainingPhase, when=EverySteps(3))
    def cancel(self, event, phase, learner):
        if learner.progress.step == 6:
            raise CancelFitting("at six")


def test_scheduled_handler_cancels_at_its_step():
    learner = testlearner(SometimesCancels(), batches=20)
    learner.fit(1)
    assert (learner.step, learner.stop_reason) == (6, "at six")
    assert int(learner.state["counters"][0]) == 6  # no step was dispatched behind it
