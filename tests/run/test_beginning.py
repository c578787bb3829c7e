"""The initial state of a Learner: random key, parameters, optimizer state, and the cost of creating them."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import Learner, Read, Write
from fluxcb._compile.arrays import copy_tree, is_key, own_copy
from fluxcb._run.arguments import as_key
from fluxcb._run.initial_programs import compiled_opt_state
from fluxcb._run.initial_state import initial_opt_state
from fluxcb.callbacks import Metrics, RunFunction


@pytest.mark.parametrize("seed", [0, 1, -1, 2**31, 2**32 + 7, 2**63 - 1, -(2**63)])
@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg", "threefry4x32", "philox2x32", "philox4x32"])
def test_seed_gives_jax_key(seed, impl):
    with jax.default_prng_impl(impl):
        key, expected = as_key(seed), jax.random.key(seed)
    assert key.dtype == expected.dtype
    assert jax.random.key_data(key).tolist() == jax.random.key_data(expected).tolist()


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "philox4x32"])
def test_64_bit_seed_with_x64(impl):
    with jax.enable_x64(True), jax.default_prng_impl(impl):
        for seed in 2**40 + 3, -5, -(2**63):
            words = jax.random.key_data(as_key(seed)).tolist()
            assert words == jax.random.key_data(jax.random.key(seed)).tolist()
            assert impl != "threefry2x32" or words == [seed // 2**32 % 2**32, seed % 2**32]


@pytest.mark.parametrize("kind", [np.int8, np.int32, np.int64, np.uint32, np.uint64])
def test_numpy_integer_seed(kind):
    expected = jax.random.key_data(jax.random.key(3)).tolist()
    assert jax.random.key_data(as_key(kind(3))).tolist() == expected


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_model_is_initialized_with_own_key(impl):
    def init(key, xs):  # 16 bits of the key in each parameter, which are exact in float32
        words = jax.random.key_data(key)
        return {"w": jnp.stack([words >> 16, words & 0xFFFF], -1).astype(jnp.float32)}

    def given(seed):
        with jax.default_prng_impl(impl):
            model = (init, lambda params, xs: jnp.mean(xs) * jnp.mean(params["w"]))
            example = np.ones((2, 3), np.float32), np.ones(2, np.float32)
            made = Learner(model, lambda out, ys: out, optax.sgd(0.1), key=as_key(seed), example_batch=example)
            words = [int(high) << 16 | int(low) for high, low in np.asarray(made.params["w"])]
            return jax.random.wrap_key_data(jnp.array(words, jnp.uint32)).dtype, words, as_key(seed)

    (dtype, words, key), again, other = given(3), given(3), given(4)
    assert dtype == again[0] == key.dtype
    assert words == again[1] != other[1]
    # None of those that steps and handlers are given: they are folded from the run's own, by numbers of 32 bits.
    taken = [key, *(jax.random.fold_in(key, number) for number in range(1000))]
    assert words not in [jax.random.key_data(one).tolist() for one in taken]


def held_by(tree):
    """Return the structure of a tree, and the dtype, weak type, device and bytes of each leaf."""
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
def test_copy_matches_jax_copy(tree):
    assert held_by(own_copy(tree)) == held_by(copy_tree(tree))


def test_copy_raises_like_jax():
    with pytest.raises(TypeError):
        own_copy({"w": np.arange(3, dtype=">f4")})
    with pytest.raises(TypeError):
        own_copy({"w": np.array(["a"])})


def test_copies_share_no_buffers():
    for tree in TREES.values():
        given = jax.tree.map(lambda x: x if is_key(x) else jnp.asarray(x), tree)
        leaves = [x for x in jax.tree.leaves((given, own_copy(given), own_copy(given))) if not is_key(x)]
        assert len({x.unsafe_buffer_pointer() for x in leaves}) == len(leaves)
    array = np.zeros(1024, np.float32)
    copy = own_copy(array)
    array += 1
    assert not copy.any()


def test_donating_copy_keeps_original():
    given = jnp.ones(1000)
    copy = own_copy(given)
    assert jax.jit(lambda x: x * 2, donate_argnums=0)(copy)[0] == 2
    assert copy.is_deleted()
    assert given[0] == 1


def compiled_by(function):
    """Return how many programs a call compiles."""
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(count := lambda event, seconds, **_: compiled.append(event))
    try:
        function()
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
    return compiled.count("/jax/core/compile/backend_compile_duration")


def learner_of(shapes, optimizer=None, callbacks=()):
    """Return a Learner whose parameters have these shapes."""
    params = {str(shape): np.ones(shape, np.float32) for shape in shapes}

    def loss_fn(params, batch, key):
        return sum(jnp.sum(w**2) for w in params.values()) * jnp.mean(batch)

    batch = np.ones(3, np.float32)
    optimizer = optimizer or optax.sgd(1e-3)
    return Learner.from_loss(params, loss_fn, optimizer, example_batch=batch, callbacks=[Metrics(), *callbacks], key=8)


def test_building_learner_compiles_nothing_per_shape():
    learner_of([(3,)])  # what any Learner needs
    assert compiled_by(lambda: learner_of([(n, 2) for n in range(50, 70)])) == 0
    assert compiled_by(lambda: [jnp.copy(jnp.asarray(np.ones((71, n)))) for n in range(5)]) > 0


def test_copy_of_params_for_handler_compiles_nothing():
    def copy_params(learner):
        learner.cbstate.target = learner.params

    def learner_with_target(shapes):
        access = {"params": Read(), "cbstate": {"target": Write()}}
        return learner_of(shapes, callbacks=[RunFunction(copy_params, init=copy_params, access=access)])

    learner_with_target([(3,)])
    made = []
    assert compiled_by(lambda: made.append(learner_with_target([(n, 3) for n in range(20, 30)]))) == 0
    target, params = made[0].cbstate["target"], made[0].params
    assert held_by(target) == held_by(params)
    arrays = [x.unsafe_buffer_pointer() for x in (*target.values(), *params.values())]
    assert len(set(arrays)) == len(arrays)


@pytest.mark.filterwarnings("ignore:`optax.contrib.schedule_free` trains other parameters")
def test_optimizer_is_initialized_by_one_program():
    learner_of([(3,)])
    shapes = [(n, 2) for n in range(80, 90)]
    optimizer = optax.contrib.schedule_free_adamw  # its state holds copies of the parameters
    assert compiled_by(lambda: learner_of(shapes, optimizer(1e-3))) == 1
    assert compiled_by(lambda: learner_of(shapes, optimizer(1e-2))) == 0  # begins as the other did


def test_optimizer_that_begins_with_constants_needs_no_program():
    learner_of([(3,)])
    shapes = [(n, 3) for n in range(80, 90)]
    assert compiled_by(lambda: learner_of(shapes, fluxcb.inject(optax.adam, learning_rate=1e-3))) == 0


PARAMS = {
    "w": jnp.linspace(-1, 1, 12).reshape(3, 4),
    "half": jnp.ones(3, jnp.bfloat16),
    "scale": jnp.asarray(2.0),
}
OPTIMIZERS = {
    "adam": optax.adam(1e-3),
    "adamw with a schedule": optax.adamw(optax.cosine_decay_schedule(1e-3, 100)),
    "momentum": optax.sgd(1e-3, momentum=0.9),
    "injected": fluxcb.inject(optax.adam, learning_rate=1e-3),
    "copies of the parameters": optax.contrib.schedule_free_adamw(1e-3),
    "inverse square roots": optax.adafactor(1e-3),
    "masked by structure": optax.masked(optax.adam(1e-3), lambda params: {name: name == "w" for name in params}),
    "masked by values": optax.masked(
        optax.adam(1e-3), lambda params: jax.tree.map(lambda x: bool(x.sum() > 1), params)
    ),
    "several": optax.chain(optax.clip_by_global_norm(1.0), optax.add_noise(0.1, 0.5, 3), optax.lion(1e-3)),
    "after some steps": optax.MultiSteps(optax.adam(1e-3), 4).gradient_transformation(),
}


@pytest.mark.parametrize("committed", [False, True])
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_initial_opt_state_matches_init(optimizer, committed):
    params = jax.device_put(PARAMS, jax.devices()[-1]) if committed else PARAMS
    assert held_by(initial_opt_state(optimizer, params)) == held_by(optimizer.init(params))


def own_optimizer(init):
    """Return an optimizer with the given `init`."""
    return optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state))


def test_init_may_use_concrete_values():
    optimizer = own_optimizer(lambda params: jnp.asarray(float(params["w"].sum())))
    assert initial_opt_state(optimizer, {"w": jnp.arange(4.0)}) == 6
    assert compiled_opt_state(optimizer, {"w": jnp.arange(4.0)}) is None


def test_objects_held_by_init_are_released():
    anchor = jnp.arange(1000.0)
    held = weakref.ref(anchor)
    optimizer = own_optimizer(lambda params, anchor=anchor: anchor + params["w"])
    assert initial_opt_state(optimizer, {"w": jnp.float32(1)})[3] == 4
    del anchor, optimizer
    gc.collect()
    assert held() is None


def test_inits_that_differ_in_one_bit_are_not_shared():
    first, second = np.float32(0.1), np.nextafter(np.float32(0.1), np.float32(1))
    inits = [
        lambda params: jnp.asarray(first),
        lambda params: jnp.asarray(second),
        lambda params: float(first),
        lambda params: params["scale"] * first,
        lambda params: jnp.asarray([first, 0, 0]),
        lambda params: jnp.asarray([second, 0, 0]),
        lambda params: {"rate": jnp.asarray(first)},
        lambda params: jax.random.key(3),
        lambda params: jax.random.key(4),
    ]
    found = [held_by(initial_opt_state(own_optimizer(init), PARAMS)) for init in inits]
    assert found == [held_by(own_copy(init(PARAMS))) for init in inits]


def test_error_in_init_is_unchanged():
    def init(params):
        raise ValueError(f"no optimizer for {len(params)} arrays")

    with pytest.raises(ValueError, match="no optimizer for 3 arrays") as caught:
        initial_opt_state(own_optimizer(init), PARAMS)
    assert caught.value.__context__ is None
