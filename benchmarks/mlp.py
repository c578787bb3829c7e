"""The small training on which overhead shows: a 64-64-10 network, batches of 32, Adam, float32.

Its step takes tens of microseconds, so that what a loop adds is not lost in it.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
from interleave import Variant

from fluxcb import Callback, Learner
from fluxcb.callbacks import Metrics, MetricsPrinter, ProgressBar, Recorder, StopOnNaNLoss
from fluxcb.phases import TrainingPhase

BATCHES, BATCH, EPOCHS = 1000, 32, 2
RATE = 1e-4  # of learning

Batch = tuple[np.ndarray, np.ndarray]


def arrays() -> Batch:
    """Return all examples; the classes are those of a random linear map, with noise."""
    rng = np.random.default_rng(0)
    xs = rng.normal(size=(BATCHES * BATCH, 64)).astype(np.float32)
    scores = xs @ rng.normal(size=(64, 10)) + rng.normal(size=(len(xs), 10))
    return xs, scores.argmax(-1).astype(np.int32)


def batches() -> list[Batch]:
    """Return the examples in batches, each with memory of its own."""
    xs, ys = arrays()
    return [(xs[at : at + BATCH].copy(), ys[at : at + BATCH].copy()) for at in range(0, len(xs), BATCH)]


def first_params() -> dict[str, np.ndarray]:
    """Return the parameters that every training starts with."""
    rng = np.random.default_rng(1)
    return {
        "w1": (0.1 * rng.normal(size=(64, 64))).astype(np.float32),
        "b1": np.zeros(64, np.float32),
        "w2": (0.1 * rng.normal(size=(64, 10))).astype(np.float32),
        "b2": np.zeros(10, np.float32),
    }


def init(key: Any, xs: Any) -> Any:
    """Return the first parameters, as a Learner asks for them."""
    return jax.tree.map(jnp.asarray, first_params())


def apply(params: Any, xs: Any) -> Any:
    """Return the outputs of the network, `float32[batch, 10]`."""
    return jax.nn.relu(xs @ params["w1"] + params["b1"]) @ params["w2"] + params["b2"]


def loss_fn(outputs: Any, ys: Any) -> Any:
    """Return the mean cross entropy, `float32[]`."""
    return optax.softmax_cross_entropy_with_integer_labels(outputs, ys).mean()


def optimizer() -> optax.GradientTransformation:
    """Return the optimizer."""
    return optax.adam(RATE)


def hand_step(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, Any]:
    """Take one step, as one writes it."""
    loss, grads = jax.value_and_grad(lambda p: loss_fn(apply(p, batch[0]), batch[1]))(params)
    updates, opt_state = optimizer().update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def hand_step_with_scalar(params: Any, opt_state: Any, batch: Any) -> tuple[Any, Any, Any]:
    """Take one step that also returns the largest gradient of the last bias."""
    loss, grads = jax.value_and_grad(lambda p: loss_fn(apply(p, batch[0]), batch[1]))(params)
    updates, opt_state = optimizer().update(grads, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, (loss, jnp.max(jnp.abs(grads["b2"])))


def hand_step_watched(params: Any, state: Any, batch: Any) -> tuple[Any, Any, Any]:
    """Take one step that also sums the loss, and changes nothing once a loss was NaN or infinite."""
    opt_state, total, count, bad = state
    loss, grads = jax.value_and_grad(lambda p: loss_fn(apply(p, batch[0]), batch[1]))(params)
    updates, new_opt_state = optimizer().update(grads, opt_state, params)
    bad = bad | ~jnp.isfinite(loss)
    new = optax.apply_updates(params, updates), new_opt_state, total + loss, count + 1
    params, *state = jax.tree.map(lambda old, new: jnp.where(bad, old, new), (params, opt_state, total, count), new)
    return params, (*state, bad), loss


def hand_state() -> tuple[Any, Any]:
    """Return the first parameters and the optimizer's state, in buffers that may be donated."""
    params = init(None, None)
    return params, jax.tree.map(jnp.copy, optimizer().init(params))


def hand_state_in_one_program() -> tuple[Any, Any]:
    """Return what `hand_state` does, with the optimizer's state computed by one program."""
    params = init(None, None)
    return params, jax.jit(optimizer().init)(params)


def hand_state_watched() -> tuple[Any, Any]:
    """Return what `hand_step_watched` begins with."""
    params, opt_state = hand_state()
    return params, (opt_state, *jax.device_put((np.float32(0), np.int32(0), np.bool_(False))))


def by_hand(
    *,
    reads: Literal["never", "each step", "each epoch"],
    data: Any = None,
    epochs: int = EPOCHS,
    step: Callable[..., tuple[Any, Any, Any]] = hand_step,
    first: Callable[[], tuple[Any, Any]] = hand_state,
) -> Variant:
    """Return the jitted, donated loop.

    Args:
        reads: When it looks at the loss. `each epoch` keeps what the steps return, and fetches it at the epoch's end.
        data: What it iterates in each epoch; the batches by default.
        epochs: Epochs of a run.
        step: The step.
        first: Makes the state that it begins with.
    """
    source = batches() if data is None else data
    compiled = jax.jit(step, donate_argnums=(0, 1))
    state = list(first())
    history: list[Any] = []

    def run() -> None:
        params, opt_state = state
        for _ in range(epochs):
            kept = []
            if reads == "never":
                for batch in source:
                    params, opt_state, _ = compiled(params, opt_state, batch)
            elif reads == "each step":
                for batch in source:
                    params, opt_state, loss = compiled(params, opt_state, batch)
                    kept.append(float(loss))
            else:
                for batch in source:
                    params, opt_state, values = compiled(params, opt_state, batch)
                    kept.append(values)
                kept = jax.tree.map(np.asarray, kept)
            history.extend(kept)
        state[:] = params, opt_state
        jax.block_until_ready(state)

    return Variant(run, lambda: state[0], epochs * len(source))


def by_hand_in_windows(
    length: int,
    *,
    stacks: bool = False,
    keeps: bool = False,
    data: Sequence[Batch] | None = None,
    epochs: int = EPOCHS,
    step: Callable[..., tuple[Any, Any, Any]] = hand_step,
) -> Variant:
    """Return the loop over `lax.scan`s.

    Args:
        length: Steps of a scan.
        stacks: Whether each window's batches are stacked when it comes; else they lie stacked on the device.
        keeps: Whether what the steps return is fetched at the end of each epoch.
        data: The batches, in a list.
        epochs: Epochs of a run.
        step: The step.
    """

    def window(params: Any, opt_state: Any, stacked: Any) -> tuple[Any, Any, Any]:
        def body(carry: tuple[Any, Any], batch: Any) -> tuple[tuple[Any, Any], Any]:
            params, opt_state, values = step(*carry, batch)
            return (params, opt_state), values

        (params, opt_state), values = jax.lax.scan(body, (params, opt_state), stacked)
        return params, opt_state, values

    compiled = jax.jit(window, donate_argnums=(0, 1))
    singles = batches() if data is None else data
    groups = [singles[at : at + length] for at in range(0, len(singles), length)]
    on_device = [jax.tree.map(jnp.asarray, _stacked(group)) for group in groups]
    state = list(hand_state())
    history: list[Any] = []

    def run() -> None:
        params, opt_state = state
        for _ in range(epochs):
            kept = []
            for stacked in map(_stacked, groups) if stacks else on_device:
                params, opt_state, values = compiled(params, opt_state, stacked)
                kept.append(values)
            if keeps:
                history.extend(jax.tree.map(np.asarray, kept))
        state[:] = params, opt_state
        jax.block_until_ready(state)

    return Variant(run, lambda: state[0], epochs * len(singles))


def _stacked(group: Sequence[Batch]) -> Batch:
    return np.stack([xs for xs, _ in group]), np.stack([ys for _, ys in group])


def defaults() -> list[Callback]:
    """Return the default callbacks, writing to memory rather than to the terminal."""
    sink = io.StringIO()
    return [Metrics(), Recorder(), ProgressBar(file=sink), MetricsPrinter(file=sink), StopOnNaNLoss()]


def learner_for(callbacks: Iterable[Any], data: Any = None, **arguments: Any) -> Learner:
    """Return a Learner with these callbacks and no others."""
    return Learner(
        (init, apply),
        loss_fn,
        optimizer(),
        data=batches() if data is None else data,
        callbacks=list(callbacks),
        default_callbacks=False,
        phases=(TrainingPhase(),),
        **arguments,
    )


def by_fluxcb(callbacks: Iterable[Any], data: Any = None, *, measured: bool = False, **arguments: Any) -> Variant:
    """Return the training by a Learner.

    Args:
        callbacks: Its callbacks; there are no others.
        data: Its data; the batches by default.
        measured: Whether the time of each handler is measured.
        **arguments: Go to the Learner: `steps_per_call=...`.
    """
    learner = learner_for(callbacks, data, **arguments)
    if measured:
        learner.callbacks.measure(True)

    def run() -> None:
        learner.fit(EPOCHS)  # waits for the last step

    def ready() -> bool:
        # "auto" compiles a program of one step at once, and that of a window some ten thousand steps later.
        return arguments.get("steps_per_call", "auto") != "auto" or learner.compile_counts["compiles"] > 1

    return Variant(run, lambda: learner.params, EPOCHS * BATCHES, ready)
