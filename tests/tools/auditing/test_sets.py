"""The audit of whole sets: those in order, those that do not train, and those that are not made anew."""

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


def test_a_large_set_of_built_in_callbacks_is_in_order():
    audit = audit_learner(lambda: testlearner(*builtins()))
    assert (audit.problems, audit.advice) == ([], [])
    assert audit.syncs["Metrics(mean, smooth_loss).end_epoch at EpochEnd x TrainingPhase"] == {"cbstate.metrics_now": 1}


@pytest.mark.parametrize("makers", [(), (EventLog,), (EventLog, Recorder, Metrics)])
def test_small_sets_are_in_order(audited, makers):
    audit = audited(*makers)
    assert (audit.problems, audit.advice) == ([], [])


def test_a_training_has_as_many_steps_as_asked_for_and_its_validation_no_more():
    logs = []

    def make():
        logs.append(EventLog())
        return testlearner(logs[-1], batches=5, validation_batches=4)

    assert audit_learner(make, steps=3).problems == []
    expected = ["FitBegin", "EpochBegin", *["StepBegin", "StepEnd"] * 3, "EpochEnd", "Trigger", "FitStopping", "FitEnd"]
    assert logs[0].names("training") == expected
    assert logs[0].names("validation") == ["EpochBegin", *["StepBegin", "StepEnd"] * 3, "EpochEnd"]


def test_handlers_see_the_whole_validation_data(audited):
    seen = set()
    look = CustomCallback
    access = {"data": {"validation": Read()}}
    audit = audited(
        lambda: look(lambda learner: seen.add(len(learner.data.validation)), EpochEnd, ValidationPhase, access=access),
        validation_batches=7,
    )
    assert (audit.problems, seen) == ([], {7})


def test_the_learner_that_was_built_first_is_built_as_the_user_builds_it():
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


def test_an_undeclared_access_is_told_in_its_own_words(audited, problems):
    problems(
        audited(Undeclared),
        "AccessError: Undeclared() may not read `params`: its `stateaccess` does not declare it.\n"
        "  where: Undeclared.stateaccess  <@undeclared>\n"
        "  why:   order, conflicts and what leaves the device are derived from what is declared\n"
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


def test_an_error_of_a_handler_is_told_with_the_line_that_raised_it_and_its_notes(audited, problems):
    audit = audited(Fails)
    problems(
        audit,
        "CheckError: Training for 2 steps raised ValueError: no such run\n"
        "  where: fail  <@fails>\n"
        "         raised by Fails() in Fails.fail  <@fails-at>, at StepEnd x TrainingPhase, epoch 1, step 1 (1 in this "
        "epoch)",
    )
    assert isinstance(audit.problems[0].__cause__, ValueError)


def test_all_errors_at_the_end_of_the_fit_are_told(audited, problems):
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


def test_an_error_while_the_learner_is_built(audited, problems):
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


def test_an_error_of_jax_is_told_with_the_users_line(audited, problems):
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


def test_all_problems_of_the_graph_are_told_each_by_itself(audited):
    audit = audited(Halves, Doubles)
    assert [(type(p).__name__, p.what) for p in audit.problems] == [
        ("ConflictError", "Halves() and Doubles() both write `step.grads` and no order is declared."),
        ("MissingStateError", "Doubles() reads `cbstate.wanted`, which no callback creates."),
    ]


def test_an_error_of_the_factory_itself(problems):
    def make():
        raise FileNotFoundError("data.npz")  # factory

    problems(
        audit_learner(make),
        "CheckError: Building the Learner raised FileNotFoundError: data.npz\n  where: make  <@factory>",
    )


def test_an_interrupt_is_no_finding():
    def make():
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        audit_learner(make)


# -- what is not made anew ---------------------------------------------------------------------------------------------


ANEW = "declare a function that builds the callbacks, the model and the Learner anew each time it is called"
COMPARES = "an audit trains several Learners and compares them; it trains none that others use"


def test_a_learner_that_is_kept_is_refused_and_not_trained(problems):
    learner = testlearner(EventLog())
    problems(
        audit_learner(lambda: learner),
        "DeclarationError: This Learner is made once and kept, so it cannot be audited.\n"
        f"  why:   {COMPARES}\n"
        f"  fix:   {ANEW}\n"
        "     or: check it at level `trace`",
    )
    assert learner.step == 0


def test_callbacks_that_are_kept_are_told(problems):
    kept = EventLog()
    problems(
        audit_learner(lambda: testlearner(kept)),
        "CheckError: Building the Learner anew, which went well the first time, raised DeclarationError: EventLog() "
        "already belongs to another Learner.\n"
        "  why:   a callback's own state would mix the two trainings\n"
        "  fix:   construct a new instance for each Learner\n"
        "     or: free it first: `other.callbacks.remove(callback)`",
    )


def test_a_factory_whose_sets_differ_is_told(problems):
    sets = iter([[EventLog()], [EventLog(), Recorder()]])
    problems(
        audit_learner(lambda: testlearner(*next(sets))),
        "DeclarationError: Built anew, the Learner has other callbacks: [EventLog, Recorder] instead of [EventLog].\n"
        f"  why:   {COMPARES}\n"
        f"  fix:   {ANEW}",
    )
