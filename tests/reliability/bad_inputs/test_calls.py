"""Invalid calls of the methods of a Learner, between fits and during a fit."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fluxcb import AccessError, DataError, DeclarationError, Learner, MissingStateError
from fluxcb import callbacks as cb
from fluxcb.events import HostEvent, LossBegin, StepEnd
from fluxcb.phases import TrainingPhase, ValidationPhase
from fluxcb.testing import EventLog, testlearner

NAN, INF = float("nan"), float("inf")
TRAINING = TrainingPhase()
BATCH = (np.zeros((8, 1), np.float32), np.zeros((8, 1), np.float32))


class Own(HostEvent): ...


def loss_alone(log, **given):
    return Learner.from_loss(
        {"w": jnp.zeros(())},
        lambda params, batch, key: jnp.mean((params["w"] - batch) ** 2),
        optax.sgd(0.1),
        callbacks=[log],
        default_callbacks=False,
        **given,
    )


WHOLE = "{} must be a whole number of at least 1, not {!r}."


@pytest.mark.parametrize("value", [0, -1, 1.5, True, NAN, INF, "3", [1], None, np.float32(2)], ids=repr)
def test_invalid_lengths_of_fit_raise(value, refuses):
    if value is not None:
        first = WHOLE.format("The number of epochs of `fit`", value)
        refuses(lambda log: testlearner(log).fit(value), DeclarationError, first)
        first = WHOLE.format("`steps` of `fit`", value)
        refuses(lambda log: testlearner(log).fit(steps=value), DeclarationError, first)
        first = WHOLE.format("`steps_per_epoch` of `fit`", value)
        refuses(lambda log: testlearner(log).fit(1, steps_per_epoch=value), DeclarationError, first)
        first = WHOLE.format("`steps` of `run_epoch`", value)
        refuses(lambda log: testlearner(log).run_epoch(TRAINING, steps=value), DeclarationError, first)
    else:
        first = "`fit` takes exactly one of epochs and steps."
        refuses(lambda log: testlearner(log).fit(None), DeclarationError, first)


NO_PHASE = "{} is not a phase instance."
NO_CALLBACK = "The callbacks list contains {}, which is not a callback instance."


@pytest.mark.parametrize(
    ("call", "kind", "first"),
    [
        (lambda learner: learner.run_epoch(5), DeclarationError, NO_PHASE.format(5)),
        (
            lambda learner: learner.run_epoch(TrainingPhase),
            DeclarationError,
            NO_PHASE.format("The class `TrainingPhase`"),
        ),
        (lambda learner: learner.run_step("training", BATCH), DeclarationError, NO_PHASE.format("'training'")),
        (lambda learner: learner.emit(Own(), None), DeclarationError, NO_PHASE.format(None)),
        (
            lambda learner: learner.run_epoch(cb.LRFinderPhase()),
            DeclarationError,
            "`LRFinderPhase` has no `step(self, learner, emit)`, so it has nothing to run.",
        ),
        (
            lambda learner: learner.emit(5, TRAINING),
            DeclarationError,
            "`learner.emit` emits host events, but 5 is not an event.",
        ),
        (
            lambda learner: learner.emit(StepEnd, TRAINING),
            DeclarationError,
            "`learner.emit` emits host events, but <class 'fluxcb._declare.events.StepEnd'> is not an event.",
        ),
        (
            lambda learner: learner.emit(LossBegin(), TRAINING),
            DeclarationError,
            "`learner.emit` emits host events, but LossBegin is a traced event.",
        ),
        (
            lambda learner: learner.set_model(5),
            DeclarationError,
            "`model` is of type `int`, which fluxcb cannot train.",
        ),
        (
            lambda learner: setattr(learner, "state", None),
            DeclarationError,
            "The assigned state does not fit the Learner: expected a pytree with ['counters'], ['key'], "
            "['opt_state'].count, ..., got None.",
        ),
        (
            lambda learner: setattr(learner, "state", {**learner.state, "key": 5}),
            DeclarationError,
            "The assigned state does not fit the Learner: ['key']: expected key<fry>[], got int 5.",
        ),
        (lambda learner: learner.callbacks.timings(), DeclarationError, "Nothing has been measured."),
        (
            lambda learner: learner.callbacks.trace("t.json", max_events=0).__enter__(),
            DeclarationError,
            WHOLE.format("`max_events` of `trace`", 0),
        ),
    ],
)
def test_invalid_calls_raise(call, kind, first, refuses):
    refuses(lambda log: call(testlearner(log)), kind, first)


GET = "`learner.callbacks.get` takes a callback class, not {!r}."
SET = "`callbacks.set` takes a list of callback instances, not {!r}."
REPLACE = "`learner.callbacks.replace` takes a callback instance, not {!r}."


@pytest.mark.parametrize(
    ("call", "first"),
    [
        *((lambda callbacks, x=x: callbacks.get(x), GET.format(x)) for x in (5, "EventLog", None, EventLog())),
        (lambda callbacks: callbacks.get(cb.Metrics), "This Learner has no Metrics."),
        *((lambda callbacks, x=x: callbacks.set(x), SET.format(x)) for x in (5, "abc", None, EventLog())),
        (lambda callbacks: callbacks.set([5]), NO_CALLBACK.format(5)),
        *((lambda callbacks, x=x: callbacks.add(x), NO_CALLBACK.format(repr(x))) for x in (5, None, "Metrics")),
        (lambda callbacks: callbacks.add(EventLog), NO_CALLBACK.format("the class `EventLog`")),
        (
            lambda callbacks: callbacks.add([EventLog()]),
            "`learner.callbacks.add` takes callbacks one by one, not a list of them.",
        ),
        *((lambda callbacks, x=x: callbacks.replace(x), REPLACE.format(x)) for x in (5, EventLog, None)),
        (lambda callbacks: callbacks.replace(cb.Metrics()), "This Learner has no Metrics."),
        *(
            (lambda callbacks, x=x: callbacks.remove(x), f"{x!r} is not a callback of this Learner.")
            for x in (5, "EventLog", EventLog())
        ),
    ],
)
def test_invalid_changes_of_callbacks_raise(call, first, refuses):
    refuses(lambda log: call(testlearner(log).callbacks), DeclarationError, first)


@pytest.mark.parametrize(
    ("call", "kind", "first"),
    [
        (lambda learner: learner.model, DeclarationError, None),
        (lambda learner: learner.set_model(5), DeclarationError, "This Learner has no model."),
        (
            lambda learner: learner.fit(1),
            DataError,
            "There is no data for LossTrainingPhase: `data.training` is not set.",
        ),
        (
            lambda learner: learner.run_epoch(ValidationPhase()),
            DataError,
            "There is no data for LossValidationPhase: `data.validation` is not set.",
        ),
    ],
    ids=["model", "set_model", "fit", "run_epoch"],
)
def test_invalid_calls_of_loss_learner_raise(call, kind, first, refuses):
    first = first or "This Learner has no model: it was built with `Learner.from_loss`."
    refuses(lambda log: call(loss_alone(log)), kind, first)


def test_calls_that_need_first_batch_raise(refuses):
    def unbuilt(log):
        return Learner(
            (lambda key, xs: {"w": jnp.zeros(xs.shape[-1])}, lambda params, xs: xs @ params["w"]),
            lambda outputs, ys: jnp.mean(outputs - ys),
            optax.sgd(0.1),
            callbacks=[log],
            default_callbacks=False,
        )

    first = "The train state does not exist yet, because the shape of a batch is unknown."
    refuses(lambda log: unbuilt(log).params, MissingStateError, first)
    refuses(lambda log: unbuilt(log).run_step(TRAINING, None), MissingStateError, first)


# -- from inside a fit -------------------------------------------------------------------------------------------------

RUNNING = "`learner.{}` was used while this Learner is running."
AHEAD = "A step's handler reads `learner.{}` from the Learner itself, not from its argument `learner`."
MEANWHILE = "The callbacks of a Learner cannot be replaced while it is fitting."


@pytest.mark.parametrize(
    ("call", "first"),
    [
        (lambda learner: learner.fit(1), "`fit` was called while this Learner is fitting."),
        (
            lambda learner: learner.run_epoch(TRAINING),
            "An epoch of TrainingPhase was requested while another epoch is running.",
        ),
        (lambda learner: learner.run_step(TRAINING, BATCH), RUNNING.format("run_step")),
        (lambda learner: learner.set_model(learner), RUNNING.format("set_model(...)")),
        (lambda learner: setattr(learner, "state", {}), RUNNING.format("state = ...")),
        (lambda learner: learner.state, AHEAD.format("state")),
        (lambda learner: learner.params, AHEAD.format("params")),
        (lambda learner: learner.callbacks.add(EventLog()), MEANWHILE),
        (lambda learner: learner.callbacks.remove(EventLog), MEANWHILE),
        (
            lambda learner: learner.callbacks.measure(),
            "Measuring cannot be turned on or off while the Learner is fitting.",
        ),
        (
            lambda learner: learner.callbacks.trace("trace.json").__enter__(),
            "Tracing cannot be turned on or off while the Learner is fitting.",
        ),
    ],
)
def test_calls_from_handler_raise(call, first, refuses):
    def make(log):
        held = []
        inside = cb.CustomCallback(lambda learner: call(held[0]), StepEnd)
        held.append(testlearner(log, inside))
        held[0].fit(1)

    refuses(make, DeclarationError, first)


@pytest.mark.parametrize(
    ("call", "first"),
    [
        (lambda learner: learner.fit(1), "uses `learner.fit`, which handlers do not have."),
        (lambda learner: setattr(learner, "mine", 5), "writes `mine`, which is not part of the state."),
        (
            lambda learner: setattr(learner.progress, "step", 5),
            "writes `progress.step`, which only the engine may write.",
        ),
        (lambda learner: setattr(learner, "key", 5), "writes `key`, which only the engine may write."),
    ],
    ids=["fit", "attribute", "progress", "key"],
)
def test_protected_learner_rejects_calls(call, first, refuses):
    refuses(
        lambda log: testlearner(log, cb.CustomCallback(call, StepEnd, name="calls")).fit(1),
        AccessError,
        f"CustomCallback(calls, StepEnd) {first}",
    )
