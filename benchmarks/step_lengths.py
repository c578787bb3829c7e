"""(9) Steps of a given length, on whatever device there is: what a loop adds when the device is the bottleneck."""

from __future__ import annotations

import functools
import time
from typing import Any

import jax
import models
import numpy as np
from figures import Table
from models import CLASSES, Model

LENGTHS = {0.005: 60, 0.2: 8}  # seconds of a step, and steps of a run
_TRIAL_LAYERS = 32


def measure(rounds: int) -> list[Table]:
    """Return a table per length of a step."""
    return [models.compare(_model(seconds, steps), rounds) for seconds, steps in LENGTHS.items()]


def _model(seconds: float, steps: int) -> Model:
    """Return a model whose step takes about `seconds` on this device.

    The step applies a fixed layer as often as this takes, and trains one more layer on the result. Its memory does not
    depend on its length.
    """
    width, batch = (256, 32) if jax.default_backend() == "cpu" else (2048, 1024)
    rng = np.random.default_rng(0)
    weights = jax.device_put((rng.normal(size=(width, width)) / np.sqrt(width)).astype(np.float32))
    params = {"out": jax.device_put(np.zeros((width, CLASSES), np.float32))}
    xs = rng.normal(size=(steps, batch, width)).astype(np.float32)
    batches = [(x, rng.integers(0, CLASSES, batch).astype(np.int32)) for x in xs]

    def features(xs: Any, layers: int) -> Any:
        return jax.lax.fori_loop(0, layers, lambda _, x: jax.numpy.tanh(x @ weights), xs)

    layers = max(1, round(seconds / _seconds_of_layer(functools.partial(jax.jit(features, static_argnums=1), xs[0]))))

    def apply(params: Any, xs: Any) -> Any:
        return jax.lax.stop_gradient(features(xs, layers)) @ params["out"]

    return Model(f"{layers:,} layers, {seconds * 1e3:.0f} ms", params, apply, batches)


def _seconds_of_layer(features: Any) -> float:
    """Return the duration of one more layer (s)."""

    def seconds(layers: int) -> float:
        jax.block_until_ready(features(layers))  # compiles
        times = []
        for _ in range(5):
            began = time.perf_counter()
            jax.block_until_ready(features(layers))
            times.append(time.perf_counter() - began)
        return min(times)

    return (seconds(2 * _TRIAL_LAYERS) - seconds(_TRIAL_LAYERS)) / _TRIAL_LAYERS
