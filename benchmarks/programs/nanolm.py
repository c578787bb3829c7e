"""Train a small character-level language model with dropout: Flax Linen.

The dropout of a step is seeded by the batch, so that both versions draw the same.
"""

from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from data import text

import fluxcb
from fluxcb.callbacks import CustomCallback
from fluxcb.events import Trigger

EPOCHS, STEPS = 6, 40
BATCH, LENGTH = 16, 32
WIDTH, HEADS, LAYERS = 64, 4, 2


class NanoLM(nn.Module):
    vocabulary: int

    @nn.compact
    def __call__(self, x, training):
        mask = nn.make_causal_mask(x)
        x = nn.Embed(self.vocabulary, WIDTH)(x) + nn.Embed(LENGTH, WIDTH)(jnp.arange(x.shape[1]))
        for _ in range(LAYERS):
            y = nn.LayerNorm()(x)
            y = nn.MultiHeadDotProductAttention(HEADS, dropout_rate=0.2)(y, mask=mask, deterministic=not training)
            x = x + y
            y = nn.Dense(WIDTH)(nn.relu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))))
            x = x + nn.Dropout(0.2)(y, deterministic=not training)
        return nn.Dense(self.vocabulary)(nn.LayerNorm()(x))


def batches():
    windows, vocabulary = text(LENGTH, (STEPS + 4) * BATCH)
    parts = enumerate(np.split(windows, STEPS + 4))
    found = [{"x": part[:, :-1], "y": part[:, 1:], "seed": np.int32(seed)} for seed, part in parts]
    return (found[:STEPS], found[STEPS:]), vocabulary


def initialized(xs, vocabulary):
    model = NanoLM(vocabulary)
    return model, jax.jit(partial(model.init, training=False))(jax.random.key(0), xs)


def cross_entropy(logits, ys):
    return optax.softmax_cross_entropy_with_integer_labels(logits, ys).mean()


def by_hand(tick):
    (training, validation), vocabulary = batches()
    model, variables = initialized(training[0]["x"], vocabulary)
    params = variables["params"]
    optimizer = optax.adamw(1e-3)
    opt_state = optimizer.init(params)

    def loss_fn(params, batch):
        dropout = jax.random.key(batch["seed"])
        logits = model.apply({"params": params}, batch["x"], training=True, rngs={"dropout": dropout})
        return cross_entropy(logits, batch["y"])

    @jax.jit
    def train_step(params, opt_state, batch):
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    @jax.jit
    def eval_step(params, batch):
        return cross_entropy(model.apply({"params": params}, batch["x"], training=False), batch["y"])

    for epoch in range(EPOCHS):
        losses = []
        for batch in training:
            params, opt_state, loss = train_step(params, opt_state, batch)
            losses.append(loss)
        train_loss = float(np.mean(jax.device_get(losses)))
        eval_loss = float(np.mean(jax.device_get([eval_step(params, batch) for batch in validation])))
        print(f"epoch {epoch} training loss {train_loss:.4f} evaluation loss {eval_loss:.4f}")
        tick()
    return {
        "training/loss": train_loss,
        "validation/loss": eval_loss,
        "params": float(optax.tree.norm(params)),
    }


def with_fluxcb(tick):
    data, vocabulary = batches()
    model, variables = initialized(data[0][0]["x"], vocabulary)

    def loss_fn(model, batch):
        return cross_entropy(model(batch["x"], rngs={"dropout": jax.random.key(batch["seed"])}), batch["y"])

    learner = fluxcb.Learner(
        model.bind(variables),
        loss_fn,
        optax.adamw(1e-3),
        data=data,
        callbacks=[CustomCallback(lambda learner: tick(), Trigger)],
    )
    history = learner.fit(EPOCHS)
    return {name: values[-1] for name, values in history.items()} | {"params": float(optax.tree.norm(learner.params))}
