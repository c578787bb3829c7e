"""`MovingAverage` and `SimpleMovingAverage`: averages over steps, computed inside the compiled step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fluxcb._declare.events import Event, StepEnd, Trigger
from fluxcb._declare.handlers import Handler, on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._declare.schedules import EverySteps, positive
from fluxcb.callbacks.arguments import finite_number
from fluxcb.callbacks.logging.step_scalars import StepScalars

__all__ = ["MovingAverage", "SimpleMovingAverage"]


class MovingAverage(StepScalars):
    """Compute exponential moving averages of numbers of the step, and log them at Trigger.

    After `n` values, `average = sum(decay**(n - i) * x[i]) / sum(decay**(n - i))`, so the first average is equal to the
    first value. Values that are NaN or infinite are ignored. The averages are logged under names such as
    `step/loss/EMA`. `cbstate.moving_average["step/loss"]` contains the average and its weight, which approaches 1.

    `every(MovingAverage(...), steps=100)` logs every 100 steps. The averages still include all steps.

    Args:
        names: One path or several, such as `step.loss`, `step.aux.kl` or `hyperparams.learning_rate`. Each value must
            be a number.
        decay: Weight of the previous average, at least 0 and below 1.

    Access:
        The paths in `names`: Read.
        cbstate.moving_average.<name>: Write (traced), Read (host). float32[2].
        cbstate.monitors: Append.

    Runs:
        ComputeEnd x AbstractTrainingPhase (traced).
        Trigger x AbstractTrainingPhase (host).

    Cost:
        A few operations inside the step. At Trigger, fetches two numbers per name.

    Raises:
        DeclarationError: A path is invalid, `decay` is outside [0, 1), or a value is not a single number.
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
        tensorpack, `MovingAverageSummary` and `add_moving_summary`. The bias correction is that of Kingma and Ba
        (2015), algorithm 1.
    """

    entry = "moving_average"

    def __init__(self, names: str | Sequence[str], decay: float = 0.95) -> None:
        super().__init__(names)
        self.decay = finite_number(decay, "`decay` of MovingAverage", least=0, below=1)

    def initial(self) -> Any:
        """Return the average of no values, with weight 0."""
        return (0.0, 0.0)

    def updated(self, stored: Any, value: Any, step: Any) -> Any:
        """Return the average that includes the value, and its weight."""
        import jax.numpy as jnp

        average, weight = stored
        finite = jnp.isfinite(value)
        weight = jnp.where(finite, self.decay * weight + (1 - self.decay), weight)
        # The first value is used directly, because the formula would add a rounding error.
        moved = average + (1 - self.decay) / weight * (value - average)
        moved = jnp.where(stored[1] == 0, value, moved)
        return jnp.stack([jnp.where(finite, moved, average), weight])

    @on(Trigger, AbstractTrainingPhase)
    def log(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Log the averages."""
        for name, (average, weight) in self.stored(learner).items():
            if weight > 0:  # at least one value was finite
                learner.cbstate.monitors.put_scalar(f"{name}/EMA", average)


class SimpleMovingAverage(StepScalars):
    """Log means of numbers of the step over consecutive windows of `window` steps.

    At the steps `window`, `2 * window` and so on, `step/loss/SMA` is the mean over the last `window` steps, even if the
    training was interrupted and resumed within them. If the callback was added within a window, the mean of that window
    is not logged. If a value is NaN, the mean is NaN.

    Args:
        names: One path or several, such as `step.loss`, `step.aux.kl` or `hyperparams.learning_rate`. Each value must
            be a number.
        window: Number of steps per mean.

    Access:
        The paths in `names`: Read.
        cbstate.simple_moving_average.<name>: Write (traced), Read (host). float32[2].
        cbstate.monitors: Append.

    Runs:
        ComputeEnd x AbstractTrainingPhase (traced).
        StepEnd x AbstractTrainingPhase (host, every `window` steps).

    Cost:
        A few operations inside the step. Fetches two numbers per name. Does not shorten windows.

    Raises:
        DeclarationError: A path is invalid, `window` is not a positive integer, or a value is not a single number.
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
        tensorpack, `SimpleMovingAverage`, whose first window after a resume is incomplete.
    """

    entry = "simple_moving_average"

    def __init__(self, names: str | Sequence[str], window: int) -> None:
        super().__init__(names)
        self.window = positive(window, "`window` of SimpleMovingAverage (steps)")

    def configured(self, handler: Handler) -> Handler:
        """Return a handler with the access and the schedule of this instance."""
        handler = super().configured(handler)
        return handler if handler.traced else replace(handler, when=EverySteps(self.window))

    def initial(self) -> Any:
        """Return the mean of no values, and their number."""
        return (0.0, 0.0)

    def updated(self, stored: Any, value: Any, step: Any) -> Any:
        """Return the mean that includes the value, and its number of values. Each window begins a new mean."""
        import jax.numpy as jnp

        begins = step % self.window == 0
        mean, count = jnp.where(begins, 0.0, stored[0]), jnp.where(begins, 0.0, stored[1]) + 1
        return jnp.stack([mean + (value - mean) / count, count])

    @on(StepEnd, AbstractTrainingPhase)
    def log(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Log the means."""
        for name, (mean, count) in self.stored(learner).items():
            if count == self.window:  # the callback may have been added within the window
                learner.cbstate.monitors.put_scalar(f"{name}/SMA", mean)

    def __repr__(self) -> str:
        return f"SimpleMovingAverage({', '.join(map(repr, self.names))}, {self.window})"
