"""Functions that a phase differentiates and that read the differentiated parameters from the learner."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import Callback, Read, Write, on
from fluxcb.events import BackwardBegin, BackwardEnd
from fluxcb.phases import AbstractTrainingPhase, Phase

START, RATE = 3.0, 0.1


def loss_of(params, target):
    """Return the loss of semi-gradient temporal-difference learning, whose target is a constant."""
    return (params - (1 + 0.5 * target)) ** 2


SEMI, FULL = jax.grad(loss_of)(START, START), jax.grad(lambda w: loss_of(w, w))(START)


class Differentiates(AbstractTrainingPhase):
    provides = {BackwardBegin: ("loss",), BackwardEnd: ("grads",)}
    wrt = "params"

    def step(self, learner, emit):
        self.before = learner.params["w"]["inner"]

        def loss(part):
            learner.step.loss = self.loss(learner, part)
            emit(BackwardBegin())
            return learner.step.loss

        grads = learner.grad(loss, wrt=self.wrt)
        learner.step.grads = grads
        emit(BackwardEnd())
        grads = learner.step.grads
        learner.update(grads["w"] if self.wrt == "params" else grads, wrt="params.w", optimizer="w")
        learner.update(jnp.zeros(()), wrt="params.constant", optimizer="constant")


class ReadsInside(Differentiates):
    def loss(self, learner, part):
        return loss_of(part["w"]["inner"], learner.params["w"]["inner"])


class ReadsPartInside(Differentiates):
    wrt = "params.w"

    def loss(self, learner, part):
        return loss_of(part["inner"], learner.params["w"]["inner"])


class ReadsBefore(Differentiates):
    def loss(self, learner, part):
        return loss_of(part["w"]["inner"], self.before)


class Stops(Differentiates):
    def loss(self, learner, part):
        return loss_of(part["w"]["inner"], jax.lax.stop_gradient(learner.params["w"]["inner"]))


class OnlyArgument(Differentiates):
    def loss(self, learner, part):
        return loss_of(part["w"]["inner"], part["w"]["inner"])


class OnlyLearner(Differentiates):
    def loss(self, learner, part):
        return loss_of(learner.params["w"]["inner"], learner.params["w"]["inner"])


class OtherPart(Differentiates):
    wrt = "params.w"

    def loss(self, learner, part):
        return loss_of(part["inner"], learner.params["constant"])


def trained(phase, *callbacks):
    learner = fluxcb.Learner.from_loss(
        {"w": {"inner": np.float32(START)}, "constant": np.float32(START)},
        None,
        {"w": optax.sgd(RATE), "constant": optax.set_to_zero()},
        data=[np.float32(1)],
        phases=(phase,),
        callbacks=callbacks,
        default_callbacks=False,
    )
    learner.fit(1)
    return float(learner.params["w"]["inner"])


@pytest.mark.parametrize("phase", [ReadsInside(), ReadsPartInside()])
def test_gradient_through_argument_and_learner_is_a_warning(phase):
    with pytest.warns(UserWarning, match="differentiates a function") as caught:
        assert trained(phase) == pytest.approx(START - RATE * FULL)
    assert [str(warning.message) for warning in caught] == [
        f"`{type(phase).__name__}.step` differentiates a function that uses its argument and also reads "
        "`learner.params`. Inside the function, `learner.params` has the differentiated values, so the gradient flows "
        "through both. Read `learner.params` before `learner.grad` if these values are constants, such as those of a "
        "target. Otherwise, use only the argument."
    ]


@pytest.mark.parametrize(
    ("phase", "gradient"),
    [
        (ReadsBefore(), SEMI),
        (Stops(), SEMI),
        (OtherPart(), SEMI),
        (OnlyArgument(), FULL),
        (OnlyLearner(), FULL),
    ],
)
def test_gradient_through_one_of_them_is_no_warning(phase, gradient):
    assert trained(phase) == pytest.approx(START - RATE * gradient)


class WeightDecay(Callback):
    def stateaccess(self):
        return {"params": Read(), "step": {"loss": Write()}}

    @on(BackwardBegin, Phase)
    def decay(self, event, phase, learner):
        learner.step.loss = learner.step.loss + learner.params["w"]["inner"] ** 2


def test_handler_that_reads_the_parameters_in_the_gradient_is_no_warning():
    expected = FULL + 2 * START
    assert trained(OnlyArgument(), WeightDecay()) == pytest.approx(START - RATE * expected)
