"""What a Learner begins with: the run's key, the parameters, the optimizer's state, and what making them costs."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fluxcb import Learner
from fluxcb._compile.arrays import copy_tree, is_key, own_copy
from fluxcb._run.given import as_key
from fluxcb.callbacks import Metrics


@pytest.mark.parametrize("seed", [0, 1, -1, 2**31, 2**32 + 7, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_a_seed_is_the_key_that_jax_makes_of_it(seed, impl):
    with jax.default_prng_impl(impl):
        key, expected = as_key(seed), jax.random.key(seed)
    assert key.dtype == expected.dtype
    assert jax.random.key_data(key).tolist() == jax.random.key_data(expected).tolist()


def test_a_seed_of_64_bits_where_jax_has_them():
    with jax.enable_x64(True):
        assert jax.random.key_data(as_key(2**40 + 3)).tolist() == [2**8, 3]


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_a_model_begins_with_a_key_of_its_own(impl):
    def given(seed):
        keys = []
        with jax.default_prng_impl(impl):
            model = (lambda key, xs: keys.append(key) or {"w": jnp.ones(3)}, lambda params, xs: xs @ params["w"])
            example = np.ones((2, 3), np.float32), np.ones(2, np.float32)
            Learner(model, lambda out, ys: jnp.mean(out), optax.sgd(0.1), key=as_key(seed), example_batch=example)
            return keys[0].dtype, jax.random.key_data(keys[0]).tolist(), as_key(seed)

    (dtype, words, key), again, other = given(3), given(3), given(4)
    assert dtype == again[0] == key.dtype
    assert words == again[1] != other[1]
    # None of those that steps and handlers are given: they are folded from the run's own, by numbers of 32 bits.
    taken = [key, *(jax.random.fold_in(key, number) for number in range(1000))]
    assert words not in [jax.random.key_data(one).tolist() for one in taken]


def held_by(tree):
    """Return what a tree holds: its structure, and each leaf's dtype, weakness, place and bytes."""
    leaves, structure = jax.tree.flatten(jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, tree))
    return structure, [(x.dtype, x.weak_type, x.sharding, np.asarray(x).tobytes()) for x in leaves]


TREES = {
    "arrays": {"w": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4), "double": np.ones(2), "number": 0.5},
    "on the device": {"w": jnp.ones((3, 4), jnp.bfloat16), "weak": jnp.asarray(2.0), "n": jnp.asarray(3, jnp.int8)},
    "keys": {"one": jax.random.key(3), "some": jax.random.split(jax.random.key(3), 4)},
    "committed": jax.device_put({"w": np.ones(3, np.float32)}, jax.devices()[0]),
    "nothing": {},
}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES)
def test_a_copy_is_what_jax_copies(tree):
    assert held_by(own_copy(tree)) == held_by(copy_tree(tree))


def test_a_copy_refuses_what_jax_refuses():
    with pytest.raises(TypeError):
        own_copy({"w": np.arange(3, dtype=">f4")})
    with pytest.raises(TypeError):
        own_copy({"w": np.array(["a"])})


def test_nobody_else_holds_a_copy():
    for tree in TREES.values():
        given = jax.tree.map(lambda x: x if is_key(x) else jnp.asarray(x), tree)
        leaves = [x for x in jax.tree.leaves((given, own_copy(given), own_copy(given))) if not is_key(x)]
        assert len({x.unsafe_buffer_pointer() for x in leaves}) == len(leaves)
    array = np.zeros(1024, np.float32)
    copy = own_copy(array)
    array += 1
    assert not copy.any()


def test_what_is_donated_of_a_copy_is_not_the_original():
    given = jnp.ones(1000)
    copy = own_copy(given)
    assert jax.jit(lambda x: x * 2, donate_argnums=0)(copy)[0] == 2
    assert copy.is_deleted()
    assert given[0] == 1


def compiled_by(function):
    """Return how many programs are compiled by a call."""
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(count := lambda event, seconds, **_: compiled.append(event))
    try:
        function()
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
    return compiled.count("/jax/core/compile/backend_compile_duration")


def learner_of(shapes):
    """Return a Learner whose parameters have these shapes."""
    params = {str(shape): np.ones(shape, np.float32) for shape in shapes}

    def loss_fn(params, batch, key):
        return sum(jnp.sum(w**2) for w in params.values()) * jnp.mean(batch)

    batch = np.ones(3, np.float32)
    return Learner.from_loss(params, loss_fn, optax.sgd(1e-3), example_batch=batch, callbacks=[Metrics()], key=8)


def test_nothing_is_compiled_for_each_shape_while_a_learner_is_built():
    learner_of([(3,)])  # what any Learner needs
    assert compiled_by(lambda: learner_of([(n, 2) for n in range(50, 70)])) == 0
    assert compiled_by(lambda: [jnp.copy(jnp.asarray(np.ones((71, n)))) for n in range(5)]) > 0
