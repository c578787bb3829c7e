import copy
import io
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fluxcb._errors import DeclarationError
from fluxcb.models import equinox

KEY = jax.random.key(7)
XS = jax.random.normal(jax.random.key(1), (16, 5)) * 2 + 3


class Net(eqx.Module):
    first: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    second: eqx.nn.Linear

    def __init__(self, key):
        k1, k2 = jax.random.split(key)
        self.first = eqx.nn.Linear(5, 6, key=k1)
        self.dropout = eqx.nn.Dropout(0.5)
        self.second = eqx.nn.Linear(6, 2, key=k2)

    def __call__(self, x, *, key=None):
        return self.second(self.dropout(jax.nn.relu(self.first(x)), key=key))


class Normed(eqx.Module):
    linear: eqx.nn.Linear
    norm: eqx.nn.BatchNorm

    def __init__(self, key, axis_name="batch"):
        self.linear = eqx.nn.Linear(5, 3, key=key)
        self.norm = eqx.nn.BatchNorm(3, axis_name, momentum=0.9, mode="batch")

    def __call__(self, x, state):
        return self.norm(self.linear(x), state)


class Scaled(eqx.Module):
    weight: jax.Array
    shift: jax.Array
    activation: object = jnp.abs

    def __call__(self, x):
        return self.activation(x * self.weight) + self.shift


def test_batch_matches_loop_over_examples():
    net = Net(KEY)
    model = equinox(net)
    params, model_state = model.init(None, None)
    outputs, new_state = model.apply(params, model_state, XS, train=True, key=KEY)
    loop = [net(x, key=k) for x, k in zip(XS, jax.random.split(KEY, 16), strict=True)]
    np.testing.assert_allclose(outputs, np.stack(loop), rtol=1e-5, atol=1e-6)
    assert model_state == {}
    assert new_state == {}


def test_training_matches_vmap_bit_for_bit():
    net = Net(KEY)
    model = equinox(net)
    params, model_state = model.init(None, None)
    outputs, _ = model.apply(params, model_state, XS, train=True, key=KEY)
    direct = jax.vmap(lambda x, key: net(x, key=key))(XS, jax.random.split(KEY, 16))
    np.testing.assert_array_equal(outputs, direct)


def test_evaluation_uses_inference_mode_without_key():
    net = Net(KEY)
    model = equinox(net)
    params, model_state = model.init(None, None)
    outputs, _ = model.apply(params, model_state, XS, train=False, key=None)
    np.testing.assert_array_equal(outputs, jax.vmap(eqx.nn.inference_mode(net))(XS))


def test_params_are_inexact_arrays():
    model = equinox(Scaled(jnp.full(5, 2.0), jnp.arange(5)))
    params, model_state = model.init(None, None)
    assert [leaf.dtype for leaf in jax.tree.leaves(params)] == [jnp.float32]
    assert params.shift is None
    assert params.activation is None
    outputs, _ = model.apply(jax.tree.map(lambda w: -w, params), model_state, XS, train=True, key=None)
    np.testing.assert_array_equal(outputs, np.abs(XS * -2) + np.arange(5, dtype=np.float32))


def test_stateful_module_matches_equinox():
    module, state = eqx.nn.make_with_state(Normed)(KEY)
    model = equinox((module, state))
    params, model_state = model.init(None, None)
    outputs, new_state = model.apply(params, model_state, XS, train=True, key=None)
    direct, direct_state = jax.vmap(module, in_axes=(0, None), out_axes=(0, None), axis_name="batch")(XS, state)
    np.testing.assert_array_equal(outputs, direct)
    assert sorted(new_state) == ["Normed.norm.batch_counter", "Normed.norm.batch_state_index"]
    mean, variance = direct_state.get(module.norm.batch_state_index)
    np.testing.assert_array_equal(new_state["Normed.norm.batch_state_index"][0], mean)
    np.testing.assert_array_equal(new_state["Normed.norm.batch_state_index"][1], variance)


def test_running_mean_and_variance_match_formula():
    module, state = eqx.nn.make_with_state(Normed)(KEY)
    model = equinox((module, state))
    params, model_state = model.init(None, None)
    for _ in range(2):
        _, model_state = model.apply(params, model_state, XS, train=True, key=None)
    hidden = np.asarray(XS) @ np.asarray(module.linear.weight).T + np.asarray(module.linear.bias)
    mean, variance = model_state["Normed.norm.batch_state_index"]
    assert int(model_state["Normed.norm.batch_counter"]) == 2
    np.testing.assert_allclose(mean, 0.19 * hidden.mean(0), rtol=1e-5)
    np.testing.assert_allclose(variance, 0.9**2 + 0.19 * hidden.var(0), rtol=1e-4)


def test_state_can_be_reused_and_evaluation_keeps_it():
    model = equinox(eqx.nn.make_with_state(Normed)(KEY))
    params, model_state = model.init(None, None)
    first, trained = model.apply(params, model_state, XS, train=True, key=None)
    again, _ = model.apply(params, model_state, XS, train=True, key=None)
    np.testing.assert_array_equal(first, again)
    _, after = model.apply(params, trained, XS, train=False, key=None)
    assert after is trained


def test_mapped_axis_can_be_renamed():
    model = equinox(eqx.nn.make_with_state(Normed)(KEY, axis_name="examples"), axis_name="examples")
    params, model_state = model.init(None, None)
    outputs, _ = model.apply(params, model_state, XS, train=True, key=None)
    np.testing.assert_allclose(np.mean(outputs, 0), np.zeros(3), atol=1e-5)


def test_without_vmap_module_gets_whole_batch_and_key():
    class Whole(eqx.Module):
        def __call__(self, xs, *, key):
            return xs + jax.random.normal(key, xs.shape)

    outputs, _ = equinox(Whole(), vmap=False).apply(Whole(), {}, XS, train=True, key=KEY)
    np.testing.assert_array_equal(outputs, XS + jax.random.normal(KEY, XS.shape))


def test_without_vmap_state_can_be_reused():
    class Counting(eqx.Module):
        count: eqx.nn.StateIndex

        def __init__(self):
            self.count = eqx.nn.StateIndex(jnp.array(0))

        def __call__(self, xs, state):
            return xs, state.set(self.count, state.get(self.count) + 1)

    model = equinox(eqx.nn.make_with_state(Counting)(), vmap=False)
    params, model_state = model.init(None, None)
    for _ in range(2):
        _, trained = model.apply(params, model_state, XS, train=True, key=None)
        assert [int(count) for count in trained.values()] == [1]


def test_inputs_may_be_pytree():
    class Sum(eqx.Module):
        def __call__(self, x):
            return x["a"] + x["b"].sum()

    outputs, _ = equinox(Sum()).apply(Sum(), {}, {"a": XS[:, 0], "b": XS}, train=True, key=None)
    np.testing.assert_allclose(outputs, XS[:, 0] + XS.sum(1), rtol=1e-6)


def test_rebuilt_module_has_user_type():
    net = Net(KEY)
    model = equinox(net)
    params, model_state = model.init(None, None)
    rebuilt = model.rebuild(jax.tree.map(lambda x: x + 1, params), model_state)
    assert isinstance(rebuilt, Net)
    assert rebuilt.dropout.inference
    np.testing.assert_array_equal(rebuilt.first.weight, net.first.weight + 1)


def test_rebuilt_stateful_module_includes_state():
    model = equinox(eqx.nn.make_with_state(Normed)(KEY))
    params, model_state = model.init(None, None)
    _, trained = model.apply(params, model_state, XS, train=True, key=None)
    module, state = model.rebuild(params, trained)
    assert int(state.get(module.norm.batch_counter)) == 1
    evaluated, _ = jax.vmap(eqx.nn.inference_mode(module), in_axes=(0, None), out_axes=(0, None), axis_name="batch")(
        XS, state
    )
    np.testing.assert_array_equal(evaluated, model.apply(params, trained, XS, train=False, key=None)[0])


def test_state_without_make_with_state():
    module = Normed(KEY)
    model = equinox((module, eqx.nn.State(module)))
    params, model_state = model.init(None, None)
    _, trained = model.apply(params, model_state, XS, train=True, key=None)
    assert sorted(trained) == ["0", "1"]


def test_stateful_module_without_state_raises():
    module, _ = eqx.nn.make_with_state(Normed)(KEY)
    with pytest.raises(DeclarationError) as caught:
        equinox(module)
    assert str(caught.value) == (
        "The Equinox module `Normed` has layers that keep state, but no state was given.\n"
        f"  where: {__name__}.Normed\n"
        "  why:   their running values live outside the module, in an `eqx.nn.State`\n"
        "  fix:   pass `(module, state)` as `eqx.nn.make_with_state(make_module)(...)` returns it"
    )


class Silent(eqx.Module):
    weight: jax.Array


def test_module_without_call_raises():
    with pytest.raises(DeclarationError) as caught:
        equinox(Silent(jnp.ones(2)))
    assert str(caught.value) == (
        "The Equinox module `Silent` has no `__call__`.\n"
        f"  where: {__name__}.Silent\n"
        "  why:   the step calls the model as `module(x)`\n"
        "  fix:   give it a `__call__` that takes one example"
    )


class Frozen(eqx.Module):
    """A module with an active dropout layer, and one that its author has disabled."""

    on: eqx.nn.Dropout
    off: eqx.nn.Dropout

    def __init__(self):
        self.on, self.off = eqx.nn.Dropout(0.5), eqx.nn.Dropout(0.5, inference=True)

    def __call__(self, x, *, key):
        return self.on(x, key=key), self.off(x, key=key)


def changed_copy(module):
    return eqx.tree_at(lambda m: m.on.p, module, 0.5)


@pytest.mark.parametrize("way", [lambda m: m, changed_copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_rebuilt_module_freezes_only_layers_built_in_inference_mode(way):
    first = equinox(Frozen())
    rebuilt = first.rebuild(*first.init(None, None))
    assert [bool(layer.inference) for layer in (rebuilt.on, rebuilt.off)] == [True, True]
    again = equinox(way(rebuilt))
    (on, off), _ = again.apply(*again.init(None, None), XS, train=True, key=KEY)
    expected = [eqx.nn.Dropout(0.5)(x, key=key) for x, key in zip(XS, jax.random.split(KEY, 16), strict=True)]
    np.testing.assert_array_equal(on, np.stack(expected))
    np.testing.assert_array_equal(off, XS)


def by_filter_jit(module):
    return eqx.filter_jit(lambda m, xs: jax.vmap(lambda x: m(x, key=KEY))(xs))(module, XS)


def by_filter_vmap(module):
    return eqx.filter_vmap(lambda m, x: m(x, key=KEY), in_axes=(None, 0))(module, XS)


def by_partition(module):
    arrays, rest = eqx.partition(module, eqx.is_array)
    return jax.jit(lambda arrays: jax.vmap(lambda x: eqx.combine(arrays, rest)(x, key=KEY))(XS))(arrays)


def read_from_a_file(module):
    eqx.tree_serialise_leaves(file := io.BytesIO(), module)
    file.seek(0)
    return eqx.tree_deserialise_leaves(file, module)(XS, key=KEY)


@pytest.mark.parametrize("call", [by_filter_jit, by_filter_vmap, by_partition, read_from_a_file])
def test_rebuilt_module_acts_as_in_inference_mode(call):
    first = equinox(Frozen())
    for module in (first.rebuild(*first.init(None, None)), eqx.nn.inference_mode(Frozen())):
        for output in call(module):
            np.testing.assert_array_equal(output, XS)


def test_module_in_inference_mode_stays_frozen():
    model = equinox(eqx.nn.inference_mode(Frozen()))
    (on, _), _ = model.apply(*model.init(None, None), XS, train=True, key=KEY)
    np.testing.assert_array_equal(on, XS)


def test_rebuilt_module_trains_in_hand_written_loop():
    first = equinox(Frozen())
    rebuilt = eqx.nn.inference_mode(first.rebuild(*first.init(None, None)), False)
    assert [layer.inference for layer in (rebuilt.on, rebuilt.off)] == [False, False]
    one = eqx.filter_jit(lambda m, x: m(x, key=KEY)[0])(rebuilt, XS[0])
    np.testing.assert_array_equal(one, eqx.nn.Dropout(0.5)(XS[0], key=KEY))


class WithFlag(eqx.Module):
    layer: eqx.nn.Linear
    dropout: eqx.nn.Dropout

    def __init__(self):
        self.layer = eqx.nn.Linear(5, 2, key=KEY)
        self.dropout = eqx.nn.Dropout(0.5)

    def __call__(self, x, *, key=None, inference=True):
        return self.layer(self.dropout(x, key=key, inference=inference))


class WithoutFlag(WithFlag):
    def __call__(self, x, *, key=None):
        return self.layer(self.dropout(x, key=key))


def test_flag_of_the_call_is_a_warning_whose_fix_works():
    model = equinox(WithFlag())
    params, state = model.init(None, None)
    with pytest.warns(UserWarning, match="always True") as caught:
        model.apply(params, state, XS, train=True, key=KEY)
    assert [str(warning.message) for warning in caught] == [
        "The parameter `inference` of `WithFlag.__call__` is always True, in training and in evaluation. Remove it: "
        "fluxcb sets the `inference` attributes of the layers with `eqx.nn.inference_mode`."
    ]
    model = equinox(WithoutFlag())
    params, state = model.init(None, None)
    trained, _ = model.apply(params, state, XS, train=True, key=KEY)
    evaluated, _ = model.apply(params, state, XS, train=False, key=KEY)
    assert not np.allclose(trained, evaluated)
