"""Loss functions that take the model or the parameters, and the batch."""

import functools
import re

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import fluxcb
from fluxcb import DeclarationError, Learner, TraceError
from fluxcb.callbacks import Checkpointer, Metric, Metrics, accuracy
from fluxcb.phases import LossTrainingPhase, LossValidationPhase, TrainingPhase

RNG = np.random.default_rng(0)
XS = RNG.normal(size=(8, 5)).astype(np.float32)
YS = (np.arange(8) % 3).astype(np.int32)
BATCH = {"image": XS, "label": YS}
RATE = 0.1


def cross_entropy(outputs, ys):
    return optax.softmax_cross_entropy_with_integer_labels(outputs, ys).mean()


def learner(model, loss_fn, *, data=None, **kwargs):
    """Return a Learner with plain SGD."""
    data = ([BATCH] * 3, [BATCH]) if data is None else data
    kwargs = {"default_callbacks": False, **kwargs}
    return Learner(model, loss_fn, optax.sgd(RATE), data=data, **kwargs)


def evaluated(trained):
    return trained.evaluate()["loss"]


# -- the form ------------------------------------------------------------------------------------


def pair(seed=0):
    weights = jax.random.normal(jax.random.key(seed), (5, 3))
    return (lambda key, xs: {"w": weights}), (lambda params, xs: xs @ params["w"])


def named_model(model, batch):
    return cross_entropy(model(batch["image"]), batch["label"])


def takes_key(net, batch, *, key):
    return cross_entropy(net(batch["image"]), batch["label"])


def takes_train(net, batch, train):
    return cross_entropy(net(batch["image"]), batch["label"])


class Bound:
    def loss(self, model, batch):
        return cross_entropy(model(batch["image"]), batch["label"])


@pytest.mark.parametrize("loss_fn", [named_model, takes_key, takes_train, Bound().loss])
def test_loss_signatures_with_model(loss_fn):
    trained = learner(pair(), loss_fn)
    assert trained.phases == (LossTrainingPhase(), LossValidationPhase())
    short = learner(pair(), cross_entropy, inputs=lambda batch: batch["image"], targets=lambda batch: batch["label"])
    assert type(short.phases[0]) is TrainingPhase
    trained.fit(1), short.fit(1)
    np.testing.assert_array_equal(trained.params["w"], short.params["w"])


def test_loss_signatures_with_outputs():
    def optional(outputs, ys, key=None, train=True):
        assert key is None
        return cross_entropy(outputs, ys)

    with pytest.warns(UserWarning, match=r"is called as `loss_fn\(outputs, ys\)`"):
        assert type(learner(pair(), optional, data=[(XS, YS)]).phases[0]) is TrainingPhase


def test_loss_of_parameters_with_model_raises(refused):
    with refused(
        DeclarationError,
        "`loss_fn` takes (params, batch, key), and is called as `loss_fn(outputs, ys)`.\n"
        "  why:   `Learner` calls it with outputs and targets, or with the model and the batch; `Learner.from_loss` "
        "calls it with parameters and batch\n"
        "  fix:   write `def loss_fn(outputs, ys):`\n"
        "     or: to get the model itself, write `def loss_fn(model, batch, *, key, train):`",
    ):
        learner(pair(), lambda params, batch, key: 0.0)


def test_unknown_loss_signature_raises(refused):
    # A third positional parameter gets the key, and a fourth gets nothing.
    def four(model, batch, weight, other):
        return 0.0

    with refused(
        DeclarationError,
        "`loss_fn` takes (model, batch, weight, other), and is called as `loss_fn(model, batch, *, key, train)`.\n"
        "  why:   `Learner` calls it with outputs and targets, or with the model and the batch; `Learner.from_loss` "
        "calls it with parameters and batch\n"
        "  fix:   write `def loss_fn(model, batch, *, key, train):`",
    ):
        learner(pair(), four)


# -- what the loss can compute -------------------------------------------------------------------


def test_l2_regularization():
    """The parameters match the formula `w <- w - rate * (gradient + 2 * decay * w)` for three steps."""
    decay = 0.01

    def loss_fn(model, batch):
        return cross_entropy(model(batch["image"]), batch["label"]) + decay * jnp.sum(model.params["w"] ** 2)

    trained = learner(pair(), loss_fn)
    trained.fit(1)
    w = np.asarray(pair()[0](None, None)["w"], np.float64)
    for _ in range(3):
        scores = np.exp(XS @ w)
        probabilities = scores / scores.sum(1, keepdims=True)
        gradient = XS.T @ (probabilities - np.eye(3)[YS]) / len(XS)
        w -= RATE * (gradient + 2 * decay * w)
    np.testing.assert_allclose(trained.params["w"], w, rtol=1e-5)


def test_aux_and_metrics_of_outputs():
    def loss_fn(model, batch):
        outputs = model(batch["image"])
        return cross_entropy(outputs, batch["label"]), {"outputs": outputs, "ys": batch["label"], "norm": outputs.sum()}

    trained = learner(pair(), loss_fn, callbacks=[Metrics(accuracy)])
    trained.fit(1)
    w = trained.params["w"]
    expected = np.mean(np.argmax(XS @ w, -1) == YS)
    assert trained.history["validation/accuracy"] == [pytest.approx(expected)]


def test_metrics_of_missing_values_raise(refused):
    with refused(
        DeclarationError,
        "The metric `accuracy` needs `step.outputs` and `step.ys`, which LossTrainingPhase does not compute.\n"
        "  why:   metrics are updated at the end of each step of every phase, from the step values in their `needs`\n"
        '  fix:   return them from the loss function: `return loss, {"outputs": ..., "ys": ...}`\n'
        "     or: compute the metric only in other phases: `Metric(..., phase=...)`",
    ):
        learner(pair(), named_model, callbacks=[Metrics(accuracy)])


def test_key_and_train_arguments():
    """Each training step has its own key, and `train` is false in evaluation."""

    def loss_fn(model, batch, *, key, train):
        loss = cross_entropy(model(batch["image"]), batch["label"])
        return loss, {"noise": jax.random.normal(key), "train": jnp.float32(train)}

    step = fluxcb.callbacks.Metric
    trained = learner(
        pair(),
        loss_fn,
        callbacks=[
            Metrics(
                step(lambda aux: aux["train"], name="train", needs=("aux",)),
                step(lambda aux: aux["noise"], name="noise", needs=("aux",)),
            )
        ],
    )
    trained.fit(1)
    assert trained.history["training/train"] == [1.0]
    assert trained.history["validation/train"] == [0.0]
    assert len(set(trained.cbstate.metrics_step["training"].values["noise"])) == 3


class LinenVAE(nn.Module):
    def setup(self):
        self.encoder = nn.Dense(4)
        self.decoder = nn.Dense(5)

    def encode(self, xs):
        return jnp.split(self.encoder(xs), 2, axis=-1)

    def decode(self, z):
        return self.decoder(z)


def test_vae_loss():
    """The loss calls two methods of a Linen module instead of its `__call__`."""

    def vae_loss(mean, log_variance, noise, decode, xs):
        z = mean + jnp.exp(0.5 * log_variance) * noise
        kl = -0.5 * jnp.sum(1 + log_variance - mean**2 - jnp.exp(log_variance), -1)
        return jnp.mean(jnp.sum((decode(z) - xs) ** 2, -1) + kl)

    class VAE(LinenVAE):
        def __call__(self, xs):
            return self.decode(self.encode(xs)[0])

    def loss_fn(model, xs):
        mean, log_variance = model.encode(xs)
        return vae_loss(mean, log_variance, jnp.ones_like(mean), lambda z: model(z, method="decode"), xs)

    trained = learner(VAE(), loss_fn, data=[XS])
    assert sorted(trained.params) == ["decoder", "encoder"]

    def plain(params):
        def dense(part, xs):
            return xs @ params[part]["kernel"] + params[part]["bias"]

        mean, log_variance = jnp.split(dense("encoder", XS), 2, axis=-1)
        return vae_loss(mean, log_variance, jnp.ones_like(mean), lambda z: dense("decoder", z), XS)

    before = trained.params
    trained.fit(1)
    expected = jax.tree.map(lambda w, g: w - RATE * g, before, jax.grad(plain)(before))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), trained.params, expected)
    assert trained.model(XS).shape == XS.shape


# -- sowed variables -----------------------------------------------------------------------------


class LinenSows(nn.Module):
    @nn.compact
    def __call__(self, xs, mask):
        hidden = nn.Dense(4)(xs) * mask
        self.sow("losses", "activity", jnp.mean(hidden**2))
        return nn.Dense(3)(hidden)


class Activity(nnx.Variable):
    pass


class NNXSows(nnx.Module):
    def __init__(self, rngs):
        self.first, self.second = nnx.Linear(5, 4, rngs=rngs), nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, xs, mask):
        hidden = self.first(xs) * mask
        self.sow(Activity, "activity", jnp.mean(hidden**2))
        return self.second(hidden)


MASK = np.float32([1, 0, 1, 1])


def linen_activity(model, batch):
    outputs = model(batch["image"], MASK)
    return cross_entropy(outputs, batch["label"]) + 0.5 * sum(jax.tree.leaves(model.variables["losses"]))


def nnx_activity(model, batch):
    outputs, sown = nnx.capture(model, Activity)(batch["image"], MASK)
    return cross_entropy(outputs, batch["label"]) + 0.5 * sum(jax.tree.leaves(sown))


@pytest.mark.parametrize(
    ("model", "loss_fn", "layers"),
    [(LinenSows(), linen_activity, ("Dense_0", "Dense_1")), (NNXSows(nnx.Rngs(0)), nnx_activity, ("first", "second"))],
    ids=["linen", "nnx"],
)
def test_sowed_losses(model, loss_fn, layers):
    """The sowed value is part of the loss, is not kept as state, and does not accumulate over steps."""
    trained = learner(model, loss_fn)
    assert jax.tree.leaves(trained.state["model_state"]) == []

    def plain(params):
        first, second = (params[name] for name in layers)
        hidden = (XS @ first["kernel"] + first["bias"]) * MASK
        return cross_entropy(hidden @ second["kernel"] + second["bias"], YS) + 0.5 * jnp.mean(hidden**2)

    assert evaluated(trained) == pytest.approx(float(plain(trained.params)), rel=1e-5)
    trained.fit(2)
    assert evaluated(trained) == pytest.approx(float(plain(trained.params)), rel=1e-5)


def test_sowed_collection_is_not_state_with_outputs_loss():
    class Sows(nn.Module):
        @nn.compact
        def __call__(self, xs):
            self.sow("losses", "activity", jnp.mean(xs))
            self.variable("statistics", "count", lambda: jnp.float32(0)).value += 1
            return nn.Dense(3)(xs)

    trained = learner(Sows(), cross_entropy, data=[(XS, YS)])
    trained.fit(3)
    assert jax.tree.map(float, trained.state["model_state"]) == {"statistics": {"count": 4.0}}  # `init` counts 1


# -- batch normalization, dropout ----------------------------------------------------------------


class LinenNorm(nn.Module):
    @nn.compact
    def __call__(self, xs, train):
        hidden = nn.BatchNorm(use_running_average=not train, momentum=0.9)(xs)
        hidden = nn.Dropout(0.5, deterministic=not train)(hidden)
        return nn.Dense(3)(hidden)


class NNXNorm(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(5, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.dense = nnx.Linear(5, 3, rngs=rngs)

    def __call__(self, xs):
        return self.dense(self.dropout(self.norm(xs)))


class EquinoxNorm(eqx.Module):
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout
    dense: eqx.nn.Linear

    def __init__(self, key):
        self.norm = eqx.nn.BatchNorm(5, "batch", momentum=0.9, mode="ema")
        self.dropout = eqx.nn.Dropout(0.5)
        self.dense = eqx.nn.Linear(5, 3, key=key)

    def __call__(self, x, state, *, key):
        x, state = self.norm(x, state)
        return self.dense(self.dropout(x, key=key)), state


def stateful_pair():
    def init(key, xs):
        return {"w": jnp.ones((5, 3))}, {"mean": jnp.zeros(5)}

    def apply(params, state, xs, *, key, train):
        if not train:
            return (xs - state["mean"]) @ params["w"], state
        kept = jax.random.bernoulli(key, 0.5, xs.shape)
        mean = xs.mean(0)
        return jnp.where(kept, xs - mean, 0) * 2 @ params["w"], {"mean": 0.9 * state["mean"] + 0.1 * mean}

    return fluxcb.models.pair(init, apply, stateful=True)


def linen_norm(model, batch, *, train):
    outputs = model(batch["image"], train=train)
    return cross_entropy(outputs, batch["label"])


def plain_norm(model, batch):
    return cross_entropy(model(batch["image"]), batch["label"])


def equinox_norm(model, batch, *, key, model_state):
    keys = jax.random.split(key, len(batch["image"]))
    outputs, model_state = jax.vmap(
        lambda x, state, key: model(x, state, key=key), (0, None, 0), (0, None), axis_name="batch"
    )(batch["image"], model_state, keys)
    return cross_entropy(outputs, batch["label"]), model_state


NORMS = {
    "linen": (LinenNorm, linen_norm, lambda state: state["batch_stats"]["BatchNorm_0"]["mean"]),
    "nnx": (lambda: NNXNorm(nnx.Rngs(0)), plain_norm, lambda state: state["norm"]["mean"]),
    "equinox": (
        lambda: eqx.nn.make_with_state(EquinoxNorm)(jax.random.key(0)),
        equinox_norm,
        lambda state: next(leaf for leaf in jax.tree.leaves(state) if leaf.shape == (5,)),
    ),
    "pair": (stateful_pair, plain_norm, lambda state: state["mean"]),
}


@pytest.mark.parametrize("library", NORMS)
def test_state_changes_only_in_training(library):
    """After three steps, the running mean matches the formula. Validation and `evaluate` do not change it."""
    make, loss_fn, mean_of = NORMS[library]
    trained = learner(make(), loss_fn)
    before = jax.tree.map(np.asarray, trained.state["model_state"])
    trained.evaluate()
    jax.tree.map(np.testing.assert_array_equal, trained.state["model_state"], before)
    trained.fit(1)  # with one step of validation
    mean = mean_of(before)
    for number in range(3):
        # Equinox takes the first batch's mean as it is.
        mean = XS.mean(0) if library == "equinox" and number == 0 else 0.9 * mean + 0.1 * XS.mean(0)
    np.testing.assert_allclose(mean_of(trained.state["model_state"]), mean, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("library", NORMS)
def test_dropout_is_off_in_evaluation(library):
    """The validation loss matches the model without dropout, as computed by its library."""
    make, loss_fn, _ = NORMS[library]
    trained = learner(make(), loss_fn, callbacks=[Metrics()])
    trained.fit(1)
    model = trained.model
    if library == "equinox":
        model, state = model
        outputs = jax.vmap(lambda x: model(x, state, key=jax.random.key(0))[0], axis_name="batch")(XS)
    else:
        outputs = model(XS, train=False) if library == "linen" else model(XS)
    expected = float(cross_entropy(outputs, YS))
    assert trained.history["validation/loss"] == [pytest.approx(expected, rel=1e-5)]
    assert evaluated(trained) == pytest.approx(expected, rel=1e-5)
    assert abs(trained.history["training/loss"][-1] - expected) > 1e-3


@pytest.mark.parametrize("library", NORMS)
def test_resumed_training_is_bit_identical(library, tmp_path):
    make, loss_fn, _ = NORMS[library]
    whole = learner(make(), loss_fn)
    whole.fit(4)
    learner(make(), loss_fn, callbacks=[Checkpointer(tmp_path)]).fit(2)
    resumed = learner(make(), loss_fn, callbacks=[Checkpointer(tmp_path)])
    resumed.fit(4, resume=True)
    for name in ("params", "model_state"):
        jax.tree.map(np.testing.assert_array_equal, whole.state[name], resumed.state[name])


def test_outputs_and_model_losses_train_same_linen_module():
    class Net(nn.Module):
        @nn.compact
        def __call__(self, xs):
            return nn.Dense(3)(nn.relu(nn.Dense(4)(xs)))

    short = learner(Net(), cross_entropy, data=[(XS, YS)] * 3)
    full = learner(Net(), lambda model, batch: cross_entropy(model(batch[0]), batch[1]), data=[(XS, YS)] * 3)
    short.fit(1), full.fit(1)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), short.params, full.params)
    np.testing.assert_allclose(short.predict(XS), full.predict(XS), rtol=1e-4)


def test_model_calls_in_one_step_draw_different_masks():
    def loss_fn(model, batch, *, train):
        one, other = model(batch["image"], train=train), model(batch["image"], train=train)
        return cross_entropy(one, batch["label"]), {"difference": jnp.abs(one - other).max()}

    difference = fluxcb.callbacks.Metric(lambda aux: aux["difference"], name="difference", needs=("aux",))
    trained = learner(LinenNorm(), loss_fn, callbacks=[Metrics(difference)])
    trained.fit(1)
    assert trained.history["training/difference"][0] > 0
    assert trained.history["validation/difference"][0] == 0


# -- Linen: transformations ----------------------------------------------------------------------


def test_gradient_with_respect_to_inputs():
    """A gradient penalty: the loss differentiates the model itself."""

    class Line(nn.Module):
        @nn.compact
        def __call__(self, xs):
            return nn.Dense(1, use_bias=False)(xs)

    def loss_fn(model, batch):
        slope = jax.grad(lambda xs: model(xs).sum())(batch["image"])
        return jnp.mean(slope**2)

    trained = learner(Line(), loss_fn)
    kernel = trained.params["Dense_0"]["kernel"]
    assert evaluated(trained) == pytest.approx(float(jnp.mean(kernel**2)), rel=1e-5)


def test_state_change_inside_transformation_raises(refused):
    def loss_fn(model, batch, *, train):
        return jax.checkpoint(lambda xs: model(xs, train=train).sum())(batch["image"])

    with refused(
        TraceError,
        "The model changes its state inside a JAX transformation (grad, vmap, scan, ...) in the loss function.\n"
        "  where: LinenNorm, batch_stats\n"
        "  why:   the new state would leak out of the transformation as a tracer\n"
        "  fix:   call the model outside of the transformation\n"
        "     or: call it in evaluation mode there, for example with `train=False`",
    ):
        learner(LinenNorm(), loss_fn)

    def fixed(model, batch):
        return jax.checkpoint(lambda xs: model(xs, train=False).sum())(batch["image"])

    learner(LinenNorm(), fixed).fit(1)


# -- Equinox: state ------------------------------------------------------------------------------


def test_equinox_without_state():
    def loss_fn(model, batch):
        return cross_entropy(jax.vmap(model)(batch["image"]), batch["label"])

    trained = learner(eqx.nn.MLP(5, 3, 8, 1, key=jax.random.key(0)), loss_fn)
    trained.fit(1)
    assert evaluated(trained) == pytest.approx(float(cross_entropy(jax.vmap(trained.model)(XS), YS)), rel=1e-5)


def test_equinox_state_must_be_argument(refused):
    with refused(
        DeclarationError,
        "The Equinox module has state, but `loss_fn` does not take `model_state`.\n"
        "  why:   an Equinox module takes its `eqx.nn.State` as an argument and returns the new one\n"
        "  fix:   write `def loss_fn(model, batch, *, key, train, model_state):`, and return `loss, new_model_state` "
        "or `loss, aux, new_model_state`",
    ):
        learner(NORMS["equinox"][0](), plain_norm)


def test_equinox_state_must_be_returned(refused):
    def nothing(model, batch, *, model_state):
        return jnp.float32(0)

    def other(model, batch, *, model_state):
        return jnp.float32(0), {}

    with refused(
        TraceError,
        "The loss function takes `model_state` and returned one value.\n"
        "  why:   the next step starts from the new state, so the loss function must return it\n"
        "  fix:   return `loss, new_model_state` or `loss, aux, new_model_state`",
    ):
        learner(NORMS["equinox"][0](), nothing)
    with refused(
        DeclarationError,
        "The loss function returned dict as the new state of the module.\n"
        "  where: EquinoxNorm\n"
        "  why:   the layers of the module keep their running values in an `eqx.nn.State`\n"
        "  fix:   return the state that the call of the module returned, as the last of the returned values",
    ):
        learner(NORMS["equinox"][0](), other)


def test_model_state_argument_raises_for_other_models(refused):
    def loss_fn(model, batch, *, model_state):
        return plain_norm(model, batch), model_state

    with refused(
        DeclarationError,
        "`loss_fn` takes `model_state`, but this model keeps its own state.\n"
        "  why:   only an Equinox module with state takes its state as an argument and returns the new one\n"
        "  fix:   remove `model_state` from the parameters and the return value of `loss_fn`",
    ):
        learner(NNXNorm(nnx.Rngs(0)), loss_fn)


# -- from_loss -----------------------------------------------------------------------------------


def from_loss(loss_fn, params=None, **kwargs):
    params = {"w": jnp.ones((5, 3))} if params is None else params
    kwargs = {"data": ([BATCH] * 3, [BATCH]), "default_callbacks": False, **kwargs}
    return Learner.from_loss(params, loss_fn, optax.sgd(RATE), **kwargs)


def test_from_loss_validates_without_dropout():
    def loss_fn(params, batch, key, *, train):
        xs = batch["image"]
        if train:
            xs = jnp.where(jax.random.bernoulli(key, 0.5, xs.shape), xs / 0.5, 0)
        return cross_entropy(xs @ params["w"], batch["label"])

    trained = from_loss(loss_fn, callbacks=[Metrics()])
    trained.fit(1)
    expected = float(cross_entropy(XS @ trained.params["w"], YS))
    assert trained.history["validation/loss"] == [pytest.approx(expected, rel=1e-5)]
    assert evaluated(trained) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("name", ["key", "rng"])
def test_from_loss_with_an_optional_key_validates_without_it(name):
    def dropout_loss(params, batch, key):
        xs = batch["image"] if key is None else batch["image"] * jax.random.bernoulli(key, 0.5, batch["image"].shape)
        return cross_entropy(xs @ params["w"], batch["label"])

    named_key = lambda params, batch, key=None: dropout_loss(params, batch, key)  # noqa: E731
    named_rng = lambda params, batch, rng=None: dropout_loss(params, batch, rng)  # noqa: E731
    trained = from_loss(named_key if name == "key" else named_rng)
    trained.fit(1)
    assert evaluated(trained) == pytest.approx(float(dropout_loss(trained.params, BATCH, None)), rel=1e-6)
    exact = from_loss(lambda params, batch: dropout_loss(params, batch, None))
    exact.fit(1)
    assert not np.array_equal(trained.params["w"], exact.params["w"])


@pytest.mark.parametrize("name", ["key", "rng"])
def test_loss_of_model_with_an_optional_key_validates_without_it(name):
    def dropout_loss(model, batch, key):
        xs = batch["image"] if key is None else batch["image"] * jax.random.bernoulli(key, 0.5, batch["image"].shape)
        return cross_entropy(model(xs), batch["label"])

    named_key = lambda model, batch, key=None: dropout_loss(model, batch, key)  # noqa: E731
    named_rng = lambda model, batch, rng=None: dropout_loss(model, batch, rng)  # noqa: E731
    trained = learner(pair(), named_key if name == "key" else named_rng)
    trained.fit(1)
    expected = float(cross_entropy(trained.model(BATCH["image"]), BATCH["label"]))
    assert evaluated(trained) == pytest.approx(expected, rel=1e-6)
    exact = learner(pair(), lambda model, batch: dropout_loss(model, batch, None))
    exact.fit(1)
    assert not np.array_equal(trained.params["w"], exact.params["w"])


def test_key_without_a_value_in_evaluation_raises_an_error_with_the_fix():
    def noisy(params, batch, key=None):
        return jax.random.normal(key) + params["w"].sum()

    with pytest.raises(TypeError) as caught:
        from_loss(noisy).fit(1)
    assert caught.value.__notes__[1] == (
        "fix: for a function with `key=None` and without `train`, a key means training, so evaluation passes None. To "
        "get a key in evaluation as well, write the parameter `key` without a default"
    )


def test_from_loss_without_key():
    trained = from_loss(lambda params, batch: cross_entropy(batch["image"] @ params["w"], batch["label"]))
    trained.fit(1)
    named = from_loss(lambda params, batch, key: cross_entropy(batch["image"] @ params["w"], batch["label"]))
    named.fit(1)
    np.testing.assert_array_equal(trained.params["w"], named.params["w"])


@pytest.mark.parametrize("with_aux", [False, True])
def test_from_loss_with_state(with_aux):
    def loss_fn(params, batch, *, model_state):
        mean = 0.9 * model_state["mean"] + 0.1 * batch["image"].mean(0)
        loss = cross_entropy((batch["image"] - model_state["mean"]) @ params["w"], batch["label"])
        return (loss, {"outputs": loss}, {"mean": mean}) if with_aux else (loss, {"mean": mean})

    trained = from_loss(loss_fn, model_state={"mean": np.zeros(5, np.float32)})
    trained.fit(1)  # three steps that train, and one that does not
    mean = np.zeros(5)
    for _ in range(3):
        mean = 0.9 * mean + 0.1 * XS.mean(0)
    np.testing.assert_allclose(trained.state["model_state"]["mean"], mean, rtol=1e-5, atol=1e-7)


def test_from_loss_with_state_resumes_bit_identically(tmp_path):
    def loss_fn(params, batch, rng, *, train, model_state):
        noise = jax.random.normal(rng, (8, 5)) if train else 0
        loss = cross_entropy((batch["image"] + noise) @ params["w"], batch["label"]) + 0 * model_state["n"]
        return loss, {"n": model_state["n"] + 1}

    state = {"n": jnp.float32(0)}
    whole = from_loss(loss_fn, model_state=state)
    whole.fit(4)
    from_loss(loss_fn, model_state=state, callbacks=[Checkpointer(tmp_path)]).fit(2)
    resumed = from_loss(loss_fn, model_state=state, callbacks=[Checkpointer(tmp_path)])
    resumed.fit(4, resume=True)
    assert float(resumed.state["model_state"]["n"]) == 12
    np.testing.assert_array_equal(whole.params["w"], resumed.params["w"])


def test_from_loss_state_missing_or_unused_raises(refused):
    with refused(
        DeclarationError,
        "`loss_fn` takes `model_state`, and `Learner.from_loss` was not given any.\n"
        "  why:   the loss function gets the state that its last call returned, and the first call needs one\n"
        "  fix:   pass it: `Learner.from_loss(params, loss_fn, optimizer, model_state=...)`",
    ):
        from_loss(lambda params, batch, *, model_state: (0.0, model_state))
    with refused(
        DeclarationError,
        "`model_state` was given, and `loss_fn` does not take it.\n"
        "  why:   only the loss function reads and changes it\n"
        "  fix:   write `def loss_fn(params, batch, key, *, model_state):`, and return `loss, new_model_state` or "
        "`loss, aux, new_model_state`",
    ):
        from_loss(lambda params, batch: 0.0, model_state={})


def test_from_loss_state_with_other_shape_raises(refused):
    def loss_fn(params, batch, *, model_state):
        return cross_entropy(batch["image"] @ params["w"], batch["label"]), {"mean": batch["image"].mean(0)}

    with refused(
        TraceError,
        "The loss function changes the structure, shape or dtype of `model_state`: ['mean']: expected float32[], got "
        "float32[5].\n"
        "  why:   the structure, shapes and dtypes of the carry are fixed when the step is compiled\n"
        "  fix:   keep the same structure, shapes and dtypes, e.g. with `.astype(old.dtype)`, or create the value "
        "with the new ones in `init`",
    ):
        from_loss(loss_fn, model_state={"mean": jnp.float32(0)})


def test_equinox_module_as_parameters(refused):
    model = eqx.nn.MLP(5, 3, 8, 1, key=jax.random.key(0))

    def loss_fn(params, batch):
        return cross_entropy(jax.vmap(params)(batch["image"]), batch["label"])

    with refused(
        DeclarationError,
        "`params` has an object of type `custom_jvp` at `params.activation`, which JAX cannot use as an array of "
        "numbers.\n"
        "  why:   the Equinox module `MLP` has leaves that are not arrays\n"
        "  fix:   pass the module as a model: `Learner(model, loss_fn, optimizer)` with `def loss_fn(model, batch):`\n"
        "     or: pass only its arrays: `params, static = eqx.partition(model, eqx.is_inexact_array)`, and begin the "
        "loss function with `model = eqx.combine(params, static)`",
    ):
        from_loss(loss_fn, model)
    params, static = eqx.partition(model, eqx.is_inexact_array)
    second = from_loss(lambda params, batch: loss_fn(eqx.combine(params, static), batch), params)
    first = learner(model, lambda model, batch: loss_fn(model, batch))
    first.fit(1), second.fit(1)
    np.testing.assert_array_equal(first.params.layers[0].weight, second.params.layers[0].weight)


def mean_error(y_true, y_pred):
    return jnp.mean(2.0 * y_true - y_pred)  # not symmetric


def test_functions_that_take_the_targets_first_are_a_warning():
    def built(loss, metric):
        return Learner(
            (lambda key, xs: {"w": jnp.zeros((1, 1))}, lambda params, xs: xs @ params["w"]),
            loss,
            optax.sgd(0.0),
            data=[(np.ones((4, 1), np.float32), np.ones((4, 1), np.float32))],
            callbacks=[Metrics(metric)],
            default_callbacks=False,
        )

    def ordered(outputs, ys):
        return mean_error(ys, outputs)

    with pytest.warns(UserWarning, match="gets the outputs of the model as") as caught:
        built(mean_error, mean_error)
    told = "`mean_error(y_true, y_pred)` gets the outputs of the model as `y_true` and the targets as `y_pred`"
    assert [str(warning.message) for warning in caught] == [
        f"The metric {told}, because fluxcb passes the outputs first. "
        'Pass `Metric(mean_error, "mean_error", ("ys", "outputs"))` instead.',
        f"The loss function {told}, because fluxcb passes the outputs first. "
        "Pass `lambda outputs, ys: mean_error(ys, outputs)` instead.",
    ]
    for loss, metric in (
        (ordered, ordered),
        (lambda outputs, ys: mean_error(ys, outputs), Metric(mean_error, "mean_error", ("ys", "outputs"))),
    ):
        learner = built(loss, metric)
        history = learner.fit(1)
        name = "ordered" if metric is ordered else "mean_error"
        assert history.per_epoch["training"]["loss"] == [(1, 2.0)]  # outputs 0, targets 1
        assert history.per_epoch["training"][name] == [(1, 2.0)]


@pytest.mark.parametrize(
    ("build", "form", "name", "value", "advice"),
    [
        (
            lambda: learner(pair(), lambda outputs, ys, *, train=False: cross_entropy(outputs, ys), data=[(XS, YS)]),
            "outputs, ys",
            "train",
            False,
            "To get it from fluxcb, write `def loss_fn(model, batch, *, key, train):`.",
        ),
        (
            lambda: learner(pair(), lambda model, batch, training=False: named_model(model, batch)),
            "model, batch, *, key, train",
            "training",
            False,
            "Call it `train`, and fluxcb passes it.",
        ),
        (
            lambda: learner(pair(), lambda model, batch, deterministic=True: named_model(model, batch)),
            "model, batch, *, key, train",
            "deterministic",
            True,
            "Replace it by a parameter `train`, which fluxcb passes, and by `not train` in its uses.",
        ),
        (
            lambda: from_loss(lambda params, batch, *, rng=None: jnp.mean(batch["image"] @ params["w"])),
            "params, batch, key",
            "rng",
            None,
            "Call it `key`, and fluxcb passes it.",
        ),
        (
            lambda: from_loss(lambda params, batch, eval=False: jnp.mean(batch["image"] @ params["w"])),
            "params, batch, key",
            "eval",
            False,
            "If it selects training mode, replace it by a parameter `train`, which fluxcb passes.",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) and value.isidentifier() else "",
)
def test_optional_parameter_that_gets_nothing_is_a_warning(build, form, name, value, advice):
    text = f"The loss function is called as `loss_fn({form})`, so its parameter `{name}` is always {value}. {advice}"
    with pytest.warns(UserWarning, match=f"^{re.escape(text)}$"):
        build()


@pytest.mark.parametrize("name", ["constrain", "latest", "per_model", "use_contrast", "normalize"])
def test_optional_bool_that_names_no_mode_is_accepted(name):
    namespace = {"jnp": jnp}
    exec(f"def loss_fn(params, batch, {name}=False): return jnp.mean(batch['image'] @ params['w'])", namespace)
    assert from_loss(namespace["loss_fn"]).fit(1).stop_reason is None


def test_default_of_third_parameter_decides_whether_it_gets_the_key():
    got = {}

    def keyed(params, batch, dropout_rng=None):
        got["dropout_rng"] = dropout_rng.dtype
        return jnp.mean(batch["image"] @ params["w"])

    def reduced(params, batch, reduction="mean"):
        got["reduction"] = reduction
        return jnp.mean(batch["image"] @ params["w"])

    def distilled(params, batch, teacher=None):
        got["teacher"] = teacher
        return jnp.mean(batch["image"] @ params["w"])

    def chosen(params, batch, training=True):
        return jnp.mean(batch["image"] @ params["w"])

    for loss_fn in (keyed, reduced, distilled, functools.partial(chosen, training=False)):
        from_loss(loss_fn, data=[BATCH])
    assert got == {"dropout_rng": jax.random.key(0).dtype, "reduction": "mean", "teacher": None}


@pytest.mark.parametrize(
    ("loss_fn", "signature", "needed"),
    [
        (lambda outputs, ys, train: cross_entropy(outputs, ys), "(outputs, ys, train)", "train"),
        (lambda logits, targets, key: cross_entropy(logits, targets), "(logits, targets, key)", "key"),
    ],
)
def test_outputs_with_train_flag_or_key_is_an_error_whose_fixes_work(loss_fn, signature, needed):
    data = [(XS, YS)]
    with pytest.raises(DeclarationError) as caught:
        learner(pair(), loss_fn, data=data)
    assert str(caught.value) == (
        f"`loss_fn` takes {signature}, and is called as `loss_fn(model, batch, *, key, train)`.\n"
        f"  why:   a loss function with the parameter `{needed}` gets the model and the batch\n"
        f"  fix:   remove `{needed}` from the parameters of `loss_fn`\n"
        f"     or: write `def loss_fn(model, batch, *, {needed}):`, and call the model in it"
    )
    learner(pair(), cross_entropy, data=data).fit(1)
    learner(pair(), lambda model, batch, *, train: cross_entropy(model(batch[0]), batch[1]), data=data).fit(1)
    learner(pair(), lambda model, batch, *, key: cross_entropy(model(batch[0]), batch[1]), data=data).fit(1)


def test_model_and_targets_is_an_error_whose_fixes_work():
    data = [(XS, YS)]
    with pytest.raises(DeclarationError) as caught:
        learner(pair(), lambda model, labels: cross_entropy(model, labels), data=data)
    assert str(caught.value) == (
        "`loss_fn` takes (model, labels), and is called as `loss_fn(model, batch, *, key, train)`.\n"
        "  why:   a loss function with the parameter `model` gets the model and the batch\n"
        "  fix:   rename the first parameter: `def loss_fn(outputs, labels):`\n"
        "     or: write `def loss_fn(model, batch):`, and call the model in it"
    )
    learner(pair(), lambda outputs, labels: cross_entropy(outputs, labels), data=data).fit(1)
    learner(pair(), lambda model, batch: cross_entropy(model(batch[0]), batch[1]), data=data).fit(1)


def test_swapped_parameters_are_an_error_whose_fix_works():
    module, data = nn.Dense(3), [(XS, YS)]
    params = module.init(jax.random.key(0), XS)["params"]
    with pytest.raises(DeclarationError) as caught:
        learner(module, lambda batch, model: cross_entropy(model(batch[0]), batch[1]), data=data)
    assert str(caught.value) == (
        "`loss_fn` takes (batch, model), and is called as `loss_fn(model, batch, *, key, train)`.\n"
        "  why:   the model is the first argument, as in `jax.grad`\n"
        "  fix:   write `def loss_fn(model, batch):`"
    )
    learner(module, lambda model, batch: cross_entropy(model(batch[0]), batch[1]), data=data).fit(1)
    with pytest.raises(DeclarationError) as caught:
        Learner.from_loss(params, lambda batch, params: 0.0, optax.sgd(RATE), data=data)
    assert str(caught.value) == (
        "`loss_fn` takes (batch, params), and is called as `loss_fn(params, batch, key)`.\n"
        "  why:   the parameters are the first argument, as in `jax.grad`\n"
        "  fix:   write `def loss_fn(params, batch):`"
    )


def test_function_of_params_for_a_learner_with_model_is_an_error_whose_fixes_work():
    module, data = nn.Dense(3), [(XS, YS)]

    def of_params(params, batch):
        return cross_entropy(module.apply({"params": params}, batch[0]), batch[1])

    with pytest.raises(DeclarationError) as caught:
        learner(module, of_params, data=data)
    assert str(caught.value) == (
        "`loss_fn` takes (params, batch), and is called as `loss_fn(outputs, ys)`.\n"
        "  why:   `Learner` has a model, and computes its outputs\n"
        "  fix:   pass the function to `Learner.from_loss(params, loss_fn, optimizer)`, which calls it with "
        "parameters\n"
        "     or: write `def loss_fn(model, batch):`, and call `model(xs)`"
    )
    variables = module.init(jax.random.key(0), XS)
    Learner.from_loss(variables["params"], of_params, optax.sgd(RATE), data=data).fit(1)
    learner(module, lambda model, batch: cross_entropy(model(batch[0]), batch[1]), data=data).fit(1)


class Normalized(nn.Module):
    @nn.compact
    def __call__(self, xs, train):
        return nn.Dense(3)(nn.BatchNorm(use_running_average=not train)(xs))


def test_running_averages_among_params_are_an_error_whose_fix_works():
    module, data = Normalized(), [(XS, YS)]
    variables = module.init(jax.random.key(0), XS, train=True)

    def of_variables(variables, batch):
        return cross_entropy(module.apply(variables, batch[0], train=True, mutable=["batch_stats"])[0], batch[1])

    with pytest.raises(DeclarationError) as caught:
        Learner.from_loss(variables, of_variables, optax.sgd(RATE), data=data)
    assert str(caught.value) == (
        "`params` contains the collections `params` and `batch_stats` of a Flax Linen module.\n"
        "  why:   the optimizer would change the running averages in `batch_stats` like trained parameters\n"
        '  fix:   pass `variables["params"]`, and `model_state={"batch_stats": variables["batch_stats"]}` to '
        "`Learner.from_loss`. The loss function takes `model_state`, and returns `loss, new_model_state`"
    )

    def of_params(params, batch, *, model_state):
        outputs, changed = module.apply(
            {"params": params, **model_state}, batch[0], train=True, mutable=["batch_stats"]
        )
        return cross_entropy(outputs, batch[1]), changed

    state = {"batch_stats": variables["batch_stats"]}
    trained = Learner.from_loss(variables["params"], of_params, optax.sgd(RATE), model_state=state, data=data)
    trained.fit(1)
    mean = trained.model_state["batch_stats"]["BatchNorm_0"]["mean"]
    np.testing.assert_allclose(mean, 0.01 * XS.mean(0), rtol=1e-5)


class NormalizedNNX(nnx.Module):
    def __init__(self):
        self.norm = nnx.BatchNorm(XS.shape[1], rngs=nnx.Rngs(0))
        self.linear = nnx.Linear(XS.shape[1], 3, rngs=nnx.Rngs(0))

    def __call__(self, xs):
        return self.linear(self.norm(xs))


def test_nnx_module_with_running_averages_as_params_is_an_error_whose_fix_works():
    data = [(XS, YS)]

    def of_module(model, batch):
        return cross_entropy(model(batch[0]), batch[1])

    for params in (NormalizedNNX(), {"net": NormalizedNNX()}, nnx.state(NormalizedNNX())):
        with pytest.raises(DeclarationError) as caught:
            Learner.from_loss(params, of_module, optax.sgd(RATE), data=data)
        assert re.fullmatch(
            r"`params\S*norm\S*mean\S*` is a `BatchStat` of Flax NNX, which is not trained by gradients.\n"
            r"  why:   `Learner.from_loss` passes all of `params` to the optimizer\n"
            r"  fix:   pass the module as a model: `Learner\(model, loss_fn, optimizer\)` with "
            r"`def loss_fn\(model, batch\):`",
            str(caught.value),
        )
    Learner(NormalizedNNX(), of_module, optax.sgd(RATE), data=data).fit(1)
    # A module without such variables is a pytree of parameters.
    Learner.from_loss(nnx.Linear(XS.shape[1], 3, rngs=nnx.Rngs(0)), of_module, optax.sgd(RATE), data=data).fit(1)


def test_loss_function_that_ignores_the_mask_is_a_warning_whose_fix_works():
    data = [(XS, YS), (XS[:5], YS[:5])]

    def build(loss_fn):
        sharding = fluxcb.Sharding(ragged="pad")
        return learner(pair(), loss_fn, data=data, callbacks=[Metrics()], mesh=fluxcb.mesh(), sharding=sharding)

    def losses_of(model, batch):
        return optax.softmax_cross_entropy_with_integer_labels(model(batch[0]), batch[1])

    with pytest.warns(UserWarning, match="mask") as caught:
        build(lambda model, batch: jnp.mean(losses_of(model, batch)))
    assert [str(warning.message) for warning in caught] == [
        'The loss function does not use `batch.mask`, so the loss includes the examples that `ragged="pad"` has added. '
        "For a mean over the other examples, write `jnp.sum(losses * batch.mask) / jnp.sum(batch.mask)`."
    ]
    masked = build(lambda model, batch: jnp.sum(losses_of(model, batch) * batch.mask) / jnp.sum(batch.mask))
    masked.fit(1)
    plain = learner(pair(), cross_entropy, data=data)
    plain.fit(1)
    np.testing.assert_allclose(masked.params["w"], plain.params["w"], rtol=1e-5)


def swapped_pair(params, batch):
    outputs = batch[0] @ params["w"]
    return outputs, cross_entropy(outputs, batch[1])


def swapped_pair_of_model(model, batch):
    outputs = model(batch[0])
    return outputs, cross_entropy(outputs, batch[1])


def with_dict(params, batch):
    outputs = batch[0] @ params["w"]
    return {"outputs": outputs}, cross_entropy(outputs, batch[1])


def of_params(loss_fn):
    params = {"w": jnp.zeros((XS.shape[-1], 3))}
    return Learner.from_loss(params, loss_fn, optax.sgd(RATE), data=[(XS, YS)], default_callbacks=False)


def of_model(loss_fn):
    return learner(pair(), loss_fn, data=[(XS, YS)])


@pytest.mark.parametrize(
    ("build", "loss_fn", "first"),
    [
        (of_params, swapped_pair, "float32[8, 3]"),
        (of_params, with_dict, '{"outputs": float32[8, 3]}'),
        (of_model, swapped_pair_of_model, "float32[8, 3]"),
    ],
)
def test_outputs_before_the_loss_are_an_error_whose_fixes_work(build, loss_fn, first):
    with pytest.raises(TraceError) as caught:
        build(loss_fn)
    mean = "if the first value has the losses of the examples, take their mean: `return jnp.mean(losses), aux`"
    is_array = not first.startswith("{")
    assert str(caught.value) == (
        f"The loss function returned a pair of {first} and float32[], which must be `(loss, aux)`.\n"
        "  why:   training differentiates the first value, and only a real scalar has a gradient\n"
        f"  fix:   return the two in the other order: `return loss, outputs`" + is_array * f"\n     or: {mean}"
    )
    build(lambda model, batch: loss_fn(model, batch)[::-1]).fit(1)
    if is_array:
        build(lambda model, batch: (jnp.mean(loss_fn(model, batch)[0] ** 2), loss_fn(model, batch)[1])).fit(1)
