"""Train a diffusion model of digits: an Equinox MLP that predicts the noise.

Noise levels and noise of a step are seeded by the batch, so that both versions draw the same.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from data import images

import fluxcb
from fluxcb.callbacks import CustomCallback
from fluxcb.events import Trigger

EPOCHS, STEPS = 20, 40
BATCH = 32


class Denoiser(eqx.Module):
    mlp: eqx.nn.MLP

    def __init__(self, key):
        self.mlp = eqx.nn.MLP(64 + 2, 64, width_size=256, depth=3, activation=jax.nn.silu, key=key)

    def __call__(self, noisy, t):
        return self.mlp(jnp.concatenate([noisy, jnp.stack([jnp.sin(t), jnp.cos(t)])]))


def batches():
    xs = 2 * images(STEPS * BATCH) - 1
    return [{"x": x, "seed": np.int32(seed)} for seed, x in enumerate(np.split(xs, STEPS))]


def single_loss(model, x, t, key):
    noise = jax.random.normal(key, x.shape)
    angle = 0.5 * jnp.pi * t
    predicted = model(jnp.cos(angle) * x + jnp.sin(angle) * noise, t)
    return jnp.mean((predicted - noise) ** 2)


def batch_loss(model, batch):
    key_t, key_noise = jax.random.split(jax.random.key(batch["seed"]))
    size = len(batch["x"])
    t = (jax.random.uniform(key_t) + jnp.arange(size) / size) % 1  # low discrepancy
    return jnp.mean(jax.vmap(single_loss, (None, 0, 0, 0))(model, batch["x"], t, jax.random.split(key_noise, size)))


def by_hand(tick):
    training = batches()
    model = Denoiser(jax.random.key(0))
    optimizer = optax.adabelief(3e-4)
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def make_step(model, opt_state, batch):
        loss, grads = eqx.filter_value_and_grad(batch_loss)(model, batch)
        updates, opt_state = optimizer.update(grads, opt_state)
        return eqx.apply_updates(model, updates), opt_state, loss

    for epoch in range(EPOCHS):
        total = jnp.zeros(())
        for batch in training:
            model, opt_state, loss = make_step(model, opt_state, batch)
            total += loss
        mean = total.item() / len(training)
        print(f"epoch={epoch}, loss={mean:.4f}")
        tick()
    return {"training/loss": mean, "params": float(optax.tree.norm(eqx.filter(model, eqx.is_inexact_array)))}


def with_fluxcb(tick):
    learner = fluxcb.Learner(
        Denoiser(jax.random.key(0)),
        batch_loss,
        optax.adabelief(3e-4),
        data=batches(),
        callbacks=[CustomCallback(lambda learner: tick(), Trigger)],
    )
    history = learner.fit(EPOCHS)
    return {name: values[-1] for name, values in history.items()} | {"params": float(optax.tree.norm(learner.params))}
