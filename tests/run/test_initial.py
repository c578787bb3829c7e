"""The initial train state is computed by one program, is held once, and does not share arrays with the user."""

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fluxcb import Learner

BATCH = np.ones((4, 300), np.float32), np.zeros((4, 1), np.float32)


def learner(init, optimizer=None):
    return Learner(
        (init, lambda params, xs: xs @ params["w"]),
        lambda outputs, ys: jnp.mean((outputs - ys) ** 2),
        optimizer or optax.adam(0.1),
        data=[BATCH],
        default_callbacks=False,
    )


def test_arrays_of_init_are_not_copied(monkeypatch):
    def refuse(tree):
        raise AssertionError

    for module in ("initial_state", "arguments"):
        monkeypatch.setattr(f"fluxcb._run.{module}.own_copy", refuse)
    made = learner(lambda key, xs: {"w": jax.random.normal(key, (300, 1))})
    made.fit(2)
    assert made.step == 2


def test_init_is_traced_once():
    seen = []

    def init(key, xs):
        seen.append(isinstance(key, jax.core.Tracer))
        return {"w": jnp.zeros((300, 1))}

    learner(init)
    assert seen == [True]


def test_init_that_needs_values_is_not_traced():
    def init(key, xs):
        return {"w": np.full((300, 1), float(xs.sum()), np.float32)}

    np.testing.assert_array_equal(learner(init).params["w"], np.zeros((300, 1), np.float32))


def test_init_with_host_randomness_runs_once():
    generator, expected = np.random.default_rng(1), np.random.default_rng(1)
    made = learner(lambda key, xs: {"w": generator.normal(size=(300, 1)).astype(np.float32)})
    np.testing.assert_array_equal(made.params["w"], expected.normal(size=(300, 1)).astype(np.float32))


@pytest.mark.parametrize("shape", [(300, 1), (30_000, 1)])  # one that is copied on the host, and one that is not
def test_arrays_held_by_init_are_not_donated(shape):
    own = jnp.ones(shape)
    xs = np.ones((2, shape[0]), np.float32)
    made = Learner(
        (lambda key, xs: {"w": own}, lambda params, xs: xs @ params["w"]),
        lambda outputs, ys: jnp.mean(outputs),
        optax.sgd(1.0),
        data=[(xs, xs)],
        default_callbacks=False,
    )
    made.fit(2)
    np.testing.assert_array_equal(own, np.ones(shape, np.float32))
    np.testing.assert_array_equal(made.params["w"], np.full(shape, -1, np.float32))


def keeping_params():
    """Return an optimizer whose state holds the parameters themselves."""

    def update(updates, state, params=None):
        return jax.tree.map(lambda g: -g, updates), state

    return optax.GradientTransformation(lambda params: (params, params), update)


def test_optimizer_that_keeps_params_gets_copy():
    made = learner(lambda key, xs: {"w": jnp.zeros((300, 1))}, keeping_params())
    made.fit(2)
    first, second = (np.asarray(kept["w"]) for kept in made.state["opt_state"])
    np.testing.assert_array_equal(first, np.zeros((300, 1), np.float32))
    np.testing.assert_array_equal(second, first)
