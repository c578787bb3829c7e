"""Train a variational autoencoder on digits: Flax Linen.

The noise of a step is seeded by the batch, so that both versions draw the same.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from data import images
from flax.training.train_state import TrainState

import fluxcb
from fluxcb.callbacks import CustomCallback, Metric, Metrics
from fluxcb.events import Trigger

EPOCHS, STEPS = 20, 40
BATCH, LATENTS = 32, 8


class VAE(nn.Module):
    @nn.compact
    def __call__(self, x, key):
        hidden = nn.relu(nn.Dense(256)(x))
        mean, logvar = nn.Dense(LATENTS)(hidden), nn.Dense(LATENTS)(hidden)
        z = mean + jnp.exp(0.5 * logvar) * jax.random.normal(key, mean.shape)
        logits = nn.Dense(64)(nn.relu(nn.Dense(256)(z)))
        return logits, mean, logvar


def batches():
    xs = images()
    split = STEPS * BATCH
    training = [{"x": x, "seed": np.int32(seed)} for seed, x in enumerate(np.split(xs[:split], STEPS))]
    return training, [{"x": xs[split:], "seed": np.int32(STEPS)}]


def initialized(xs):
    model = VAE()
    return model, jax.jit(model.init)(jax.random.key(0), xs, jax.random.key(1))


def elbo_loss(logits, mean, logvar, x):
    reconstruction = optax.sigmoid_binary_cross_entropy(logits, x).sum(-1).mean()
    kl = -0.5 * jnp.sum(1 + logvar - mean**2 - jnp.exp(logvar), axis=-1).mean()
    return reconstruction + kl, {"reconstruction": reconstruction, "kl": kl}


def by_hand(tick):
    training, validation = batches()
    model, variables = initialized(training[0]["x"])
    state = TrainState.create(apply_fn=model.apply, params=variables["params"], tx=optax.adam(1e-3))

    def loss_fn(params, batch):
        logits, mean, logvar = model.apply({"params": params}, batch["x"], jax.random.key(batch["seed"]))
        return elbo_loss(logits, mean, logvar, batch["x"])

    @jax.jit
    def train_step(state, batch):
        (loss, aux), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params, batch)
        return state.apply_gradients(grads=grads), {"loss": loss, **aux}

    @jax.jit
    def eval_step(params, batch):
        loss, aux = loss_fn(params, batch)
        return {"loss": loss, **aux}

    for epoch in range(EPOCHS):
        losses = []
        for batch in training:
            state, metrics = train_step(state, batch)
            losses.append(metrics)
        eval_losses = [eval_step(state.params, batch) for batch in validation]
        values = {}
        for phase, metrics in (("training", losses), ("validation", eval_losses)):
            means = jax.tree.map(lambda *values: float(np.mean(values)), *jax.device_get(metrics))
            values |= {f"{phase}/{name}": mean for name, mean in means.items()}
        print(f"epoch {epoch}", *(f"{name} {value:.4f}" for name, value in values.items()))
        tick()
    return {**values, "params": float(optax.tree.norm(state.params))}


def with_fluxcb(tick):
    training, validation = batches()
    model, variables = initialized(training[0]["x"])

    def loss_fn(model, batch):
        logits, mean, logvar = model(batch["x"], jax.random.key(batch["seed"]))
        return elbo_loss(logits, mean, logvar, batch["x"])

    learner = fluxcb.Learner(
        model.bind(variables),
        loss_fn,
        optax.adam(1e-3),
        data=(training, validation),
        callbacks=[
            Metrics(
                Metric(lambda aux: aux["reconstruction"], "reconstruction", needs=("aux",)),
                Metric(lambda aux: aux["kl"], "kl", needs=("aux",)),
            ),
            CustomCallback(lambda learner: tick(), Trigger),
        ],
    )
    history = learner.fit(EPOCHS)
    return {name: values[-1] for name, values in history.items()} | {"params": float(optax.tree.norm(learner.params))}
