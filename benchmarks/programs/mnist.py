"""Classify digits with a small convolutional network in Flax NNX."""

import numpy as np
import optax
from data import digits
from flax import nnx

import fluxcb
from fluxcb.callbacks import CustomCallback, Metrics, accuracy
from fluxcb.events import Trigger

EPOCHS, STEPS = 6, 40
BATCH = 32


class CNN(nnx.Module):
    def __init__(self, rngs):
        self.conv1 = nnx.Conv(1, 16, kernel_size=(3, 3), rngs=rngs)
        self.conv2 = nnx.Conv(16, 32, kernel_size=(3, 3), rngs=rngs)
        self.dense1 = nnx.Linear(128, 64, rngs=rngs)
        self.dense2 = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, x):
        x = nnx.avg_pool(nnx.relu(self.conv1(x)), (2, 2), (2, 2))
        x = nnx.avg_pool(nnx.relu(self.conv2(x)), (2, 2), (2, 2))
        x = nnx.relu(self.dense1(x.reshape(len(x), -1)))
        return self.dense2(x)


def batches():
    xs, ys = digits()
    split = STEPS * BATCH
    training = list(zip(np.split(xs[:split], STEPS), np.split(ys[:split], STEPS), strict=True))
    return training, [(xs[split:], ys[split:])]


def by_hand(tick):
    training, validation = batches()
    model = CNN(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)
    metrics = nnx.MultiMetric(accuracy=nnx.metrics.Accuracy(), loss=nnx.metrics.Average("loss"))

    def loss_fn(model, batch):
        logits = model(batch[0])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()
        return loss, logits

    @nnx.jit
    def train_step(model, optimizer, metrics, batch):
        (loss, logits), grads = nnx.value_and_grad(loss_fn, has_aux=True)(model, batch)
        metrics.update(loss=loss, logits=logits, labels=batch[1])
        optimizer.update(model, grads)

    @nnx.jit
    def eval_step(model, metrics, batch):
        loss, logits = loss_fn(model, batch)
        metrics.update(loss=loss, logits=logits, labels=batch[1])

    history = []
    for epoch in range(EPOCHS):
        for batch in training:
            train_step(model, optimizer, metrics, batch)
        values = {f"training/{name}": float(value) for name, value in metrics.compute().items()}
        metrics.reset()
        for batch in validation:
            eval_step(model, metrics, batch)
        values |= {f"validation/{name}": float(value) for name, value in metrics.compute().items()}
        metrics.reset()
        print(f"epoch {epoch}", *(f"{name} {value:.4f}" for name, value in values.items()))
        history.append(values)
        tick()
    return history[-1]


def with_fluxcb(tick):
    training, validation = batches()

    def loss_fn(logits, labels):
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    learner = fluxcb.Learner(
        CNN(nnx.Rngs(0)),
        loss_fn,
        optax.adam(1e-3),
        data=(training, validation),
        callbacks=[Metrics(accuracy), CustomCallback(lambda learner: tick(), Trigger)],
    )
    history = learner.fit(EPOCHS)
    return {name: values[-1] for name, values in history.items()}
