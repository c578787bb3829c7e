import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as flax_nnx

from fluxcb._errors import DeclarationError
from fluxcb.models import nnx

KEY = jax.random.key(7)
XS = jax.random.normal(jax.random.key(1), (16, 5)) * 2 + 3


class Net(flax_nnx.Module):
    def __init__(self, rngs):
        self.layers = flax_nnx.List([flax_nnx.Linear(5, 6, rngs=rngs), flax_nnx.Linear(6, 2, rngs=rngs)])
        self.norm = flax_nnx.BatchNorm(6, momentum=0.9, rngs=rngs)
        self.dropout = flax_nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.layers[1](self.dropout(self.norm(self.layers[0](x))))


class Counter(flax_nnx.Variable):
    pass


class Counting(flax_nnx.Module):
    def __init__(self, rngs):
        self.linear = flax_nnx.Linear(5, 2, rngs=rngs)
        self.calls = Counter(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] += 1
        return self.linear(x)


def net():
    return Net(flax_nnx.Rngs(0))


def snapshot(module):
    graphdef, state = flax_nnx.split(module)
    leaves = jax.tree.leaves(state)
    return graphdef, [
        np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x) for x in leaves
    ]


def fold(key, name):
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def test_carry_holds_pure_dicts_of_nnx():
    module = net()
    params, model_state = nnx(module).init(None, None)
    expected = flax_nnx.to_pure_dict(flax_nnx.state(module, flax_nnx.Param))
    stats = flax_nnx.to_pure_dict(flax_nnx.state(module, flax_nnx.BatchStat))
    jax.tree.map(np.testing.assert_array_equal, params, expected)
    jax.tree.map(np.testing.assert_array_equal, model_state, stats)
    assert sorted(params["layers"]) == [0, 1]
    assert sorted(model_state["norm"]) == ["mean", "var"]
    assert list(model_state) == ["norm"]


def test_training_matches_module_in_train_mode():
    module = net()
    model = nnx(module)
    params, model_state = model.init(None, None)
    outputs, new_state = model.apply(params, model_state, XS, train=True, key=KEY)

    direct = net()
    direct.train()
    direct.dropout.rngs.key = flax_nnx.RngKey(fold(KEY, "dropout/rngs/key"), tag="dropout")
    np.testing.assert_array_equal(outputs, direct(XS))
    jax.tree.map(
        np.testing.assert_array_equal, new_state, flax_nnx.to_pure_dict(flax_nnx.state(direct, flax_nnx.BatchStat))
    )


def test_running_mean_and_variance_match_formula():
    model = nnx(net())
    params, model_state = model.init(None, None)
    _, new_state = model.apply(params, model_state, XS, train=True, key=KEY)
    first = params["layers"][0]
    hidden = np.asarray(XS) @ np.asarray(first["kernel"]) + np.asarray(first["bias"])
    np.testing.assert_allclose(new_state["norm"]["mean"], 0.1 * hidden.mean(0), rtol=1e-5)
    np.testing.assert_allclose(new_state["norm"]["var"], 0.9 + 0.1 * hidden.var(0), rtol=1e-4)


def test_evaluation_matches_module_in_eval_mode_and_keeps_state():
    model = nnx(net())
    params, model_state = model.init(None, None)
    _, trained = model.apply(params, model_state, XS, train=True, key=KEY)
    outputs, after = model.apply(params, trained, XS, train=False, key=None)
    direct = net()
    flax_nnx.update(direct.norm, flax_nnx.State({k: flax_nnx.BatchStat(v) for k, v in trained["norm"].items()}))
    direct.eval()
    np.testing.assert_array_equal(outputs, direct(XS))
    assert after is trained


def test_outputs_depend_only_on_key():
    model = nnx(net())
    params, model_state = model.init(None, None)

    def run(key):
        return np.asarray(model.apply(params, model_state, XS, train=True, key=key)[0])

    first, other, again = run(KEY), run(jax.random.key(8)), run(KEY)
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)


def test_streams_are_seeded_by_name():
    class One(flax_nnx.Module):
        def __init__(self, rngs):
            self.b = flax_nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.b(x)

    class Two(One):
        def __init__(self, rngs):
            self.a = flax_nnx.Dropout(0.5, rngs=rngs)
            super().__init__(rngs)

    one, _ = nnx(One(flax_nnx.Rngs(0))).apply({}, {}, XS, train=True, key=KEY)
    two, _ = nnx(Two(flax_nnx.Rngs(5))).apply({}, {}, XS, train=True, key=KEY)
    np.testing.assert_array_equal(one, two)


def test_user_module_is_never_changed():
    module = net()
    before = snapshot(module)
    model = nnx(module)
    params, model_state = model.init(None, None)
    for train in (True, False):
        model.apply(params, model_state, XS, train=train, key=KEY)
    rebuilt = model.rebuild(jax.tree.map(jnp.zeros_like, params), model_state)
    rebuilt(XS)
    after = snapshot(module)
    assert before[0] == after[0]
    jax.tree.map(np.testing.assert_array_equal, before[1], after[1])


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_rebuilt_module_is_new_and_in_evaluation_mode(mode):
    module = net()
    getattr(module, mode)()
    model = nnx(module)
    params, model_state = model.init(None, None)
    changed = jax.tree.map(lambda x: x + 1, params)
    rebuilt = model.rebuild(changed, model_state)
    assert isinstance(rebuilt, Net)
    assert rebuilt is not module
    assert rebuilt.dropout.deterministic is True
    assert rebuilt.norm.use_running_average is True
    jax.tree.map(np.testing.assert_array_equal, flax_nnx.to_pure_dict(flax_nnx.state(rebuilt, flax_nnx.Param)), changed)
    module.eval()
    flax_nnx.update(module, flax_nnx.state(rebuilt))
    np.testing.assert_array_equal(module(XS), rebuilt(XS))


def test_other_variables_are_state_and_change_only_in_training():
    model = nnx(Counting(flax_nnx.Rngs(0)))
    params, model_state = model.init(None, None)
    assert list(params) == ["linear"]
    assert list(model_state) == ["calls"]
    _, trained = model.apply(params, model_state, XS, train=True, key=KEY)
    with pytest.warns(UserWarning, match="changes its variable `calls` in evaluation"):
        _, evaluated = model.apply(params, trained, XS, train=False, key=KEY)
    assert int(trained["calls"]) == 1
    assert int(evaluated["calls"]) == 1


def test_shared_params_stay_shared():
    class Tied(flax_nnx.Module):
        def __init__(self, rngs):
            self.embed = flax_nnx.Linear(5, 5, use_bias=False, rngs=rngs)
            self.again = self.embed

        def __call__(self, x):
            return self.again(self.embed(x))

    model = nnx(Tied(flax_nnx.Rngs(0)))
    params, model_state = model.init(None, None)
    assert len(jax.tree.leaves(params)) == 1
    outputs, _ = model.apply(jax.tree.map(lambda w: 2 * jnp.eye(5), params), model_state, XS, train=True, key=KEY)
    np.testing.assert_allclose(outputs, 4 * XS, rtol=1e-6)
    rebuilt = model.rebuild(params, model_state)
    assert rebuilt.embed is rebuilt.again


def test_nnx_vmap_over_keys():
    @flax_nnx.split_rngs(splits=3)
    @flax_nnx.vmap
    def make(rngs):
        return flax_nnx.Dropout(0.5, rngs=rngs)

    class Stacked(flax_nnx.Module):
        def __init__(self):
            self.layers = make(flax_nnx.Rngs(0))

        def __call__(self, x):
            return flax_nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(self.layers, x)

    outputs, _ = nnx(Stacked()).apply({}, {}, XS, train=True, key=KEY)
    assert outputs.shape == (3, 16, 5)
    assert not np.array_equal(outputs[0], outputs[1])


def test_call_with_rngs_and_flag_gets_both():
    class Explicit(flax_nnx.Module):
        def __call__(self, x, *, train, rngs=None):
            return train, None if rngs is None else rngs.noise()

    (train, key), _ = nnx(Explicit()).apply({}, {}, XS, train=True, key=KEY)
    expected = flax_nnx.Rngs(fold(KEY, "call")).noise()
    assert train is True
    np.testing.assert_array_equal(jax.random.key_data(key), jax.random.key_data(expected))
    assert nnx(Explicit()).apply({}, {}, XS, train=False, key=None)[0] == (False, None)


def test_ambiguous_flags_raise_until_one_is_named():
    class TwoFlags(flax_nnx.Module):
        def __call__(self, x, training=False, deterministic=True):
            return training, deterministic

    name = TwoFlags.__qualname__
    with pytest.raises(DeclarationError) as caught:
        nnx(TwoFlags())
    assert str(caught.value) == (
        "The model's call takes `training` and `deterministic`, and each of them could be its train flag.\n"
        f"  where: {__name__}.{name}.__call__\n"
        "  why:   the adapter sets one keyword to True if the step trains, and to False otherwise\n"
        '  fix:   name it: `fluxcb.models.nnx(module, train_argument="training")`\n'
        '     or: name it: `fluxcb.models.nnx(module, train_argument="deterministic")`'
    )
    model = nnx(TwoFlags(), train_argument="deterministic")
    assert model.apply({}, {}, XS, train=True, key=None)[0] == (False, False)
    assert model.apply({}, {}, XS, train=False, key=None)[0] == (False, True)


def test_variables_created_by_call_are_dropped():
    class Leaving(flax_nnx.Module):
        def __init__(self):
            self.calls = Counter(jnp.zeros(()))

        def __call__(self, x):
            self.calls[...] += 1
            self.seen = Counter(x)
            return x

    module = Leaving()
    model = nnx(module)
    params, model_state = model.init(None, None)
    _, new_state = model.apply(params, model_state, XS, train=True, key=None)
    assert list(new_state) == ["calls"]
    assert not hasattr(module, "seen")


def test_params_with_string_keys_are_converted():
    model = nnx(net())
    params, model_state = model.init(None, None)
    stringly = {**params, "layers": {str(k): v for k, v in params["layers"].items()}}
    expected, _ = model.apply(params, model_state, XS, train=False, key=None)
    outputs, _ = model.apply(stringly, model_state, XS, train=False, key=None)
    np.testing.assert_array_equal(outputs, expected)


def test_module_without_call_raises():
    class Silent(flax_nnx.Module):
        pass

    with pytest.raises(DeclarationError) as caught:
        nnx(Silent())
    name = Silent.__qualname__
    assert str(caught.value) == (
        f"The NNX module `{name}` has no `__call__`.\n"
        f"  where: {__name__}.{name}\n"
        "  why:   the step calls the model as `module(xs)`\n"
        "  fix:   give it a `__call__` that takes a batch of inputs"
    )


class Drops(flax_nnx.Module):
    def __init__(self, stream="dropout"):
        self.dropout = flax_nnx.Dropout(0.5, rng_collection=stream, rngs=flax_nnx.Rngs(0))


class HiddenFlag(Drops):
    def __call__(self, x, in_training=True):
        return self.dropout(x, deterministic=not in_training)


class LeavesItOut(Drops):
    def __call__(self, x, in_training=True):
        return self.dropout(x)


class AlwaysDrops(Drops):
    def __call__(self, x):
        return self.dropout(x, deterministic=False)


class IgnoresFlag(Drops):
    def __call__(self, x, train):
        return self.dropout(x, deterministic=False)


class Inference(Drops):
    def __call__(self, x, inference=False):
        return self.dropout(x, deterministic=inference)


class PassesRngs(Drops):
    def __call__(self, x, rngs, in_training=True):
        return self.dropout(x, deterministic=not in_training, rngs=rngs)


class PassesKey(Drops):
    def __call__(self, x, rngs):
        return self.dropout(x, deterministic=False, rngs=rngs.noise())


class Attention(flax_nnx.Module):
    def __init__(self, **options):
        rngs = flax_nnx.Rngs(0)
        self.attention = flax_nnx.MultiHeadAttention(1, 5, dropout_rate=0.5, decode=False, rngs=rngs)
        self.noise = rngs.noise.fork()
        self.options = flax_nnx.static(options)

    def __call__(self, x, in_training=True):
        own = {"rngs": self.noise} if self.options.get("own") else {}
        return self.attention(x[None], deterministic=not in_training, **own)


class Stacked(Drops):
    """Dropout in `nnx.split_rngs`, `nnx.scan` and `nnx.jit`, all of which replace the counts of random streams."""

    def __call__(self, x):
        @flax_nnx.jit
        @flax_nnx.split_rngs(splits=3)
        @flax_nnx.scan(in_axes=(flax_nnx.StateAxes({flax_nnx.RngState: 0}), flax_nnx.Carry), out_axes=flax_nnx.Carry)
        def forward(layer, x):
            return layer(x)

        return forward(self.dropout, x)


def evaluated(model, xs=XS):
    params, model_state = model.init(None, None)
    return np.asarray(jax.jit(lambda key: model.apply(params, model_state, xs, train=False, key=key)[0])(KEY))


LEFT_OUT = "leave `deterministic` out when you call `nnx.Dropout`: fluxcb sets it, as `module.eval()` does"
ON_PURPOSE = (
    "if random numbers in evaluation are intended, draw them from another stream: "
    '`rng_collection="noise"` in `nnx.Dropout`'
)


def test_dropout_in_evaluation_raises_and_each_fix_works():
    with pytest.raises(DeclarationError) as caught:
        evaluated(nnx(HiddenFlag()))
    assert str(caught.value) == (
        "The NNX module `HiddenFlag` turns dropout on in evaluation, although it is in evaluation mode.\n"
        f"  where: {__name__}.HiddenFlag\n"
        "  why:   metrics and predictions would be those of a model with randomly disabled units\n"
        f"  fix:   {LEFT_OUT}\n"
        '     or: if `in_training` is true in training, pass `fluxcb.models.nnx(module, "in_training")` as the model\n'
        f"     or: {ON_PURPOSE}"
    )
    for model in (nnx(LeavesItOut()), nnx(HiddenFlag(), "in_training")):
        np.testing.assert_array_equal(evaluated(model), XS)
        assert (np.asarray(model.apply({}, {}, XS, train=True, key=KEY)[0]) == 0).any()
    assert (evaluated(nnx(HiddenFlag("noise"))) == 0).any()


@pytest.mark.parametrize(
    ("module", "fixes"),
    [
        (AlwaysDrops(), ()),
        (IgnoresFlag(), ("write `deterministic=not train` when you call `nnx.Dropout`",)),
        (Inference(), ("if `inference` is true in evaluation, rename it to `deterministic`",)),
        (
            PassesRngs(),
            ('if `in_training` is true in training, pass `fluxcb.models.nnx(module, "in_training")` as the model',),
        ),
    ],
)
def test_fix_of_dropout_in_evaluation_depends_on_the_call(module, fixes):
    with pytest.raises(DeclarationError) as caught:
        evaluated(nnx(module))
    assert caught.value.fix == (LEFT_OUT, *fixes, ON_PURPOSE)


def test_dropout_of_attention_in_evaluation_raises_unless_it_has_its_own_stream():
    with pytest.raises(DeclarationError) as caught:
        evaluated(nnx(Attention()))
    assert caught.value.fix == (
        LEFT_OUT.replace("Dropout", "MultiHeadAttention"),
        'if `in_training` is true in training, pass `fluxcb.models.nnx(module, "in_training")` as the model',
        "if random numbers in evaluation are intended, draw them from another stream: "
        "`rngs=self.noise`, with `self.noise = rngs.noise.fork()` in `__init__`",
    )
    mean = evaluated(nnx(Attention(), "in_training"))
    assert not np.array_equal(evaluated(nnx(Attention(own=True))), mean)


def test_dropout_that_is_off_in_evaluation_stays_off_in_transforms():
    np.testing.assert_array_equal(evaluated(nnx(Stacked())), XS)


def test_module_draws_from_a_key_of_its_own_in_evaluation():
    assert (evaluated(nnx(PassesKey())) == 0).any()


def test_dropout_in_evaluation_of_a_loss_function_raises():
    module = HiddenFlag()
    model = nnx(module).bind({}, {}, train=False, key=KEY).model
    with pytest.raises(DeclarationError) as caught:
        model(XS)
    assert caught.value.fix == (
        LEFT_OUT,
        "write `def loss_fn(model, batch, *, train):`, and pass `in_training=train` when you call the model",
        ON_PURPOSE,
    )
    np.testing.assert_array_equal(model(XS, in_training=False), XS)
    assert isinstance(model.dropout, flax_nnx.Dropout)
    # The user's own module and the trained module have the layers of Flax.
    assert type(module.dropout) is type(nnx(module).rebuild({}, {}).dropout) is flax_nnx.Dropout


class Switches(flax_nnx.Module):
    """A module whose own code switches it to training mode, if `switch` is true."""

    def __init__(self, *layers, switch=False):
        self.layers, self.switch = flax_nnx.List(layers), switch

    def __call__(self, x):
        if self.switch:
            self.train()
        for layer in self.layers:
            x = layer(x)
        return x


def switched(layer, *, in_loss):
    """Evaluate a module with one layer. The loss function or the module itself switches it to training mode."""
    model = nnx(Switches(layer, switch=not in_loss))
    params, state = model.init(None, None)
    if not in_loss:
        return model.apply(params, state, XS[:, None], train=False, key=KEY)[0]
    bound = model.bind(params, state, train=False, key=KEY).model
    bound.train()
    return bound(XS[:, None])


SETS_MODE = "fluxcb sets the mode, which is training mode in training phases only"
REMOVE = {
    True: f"remove `model.train()` from the loss function, or `self.train()` from `Switches`: {SETS_MODE}",
    False: f"remove `self.train()` from `Switches`: {SETS_MODE}",
}
SWITCHER = {True: "the loss function or the NNX module", False: "the NNX module"}


@pytest.mark.parametrize("in_loss", [True, False])
def test_dropout_that_code_of_the_user_switches_on_in_evaluation_raises(in_loss):
    rngs = flax_nnx.Rngs(0)
    attention = flax_nnx.MultiHeadAttention(1, 5, dropout_rate=0.5, decode=False, rngs=rngs)
    for layer in (flax_nnx.Dropout(0.5, rngs=rngs), attention):
        with pytest.raises(DeclarationError) as caught:
            switched(layer, in_loss=in_loss)
        assert str(caught.value) == (
            f"In evaluation, {SWITCHER[in_loss]} `Switches` switches `nnx.{type(layer).__name__}` to training mode, "
            "which turns dropout on.\n"
            f"  where: {__name__}.Switches\n"
            "  why:   metrics and predictions would be those of a model with randomly disabled units\n"
            f"  fix:   {REMOVE[in_loss]}"
        )


@pytest.mark.parametrize("in_loss", [True, False])
def test_batch_normalization_that_code_of_the_user_switches_in_evaluation_is_a_warning(in_loss):
    with pytest.warns(UserWarning, match="In evaluation") as caught:
        switched(flax_nnx.BatchNorm(5, rngs=flax_nnx.Rngs(0)), in_loss=in_loss)
    assert [str(warning.message) for warning in caught] == [
        f"In evaluation, {SWITCHER[in_loss]} `Switches` switches `nnx.BatchNorm` to training mode, so metrics and "
        f"predictions depend on the other examples of a batch. To use the running average, {REMOVE[in_loss]}."
    ]


def test_module_that_nobody_switches_is_in_training_mode_in_training_only():
    model = nnx(Switches(flax_nnx.Dropout(0.5, rngs=flax_nnx.Rngs(0))))
    assert (np.asarray(model.bind({}, {}, train=True, key=KEY).model(XS)) == 0).any()
    np.testing.assert_array_equal(model.bind({}, {}, train=False, key=KEY).model(XS), XS)


class InferenceNet(flax_nnx.Module):
    def __init__(self):
        rngs = flax_nnx.Rngs(0)
        self.norm, self.dropout = flax_nnx.BatchNorm(5, rngs=rngs), flax_nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x, inference=True):
        return self.dropout(self.norm(x, use_running_average=inference), deterministic=inference)


class EvalMode(InferenceNet):
    def __call__(self, x, eval_mode=False):
        return self.norm(x, use_running_average=eval_mode)


class BatchStatistics(InferenceNet):
    def __call__(self, x):
        return self.norm(x, use_running_average=False)


class Follows(InferenceNet):
    def __call__(self, x):
        return self.norm(x)


class Deterministic(InferenceNet):
    def __call__(self, x, deterministic=False):
        return self.norm(x, use_running_average=deterministic)


LEFT_OUT_NORM = "leave `use_running_average` out when you call `nnx.BatchNorm`: fluxcb sets it, as `module.eval()` does"


@pytest.mark.parametrize(
    ("model", "name", "advice"),
    [
        (nnx(EvalMode()), "EvalMode", "; or if `eval_mode` is true in evaluation, rename it to `deterministic`"),
        (nnx(BatchStatistics()), "BatchStatistics", ""),
        (
            nnx(EvalMode(), "eval_mode"),
            "EvalMode",
            "; or write `use_running_average=not eval_mode` when you call `nnx.BatchNorm`",
        ),
    ],
)
def test_batch_statistics_in_evaluation_are_a_warning(model, name, advice):
    params, state = model.init(None, None)
    with pytest.warns(UserWarning, match="In evaluation") as caught:
        model.apply(params, state, XS, train=False, key=KEY)
    assert [str(warning.message) for warning in caught] == [
        f"In evaluation, the NNX module `{name}` calls `nnx.BatchNorm` with `use_running_average=False`, so metrics "
        f"and predictions depend on the other examples of a batch. To use the running average, {LEFT_OUT_NORM}{advice}."
    ]


@pytest.mark.parametrize("module", [Follows(), Deterministic()])
def test_running_averages_in_evaluation_are_no_warning(module):
    model = nnx(module)
    params, state = model.init(None, None)
    outputs, _ = model.apply(params, state, XS, train=False, key=KEY)
    module.eval()
    assert (outputs == (module(XS) if isinstance(module, Follows) else module(XS, deterministic=True))).all()
    model.apply(params, state, XS, train=True, key=KEY)


class LearningNorm(InferenceNet):
    def __call__(self, x, is_training_mode=False):
        return self.norm(x, use_running_average=not is_training_mode)


class AlwaysOff(InferenceNet):
    def __call__(self, x):
        return self.dropout(x, deterministic=True)


@pytest.mark.parametrize(
    ("module", "layer", "option", "advice"),
    [
        (
            InferenceNet(),
            "nnx.Dropout",
            "deterministic",
            "If `inference` is true in evaluation, rename this parameter of `InferenceNet.__call__` to "
            "`deterministic`.",
        ),
        (
            LearningNorm(),
            "nnx.BatchNorm",
            "use_running_average",
            "If `is_training_mode` is true in training, pass `fluxcb.models.nnx(module, 'is_training_mode')` as the "
            "model, or rename this parameter to one of train, training, is_training, is_train.",
        ),
        (
            AlwaysOff(),
            "nnx.Dropout",
            "deterministic",
            "Add a parameter `train` to `AlwaysOff.__call__`, and write `deterministic=not train`.",
        ),
    ],
)
def test_layers_that_are_in_evaluation_mode_in_training_are_a_warning(module, layer, option, advice):
    model = nnx(module)
    params, state = model.init(None, None)
    with pytest.warns(UserWarning, match="In training") as caught:
        model.apply(params, state, XS, train=True, key=KEY)
    assert [str(warning.message) for warning in caught] == [
        f"In training, the NNX module `{type(module).__name__}` calls `{layer}` with `{option}=True`, because fluxcb "
        f"knows no train flag of its call. {advice}"
    ]
    model.apply(params, state, XS, train=False, key=KEY)


@pytest.mark.parametrize("module", [InferenceNet(), LearningNorm()])
def test_bound_module_warns_about_layers_in_evaluation_mode(module):
    model = nnx(module)
    bound = model.bind(*model.init(None, None), train=True, key=KEY)
    bound.model(XS)
    with pytest.warns(UserWarning, match=r"In training, .* because fluxcb knows no train flag"):
        bound.new_state(None)
    option = "inference" if type(module) is InferenceNet else "is_training_mode"
    for calls in ({option: option != "inference"}, {}):  # the second one is in evaluation
        bound = model.bind(*model.init(None, None), train=bool(calls), key=KEY)
        bound.model(XS, **calls)
        bound.new_state(None)


class Flagged(InferenceNet):
    def __call__(self, x, train=False):
        return super().__call__(x, inference=not train)


class Deterministic(InferenceNet):
    def __call__(self, x, deterministic=True):
        return super().__call__(x, inference=deterministic)


class Asks(InferenceNet):
    """Reads the option of its layers, which `.train()` sets, and has an option that is not a train flag."""

    def __call__(self, x, is_training_mode=False):
        return self.dropout(self.norm(x))


def test_suggested_fixes_turn_the_layers_on():
    for model in (nnx(Deterministic()), nnx(LearningNorm(), "is_training_mode"), nnx(Asks())):
        params, state = model.init(None, None)
        trained, _ = model.apply(params, state, XS, train=True, key=KEY)
        evaluated, _ = model.apply(params, state, XS, train=False, key=KEY)
        assert not np.allclose(trained, evaluated)


@pytest.mark.parametrize(
    ("module", "argument", "passed"),
    [
        (Flagged(), None, {"train": True}),
        (Deterministic(), None, {"deterministic": False}),
        (LearningNorm(), "is_training_mode", {"is_training_mode": True}),
    ],
)
def test_bound_module_adds_the_train_flag(module, argument, passed):
    model = nnx(module, argument)
    arrays = model.init(None, None)

    def called(training, /, *args, **kwargs):
        bound = model.bind(*arrays, train=training, key=KEY)
        assert isinstance(bound.model, type(module))
        outputs = bound.model(XS, *args, **kwargs)
        return outputs, bound.new_state(None)

    applied = {train: model.apply(*arrays, XS, train=train, key=KEY) for train in (True, False)}
    jax.tree.map(np.testing.assert_array_equal, called(True), applied[True])
    jax.tree.map(np.testing.assert_array_equal, called(False), applied[False])
    # The loss function may pass the flag itself, also by position.
    jax.tree.map(np.testing.assert_array_equal, called(True, **passed), applied[True])
    jax.tree.map(np.testing.assert_array_equal, called(True, *passed.values()), applied[True])
    outputs, _ = called(True, **{name: not value for name, value in passed.items()})
    np.testing.assert_array_equal(outputs, applied[False][0])


def test_frozen_batch_normalization_is_no_warning():
    class Frozen(InferenceNet):
        def __call__(self, x, scale=True):
            return self.norm(x, use_running_average=True)

    model = nnx(Frozen())
    model.apply(*model.init(None, None), XS, train=True, key=KEY)


def test_recording_layers_are_not_in_the_returned_model():
    model = nnx(Asks())
    rebuilt = model.rebuild(*model.init(None, None))
    assert type(rebuilt.norm) is flax_nnx.BatchNorm
    assert type(rebuilt.dropout) is flax_nnx.Dropout


class TwoLayers(flax_nnx.Module):
    def __init__(self, running):
        self.linear = flax_nnx.Linear(3, 3, rngs=flax_nnx.Rngs(0))
        self.norm = flax_nnx.BatchNorm(3, use_running_average=running, rngs=flax_nnx.Rngs(1))
        self.dropout = flax_nnx.Dropout(0.5, rngs=flax_nnx.Rngs(2))

    def __call__(self, xs):
        return self.dropout(self.norm(self.linear(xs)))


def test_one_layer_in_evaluation_mode_is_a_warning():
    text = (
        "In the NNX module `TwoLayers`, `norm` is in evaluation mode (`use_running_average=True`), and other layers "
        "are not. A training phase puts all layers in training mode, as `module.train()` does. To keep `norm` in "
        "evaluation mode, pass `use_running_average=True` when you call it, and not to its constructor."
    )
    with pytest.warns(UserWarning, match="in evaluation mode") as record:
        nnx(TwoLayers(True)).init(None, None)
    assert [str(warning.message) for warning in record] == [text]
    nnx(TwoLayers(False)).init(None, None)
    evaluated = TwoLayers(False)
    evaluated.eval()  # as `learner.model`, which another Learner may train further
    nnx(evaluated).init(None, None)


class UpdatesStats(flax_nnx.Module):
    def __init__(self):
        self.norm = flax_nnx.BatchNorm(5, rngs=flax_nnx.Rngs(0))

    def __call__(self, xs, update_stats=False):
        return self.norm(xs, use_running_average=not update_stats)


def test_flag_that_updates_statistics_is_known_as_a_mode():
    model = nnx(UpdatesStats())
    params, state = model.init(None, None)
    with pytest.warns(UserWarning, match="If `update_stats` is true in training, pass"):
        model.apply(params, state, XS, train=True, key=KEY)
    mended = nnx(UpdatesStats(), "update_stats")
    _, after = mended.apply(params, state, XS, train=True, key=KEY)
    assert np.any(np.asarray(after["norm"]["mean"]) != 0)
