"""Flags of the step that nobody would see, and state of callbacks that checkpoints would not save."""

import re
import warnings

import pytest

from fluxcb import (
    AccessError,
    Append,
    Callback,
    CancelFitting,
    DeclarationError,
    MissingStateError,
    Read,
    TraceError,
    on,
)
from fluxcb.callbacks import CheckNumerics, LossSpikeGuard, SkipNonFinite, StopOnNaNLoss
from fluxcb.events import BackwardEnd, StepBegin, StepEnd
from fluxcb.phases import TrainingPhase
from fluxcb.testing import testlearner


def flags(flag, event, access=None):
    """Return a callback class that sets a flag at an event."""

    class Flags(Callback):
        def stateaccess(self):
            return {"step": {flag: Append()}, **(access or {})}

        @on(event, TrainingPhase)
        def act(self, event, phase, learner):
            setattr(learner.step, flag, True)

    return Flags


@pytest.mark.parametrize("flag", ["skip", "hold", "stop"])
def test_flag_that_only_host_handlers_write_is_refused(flag):
    with pytest.raises(AccessError) as error:
        testlearner(flags(flag, StepEnd)())
    assert str(error.value).splitlines()[0] == f"Flags() writes `step.{flag}`, but it has no traced handler."
    assert str(error.value).splitlines()[2:] == [
        f"  why:   `step.{flag}` takes effect while the step is computed; a host handler is too late",
        f"  fix:   write `learner.step.{flag}` in a handler of BackwardEnd",
        "     or: raise `CancelStep` in a host handler of StepBegin, to leave out the whole step, and add "
        '`{"control": Append()}` to `stateaccess`',
        "     or: raise `CancelFitting` in a host handler of StepEnd, to stop the fit, and add "
        '`{"control": Append()}` to `stateaccess`',
    ]


def test_flag_at_step_begin_is_sent_to_an_event_at_which_it_works():
    with pytest.raises(MissingStateError, match=re.escape("fix:   handle BackwardEnd instead")):
        testlearner(flags("skip", StepBegin)())
    learner = testlearner(flags("skip", BackwardEnd)())
    before = learner.params["w"]
    learner.fit(1)
    assert (learner.params["w"] == before).all()  # every update was skipped


def test_stop_that_no_handler_acts_on_is_a_warning():
    warned = (
        "Flags() sets `step.stop`, but no host handler acts on it, so the training would continue with the next step. "
        'Add `"control": Append()` to `stateaccess`, and a handler of StepEnd: '
        '`if learner.step.stop: raise CancelFitting("the reason")`.'
    )
    with pytest.warns(UserWarning, match=re.escape(warned)):
        learner = testlearner(flags("stop", BackwardEnd)())
    learner.fit(1)
    assert learner.step == 4


def test_stop_with_a_handler_that_cancels_stops_the_fit():
    class Stops(flags("stop", BackwardEnd, {"control": Append()})):
        @on(StepEnd, TrainingPhase)
        def cancel(self, event, phase, learner):
            if learner.step.stop:
                raise CancelFitting("the reason")

    learner = testlearner(Stops())
    assert learner.fit(1).stop_reason == "the reason"
    assert learner.step == 1


def test_stop_that_another_callback_reads_needs_no_warning():
    class Reads(Callback):
        def stateaccess(self):
            return {"step": {"stop": Read()}}

        @on(StepEnd, TrainingPhase)
        def look(self, event, phase, learner):
            seen.append(bool(learner.step.stop))

    seen = []
    testlearner(flags("stop", BackwardEnd)(), Reads()).fit(1)
    assert seen == [True] * 4


@pytest.mark.parametrize("callback", [CheckNumerics, SkipNonFinite, StopOnNaNLoss, LossSpikeGuard])
def test_built_in_callbacks_act_on_their_own_stop(callback):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        testlearner(callback())


def test_cancel_in_a_traced_handler_is_explained():
    class Cancels(Callback):
        @on(BackwardEnd, TrainingPhase)
        def act(self, event, phase, learner):
            raise CancelFitting("enough")

    with pytest.raises(TraceError) as error:
        testlearner(Cancels())
    assert str(error.value).splitlines()[0] == "The traced handler Cancels().act raised CancelFitting."
    assert str(error.value).splitlines()[-3:] == [
        "  why:   BackwardEnd handlers run once, while the step is traced, and not at each step",
        "  fix:   raise it in a host handler, e.g. of StepEnd or EpochEnd",
        "     or: to leave out the update of a step, write a bool to `learner.step.skip`, and add "
        '`{"step": {"skip": Append()}}` to `stateaccess`',
    ]


def test_load_state_dict_without_state_dict_is_refused():
    class Counts(Callback):
        @on(StepEnd, TrainingPhase)
        def count(self, event, phase, learner):
            self.count_of_steps = 1

        def load_state_dict(self, state):
            self.count_of_steps = state["count"]

    with pytest.raises(DeclarationError) as error:
        testlearner(Counts())
    assert str(error.value).splitlines()[0] == "`Counts` has `load_state_dict`, but no `state_dict`."
    assert str(error.value).splitlines()[2:] == [
        "  why:   checkpoints would save nothing of it, so a resumed run would begin with another state",
        "  fix:   define `state_dict(self)`, which returns what `load_state_dict(self, state)` restores",
    ]
