"""(7) Models whose step takes milliseconds, where a loop should not show at all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import mlp
import numpy as np
import optax
from figures import Table
from interleave import Variant, comparison, in_turns

import fluxcb
from fluxcb import Callback, Learner
from fluxcb.callbacks import ClipGradients, LearningRate, Metrics, Scheduler, SmoothLoss, accuracy
from fluxcb.phases import TrainingPhase

CLASSES = 10

SCHEDULE = optax.cosine_decay_schedule(1e-3, 100_000)
LARGEST_NORM = 1.0


@dataclass(frozen=True)
class Model:
    """A model with its data.

    Attributes:
        name: What it is called in the table.
        params: The first parameters.
        apply: `apply(params, xs) -> float32[batch, ..., classes]`.
        batches: The batches of an epoch.
    """

    name: str
    params: dict[str, Any]
    apply: Callable[[Any, Any], Any]
    batches: list[Any]


def measure(rounds: int) -> list[Table]:
    """Return a table per model."""
    return [compare(model, rounds) for model in (convolutional(), transformer())]


def compare(model: Model, rounds: int) -> Table:
    """Return the table of a model."""
    plain, measures = "by hand, never reads the loss", "by hand, with accuracy, never reads the loss"
    reads, default, full = "by hand, float(loss) each step", "default callbacks", "default callbacks, everything on"
    times = in_turns(
        {
            plain: _by_hand(model),
            measures: _by_hand(model, measures=True),
            reads: _by_hand(model, reads=True),
            default: _by_fluxcb(model, _optimizer(), mlp.defaults()),
            full: _by_fluxcb(model, fluxcb.inject(optax.adam, learning_rate=1e-3), _everything(), measured=True),
        },
        rounds,
    )
    floors = {plain: plain, reads: plain, default: plain, measures: measures, full: measures}
    table = comparison(f"{model.name}: a step that dominates", times, floors, "ms/step")
    table.notes.append(
        "Everything on: accuracy and a smoothed loss for each step, gradient clipping and a learning-rate schedule as "
        "callbacks (by hand, both are in the optimizer), and measured handler times. It is compared with the "
        "hand-written loop whose step also computes the accuracy."
    )
    return table


def _optimizer() -> optax.GradientTransformation:
    return optax.chain(optax.clip_by_global_norm(LARGEST_NORM), optax.adam(SCHEDULE))


def _everything() -> list[Callback]:
    measuring, *others = mlp.defaults()
    measuring = Metrics(accuracy, SmoothLoss())
    return [measuring, *others, ClipGradients(LARGEST_NORM), Scheduler({LearningRate: SCHEDULE})]


def _by_hand(model: Model, *, reads: bool = False, measures: bool = False) -> Variant:
    optimizer = _optimizer()

    def step(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, Any]:
        def loss_of(params: Any) -> tuple[Any, Any]:
            outputs = model.apply(params, batch[0])
            return mlp.loss_fn(outputs, batch[1]), accuracy(outputs, batch[1]) if measures else None

        (loss, share), grads = jax.value_and_grad(loss_of, has_aux=True)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, (loss, share)

    compiled = jax.jit(step, donate_argnums=(0, 1))
    params = jax.tree.map(jnp.array, model.params)
    state = [params, jax.tree.map(jnp.copy, optimizer.init(params))]

    def run() -> None:
        params, opt_state = state
        for batch in model.batches:
            params, opt_state, (loss, _) = compiled(params, opt_state, batch)
            if reads:
                float(loss)
        state[:] = params, opt_state
        jax.block_until_ready(state)

    return Variant(run, lambda: state[0], len(model.batches))


def _by_fluxcb(model: Model, optimizer: Any, callbacks: list[Callback], *, measured: bool = False) -> Variant:
    learner = Learner(
        (lambda key, xs: model.params, model.apply),
        mlp.loss_fn,
        optimizer,
        data=model.batches,
        callbacks=callbacks,
        default_callbacks=False,
        phases=(TrainingPhase(),),
    )
    if measured:
        learner.callbacks.measure(True)

    def run() -> None:
        learner.fit(1)  # waits for the last step

    return Variant(run, lambda: learner.params, len(model.batches))


def _weights(rng: np.random.Generator, *shape: int) -> Any:
    return jnp.asarray(rng.normal(size=shape) / np.sqrt(np.prod(shape[:-1])), jnp.float32)


def convolutional() -> Model:
    """Return three convolutions and a linear layer, on 20 batches of 48 colour images of 32 x 32."""
    rng = np.random.default_rng(0)
    params = {
        "c1": _weights(rng, 3, 3, 3, 32),
        "c2": _weights(rng, 3, 3, 32, 64),
        "c3": _weights(rng, 3, 3, 64, 128),
        "out": _weights(rng, 128, CLASSES),
    }

    def apply(params: Any, xs: Any) -> Any:
        for name in ("c1", "c2", "c3"):
            xs = jax.lax.conv_general_dilated(
                xs, params[name], (1 if name == "c1" else 2,) * 2, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
            xs = jax.nn.relu(xs)
        return xs.mean((1, 2)) @ params["out"]

    batches = [
        (rng.normal(size=(48, 32, 32, 3)).astype(np.float32), rng.integers(0, CLASSES, 48).astype(np.int32))
        for _ in range(20)
    ]
    return Model("Convolutional network", params, apply, batches)


def transformer() -> Model:
    """Return two blocks of width 64 with four heads, which predict the next of 64 tokens on 100 batches of 16 x 32."""
    rng = np.random.default_rng(0)
    width, heads, length, vocabulary = 64, 4, 32, 64
    params: dict[str, Any] = {
        "tokens": _weights(rng, vocabulary, width),
        "positions": _weights(rng, length, width),
        "out": _weights(rng, width, vocabulary),
    }
    for block in range(2):
        params[f"block{block}"] = {
            "qkv": _weights(rng, width, 3 * width),
            "merge": _weights(rng, width, width),
            "up": _weights(rng, width, 4 * width),
            "down": _weights(rng, 4 * width, width),
        }

    def normalized(xs: Any) -> Any:
        return (xs - xs.mean(-1, keepdims=True)) * jax.lax.rsqrt(xs.var(-1, keepdims=True) + 1e-5)

    def attention(block: Any, xs: Any) -> Any:
        batch = xs.shape[0]
        split = (xs @ block["qkv"]).reshape(batch, length, 3, heads, width // heads)
        mixed = jax.nn.dot_product_attention(split[:, :, 0], split[:, :, 1], split[:, :, 2], is_causal=True)
        return mixed.reshape(batch, length, width) @ block["merge"]

    def apply(params: Any, tokens: Any) -> Any:
        xs = params["tokens"][tokens] + params["positions"]
        for number in range(2):
            block = params[f"block{number}"]
            xs = xs + attention(block, normalized(xs))
            xs = xs + jax.nn.gelu(normalized(xs) @ block["up"]) @ block["down"]
        return normalized(xs) @ params["out"]

    texts = rng.integers(0, vocabulary, (100, 16, length + 1)).astype(np.int32)
    return Model("Small transformer", params, apply, [(text[:, :-1], text[:, 1:]) for text in texts])
