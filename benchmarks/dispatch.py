"""(3) What one more handler costs: on the host, traced into the step, and by its dispatch alone."""

from __future__ import annotations

import statistics
import time
import timeit
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import mlp
import numpy as np
import optax
from figures import Figure, Table
from interleave import Times, Variant, in_turns

from fluxcb import Callback, Learner, Read, SerialExecutor, ThreadExecutor, Write, on
from fluxcb.callbacks import Metric, Metrics
from fluxcb.events import BackwardEnd, EpochEnd, HostEvent, StepEnd
from fluxcb.phases import AbstractTrainingPhase, TrainingPhase

FEW, MANY = 1, 51
WINDOW = 100


class NoOp(Callback):
    """Do nothing at StepEnd: the cost of being asked."""

    @on
    def nothing(self, event: StepEnd, phase: TrainingPhase, learner: Any) -> None:
        """Do nothing."""


class LargestBiasGradient(Callback):
    """Note the largest gradient of the last bias, inside the step: what `hand_step_with_scalar` does by hand."""

    def stateaccess(self) -> dict[str, Any]:
        return {"step": {"grads": Read(), "largest": Write()}}

    @on
    def note(self, event: BackwardEnd, phase: AbstractTrainingPhase, learner: Any) -> None:
        learner.step.largest = jnp.max(jnp.abs(learner.step.grads["b2"]))


class Ping(HostEvent):
    """An event of this benchmark's own, which happens between steps."""


class Pinged(Callback):
    """Do nothing at Ping."""

    @on
    def nothing(self, event: Ping, phase: TrainingPhase, learner: Any) -> None:
        """Do nothing."""


class Waits(Callback):
    """Wait 10 ms at the end of an epoch, as a handler that writes to a network does."""

    @on
    def wait(self, event: EpochEnd, phase: TrainingPhase, learner: Any) -> None:
        """Sleep."""
        time.sleep(0.01)


def measure(rounds: int) -> list[Table]:
    """Return the tables of handlers in a training, of dispatch without one, and of threads."""
    return [_in_training(rounds), _alone(rounds), _threads(rounds)]


def _threads(rounds: int) -> Table:
    epochs, handlers = 20, 8
    learners = {
        name: Learner.from_loss(
            {"w": jnp.ones(())},
            lambda params, batch: jnp.mean((params["w"] - batch) ** 2),
            optax.sgd(0.1),
            data=[np.zeros(4, np.float32)],
            callbacks=[Waits() for _ in range(handlers)],
            default_callbacks=False,
            executor=executor,
        )
        for name, executor in (("serial", SerialExecutor()), ("threads", ThreadExecutor()))
    }
    for learner in learners.values():
        learner.fit(1)  # compiles
    ratios, seconds = [], []
    for _ in range(rounds):
        took = {}
        for name, learner in learners.items():
            began = time.perf_counter()
            learner.fit(epochs)
            took[name] = (time.perf_counter() - began) / epochs
        ratios.append(took["threads"] / took["serial"])
        seconds.append(took["threads"])
    return Table(
        f"{handlers} independent handlers of 10 ms each, in the default number of threads",
        {
            "`ThreadExecutor()`": {
                "ms per epoch": Figure.of([1e3 * each for each in seconds]),
                "ratio to `SerialExecutor()`": Figure.of(ratios, 3),
            }
        },
    )


def _in_training(rounds: int) -> Table:
    def host(count: int, steps_per_call: int) -> Variant:
        return mlp.by_fluxcb([NoOp() for _ in range(count)], steps_per_call=steps_per_call)

    def traced(steps_per_call: int) -> Variant:
        largest = Metric(lambda largest: largest, name="largest", needs=("largest",))
        return mlp.by_fluxcb([LargestBiasGradient(), Metrics(largest)], steps_per_call=steps_per_call)

    pairs: dict[str, tuple[Variant, Variant, int]] = {}  # without, with, how many handlers more
    for length in (1, WINDOW):
        calls = f"steps_per_call={length}"
        pairs[f"host handler that does nothing, {calls}"] = host(FEW, length), host(MANY, length), MANY - FEW
        without = mlp.by_fluxcb([Metrics()], steps_per_call=length)
        pairs[f"traced handler, a scalar to the history, {calls}"] = without, traced(length), 1
    pairs["the same line by hand, each step"] = (
        mlp.by_hand(reads="each epoch"),
        mlp.by_hand(reads="each epoch", step=mlp.hand_step_with_scalar),
        1,
    )
    pairs[f"the same line by hand, lax.scan of {WINDOW}"] = (
        mlp.by_hand_in_windows(WINDOW, keeps=True),
        mlp.by_hand_in_windows(WINDOW, keeps=True, step=mlp.hand_step_with_scalar),
        1,
    )
    variants = {
        f"{name}: {side}": variant
        for name, pair in pairs.items()
        for side, variant in zip(("without", "with"), pair[:2], strict=True)
    }
    times = in_turns(variants, rounds)
    table = Table("One more handler, each step")
    for name, (_, _, more) in pairs.items():
        without, with_it = times[f"{name}: without"], times[f"{name}: with"]
        table.rows[name] = {
            "adds, us/step": _slope(without, with_it, more, lambda t: t.wall),
            "adds to the Python thread, us/step": _slope(without, with_it, more, lambda t: t.thread),
            "before, us/step": Figure.of(without.wall, 1),
        }
    table.notes.append(f"Host handlers: the slope from {FEW} to {MANY} of them at `StepEnd`.")
    table.notes.append(
        "Traced handler: it computes the largest gradient of a bias, and `Metrics` keeps this value for each step. It "
        "is compared with `Metrics` alone. By hand, the step returns the value and the loss, and both are fetched at "
        "the end of the epoch."
    )
    return table


def _slope(without: Times, with_it: Times, more: int, of: Callable[[Times], list[float]]) -> Figure:
    return Figure.of([(b - a) / more for a, b in zip(of(without), of(with_it), strict=True)], 3)


def _alone(rounds: int) -> Table:
    """Time `learner.emit` and, as its floor, a loop over bound methods."""
    learners = {count: mlp.learner_for([Pinged() for _ in range(count)]) for count in (FEW, MANY)}
    loops = {count: [Pinged().nothing for _ in range(count)] for count in (FEW, MANY)}
    event, phase = Ping(), learners[FEW].phases[0]

    def emit(count: int) -> Callable[[], None]:
        learner = learners[count]
        return lambda: learner.emit(event, phase)

    def loop(count: int) -> Callable[[], None]:
        handlers: Any = loops[count]

        def call() -> None:
            for handler in handlers:
                handler(event, phase, None)

        return call

    calls = 20_000
    ways = {"learner.emit": emit, "a loop over bound methods": loop}
    functions = {(name, count): make(count) for name, make in ways.items() for count in (FEW, MANY)}
    taken: dict[Any, list[float]] = {key: [] for key in functions}
    for function in functions.values():
        function()
    for _ in range(max(rounds, 3)):
        for key, function in functions.items():
            taken[key].append(timeit.timeit(function, number=calls // key[1]) / (calls // key[1]) * 1e9)
    table = Table("Dispatch alone, on the host")
    for name in ways:
        few, many = taken[name, FEW], taken[name, MANY]
        table.rows[name] = {
            "event to 1 handler, ns": Figure.of(few, 0),
            "each further handler, ns": Figure.of([(b - a) / (MANY - FEW) for a, b in zip(few, many, strict=True)], 0),
        }
    floor = statistics.median(taken["a loop over bound methods", MANY])
    ratio = statistics.median(taken["learner.emit", MANY]) / floor
    table.notes.append(f"An event with {MANY} handlers takes {ratio:.2f} times as long as the loop.")
    return table
