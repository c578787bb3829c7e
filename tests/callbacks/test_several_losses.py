"""Callbacks in phases that compute several losses and gradients per step, each with its own `BackwardEnd`."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fluxcb import AccessError, Append, Callback, Learner, Read, Write, inject, on
from fluxcb.callbacks import Freeze, Scheduler, SkipNonFinite, StopOnNaNLoss
from fluxcb.events import BackwardBegin, BackwardEnd, ForwardBegin, StepEnd
from fluxcb.phases import AbstractTrainingPhase, TrainingPhase


class InTurn(AbstractTrainingPhase):
    """Update `d` with the gradient of its loss, which equals the batch, and then `g` with a gradient of 1."""

    provides = {BackwardBegin: ("loss",), BackwardEnd: ("grads",)}

    def step(self, learner, emit):
        slope = jnp.mean(learner.step.batch)
        self.update(learner, emit, "d", lambda d: slope * d)
        self.update(learner, emit, "g", lambda g: g)

    def update(self, learner, emit, part, function):
        def loss(params):
            learner.step.loss = function(params)
            emit(BackwardBegin())
            return learner.step.loss

        learner.step.grads = learner.grad(loss, wrt=f"params.{part}")
        emit(BackwardEnd())
        learner.update(learner.step.grads, wrt=f"params.{part}", optimizer=part)


def in_turn(slopes, *callbacks, phase=InTurn, **kwargs):
    return Learner.from_loss(
        {"d": jnp.zeros(()), "g": jnp.zeros(())},
        None,
        {name: inject(optax.sgd, learning_rate=1.0) for name in ("d", "g")},
        data={"training": [np.full(2, slope, np.float32) for slope in slopes]},
        phases=(phase(),),
        callbacks=callbacks,
        default_callbacks=False,
        **kwargs,
    )


@pytest.mark.parametrize("steps_per_call", [1, 3])
@pytest.mark.parametrize(("part", "expected"), [("d", (0.0, -4.0)), ("g", (-8.0, 0.0))])
def test_a_frozen_parameter_keeps_its_value_from_before_the_first_update(part, expected, steps_per_call):
    learner = in_turn([2.0] * 4, Freeze(part), steps_per_call=steps_per_call)
    learner.fit(1)
    assert (float(learner.params["d"]), float(learner.params["g"])) == expected


@pytest.mark.filterwarnings("ignore:Training stopped:RuntimeWarning")
@pytest.mark.parametrize("steps_per_call", [1, 3])
def test_a_step_with_any_non_finite_loss_counts_once(steps_per_call):
    nan = float("nan")
    learner = in_turn([2.0, nan, 2.0, nan, nan, 2.0], SkipNonFinite(2), steps_per_call=steps_per_call)
    learner.fit(1)
    assert learner.stop_reason == "loss or gradients were not finite at 2 steps in a row, up to step 5"
    assert {name: int(count) for name, count in learner.cbstate["non_finite"].items()} == {"skipped": 3, "in_a_row": 2}
    assert float(learner.params["d"]) == -4.0


class BeginsForward(InTurn):
    provides = {ForwardBegin: (), **InTurn.provides}

    def step(self, learner, emit):
        emit(ForwardBegin())
        super().step(learner, emit)


def test_a_scheduler_in_a_phase_that_does_not_emit_its_event():
    schedule = {"d.learning_rate": optax.linear_schedule(1.0, 0.0, 4)}
    with pytest.warns(UserWarning, match="does not call") as caught:
        in_turn([1.0], Scheduler(schedule))
    assert [str(warning.message) for warning in caught] == [
        "fluxcb does not call Scheduler(d.learning_rate).set_hyperparams, because InTurn does not emit ForwardBegin. "
        "Call `emit(ForwardBegin())` in the `step` of InTurn, and add ForwardBegin to `provides`."
    ]
    learner = in_turn([1.0] * 2, Scheduler(schedule), phase=BeginsForward)
    learner.fit(1)
    assert float(learner.params["d"]) == -1.75


class Together(InTurn):
    """The same two losses, with one `BackwardEnd` after both."""

    provides = {BackwardEnd: ("loss", "grads")}

    def step(self, learner, emit):
        slope = jnp.mean(learner.step.batch)

        def loss_of(function):
            def loss(params):
                learner.step.loss = function(params)
                return learner.step.loss

            return loss

        learner.step.grads = {
            "d": learner.grad(loss_of(lambda d: slope * d), wrt="params.d"),
            "g": learner.grad(loss_of(lambda g: g), wrt="params.g"),
        }
        emit(BackwardEnd())
        learner.apply_updates()


class Three(Together):
    """Three losses, computed without `learner.grad`."""

    def step(self, learner, emit):
        for factor in (1.0, jnp.mean(learner.step.batch), 2.0):
            learner.step.loss = factor * learner.params["d"] + 1
        learner.step.grads = {"d": jnp.float32(1), "g": jnp.float32(1)}
        emit(BackwardEnd())
        learner.apply_updates()


NAN = float("nan")


@pytest.mark.parametrize("steps_per_call", [1, 3])
@pytest.mark.parametrize(
    ("phase", "reason", "d"),
    [
        (InTurn, "loss 1 of 2 was nan at step 3", -4.0),
        (Together, "loss 1 of 2 was nan at step 3", -4.0),
        (Three, "loss 2 of 3 was nan at step 3", -2.0),
    ],
)
def test_an_earlier_loss_that_is_nan_ends_the_fit(phase, reason, d, steps_per_call):
    learner = in_turn([2.0, 2.0, NAN, 2.0, 2.0], StopOnNaNLoss(), phase=phase, steps_per_call=steps_per_call)
    with pytest.warns(RuntimeWarning, match=f"Training stopped: {reason}."):
        learner.fit(2)
    assert (learner.stop_reason, learner.step) == (reason, 3)
    assert (float(learner.params["d"]), float(learner.params["g"])) == (d, -2.0)


@pytest.mark.parametrize("phase", [Together, Three])
def test_a_non_finite_earlier_loss_skips_the_step(phase):
    learner = in_turn([2.0, NAN, 2.0], SkipNonFinite(2), phase=phase)
    learner.fit(1)
    assert learner.cbstate["non_finite"]["skipped"] == 1
    assert float(learner.params["g"]) == -2.0


class KeepsLosses(Callback):
    """Record the losses of all steps in a host handler, and their sum from a traced handler."""

    def __init__(self):
        self.kept = []

    def stateaccess(self):
        return {"step": {"earlier_losses": Read(), "loss": Read(), "sum": Write()}}

    @on
    def add(self, event: BackwardEnd, phase: AbstractTrainingPhase, learner):
        learner.step.sum = sum(learner.step.earlier_losses, learner.step.loss)

    @on(StepEnd, AbstractTrainingPhase, access={"step": {"earlier_losses": Read(), "sum": Read()}})
    def keep(self, event, phase, learner):
        self.kept.append(([float(loss) for loss in learner.step.earlier_losses], float(learner.step.sum)))


def one_loss(*callbacks):
    return Learner.from_loss(
        {"d": jnp.zeros(())},
        lambda params, batch: jnp.mean(batch) * params["d"],
        optax.sgd(1.0),
        data=[np.full(2, 2, np.float32)] * 3,
        callbacks=callbacks,
        default_callbacks=False,
        steps_per_call=3,
    )


def test_handlers_see_the_earlier_losses():
    keeps = KeepsLosses()
    in_turn([2.0, 3.0], keeps, phase=Three, steps_per_call=2).fit(1)  # `d` is 0, and then -1
    assert keeps.kept == [([1.0, 1.0], 3.0), ([0.0, -2.0], -3.0)]
    keeps = KeepsLosses()
    one_loss(keeps).fit(1)
    assert keeps.kept == [([], 0.0), ([], -4.0), ([], -8.0)]


def test_a_step_with_one_loss_has_no_earlier_losses_to_compute():
    learner = one_loss(StopOnNaNLoss())
    (phase, _) = learner._core.phases
    traced = learner._core.traced(phase)
    assert "earlier_losses" not in traced.step_specs
    assert str(traced.jaxpr).count("is_finite") == 1


def test_earlier_losses_cannot_be_written(refused):
    class Forges(Callback):
        def stateaccess(self):
            return {"step": {"earlier_losses": Append()}}

        @on  # forges
        def forge(self, event: BackwardEnd, phase: TrainingPhase, learner):
            learner.step.earlier_losses = ()

    with refused(
        AccessError,
        "Forges() writes `step.earlier_losses` at BackwardEnd, but traced handlers can only read it.\n"
        "  where: Forges.forge  <@forges>\n"
        "  why:   the step computes it, and a write would have no effect or an unexpected effect\n"
        "  fix:   write the values that it is computed from",
    ):
        one_loss(Forges())
