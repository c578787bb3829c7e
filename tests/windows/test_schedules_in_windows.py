"""Every schedule is due at the same steps in windows, and handlers run in the same order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fluxcb import Callback, Read, Write, every, on, throttle, when
from fluxcb.events import StepBegin, StepEnd, Trigger, UpdateEnd
from fluxcb.phases import Phase, TrainingPhase
from fluxcb.testing import testlearner

STEPS, EPOCHS = 37, 2


class Journal(Callback):
    """Record what handlers see, and when, in a shared journal."""

    def __init__(self, journal):
        self.journal = journal

    def note(self, event, learner, *values):
        progress = learner.progress
        values = [np.array(jax.tree.leaves(value)[0]) for value in values]
        self.journal.append((event, progress.step, progress.epoch, progress.step_in_epoch, values))


SEEN = {"params": Read(), "cbstate": {"counted": Read()}}


class Everything(Journal):
    """Have handlers of every kind."""

    def stateaccess(self):
        step = dict.fromkeys(("batch", "loss", "grads", "outputs"), Read())
        return {"step": step, "params": Read(), "cbstate": {"counted": Write()}}

    def init(self, learner):
        if "counted" not in learner.cbstate:
            learner.cbstate.counted = jnp.zeros(3, jnp.int32)

    @on(StepBegin, TrainingPhase, access={"step": {"batch": Read()}})
    def before(self, event, phase, learner):
        self.note("before", learner, learner.step.batch)

    @on(UpdateEnd, TrainingPhase, access={"cbstate": {"counted": Write()}})
    def count(self, event, phase, learner):
        learner.cbstate.counted = learner.cbstate.counted + jnp.array([1, 2, 3])

    @on(StepEnd, TrainingPhase, access={"step": dict.fromkeys(("loss", "grads", "outputs"), Read()), **SEEN})
    def after(self, event, phase, learner):
        step = learner.step
        self.note("after", learner, step.loss, step.grads, step.outputs, learner.params, learner.cbstate.counted)

    @on(Trigger, TrainingPhase, access=SEEN)
    def triggered(self, event, phase, learner):
        self.note("triggered", learner, learner.params, learner.cbstate.counted)


class Looks(Journal):
    """Read the state before a step, which therefore has to wait."""

    def stateaccess(self):
        return {"params": Read()}

    @on
    def before(self, event: StepBegin, phase: TrainingPhase, learner):
        self.note("looks", learner, learner.params)


SCHEDULES = {
    "none": lambda cb: cb,
    "steps": lambda cb: every(cb, steps=5),
    "many steps": lambda cb: every(cb, steps=24),
    "epochs": lambda cb: every(cb, epochs=2),
    "StepEnd": lambda cb: throttle(cb, StepEnd, freq=4),
    "StepBegin": lambda cb: throttle(cb, StepBegin, freq=6),
    "Trigger": lambda cb: throttle(cb, Trigger, freq=2),
    "predicate": lambda cb: when(cb, lambda learner: learner.progress.step % 7 in (2, 3)),
    "steps of epochs": lambda cb: every(every(cb, steps=3), epochs=2),
    "steps of steps": lambda cb: every(every(cb, steps=3), steps=4),
    "predicate of steps": lambda cb: when(every(cb, steps=5), lambda learner: learner.progress.epoch > 1),
    "traced steps": lambda cb: every(cb, steps=3, traced=True),
    "traced epochs": lambda cb: every(cb, epochs=2, traced=True),
    "traced UpdateEnd": lambda cb: throttle(cb, UpdateEnd, freq=4),
}


@pytest.mark.parametrize("kinds", [[Everything], [Everything, Looks]], ids=["after", "before and after"])
@pytest.mark.parametrize("batch_size", [8, 80], ids=["small", "large"])
@pytest.mark.parametrize("name", SCHEDULES)
def test_schedule_is_due_at_same_steps(name, batch_size, kinds, same, tell):
    """Outputs of a large batch are fetched when due, and outputs of a small batch at each step."""

    # `throttle` refuses a callback without a handler of its event, so `Looks` then runs at each step.
    handles = [kind for kind in kinds if kind is Everything or name not in ("StepEnd", "Trigger", "traced UpdateEnd")]

    def run(length):
        journal = []
        learner = testlearner(
            *(SCHEDULES[name](kind(journal)) if kind in handles else kind(journal) for kind in kinds),
            batches=STEPS,
            batch_size=batch_size,
            validation_batches=0,
            steps_per_call=length,
        )
        learner.fit(EPOCHS)
        learner.fit(steps=10)
        if name == "steps" and Looks in kinds:  # before every fifth step, once
            assert [entry[1] for entry in journal if entry[0] == "looks"] == list(range(4, 84, 5))
        return tell(learner), journal

    same(run, (7, "auto"), windows_used=None if Looks in kinds else True)


class Chatty(Callback):
    """Record its runs in a shared journal."""

    def __init__(self, name, journal):
        self.called, self.journal = name, journal

    @on(StepBegin | StepEnd, Phase)
    def say(self, event, phase, learner):
        self.journal.append((self.called, type(event).__name__, type(phase).name, learner.progress.step))


def test_handlers_of_several_callbacks_alternate_as_without_windows(same, tell):
    def run(length):
        journal = []
        learner = testlearner(
            Chatty("one", journal),
            every(Chatty("two", journal), steps=3),
            throttle(Chatty("three", journal), StepBegin, freq=5),
            Chatty("four", journal),
            batches=STEPS,
            steps_per_call=length,
        )
        learner.fit(EPOCHS)
        assert [step for name, *_, step in journal if name == "one"][:4] == [0, 1, 1, 2]
        return tell(learner), journal

    same(run)
