"""Classify digits with sharpness-aware minimization: `optax.contrib.sam`, parameters in a dict, no model library."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import optax
from data import digits
from optax import contrib

import fluxcb
from fluxcb.callbacks import CustomCallback, Metric, Metrics
from fluxcb.events import Trigger

EPOCHS, STEPS = 20, 40
BATCH = 32
SIZES = (64, 256, 256, 10)


def init(key):
    params = {}
    for layer, (inputs, outputs) in enumerate(pairwise(SIZES)):
        w = jax.random.normal(jax.random.fold_in(key, layer), (inputs, outputs)) * (2 / inputs) ** 0.5
        params[f"dense{layer}"] = {"w": w, "b": jnp.zeros(outputs)}
    return params


def network(params, x):
    x = x.reshape(len(x), -1)
    for layer in range(len(params)):
        x = x @ params[f"dense{layer}"]["w"] + params[f"dense{layer}"]["b"]
        x = jax.nn.relu(x) if layer + 1 < len(params) else x
    return x


def loss_fn(params, batch):
    xs, ys = batch
    logits = network(params, xs)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, ys).mean()
    return loss, jnp.mean(jnp.argmax(logits, -1) == ys)


def sam():
    adversary = optax.chain(contrib.normalize(), optax.sgd(0.05))
    return contrib.sam(optax.sgd(0.05, momentum=0.9), adversary, sync_period=2, opaque_mode=True)


def batches():
    xs, ys = digits()
    split = STEPS * BATCH
    training = list(zip(np.split(xs[:split], STEPS), np.split(ys[:split], STEPS), strict=True))
    return training, [(xs[split:], ys[split:])]


def by_hand(tick):
    training, validation = batches()
    optimizer = sam()
    params = init(jax.random.key(0))
    opt_state = optimizer.init(params)

    @jax.jit
    def train_step(params, opt_state, batch):
        (loss, accuracy), grads = jax.value_and_grad(loss_fn, has_aux=True)(params, batch)

        def grad_fn(params, _):
            return jax.grad(lambda params: loss_fn(params, batch)[0])(params)

        updates, opt_state = optimizer.update(grads, opt_state, params, grad_fn=grad_fn)
        return optax.apply_updates(params, updates), opt_state, (loss, accuracy)

    @jax.jit
    def eval_step(params, batch):
        return loss_fn(params, batch)

    for epoch in range(EPOCHS):
        metrics = []
        for batch in training:
            params, opt_state, values = train_step(params, opt_state, batch)
            metrics.append(values)
        train_loss, train_accuracy = np.mean(jax.device_get(metrics), axis=0)
        valid_loss, valid_accuracy = np.mean(jax.device_get([eval_step(params, b) for b in validation]), axis=0)
        print(
            f"epoch {epoch} train loss {train_loss:.4f} accuracy {train_accuracy:.4f} "
            f"valid loss {valid_loss:.4f} accuracy {valid_accuracy:.4f}"
        )
        tick()
    return {
        "training/loss": float(train_loss),
        "training/accuracy": float(train_accuracy),
        "validation/loss": float(valid_loss),
        "validation/accuracy": float(valid_accuracy),
        "params": float(optax.tree.norm(params)),
    }


def with_fluxcb(tick):
    training, validation = batches()
    learner = fluxcb.Learner.from_loss(
        init(jax.random.key(0)),
        loss_fn,
        sam(),
        data=(training, validation),
        callbacks=[
            Metrics(Metric(lambda aux: aux, "accuracy", needs=("aux",))),
            CustomCallback(lambda learner: tick(), Trigger),
        ],
    )
    history = learner.fit(EPOCHS)
    return {name: values[-1] for name, values in history.items()} | {"params": float(optax.tree.norm(learner.params))}
