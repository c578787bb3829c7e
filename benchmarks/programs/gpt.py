"""Train a small GPT: Flax NNX, warm-up and cosine schedule, gradient clipping, gradient accumulation."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from data import text
from flax import nnx

import fluxcb
from fluxcb.callbacks import AccumulateGradients, ClipGradients, CustomCallback
from fluxcb.events import Trigger

EPOCHS, STEPS = 6, 40
BATCH, LENGTH = 8, 32
WIDTH, HEADS, LAYERS = 64, 4, 2
ACCUMULATED = 4
SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 3e-3, warmup_steps=10, decay_steps=60)


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm1, self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs), nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, decode=False, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, mask):
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class GPT(nnx.Module):
    def __init__(self, vocabulary, rngs):
        self.tokens = nnx.Embed(vocabulary, WIDTH, rngs=rngs)
        self.positions = nnx.Embed(LENGTH, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, x):
        mask = nnx.make_causal_mask(x)
        x = self.tokens(x) + self.positions(jnp.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x, mask)
        return self.tokens.attend(self.norm(x))


def batches():
    windows, vocabulary = text(LENGTH, (STEPS + 4) * BATCH)
    found = [(part[:, :-1], part[:, 1:]) for part in np.split(windows, STEPS + 4)]
    return (found[:STEPS], found[STEPS:]), vocabulary


def cross_entropy(logits, ys):
    return optax.softmax_cross_entropy_with_integer_labels(logits, ys).mean()


def by_hand(tick):
    (training, validation), vocabulary = batches()
    model = GPT(vocabulary, nnx.Rngs(0))
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(SCHEDULE, weight_decay=0.1))
    optimizer = nnx.Optimizer(model, optax.MultiSteps(tx, ACCUMULATED), wrt=nnx.Param)

    def loss_fn(model, batch):
        return cross_entropy(model(batch[0]), batch[1])

    @nnx.jit
    def train_step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
        optimizer.update(model, grads)
        return loss

    eval_step = nnx.jit(loss_fn)

    for epoch in range(EPOCHS):
        train_loss = float(np.mean(jax.device_get([train_step(model, optimizer, batch) for batch in training])))
        valid_loss = float(np.mean(jax.device_get([eval_step(model, batch) for batch in validation])))
        print(f"epoch {epoch} train loss {train_loss:.4f} valid loss {valid_loss:.4f}")
        tick()
    params = nnx.to_pure_dict(nnx.state(model, nnx.Param))
    return {"training/loss": train_loss, "validation/loss": valid_loss, "params": float(optax.tree.norm(params))}


def with_fluxcb(tick):
    data, vocabulary = batches()
    learner = fluxcb.Learner(
        GPT(vocabulary, nnx.Rngs(0)),
        cross_entropy,
        optax.adamw(SCHEDULE, weight_decay=0.1),
        data=data,
        callbacks=[
            ClipGradients(1.0),
            AccumulateGradients(ACCUMULATED),
            CustomCallback(lambda learner: tick(), Trigger),
        ],
    )
    history = learner.fit(EPOCHS)
    return {name: values[-1] for name, values in history.items()} | {"params": float(optax.tree.norm(learner.params))}
