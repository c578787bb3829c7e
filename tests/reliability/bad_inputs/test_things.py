"""Arguments of the wrong type in callbacks, loggers and criteria: names, functions and backends."""

from __future__ import annotations

import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import DataError, DeclarationError, inject, when
from fluxcb import callbacks as cb
from fluxcb import logging as log_to
from fluxcb import stopping as stop
from fluxcb.events import StepEnd
from fluxcb.testing import EventLog, testlearner


async def coroutine(learner):
    pass


def generator(learner):
    yield learner


PATHS = "`{}` expects paths that begin with {}; got {!r}."
ANY = "`step`, `params`, `model_state`, `opt_state`, `hyperparams` or `cbstate`"


@pytest.mark.parametrize("names", [5, (), "loss.", None, ["step.loss", 5]], ids=str)
@pytest.mark.parametrize(
    ("make", "owner", "roots"),
    [
        (lambda names: cb.DumpArrays(names, "arrays"), "DumpArrays", ANY),
        (cb.PrintArrays, "PrintArrays", ANY),
        (lambda names: cb.ProcessArrays(names, print), "ProcessArrays", ANY),
        (cb.MovingAverage, "MovingAverage", "`step` or `hyperparams`"),
        (cb.LogSummaries, "LogSummaries", "`step` or `hyperparams`"),
    ],
    ids=["DumpArrays", "PrintArrays", "ProcessArrays", "MovingAverage", "LogSummaries"],
)
def test_invalid_value_names_raise(names, make, owner, roots, told):
    wrong = 5 if isinstance(names, list) else names
    told(lambda: make(names), DeclarationError, PATHS.format(owner, roots, wrong))


RUNS = "`fn` of `RunFunction` must run when it is called; `{}` is {}."


@pytest.mark.parametrize(
    ("make", "first"),
    [
        (lambda: cb.RunFunction(coroutine), RUNS.format("coroutine", "a coroutine function")),
        (lambda: cb.RunFunction(generator), RUNS.format("generator", "a generator function")),
        (
            lambda: cb.CallbackFactory(trigger=coroutine),
            "`trigger` of `CallbackFactory` must run when it is called; `coroutine` is a coroutine function.",
        ),
        (
            lambda: cb.CustomCallback(coroutine, StepEnd),
            "`fn` of `CustomCallback` must run when it is called; `coroutine` is a coroutine function.",
        ),
        (
            lambda: cb.CustomCallback(generator, StepEnd),
            "`fn` of `CustomCallback` must run when it is called; `generator` is a generator function.",
        ),
        (lambda: when(EventLog(), coroutine), "The function of `when` is a coroutine function."),
        (
            lambda: when(EventLog(), lambda: True),
            "The function of `when` must take one argument, the learner; it takes ().",
        ),
        (
            lambda: cb.Scheduler({"learning_rate": lambda: 0.1}),
            "The schedule of `learning_rate` must be a number or a function of the step; `<lambda>` takes ().",
        ),
        (
            lambda: cb.Metric(lambda outputs: 0.0, name="m"),
            "The function of the metric `m` takes (outputs), but is called with outputs, ys.",
        ),
        (lambda: cb.Metric(abs, name=5), "`name` of `Metric` must be a string, not 5."),
        *(
            (
                lambda needs=needs: cb.Metric(cb.accuracy, needs=needs),
                f"`needs` of `Metric` must be a tuple of names of step values, not {needs!r}.",
            )
            for needs in (5, (), "outputs", ("outputs", 5))
        ),
    ],
)
def test_invalid_functions_raise(make, first, told):
    told(lambda: make(), DeclarationError, first)


@pytest.mark.parametrize(
    ("make", "first"),
    [
        (
            lambda: cb.InferenceRunner([1.0], 5),
            "Each inferencer of `InferenceRunner` must be an `Inferencer`, not 5.",
        ),
        (
            lambda: cb.InferenceRunner([1.0], cb.ScalarStats("loss"), average=5),
            "`average` of `InferenceRunner` must be the name of averaged parameters in `cbstate`, not 5.",
        ),
        *(
            (
                lambda devices=devices: cb.DataParallelInferenceRunner([1.0], cb.ScalarStats("loss"), devices),
                f"`devices` of `DataParallelInferenceRunner` must be different devices, not {shown}.",
            )
            for devices, shown in ((5, "(5,)"), ([], "()"), (["cpu"], "('cpu',)"))
        ),
        (lambda: cb.ScalarStats(5), "`ScalarStats` takes the names of step values, not 5."),
        (lambda: cb.PredictionWriter("a.npz", 5), "`PredictionWriter` takes the names of step values, not 5."),
        (lambda: cb.SanityCheck(5), "Each check of `SanityCheck` must be a `Check`, not 5."),
        (
            lambda: cb.LogHistograms(5),
            "`of` of LogHistograms must name some of `params`, `grads`, `updates`, each once, not 5.",
        ),
        (lambda: cb.find_learning_rate(5), "`find_learning_rate` takes a Learner, not 5."),
        (lambda: inject(5), "`inject` takes a factory of optimizers, not int."),
        (
            lambda: inject(optax.adam(0.1), learning_rate=0.1),
            "`inject` takes a factory of optimizers, not GradientTransformationExtraArgs.",
        ),
        (lambda: inject(optax.sgd), "`sgd` needs `learning_rate`, which was not passed to `inject`."),
        (
            lambda: inject(optax.sgd, learning_rate="high"),
            "`inject` takes numbers and schedules, but `learning_rate` is 'high'.",
        ),
        (lambda: stop.stopping_time(stop.Patience(), 5), "`stopping_time` takes a list of losses, not 5."),
        (lambda: log_to.Text(5), "`Text` takes a str, not int 5."),
        (lambda: log_to.Image("cat.png"), "An image takes numbers, not str 'cat.png'."),
        (lambda: log_to.Audio("song.wav", 16000), "Audio takes numbers, not str 'song.wav'."),
        (
            lambda: log_to.Audio(np.zeros(5, np.int16), 16000),
            "Audio is floating point of shape [samples] or [samples, channels] with 1 or 2 channels, "
            "not int16 of shape (5,).",
        ),
        (
            lambda: log_to.Histogram([1, 2], [0, 1]),
            "A histogram of 2 counts has one edge more than counts, not 2.",
        ),
        (
            lambda: log_to.Histogram([1, 2], [2, 1, 0]),
            "A histogram has increasing, finite edges and counts that are not negative.",
        ),
        (
            lambda: log_to.log_to(5, "a", log_to.Value(1.0), step=1),
            "`log_to` logs to backends, but 5 is not a backend.",
        ),
        (
            lambda: log_to.log_to(log_to.ConsoleBackend(), 5, log_to.Value(1.0), step=1),
            "`log_to` logs under a name, not 5.",
        ),
        (lambda: fluxcb.check(5), "`callbacks` must be a list of callback instances, not 5."),
        (
            lambda: fluxcb.callbacks_as_hook(5, {"loss": 0.0}),
            "`callbacks` must be a list of callback instances, not 5.",
        ),
        (lambda: fluxcb.check([5]), "The callbacks list contains 5, which is not a callback instance."),
    ],
)
def test_invalid_objects_raise(make, first, told):
    told(lambda: make(), DeclarationError, first)


def test_non_iterable_data_of_learning_rate_finder_raises(told):
    first = "`data` of `find_learning_rate` is int, which cannot be iterated."
    told(lambda: cb.find_learning_rate(testlearner(), data=5), DataError, first)
