"""Suggested fixes that copy the parameters of a model also copy the model state that belongs to them."""

import flax.linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import AccessError, ResumeError
from fluxcb.callbacks import Checkpointer
from fluxcb.checkpoints import load_model_state, load_params
from fluxcb.testing import testlearner

XS = np.linspace(-1, 1, 16, dtype=np.float32)[:, None]


class Normalized(flax.linen.Module):
    @flax.linen.compact
    def __call__(self, xs, train=False):
        return flax.linen.Dense(1)(flax.linen.BatchNorm(use_running_average=not train)(flax.linen.Dense(8)(xs)))


def learner_of(optimizer, *callbacks):
    return fluxcb.Learner(
        Normalized(),
        lambda outputs, ys: jnp.mean((outputs - ys) ** 2),
        optimizer,
        data=[(XS + 2, 3 * XS)] * 5,
        callbacks=callbacks,
        default_callbacks=False,
    )


@pytest.mark.parametrize("name", ["optimizer", "loss_fn"])
def test_another_optimizer_or_loss_keeps_the_model(name):
    learner = learner_of(optax.adam(0.1))
    learner.fit(1)
    with pytest.raises(AccessError, match="cannot be assigned") as raised:
        setattr(learner, name, optax.sgd(0.1))
    fix = (
        "build a new Learner with it, and then assign the parameters: `new.params = learner.params`, and "
        "`new.model_state = learner.model_state`"
    )
    assert raised.value.fix[0].startswith(fix)
    new = learner_of(optax.sgd(0.1))
    new.params = learner.params
    new.model_state = learner.model_state
    np.testing.assert_array_equal(new.predict(XS), learner.predict(XS))


def test_models_without_state_need_the_parameters_only():
    with pytest.raises(AccessError, match="cannot be assigned") as raised:
        testlearner().loss_fn = None
    assert list(raised.value.fix) == [
        "build a new Learner with it, and then assign the parameters: `new.params = learner.params`"
    ]


def test_checkpoint_of_another_run_names_the_model_state(tmp_path):
    learner = learner_of(optax.adam(0.1), Checkpointer(tmp_path))
    learner.fit(1)
    with pytest.raises(ResumeError) as raised:
        learner_of(optax.sgd(0.1), Checkpointer(tmp_path)).fit(2, resume=True)
    path = str(tmp_path / "5")
    assert raised.value.fix[-1] == (
        f"load only the parameters: `fluxcb.checkpoints.load_params({path!r})`, and the model state that belongs to "
        f"them: `fluxcb.checkpoints.load_model_state({path!r})`"
    )
    new = learner_of(optax.sgd(0.1))
    new.params, new.model_state = load_params(path), load_model_state(path)
    np.testing.assert_array_equal(new.predict(XS), learner.predict(XS))
    jax.tree.map(np.testing.assert_array_equal, new.model_state, learner.model_state)
