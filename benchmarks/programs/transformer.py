"""Train a transformer of 29 million parameters whose layers are scanned: plain functions, no model library.

Memory is what this program measures: parameters, gradients and the optimizer's state take 460 MB together.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from data import text

import fluxcb
from fluxcb.callbacks import CustomCallback
from fluxcb.events import Trigger

EPOCHS, STEPS = 9, 4
BATCH, LENGTH = 2, 64
WIDTH, HEADS, LAYERS = 512, 8, 9


def init(key, vocabulary):
    keys = jax.random.split(key, 6)

    def normal(key, *shape):
        return 0.02 * jax.random.normal(key, shape)

    return {
        "tokens": normal(keys[0], vocabulary, WIDTH),
        "positions": normal(keys[1], LENGTH, WIDTH),
        "layers": {
            "norm1": jnp.ones((LAYERS, WIDTH)),
            "qkv": normal(keys[2], LAYERS, WIDTH, 3 * WIDTH),
            "out": normal(keys[3], LAYERS, WIDTH, WIDTH),
            "norm2": jnp.ones((LAYERS, WIDTH)),
            "up": normal(keys[4], LAYERS, WIDTH, 4 * WIDTH),
            "down": normal(keys[5], LAYERS, 4 * WIDTH, WIDTH),
        },
        "norm": jnp.ones(WIDTH),
    }


def normalized(x, scale):
    return scale * x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def layer(x, params):
    q, k, v = jnp.split(normalized(x, params["norm1"]) @ params["qkv"], 3, axis=-1)
    q, k, v = (part.reshape(*part.shape[:2], HEADS, -1) for part in (q, k, v))
    attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + attended.reshape(x.shape) @ params["out"]
    return x + jax.nn.gelu(normalized(x, params["norm2"]) @ params["up"]) @ params["down"], None


def loss_fn(params, batch):
    x, y = batch
    hidden = params["tokens"][x] + params["positions"]
    hidden, _ = jax.lax.scan(layer, hidden, params["layers"])
    logits = normalized(hidden, params["norm"]) @ params["tokens"].T
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def batches():
    windows, vocabulary = text(LENGTH, STEPS * BATCH)
    return [(part[:, :-1], part[:, 1:]) for part in np.split(windows, STEPS)], vocabulary


def by_hand(tick):
    training, vocabulary = batches()
    params = init(jax.random.key(0), vocabulary)
    optimizer = optax.adamw(3e-4)
    opt_state = optimizer.init(params)

    @jax.jit(donate_argnums=(0, 1))
    def train_step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    for epoch in range(EPOCHS):
        losses = []
        for batch in training:
            params, opt_state, loss = train_step(params, opt_state, batch)
            losses.append(loss)
        mean = float(np.mean(jax.device_get(losses)))
        print(f"epoch {epoch} loss {mean:.4f}")
        tick()
    return {"training/loss": mean, "params": float(optax.tree.norm(params))}


def with_fluxcb(tick):
    training, vocabulary = batches()
    learner = fluxcb.Learner.from_loss(
        init(jax.random.key(0), vocabulary),
        loss_fn,
        optax.adamw(3e-4),
        data=training,
        callbacks=[CustomCallback(lambda learner: tick(), Trigger)],
    )
    history = learner.fit(EPOCHS)
    return {"training/loss": history["training/loss"][-1], "params": float(optax.tree.norm(learner.borrow("params")))}
