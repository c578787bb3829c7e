"""A small regression whose numbers are easy to compute elsewhere."""

import io

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from rich.console import Console

import fluxcb
from fluxcb.logging.consoles import CONSOLES


def batches(sizes, seed=0):
    rng = np.random.default_rng(seed)
    return [(rng.normal(size=(n, 3)).astype(np.float32), rng.integers(0, 4, n).astype(np.int32)) for n in sizes]


def init(key, xs):
    del key
    return {"w": jnp.linspace(-1.0, 1.0, xs.shape[-1] * 4).reshape(xs.shape[-1], 4)}


def apply(params, xs):
    return xs @ params["w"]


def loss_fn(outputs, ys):
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(outputs, ys))


@pytest.fixture
def build():
    """Return a function that builds a Learner of the small model."""

    def make(callbacks, data=None, optimizer=None, **kwargs):
        data = batches([4, 4, 2]) if data is None else data
        optimizer = optimizer or fluxcb.inject(optax.sgd, learning_rate=0.1)
        kwargs.setdefault("default_callbacks", False)
        return fluxcb.Learner((init, apply), loss_fn, optimizer, data=data, callbacks=callbacks, **kwargs)

    return make


class Reference:
    """The same training in numpy, float64."""

    def __init__(self, features=3):
        self.w = np.linspace(-1.0, 1.0, features * 4).reshape(features, 4)

    def look(self, xs, ys):
        logits = xs.astype(np.float64) @ self.w
        p = np.exp(logits - logits.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        rows = np.arange(len(ys))
        loss = -np.log(p[rows, ys]).mean()
        right = (logits.argmax(1) == ys).mean()
        p[rows, ys] -= 1
        return loss, right, xs.T.astype(np.float64) @ p / len(ys)

    def train(self, xs, ys, rate=0.1):
        loss, right, grad = self.look(xs, ys)
        self.w = self.w - rate * grad
        return loss, right


@pytest.fixture
def reference():
    return Reference()


@pytest.fixture
def make_batches():
    return batches


@pytest.fixture
def terminal():
    """Return a file that the callbacks take for a terminal."""
    file = io.StringIO()
    console = CONSOLES[id(file)] = Console(file=file, force_terminal=True, width=100, legacy_windows=False)
    yield file
    del console  # which was held until here
