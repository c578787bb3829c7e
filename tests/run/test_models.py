"""Learners for models of every library train, keep the user's object unchanged, and return a trained model."""

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from fluxcb import Callback, DeclarationError, Learner, Read, on
from fluxcb.events import StepEnd
from fluxcb.phases import Phase, ValidationPhase

RNG = np.random.default_rng(0)
XS = RNG.normal(size=(6, 16, 4)).astype(np.float32)
YS = (XS @ np.array([[1.0], [-2.0], [0.5], [3.0]], np.float32)) + 1
BATCHES = list(zip(XS, YS, strict=True))


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.Dense(16)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(x)
        x = nn.Dropout(0.1, deterministic=not train)(nn.relu(x))
        return nn.Dense(1)(x)


class NNXNet(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(4, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.second = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, x):
        return self.second(self.dropout(nnx.relu(self.norm(self.first(x)))))


class EquinoxNet(eqx.Module):
    first: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    second: eqx.nn.Linear

    def __init__(self, key):
        one, two = jax.random.split(key)
        self.first, self.second = eqx.nn.Linear(4, 16, key=one), eqx.nn.Linear(16, 1, key=two)
        self.dropout = eqx.nn.Dropout(0.1)

    def __call__(self, x, *, key=None):
        return self.second(self.dropout(jax.nn.relu(self.first(x)), key=key))


def pair_init(key, xs):
    one, two = jax.random.split(key)
    return {"in": 0.3 * jax.random.normal(one, (4, 16)), "out": 0.3 * jax.random.normal(two, (16, 1))}


def pair_apply(params, xs, *, key, train):
    hidden = jax.nn.relu(xs @ params["in"])
    if train:
        hidden = hidden * jax.random.bernoulli(key, 0.9, hidden.shape) / 0.9
    return hidden @ params["out"]


MODELS = {
    "pair": lambda: (pair_init, pair_apply),
    "linen": LinenNet,
    "nnx": lambda: NNXNet(nnx.Rngs(0)),
    "equinox": lambda: EquinoxNet(jax.random.key(0)),
}
# How the trained model is called: it is in evaluation mode.
CALLS = {
    "pair": lambda model, xs: model(xs),
    "linen": lambda model, xs: model(xs, train=False),
    "nnx": lambda model, xs: model(xs),
    "equinox": lambda model, xs: jax.vmap(model)(xs),
}


class Outputs(Callback):
    def __init__(self):
        self.losses = {"training": [], "validation": []}
        self.outputs = []

    def stateaccess(self):
        return {"step": {"loss": Read(), "outputs": Read()}}

    @on
    def keep(self, event: StepEnd, phase: Phase, learner):
        self.losses[type(phase).name].append(float(learner.step.loss))
        if isinstance(phase, ValidationPhase):
            self.outputs.append(np.array(learner.step.outputs))


def loss_fn(outputs, ys):
    return jnp.mean((outputs - ys) ** 2)


@pytest.fixture(scope="module", params=list(MODELS))
def trained(request):
    model = MODELS[request.param]()
    leaves = [np.array(leaf) for leaf in jax.tree.leaves(model) if hasattr(leaf, "shape") and not _is_key(leaf)]
    outputs = Outputs()
    learner = Learner(
        model, loss_fn, optax.adam(0.02), data=(BATCHES, BATCHES[:2]), callbacks=[outputs], default_callbacks=False
    )
    learner.fit(15)
    return request.param, model, leaves, learner, outputs


def _is_key(leaf):
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def test_loss_decreases(trained):
    losses = trained[4].losses
    assert np.mean(losses["training"][-6:]) < 0.4 * np.mean(losses["training"][:6])
    assert np.mean(losses["validation"][-2:]) < 0.5 * np.mean(losses["validation"][:2])


def test_validation_runs_in_evaluation_mode_with_trained_model(trained):
    name, _, _, learner, outputs = trained
    for kept, (xs, _) in zip(outputs.outputs[-2:], BATCHES, strict=False):
        np.testing.assert_allclose(CALLS[name](learner.model, xs), kept, rtol=1e-4, atol=1e-5)


def test_validation_is_deterministic(trained):
    _, _, _, learner, outputs = trained
    before = learner.state
    learner.run_epoch(ValidationPhase())
    learner.run_epoch(ValidationPhase())
    np.testing.assert_array_equal(outputs.outputs[-1], outputs.outputs[-3])
    after = learner.state
    for part in ("params", "model_state", "opt_state"):
        jax.tree.map(
            lambda a, b: None if _is_key(a) else np.testing.assert_array_equal(a, b), before[part], after[part]
        )


def test_user_model_is_unchanged(trained):
    _, model, leaves, _, _ = trained
    now = [np.array(leaf) for leaf in jax.tree.leaves(model) if hasattr(leaf, "shape") and not _is_key(leaf)]
    for a, b in zip(leaves, now, strict=True):
        np.testing.assert_array_equal(a, b)


def test_model_is_new_object_each_time(trained):
    name, _, _, learner, _ = trained
    one = learner.model
    learner.fit(1)
    other = learner.model
    xs = BATCHES[0][0]
    first = np.array(CALLS[name](one, xs))  # still there, though the carry it was copied from is gone
    assert not np.array_equal(first, CALLS[name](other, xs))


def test_running_statistics_match_batches():
    learner = Learner(LinenNet(), loss_fn, optax.sgd(0.0), data=BATCHES, default_callbacks=False)
    params = learner.params
    learner.fit(1)
    state = jax.tree.map(np.array, learner.state["model_state"])
    kernel, bias = params["Dense_0"]["kernel"], params["Dense_0"]["bias"]
    mean = np.zeros(16, np.float32)
    for xs, _ in BATCHES:
        mean = 0.9 * mean + 0.1 * np.mean(xs @ kernel + bias, axis=0)
    found = jax.tree.leaves({k: v for k, v in _flat(state).items() if k.endswith("mean")})
    np.testing.assert_allclose(found[0], mean, rtol=1e-3, atol=1e-5)


def _flat(tree):
    return {
        "/".join(str(getattr(k, "key", k)) for k in path): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
    }


# -- from_loss ---------------------------------------------------------------------------------------------------------


class Aux(Callback):
    def __init__(self):
        self.kept = []

    def stateaccess(self):
        return {"step": {"loss": Read(), "aux": Read()}}

    @on
    def keep(self, event: StepEnd, phase: Phase, learner):
        self.kept.append((type(phase).name, float(learner.step.loss), jax.tree.map(np.array, learner.step.aux)))


def test_from_loss_with_aux():
    def loss(params, batch, key):
        xs, ys = batch
        error = xs @ params["w"] - ys
        return jnp.mean(error**2), {"largest": jnp.max(jnp.abs(error)), "noise": jax.random.uniform(key)}

    aux = Aux()
    learner = Learner.from_loss(
        {"w": jnp.zeros((4, 1))}, loss, optax.sgd(0.1), data=(BATCHES, BATCHES[:1]), callbacks=[aux],
        default_callbacks=False,
    )  # fmt: skip
    learner.fit(1)
    w = np.zeros((4, 1), np.float32)
    for (phase, value, kept), (xs, ys) in zip(aux.kept, [*BATCHES, BATCHES[0]], strict=True):
        error = xs @ w - ys
        np.testing.assert_allclose(value, np.mean(error**2), rtol=1e-4)
        np.testing.assert_allclose(kept["largest"], np.max(np.abs(error)), rtol=1e-4)
        if phase == "training":
            w = w - 0.1 * 2 * xs.T @ error / len(xs)
    np.testing.assert_allclose(learner.params["w"], w, rtol=1e-4, atol=1e-6)
    assert [phase for phase, _, _ in aux.kept] == ["training"] * 6 + ["validation"]
    assert len({float(kept["noise"]) for _, _, kept in aux.kept}) == 7


def test_from_loss_without_aux():
    learner = Learner.from_loss(
        {"w": jnp.zeros((4, 1)), "b": jnp.zeros(1)},
        lambda params, batch, key: jnp.mean((batch[0] @ params["w"] + params["b"] - batch[1]) ** 2),
        optax.sgd(0.1),
        data=BATCHES,
        default_callbacks=False,
    )
    learner.fit(30)
    np.testing.assert_allclose(learner.params["w"][:, 0], [1.0, -2.0, 0.5, 3.0], atol=1e-2)
    np.testing.assert_allclose(learner.params["b"], [1.0], atol=1e-2)
    with pytest.raises(DeclarationError) as raised:
        learner.model  # noqa: B018 - the access is the test
    assert str(raised.value) == (
        "This Learner has no model: it was built with `Learner.from_loss`.\n  fix:   use `learner.params`"
    )


def test_missing_aux_raises_at_construction():
    from fluxcb import MissingStateError

    with pytest.raises(MissingStateError) as raised:
        Learner.from_loss(
            {"w": jnp.zeros((4, 1))},
            lambda params, batch, key: jnp.mean(batch[0] @ params["w"]),
            optax.sgd(0.1),
            data=BATCHES,
            callbacks=[Aux()],
            default_callbacks=False,
        )
    assert str(raised.value).splitlines()[0] == (
        "Aux() reads `step.aux` at StepEnd x LossTrainingPhase, but the step does not compute it."
    )


def test_set_model_with_same_structure():
    learner = Learner((pair_init, pair_apply), loss_fn, optax.sgd(0.1), data=BATCHES, default_callbacks=False)
    learner.fit(1)
    learner.set_model(((lambda key, xs: {"in": jnp.ones((4, 16)), "out": jnp.ones((16, 1))}), pair_apply))
    assert float(learner.params["in"][0, 0]) == 1.0
    with pytest.raises(DeclarationError) as raised:
        learner.set_model(((lambda key, xs: {"in": jnp.ones((4, 8)), "out": jnp.ones((8, 1))}), pair_apply))
    assert str(raised.value) == (
        "The new model does not fit the Learner: ['in']: expected float32[4, 16], got float32[4, 8].\n"
        "  where: ['out']: expected float32[16, 1], got float32[8, 1]\n"
        "  fix:   build a new Learner for a model of another structure"
    )
    assert float(learner.params["in"][0, 0]) == 1.0
