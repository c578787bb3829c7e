"""`find_learning_rate`, which trains a few steps with an increasing learning rate."""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fluxcb._calls import Constructed, entry_point
from fluxcb._declare.access import Read, Write
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import Event, ForwardBegin
from fluxcb._declare.handlers import on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._declare.resolution import InOrder
from fluxcb._declare.schedules import Predicate
from fluxcb._declare.wrappers import OnSchedule
from fluxcb._errors import DataError, DeclarationError
from fluxcb.callbacks.arguments import finite_number, whole_number
from fluxcb.plots.curves import plot_curves

__all__ = ["LRFinderPhase", "LRFinderResult", "find_learning_rate"]


class LRFinderPhase(AbstractTrainingPhase):
    """The phase of `find_learning_rate`, which is combined with the training phase of the Learner.

    Traced handlers for training also run in this phase. To make a callback behave differently in a trial, add a handler
    for this phase.

    Source:
        FluxTraining.jl's phases; FastAI.jl, `lrfind`.
    """


@dataclass(frozen=True)
class LRFinderResult(Constructed):
    """The result of `find_learning_rate`.

    Attributes:
        rates: The learning rate of each step.
        losses: The loss of each step, computed before the update.
        beta: Weight of the previous average in the moving average of the losses.
        smoothed: The averaged losses: `a[i] / (1 - beta**(i + 1))`, where
            `a[i] = beta * a[i - 1] + (1 - beta) * losses[i]` starts at 0.
        lowest: Index of the lowest averaged loss after the first third. The first third is left out because an average
            over few batches is noisy.
        suggestion: One tenth of the rate with the lowest averaged loss. None if the loss never decreases; try a smaller
            `low` then.
        steepest: The rate at which the averaged loss decreases fastest over the logarithm of the rate: the `rates[i]`
            that minimizes `(smoothed[i + 1] - smoothed[i]) / log(rates[i + 1] / rates[i])`, between the first third
            and `lowest`. If losses vary strongly between batches, this value is mostly noise. None if the loss never
            decreases.

    Example:
        >>> LRFinderResult((0.01, 0.1, 1.0, 10.0), (4.0, 4.0, 1.0, 9.0), beta=0.0)
        LRFinderResult(beta=0.0, suggestion=0.1, steepest=0.1)

    Source:
        Smith (2015), Cyclical learning rates for training neural networks, arXiv:1506.01186, section 3.3. The two rules
        are `minimum` and `steep` of fastai (`fastai/callback/schedule.py`). FastAI.jl also leaves out the first third.
    """

    rates: tuple[float, ...] = field(repr=False)
    losses: tuple[float, ...] = field(repr=False)
    beta: float
    smoothed: tuple[float, ...] = field(init=False, repr=False)
    lowest: int = field(init=False, repr=False)
    suggestion: float | None = field(init=False)
    steepest: float | None = field(init=False)

    def __post_init__(self) -> None:
        smoothed = tuple(_averages(self.losses, self.beta))
        first = len(smoothed) // 3
        lowest = min(range(first, len(smoothed)), key=smoothed.__getitem__, default=first)
        suggestion = steepest = None
        if lowest > first:
            steepest = self.rates[min(range(first, lowest), key=self._slope(smoothed))]
            suggestion = self.rates[lowest] / 10
        derived = {"smoothed": smoothed, "lowest": lowest, "suggestion": suggestion, "steepest": steepest}
        for name, value in derived.items():
            object.__setattr__(self, name, value)  # the dataclass is frozen

    def _slope(self, smoothed: Sequence[float]) -> Callable[[int], float]:
        return lambda i: (smoothed[i + 1] - smoothed[i]) / math.log(self.rates[i + 1] / self.rates[i])

    def plot(self, ax: Any = None) -> Any:
        """Plot the averaged losses against the learning rates, and mark the suggestion.

        Args:
            ax: The matplotlib axes to draw into, or the rich console to print to. The default is a new matplotlib
                figure. If matplotlib is not installed, it is an SVG image in a notebook, and a chart in a terminal.

        Returns:
            The matplotlib axes. Without matplotlib, an object that a notebook displays as an SVG image, and that can be
            saved; see `fluxcb.plots.plot_curves`. None if `ax` is a console.

        Raises:
            DataError: There are no losses, because the first one was not finite.
        """
        return plot_curves(
            {"loss (averaged)": list(zip(self.rates, self.smoothed, strict=True))},
            x_label="learning rate",
            y_label="loss (averaged)",
            log_x=True,
            marks={} if self.suggestion is None else {f"suggestion: {self.suggestion:.2g}": self.suggestion},
            ax=ax,
        )


@entry_point
def find_learning_rate(
    learner: Any,
    low: float = 1e-7,
    high: float = 10.0,
    steps: int = 100,
    beta: float = 0.98,
    stop_factor: float = 4.0,
    *,
    data: Iterable[Any] | None = None,
) -> LRFinderResult:
    """Train a few steps with an increasing learning rate, suggest a learning rate, and restore the Learner.

    Step `i` of `n` uses the rate `low * (high / low)**(i / (n - 1))`, which overrides any scheduler. The trial ends
    early if the loss is not finite, or if the averaged loss exceeds its lowest value `m` by more than
    `(stop_factor - 1) * abs(m)`.

    The steps are those of the Learner's training phase, including its traced handlers (clipping, mixup, averages).
    Host handlers do not run, so nothing is printed, logged or saved. Afterward, `learner.state` and `learner.cbstate`
    are restored, bit for bit, and training continues as if there had been no trial. The trial iterates over the data
    separately. A data source that counts its iterations, and has no `set_epoch`, counts those of the trial as well.

    Args:
        learner: The Learner. Its optimizer must have the hyperparameter `learning_rate`.
        low: The rate of the first step.
        high: The rate of the last step.
        steps: Maximum number of steps (steps).
        beta: Weight of the previous average in the moving average of the losses, at least 0 and below 1.
        stop_factor: Threshold at which the loss has diverged, above 1; see above.
        data: The batches; by default, the training data of the Learner. They are repeated if there are fewer than
            `steps`.

    Returns:
        The rates, the losses, and the suggestion.

    Raises:
        DeclarationError: An argument is out of range, the Learner is fitting, or it has no training phase that emits
            ForwardBegin.
        DataError: There are no batches, or `data` is a one-shot iterator, which the trial would use up.
        MissingStateError: The optimizer was not built with `fluxcb.inject(..., learning_rate=...)`.

    Example:
        >>> from fluxcb.callbacks import find_learning_rate
        >>> from fluxcb.testing import testlearner
        >>> learner = testlearner()
        >>> result = find_learning_rate(learner, low=1e-4)
        >>> 1e-3 < result.suggestion < 1.0
        True
        >>> learner.step, float(learner.params["w"])
        (0, 0.0)

    Source:
        Smith (2015), arXiv:1506.01186, section 3.3; fastai, `lr_find`; FastAI.jl, `lrfind`.
    """
    if not hasattr(learner, "phases"):
        raise DeclarationError(
            f"`find_learning_rate` takes a Learner, not {learner!r}.", fix="write `find_learning_rate(learner)`"
        )
    finite_number(low, "`low` of `find_learning_rate`", above=0)
    finite_number(high, "`high` of `find_learning_rate`", above=low)
    whole_number(steps, "`steps` of `find_learning_rate`", 2)
    finite_number(beta, "`beta` of `find_learning_rate`", least=0, below=1)
    finite_number(stop_factor, "`stop_factor` of `find_learning_rate`", above=1)
    phase = next((phase for phase in learner.phases if type(phase).trains), None)
    if phase is None or ForwardBegin not in type(phase).provides:
        raise DeclarationError(
            "`find_learning_rate` needs a training phase that emits ForwardBegin.",
            why="the learning rate of each step is set at this event",
            fix="emit it in the phase's `step`, and add it to `provides`",
        )
    rates = _rates(low, high, steps)
    before, items = learner.state, learner.callbacks._items  # iterating over `callbacks` would lose `in_order` groups
    sweep = _Sweep(rates, before["counters"][0], type(phase).name)
    learner.callbacks.set([*map(_silenced, items), sweep])
    try:
        source = sweep.source() if data is None else data
        losses = list(_losses(learner, _trial(phase), _batches(source, steps), beta, stop_factor))
    finally:
        learner.state = before
        learner.callbacks.set(items)
    return LRFinderResult(tuple(rates[: len(losses)]), tuple(losses), beta)


class _Sweep(Callback):
    """Set the learning rate of each trial step."""

    def __init__(self, rates: list[float], first_step: Any, phase: str) -> None:
        self.rates, self.first_step, self.phase = rates, int(first_step), phase
        # The source is stored in a function, because the engine searches the attributes of callbacks for arrays.
        self.source: Callable[[], Any] = lambda: None

    def stateaccess(self) -> Mapping[str, Any]:
        return {"hyperparams": {"learning_rate": Write()}, "data": {self.phase: Read()}}

    def runafter(self) -> tuple[type[Callback], ...]:
        return (Callback,)  # runs after every other callback that sets the learning rate

    def init(self, learner: LearnerView) -> None:
        source = learner.data[self.phase]
        self.source = lambda: source

    @on(ForwardBegin, LRFinderPhase, access={"hyperparams": {"learning_rate": Write()}})
    def set_rate(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        import jax.numpy as jnp

        rates = jnp.array(self.rates, jnp.float32)
        learner.hyperparams.learning_rate = rates[learner.progress.step - self.first_step]


def _silenced(item: Any) -> Any:
    """Return a callback, or an `in_order` group, whose host handlers are never due."""
    if isinstance(item, InOrder):
        return InOrder(tuple(map(_silenced, item)))
    return OnSchedule(item, Predicate(lambda learner: False))


@functools.cache
def _trial_class(phase: type[Phase]) -> type[Phase]:
    bases: tuple[type[Phase], ...] = (phase, LRFinderPhase)
    return types.new_class("LRFinderPhase", bases, exec_body=lambda names: names.update(__module__=__name__))


def _trial(phase: Phase) -> Phase:
    """Return a copy of the training phase that is also an `LRFinderPhase`."""
    cls = _trial_class(type(phase))
    trial = cls.__new__(cls)  # not `cls()`, because the phase may require constructor arguments
    vars(trial).update(vars(phase))
    return trial


def _batches(source: Any, steps: int) -> Iterator[Any]:
    """Yield `steps` batches of a source, which is iterated again if it has fewer."""
    if source is None:
        raise DataError("`find_learning_rate` has no batches.", fix="pass `data=batches` to it or to the Learner")
    if not hasattr(source, "__iter__"):
        raise DataError(
            f"`data` of `find_learning_rate` is {type(source).__name__}, which cannot be iterated.",
            fix="pass a list of batches",
        )
    count = 0
    while count < steps:
        passes = iter(source)
        if passes is source:  # the definition of an iterator: `iter` returns the object itself
            raise DataError(
                f"`find_learning_rate` would use up a one-shot iterator ({type(source).__name__}).",
                why="training would not see the batches that the trial uses",
                fix="pass separate batches: `find_learning_rate(learner, data=list_of_batches)`",
            )
        before = count
        for batch in passes:
            yield batch
            count += 1
            if count == steps:
                return
        if count == before:
            raise DataError("The data of `find_learning_rate` yields no batches.", fix="check its length and filters")


def _losses(learner: Any, phase: Phase, batches: Iterator[Any], beta: float, stop_factor: float) -> Iterator[float]:
    """Run the trial steps, and yield their losses until the averaged loss diverges."""
    average, lowest = 0.0, math.inf
    for n, batch in enumerate(batches, 1):
        loss = float(learner.run_step(phase, batch)["loss"])
        if not math.isfinite(loss):
            return
        yield loss
        average = beta * average + (1 - beta) * loss
        unbiased = average / (1 - beta**n)
        lowest = min(lowest, unbiased)
        if unbiased - lowest > (stop_factor - 1) * abs(lowest):
            return


def _averages(losses: Iterable[float], beta: float) -> Iterator[float]:
    """Yield the exponential moving average after each loss, corrected for its start at 0."""
    average = 0.0
    for n, loss in enumerate(losses, 1):
        average = beta * average + (1 - beta) * loss
        yield average / (1 - beta**n)


def _rates(low: Any, high: Any, steps: int) -> list[float]:
    """Return the learning rates, rounded to float32, so that the result has the rates that were used."""
    import numpy as np

    rates = low * (high / low) ** (np.arange(steps) / (steps - 1))
    return rates.astype(np.float32).tolist()
