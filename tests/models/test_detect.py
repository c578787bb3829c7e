import subprocess
import sys
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx as flax_nnx

from fluxcb._errors import DeclarationError
from fluxcb.models import adapt

KEY = jax.random.key(0)


class Dense(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(2)(x)

    def rebuild(self):
        """Make the module look like an adapter."""


class Normed(eqx.Module):
    norm: eqx.nn.BatchNorm

    def __init__(self):
        self.norm = eqx.nn.BatchNorm(3, "batch", mode="batch")

    def __call__(self, x, state):
        return self.norm(x, state)


class Transformed(NamedTuple):
    init: Any
    apply: Any


class Adapter:
    def init(self, key, xs):
        return {}, {}

    def apply(self, params, model_state, xs, *, train, key):
        return xs, model_state

    def rebuild(self, params, model_state):
        return self


def init(key, xs):
    return {}


def apply(params, xs):
    return xs


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (flax_nnx.Linear(2, 3, rngs=flax_nnx.Rngs(0)), "nnx(Linear)"),
        (nn.Dense(3), "linen(Dense)"),
        (Dense(), "linen(Dense)"),
        (eqx.nn.MLP(2, 3, 4, 1, key=KEY), "equinox(MLP)"),
        (eqx.nn.make_with_state(Normed)(), "equinox(Normed)"),
        ((init, apply), "pair(init, apply)"),
        (Transformed(init, apply), "pair(init, apply)"),
    ],
)
def test_model_kind_is_detected(model, expected):
    assert repr(adapt(model)) == expected


def test_adapter_is_returned_unchanged():
    custom = Adapter()
    assert adapt(custom) is custom
    for model in (nn.Dense(3), (init, apply)):
        adapter = adapt(model)
        assert adapt(adapter) is adapter


def test_pair_imports_neither_flax_nor_equinox():
    code = (
        "import sys\n"
        "from fluxcb.models import adapt\n"
        "adapt((lambda key, xs: {}, lambda params, xs: xs))\n"
        "print(sorted({name.split('.')[0] for name in sys.modules} & {'flax', 'equinox', 'haiku'}))"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


EXPLANATION = (
    "  why:   the step needs a model that it can initialize and apply to a batch of inputs\n"
    "  fix:   pass a Flax NNX or Linen module, or an Equinox module\n"
    "     or: pass `(module, state)` as `eqx.nn.make_with_state(make_module)(...)` returns it\n"
    "     or: pass two functions, `(init(key, xs) -> params, apply(params, xs) -> outputs)`\n"
    "     or: pass an object with the methods `init`, `apply` and `rebuild` of `fluxcb.models.ModelAdapter`\n"
    "     or: use `Learner.from_loss(params, loss_fn, ...)` if you have params and a loss function"
)


@pytest.mark.parametrize(
    ("model", "described"),
    [
        (3, "of type `int`"),
        (apply, "of type `function`"),
        ({"w": jnp.ones(2)}, "of type `dict`"),
        ((init, 1), "a tuple (function, int)"),
        ((init, apply, apply), "a tuple (function, function, function)"),
        ((nn.Dense(3), nn.Dense(3)), "a tuple (Dense, Dense)"),
        (optax.sgd(0.1), "of type `GradientTransformationExtraArgs`"),
        (flax_nnx.Rngs(0), "of type `Rngs`"),
    ],
)
def test_unsupported_model_raises(model, described):
    with pytest.raises(DeclarationError) as caught:
        adapt(model)
    assert str(caught.value) == f"`model` is {described}, which fluxcb cannot train.\n{EXPLANATION}"


def test_linen_module_with_its_variables_has_a_fix_that_keeps_them():
    module = nn.Dense(3)
    variables = module.init(jax.random.key(1), jnp.ones((2, 5)))
    with pytest.raises(DeclarationError, match=r"fix:   pass `module\.bind\(variables\)` for a Linen module and its"):
        adapt((module, variables))
    with pytest.raises(DeclarationError, match=r"fix:   pass `module\.bind\(variables\)` for a Linen module and its"):
        adapt((module.apply, variables))
    params, _ = adapt(module.bind(variables)).init(jax.random.key(2), jnp.ones((2, 5)))
    assert (params["kernel"] == variables["params"]["kernel"]).all()


@pytest.mark.parametrize("in_order", [lambda params: (apply, params), lambda params: (params, apply)])
def test_function_with_params_has_a_fix_that_keeps_them(in_order):
    params = {"w": jnp.full((2, 3), 4.0)}
    text = r"fix:   pass `\(lambda key, xs: params, apply\)` for a function and its params"
    with pytest.raises(DeclarationError, match=text):
        adapt(in_order(params))
    initial, _ = adapt((lambda key, xs: params, apply)).init(jax.random.key(2), jnp.ones((5, 2)))
    assert initial is params


def test_model_class_raises():
    with pytest.raises(DeclarationError) as caught:
        adapt(Dense)
    assert str(caught.value) == (
        f"`model` is the class `Dense`, not an instance of it.\n  where: {__name__}.Dense\n  fix:   pass `Dense(...)`"
    )
