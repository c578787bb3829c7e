"""Windows of every length compute the same bits, and match a jitted step up to rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import fluxcb
from fluxcb import Learner
from fluxcb._compile.traced import name_hash
from fluxcb.phases import AbstractTrainingPhase, AbstractValidationPhase

# With this batch size the straight program and the loop differ in bits for the convolutional network (jax 0.10.2).
BATCH, CLASSES = 33, 3

# The largest difference to the hand-written step over some 30 steps, where XLA fuses other kernels.
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


def dropout(key, x, train):
    return jnp.where(jax.random.bernoulli(key, 0.8, x.shape), x / 0.8, 0) if train else x


def normal(key, **shapes):
    keys = jax.random.split(key, len(shapes))
    return {name: 0.3 * jax.random.normal(k, shape) for k, (name, shape) in zip(keys, shapes.items(), strict=True)}


def mlp(params, xs, *, key, train):
    hidden = dropout(key, jax.nn.relu(xs @ params["w"] + params["b"]), train)
    return hidden @ params["out"]


def convolutional(params, xs, *, key, train):
    hidden = jax.lax.conv_general_dilated(
        xs, params["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    pooled = dropout(key, jax.nn.relu(hidden), train).mean((1, 2))
    return pooled @ params["out"]


def transformer(params, xs, *, key, train):
    one, two = jax.random.split(key)
    x = xs + params["position"]
    q, k, v = (x @ params[name] for name in ("q", "k", "v"))
    weights = jax.nn.softmax(q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5)
    x = x + dropout(one, weights, train) @ v
    normed = (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5) * params["scale"]
    return (x + dropout(two, jax.nn.gelu(normed @ params["up"]), train) @ params["down"]).mean(1) @ params["out"]


MODELS = {
    mlp: ((4,), {"w": (4, 8), "b": (8,), "out": (8, CLASSES)}),
    convolutional: ((5, 5, 2), {"kernel": (3, 3, 2, 4), "out": (4, CLASSES)}),
    transformer: (
        (5, 4),
        {"position": (5, 4), "q": (4, 4), "k": (4, 4), "v": (4, 4), "scale": (4,)}
        | {"up": (4, 8), "down": (8, 4), "out": (4, CLASSES)},
    ),
}
OPTIMIZERS = {
    "sgd": lambda: optax.sgd(0.1),
    "adam": lambda: optax.adam(0.01),
    "injected": lambda: fluxcb.inject(optax.adam, learning_rate=0.01, b1=0.8),
}


def loss_fn(outputs, ys):
    return optax.softmax_cross_entropy_with_integer_labels(outputs, ys).mean()


def batches(apply, count, seed=0, last=BATCH):
    rng, shape = np.random.default_rng(seed), MODELS[apply][0]
    sizes = [BATCH] * (count - 1) + [last]
    return [
        (rng.normal(size=(n, *shape)).astype(np.float32), rng.integers(0, CLASSES, n).astype(np.int32)) for n in sizes
    ]


def init(apply):
    return lambda key, xs: normal(key, **MODELS[apply][1])


def make(apply, optimizer, *callbacks, last=BATCH, **arguments):
    return Learner(
        (init(apply), apply),
        loss_fn,
        OPTIMIZERS[optimizer](),
        data=(batches(apply, 11, last=last), batches(apply, 3, seed=1)),
        callbacks=callbacks,
        default_callbacks=False,
        **arguments,
    )


STEP = ("step.loss", "step.outputs", "step.batch", "step.ys")


@pytest.mark.long
@pytest.mark.parametrize(
    ("apply", "optimizer", "program"),
    [
        (mlp, "sgd", "loop"),
        (mlp, "adam", None),
        (mlp, "injected", None),
        (convolutional, "injected", "loop"),
        (convolutional, "adam", None),  # which is straight on CPU
        (mlp, "adam", "straight"),
        (transformer, "injected", None),
    ],
)
def test_every_window_length_computes_same_bits(apply, optimizer, program, same, tell, keep):
    injected = [f"hyperparams.{name}" for name in ("learning_rate", "b1")] if optimizer == "injected" else []

    def run(length):
        training = keep(*STEP, "step.grads", "step.updates", "params", *injected, phase=AbstractTrainingPhase)
        validation = keep(*STEP, phase=AbstractValidationPhase)
        learner = make(apply, optimizer, training, validation, last=4, program=program, steps_per_call=length)
        learner.fit(2)
        learner.fit(steps=8)
        assert len(training.seen) == 30
        assert len(validation.seen) == 9
        return tell(learner, training, validation)

    if program == "straight" or (program is None and apply is convolutional):  # which calls single steps
        same(run, (7, "auto"), windows_used=False)
    else:
        same(run)


def by_hand(apply, optimizer, learner, steps):
    """Return parameters, optimizer state and losses of a jitted step in a hand-written loop."""

    def loss(params, xs, ys, key):
        return loss_fn(apply(params, xs, key=key, train=True), ys)

    @jax.jit
    def step(params, opt_state, batch, number):
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(0), number), name_hash("phase training"))
        value, grads = jax.value_and_grad(loss)(params, *batch, key)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    params, losses = learner.params, []
    opt_state = optimizer.init(params)
    data = batches(apply, 11)
    for number in range(steps):
        params, opt_state, value = step(params, opt_state, data[number % 11], number)
        losses.append(value)
    return params, opt_state, losses


@pytest.mark.parametrize(
    ("apply", "optimizer"),
    [(mlp, "sgd"), (mlp, "adam"), (mlp, "injected"), (convolutional, "adam"), (transformer, "injected")],
)
def test_windows_match_hand_written_step(apply, optimizer, keep, windows):
    losses = keep("step.loss", phase=AbstractTrainingPhase)
    learner = make(apply, optimizer, losses, program="loop", steps_per_call=7)
    params, opt_state, expected = by_hand(apply, OPTIMIZERS[optimizer](), learner, 33)
    learner.fit(3)
    assert max(windows) == (7, 7)
    found = np.array([np.frombuffer(value[2], np.float32)[0] for _, value in losses.values()])
    np.testing.assert_allclose(found, np.array(expected), **CLOSE)
    for ours, theirs in ((learner.params, params), (learner.state["opt_state"], opt_state)):
        assert jax.tree.structure(ours) == jax.tree.structure(theirs)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **CLOSE), ours, theirs)
