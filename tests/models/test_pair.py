import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fluxcb._errors import DeclarationError
from fluxcb.models import pair

XS = jnp.arange(6.0).reshape(2, 3)


def init(key, xs):
    return {"w": jax.random.normal(key, (xs.shape[-1], 4))}


def apply(params, xs):
    return jnp.tanh(xs @ params["w"])


def test_pair_calls_both_functions():
    model = pair(init, apply)
    key = jax.random.key(3)
    params, model_state = model.init(key, XS)
    outputs, new_state = model.apply(params, model_state, XS, train=True, key=key)
    np.testing.assert_array_equal(params["w"], init(key, XS)["w"])
    np.testing.assert_array_equal(outputs, apply(init(key, XS), XS))
    assert model_state == {}
    assert new_state == {}


def test_only_keywords_in_signature_of_apply_are_passed():
    calls = []

    def both(params, xs, *, key, train):
        calls.append((key, train))
        return xs

    def flag_only(params, xs, train=False):
        calls.append(train)
        return xs

    def anything(params, xs, **keywords):
        calls.append(keywords)
        return xs

    for function in (both, flag_only, anything):
        pair(init, function).apply({}, {}, XS, train=True, key="a key")
    assert calls == [("a key", True), True, {}]


def test_keywords_of_jitted_apply_are_found():
    noisy = jax.jit(lambda params, xs, *, key: xs + jax.random.normal(key, xs.shape))
    key = jax.random.key(1)
    outputs, _ = pair(init, noisy).apply({}, {}, XS, train=True, key=key)
    np.testing.assert_array_equal(outputs, noisy({}, XS, key=key))


def test_stateful_pair_updates_state_only_in_training():
    def counting_init(key, xs):
        return init(key, xs), {"calls": jnp.zeros((), jnp.int32)}

    def counting_apply(params, model_state, xs):
        return apply(params, xs), {"calls": model_state["calls"] + 1}

    model = pair(counting_init, counting_apply, stateful=True)
    params, model_state = model.init(jax.random.key(0), XS)
    outputs, trained = model.apply(params, model_state, XS, train=True, key=None)
    _, evaluated = model.apply(params, trained, XS, train=False, key=None)
    np.testing.assert_array_equal(outputs, apply(params, XS))
    assert int(trained["calls"]) == 1
    assert int(evaluated["calls"]) == 1


def test_rebuilt_model_has_params_and_evaluation_mode():
    def flagged(params, xs, *, key, train):
        assert (key, train) == (None, False)
        return apply(params, xs)

    params = {"w": jnp.ones((3, 4))}
    model = pair(init, flagged).rebuild(params, {})
    assert model.params is params
    np.testing.assert_array_equal(model(XS), apply(params, XS))
    assert repr(pair(init, apply).rebuild({"w": 1}, {})) == "PairModel(params={'w': 1}, model_state={})"


def test_repr_names_both_functions():
    assert repr(pair(init, apply)) == "pair(init, apply)"


def test_non_callable_raises():
    with pytest.raises(DeclarationError) as caught:
        pair({"w": 1}, apply)  # pyright: ignore[reportArgumentType]
    assert str(caught.value) == (
        "`init` of a model pair must be a function, not of type `dict`.\n"
        "  where: fluxcb.models.pair(init, apply)\n"
        "  fix:   pass `init(key, xs) -> params` and `apply(params, xs) -> outputs`"
    )


def test_stateful_init_returning_only_params_raises():
    with pytest.raises(DeclarationError) as caught:
        pair(init, lambda params, state, xs: (xs, state), stateful=True).init(jax.random.key(0), XS)
    assert str(caught.value) == (
        "`init` of a stateful pair must return `(params, model_state)`, but returned `dict`.\n"
        f"  where: init  {__file__}:{init.__code__.co_firstlineno}\n"
        "  fix:   return both\n"
        "     or: leave out `stateful=True`"
    )


def test_functions_with_other_signatures_raise():
    def init_of_a_key(key):
        return {}

    def swapped_init(xs, rng):
        return {}

    def swapped_apply(xs, params):
        return xs

    def apply_with_rng(params, xs, rng):
        return xs

    for make, text in (
        (
            lambda: pair(init_of_a_key, apply),
            "`init` of a model pair takes (key), and is called as `init(key, xs)`.\n"
            f"  where: {init_of_a_key.__qualname__}  {__file__}:{init_of_a_key.__code__.co_firstlineno}\n"
            "  fix:   write `def init(key, xs):`",
        ),
        (
            lambda: pair(swapped_init, apply),
            "`init` of a model pair takes (xs, rng), and is called as `init(key, xs)`.\n"
            f"  where: {swapped_init.__qualname__}  {__file__}:{swapped_init.__code__.co_firstlineno}\n"
            "  fix:   write `def init(key, xs):`",
        ),
        (
            lambda: pair(apply, init),
            "The two functions of a model pair are in the wrong order.\n"
            f"  where: apply  {__file__}:{apply.__code__.co_firstlineno}\n"
            "  why:   the second one takes (key, xs), so it is the one that returns the params\n"
            "  fix:   swap them: `(init, apply)`",
        ),
        (
            lambda: pair(init, swapped_apply),
            "`apply` of a model pair takes (xs, params), and is called as `apply(params, xs)`.\n"
            f"  where: {swapped_apply.__qualname__}  {__file__}:{swapped_apply.__code__.co_firstlineno}\n"
            "  fix:   write `def apply(params, xs):`",
        ),
        (
            lambda: pair(init, apply_with_rng),
            "`apply` of a model pair takes (params, xs, rng), and is called as `apply(params, xs)`.\n"
            f"  where: {apply_with_rng.__qualname__}  {__file__}:{apply_with_rng.__code__.co_firstlineno}\n"
            "  fix:   rename `rng` to `key`: `def apply(params, xs, key):`\n"
            "     or: write `def apply(params, xs):`",
        ),
        (
            lambda: pair(init, apply, stateful=True),
            "`apply` of a model pair takes (params, xs), and is called as `apply(params, model_state, xs)`.\n"
            f"  where: apply  {__file__}:{apply.__code__.co_firstlineno}\n"
            "  fix:   write `def apply(params, model_state, xs):`",
        ),
    ):
        with pytest.raises(DeclarationError) as caught:
            make()
        assert str(caught.value) == text


def dropout_with_key(params, xs, key=None):
    return xs if key is None else jnp.where(jax.random.bernoulli(key, 0.5, xs.shape), xs / 0.5, 0)


def test_optional_key_is_not_passed_in_evaluation():
    model, key = pair(init, dropout_with_key), jax.random.key(3)
    np.testing.assert_array_equal(model.apply({}, {}, XS, train=False, key=key)[0], XS)
    np.testing.assert_array_equal(model.bind({}, {}, train=False, key=key).model(XS), XS)
    dropped = dropout_with_key({}, XS, key)
    np.testing.assert_array_equal(model.apply({}, {}, XS, train=True, key=key)[0], dropped)
    np.testing.assert_array_equal(model.bind({}, {}, train=True, key=key).model(XS), dropped)


@pytest.mark.parametrize(
    ("flagged", "inverted"),
    [
        (lambda params, xs, training=False: (xs, training), False),
        (lambda params, xs, *, is_training: (xs, is_training), False),
        (lambda params, xs, is_train=True: (xs, is_train), False),
        (lambda params, xs, deterministic=True: (xs, deterministic), True),
    ],
)
def test_each_train_flag_is_set(flagged, inverted):
    model = pair(init, flagged)
    for train in (True, False):
        assert model.apply({}, {}, XS, train=train, key=None)[0][1] is (train is not inverted)
        assert model.bind({}, {}, train=train, key=None).model(XS)[1] is (train is not inverted)
    assert model.rebuild({}, {})(XS)[1] is inverted


def test_flag_of_partial_function_stays():
    model = pair(init, functools.partial(lambda params, xs, training=False: (xs, training), training=False))
    assert model.apply({}, {}, XS, train=True, key=None)[0][1] is False


def test_parameter_for_a_key_with_another_name_is_a_warning():
    text = (
        "`apply` of the model pair has a parameter `dropout_rng`, but receives no random key there. Rename the "
        "parameter to `key`."
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(text)}$"):
        pair(init, lambda params, xs, dropout_rng=None: xs)


def test_stateful_apply_without_new_state_is_an_error_whose_fix_works(refused):
    def apply(params, model_state, xs):
        return xs

    text = (
        "`apply` of a stateful pair must return `(outputs, new_model_state)`, but returned float32[{}].\n"
        f"  where: {apply.__qualname__}  {__file__}:{apply.__code__.co_firstlineno}\n"
        "  why:   the next step starts from the new state\n"
        "  fix:   return both\n"
        "     or: leave out `stateful=True`, and write `def apply(params, xs):`"
    )
    shape = ", ".join(map(str, XS.shape))
    model = pair(init, apply, stateful=True)
    with refused(DeclarationError, text.format(shape)):
        model.apply({}, {}, XS, train=True, key=None)
    with refused(DeclarationError, text.format(shape)):
        model.bind({}, {}, train=True, key=None).model(XS)
    fixed = pair(init, lambda params, model_state, xs: (xs, model_state), stateful=True)
    assert fixed.apply({}, {"n": 1}, XS, train=True, key=None)[1] == {"n": 1}


def test_stateful_apply_with_the_state_last_is_an_error(refused):
    with pytest.raises(DeclarationError) as caught:
        pair(init, lambda params, xs, state: (xs, state), stateful=True)
    assert str(caught.value).startswith(
        "`apply` of a model pair takes (params, xs, state), and is called as `apply(params, model_state, xs)`.\n"
    )
    assert str(caught.value).endswith("  fix:   write `def apply(params, model_state, xs):`")


def test_mode_that_is_a_text_is_a_warning_whose_fixes_work():
    def apply(params, xs, mode="eval", padding="same"):
        return xs, mode

    text = (
        "`apply` of the model pair has a parameter `mode`, which fluxcb does not pass, so it is always 'eval'. If it "
        "says whether the model is being trained, replace it by a parameter `train`, which is True in training and "
        "False in evaluation. Otherwise, pass `functools.partial(apply, mode='eval')` to make the value explicit."
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(text)}$"):
        pair(init, apply)
    assert pair(init, functools.partial(apply, mode="eval")).apply({}, {}, XS, train=True, key=None)[0][1] == "eval"
    replaced = pair(init, lambda params, xs, train: (xs, train))
    assert [replaced.apply({}, {}, XS, train=train, key=None)[0][1] for train in (True, False)] == [True, False]


@pytest.mark.parametrize(
    ("apply", "flag", "default", "when", "meant"),
    [
        (lambda params, xs, in_training=False: (xs, in_training), "in_training", False, "training", "train"),
        (lambda params, xs, use_dropout=True: (xs, use_dropout), "use_dropout", True, "training", "train"),
        (lambda params, xs, inference=True: (xs, inference), "inference", True, "evaluation", "deterministic"),
        (lambda params, xs, is_eval=False: (xs, is_eval), "is_eval", False, "evaluation", "deterministic"),
    ],
)
def test_flag_with_another_name_is_a_warning(apply, flag, default, when, meant):
    text = (
        f"`apply` of the model pair has a parameter `{flag}`, which fluxcb does not pass, so it is always {default}. "
        f"If it is true in {when}, rename the parameter to `{meant}`. Otherwise, pass "
        f"`functools.partial(apply, {flag}={default})` to make the value explicit."
    )
    with pytest.warns(UserWarning, match=f"^{re.escape(text)}$"):
        pair(init, apply)
    explicit = pair(init, functools.partial(apply, **{flag: default}))
    assert explicit.apply({}, {}, XS, train=True, key=None)[0][1] is default
    renamed = {
        "train": lambda params, xs, train=False: (xs, train),
        "deterministic": lambda params, xs, deterministic=True: (xs, deterministic),
    }[meant]
    for train in (True, False):  # the flag then follows the step
        assert pair(init, renamed).apply({}, {}, XS, train=train, key=None)[0][1] is (train is (meant == "train"))


def test_options_that_are_no_modes_are_no_warning():
    model = pair(init, lambda params, xs, use_model=True, latest=False, train=False, in_training=False: (xs, train))
    assert model.apply({}, {}, XS, train=True, key=None)[0][1] is True


def test_trained_pair_passes_an_explicit_key():
    model, key = pair(init, dropout_with_key).rebuild({}, {}), jax.random.key(3)
    np.testing.assert_array_equal(model(XS), XS)
    np.testing.assert_array_equal(model(XS, key=key), dropout_with_key({}, XS, key))


def test_required_key_and_key_beside_train_are_passed_in_evaluation():
    def required(params, xs, key):
        return key

    def with_train(params, xs, key=None, train=False):
        return key

    for function in (required, with_train):
        assert pair(init, function).apply({}, {}, XS, train=False, key="a key")[0] == "a key"


class Normalized(nn.Module):
    @nn.compact
    def __call__(self, xs, train=False):
        return nn.BatchNorm(use_running_average=not train)(xs)


class AlwaysNormalized(nn.Module):
    @nn.compact
    def __call__(self, xs):
        return nn.BatchNorm(use_running_average=True)(xs)


def test_methods_of_a_linen_module_with_a_train_flag_raise():
    with pytest.raises(DeclarationError) as caught:
        pair(Normalized().init, Normalized().apply)
    assert str(caught.value) == (
        "`apply` of a model pair is a method of the Linen module `Normalized`, which takes `train`.\n"
        f"  where: {__name__}.Normalized.__call__\n"
        "  why:   a pair passes neither this flag nor random keys to the module, so dropout would be off in training\n"
        "  fix:   pass the module itself instead of `(module.init, module.apply)`"
    )


@pytest.mark.parametrize("wrapped", [False, True])
def test_init_that_returns_state_of_a_linen_module_raises(wrapped):
    module = AlwaysNormalized()
    model = pair((lambda key, xs: module.init(key, xs)) if wrapped else module.init, module.apply)
    with pytest.raises(DeclarationError) as caught:
        model.init(jax.random.key(0), XS)
    assert str(caught.value).partition("  where:")[0] == (
        "`init` of a model pair returned the collections of a Flax Linen module: `params` and `batch_stats`.\n"
    )
    assert str(caught.value).partition("  why:")[2] == (
        "   the optimizer would change `batch_stats`, such as running averages, like trained parameters\n"
        "  fix:   pass the module itself instead of a pair\n"
        "     or: write `fluxcb.models.pair(init, apply, stateful=True)`, where `init` returns `(params, model_state)` "
        "and `apply(params, model_state, xs)` returns `(outputs, new_model_state)`"
    )


def test_methods_of_a_linen_module_without_state_are_a_pair():
    model = pair(nn.Dense(3).init, nn.Dense(3).apply)
    params, _ = model.init(jax.random.key(0), XS)
    np.testing.assert_array_equal(model.apply(params, {}, XS, train=True, key=None)[0], nn.Dense(3).apply(params, XS))


def test_parameters_of_functions_may_be_called_params():
    made, _ = pair(lambda key, xs: {"params": 1.0, "scale": 2.0}, apply).init(jax.random.key(0), XS)
    assert made == {"params": 1.0, "scale": 2.0}
