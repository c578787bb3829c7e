"""Settings of JAX for debugging that compiled steps do not support."""

import jax
import numpy as np
import pytest

from fluxcb import DeclarationError
from fluxcb.callbacks import CheckNumerics
from fluxcb.testing import testlearner


def test_disable_jit_is_explained_and_the_fix_works():
    learner = testlearner()
    with jax.disable_jit():
        with pytest.raises(DeclarationError) as caught:
            learner.fit(1)
        assert str(caught.value) == (
            "`jax_disable_jit` is on, but fluxcb runs only compiled steps.\n"
            "  why:   the step is traced once, and its program also runs the traced handlers\n"
            "  fix:   call `fit` under `with jax.disable_jit(False):`, and print values in the step with "
            "`jax.debug.print`"
        )
        with jax.disable_jit(False):
            learner.fit(1)
    assert learner.step == 4


def test_disallowed_transfer_of_a_batch_is_explained_and_the_fix_works():
    learner = testlearner()
    with jax.transfer_guard("disallow"):
        with pytest.raises(jax.errors.JaxRuntimeError, match="Disallowed host-to-device transfer") as caught:
            learner.fit(1)
        assert caught.value.__notes__[0] == (
            "call `fit` under `with jax.transfer_guard_host_to_device('allow'):`, because its calls transfer batches"
        )
        with jax.transfer_guard_host_to_device("allow"):
            learner.fit(1)
    assert learner.step == 4


@pytest.mark.parametrize("steps_per_call", [1, 2])
def test_a_nan_that_debug_nans_finds_is_explained_and_the_fix_works(steps_per_call):
    def learner(*callbacks):
        learner = testlearner(*callbacks, steps_per_call=steps_per_call)
        learner.params = jax.tree.map(lambda leaf: np.full(leaf.shape, np.nan, leaf.dtype), learner.params)
        return learner

    with jax.debug_nans(True), pytest.raises(FloatingPointError) as caught:
        learner().fit(1)
    assert str(caught.value) == (
        "`jax_debug_nans` or `jax_debug_infs` found nan in a result of the compiled step.\n"
        "  fix:   to find the gradient or parameter, turn this setting of JAX off, and add "
        "`fluxcb.callbacks.CheckNumerics()`"
    )
    with pytest.raises(FloatingPointError, match="not finite at step 1: "):
        learner(CheckNumerics()).fit(1)
