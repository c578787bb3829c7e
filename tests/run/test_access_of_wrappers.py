"""Errors about the access of a wrapper, and of the callback that it wraps."""

import os

import pytest

from fluxcb import AccessError, Callback, Read, every, on
from fluxcb.callbacks import ProxyCallback
from fluxcb.events import StepEnd
from fluxcb.phases import TrainingPhase
from fluxcb.testing import testlearner

WHY = "  why:   declared access determines order, conflicts and device-to-host transfers\n"


class Inner(Callback):
    def stateaccess(self):
        return {"step": {"outputs": Read()}}

    @on
    def look(self, event: StepEnd, phase: TrainingPhase, learner):
        assert learner.step.outputs.shape[0]


class Forwards(ProxyCallback):
    @on(StepEnd, TrainingPhase)
    def measure(self, event, phase, learner):
        assert learner.step.loss > 0
        self.forward(event, phase, learner)


class Replaces(Forwards):
    def stateaccess(self):
        return {"step": {"loss": Read()}}


class Complete(Forwards):
    def stateaccess(self):
        return {**super().stateaccess(), "step": {**super().stateaccess()["step"], "loss": Read()}}


def place(method):
    code = method.__code__
    return f"{method.__qualname__}  {os.path.relpath(code.co_filename)}:{code.co_firstlineno}"


def raised_by(callback):
    with pytest.raises(AccessError) as raised:
        testlearner(callback).fit(1)
    return raised.value


def test_stateaccess_of_wrapper_replaces_that_of_wrapped_callback():
    error = raised_by(Replaces(Inner()))
    assert str(error).split("raised by")[0] == (
        "Replaces(Inner()) may not read `step.outputs`: its `stateaccess` does not declare it.\n"
        f"  where: {place(Replaces.stateaccess)}\n"
        + WHY
        + '  fix:   add `{"step": {"outputs": Read()}}` to `Replaces.stateaccess`, which replaces that of `Inner`'
    )


def test_note_names_handler_of_wrapper():
    assert f"in {place(Forwards.measure)}, at" in raised_by(Replaces(Inner())).__notes__[0]


@pytest.mark.parametrize("wrap", [lambda callback: callback, lambda callback: every(callback, steps=1)])
def test_wrapper_without_stateaccess_gets_one(wrap):
    callback = wrap(Forwards(Inner()))
    assert str(raised_by(callback)) == (
        f"{callback!r} may not read `step.loss`: its `stateaccess` does not declare it.\n"
        f"  where: {place(Forwards.measure)}\n"
        + WHY
        + '  fix:   add `def stateaccess(self): return {**super().stateaccess(), "step": '
        '{**super().stateaccess()["step"], "loss": Read()}}` to `Forwards`'
    )


def test_wrapper_that_extends_access_runs():
    testlearner(Complete(Inner())).fit(1)


def test_fix_for_state_that_wrapped_callback_does_not_use_works():
    class Empty(Callback):
        @on
        def nothing(self, event: StepEnd, phase: TrainingPhase, learner):
            pass

    fix = raised_by(Forwards(Empty())).fix[0]
    assert fix == (
        'add `def stateaccess(self): return {**super().stateaccess(), "step": {"loss": Read()}}` to `Forwards`'
    )


def test_handler_of_wrapped_callback_is_still_sent_to_its_class():
    class Undeclared(Callback):
        @on
        def look(self, event: StepEnd, phase: TrainingPhase, learner):
            learner.step.loss  # noqa: B018

    assert raised_by(ProxyCallback(Undeclared())).fix[0] == 'add `{"step": {"loss": Read()}}` to `stateaccess`'
