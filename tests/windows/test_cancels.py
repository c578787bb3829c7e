"""Cancels and stops at every step of a window have the same effect as without windows."""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
import pytest

from fluxcb import Append, Callback, CancelEpoch, CancelFitting, CancelStep, Read, Write, on
from fluxcb._declare.schedules import Schedule
from fluxcb.callbacks import Metrics, Recorder, StopOnNaNLoss
from fluxcb.events import BackwardEnd, StepBegin, StepEnd
from fluxcb.phases import AbstractTrainingPhase, TrainingPhase
from fluxcb.testing import EventLog, testlearner

STEPS = 11
LAST = 2 * STEPS + 1


@dataclass(frozen=True)
class AtStep(Schedule):
    """A schedule that is due at one step, which tests change."""

    place: dict

    def due(self, step, epoch, learner):
        return step == self.place["step"]

    def next_due(self, step, epoch):
        return self.place["step"] if self.place["step"] > step else None


class After(EventLog):
    """Record what callbacks after the cancelling one observe."""

    def runafter(self):
        return (Cancels, Stops, StopOnNaNLoss)


class Cancels(Callback):
    pass


def cancels(cancel, event, place):
    """Return a callback that cancels at one step (at StepBegin only once, or the step would repeat forever)."""

    class Now(Cancels):
        def stateaccess(self):
            return {"control": Append()}

        @on(event, TrainingPhase, when=AtStep(place))
        def cancel(self, event, phase, learner):
            if not place["raised"]:
                place["raised"] = True
                raise cancel(f"at step {learner.progress.step}")

    return Now()


def runs(learner, place, places, tell, *callbacks):
    """Return the results of a Learner that is reset and trained again for each of several places."""
    first, told = learner.state, []
    for where in places:
        learner.state = {**first, "cbstate": {**first["cbstate"], **place(where)}}
        learner.fit(2)
        told.append([learner.state, learner.step, learner.epoch, learner.stop_reason, where])
    return told, tell(learner, *callbacks)


@pytest.mark.parametrize("event", [StepBegin, StepEnd])
@pytest.mark.parametrize("cancel", [CancelStep, CancelEpoch, CancelFitting])
def test_host_handler_cancels_at_every_step(cancel, event, same, tell, keep):
    def run(length):
        place = {}
        callbacks = [EventLog(), cancels(cancel, event, place), After(), Recorder(), Metrics()]
        callbacks += [keep("step.loss", "step.batch", "params", phase=AbstractTrainingPhase)]
        learner = testlearner(*callbacks, batches=STEPS, steps_per_call=length)

        def move(step):
            place.update(step=step, raised=False)
            return {}

        told = runs(learner, move, range(1, LAST), tell, *callbacks[2:], callbacks[0])
        stopped = [reason for *_, reason, _ in told[0]]
        named = [f"at step {n - (event is StepBegin)}" for n in range(1, LAST)]
        assert stopped == (named if cancel is CancelFitting else [None] * (LAST - 1))
        return told

    same(run, (7, "auto"))


class Stops(Callback):
    """Stop the window at the steps whose bit is set, and optionally cancel there."""

    def __init__(self, cancel):
        self.cancel = cancel

    def stateaccess(self):
        return {"cbstate": {"at": Write()}, "step": {"stop": Append()}, "control": Append()}

    def init(self, learner):
        if "at" not in learner.cbstate:
            learner.cbstate.at = jnp.int32(0)

    @on(BackwardEnd, TrainingPhase, access={"cbstate": {"at": Read()}, "step": {"stop": Append()}})
    def flag(self, event, phase, learner):
        learner.step.stop = (learner.cbstate.at >> learner.progress.step) & 1 == 1

    @on(StepEnd, TrainingPhase, access={"step": {"stop": Read()}, "control": Append()})
    def end(self, event, phase, learner):
        if learner.step.stop and self.cancel is not None:
            raise self.cancel(f"at step {learner.progress.step}")


SINGLE = [1 << step for step in range(LAST - 1)]
SEVERAL = [0b11, 0b110000, 0b1111111111111111111111, 0b10000000010000000001, 0b100000000001, 0b1010101010101010]


@pytest.mark.parametrize("cancel", [None, CancelStep, CancelEpoch, CancelFitting])
def test_traced_handler_stops_at_every_step(cancel, same, tell, keep):
    def run(length):
        callbacks = [EventLog(), Stops(cancel), After(), Recorder(), Metrics()]
        callbacks += [keep("step.loss", "step.batch", "step.stop", "params", phase=AbstractTrainingPhase)]
        learner = testlearner(*callbacks, batches=STEPS, steps_per_call=length)
        told = runs(learner, lambda mask: {"at": jnp.int32(mask)}, SINGLE + SEVERAL, tell, *callbacks)
        steps = [entry[1] for entry in told[0]][: LAST - 1]
        ran = {CancelEpoch: [STEPS + n for n in range(1, STEPS + 1)] + [*range(STEPS + 1, LAST)]}
        ran[CancelFitting] = [*range(1, LAST)]
        assert steps == ran.get(cancel, [2 * STEPS] * (LAST - 1))
        return told

    same(run, (7, "auto"))


def test_stops_lose_no_batch_of_iterator(same, tell, keep):
    def run(length):
        kept = keep("step.loss", "step.batch", phase=AbstractTrainingPhase)
        data = [(np.full((2, 1), i, np.float32), np.ones((2, 1), np.float32)) for i in range(30)]
        learner = testlearner(Stops(CancelEpoch), kept, data=iter(data), steps_per_call=length)
        first = learner.state
        learner.state = {**first, "cbstate": {"at": jnp.int32(0b100101001)}}
        learner.fit(4)  # each ends at a stop
        assert learner.step == 9
        learner.fit(1)
        assert learner.step == len(kept.seen) == 30
        return tell(learner, kept)

    same(run, (7, "auto"))


@pytest.mark.filterwarnings("ignore:Training stopped:RuntimeWarning")
@pytest.mark.parametrize("beside", [(), (Recorder, Metrics)], ids=["alone", "beside others"])
def test_nan_loss_at_every_step(beside, same, tell, keep):
    def run(length):
        rng = np.random.default_rng(0)
        data = [(x, x) for x in rng.normal(size=(STEPS, 4, 1)).astype(np.float32)]
        good = list(data)
        kept = keep("step.loss", "step.batch", "step.skip", "params", phase=AbstractTrainingPhase)
        callbacks = [EventLog(), StopOnNaNLoss(), After(), kept, *(make() for make in beside)]
        learner = testlearner(*callbacks, data=(data, None), steps_per_call=length)

        def spoil(at):
            data[:] = good
            if at < STEPS:
                data[at] = (good[at][0] * np.float32(np.nan), good[at][1])
            return {}

        told = runs(learner, spoil, range(STEPS + 1), tell, *callbacks)
        assert [e[1] for e in told[0]] == [*range(1, STEPS + 1), 2 * STEPS]
        assert [e[3] for e in told[0]] == [f"the loss was nan at step {n}" for n in range(1, STEPS + 1)] + [None]
        return told

    same(run, (7, "auto"))
