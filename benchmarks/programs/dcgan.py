"""Train a convolutional GAN on digits: Equinox, one Adam for each network.

The noise of a step is seeded by the batch, so that both versions draw the same.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from data import digits

import fluxcb
from fluxcb.callbacks import CustomCallback, Metric, Metrics
from fluxcb.events import BackwardBegin, BackwardEnd, Trigger, UpdateEnd
from fluxcb.phases import AbstractTrainingPhase

EPOCHS, STEPS = 5, 40
BATCH, LATENTS = 32, 16


class Generator(eqx.Module):
    layers: list

    def __init__(self, key):
        k1, k2, k3 = jax.random.split(key, 3)
        self.layers = [
            eqx.nn.ConvTranspose2d(LATENTS, 32, 4, key=k1),
            eqx.nn.GroupNorm(8, 32),
            jax.nn.relu,
            eqx.nn.Conv2d(32, 32, 3, padding=1, key=k2),
            jax.nn.relu,
            eqx.nn.ConvTranspose2d(32, 1, 4, stride=2, padding=1, key=k3),
            jax.nn.sigmoid,
        ]

    def __call__(self, z):
        x = z[:, None, None]
        for layer in self.layers:
            x = layer(x)
        return x


class Discriminator(eqx.Module):
    layers: list

    def __init__(self, key):
        k1, k2, k3 = jax.random.split(key, 3)
        self.layers = [
            eqx.nn.Conv2d(1, 16, 4, stride=2, padding=1, key=k1),
            jax.nn.leaky_relu,
            eqx.nn.Conv2d(16, 32, 4, stride=2, padding=1, key=k2),
            jax.nn.leaky_relu,
            eqx.nn.Conv2d(32, 1, 2, key=k3),
        ]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.reshape(())


def networks():
    return Generator(jax.random.key(0)), Discriminator(jax.random.key(1))


def batches():
    xs = digits(STEPS * BATCH)[0].reshape(STEPS, BATCH, 1, 8, 8)
    return [{"real": x, "seed": np.int32(seed)} for seed, x in enumerate(xs)]


def noise(batch):
    return jax.random.normal(jax.random.key(batch["seed"]), (BATCH, LATENTS))


def discriminator_loss(discriminator, generator, batch):
    fake = jax.vmap(generator)(noise(batch))
    on_real, on_fake = jax.vmap(discriminator)(batch["real"]), jax.vmap(discriminator)(fake)
    return jnp.mean(jax.nn.softplus(-on_real) + jax.nn.softplus(on_fake))


def generator_loss(generator, discriminator, batch):
    return jnp.mean(jax.nn.softplus(-jax.vmap(discriminator)(jax.vmap(generator)(noise(batch)))))


def adam():
    return optax.adam(2e-4, b1=0.5)


def by_hand(tick):
    training = batches()
    generator, discriminator = networks()
    g_optimizer, d_optimizer = adam(), adam()
    g_state = g_optimizer.init(eqx.filter(generator, eqx.is_inexact_array))
    d_state = d_optimizer.init(eqx.filter(discriminator, eqx.is_inexact_array))

    @eqx.filter_jit
    def make_step(generator, discriminator, g_state, d_state, batch):
        d_loss, grads = eqx.filter_value_and_grad(discriminator_loss)(discriminator, generator, batch)
        updates, d_state = d_optimizer.update(grads, d_state)
        discriminator = eqx.apply_updates(discriminator, updates)
        g_loss, grads = eqx.filter_value_and_grad(generator_loss)(generator, discriminator, batch)
        updates, g_state = g_optimizer.update(grads, g_state)
        generator = eqx.apply_updates(generator, updates)
        return generator, discriminator, g_state, d_state, (d_loss, g_loss)

    for epoch in range(EPOCHS):
        losses = []
        for batch in training:
            generator, discriminator, g_state, d_state, values = make_step(
                generator, discriminator, g_state, d_state, batch
            )
            losses.append(values)
        d_mean, g_mean = np.mean(jax.device_get(losses), axis=0)
        print(f"epoch {epoch} discriminator loss {d_mean:.4f} generator loss {g_mean:.4f}")
        tick()
    return {
        "training/d_loss": float(d_mean),
        "training/g_loss": float(g_mean),
        "discriminator": float(optax.tree.norm(eqx.filter(discriminator, eqx.is_inexact_array))),
        "generator": float(optax.tree.norm(eqx.filter(generator, eqx.is_inexact_array))),
    }


def with_fluxcb(tick):
    generator, discriminator = networks()
    g_params, g_static = eqx.partition(generator, eqx.is_inexact_array)
    d_params, d_static = eqx.partition(discriminator, eqx.is_inexact_array)

    class DCGANPhase(AbstractTrainingPhase):
        provides = {BackwardBegin: ("loss",), BackwardEnd: ("grads",), UpdateEnd: ("d_loss", "g_loss")}

        def step(self, learner, emit):
            def d_loss(params):
                generator = eqx.combine(learner.params["generator"], g_static)
                return discriminator_loss(eqx.combine(params, d_static), generator, learner.step.batch)

            def g_loss(params):
                discriminator = eqx.combine(learner.params["discriminator"], d_static)
                return generator_loss(eqx.combine(params, g_static), discriminator, learner.step.batch)

            learner.step.d_loss = self.update(learner, emit, "discriminator", d_loss)
            learner.step.g_loss = self.update(learner, emit, "generator", g_loss)

        def update(self, learner, emit, part, function):
            def loss(params):
                learner.step.loss = function(params)
                emit(BackwardBegin())
                return learner.step.loss

            learner.step.grads = learner.grad(loss, wrt=f"params.{part}")
            emit(BackwardEnd())
            learner.update(learner.step.grads, wrt=f"params.{part}", optimizer=part)
            return learner.step.loss

    learner = fluxcb.Learner.from_loss(
        {"generator": g_params, "discriminator": d_params},
        None,
        {"generator": adam(), "discriminator": adam()},
        data=batches(),
        phases=(DCGANPhase(),),
        callbacks=[
            Metrics(
                Metric(lambda loss: loss, "d_loss", needs=("d_loss",)),
                Metric(lambda loss: loss, "g_loss", needs=("g_loss",)),
            ),
            CustomCallback(lambda learner: tick(), Trigger),
        ],
    )
    history = learner.fit(EPOCHS)
    norms = {name: float(optax.tree.norm(params)) for name, params in learner.params.items()}
    return {name: history[name][-1] for name in ("training/d_loss", "training/g_loss")} | norms
