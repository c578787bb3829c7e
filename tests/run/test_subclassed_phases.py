"""Subclasses of the default phases in Learners whose loss function gets the batch."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import DeclarationError
from fluxcb.phases import LossTrainingPhase, LossValidationPhase, TrainingPhase, ValidationPhase

BATCHES = [np.ones(2, np.float32)]


class TestPhase(ValidationPhase):
    __test__ = False
    name = "test"


class OtherTraining(TrainingPhase):
    name = "other"


class Mended(LossValidationPhase):
    name = "test"


class MendedTraining(LossTrainingPhase):
    name = "other"


def learner_of(*phases):
    return fluxcb.Learner.from_loss(
        {"w": jnp.ones(())},
        lambda params, batch: jnp.mean((params["w"] - batch - 1) ** 2),
        optax.sgd(0.5),
        data={type(phase).name: BATCHES for phase in phases},
        phases=phases,
        default_callbacks=False,
    )


@pytest.mark.parametrize(
    ("phase", "base", "instead"),
    [
        (TestPhase(), "ValidationPhase", "class TestPhase(fluxcb.phases.LossValidationPhase):"),
        (OtherTraining(), "TrainingPhase", "class OtherTraining(fluxcb.phases.LossTrainingPhase):"),
    ],
)
def test_inherited_step_of_outputs_is_an_error(phase, base, instead):
    name = type(phase).__name__
    with pytest.raises(DeclarationError, match=rf"`{name}` inherits the step of `{base}`, which calls") as raised:
        learner_of(TrainingPhase(), phase)
    assert list(raised.value.fix) == [f"derive it from the phase for such loss functions: `{instead}`"]


def test_suggested_bases_work():
    learner = learner_of(MendedTraining(), Mended())
    learner.fit(1)
    assert learner.params["w"] == 2  # 1 - 0.5 * 2 * (1 - 2)


def test_same_phases_with_a_loss_of_outputs():
    learner = fluxcb.Learner(
        (lambda key, xs: {"w": jnp.ones(())}, lambda params, xs: params["w"] * xs),
        lambda outputs, ys: jnp.mean((outputs - ys) ** 2),
        optax.sgd(0.5),
        data={"training": [(BATCHES[0], BATCHES[0])], "test": [(BATCHES[0], BATCHES[0])]},
        phases=(TrainingPhase(), TestPhase()),
        default_callbacks=False,
    )
    learner.fit(1)
    assert learner.step == 1
