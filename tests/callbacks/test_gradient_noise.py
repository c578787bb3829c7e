"""GradientNoise: its variance, and its independence between steps and leaves."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import DeclarationError, Read
from fluxcb.callbacks import ClipGradients, CustomCallback, GradientNoise
from fluxcb.events import StepEnd

SIZE = 40_000


def noise_of(*callbacks, key=0, steps=4):
    """Train with a gradient of 0 and a rate of 1; return the noise of each step, float64[steps, 2, SIZE]."""
    seen = []
    keep = CustomCallback(
        lambda learner: seen.append([np.array(learner.step.grads[n], np.float64) for n in "ab"]),
        StepEnd,
        access={"step": {"grads": Read()}},
    )
    learner = fluxcb.Learner.from_loss(
        {"a": jnp.zeros(SIZE), "b": jnp.zeros(SIZE)},
        lambda params, batch, key: 0.0 * (params["a"].sum() + params["b"].sum()) * batch,
        optax.sgd(0.0),
        data=[jnp.float32(1)] * steps,
        callbacks=[*callbacks, keep],
        default_callbacks=False,
        key=key,
    )
    learner.fit(1)
    return np.array(seen)


def test_the_variance_follows_the_formula():
    noise = noise_of(GradientNoise(0.3))
    expected = 0.3 / (1 + np.arange(4)) ** 0.55
    # The standard error of a variance of n normal numbers is sqrt(2 / n), 0.7 percent here.
    np.testing.assert_allclose(noise.var(axis=-1), np.stack([expected] * 2, axis=1), rtol=0.04)
    assert np.all(np.abs(noise.mean(axis=-1)) < 5 * np.sqrt(expected[:, None] / SIZE))


def test_noise_differs_by_step_and_leaf_and_depends_on_the_key():
    noise = noise_of(GradientNoise(1.0, gamma=0))
    correlations = np.corrcoef(noise.reshape(8, SIZE)) - np.eye(8)
    assert np.abs(correlations).max() < 5 / np.sqrt(SIZE)
    np.testing.assert_array_equal(noise, noise_of(GradientNoise(1.0, gamma=0)))
    assert not np.array_equal(noise, noise_of(GradientNoise(1.0, gamma=0), key=1))


def test_noise_is_not_clipped():
    both = noise_of(GradientNoise(0.3), ClipGradients(1e-3))
    np.testing.assert_array_equal(both, noise_of(GradientNoise(0.3)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0,), "`eta` of GradientNoise must be a number above 0, not 0.\n  fix:   give a finite number above 0"),
        (
            ("0.3",),
            "`eta` of GradientNoise must be a number above 0, not '0.3'.\n  fix:   give a finite number above 0",
        ),
        (
            (float("nan"),),
            "`eta` of GradientNoise must be a number above 0, not nan.\n  fix:   give a finite number above 0",
        ),
        (
            (0.3, -1),
            "`gamma` of GradientNoise must be a number of at least 0, not -1.\n"
            "  fix:   give a finite number of at least 0",
        ),
        (
            (0.3, float("inf")),
            "`gamma` of GradientNoise must be a number of at least 0, not inf.\n"
            "  fix:   give a finite number of at least 0",
        ),
    ],
)
def test_bad_arguments(arguments, message, refused):
    with refused(DeclarationError, message):
        GradientNoise(*arguments)
