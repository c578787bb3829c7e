"""Callbacks whose handlers `fit` does not call, because their phases have no data."""

import warnings

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import Append, Callback, MissingStateError, Read, Write, on
from fluxcb.callbacks import InferenceRunner, Metric, Metrics, Recorder, ScalarStats
from fluxcb.events import EpochEnd, FitBegin
from fluxcb.phases import Phase, TrainingPhase, ValidationPhase

BATCHES = [np.ones(2, np.float32)]


class Validates(Callback):
    def stateaccess(self):
        return {"cbstate": {"calls": Write()}}

    def init(self, learner):
        learner.cbstate.calls = []

    @on
    def count(self, event: EpochEnd, phase: ValidationPhase, learner):
        learner.cbstate.calls.append(learner.progress.epoch)


class Everywhere(Callback):
    @on
    def look(self, event: EpochEnd, phase: Phase, learner):
        pass


class BothPhases(Validates):
    @on
    def look(self, event: EpochEnd, phase: TrainingPhase, learner):
        pass


class FillsData(Callback):
    def stateaccess(self):
        return {"data": {"validation": Write()}}

    @on
    def fill(self, event: FitBegin, phase: TrainingPhase, learner):
        learner.data.validation = BATCHES


def learner_of(*callbacks, data):
    return fluxcb.Learner.from_loss(
        {"w": jnp.ones(())},
        lambda params, batch: jnp.mean((params["w"] - batch) ** 2),
        optax.sgd(0.1),
        data=data,
        callbacks=callbacks,
        default_callbacks=False,
    )


def test_handlers_for_validation_without_data_are_a_warning():
    learner = learner_of(Validates(), data=BATCHES)
    with pytest.warns(UserWarning, match="no handler") as record:
        learner.fit(1)
    assert [str(warning.message) for warning in record] == [
        "`fit` calls no handler of Validates(): its handlers are for validation, and the Learner has no data for it. "
        "Pass the data to the Learner: `data=(training, validation)`."
    ]
    assert learner.cbstate["calls"] == []
    mended = learner_of(Validates(), data=(BATCHES, BATCHES))
    mended.fit(2)
    assert mended.cbstate["calls"] == [1, 2]


@pytest.mark.parametrize("callbacks", [[Everywhere], [BothPhases], [Validates, FillsData]])
def test_callbacks_with_other_handlers_or_data_are_no_warning(callbacks):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        learner_of(*(make() for make in callbacks), data=BATCHES).fit(1)


def test_data_that_is_assigned_before_the_fit_is_no_warning():
    learner = learner_of(Validates(), data=BATCHES)
    learner.data["validation"] = BATCHES
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        learner.fit(1)
    assert learner.cbstate["calls"] == [1]


def test_metrics_for_validation_without_data_are_a_warning():
    metric = Metric(lambda aux: aux, "size", needs=("aux",), phase=ValidationPhase)

    def learner(data):
        return fluxcb.Learner.from_loss(
            {"w": jnp.ones(())},
            lambda params, batch: (jnp.mean((params["w"] - batch) ** 2), jnp.float32(3.0)),
            optax.sgd(0.1),
            data=data,
            callbacks=[Metrics(metric)],
            default_callbacks=False,
        )

    text = (
        "`fit` does not compute `size` of Metrics(size): it is for validation, and the Learner has no data for it. "
        "Pass the data to the Learner: `data=(training, validation)`."
    )
    with pytest.warns(UserWarning, match="does not compute") as record:
        history = learner(BATCHES).fit(1)
    assert [str(warning.message) for warning in record] == [text]
    assert list(history) == ["training/loss"]
    history = learner((BATCHES, BATCHES)).fit(1)
    assert history["validation/size"] == [3.0]
    assert "training/size" not in history


# --- declared reads of the metrics of such a phase --------------------------------------------------------------------


class Sees(Callback):
    """Keep what `read` returns after each epoch of the training."""

    def __init__(self, entries, read=lambda cbstate: None):
        self.entries, self.read, self.seen = entries, read, []

    def stateaccess(self):
        return {"cbstate": self.entries}

    @on
    def look(self, event: EpochEnd, phase: TrainingPhase, learner):
        self.seen.append(self.read(learner.cbstate))

    def __repr__(self):
        return "Sees()"


def text_of_missing(hub, part, other, test):
    where = fluxcb._declare.dispatch.source_of(Sees.stateaccess)
    return (
        f"Sees() reads `cbstate.{hub}.{part}`, but the Learner has no data for validation.\n"
        f"  where: Sees.stateaccess  {where}\n"
        "  why:   it would never have a value\n"
        "  fix:   pass data for it to the Learner: `data=(training, validation)`\n"
        f"{other}"
        f"     or: to read it only if it exists, declare `Read()` on `cbstate.{hub}`, and test `{test}`"
    )


@pytest.mark.parametrize("hub", ["metrics_epoch", "metrics_step"])
@pytest.mark.parametrize("data", [BATCHES, {"training": BATCHES}])
def test_declared_read_of_a_metric_without_data_raises_and_each_fix_works(hub, data):
    access = {hub: {"validation": {"loss": Read()}}}
    test = f'"loss" in learner.cbstate.{hub}["validation"]'
    with pytest.raises(MissingStateError) as raised:
        learner_of(Metrics(), Sees(access), data=data)
    other = f"     or: declare and read `cbstate.{hub}.training.loss` instead\n"
    assert str(raised.value) == text_of_missing(hub, "validation.loss", other, test)
    learner_of(Metrics(), Sees(access), data=(BATCHES, BATCHES)).fit(1)
    instead = Sees({hub: {"training": {"loss": Read()}}}, lambda cbstate: len(getattr(cbstate, hub).training.loss))
    tests = Sees({hub: Read()}, lambda cbstate: "loss" in cbstate[hub]["validation"])
    learner_of(Metrics(), instead, tests, data=data).fit(2)
    assert (instead.seen, tests.seen) == ([1, 2], [False, False])


def test_declared_read_of_a_phase_without_data_raises():
    with pytest.raises(MissingStateError) as raised:
        learner_of(Metrics(), Sees({"metrics_epoch": {"validation": Read()}}), data=BATCHES)
    test = '"validation" in learner.cbstate.metrics_epoch'
    assert str(raised.value) == text_of_missing("metrics_epoch", "validation", "", test)


def test_history_of_a_phase_without_data_has_counts_of_zero():
    sees = Sees({"history": {"validation": Read()}}, lambda cbstate: cbstate.history.validation.steps)
    learner_of(Recorder(), sees, data=BATCHES).fit(1)
    assert sees.seen == [0]


class SeesInValidation(Callback):
    def stateaccess(self):
        return {"cbstate": {"metrics_epoch": {"validation": {"loss": Read()}}}}

    @on
    def look(self, event: EpochEnd, phase: ValidationPhase, learner): ...

    @on(EpochEnd, TrainingPhase, access={})
    def rest(self, event, phase, learner): ...


class Appends(Callback):
    def stateaccess(self):
        return {"cbstate": {"metrics_epoch": {"validation": {"own": Append()}}}}

    def runafter(self):
        return (Metrics,)

    @on
    def add(self, event: EpochEnd, phase: TrainingPhase, learner):
        learner.cbstate.metrics_epoch.validation.add("own", learner.progress.epoch, 0.5)


ALL = {"metrics_epoch": {"validation": Read()}}
OWN = {"metrics_epoch": {"validation": {"own": Read()}}}
LOSS = {"metrics_epoch": {"validation": {"loss": Read()}}}


@pytest.mark.parametrize(
    ("callbacks", "data"),
    [
        ([Metrics, SeesInValidation], BATCHES),  # the handler that reads does not run either
        ([Metrics, FillsData, lambda: Sees(LOSS)], BATCHES),
        ([Metrics, Appends, lambda: Sees(OWN)], BATCHES),
        ([lambda: InferenceRunner(BATCHES, ScalarStats("loss"), name="validation"), lambda: Sees(ALL)], BATCHES),
        ([Metrics, lambda: Sees(LOSS)], None),
    ],
)
def test_declared_read_is_accepted_if_the_value_may_come_or_is_not_used(callbacks, data):
    learner_of(*(make() for make in callbacks), data=data)
