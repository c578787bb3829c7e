"""Names that users try in handlers: those of a Learner outside handlers, and those of other libraries."""

import pytest

from fluxcb import AccessError, Append, Callback, Read, on
from fluxcb.callbacks import Metrics, Monitors, Recorder
from fluxcb.events import StepEnd
from fluxcb.phases import TrainingPhase
from fluxcb.testing import testlearner


def reads(code, access=None):
    """Return a callback whose handler of StepEnd evaluates an expression."""

    class Reads(Callback):
        def stateaccess(self):
            return access or {}

        @on(StepEnd, TrainingPhase)
        def look(self, event, phase, learner):
            self.seen = eval(code, {"learner": learner})  # noqa: S307 - only the expressions of this file

    return Reads()


CASES = {
    "learner.epoch": ("write `learner.progress.epoch` instead of `learner.epoch`", "learner.progress.epoch", {}),
    "learner.global_step": (
        "write `learner.progress.step` instead of `learner.global_step`",
        "learner.progress.step",
        {},
    ),
    "learner.loss": (
        'write `learner.step.loss` instead of `learner.loss`, and add `{"step": {"loss": Read()}}` to `stateaccess`',
        "learner.step.loss",
        {"step": {"loss": Read()}},
    ),
    "learner.batch": (
        'write `learner.step.batch` instead of `learner.batch`, and add `{"step": {"batch": Read()}}` to `stateaccess`',
        "learner.step.batch",
        {"step": {"batch": Read()}},
    ),
    "learner.lr": (
        "write `learner.hyperparams.learning_rate` instead of `learner.lr`, and add "
        '`{"hyperparams": {"learning_rate": Read()}}` to `stateaccess`',
        "learner.hyperparams.learning_rate",
        {"hyperparams": {"learning_rate": Read()}},
    ),
    "learner.metrics": (
        "write `learner.cbstate.metrics_epoch` instead of `learner.metrics`, and add "
        '`{"cbstate": {"metrics_epoch": Read()}}` to `stateaccess`',
        "learner.cbstate.metrics_epoch",
        {"cbstate": {"metrics_epoch": Read()}},
    ),
    "learner.history": (
        "write `learner.cbstate.history` instead of `learner.history`, and add "
        '`{"cbstate": {"history": Read()}}` to `stateaccess`',
        "learner.cbstate.history",
        {"cbstate": {"history": Read()}},
    ),
    "learner.log": (
        'write `learner.cbstate.monitors.put_scalar("name", value)`, and add '
        '`{"cbstate": {"monitors": Append()}}` to `stateaccess`',
        'learner.cbstate.monitors.put_scalar("name", 1.0)',
        {"cbstate": {"monitors": Append()}},
    ),
}


@pytest.mark.parametrize("code", CASES)
def test_fix_names_the_path_and_works(code):
    fix, instead, access = CASES[code]
    with pytest.raises(AccessError) as error:
        testlearner(Metrics(), Recorder(), Monitors(), reads(code)).fit(1)
    assert str(error.value).splitlines()[-1] == f"  fix:   {fix}"
    testlearner(Metrics(), Recorder(), Monitors(), reads(instead, access)).fit(1)


@pytest.mark.parametrize("name", ["evaluate", "predict", "fit"])
def test_methods_of_a_learner_are_not_for_handlers(name):
    with pytest.raises(AccessError) as error:
        testlearner(reads(f"learner.{name}()")).fit(1)
    lines = str(error.value).splitlines()
    assert lines[0] == f"Reads() uses `learner.{name}`, which handlers do not have."
    assert lines[-2:] == [
        f"  fix:   call `learner.{name}` after `fit`",
        "     or: measure on other data during the training with `InferenceRunner`",
    ]


@pytest.mark.parametrize("code", ["learner.step % 2", "learner.step == 3", "learner.step > 3", "learner.step + 1"])
def test_step_of_a_handler_is_no_number(code):
    with pytest.raises(AccessError) as error:
        testlearner(reads(code)).fit(1)
    lines = str(error.value).splitlines()
    assert lines[0] == "Reads() uses `learner.step` as a number."
    assert lines[-2:] == [
        "  why:   in a handler, `learner.step` holds the values of the step",
        "  fix:   write `learner.progress.step`",
    ]
    testlearner(reads(code.replace("learner.step", "learner.progress.step"))).fit(1)


def test_views_of_a_learner_can_be_compared_and_hashed():
    found = reads("(learner.step == learner.step, learner.step == None, len({learner.step, learner.progress}))")
    testlearner(found).fit(1)
    assert found.seen == (True, False, 2)
