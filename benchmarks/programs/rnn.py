"""Classify digits by their rows with a recurrent network: Equinox."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from data import digits

import fluxcb
from fluxcb.callbacks import CustomCallback, Metrics, accuracy
from fluxcb.events import Trigger

EPOCHS, STEPS = 20, 40
BATCH, WIDTH = 32, 64


class RNN(eqx.Module):
    cell: eqx.nn.GRUCell
    linear: eqx.nn.Linear

    def __init__(self, key):
        k1, k2 = jax.random.split(key)
        self.cell = eqx.nn.GRUCell(8, WIDTH, key=k1)
        self.linear = eqx.nn.Linear(WIDTH, 10, key=k2)

    def __call__(self, rows):
        hidden, _ = jax.lax.scan(lambda hidden, row: (self.cell(row, hidden), None), jnp.zeros(WIDTH), rows)
        return self.linear(hidden)


def batches():
    xs, ys = digits()
    xs, split = xs[..., 0], STEPS * BATCH
    training = list(zip(np.split(xs[:split], STEPS), np.split(ys[:split], STEPS), strict=True))
    return training, [(xs[split:], ys[split:])]


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def by_hand(tick):
    training, validation = batches()
    model = RNN(jax.random.key(0))
    optimizer = optax.adam(3e-3)
    opt_state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))

    def loss_fn(model, x, y):
        logits = jax.vmap(model)(x)
        return cross_entropy(logits, y), jnp.mean(jnp.argmax(logits, -1) == y)

    @eqx.filter_jit
    def make_step(model, opt_state, x, y):
        metrics, grads = eqx.filter_value_and_grad(loss_fn, has_aux=True)(model, x, y)
        updates, opt_state = optimizer.update(grads, opt_state)
        return eqx.apply_updates(model, updates), opt_state, metrics

    @eqx.filter_jit
    def evaluate(model, x, y):
        return loss_fn(model, x, y)

    for epoch in range(EPOCHS):
        metrics = []
        for x, y in training:
            model, opt_state, values = make_step(model, opt_state, x, y)
            metrics.append(values)
        train_loss, train_accuracy = np.mean(jax.device_get(metrics), axis=0)
        valid_loss, valid_accuracy = np.mean(jax.device_get([evaluate(model, x, y) for x, y in validation]), axis=0)
        print(
            f"epoch={epoch}, loss={train_loss:.4f}, accuracy={train_accuracy:.4f}, "
            f"validation loss={valid_loss:.4f}, validation accuracy={valid_accuracy:.4f}"
        )
        tick()
    return {
        "training/loss": float(train_loss),
        "training/accuracy": float(train_accuracy),
        "validation/loss": float(valid_loss),
        "validation/accuracy": float(valid_accuracy),
        "params": float(optax.tree.norm(eqx.filter(model, eqx.is_inexact_array))),
    }


def with_fluxcb(tick):
    learner = fluxcb.Learner(
        RNN(jax.random.key(0)),
        cross_entropy,
        optax.adam(3e-3),
        data=batches(),
        callbacks=[Metrics(accuracy), CustomCallback(lambda learner: tick(), Trigger)],
    )
    history = learner.fit(EPOCHS)
    return {name: values[-1] for name, values in history.items()} | {"params": float(optax.tree.norm(learner.params))}
