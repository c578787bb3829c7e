"""`optax.contrib.schedule_free`, whose parameters for evaluation are not those that are trained."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import Learner
from fluxcb.callbacks import ParameterEMA

DATA = [np.full(2, i, np.float32) for i in range(5)]


def build(optimizer, *callbacks):
    return Learner.from_loss(
        {"w": jnp.zeros(())},
        lambda params, batch: jnp.mean((params["w"] - batch) ** 2),
        optimizer,
        data=(DATA, DATA),
        callbacks=callbacks,
    )


def by_hand(optimizer):
    """Return the parameters for evaluation after one pass, from a plain loop."""
    params = {"w": jnp.zeros(())}
    state = optimizer.init(params)
    for batch in DATA:
        grads = jax.grad(lambda params, batch: jnp.mean((params["w"] - batch) ** 2))(params, batch)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return state, params


FREE = optax.contrib.schedule_free(optax.sgd(0.1), learning_rate=0.1)
CHAIN = optax.chain(optax.clip(1.0), FREE)
INJECTED = fluxcb.inject(optax.contrib.schedule_free_sgd, learning_rate=0.1)


def evaluated(state, params):
    return optax.contrib.schedule_free_eval_params(state, params)


@pytest.mark.parametrize(
    ("optimizer", "where", "select"),
    [
        (FREE, "", lambda state: state),
        (CHAIN, "[1]", lambda state: state[1]),
        (INJECTED, ".inner_state", lambda state: state.inner_state),
    ],
)
def test_warning_names_the_call_that_gives_the_parameters_for_evaluation(optimizer, where, select):
    call = f"optax.contrib.schedule_free_eval_params(learner.opt_state{where}, learner.params)"
    with pytest.warns(UserWarning, match=f"(?s)schedule_free.*write `learner.params = {re.escape(call)}`"):
        learner = build(optimizer)
    learner.fit(1)
    state, params = by_hand(optimizer)
    assert learner.params["w"] == pytest.approx(params["w"])
    expected = evaluated(select(state), params)
    learner.params = evaluated(select(learner.opt_state), learner.params)
    assert learner.params["w"] == pytest.approx(expected["w"])
    assert expected["w"] != pytest.approx(params["w"])


def test_an_average_for_validation_and_other_optimizers_are_no_warning():
    build(FREE, ParameterEMA(0.9))
    build(optax.sgd(0.1))
