"""The audit of whole sets: valid sets, sets that do not train, and sets that are not created anew."""

import io

import jax
import jax.numpy as jnp
import optax
import pytest

import fluxcb.callbacks as library
from fluxcb import Callback, Read, Write, on
from fluxcb._tools.auditing import audit_learner
from fluxcb.callbacks import CustomCallback, Metrics, MetricsPrinter, ProgressBar, Recorder
from fluxcb.events import BackwardEnd, EpochEnd, FitEnd, StepEnd
from fluxcb.phases import TrainingPhase, ValidationPhase
from fluxcb.testing import EventLog, testlearner

# -- what is in order --------------------------------------------------------------------------------------------------


def builtins():
    return [
        library.ClipGradients(0.5),
        CustomCallback(lambda learner: float(learner.step.loss), StepEnd, access={"step": {"loss": Read()}}),
        Metrics(library.Metric(lambda outputs, ys: outputs.mean(), name="mean"), library.SmoothLoss()),
        MetricsPrinter(io.StringIO()),
        library.ModelSummary(io.StringIO()),
        ProgressBar(io.StringIO(), interval=1e-9),
        library.Scheduler({library.LearningRate: optax.linear_schedule(0.1, 0.01, 10)}),
        library.ToDevice(jax.devices()[0]),
        library.ParameterEMA(0.9),
        Recorder(),
        library.StopOnNaNLoss(),
    ]


def test_large_set_of_built_in_callbacks_passes():
    audit = audit_learner(lambda: testlearner(*builtins()))
    assert (audit.problems, audit.advice) == ([], [])
    assert audit.syncs["Metrics(mean, smooth_loss).end_epoch at EpochEnd x TrainingPhase"] == {"cbstate.metrics_now": 1}


@pytest.mark.parametrize("makers", [(), (EventLog,), (EventLog, Recorder, Metrics)])
def test_small_sets_pass(audited, makers):
    audit = audited(*makers)
    assert (audit.problems, audit.advice) == ([], [])


def test_audit_runs_requested_number_of_steps():
    logs = []

    def make():
        logs.append(EventLog())
        return testlearner(logs[-1], batches=5, validation_batches=4)

    assert audit_learner(make, steps=3).problems == []
    expected = ["FitBegin", "EpochBegin", *["StepBegin", "StepEnd"] * 3, "EpochEnd", "Trigger", "FitStopping", "FitEnd"]
    assert logs[0].names("training") == expected
    assert logs[0].names("validation") == ["EpochBegin", *["StepBegin", "StepEnd"] * 3, "EpochEnd"]


def test_handlers_see_all_validation_data(audited):
    seen = set()
    look = CustomCallback
    access = {"data": {"validation": Read()}}
    audit = audited(
        lambda: look(lambda learner: seen.add(len(learner.data.validation)), EpochEnd, ValidationPhase, access=access),
        validation_batches=7,
    )
    assert (audit.problems, seen) == ([], {7})


def test_learner_trained_by_factory_passes():
    def make():
        learner = testlearner(EventLog())
        learner.fit(1)  # a factory may train, or load a state
        return learner

    assert audit_learner(make).problems == []


# -- what is raised ----------------------------------------------------------------------------------------------------


class Undeclared(Callback):
    def stateaccess(self):  # undeclared
        return {}

    @on
    def read(self, event: EpochEnd, phase: TrainingPhase, learner):
        learner.params  # noqa: B018 - the read is the test


def test_undeclared_access_is_reported_with_its_message(audited, problems):
    problems(
        audited(Undeclared),
        "AccessError: Undeclared() may not read `params`: its `stateaccess` does not declare it.\n"
        "  where: Undeclared.stateaccess  <@undeclared>\n"
        "  why:   declared access determines order, conflicts and device-to-host transfers\n"
        '  fix:   add `{"params": Read()}` to `stateaccess`',
    )


class Fails(Callback):
    @on(StepEnd, TrainingPhase)  # fails-at
    def fail(self, event, phase, learner):
        raise ValueError("no such run")  # fails


class FailsAtTheEnd(Callback):
    def __init__(self, number):
        self.number = number

    @on(FitEnd, TrainingPhase)  # fails-end-at
    def end(self, event, phase, learner):
        raise OSError(self.number)  # fails-end

    def __repr__(self):
        return f"FailsAtTheEnd({self.number})"


class FailsToBegin(Callback):
    def init(self, learner):
        {}["key"]  # fails-to-begin


def test_handler_error_is_reported_with_line_and_notes(audited, problems):
    audit = audited(Fails)
    problems(
        audit,
        "CheckError: Training for 2 steps raised ValueError: no such run\n"
        "  where: fail  <@fails>\n"
        "         raised by Fails() in Fails.fail  <@fails-at>, at StepEnd x TrainingPhase, epoch 1, step 1 (1 in this "
        "epoch)",
    )
    assert isinstance(audit.problems[0].__cause__, ValueError)


def test_all_errors_at_end_of_fit_are_reported(audited, problems):
    problems(
        audited(lambda: FailsAtTheEnd(1), lambda: FailsAtTheEnd(2)),
        *(
            f"CheckError: Training for 2 steps raised OSError: {number}\n"
            "  where: end  <@fails-end>\n"
            f"         raised by FailsAtTheEnd({number}) in FailsAtTheEnd.end  <@fails-end-at>, at FitEnd x "
            "TrainingPhase, epoch 1, step 2 (2 in this epoch)"
            for number in (1, 2)
        ),
    )


def test_error_while_building_learner_is_reported(audited, problems):
    problems(
        audited(FailsToBegin),
        "CheckError: Building the Learner raised KeyError: 'key'\n"
        "  where: init  <@fails-to-begin>\n"
        "         raised in the `init` of FailsToBegin()",
    )


class FailsInTheStep(Callback):
    def stateaccess(self):
        return {"step": {"grads": Write()}}

    @on(BackwardEnd, TrainingPhase)  # fails-in-the-step-at
    def fail(self, event, phase, learner):
        learner.step.grads = jnp.zeros(2) + jnp.zeros(3)  # fails-in-the-step


def test_jax_error_is_reported_with_user_line(audited, problems):
    problems(
        audited(FailsInTheStep),
        "CheckError: Building the Learner raised TypeError: add got incompatible shapes for broadcasting: (2,), (3,).\n"
        "  where: fail  <@fails-in-the-step>\n"
        "         while tracing FailsInTheStep.fail  <@fails-in-the-step-at>, at BackwardEnd x TrainingPhase",
    )


class Halves(Callback):
    def stateaccess(self):
        return {"step": {"grads": Write()}}

    @on
    def halve(self, event: BackwardEnd, phase: TrainingPhase, learner):
        learner.step.grads = jax.tree.map(lambda g: g / 2, learner.step.grads)


class Doubles(Callback):
    def stateaccess(self):
        return {"step": {"grads": Write()}, "cbstate": {"wanted": Read()}}

    @on
    def double(self, event: BackwardEnd, phase: TrainingPhase, learner):
        learner.step.grads = jax.tree.map(lambda g: g * 2, learner.step.grads)


def test_graph_problems_are_reported_separately(audited):
    audit = audited(Halves, Doubles)
    assert [(type(p).__name__, p.what) for p in audit.problems] == [
        ("ConflictError", "Halves() and Doubles() both write `step.grads` and no order is declared."),
        ("MissingStateError", "Doubles() reads `cbstate.wanted`, which no callback creates."),
    ]


def test_error_in_factory_is_reported(problems):
    def make():
        raise FileNotFoundError("data.npz")  # factory

    problems(
        audit_learner(make),
        "CheckError: Building the Learner raised FileNotFoundError: data.npz\n  where: make  <@factory>",
    )


def test_keyboard_interrupt_propagates():
    def make():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        audit_learner(make)


# -- what is not made anew ---------------------------------------------------------------------------------------------


ANEW = "declare a function that builds new callbacks, a new model and a new Learner at each call"
COMPARES = "an audit trains and compares several Learners, none of which other code uses"


def test_factory_returning_same_learner_is_rejected(problems):
    learner = testlearner(EventLog())
    problems(
        audit_learner(lambda: learner),
        "DeclarationError: The set is a single Learner, so it cannot be audited.\n"
        f"  why:   {COMPARES}\n"
        f"  fix:   {ANEW}\n"
        "     or: check it at level `trace`",
    )
    assert learner.step == 0


def test_factory_returning_same_callbacks_is_reported(problems):
    kept = EventLog()
    problems(
        audit_learner(lambda: testlearner(kept)),
        "CheckError: Building the Learner a second time, which succeeded the first time, raised DeclarationError: "
        "EventLog() "
        "already belongs to another Learner.\n"
        "  why:   a callback's own state would mix the two trainings\n"
        "  fix:   construct a new instance for each Learner; `fluxcb check` and pytest call a function such as "
        "`make_learner` several times, so construct it inside the function\n"
        "     or: free it first: `other.callbacks.remove(callback)`",
    )


def test_factory_returning_different_sets_is_reported(problems):
    sets = iter([[EventLog()], [EventLog(), Recorder()]])
    problems(
        audit_learner(lambda: testlearner(*next(sets))),
        "DeclarationError: The second Learner has different callbacks: [EventLog, Recorder] instead of [EventLog].\n"
        f"  why:   {COMPARES}\n"
        f"  fix:   {ANEW}",
    )
