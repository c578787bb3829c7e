"""What the engine requires of every model adapter."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

from fluxcb.models import adapt

KEY = jax.random.key(7)
XS = jax.random.normal(jax.random.key(1), (8, 5))


class NNXNet(flax_nnx.Module):
    def __init__(self, rngs):
        self.linear = flax_nnx.Linear(5, 4, rngs=rngs)
        self.norm = flax_nnx.BatchNorm(4, rngs=rngs)
        self.dropout = flax_nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.linear(x)))


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(4)(x))
        return nn.Dropout(0.5, deterministic=not train)(x)


class EquinoxNet(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout

    def __init__(self, key):
        self.linear = eqx.nn.Linear(5, 4, key=key)
        self.norm = eqx.nn.BatchNorm(4, "batch", mode="batch")
        self.dropout = eqx.nn.Dropout(0.5)

    def __call__(self, x, state, *, key=None):
        x, state = self.norm(self.linear(x), state)
        return self.dropout(x, key=key), state


def pair_init(key, xs):
    return {"w": jax.random.normal(key, (5, 4))}


def pair_apply(params, xs, *, key, train):
    hidden = xs @ params["w"]
    return hidden * jax.random.bernoulli(key, 0.5, hidden.shape) if train else hidden


MODELS = {
    "nnx": lambda: NNXNet(flax_nnx.Rngs(0)),
    "linen": LinenNet,
    "equinox": lambda: eqx.nn.make_with_state(EquinoxNet)(jax.random.key(0)),
    "pair": lambda: (pair_init, pair_apply),
}


@pytest.fixture(params=list(MODELS))
def adapter(request):
    return adapt(MODELS[request.param]())


def assert_equal(left, right):
    assert jax.tree.structure(left) == jax.tree.structure(right)
    jax.tree.map(np.testing.assert_array_equal, left, right)


def test_carry_consists_of_arrays(adapter):
    params, model_state = adapter.init(KEY, XS)
    leaves = jax.tree.leaves((params, model_state))
    assert leaves
    assert all(isinstance(leaf, jax.Array) for leaf in leaves)


def test_step_keeps_structure_shapes_and_dtypes(adapter):
    params, model_state = adapter.init(KEY, XS)
    _, new_state = adapter.apply(params, model_state, XS, train=True, key=KEY)
    assert jax.tree.structure(new_state) == jax.tree.structure(model_state)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), new_state) == jax.tree.map(
        lambda x: (x.shape, x.dtype), model_state
    )


def test_key_affects_training_but_not_evaluation(adapter):
    params, model_state = adapter.init(KEY, XS)

    def run(key, train):
        return np.asarray(adapter.apply(params, model_state, XS, train=train, key=key)[0])

    np.testing.assert_array_equal(run(KEY, True), run(KEY, True))
    assert not np.array_equal(run(KEY, True), run(jax.random.key(8), True))
    np.testing.assert_array_equal(run(KEY, False), run(None, False))


def test_one_scan_matches_two_scans(adapter):
    def step(carry, key):
        params, model_state = carry

        def loss(params):
            outputs, new_state = adapter.apply(params, model_state, XS, train=True, key=key)
            return jnp.mean((outputs - 1) ** 2), new_state

        (value, model_state), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return (jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), model_state), value

    run = jax.jit(lambda carry, keys: jax.lax.scan(step, carry, keys))
    carry = adapter.init(KEY, XS)
    keys = jax.random.split(KEY, 4)
    fused, losses = run(carry, keys)
    halfway, first = run(carry, keys[:2])
    unfused, second = run(halfway, keys[2:])
    assert_equal(fused, unfused)
    np.testing.assert_array_equal(losses, np.concatenate([first, second]))
    assert len(set(np.asarray(losses).tolist())) == 4


def test_donating_carry_does_not_affect_adapter(adapter):
    copied = jax.tree.map(jnp.copy, adapter.init(KEY, XS))
    step = jax.jit(lambda carry: (carry[0], adapter.apply(*carry, XS, train=True, key=KEY)[1]), donate_argnums=0)
    step(copied)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(copied[0]))
    params, model_state = adapter.init(KEY, XS)
    outputs, _ = adapter.apply(params, model_state, XS, train=False, key=None)
    assert np.isfinite(outputs).all()


@pytest.mark.parametrize("times", [1, 2])
def test_rebuilt_model_has_arrays_and_can_be_trained_further(adapter, times):
    params, model_state = adapter.init(KEY, XS)
    _, trained = adapter.apply(params, model_state, XS, train=True, key=KEY)
    again = adapter
    for _ in range(times):
        again = adapt(again.rebuild(params, trained))
    assert_equal(again.init(jax.random.key(8), XS), (params, trained))
    assert_equal(again.held, (params, trained))
    assert_equal(
        again.apply(params, trained, XS, train=True, key=KEY), adapter.apply(params, trained, XS, train=True, key=KEY)
    )


# How a rebuilt model is called, without setting a mode; an Equinox model takes one example.
CALLS = {
    "nnx": lambda model, xs: model(xs),
    "linen": lambda model, xs: model(xs, train=False),
    "equinox": lambda model, xs: jax.vmap(model[0], in_axes=(0, None), out_axes=(0, None))(xs, model[1])[0],
    "pair": lambda model, xs: model(xs),
}


@pytest.mark.parametrize("kind", list(MODELS))
def test_rebuilt_model_is_ready_for_inference(kind):
    adapter = adapt(MODELS[kind]())
    params, model_state = adapter.init(KEY, XS)
    _, trained = adapter.apply(params, model_state, XS, train=True, key=KEY)
    model = adapter.rebuild(params, trained)
    expected, _ = adapter.apply(params, trained, XS, train=False, key=None)
    for _ in range(2):  # neither random nor changed by a call
        np.testing.assert_allclose(CALLS[kind](model, XS), expected, rtol=1e-5, atol=1e-6)
    parts = [CALLS[kind](model, XS[:3]), CALLS[kind](model, XS[3:])]  # each example by itself
    np.testing.assert_allclose(np.concatenate(parts), expected, rtol=1e-5, atol=1e-6)
