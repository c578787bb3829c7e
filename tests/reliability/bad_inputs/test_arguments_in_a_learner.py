"""Invalid arguments of callbacks that only a Learner can detect, when it is built or when it trains."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fluxcb import DeclarationError, MissingStateError, TraceError, when
from fluxcb import callbacks as cb
from fluxcb.events import StepEnd
from fluxcb.testing import EventLog, testlearner


def trained(log, callback):
    testlearner(log, callback, batches=2, validation_batches=1).fit(1)


RATE = "`hyperparams.learning_rate`"


@pytest.mark.parametrize(
    ("callback", "kind", "first"),
    [
        (
            lambda: cb.ToDevice(5),
            DeclarationError,
            "`placement` must be a device or a sharding, not of type `int`.",
        ),
        (
            lambda: cb.ToDevice("gpu"),
            DeclarationError,
            "`placement` must be a device or a sharding, not of type `str`.",
        ),
        (
            lambda: cb.ToDevice(jax.devices()[0], batches="cpu:0"),
            DeclarationError,
            "`placement` must be a device or a sharding, not of type `str`.",
        ),
        (
            lambda: cb.Scheduler({"learning_rate": lambda step: "a"}),
            TraceError,
            f"Scheduler(learning_rate) sets {RATE} to str 'a'; it is float32[].",
        ),
        (
            lambda: cb.Scheduler({"learning_rate": lambda step: None}),
            TraceError,
            f"Scheduler(learning_rate) sets {RATE} to None; it is float32[].",
        ),
        (
            lambda: cb.Scheduler({"learning_rate": lambda step: jnp.zeros(2)}),
            TraceError,
            f"Scheduler(learning_rate) sets {RATE} to float32[2]; it is float32[].",
        ),
        (
            lambda: cb.HyperParamSetterWithFunc("learning_rate", lambda epoch, value: "high"),
            DeclarationError,
            f"HyperParamSetterWithFunc(learning_rate) would set {RATE} to 'high', "
            "which is not a finite float32 number.",
        ),
        (
            lambda: cb.Metrics(cb.Metric(lambda outputs, ys: "x", name="m")),
            DeclarationError,
            "The metric `m` returned str 'x' for one batch.",
        ),
        (
            lambda: cb.Metrics(cb.Metric(lambda outputs, ys: None, name="m")),
            DeclarationError,
            "The metric `m` returned None for one batch.",
        ),
        (
            lambda: cb.Metrics(cb.Metric(lambda outputs, ys: outputs - ys, name="m")),
            DeclarationError,
            "The metric `m` returned an array of shape (8, 1) for one batch.",
        ),
        (
            lambda: when(EventLog(), lambda learner: np.zeros(3)),
            DeclarationError,
            "The function of `when` must return a bool, not ndarray: The truth value of an array with more than "
            "one element is ambiguous. Use a.any() or a.all()",
        ),
        (
            lambda: cb.CustomCallback(print, StepEnd, access=5),
            DeclarationError,
            "`CustomCallback.stateaccess` must return a mapping of state to permissions, not int 5.",
        ),
        (
            lambda: cb.Debugger(access=5),
            DeclarationError,
            "`Debugger.stateaccess` must return a mapping of state to permissions, not int 5.",
        ),
    ],
)
def test_invalid_arguments_raise_with_learner(callback, kind, first, refuses):
    refuses(lambda log: trained(log, callback()), kind, first)


@pytest.mark.parametrize(
    ("callback", "first"),
    [
        (
            lambda: cb.EarlyStopping(3, metric="acuracy"),
            "EarlyStopping(('validation/acuracy', NumberSinceBest(n=3))) watches `validation/acuracy`, which no "
            "callback provides.",
        ),
        (
            lambda: cb.EarlyStopping(3, phase="valid"),
            "EarlyStopping(('valid/loss', NumberSinceBest(n=3))) watches `valid/loss`, which no callback provides. "
            "Did you mean `validation/loss`?",
        ),
        (
            lambda: cb.ReduceLROnPlateau(metric="los"),
            "ReduceLROnPlateau(0.1, patience=10, metric='validation/los') watches `validation/los`, which no callback "
            "provides. Did you mean `validation/loss`?",
        ),
    ],
    ids=["metric", "phase", "plateau"],
)
def test_statistics_without_source_raise(callback, first, refuses):
    def make(log):
        trained_by = [log, cb.Metrics(), cb.Recorder(), callback()]
        testlearner(*trained_by, batches=2, validation_batches=1)

    refuses(make, MissingStateError, first)
