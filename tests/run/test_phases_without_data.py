"""Callbacks whose handlers `fit` does not call, because their phases have no data."""

import warnings

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import Callback, Write, on
from fluxcb.callbacks import Metric, Metrics
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
