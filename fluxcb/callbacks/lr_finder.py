"""`find_learning_rate`: a trial run with a growing learning rate."""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fluxcb._declare.access import Read, Write
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import Event, ForwardBegin
from fluxcb._declare.handlers import on
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._declare.resolution import InOrder
from fluxcb._declare.schedules import Predicate, positive
from fluxcb._declare.wrappers import OnSchedule
from fluxcb._errors import DataError, DeclarationError
from fluxcb.callbacks.arguments import number_above, number_between
from fluxcb.plots.curves import plot_curves

__all__ = ["LRFinderPhase", "LRFinderResult", "find_learning_rate"]


class LRFinderPhase(AbstractTrainingPhase):
    """The phase of the trial steps, mixed into the Learner's own training phase.

    Traced handlers for training are part of its steps. A callback that wants to behave otherwise in a trial has a
    handler for this phase.

    Source:
        FluxTraining.jl's phases; FastAI.jl, `lrfind`.
    """


@dataclass(frozen=True)
class LRFinderResult:
    """What a trial run showed.

    Attributes:
        rates: The learning rate of each step.
        losses: Its loss, computed before its update.
        beta: Weight of the past in the average of the losses.
        smoothed: The averaged losses: `a[i] / (1 - beta**(i + 1))`, where
            `a[i] = beta * a[i - 1] + (1 - beta) * losses[i]`, from 0.
        lowest: Index of the lowest of them, the first third left out: there the average is that of a few batches.
        suggestion: A tenth of the rate with the lowest averaged loss. None if it never falls: then begin with a lower
            rate.
        steepest: The rate at which the averaged loss falls the fastest over the logarithm of the rate, from the first
            third up to the lowest: the `rates[i]` with the least
            `(smoothed[i + 1] - smoothed[i]) / log(rates[i + 1] / rates[i])`. Where batches differ much, this follows
            their noise. None if the loss never falls.

    Example:
        >>> LRFinderResult((0.01, 0.1, 1.0, 10.0), (4.0, 4.0, 1.0, 9.0), beta=0.0)
        LRFinderResult(beta=0.0, suggestion=0.1, steepest=0.1)

    Source:
        Smith (2015), Cyclical learning rates for training neural networks, arXiv:1506.01186, section 3.3; the two rules
        are fastai's, `minimum` and `steep` in `fastai/callback/schedule.py`; FastAI.jl leaves out the first third.
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
        found = {"smoothed": smoothed, "lowest": lowest, "suggestion": suggestion, "steepest": steepest}
        for name, value in found.items():
            object.__setattr__(self, name, value)

    def _slope(self, smoothed: Sequence[float]) -> Callable[[int], float]:
        return lambda i: (smoothed[i + 1] - smoothed[i]) / math.log(self.rates[i + 1] / self.rates[i])

    def plot(self, ax: Any = None) -> Any:
        """Draw the averaged losses over the rates, with the suggestion.

        Args:
            ax: The matplotlib axes to draw into, or the rich console to print to. The default is a new matplotlib
                figure. If matplotlib is not installed, it is an SVG image in a notebook, and a chart in a terminal.

        Returns:
            The matplotlib axes. Without matplotlib, an object that a notebook displays as an SVG image, or None in a
            terminal; see `fluxcb.plots.plot_curves`.

        Raises:
            DataError: There is no loss: the first one was not finite.
        """
        return plot_curves(
            {"loss (averaged)": list(zip(self.rates, self.smoothed, strict=True))},
            x_label="learning rate",
            y_label="loss (averaged)",
            log_x=True,
            marks={} if self.suggestion is None else {f"suggestion: {self.suggestion:.2g}": self.suggestion},
            ax=ax,
        )


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
    """Train a few steps with a growing learning rate, say which rate to take, and put everything back.

    Step `i` of `n` uses `low * (high / low)**(i / (n - 1))`, whatever else would set the rate. It ends early when the
    averaged loss is not finite, or above its lowest value by more than `stop_factor - 1` times that value's size.

    The steps are those of the Learner's training phase, with its traced handlers (clipping, mixup, averages); host
    handlers do not run, so nothing is printed, logged or saved. Afterwards `learner.state` and `learner.cbstate` are
    what they were, bit for bit, and training goes on as if there had been no trial. The batches are read by a pass
    of their own: a source that counts its passes, and is not told the epoch by `set_epoch`, counts this one.

    Args:
        learner: The Learner; its optimizer has the hyperparameter `learning_rate`.
        low: The first rate.
        high: The last rate.
        steps: How many steps to train at most (steps).
        beta: Weight of the past in the average of the losses, at least 0 and below 1.
        stop_factor: When the loss counts as diverged, above 1; see above.
        data: Batches; those of the Learner's training data if not given, over and over if they are few.

    Returns:
        The rates, the losses, and the suggestion.

    Raises:
        DeclarationError: An argument is out of its range; the Learner is fitting, or none of its phases trains and
            emits ForwardBegin.
        DataError: There are no batches, or only those of a one-shot iterator, which training would miss.
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
    number_above(0, low, "`low` of `find_learning_rate`")
    number_above(low, high, "`high` of `find_learning_rate`")
    if positive(steps, "`steps` of `find_learning_rate`") < 2:
        raise DeclarationError("`steps` of `find_learning_rate` must be at least 2, not 1.", fix="e.g. `steps=100`")
    number_between(0, 1, beta, "`beta` of `find_learning_rate`")
    number_above(1, stop_factor, "`stop_factor` of `find_learning_rate`")
    phase = next((phase for phase in learner.phases if type(phase).trains), None)
    if phase is None or ForwardBegin not in type(phase).provides:
        raise DeclarationError(
            "`find_learning_rate` needs a training phase that emits ForwardBegin.",
            why="that is where the rate of a step is set",
            fix="emit it in the phase's `step`, and name it in `provides`",
        )
    rates = _rates(low, high, steps)
    before, items = learner.state, learner.callbacks._items  # with its groups, which iterating would lose
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
    """Set the rate of each trial step."""

    def __init__(self, rates: list[float], first_step: Any, phase: str) -> None:
        self.rates, self.first_step, self.phase = rates, int(first_step), phase
        self.source: Callable[[], Any] = lambda: None  # a function: the engine looks for arrays in what fields hold

    def stateaccess(self) -> Mapping[str, Any]:
        return {"hyperparams": {"learning_rate": Write()}, "data": {self.phase: Read()}}

    def runafter(self) -> tuple[type[Callback], ...]:
        return (Callback,)  # of all who set it, this one is last

    def init(self, learner: Any) -> None:
        source = learner.data[self.phase]
        self.source = lambda: source

    @on(ForwardBegin, LRFinderPhase, access={"hyperparams": {"learning_rate": Write()}})
    def set_rate(self, event: Event, phase: Phase, learner: Any) -> None:
        import jax.numpy as jnp

        rates = jnp.array(self.rates, jnp.float32)
        learner.hyperparams.learning_rate = rates[learner.progress.step - self.first_step]


def _silenced(item: Any) -> Any:
    """Return callbacks whose host handlers are never due."""
    if isinstance(item, InOrder):
        return InOrder(tuple(map(_silenced, item)))
    return OnSchedule(item, Predicate(lambda learner: False))


@functools.cache
def _trial_class(phase: type[Phase]) -> type[Phase]:
    bases: tuple[type[Phase], ...] = (phase, LRFinderPhase)
    return types.new_class("LRFinderPhase", bases, exec_body=lambda names: names.update(__module__=__name__))


def _trial(phase: Phase) -> Phase:
    """Return the training phase, as one of the trial."""
    cls = _trial_class(type(phase))
    trial = cls.__new__(cls)
    vars(trial).update(vars(phase))
    return trial


def _batches(source: Any, steps: int) -> Iterator[Any]:
    """Yield batches of a source, over and over."""
    if source is None:
        raise DataError("`find_learning_rate` has no batches.", fix="give it `data=batches`, or the Learner `data=`")
    if not hasattr(source, "__iter__"):
        raise DataError(
            f"`data` of `find_learning_rate` is {type(source).__name__}, which cannot be iterated.",
            fix="give a list of batches",
        )
    count = 0
    while count < steps:
        passes = iter(source)
        if passes is source:
            raise DataError(
                f"`find_learning_rate` would use up a one-shot iterator ({type(source).__name__}).",
                why="the batches it takes would be missing in the training",
                fix="give it batches of its own: `find_learning_rate(learner, data=list_of_batches)`",
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
    """Train, and yield the losses until they diverge."""
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
    """Yield the average of the losses up to each, without the weight of the start at 0."""
    average = 0.0
    for n, loss in enumerate(losses, 1):
        average = beta * average + (1 - beta) * loss
        yield average / (1 - beta**n)


def _rates(low: Any, high: Any, steps: int) -> list[float]:
    """Return the rates, as float32 has them."""
    import numpy as np

    rates = low * (high / low) ** (np.arange(steps) / (steps - 1))
    return rates.astype(np.float32).tolist()
