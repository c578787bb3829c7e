"""Learners for models of every library train, keep the user's object unchanged, and return a trained model."""

import zlib

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fluxcb
from fluxcb import Callback, DeclarationError, Learner, Read, on
from fluxcb.callbacks import Metrics
from fluxcb.events import StepEnd
from fluxcb.models import linen
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


def key_of_model(key, step):
    """Return the key of a training step, as docs/how-to/compare-with-a-loop.md documents it."""
    return jax.random.fold_in(jax.random.fold_in(key, step), zlib.crc32(b"phase training") & 0x7FFFFFFF)


def loss_of_model(model, batch):
    xs, ys = batch
    return loss_fn(model(xs), ys)


# Not Adam: the gradient of a bias before batch normalization is rounding noise, and Adam scales it to full updates.
OPTIMIZER = optax.sgd(0.02, momentum=0.9)


def trained_by_hand(apply, params, model_state, epochs):
    """Train with a loop of Optax and `apply(params, model_state, xs, key)`. Return the parameters, state and losses."""
    opt_state, losses = OPTIMIZER.init(params), []

    @jax.jit
    def step(params, model_state, opt_state, batch, key):
        def loss(params):
            outputs, new_state = apply(params, model_state, batch[0], key)
            return loss_fn(outputs, batch[1]), new_state

        (value, model_state), grads = jax.value_and_grad(loss, has_aux=True)(params)
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), model_state, opt_state, value

    for number, batch in enumerate(BATCHES * epochs):
        key = key_of_model(jax.random.key(7), number)
        params, model_state, opt_state, value = step(params, model_state, opt_state, batch, key)
        losses.append(value)
    return params, model_state, losses


def assert_close(left, right):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), left, right)


@pytest.mark.parametrize("steps_per_call", [1, 4])
@pytest.mark.parametrize("loss", [loss_fn, loss_of_model])
def test_linen_with_dropout_matches_hand_written_loop(loss, steps_per_call):
    module = LinenNet()
    variables = module.init(jax.random.key(3), XS[0], train=False)

    def apply(params, model_state, xs, key):
        variables = {"params": params, **model_state}
        return module.apply(variables, xs, train=True, rngs={"dropout": key}, mutable=["batch_stats"])

    stats = {"batch_stats": variables["batch_stats"]}
    params, model_state, losses = trained_by_hand(apply, variables["params"], stats, 3)
    learner = Learner(
        module.bind(variables),
        loss,
        OPTIMIZER,
        data=(BATCHES, BATCHES[:2]),
        callbacks=[Metrics()],
        key=7,
        default_callbacks=False,
        steps_per_call=steps_per_call,
    )
    history = learner.fit(3)
    assert_close(learner.params, params)
    assert_close(learner.model_state, model_state)
    assert_close(np.array(history["training/loss"]), np.mean(np.reshape(losses, (3, -1)), axis=1))
    # Validation and `evaluate`: no dropout, the running averages, and no change of these.
    outputs = [module.apply({"params": params, **model_state}, xs, train=False) for xs in XS[:2]]
    expected = np.mean([loss_fn(o, ys) for o, ys in zip(outputs, YS, strict=False)])
    assert_close(history["validation/loss"][-1], expected)
    assert_close(learner.evaluate()["loss"], expected)
    assert_close(learner.predict(np.concatenate(XS[:2])), np.concatenate(outputs))
    assert_close(learner.model_state, model_state)


@pytest.mark.parametrize("kind", ["nnx", "equinox"])
def test_documented_keys_reproduce_dropout_of_nnx_and_equinox(kind):
    if kind == "nnx":
        module = NNXNet(nnx.Rngs(0))
        module.train()
        graphdef, params, stats, random = nnx.split(module, nnx.Param, nnx.BatchStat, nnx.RngState)

        def apply(params, model_state, xs, key):
            seeds = {"key": jax.random.fold_in(key, zlib.crc32(b"dropout/rngs/key")), "count": jnp.uint32(0)}
            seeded = nnx.from_flat_state((path, leaf.copy(seeds[path[-1]])) for path, leaf in nnx.to_flat_state(random))
            stats = jax.tree.map(lambda x: x, model_state)  # new variables, which may change in this trace
            model = nnx.merge(graphdef, params, stats, seeded)
            outputs = model(xs)
            return outputs, nnx.state(model, nnx.BatchStat)
    else:
        module = EquinoxNet(jax.random.key(0))
        (params, static), stats = eqx.partition(module, eqx.is_inexact_array), {}

        def apply(params, model_state, xs, key):
            model = eqx.combine(params, static)
            keys = jax.random.split(key, len(xs))
            return jax.vmap(lambda x, key: model(x, key=key))(xs, keys), model_state

    params, _, _ = trained_by_hand(apply, params, stats, 2)
    learner = Learner(module, loss_fn, OPTIMIZER, data=BATCHES, key=7, default_callbacks=False)
    learner.fit(2)
    expected = nnx.to_pure_dict(params) if kind == "nnx" else params
    assert_close(learner.params, expected)


class Noisy(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool):
        x = nn.Dropout(0.1, deterministic=not train)(nn.Dense(1)(x))
        return x + train * jax.random.normal(self.make_rng("noise"), x.shape)


@pytest.mark.parametrize("loss", [loss_fn, loss_of_model])
def test_unnamed_random_stream_raises_with_fix(loss):
    from flax.errors import InvalidRngError

    def fit(model):
        return Learner(model, loss, optax.sgd(0.1), data=BATCHES, default_callbacks=False).fit(1)

    with pytest.raises(InvalidRngError) as raised:
        fit(Noisy())
    fix = "fix: pass `fluxcb.models.linen(module, rng_streams=('dropout', 'noise'))` as the model"
    assert [note for note in raised.value.__notes__ if note.startswith("fix")] == [fix]
    fit(linen(Noisy(), rng_streams=("dropout", "noise")))


class NoisyWhenFitting(nn.Module):
    @nn.compact
    def __call__(self, x, fitting: bool):
        return Noisy()(x, train=fitting)


@pytest.mark.parametrize("loss", [loss_fn, loss_of_model])
def test_the_fix_for_an_unnamed_random_stream_keeps_the_train_argument(loss):
    from flax.errors import InvalidRngError

    def fit(model):
        return Learner(model, loss, optax.sgd(0.1), data=BATCHES, default_callbacks=False).fit(1)

    with pytest.raises(InvalidRngError) as raised:
        fit(linen(NoisyWhenFitting(), "fitting"))
    [fix] = [note for note in raised.value.__notes__ if note.startswith("fix")]
    call = "fluxcb.models.linen(module, train_argument='fitting', rng_streams=('dropout', 'noise'))"
    assert fix == f"fix: pass `{call}` as the model"
    fit(eval(call, {"fluxcb": fluxcb, "module": NoisyWhenFitting()}))  # noqa: S307


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
