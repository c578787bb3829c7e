"""LossSpikeGuard against an implementation of its rule in NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import DeclarationError
from fluxcb.callbacks import LossSpikeGuard


def trained(losses, guard, **options):
    """Train with the given losses, which do not depend on the parameter. Each applied update subtracts 1 from it."""
    learner = fluxcb.Learner.from_loss(
        {"w": jnp.float32(0.0)},
        lambda params, batch, key: batch + params["w"] - jax.lax.stop_gradient(params["w"]),
        optax.sgd(1.0),
        data=[jnp.float32(x) for x in losses],
        callbacks=[guard],
        default_callbacks=False,
        **options,
    )
    learner.fit(1)
    return learner


def spikes_of(losses, threshold, window):
    """Return whether each loss is a spike, according to the formula in the docstring."""
    found, recent = [], []
    for loss in np.asarray(losses, np.float32):
        spike = bool(np.isnan(loss))
        if len(recent) == window:
            median = np.median(recent)
            deviation = 1.4826 * np.median(np.abs(recent - median))
            spike = spike or bool(deviation > 0 and loss > median + threshold * deviation)
        found.append(spike)
        if np.isfinite(loss):
            recent = [*recent, loss][-window:]
    return found


@pytest.mark.parametrize("steps_per_call", [1, 7, "auto"])
@pytest.mark.parametrize(("threshold", "window"), [(3.0, 5), (4.0, 8)])
def test_steps_are_skipped_according_to_the_rule(steps_per_call, threshold, window):
    rng = np.random.default_rng(window)
    losses = rng.normal(5, 0.2, 80) - np.linspace(0, 3, 80)
    losses[rng.choice(80, 8, replace=False)] += 20
    losses[[2, 40]] = np.nan
    losses[[50, 51]] = np.inf
    learner = trained(losses, LossSpikeGuard(threshold, window=window), steps_per_call=steps_per_call)
    expected = spikes_of(losses, threshold, window)
    assert 5 < sum(expected) < 30
    assert learner.cbstate["loss_spikes"]["skipped"] == sum(expected)
    assert learner.params["w"] == -(80 - sum(expected))
    assert learner.cbstate["loss_spikes"]["seen"] == 76


def test_a_high_loss_becomes_normal_after_half_a_window():
    losses = [1.0, 1.1, 0.9, 1.05, 0.95] * 2 + [9.0, 9.1, 8.9, 9.05, 8.95] * 3
    learner = trained(losses, LossSpikeGuard(6.0, window=5))
    assert learner.cbstate["loss_spikes"]["skipped"] == sum(spikes_of(losses, 6.0, 5)) == 3


def test_there_are_no_spikes_if_most_losses_are_equal():
    learner = trained([1.0] * 10 + [1.001, 50.0], LossSpikeGuard(6.0, window=5))
    assert learner.cbstate["loss_spikes"]["skipped"] == 0


def test_arguments_must_be_numbers():
    """A schedule, or a traced value, is refused when the callback is made."""
    schedule = optax.constant_schedule(5)

    def refused(value, **arguments):
        with pytest.raises(DeclarationError) as caught:
            LossSpikeGuard(**arguments)
        (name,) = arguments
        what, fix = {
            "threshold": ("`threshold` of LossSpikeGuard must be a number above 0", "give a finite number above 0"),
            "window": (
                "`window` of LossSpikeGuard (steps) must be a whole number of at least 3",
                "give a whole number of at least 3",
            ),
        }[name]
        assert (caught.value.what, caught.value.fix) == (f"{what}, not {value!r}.", (fix,))

    def traced(value):
        refused(value, threshold=value)
        refused(value, window=value)
        return value

    refused(schedule, threshold=schedule)
    refused(schedule, window=schedule)
    jax.jit(traced)(5)
    LossSpikeGuard(threshold=5, window=5)
