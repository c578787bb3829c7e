"""Errors about the access of a handler name the declaration to edit: an `access` in an `@on`, or that of a wrapper."""

import os

import pytest

from fluxcb import AccessError, Append, Callback, CancelFitting, Read, Write, on
from fluxcb.events import BackwardEnd, EpochEnd, StepEnd
from fluxcb.phases import TrainingPhase
from fluxcb.testing import testlearner

WHY = "  why:   declared access determines order, conflicts and device-to-host transfers\n"


def place(method):
    code = method.__code__
    return (
        f"{method.__qualname__.rpartition('.<locals>.')[2]}  {os.path.relpath(code.co_filename)}:{code.co_firstlineno}"
    )


def message(callback):
    with pytest.raises(AccessError) as raised:
        testlearner(callback).fit(1)
    return str(raised.value)


# -- handlers with their own access --------------------------------------------------------------------------------


def reader(access, of_class):
    class Narrow(Callback):
        def stateaccess(self):
            return of_class

        @on(StepEnd, TrainingPhase, access=access)
        def look(self, event, phase, learner):
            assert learner.step.loss > 0

        @on(EpochEnd, TrainingPhase)
        def end(self, event, phase, learner):
            pass

    return Narrow


def test_error_names_access_of_handler():
    cls = reader({}, {"step": {"loss": Read()}})
    assert message(cls()) == (
        "Narrow() may not read `step.loss`: its `access` in the `@on` of `Narrow.look` does not declare it.\n"
        f"  where: access of {place(cls.look)}\n"
        + WHY
        + '  fix:   add `{"step": {"loss": Read()}}` to the `access` in the `@on` of `Narrow.look`'
    )
    testlearner(reader({"step": {"loss": Read()}}, {"step": {"loss": Read()}})()).fit(1)


def test_fix_names_class_and_handler_if_both_lack_the_path():
    assert message(reader({}, {})()).splitlines()[-1] == (
        '  fix:   add `{"step": {"loss": Read()}}` to `Narrow.stateaccess`, and to the `access` in the `@on` of '
        "`Narrow.look`"
    )


def test_traced_handler_names_its_access():
    class Doubled(Callback):
        def stateaccess(self):
            return {"step": {"grads": Write()}}

        @on(BackwardEnd, TrainingPhase, access={"step": {"grads": Read()}})
        def double(self, event, phase, learner):
            learner.step.grads = learner.step.grads

    assert message(Doubled()) == (
        "Doubled() declares only Read() on `step.grads`, but writes it.\n"
        f"  where: access of {place(Doubled.double)}\n"
        + WHY
        + '  fix:   add `{"step": {"grads": Write()}}` to the `access` in the `@on` of `Doubled.double`'
    )


def test_host_write_to_shared_state_names_access_of_handler():
    class Shared(Callback):
        def stateaccess(self):
            return {"cbstate": {"mine": Write()}}

        def init(self, learner):
            learner.cbstate.mine = {"a": 1}

        @on(EpochEnd, TrainingPhase, access={"cbstate": {"mine": Read()}})
        def change(self, event, phase, learner):
            learner.cbstate.mine["a"] = 2

        @on(StepEnd, TrainingPhase)
        def change_also(self, event, phase, learner):
            learner.cbstate.mine["a"] = 3

    text = message(Shared())
    assert f"where: access of {place(Shared.change)}" in text
    assert text.splitlines()[-1] == (
        '  fix:   add `{"cbstate": {"mine": Write()}}` to the `access` in the `@on` of `Shared.change`'
    )


def test_handlers_with_equal_access_each_have_their_own_error():
    class Two(Callback):
        def stateaccess(self):
            return {"step": {"loss": Read()}}

        @on(StepEnd, TrainingPhase, access={})
        def first(self, event, phase, learner):
            pass

        @on(EpochEnd, TrainingPhase, access={})
        def second(self, event, phase, learner):
            learner.params  # noqa: B018

    assert "`access` in the `@on` of `Two.second` does not declare it" in message(Two())


def test_cancel_without_control_names_access_of_handler():
    class Stops(Callback):
        def stateaccess(self):
            return {"control": Append()}

        @on(StepEnd, TrainingPhase, access={})
        def stop(self, event, phase, learner):
            raise CancelFitting("enough")

    assert message(Stops()) == (
        "Stops() raises a Cancel at StepEnd without declaring `control`.\n"
        f"  where: access of {place(Stops.stop)}\n"
        "  why:   steps are dispatched ahead unless a handler that may cancel is due\n"
        '  fix:   add `{"control": Append()}` to the `access` in the `@on` of `Stops.stop`'
    )
