"""The device runs ahead of host handlers, but each host handler sees the train state of its own step."""

import numpy as np
import pytest

from fluxcb import Callback, DeclarationError, EverySeconds, EverySteps, Read, Write, every, on
from fluxcb.events import EpochEnd, HostEvent, StepBegin, StepEnd
from fluxcb.phases import Phase, TrainingPhase, ValidationPhase
from fluxcb.testing import testlearner

OWNER = []


class AtStep(Callback):
    """Call a function at an event, with its own access."""

    def __init__(self, action, access=None, event=StepEnd):
        self.action, self.access, self.event = action, access or {}, event
        self.seen = []

    def stateaccess(self):
        return self.access

    @on
    def end(self, event: StepEnd, phase: TrainingPhase, learner):
        if self.event is StepEnd:
            self.seen.append(self.action(OWNER[0]))

    @on
    def begin(self, event: StepBegin, phase: TrainingPhase, learner):
        if self.event is StepBegin:
            self.seen.append(self.action(OWNER[0]))

    @on
    def epoch(self, event: EpochEnd, phase: TrainingPhase, learner):
        if self.event is EpochEnd:
            self.seen.append(self.action(OWNER[0]))


def run(callback, *others, batches=4, **arguments):
    OWNER[:] = [testlearner(callback, *others, batches=batches, **arguments)]
    OWNER[0].fit(1)
    return callback.seen


READS = {
    "params": lambda learner: float(learner.params["w"]),
    "state": lambda learner: int(learner.state["counters"][0]),
    "hyperparams": lambda learner: learner.hyperparams["learning_rate"],
}


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("event", [StepEnd, StepBegin])
@pytest.mark.parametrize("steps_per_call", [1, 3, "auto"])
def test_reading_learner_inside_step_raises_with_any_windows(name, event, steps_per_call):
    with pytest.raises(DeclarationError) as raised:
        run(AtStep(READS[name], event=event), steps_per_call=steps_per_call)
    assert str(raised.value) == (
        f"A step's handler reads `learner.{name}` from the Learner itself, not from its argument `learner`.\n"
        "  why:   the device runs ahead of the handlers, so the train state is not that of the handler's step\n"
        "  fix:   declare it in `stateaccess`, and read it from the handler's argument"
    )


@pytest.mark.parametrize("steps_per_call", [1, 3])
def test_blocking_handler_waits_for_device(steps_per_call):
    blocks = AtStep(READS["state"], {"hyperparams": Write()})
    assert run(blocks, steps_per_call=steps_per_call) == [1, 2, 3, 4]
    assert run(AtStep(READS["state"], event=EpochEnd), steps_per_call=steps_per_call) == [4]


def test_validation_inside_step_requires_declaration():
    def validate(learner):
        return learner.run_epoch(ValidationPhase())

    with pytest.raises(DeclarationError) as raised:
        run(AtStep(validate))
    assert str(raised.value).splitlines()[0] == (
        "A step's handler requested an epoch of ValidationPhase, but the next steps do not wait for this handler."
    )
    assert run(AtStep(validate, {"params": Read(borrow=True)})) == [2, 2, 2, 2]  # as the message says


class Asked(HostEvent):
    """A custom event."""


class Listens(Callback):
    def __init__(self, access):
        self.access, self.seen = access, []

    def stateaccess(self):
        return self.access

    @on
    def listen(self, event: Asked, phase: Phase, learner):
        self.seen.append(float(learner.params["w"]) if "params" in self.access else learner.progress.step)


def test_emitted_event_shows_counters_but_no_future_state():
    counts = Listens({})
    run(AtStep(lambda learner: learner.emit(Asked(), TrainingPhase())), counts, steps_per_call=2)
    assert counts.seen == [1, 2, 3, 4]
    with pytest.raises(DeclarationError) as raised:
        run(AtStep(lambda learner: learner.emit(Asked(), TrainingPhase())), Listens({"params": Read()}))
    assert str(raised.value).startswith(
        "Listens() uses `params` at an event that a step's handler emits.\n  where: Listens.stateaccess"
    )


def test_event_emitted_by_blocking_handler_shows_state_of_its_step():
    listens, plain = Listens({"params": Read()}), []
    emits = AtStep(lambda learner: learner.emit(Asked(), TrainingPhase()), {"hyperparams": Write()})
    run(emits, listens, steps_per_call=3)
    reference = testlearner(batches=4)
    for _ in range(4):
        reference.fit(steps=1, steps_per_epoch=4)
        plain.append(float(reference.params["w"]))
    np.testing.assert_array_equal(listens.seen, plain)


def test_clocks_with_other_schedules_run_at_their_steps(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("fluxcb._declare.schedules.time.monotonic", lambda: clock[0])

    class Ticks(Callback):
        """Advance the time by a second at each step, before other schedules read the clock."""

        @on
        def tick(self, event: StepEnd, phase: TrainingPhase, learner):
            clock[0] += 1

    class Notes(Callback):
        def __init__(self):
            self.seen = []

        @on(StepEnd, TrainingPhase, when=EverySteps(5))
        def note(self, event, phase, learner):
            self.seen.append(learner.progress.step)

    notes = Notes()
    testlearner(Ticks(), every(notes, seconds=7), batches=40, validation_batches=0, steps_per_call=10).fit(1)
    # The clock starts when it is first asked, at step 5, and has struck at 15, 25 and 35 (7 s after each).
    assert notes.seen == [15, 25, 35]
    assert EverySeconds(7).next_due(3, 1) is None
