"""Return values of handlers have no effect, so they raise errors that name an alternative."""

import jax.numpy as jnp
import numpy as np
import pytest

import fluxcb
from fluxcb import Append, Callback, DeclarationError, Read, TraceError, on
from fluxcb.callbacks import CallbackFactory, CustomCallback, RunFunction
from fluxcb.events import BackwardEnd, EpochEnd, FitEnd, StepEnd
from fluxcb.phases import AbstractTrainingPhase, Phase, TrainingPhase
from fluxcb.testing import testlearner
from tests.fixes.programs import check_row, row


class Stops(Callback):
    def stateaccess(self):
        return {"step": {"loss": Read()}}

    @on  # look
    def look(self, event: StepEnd, phase: TrainingPhase, learner):
        return False


def test_bool_at_step_raises(refused):
    with refused(
        DeclarationError,
        "The handler Stops().look returned False, and return values of handlers have no effect.\n"
        "  where: Stops.look  <@look>\n"
        "  why:   a handler acts only through assignments, logged values and exceptions\n"
        '  fix:   write `raise CancelFitting("reason")` instead, to end the fit, and add `{"control": Append()}` to '
        "`stateaccess`\n"
        "     or: write `return` without a value",
    ):
        testlearner(Stops()).fit(1)


class Measures(Callback):
    @on  # measure
    def measure(self, event: EpochEnd, phase: TrainingPhase, learner):
        return {"accuracy": 0.5}


def test_returned_value_raises(refused):
    with refused(
        DeclarationError,
        'The handler Measures().measure returned {"accuracy": 0.5}, and return values of handlers have no effect.\n'
        "  where: Measures.measure  <@measure>\n"
        "  why:   a handler acts only through assignments, logged values and exceptions\n"
        "  fix:   write `learner.cbstate.value = ...` instead, here and in `init`, to share the value with other "
        'callbacks, and add `{"cbstate": {"value": Write()}}` to `stateaccess`\n'
        '     or: write `learner.cbstate.monitors.put_scalar("name", ...)` instead, to log a number, add '
        '`{"cbstate": {"monitors": Append()}}` to `stateaccess`, and add `Monitors(...)` to the callbacks\n'
        "     or: write `return` without a value",
    ):
        testlearner(Measures()).fit(1)


def handles(event, value, access=None):
    class Returns(Callback):
        def stateaccess(self):
            return access or {}

        @on(event, Phase)
        def handle(self, event, phase, learner):
            return value

    return Returns()


@pytest.mark.parametrize("value", [True, np.bool_(False), jnp.bool_(True)], ids=["python", "numpy", "jax"])
@pytest.mark.parametrize(("event", "access"), [(EpochEnd, {}), (FitEnd, {}), (StepEnd, {"control": Append()})])
def test_bool_raises_where_cancel_needs_no_further_access(event, access, value):
    with pytest.raises(DeclarationError) as raised:
        testlearner(handles(event, value, access)).fit(1)
    assert raised.value.fix == (
        'write `raise CancelFitting("reason")` instead, to end the fit',
        "write `return` without a value",
    )


def test_handlers_on_threads_raise():
    with pytest.raises(DeclarationError, match="returned 3, and return values"):
        testlearner(handles(EpochEnd, 3), handles(EpochEnd, None), executor=fluxcb.ThreadExecutor(2)).fit(1)


@pytest.mark.parametrize("value", [3, None])
def test_measured_and_traced_handlers_raise(value, tmp_path):
    learner = testlearner(handles(StepEnd, value))
    learner.callbacks.measure()
    with learner.callbacks.trace(tmp_path / "trace.json"):
        if value is None:
            learner.fit(1)
        else:
            with pytest.raises(DeclarationError, match="returned 3, and return values"):
                learner.fit(1)


def test_traced_handler_raises(refused):
    class Scales(Callback):
        def stateaccess(self):
            return {"step": {"grads": Read()}}

        @on  # scale
        def scale(self, event: BackwardEnd, phase: AbstractTrainingPhase, learner):
            return learner.step.grads

    with refused(
        TraceError,
        'The traced handler Scales().scale returned {"b": float32[], "w": float32[]}, and return values of handlers '
        "have no effect.\n"
        "  where: Scales.scale  <@scale>\n"
        "  why:   a value that a traced handler computes affects the step only if the handler assigns it\n"
        "  fix:   assign it, e.g. `learner.step.grads = grads`\n"
        "     or: write `return` without a value",
    ):
        testlearner(Scales())


def says_no(learner):
    return False


@pytest.mark.parametrize(
    "callback",
    [
        CustomCallback(says_no, StepEnd),
        CallbackFactory(before_train=says_no),
        CallbackFactory(trigger=says_no),
        CallbackFactory(after_train=says_no),
        RunFunction(says_no),
        RunFunction(says_no, run_before=False),
    ],
    ids=["custom", "before", "trigger", "after", "run-before", "run"],
)
def test_functions_passed_to_callbacks_raise(callback):
    with pytest.raises(DeclarationError, match=r"\(says_no.*\)\.\w+ returned False, and return values of handlers"):
        testlearner(callback).fit(1)


def test_value_of_lambda_is_ignored():
    seen = []
    note = lambda learner: seen.append(learner.progress.step) or len(seen)  # noqa: E731
    callbacks = [
        CustomCallback(note, StepEnd, TrainingPhase),
        CallbackFactory(trigger=note),
        RunFunction(note, run_as_trigger=False),
    ]
    testlearner(*callbacks, batches=2).fit(1)
    assert seen == [0, 1, 2, 2]


HANDLER = """
class Mine(Callback):
    def stateaccess(self): return {access}

    @on
    def look(self, event: StepEnd, phase: TrainingPhase, learner):
        {action}

    def init(self, learner):
        {init}

fit(Mine(), {others})
"""


def program(action, access="{}", others="", init="pass"):
    return HANDLER.format(action=action, access=access, others=others, init=init)


@pytest.mark.parametrize(
    "case",
    [
        row(
            "returned False",
            program("return False"),
            program('raise CancelFitting("reason")', '{"control": Append()}'),
            program("return"),
        ),
        row(
            "returned 0.5",
            program("return 0.5"),
            program(
                "learner.cbstate.value = 0.5", '{"cbstate": {"value": Write()}}', init="learner.cbstate.value = 0.0"
            ),
            program(
                'learner.cbstate.monitors.put_scalar("name", 0.5)', '{"cbstate": {"monitors": Append()}}', "Monitors()"
            ),
            program("return"),
        ),
    ],
    ids=["bool", "number"],
)
def test_suggested_fixes_work(case, tmp_path):
    check_row(case, tmp_path)
