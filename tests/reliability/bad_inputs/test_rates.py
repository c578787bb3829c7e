"""Hyperparameters that are NaN or outside the range of float32 raise an error wherever they are set."""

import re

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import DeclarationError, TraceError, Write
from fluxcb import callbacks as cb
from fluxcb.events import StepEnd
from fluxcb.testing import testlearner

RATES = {
    "float": (1e39, "1e+39"),
    "negative": (-1e39, "-1e+39"),
    "numpy": (np.float64(1e39), "1e+39"),
    "array": (np.array(1e39), "1e+39"),
    "int": (10**400, "an int above 1.798e+308"),
    "low": (-(10**400), "an int below -1.798e+308"),
}
WHY = "  why:   the largest finite number of float32 is 3.403e+38\n"


@pytest.mark.parametrize(("rate", "shown"), RATES.values(), ids=RATES)
class TestRates:
    def test_inject_raises(self, rate, shown, refused):
        text = (
            f"`inject` was given `learning_rate` as {shown}, which is not finite in float32.\n"
            + WHY
            + "  fix:   write e.g. `learning_rate=1e-3`"
        )
        with refused(DeclarationError, text):
            fluxcb.inject(optax.sgd, learning_rate=rate)

    def test_assignment_raises(self, rate, shown, refused):
        learner = testlearner()
        text = (
            f"`learner.hyperparams.learning_rate` was assigned {shown}, which is not finite in float32.\n"
            + WHY
            + "  fix:   assign a finite number, e.g. `learner.hyperparams['learning_rate'] = 1e-3`"
        )
        with refused(DeclarationError, text):
            learner.hyperparams.learning_rate = rate
        assert learner.hyperparams == {"learning_rate": float(np.float32(0.1))}

    def test_scheduler_raises(self, rate, shown):
        text = (
            f"Scheduler(learning_rate) sets `hyperparams.learning_rate` to {shown}, which is not finite in float32.\n"
        )
        with pytest.raises(
            TraceError,
            match=re.escape(text) + r"  where: .*\n" + re.escape(WHY + "  fix:   set it to a finite number"),
        ):
            testlearner(cb.Scheduler({"learning_rate": lambda step: rate})).fit(1)

    def test_host_handler_raises(self, rate, shown):
        def write(learner):
            learner.hyperparams.learning_rate = rate

        access = {"hyperparams": {"learning_rate": Write()}}
        learner = testlearner(cb.CustomCallback(write, StepEnd, access=access))
        text = f" sets `hyperparams.learning_rate` to {shown}, which is not finite in float32.\n"
        with pytest.raises(
            DeclarationError,
            match=re.escape(text) + r"(  where: .*\n)?" + re.escape(WHY + "  fix:   set it to a finite number"),
        ):
            learner.fit(1)

    def test_setter_raises(self, rate, shown, refused):
        setter = cb.HyperParamSetterWithFunc("learning_rate", lambda epoch, current: rate)
        text = (
            f"HyperParamSetterWithFunc(learning_rate) would set `hyperparams.learning_rate` to {rate!r}, "
            "which is not a finite float32 number.\n"
            "  why:   the next step would fail or make every parameter NaN\n"
            "  fix:   return a finite number, or None to keep the current value"
        )
        with refused(DeclarationError, text):
            testlearner(setter).fit(1)


def test_constant_schedule_raises():
    with pytest.raises(
        TraceError, match=r"^Scheduler\(learning_rate\) sets .* to 1e\+39, which is not finite in float32"
    ):
        testlearner(cb.Scheduler({"learning_rate": optax.constant_schedule(1e39)})).fit(1)


@pytest.mark.parametrize("nan", [float("nan"), np.float32("nan"), np.array(np.nan)], ids=["float", "numpy", "array"])
def test_nan_raises(nan, refused):
    why = "  why:   the next update would make the parameters NaN\n"
    with refused(
        DeclarationError,
        f"`inject` was given `learning_rate` as nan.\n{why}  fix:   write e.g. `learning_rate=1e-3`",
    ):
        fluxcb.inject(optax.sgd, learning_rate=nan)
    learner = testlearner()
    with refused(
        DeclarationError,
        f"`learner.hyperparams.learning_rate` was assigned nan.\n{why}"
        "  fix:   assign a finite number, e.g. `learner.hyperparams['learning_rate'] = 1e-3`",
    ):
        learner.hyperparams["learning_rate"] = nan
    assert learner.hyperparams == {"learning_rate": float(np.float32(0.1))}
    with pytest.raises(
        TraceError,
        match=r"^Scheduler\(learning_rate\) sets `hyperparams.learning_rate` to nan.\n  where: .*\n"
        + re.escape(why + "  fix:   set it to a finite number"),
    ):
        testlearner(cb.Scheduler({"learning_rate": lambda step: nan}))


@pytest.mark.parametrize("rate", [3.4028234663852886e38, -3.4028234663852886e38, float("inf"), jnp.float32(0.5), 2])
def test_float32_range_is_accepted(rate):
    learner = testlearner(optimizer=fluxcb.inject(optax.sgd, learning_rate=rate))
    assert learner.hyperparams == {"learning_rate": float(rate)}
    learner.hyperparams.learning_rate = rate
    assert learner.hyperparams == {"learning_rate": float(rate)}
