"""A Learner keeps only one copy of the parameters of a model: the trained ones."""

import gc
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fluxcb
from fluxcb import Callback, Learner, Read, on
from fluxcb.events import StepEnd
from fluxcb.phases import TrainingPhase

BATCH = (np.ones((4, 3), np.float32), np.ones((4, 2), np.float32))


class Normed(nnx.Module):
    def __init__(self, rngs):
        self.norm, self.linear = nnx.BatchNorm(3, rngs=rngs), nnx.Linear(3, 2, rngs=rngs)

    def __call__(self, xs):
        return self.linear(self.norm(xs))


class Stateful(eqx.Module):
    norm: eqx.nn.BatchNorm
    linear: eqx.nn.Linear

    def __init__(self, key):
        self.norm = eqx.nn.BatchNorm(3, axis_name="batch", mode="batch")
        self.linear = eqx.nn.Linear(3, 2, key=key)

    def __call__(self, x, state):
        x, state = self.norm(x, state)
        return self.linear(x), state


MODELS = {
    "nnx": lambda: Normed(nnx.Rngs(0)),
    "equinox": lambda: eqx.nn.MLP(3, 2, 4, 1, key=jax.random.key(0)),
    "equinox with state": lambda: eqx.nn.make_with_state(Stateful)(jax.random.key(0)),
    "nnx adapter": lambda: fluxcb.models.nnx(Normed(nnx.Rngs(0))),
    "equinox adapter": lambda: fluxcb.models.equinox(eqx.nn.Linear(3, 2, key=jax.random.key(0))),
}


def learner_of(model, *callbacks):
    return Learner(
        model,
        lambda outputs, ys: jnp.mean((outputs - ys) ** 2),
        optax.sgd(0.125),
        data=[BATCH],
        callbacks=callbacks,
        default_callbacks=False,
    )


def arrays_of(model):
    """Return the initial floating-point arrays of a model."""
    held = (model if hasattr(model, "held") else fluxcb.models.adapt(model)).held
    return [leaf for leaf in jax.tree.leaves(held) if jnp.issubdtype(leaf.dtype, jnp.floating)]


@pytest.fixture(params=MODELS)
def make(request):
    return MODELS[request.param]


def test_initial_arrays_are_freed_with_user_variable(make):
    model = make()
    references = [weakref.ref(leaf) for leaf in arrays_of(model)]
    learner = learner_of(model)
    assert all(reference() is not None for reference in references)  # they are the user's
    del model
    gc.collect()
    assert len(references) > 1
    assert [reference() for reference in references] == [None] * len(references)
    learner.fit(1)
    assert learner.step == 1


def test_construction_allocates_only_carry(make):
    learner_of(make()).fit(1)  # arrays that JAX and the libraries create once
    gc.collect()
    before = {id(array) for array in jax.live_arrays()}
    learner = learner_of(make())
    gc.collect()
    new = [array for array in jax.live_arrays() if id(array) not in before]
    floats = sum(array.nbytes for array in new if jnp.issubdtype(array.dtype, jnp.floating))
    carried = (learner.state["params"], learner.state["model_state"])
    expected = sum(leaf.nbytes for leaf in jax.tree.leaves(carried) if jnp.issubdtype(leaf.dtype, jnp.floating))
    assert floats == expected


def test_model_of_user_stays_unchanged_and_reusable(make):
    """The user's model is unchanged, and can be passed to another Learner or assigned."""
    model = make()
    before = [np.array(leaf) for leaf in arrays_of(model)]
    first, second = learner_of(model), learner_of(model)
    first.fit(1)
    second.fit(1)
    for a, b in zip(jax.tree.leaves(first.params), jax.tree.leaves(second.params), strict=True):
        np.testing.assert_array_equal(a, b)
    for leaf, value in zip(arrays_of(model), before, strict=True):
        np.testing.assert_array_equal(leaf, value)
    first.model = model
    assert_initial(first, model)
    first.fit(1)
    for a, b in zip(jax.tree.leaves(first.params), jax.tree.leaves(second.params), strict=True):
        np.testing.assert_array_equal(a, b)


def assert_initial(learner, model):
    adapter = model if hasattr(model, "held") else fluxcb.models.adapt(model)
    for a, b in zip(jax.tree.leaves(learner.params), jax.tree.leaves(adapter.held[0]), strict=True):
        np.testing.assert_array_equal(a, b)


class Looks(Callback):
    def stateaccess(self):
        return {"model": Read()}

    @on
    def look(self, event: StepEnd, phase: TrainingPhase, learner):
        self.seen = learner.model


def test_handlers_see_structure_of_model():
    looks = Looks()
    learner_of(Normed(nnx.Rngs(0)), looks).fit(1)
    assert type(looks.seen) is Normed
    assert looks.seen.linear.kernel.get_raw_value() == jax.ShapeDtypeStruct((3, 2), jnp.float32)
    looks = Looks()
    learner_of(MODELS["equinox"](), looks).fit(1)
    assert type(looks.seen) is eqx.nn.MLP
    assert looks.seen.layers[0].weight == jax.ShapeDtypeStruct((4, 3), jnp.float32)
