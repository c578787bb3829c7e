"""Invalid numbers, counts, periods and choices in callbacks, schedules and loggers.

The invalid values are below the range, NaN, infinite, a string, a bool, None, or an array.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from fluxcb import DeclarationError, EverySeconds, every, throttle
from fluxcb import callbacks as cb
from fluxcb.events import StepEnd
from fluxcb.testing import EventLog

NAN, INF = math.nan, math.inf

ABOVE, FROM, BETWEEN = (
    "{} must be a number above {}, not {!r}.",
    "{} must be a number of at least {}, not {!r}.",
    "{} must be a number of at least 0 and below 1, not {!r}.",
)
NUMBERS = {
    "`max_norm` of ClipGradients": (ABOVE, 0, cb.ClipGradients),
    "`alpha` of MixUp": (ABOVE, 0, cb.MixUp),
    "`alpha` of CutMix": (ABOVE, 0, cb.CutMix),
    "`eta` of GradientNoise": (ABOVE, 0, cb.GradientNoise),
    "`gamma` of GradientNoise": (FROM, 0, lambda x: cb.GradientNoise(0.1, x)),
    "`initial` of DynamicLossScale": (FROM, 1.0, cb.DynamicLossScale),
    "`factor` of DynamicLossScale": (ABOVE, 1, lambda x: cb.DynamicLossScale(factor=x)),
    "`threshold` of LossSpikeGuard": (ABOVE, 0, cb.LossSpikeGuard),
    "`seconds` of `StepTimeout`": (ABOVE, 0, cb.StepTimeout),
    "`interval` of `GPUUtilizationTracker` (seconds)": (ABOVE, 0, lambda x: cb.GPUUtilizationTracker(interval=x)),
    "`scale` of `DumpImages`": (ABOVE, 0, lambda x: cb.DumpImages("step.xs", "images", scale=x)),
    "`timeout` of `SendMonitorData` (seconds)": (
        ABOVE,
        0,
        lambda x: cb.SendMonitorData("https://example.org", "step.loss", timeout=x),
    ),
    "`max_value` of `onecycle`": (ABOVE, 0, lambda x: cb.onecycle(10, x)),
    "`start_factor` of `onecycle`": (ABOVE, 0, lambda x: cb.onecycle(10, 0.1, start_factor=x)),
    "`decay` of ParameterEMA": (BETWEEN, 0, cb.ParameterEMA),
    "`alpha` of LabelSmoothing": (BETWEEN, 0, cb.LabelSmoothing),
    "`decay` of MovingAverage": (BETWEEN, 0, lambda x: cb.MovingAverage("step.loss", x)),
    "`beta` of SmoothLoss": (BETWEEN, 0, cb.SmoothLoss),
    "`warmup` of `onecycle`": (BETWEEN, 0, lambda x: cb.onecycle(10, 0.1, warmup=x)),
}


@pytest.mark.parametrize("what", NUMBERS)
@pytest.mark.parametrize("value", [-1, NAN, INF, "0.5", True, None, np.zeros(2)], ids=str)
def test_invalid_numbers_raise(what, value, told):
    template, bound, make = NUMBERS[what]
    first = template.format(what, value) if template is BETWEEN else template.format(what, bound, value)
    told(lambda: make(value), DeclarationError, first)


@pytest.mark.parametrize("value", [0.0, -1, NAN, INF, "3", True, None], ids=str)
def test_invalid_seconds_raise(value, told):
    first = f"The period of `EverySeconds` (seconds) must be a number above 0, not {value!r}."
    told(lambda: EverySeconds(value), DeclarationError, first)
    if value is not None:
        told(lambda: every(EventLog(), seconds=value), DeclarationError, first)
        told(lambda: throttle(EventLog(), StepEnd, seconds=value), DeclarationError, first)


WHOLE = "{} must be a whole number of at least 1, not {!r}."
COUNTS = {
    "`steps` of AccumulateGradients": cb.AccumulateGradients,
    "`every_k_steps` of `PeriodicCallback`": lambda x: cb.PeriodicCallback(EventLog(), x),
    "`every_k_epochs` of `PeriodicTrigger`": lambda x: cb.PeriodicTrigger(EventLog(), every_k_epochs=x),
    "`start` of StochasticWeightAveraging (updates)": cb.StochasticWeightAveraging,
    "`total_steps` of `onecycle`": lambda x: cb.onecycle(x, 0.1),
    "The history of a name (values)": lambda x: cb.Monitors(history=x),
    "`bins` of LogHistograms": lambda x: cb.LogHistograms(bins=x),
    "`keep` of `DumpArrays`": lambda x: cb.DumpArrays("step.loss", "arrays", keep=x),
    "`window` of SimpleMovingAverage (steps)": lambda x: cb.SimpleMovingAverage("step.loss", x),
}


@pytest.mark.parametrize("what", COUNTS)
@pytest.mark.parametrize("value", [0, -1, 1.5, NAN, "3", True], ids=str)
def test_invalid_counts_raise(what, value, told):
    told(lambda: COUNTS[what](value), DeclarationError, WHOLE.format(what, value))


@pytest.mark.parametrize(
    ("make", "first"),
    [
        (
            lambda: cb.LossSpikeGuard(window=2),
            "`window` of LossSpikeGuard (steps) must be a whole number of at least 3, not 2.",
        ),
        (lambda: cb.CheckNumerics(None), '`at` of CheckNumerics must be "step" or "trigger", not None.'),
        (
            lambda: cb.StepTimeout(1, action="exit"),
            '`action` of `StepTimeout` must be "warn" or "abort", not \'exit\'.',
        ),
        (
            lambda: cb.InjectShell(shell="zsh"),
            '`shell` of `InjectShell` must be "pdb" or "ipython" or None, not \'zsh\'.',
        ),
        (
            lambda: cb.ScheduledHyperParamSetter("learning_rate", [(1, 0.1)], "cubic"),
            "`interp` of `ScheduledHyperParamSetter` must be \"linear\" or None, not 'cubic'.",
        ),
        (
            lambda: cb.BinaryClassificationStats("outputs", threshold=NAN),
            "`threshold` of `BinaryClassificationStats` must be a number, not nan.",
        ),
        (
            lambda: cb.StatMonitorParamSetter("learning_rate", "loss", abs, NAN, 3),
            "`threshold` of `StatMonitorParamSetter` must be a number of at least 0, not nan.",
        ),
    ],
    ids=["window", "at", "action", "shell", "interp", "threshold", "change"],
)
def test_invalid_choices_raise(make, first, told):
    told(lambda: make(), DeclarationError, first)
