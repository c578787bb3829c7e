"""The advice of an audit: unused permissions, and handlers that wait for the device."""

import jax.numpy as jnp
import optax

from fluxcb import Append, Callback, CancelFitting, Read, Write, every, inject, on
from fluxcb.callbacks import CustomCallback
from fluxcb.events import EpochEnd, FitEnd, HostEvent, StepBegin, StepEnd
from fluxcb.phases import Phase, TrainingPhase, ValidationPhase

DECIDES = "declared access determines order, conflicts and device-to-host transfers, even if it is unused"


class TooMuch(Callback):
    """Declare unused access, write access that is only read, and handlers that are not due or never run."""

    def stateaccess(self):  # too-much
        return {
            "step": {"loss": Read(), "grads": Read(), "updates": Read()},
            "params": Write(),
            "cbstate": {"note": Append(), "list": Write()},
            "hyperparams": {"learning_rate": Write()},
        }

    def init(self, learner):
        if "list" not in learner.cbstate:
            learner.cbstate.list, learner.cbstate.note = [], 0

    @on(StepEnd, TrainingPhase, access={"step": {"loss": Read(), "grads": Read()}, "cbstate": {"list": Write()}})
    def look(self, event, phase, learner):
        learner.cbstate.list.append(float(learner.step.loss))

    @on(FitEnd, TrainingPhase, access={"params": Write()})
    def end(self, event, phase, learner):
        if event.outcome == "failed":
            learner.params, learner.hyperparams.learning_rate = learner.params, 0.0
        learner.params  # noqa: B018 - the read is the test

    @on(StepEnd, ValidationPhase, access={"hyperparams": {"learning_rate": Write()}})
    def validate(self, event, phase, learner):
        pass


class Rarely(Callback):
    def stateaccess(self):
        return {"params": Write()}

    @on
    def reset(self, event: StepEnd, phase: TrainingPhase, learner):
        learner.params = learner.params


class Saved(HostEvent):
    """An event that is never emitted here."""


class Waits(Callback):
    def stateaccess(self):
        return {"params": Read()}

    @on
    def wait(self, event: Saved, phase: Phase, learner):
        learner.params  # noqa: B018 - the read is the test


def advice_about(what, *fix):
    return (
        f"TooMuch() declares {what} in 2 steps.\n"
        "  where: TooMuch.stateaccess  <@too-much>\n"
        f"  why:   {DECIDES}\n"
        "  fix:   " + "\n     or: ".join(fix) + ", unless longer training needs it"
    )


def test_unused_permissions_are_reported(audited, advice):
    out = "remove it from `stateaccess`"
    advice(
        audited(TooMuch, validation_batches=0),
        advice_about("Read() on `step.grads`, but never reads it", out),
        advice_about("Read() on `step.updates`, but never reads it", out),
        advice_about(
            "Write() on `params`, but only reads it",
            "assign the new value, if a handler computes one: `learner.params = ...`",
            "declare Read()",
        ),
    )


def test_callback_that_never_ran_is_not_reported(audited):
    audit = audited(lambda: every(Rarely(), steps=100), Waits)
    assert (audit.problems, audit.advice) == ([], [])
    assert audited(Waits).advice == []


class Norms(Callback):
    def stateaccess(self):
        return {"params": Read(borrow=True), "step": {"loss": Read()}}

    @on(StepEnd, TrainingPhase, access={"params": Read(borrow=True)})  # norms
    def show(self, event, phase, learner):
        float(jnp.abs(learner.params["w"]))

    @on(StepBegin, TrainingPhase, access={})
    def begin(self, event, phase, learner):
        pass

    @on(EpochEnd, TrainingPhase, access={"params": Read(borrow=True)})
    def end(self, event, phase, learner):
        float(jnp.abs(learner.params["w"]))

    @on(StepEnd, ValidationPhase, access={"step": {"loss": Read()}})
    def validate(self, event, phase, learner):
        float(learner.step.loss)


def test_device_reads_are_counted(audited, advice):
    audit = audited(Norms)
    assert audit.problems == []
    assert audit.syncs == {
        "Norms().show at StepEnd x TrainingPhase": {"params": 2},
        "Norms().end at EpochEnd x TrainingPhase": {"params": 1},
        "the engine at between the steps": {"step values": 2},
    }
    advice(
        audit,
        "Norms().show makes the host read `params` from the device, 2 times in 2 calls, at StepEnd x TrainingPhase.\n"
        "  where: Norms.show  <@norms>\n"
        "  why:   at each of these steps, the device waits for the host instead of running ahead\n"
        "  fix:   run it less often: `every(Norms(...), steps=100)`\n"
        "     or: compute the values that it needs in a traced handler, and read only those",
    )
    assert audited(lambda: every(Norms(), steps=2)).advice == []


class Ends(Callback):
    def stateaccess(self):
        return {"control": Append()}

    @on
    def end(self, event: StepEnd, phase: TrainingPhase, learner):
        raise CancelFitting("enough")


def test_early_end_of_training_is_reported(audited, advice):
    advice(
        audited(Ends),
        "The training ended after 1 of 2 steps: enough.\n  why:   the remaining steps were not audited",
    )


def test_hyperparameter_that_is_only_read_is_reported(audited):
    access = {"hyperparams": {"learning_rate": Write()}}
    audit = audited(
        lambda: CustomCallback(lambda learner: float(learner.hyperparams.learning_rate), EpochEnd, access=access),
        optimizer=inject(optax.sgd, learning_rate=0.5),
    )
    assert [text.splitlines()[0] for text in audit.advice] == [
        "CustomCallback(<lambda>, EpochEnd) declares Write() on `hyperparams.learning_rate`, but only reads it in 2 "
        "steps."
    ]
