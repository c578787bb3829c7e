"""Classify digits with a residual network: Flax Linen, batch normalization, momentum with a cosine schedule, L2."""

from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from data import digits
from flax.training import train_state

import fluxcb
from fluxcb.callbacks import CustomCallback, Metric, Metrics
from fluxcb.events import Trigger

EPOCHS, STEPS = 5, 20
BATCH = 64
BLOCKS = ((16, 1), (32, 2), (64, 2))  # filters and strides
WEIGHT_DECAY = 1e-4
SCHEDULE = optax.cosine_decay_schedule(0.05, decay_steps=100)


class Block(nn.Module):
    filters: int
    strides: int = 1

    @nn.compact
    def __call__(self, x, train):
        strides = (self.strides, self.strides)
        y = nn.Conv(self.filters, (3, 3), strides, use_bias=False)(x)
        y = nn.relu(nn.BatchNorm(use_running_average=not train, momentum=0.9)(y))
        y = nn.Conv(self.filters, (3, 3), use_bias=False)(y)
        y = nn.BatchNorm(use_running_average=not train, momentum=0.9)(y)
        if x.shape != y.shape:
            x = nn.Conv(self.filters, (1, 1), strides, use_bias=False)(x)
        return nn.relu(x + y)


class ResNet(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.relu(nn.Conv(16, (3, 3), use_bias=False)(x))
        for filters, strides in BLOCKS:
            x = Block(filters, strides)(x, train)
        return nn.Dense(10)(x.mean(axis=(1, 2)))


def batches():
    xs, ys = digits()
    split = STEPS * BATCH
    parts = zip(np.split(xs[:split], STEPS), np.split(ys[:split], STEPS), strict=True)
    training = [{"image": x, "label": y} for x, y in parts]
    return training, [{"image": xs[split:], "label": ys[split:]}]


def initialized(images):
    model = ResNet()
    return model, jax.jit(partial(model.init, train=True))(jax.random.key(0), images)


def cross_entropy(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def l2(params):
    return 0.5 * sum(jnp.sum(x**2) for x in jax.tree.leaves(params) if x.ndim > 1)


class TrainState(train_state.TrainState):
    batch_stats: Any


def by_hand(tick):
    training, validation = batches()
    model, variables = initialized(training[0]["image"])
    state = TrainState.create(
        apply_fn=model.apply,
        params=variables["params"],
        tx=optax.sgd(SCHEDULE, momentum=0.9, nesterov=True),
        batch_stats=variables["batch_stats"],
    )

    def compute_metrics(logits, labels, loss):
        return {"loss": loss, "accuracy": jnp.mean(jnp.argmax(logits, -1) == labels)}

    @jax.jit
    def train_step(state, batch):
        def loss_fn(params):
            logits, mutated = state.apply_fn(
                {"params": params, "batch_stats": state.batch_stats},
                batch["image"],
                train=True,
                mutable=["batch_stats"],
            )
            loss = cross_entropy(logits, batch["label"]) + WEIGHT_DECAY * l2(params)
            return loss, (logits, mutated["batch_stats"])

        (loss, (logits, batch_stats)), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        state = state.apply_gradients(grads=grads, batch_stats=batch_stats)
        return state, compute_metrics(logits, batch["label"], loss)

    @jax.jit
    def eval_step(state, batch):
        variables = {"params": state.params, "batch_stats": state.batch_stats}
        logits = state.apply_fn(variables, batch["image"], train=False)
        loss = cross_entropy(logits, batch["label"]) + WEIGHT_DECAY * l2(state.params)
        return compute_metrics(logits, batch["label"], loss)

    for epoch in range(EPOCHS):
        train_metrics = []
        for batch in training:
            state, metrics = train_step(state, batch)
            train_metrics.append(metrics)
        eval_metrics = [eval_step(state, batch) for batch in validation]
        values = {}
        for name, all_metrics in (("training", train_metrics), ("validation", eval_metrics)):
            all_metrics = jax.device_get(all_metrics)
            for key in ("loss", "accuracy"):
                values[f"{name}/{key}"] = float(np.mean([metrics[key] for metrics in all_metrics]))
        print(f"epoch {epoch}", *(f"{name} {value:.4f}" for name, value in values.items()))
        tick()
    return {**values, "params": float(optax.tree.norm(state.params))}


def with_fluxcb(tick):
    training, validation = batches()
    model, variables = initialized(training[0]["image"])

    def loss_fn(model, batch):
        logits = model(batch["image"])
        loss = cross_entropy(logits, batch["label"]) + WEIGHT_DECAY * l2(model.params)
        return loss, jnp.mean(jnp.argmax(logits, -1) == batch["label"])

    learner = fluxcb.Learner(
        model.bind(variables),
        loss_fn,
        optax.sgd(SCHEDULE, momentum=0.9, nesterov=True),
        data=(training, validation),
        callbacks=[
            Metrics(Metric(lambda aux: aux, "accuracy", needs=("aux",))),
            CustomCallback(lambda learner: tick(), Trigger),
        ],
    )
    history = learner.fit(EPOCHS)
    return {name: values[-1] for name, values in history.items()} | {"params": float(optax.tree.norm(learner.params))}
