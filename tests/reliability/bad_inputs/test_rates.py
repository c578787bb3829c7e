"""NaN, numbers outside the range of float32, and negative learning rates raise an error wherever they are set."""

import re

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import DeclarationError, TraceError, Write
from fluxcb import callbacks as cb
from fluxcb.events import ForwardBegin, StepEnd
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


@pytest.mark.parametrize("rate", [3.4028234663852886e38, 0, -0.0, float("inf"), jnp.float32(0.5), 2])
def test_float32_range_is_accepted(rate):
    learner = testlearner(optimizer=fluxcb.inject(optax.sgd, learning_rate=rate))
    assert learner.hyperparams == {"learning_rate": float(rate)}
    learner.hyperparams.learning_rate = rate
    assert learner.hyperparams == {"learning_rate": float(rate)}


NEGATIVE_WHY = (
    "  why:   with a negative learning rate, each update would increase the loss; to maximize a value, negate the "
    "loss\n"
)


class TestNegativeRates:
    """A negative learning rate is refused, and negative values of other hyperparameters are not."""

    def test_inject_raises(self, refused):
        text = "`inject` was given `learning_rate` as -0.1, which is negative.\n"
        with refused(DeclarationError, text + NEGATIVE_WHY + "  fix:   write e.g. `learning_rate=1e-3`"):
            fluxcb.inject(optax.sgd, learning_rate=-0.1)

    def test_assignment_raises(self, refused):
        learner = testlearner()
        text = (
            "`learner.hyperparams.learning_rate` was assigned -1.0, which is negative.\n"
            + NEGATIVE_WHY
            + "  fix:   assign a number that is not negative, e.g. `learner.hyperparams['learning_rate'] = 1e-3`"
        )
        with refused(DeclarationError, text):
            learner.hyperparams.learning_rate = -1
        assert learner.hyperparams == {"learning_rate": float(np.float32(0.1))}

    @pytest.mark.parametrize(("event", "error"), [(StepEnd, DeclarationError), (ForwardBegin, TraceError)])
    def test_handler_raises(self, event, error):
        def write(learner):
            learner.hyperparams.learning_rate = -0.5

        access = {"hyperparams": {"learning_rate": Write()}}
        text = " sets `hyperparams.learning_rate` to -0.5, which is negative.\n"
        pattern = re.escape(text) + r"(  where: .*\n)?" + re.escape(NEGATIVE_WHY)
        with pytest.raises(error, match=pattern + "  fix:   set it to a number that is not negative"):
            testlearner(cb.CustomCallback(write, event, access=access)).fit(1)

    def test_group_raises(self):
        groups = {"a": fluxcb.inject(optax.sgd, learning_rate=0.1), "b": fluxcb.inject(optax.sgd, learning_rate=0.1)}
        learner = testlearner(optimizer=optax.partition(groups, lambda params: {"w": "a", "b": "b"}))
        name, *_ = learner.hyperparams
        assert name == "a.learning_rate"
        with pytest.raises(DeclarationError, match=r"`learner\.hyperparams\.a\.learning_rate` was assigned -0\.1"):
            learner.hyperparams[name] = -0.1

    def test_setter_raises(self, refused):
        setter = cb.HyperParamSetterWithFunc("learning_rate", lambda epoch, current: -current)
        text = (
            "HyperParamSetterWithFunc(learning_rate) would set `hyperparams.learning_rate` to -0.5, which is "
            "negative.\n"
            + NEGATIVE_WHY
            + "  fix:   return a number that is not negative, or None to keep the current value"
        )
        with refused(DeclarationError, text):
            testlearner(setter, learning_rate=0.5).fit(1)

    @pytest.mark.parametrize("options", [{}, {"interp": "linear"}, {"step_based": True}], ids=str)
    def test_scheduled_setter_raises(self, options, refused):
        text = (
            "A point of the schedule of ScheduledHyperParamSetter(learning_rate) is (2, -0.1), a negative learning "
            "rate.\n" + NEGATIVE_WHY + "  fix:   use a number that is not negative"
        )
        with refused(DeclarationError, text):
            cb.ScheduledHyperParamSetter(cb.LearningRate, [(0, 0.1), (2, -0.1)], **options)

    def test_scheduler_raises(self):
        with pytest.raises(TraceError, match=r"sets `hyperparams\.learning_rate` to -0\.1, which is negative"):
            testlearner(cb.Scheduler({"learning_rate": -0.1}))

    def test_run_control_raises(self, refused):
        text = (
            "`learning_rate` is a number that is not negative, not -0.1.\n"
            + NEGATIVE_WHY
            + "  fix:   write e.g. `RunControl('runs/1').set('learning_rate', 1e-4)`"
        )
        with refused(DeclarationError, text):
            cb.RunControl("runs/1").set("learning_rate", -0.1)

    def test_other_hyperparameters_may_be_negative(self):
        optimizer = fluxcb.inject(optax.adamw, learning_rate=0.1, weight_decay=-0.1)
        setter = cb.HyperParamSetterWithFunc("weight_decay", lambda epoch, current: -0.5)
        learner = testlearner(setter, optimizer=optimizer)
        learner.hyperparams["weight_decay"] = -0.25
        learner.fit(1)
        assert learner.hyperparams["weight_decay"] == -0.5
