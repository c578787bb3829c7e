"""Arguments that are True or False: any other value is an error, because a text such as "no" would count as true."""

import jax.numpy as jnp
import optax
import pytest

import fluxcb
from fluxcb import DeclarationError, Learner
from fluxcb.testing import testlearner


def from_loss(**options):
    return Learner.from_loss({"w": jnp.ones(())}, lambda params, batch: params["w"], optax.sgd(0.1), **options)


def model(**options):
    pair = (lambda key, xs: {"w": jnp.ones(())}, lambda params, xs: params["w"] * xs)
    return Learner(pair, lambda outputs, ys: jnp.mean(outputs - ys), optax.sgd(0.1), **options)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda value: model(default_callbacks=value), "`default_callbacks` of `Learner`"),
        (lambda value: from_loss(default_callbacks=value), "`default_callbacks` of `Learner`"),
        (lambda value: model(exact_observers=value), "`exact_observers` of `Learner`"),
        (lambda value: from_loss(exact_observers=value), "`exact_observers` of `Learner`"),
        (lambda value: testlearner().explain(costs=value), "`costs` of `learner.explain`"),
        (
            lambda value: fluxcb.Population(lambda key: testlearner(key=key), key=[0, 1], default_callbacks=value),
            "`default_callbacks` of `Population`",
        ),
    ],
)
def test_other_values_than_bools_are_errors(call, name, refused):
    for value in ("no", 1, None):
        with refused(DeclarationError, f"{name} must be True or False, not {value!r}.\n  fix:   pass True or False"):
            call(value)
    call(False)
