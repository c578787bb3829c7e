"""Data sources that read the Learner, whose batches are read many steps before they are used."""

import re

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import DeclarationError
from fluxcb.phases import TrainingPhase


def learner(batches):
    """Return a Learner whose parameter is the number of finished steps, and whose data is `batches(learner)`."""
    made = fluxcb.Learner.from_loss(
        {"w": jnp.zeros(())},
        lambda params, batch: -params["w"] + 0 * jnp.sum(batch),
        optax.sgd(1.0),
        data=lambda: batches(made),
        example_batch=np.zeros(1, np.float32),
        default_callbacks=False,
    )
    return made


@pytest.mark.parametrize("name", ["params", "opt_state", "model_state", "state"])
def test_reading_the_train_state_after_the_first_batch_is_an_error(name, refused):
    def batches(of):
        for _ in range(3):
            getattr(of, name)
            yield np.zeros(1, np.float32)

    text = (
        f"A data source reads `learner.{name}` after the first batch of a pass.\n"
        "  why:   batches are read many steps before they are used, and how many depends on the time that they take\n"
        "  fix:   read it at EpochBegin, in a handler, or in the source before its first batch\n"
        "     or: write the loop yourself, and pass each batch to `learner.run_step(phase, batch)`"
    )
    with refused(DeclarationError, text):
        learner(batches).fit(1)


def test_reading_before_the_first_batch_and_in_a_loop_of_ones_own_is_exact():
    seen = []

    def batches(of):
        seen.append(float(of.params["w"]))
        for _ in range(5):
            yield np.zeros(1, np.float32)

    trained = learner(batches)
    trained.fit(3)
    assert seen == [0, 5, 10]
    seen = []
    for _ in range(4):
        seen.append(float(trained.params["w"]))
        trained.run_step(TrainingPhase(), np.zeros(1, np.float32))
    assert seen == [15, 16, 17, 18]


def test_reading_the_step_after_the_first_batch_is_a_warning():
    def batches(of):
        for _ in range(3):
            assert of.step < 3
            yield np.zeros(1, np.float32)

    text = (
        "A data source reads `learner.step` after the first batch of a pass. Batches are read many steps before they "
        "are used, so the number is too low, by an amount that depends on timing. Count the batches in the source."
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(text)}$"):
        learner(batches).fit(1)
