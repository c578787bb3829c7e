"""`MovingAverage` and `SimpleMovingAverage`: numbers of the step, averaged over steps inside the compiled step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fluxcb._declare.dispatch import Entry
from fluxcb._declare.events import Event, StepEnd, Trigger
from fluxcb._declare.handlers import on
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._declare.schedules import EverySteps, positive
from fluxcb.callbacks.arguments import number_between
from fluxcb.callbacks.step_scalars import StepScalars

__all__ = ["MovingAverage", "SimpleMovingAverage"]


class MovingAverage(StepScalars):
    """Keep exponential moving averages of numbers of the step, and log them at Trigger.

    After `n` values, `average = sum(decay**(n - i) * x[i]) / sum(decay**(n - i))`, so that the first average is the
    first value. A value that is NaN or infinite is passed over. They are logged as `step/loss/EMA`, and kept in
    `cbstate.moving_average["step/loss"]`: the average, and its weight, which goes to 1.

    `every(MovingAverage(...), steps=100)` logs every 100 steps; the averages are of all steps anyway.

    Args:
        names: Path or paths of numbers: `step.loss`, `step.aux.kl`, `hyperparams.learning_rate`.
        decay: Weight of the past, at least 0 and below 1.

    Access:
        What the names say: Read.
        cbstate.moving_average.<name>: Write (traced), Read (host). float32[2].
        cbstate.monitors: Append.

    Runs:
        ComputeEnd x AbstractTrainingPhase (traced).
        Trigger x AbstractTrainingPhase (host).

    Cost:
        A few operations inside the step; two numbers per name leave the device at Trigger.

    Raises:
        DeclarationError: A name is no path, or `decay` is outside [0, 1); a value is not one number.
        MissingStateError: There is no `Monitors` (when the Learner is built).

    Example:
        >>> import jax.numpy as jnp, optax, fluxcb
        >>> from fluxcb.callbacks import Monitors, MovingAverage
        >>> learner = fluxcb.Learner.from_loss(
        ...     {"w": jnp.zeros(())},
        ...     lambda params, batch, key: batch + 0 * params["w"],
        ...     optax.sgd(0.1),
        ...     data=[jnp.float32(loss) for loss in (9, 8, 7, 6)],
        ...     callbacks=[MovingAverage("step.loss"), Monitors()],
        ...     default_callbacks=False,
        ... )
        >>> history = learner.fit(1)
        >>> f"{learner.cbstate['monitors'].latest('step/loss/EMA'):.4f}"
        '7.4359'

    Source:
        tensorpack, `MovingAverageSummary` and `add_moving_summary`; the correction for the start is that of Kingma and
        Ba (2015), algorithm 1.
    """

    entry = "moving_average"

    def __init__(self, names: str | Sequence[str], decay: float = 0.95) -> None:
        super().__init__(names)
        self.decay = number_between(0, 1, decay, "`decay` of MovingAverage")

    def fresh(self) -> Any:
        """Return an average of nothing, and its weight."""
        return (0.0, 0.0)

    def updated(self, kept: Any, value: Any, step: Any) -> Any:
        """Move the average to the value, as far as their weights say."""
        import jax.numpy as jnp

        average, weight = kept
        counts = jnp.isfinite(value)
        weight = jnp.where(counts, self.decay * weight + (1 - self.decay), weight)
        # The first value is taken as it is: computed, it would be off by a rounding error.
        moved = average + (1 - self.decay) / weight * (value - average)
        moved = jnp.where(kept[1] == 0, value, moved)
        return jnp.stack([jnp.where(counts, moved, average), weight])

    @on(Trigger, AbstractTrainingPhase)
    def log(self, event: Event, phase: Phase, learner: Any) -> None:
        """Log the averages."""
        for name, (average, weight) in self.kept(learner).items():
            if weight > 0:
                learner.cbstate.monitors.put_scalar(f"{name}/EMA", average)


class SimpleMovingAverage(StepScalars):
    """Log the means of numbers over every `window` steps.

    At the steps `window`, `2 * window` and so on, `step/loss/SMA` is the mean over the last `window` steps, also if
    the training was interrupted and resumed among them. A mean over fewer, because this callback joined later, is not
    logged. A NaN among the values makes the mean NaN.

    Args:
        names: Path or paths of numbers: `step.loss`, `step.aux.kl`, `hyperparams.learning_rate`.
        window: How many steps are averaged (steps).

    Access:
        What the names say: Read.
        cbstate.simple_moving_average.<name>: Write (traced), Read (host). float32[2].
        cbstate.monitors: Append.

    Runs:
        ComputeEnd x AbstractTrainingPhase (traced).
        StepEnd x AbstractTrainingPhase (host, every `window` steps).

    Cost:
        A few operations inside the step. Fetches two numbers per name, and bounds no window.

    Raises:
        DeclarationError: A name is no path, or `window` no whole number above 0; a value is not one number.
        MissingStateError: There is no `Monitors` (when the Learner is built).

    Example:
        >>> import jax.numpy as jnp, optax, fluxcb
        >>> from fluxcb.callbacks import Monitors, SimpleMovingAverage
        >>> learner = fluxcb.Learner.from_loss(
        ...     {"w": jnp.zeros(())},
        ...     lambda params, batch, key: batch + 0 * params["w"],
        ...     optax.sgd(0.1),
        ...     data=[jnp.float32(loss) for loss in range(8)],
        ...     callbacks=[SimpleMovingAverage("step.loss", 3), Monitors()],
        ...     default_callbacks=False,
        ... )
        >>> history = learner.fit(1)
        >>> learner.cbstate["monitors"].history("step/loss/SMA")
        [(3, 1.0), (6, 4.0)]

    Source:
        tensorpack, `SimpleMovingAverage`, whose first window after a resume is short.
    """

    entry = "simple_moving_average"

    def __init__(self, names: str | Sequence[str], window: int) -> None:
        super().__init__(names)
        self.window = positive(window, "`window` of SimpleMovingAverage (steps)")

    def own(self, entry: Entry) -> Entry:
        """Return a handler with this instance's access and schedule."""
        entry = super().own(entry)
        return entry if entry.traced else replace(entry, when=EverySteps(self.window))

    def fresh(self) -> Any:
        """Return a mean of nothing, and how many values it is of."""
        return (0.0, 0.0)

    def updated(self, kept: Any, value: Any, step: Any) -> Any:
        """Take the value into the mean, or begin a new one."""
        import jax.numpy as jnp

        begins = step % self.window == 0
        mean, count = jnp.where(begins, 0.0, kept[0]), jnp.where(begins, 0.0, kept[1]) + 1
        return jnp.stack([mean + (value - mean) / count, count])

    @on(StepEnd, AbstractTrainingPhase)
    def log(self, event: Event, phase: Phase, learner: Any) -> None:
        """Log the means."""
        for name, (mean, count) in self.kept(learner).items():
            if count == self.window:
                learner.cbstate.monitors.put_scalar(f"{name}/SMA", mean)

    def __repr__(self) -> str:
        return f"SimpleMovingAverage({', '.join(map(repr, self.names))}, {self.window})"
