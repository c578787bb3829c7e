import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fluxcb._errors import DeclarationError
from fluxcb.models import linen

KEY = jax.random.key(7)
XS = jax.random.normal(jax.random.key(1), (16, 5)) * 2 + 3


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool = False):
        x = nn.Dense(6)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        x = nn.Dropout(0.5, deterministic=not train)(x)
        return nn.Dense(2)(x)


class Plain(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(x)


def test_params_and_state_match_module_init():
    params, model_state = linen(Net()).init(KEY, XS)
    direct = Net().init(KEY, XS)
    jax.tree.map(np.testing.assert_array_equal, params, direct["params"])
    jax.tree.map(np.testing.assert_array_equal, model_state, {"batch_stats": direct["batch_stats"]})


def test_training_matches_module_apply():
    model = linen(Net())
    params, model_state = model.init(KEY, XS)
    outputs, new_state = model.apply(params, model_state, XS, train=True, key=KEY)
    direct, updated = Net().apply(
        {"params": params, **model_state}, XS, train=True, rngs={"dropout": KEY}, mutable=["batch_stats"]
    )
    np.testing.assert_array_equal(outputs, direct)
    jax.tree.map(np.testing.assert_array_equal, new_state, updated)


def test_running_mean_and_variance_match_formula():
    model = linen(Net())
    params, model_state = model.init(KEY, XS)
    _, new_state = model.apply(params, model_state, XS, train=True, key=KEY)
    hidden = np.asarray(XS) @ np.asarray(params["Dense_0"]["kernel"])
    stats = new_state["batch_stats"]["BatchNorm_0"]
    np.testing.assert_allclose(stats["mean"], 0.9 * 0 + 0.1 * hidden.mean(0), rtol=1e-5)
    np.testing.assert_allclose(stats["var"], 0.9 * 1 + 0.1 * hidden.var(0), rtol=1e-5)


def test_evaluation_matches_module_apply_and_keeps_state():
    model = linen(Net())
    params, model_state = model.init(KEY, XS)
    _, trained = model.apply(params, model_state, XS, train=True, key=KEY)
    outputs, after = model.apply(params, trained, XS, train=False, key=None)
    np.testing.assert_array_equal(outputs, Net().apply({"params": params, **trained}, XS))
    assert after is trained


def test_module_without_flag_or_state():
    model = linen(Plain())
    params, model_state = model.init(KEY, XS)
    outputs, new_state = model.apply(params, model_state, XS, train=True, key=KEY)
    np.testing.assert_array_equal(outputs, Plain().apply({"params": params}, XS))
    assert model_state == {}
    assert new_state == {}


@pytest.mark.parametrize(
    ("name", "in_training"), [("train", True), ("training", True), ("is_training", True), ("deterministic", False)]
)
@pytest.mark.parametrize("named", [False, True])
def test_train_flag_is_detected_by_name(name, in_training, named):
    seen = []
    namespace = {"seen": seen}
    exec(f"def __call__(self, x, *, {name}): seen.append({name}); return x", namespace)
    module = type("Flagged", (nn.Module,), {"__call__": namespace["__call__"]})()
    model = linen(module, name) if named else linen(module)
    for train in (True, False):
        model.apply({}, {}, XS, train=train, key=None)
    assert seen == [in_training, not in_training]


def test_flag_with_other_name_is_passed_as_train():
    class Learning(nn.Module):
        @nn.compact
        def __call__(self, x, learning):
            return x * learning

    model = linen(Learning(), train_argument="learning")
    assert float(model.apply({}, {}, jnp.ones(()), train=True, key=None)[0]) == 1
    assert float(model.apply({}, {}, jnp.ones(()), train=False, key=None)[0]) == 0


def test_each_random_stream_has_its_own_key():
    class Streams(nn.Module):
        def __call__(self, x):
            return jax.random.key_data(self.make_rng("dropout")), jax.random.key_data(self.make_rng("noise"))

    outputs, _ = linen(Streams(), rng_streams=("dropout", "noise")).apply({}, {}, XS, train=True, key=KEY)
    rngs = {"dropout": KEY, "noise": jax.random.fold_in(KEY, 1)}
    np.testing.assert_array_equal(outputs, Streams().apply({}, XS, rngs=rngs))
    assert not np.array_equal(*outputs)


def test_collections_created_by_call_are_dropped():
    class Sowing(nn.Module):
        @nn.compact
        def __call__(self, x):
            self.sow("intermediates", "hidden", x)
            return nn.BatchNorm(use_running_average=False)(x)

    model = linen(Sowing())
    params, model_state = model.init(KEY, XS)
    _, new_state = model.apply(params, model_state, XS, train=True, key=KEY)
    assert list(model_state) == ["batch_stats"]
    assert jax.tree.structure(new_state) == jax.tree.structure(model_state)


def test_training_only_layers_get_params():
    class Auxiliary(nn.Module):
        @nn.compact
        def __call__(self, x, train):
            main = nn.Dense(2, name="main")(x)
            return (main, nn.Dense(2, name="auxiliary")(x)) if train else main

    params, _ = linen(Auxiliary()).init(KEY, XS)
    assert sorted(params) == ["auxiliary", "main"]


def test_rebuilt_module_is_bound_to_arrays():
    model = linen(Net())
    params, model_state = model.init(KEY, XS)
    rebuilt = model.rebuild(params, model_state)
    assert isinstance(rebuilt, Net)
    np.testing.assert_array_equal(rebuilt(XS), Net().apply({"params": params, **model_state}, XS))


def test_misspelled_flag_raises():
    with pytest.raises(DeclarationError) as caught:
        linen(Net(), train_argument="trian")
    assert str(caught.value) == (
        "`train_argument` is 'trian', but the model's call has no such keyword. Did you mean `train`?\n"
        f"  where: {__name__}.Net.__call__\n"
        "  why:   the model would not know whether it is being trained\n"
        "  fix:   name a keyword of the call\n"
        "     or: leave `train_argument` out if the model behaves the same in training and evaluation"
    )


class TwoFlags(nn.Module):
    def __call__(self, x, train=True, deterministic=False):
        return x * 2 if train else x


def test_ambiguous_flags_raise_until_one_is_named():
    with pytest.raises(DeclarationError) as caught:
        linen(TwoFlags())
    assert str(caught.value) == (
        "The model's call takes `train` and `deterministic`, and each of them could be its train flag.\n"
        f"  where: {__name__}.TwoFlags.__call__\n"
        "  why:   the adapter sets one keyword to True if the step trains, and to False otherwise\n"
        '  fix:   name it: `fluxcb.models.linen(module, train_argument="train")`\n'
        '     or: name it: `fluxcb.models.linen(module, train_argument="deterministic")`'
    )
    outputs, _ = linen(TwoFlags(), train_argument="train").apply({}, {}, XS, train=True, key=None)
    np.testing.assert_array_equal(outputs, XS * 2)
    with pytest.raises(DeclarationError) as caught:
        linen(TwoFlags(), rng_streams=("noise",))
    assert caught.value.fix[0] == (
        "name it: `fluxcb.models.linen(module, train_argument=\"train\", rng_streams=('noise',))`"
    )


def test_streams_as_string_raise():
    with pytest.raises(DeclarationError) as caught:
        linen(Net(), rng_streams="dropout")
    assert str(caught.value) == (
        "`rng_streams` is the string 'dropout'; it must be a sequence of names.\n"
        "  where: fluxcb.models.linen(module, rng_streams=...)\n"
        "  fix:   pass `rng_streams=('dropout',)`"
    )


class Silent(nn.Module):
    def encode(self, x):
        return x


def test_module_without_call_raises():
    with pytest.raises(DeclarationError) as caught:
        linen(Silent())
    assert str(caught.value) == (
        "The Linen module `Silent` has no `__call__`.\n"
        f"  where: {__name__}.Silent\n"
        "  why:   the step calls the model as `module.apply(variables, xs)`\n"
        "  fix:   give it a `__call__` that takes a batch of inputs"
    )


class HiddenFlag(nn.Module):
    @nn.compact
    def __call__(self, x, in_training=True):
        return nn.Dropout(0.5, deterministic=not in_training)(x)


class AlwaysDrops(nn.Module):
    stream: str = "dropout"

    @nn.compact
    def __call__(self, x):
        return nn.Dropout(0.5, deterministic=False, rng_collection=self.stream)(x)


class IgnoresFlag(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        return nn.Dropout(0.5, deterministic=False)(x)


class Inference(nn.Module):
    @nn.compact
    def __call__(self, x, inference=False):
        return nn.Dropout(0.5, deterministic=inference)(x)


ON_PURPOSE = (
    "if random numbers in evaluation are intended, draw them from another stream: "
    "`rng_collection=\"noise\"` in `nn.Dropout`, and `fluxcb.models.linen(module, rng_streams=('dropout', 'noise'))` "
    "as the model"
)


def test_dropout_in_evaluation_raises_and_the_named_flag_turns_it_off():
    with pytest.raises(DeclarationError) as caught:
        linen(HiddenFlag()).apply({}, {}, XS, train=False, key=KEY)
    assert str(caught.value) == (
        "The Linen module `HiddenFlag` draws from the random stream `dropout` in evaluation, so dropout is on.\n"
        f"  where: {__name__}.HiddenFlag\n"
        "  why:   metrics and predictions would be those of a model with randomly disabled units\n"
        "  fix:   if `in_training` is true in training, pass "
        '`fluxcb.models.linen(module, "in_training")` as the model\n'
        f"     or: {ON_PURPOSE}"
    )
    model = linen(HiddenFlag(), "in_training")
    np.testing.assert_array_equal(model.apply({}, {}, XS, train=False, key=KEY)[0], XS)
    assert (np.asarray(model.apply({}, {}, XS, train=True, key=KEY)[0]) == 0).any()


@pytest.mark.parametrize(
    ("module", "fix"),
    [
        (AlwaysDrops(), "add a parameter `train` to `AlwaysDrops.__call__`, and write `deterministic=not train`"),
        (IgnoresFlag(), "write `deterministic=not train` for each `nn.Dropout`"),
        (Inference(), "if `inference` is true in evaluation, rename it to `deterministic`"),
    ],
)
def test_fix_of_dropout_in_evaluation_depends_on_the_call(module, fix):
    with pytest.raises(DeclarationError) as caught:
        linen(module).apply({}, {}, XS, train=False, key=KEY)
    assert caught.value.fix == (fix, ON_PURPOSE)


def test_other_streams_draw_random_numbers_in_evaluation():
    outputs, _ = linen(AlwaysDrops("noise"), rng_streams=("dropout", "noise")).apply({}, {}, XS, train=False, key=KEY)
    assert (np.asarray(outputs) == 0).any()


def test_dropout_in_evaluation_of_a_loss_function_raises_unless_it_passes_keys_itself():
    model = linen(HiddenFlag()).bind({}, {}, train=False, key=KEY).model
    with pytest.raises(DeclarationError) as caught:
        model(XS)
    assert caught.value.fix[0] == (
        "write `def loss_fn(model, batch, *, train):`, and pass `in_training=train` when you call the model"
    )
    np.testing.assert_array_equal(model(XS, in_training=False), XS)
    assert (np.asarray(model(XS, rngs={"dropout": KEY})) == 0).any()


class InferenceDropout(nn.Module):
    @nn.compact
    def __call__(self, x, inference=True):
        return nn.Dense(2)(nn.Dropout(0.5, deterministic=inference)(x))


class LearningNorm(nn.Module):
    @nn.compact
    def __call__(self, x, is_training_mode=False):
        return nn.Dense(2)(nn.BatchNorm(use_running_average=not is_training_mode)(x))


class ShortName(nn.Module):
    @nn.compact
    def __call__(self, x, use_ra=True):
        return nn.Dense(2)(nn.BatchNorm(use_running_average=use_ra)(x))


class Learns(nn.Module):
    """The name of the option does not say that it selects a mode. Another option changes only the outputs."""

    @nn.compact
    def __call__(self, x, wide=False, learn=False):
        return nn.Dense(4 if wide else 2)(nn.BatchNorm(use_running_average=not learn)(x))


class Freezes(nn.Module):
    @nn.compact
    def __call__(self, x, frozen=True):
        return nn.Dense(2)(nn.BatchNorm(use_running_average=frozen)(x))


class ByName(nn.Module):
    @nn.compact
    def __call__(self, x, stage="eval"):
        return nn.Dense(2)(nn.BatchNorm(use_running_average={"eval": True, "train": False}[stage])(x))


class SkipsNorm(nn.Module):
    """Batch normalization that is frozen on purpose, and an option that leaves it out."""

    @nn.compact
    def __call__(self, x, norm=True):
        return nn.Dense(2)(nn.BatchNorm(use_running_average=True)(x) if norm else x)


class FieldDropout(nn.Module):
    deterministic: bool = True

    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(nn.Dropout(0.5, deterministic=self.deterministic)(x))


@pytest.mark.parametrize(
    ("module", "layer", "option", "advice"),
    [
        (
            InferenceDropout(),
            "nn.Dropout",
            "deterministic",
            "If `inference` is true in evaluation, rename this parameter of `InferenceDropout.__call__` to "
            "`deterministic`.",
        ),
        (
            LearningNorm(),
            "nn.BatchNorm",
            "use_running_average",
            "If `is_training_mode` is true in training, pass `fluxcb.models.linen(module, 'is_training_mode')` as the "
            "model, or rename this parameter to one of train, training, is_training, is_train.",
        ),
        (
            ShortName(),
            "nn.BatchNorm",
            "use_running_average",
            "If `use_ra` is true in evaluation, rename this parameter of `ShortName.__call__` to `deterministic`.",
        ),
        (
            Learns(),
            "nn.BatchNorm",
            "use_running_average",
            "If `learn` is true in training, pass `fluxcb.models.linen(module, 'learn')` as the model, or rename this "
            "parameter to one of train, training, is_training, is_train.",
        ),
        (
            Freezes(),
            "nn.BatchNorm",
            "use_running_average",
            "If `frozen` is true in evaluation, rename this parameter of `Freezes.__call__` to `deterministic`.",
        ),
        (
            ByName(),
            "nn.BatchNorm",
            "use_running_average",
            "Add a parameter `train` to `ByName.__call__`, and write `use_running_average=not train`.",
        ),
        (
            FieldDropout(),
            "nn.Dropout",
            "deterministic",
            "Add a parameter `train` to `FieldDropout.__call__`, and write `deterministic=not train`.",
        ),
    ],
)
def test_layers_that_are_in_evaluation_mode_in_training_are_a_warning(module, layer, option, advice):
    model = linen(module)
    params, state = model.init(KEY, XS)
    with pytest.warns(UserWarning, match="In training") as caught:
        model.apply(params, state, XS, train=True, key=KEY)
    assert [str(warning.message) for warning in caught] == [
        f"In training, the Linen module `{type(module).__name__}` calls `{layer}` with `{option}=True`, because fluxcb "
        f"knows no train flag of its call. {advice}"
    ]
    model.apply(params, state, XS, train=False, key=KEY)


@pytest.mark.parametrize("module", [InferenceDropout(), Learns(), FieldDropout()])
def test_bound_module_warns_about_layers_in_evaluation_mode(module):
    model = linen(module)
    arrays = model.init(KEY, XS)
    with pytest.warns(UserWarning, match=r"In training, .* because fluxcb knows no train flag"):
        model.bind(*arrays, train=True, key=KEY).model(XS)
    model.bind(*arrays, train=False, key=KEY).model(XS)
    if isinstance(module, Learns):
        model.bind(*arrays, train=True, key=KEY).model(XS, learn=True)


class Deterministic(nn.Module):
    @nn.compact
    def __call__(self, x, deterministic=True):
        return nn.Dense(2)(nn.Dropout(0.5, deterministic=deterministic)(x))


def test_suggested_fixes_turn_the_layers_on():
    for model in (linen(Deterministic()), linen(LearningNorm(), "is_training_mode"), linen(Learns(), "learn")):
        params, state = model.init(KEY, XS)
        trained, _ = model.apply(params, state, XS, train=True, key=KEY)
        evaluated, _ = model.apply(params, state, XS, train=False, key=KEY)
        assert not np.allclose(trained, evaluated)


class Frozen(nn.Module):
    """Batch normalization that is frozen on purpose, and an option that is not a train flag."""

    @nn.compact
    def __call__(self, x, features=False):
        x = nn.BatchNorm(use_running_average=True)(x)
        return x if features else nn.Dense(2)(nn.Dropout(0.0, deterministic=True)(x))


@pytest.mark.parametrize("module", [Frozen(), SkipsNorm()])
def test_layers_in_evaluation_mode_on_purpose_give_no_warning(module):
    model = linen(module)
    params, state = model.init(KEY, XS)
    model.apply(params, state, XS, train=True, key=KEY)
