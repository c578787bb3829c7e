"""Schedules, which determine when a handler is due.

Step schedules use step numbers instead of counting calls. Step 1 is the first step of the training, so `EverySteps(10)`
is due at steps 10, 20, ... even if steps are fused or the run is resumed.

A StepBegin handler can cancel its step, which then does not get a step number. Periods (`periodic`) at
StepBegin therefore count the steps that have begun. Otherwise, a handler that cancels step 10 would be due again at the
next batch, which would also be step 10, and it would cancel all following steps.
"""

from __future__ import annotations

import inspect
import math
import operator
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from fluxcb._calls import Constructed
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.signatures import accepts, runs_later, source_of
from fluxcb._errors import DeclarationError

if TYPE_CHECKING:
    from fluxcb._declare.events import Event
    from fluxcb._declare.phases import Phase

__all__ = [
    "Always",
    "AtWindowEnds",
    "EveryEpochs",
    "EverySeconds",
    "EverySteps",
    "Periodic",
    "Predicate",
    "Schedule",
    "StepRange",
    "StepsOrEpochs",
    "Switched",
    "positive",
]


def positive(value: Any, what: str) -> int:
    """Return `value` if it is an integer of at least 1, or raise a DeclarationError."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or operator.index(value) < 1:
        raise DeclarationError(
            f"{what} must be a whole number of at least 1, not {value!r}.",
            why="periods and counts are whole numbers of steps or epochs",
            fix="pass a positive int",
        )
    return operator.index(value)


def _period(number: float, unit: str) -> str:
    return f"every {unit}" if number == 1 else f"every {number} {unit}s"


@dataclass(frozen=True)
class Schedule(Constructed):
    """Base class of schedules, which determine when a handler is due.

    Define `__str__` in a subclass to describe the schedule in words in lists of callbacks. The default is the repr.

    Attributes:
        periodic: Whether the schedule counts steps. At StepBegin, it then counts the steps that have begun.
    """

    periodic: ClassVar[bool] = False

    def due(self, step: int, epoch: int, learner: LearnerView) -> bool:
        """Return whether the schedule is due.

        Args:
            step: Number of the current step (1-based, counted over the whole training).
            epoch: Number of the current epoch (1-based).
            learner: The callback's own protected view, for predicates.
        """
        raise TypeError(f"{type(self).__name__} does not define when it is due")

    def next_due(self, step: int, epoch: int) -> int | None:
        """Return the first step after `step` at which the schedule may be due, or None if there is none in this epoch.

        A window ends at this step if the handler requires it. By default, every step may be due.
        """
        del epoch
        return step + 1

    def for_moment(self, event: type[Event], phase: type[Phase]) -> Schedule | None:
        """Return the schedule of a handler at one moment, or None if the schedule does not apply at that moment."""
        del event, phase
        return self

    def for_handler(self) -> Schedule:
        """Return the schedule for one handler. A shared clock would be due only for the first handler that polls it."""
        return self

    def after_epoch(self) -> Schedule | None:
        """Return the schedule of the Trigger after an epoch, or None if Triggers are emitted only within epochs."""
        return self


@dataclass(frozen=True)
class Always(Schedule):
    """Due at every step and every epoch."""

    def __str__(self) -> str:
        return "always"

    def due(self, step: int, epoch: int, learner: LearnerView) -> bool:
        """Return True."""
        return True

    def next_due(self, step: int, epoch: int) -> int:
        """Return the next step."""
        return step + 1


@dataclass(frozen=True)
class AtWindowEnds(Schedule):
    """Due at the last step of each window, which includes the last step of an epoch and a stopped step.

    Use this schedule for handlers that do not need the other steps of a window. It does not shorten windows.
    """

    def __str__(self) -> str:
        return "at the ends of windows"

    def due(self, step: int, epoch: int, learner: LearnerView) -> bool:
        """Return True. This schedule is only polled at the end of a window, and no window ends because of it."""
        return True


@dataclass(frozen=True)
class StepRange(Schedule):
    """Due at the steps from `first` to `last`.

    Args:
        first: Number of the first step.
        last: Number of the last step.
    """

    first: int
    last: int

    def due(self, step: int, epoch: int, learner: LearnerView) -> bool:
        """Return whether the step is in the range."""
        return self.first <= step <= self.last

    def next_due(self, step: int, epoch: int) -> int | None:
        """Return the next step in the range."""
        following = max(step + 1, self.first)
        return following if following <= self.last else None


@dataclass(frozen=True)
class Switched(Schedule):
    """For traced handlers of a `switchable` callback: due unless the callback is disabled."""

    def __str__(self) -> str:
        return "while enabled"


@dataclass(frozen=True)
class EverySteps(Schedule):
    """Due at every `steps`-th step of the whole training.

    Args:
        steps: Period (steps).
    """

    steps: int

    periodic: ClassVar[bool] = True

    def __post_init__(self) -> None:
        positive(self.steps, "The period of `EverySteps` (steps)")

    def __str__(self) -> str:
        return _period(self.steps, "step")

    def due(self, step: int, epoch: int, learner: LearnerView) -> bool:
        """Return whether `step` is a multiple of the period."""
        return step % self.steps == 0

    def next_due(self, step: int, epoch: int) -> int:
        """Return the next multiple of the period after `step`."""
        return (step // self.steps + 1) * self.steps

    def after_epoch(self) -> Schedule | None:
        """Return None, because the Triggers of this schedule are emitted at the end of a step."""
        return None


@dataclass(frozen=True)
class StepsOrEpochs(EverySteps):
    """For Trigger: due at every `steps`-th step, and after every `epochs`-th epoch whose last step was not due.

    Args:
        steps: Period (steps).
        epochs: Period (epochs).
    """

    epochs: int

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self.epochs, "The period of `StepsOrEpochs` (epochs)")

    def __str__(self) -> str:
        return f"{_period(self.steps, 'step')} and {_period(self.epochs, 'epoch')}"

    def after_epoch(self) -> Schedule:
        """Return the schedule for epochs."""
        return _EpochsBesideSteps(self.steps, self.epochs)


@dataclass(frozen=True)
class _EpochsBesideSteps(Schedule):
    steps: int
    epochs: int

    def __repr__(self) -> str:
        return f"EveryEpochs(epochs={self.epochs})"

    def __str__(self) -> str:
        return f"{_period(self.epochs, 'epoch')} but not after {_period(self.steps, 'step')}"

    def due(self, step: int, epoch: int, learner: LearnerView) -> bool:
        """Return whether the epoch is due and its last step was not due."""
        return epoch > 0 and epoch % self.epochs == 0 and step % self.steps != 0


@dataclass(frozen=True)
class EveryEpochs(Schedule):
    """Due in every `epochs`-th epoch.

    Args:
        epochs: Period (epochs).
    """

    epochs: int

    def __post_init__(self) -> None:
        positive(self.epochs, "The period of `EveryEpochs` (epochs)")

    def __str__(self) -> str:
        return _period(self.epochs, "epoch")

    def due(self, step: int, epoch: int, learner: LearnerView) -> bool:
        """Return whether `epoch` is a multiple of the period."""
        return epoch > 0 and epoch % self.epochs == 0

    def next_due(self, step: int, epoch: int) -> int | None:
        """Return the next step if the current epoch is due, else None."""
        return step + 1 if epoch > 0 and epoch % self.epochs == 0 else None


@dataclass(frozen=True)
class Periodic(Schedule):
    """Due at every `steps`-th step, in every `epochs`-th epoch and, with a period in epochs, in the fit's last epoch.

    Args:
        steps: Period (steps), or None.
        epochs: Period (epochs), or None.
        remaining: For step handlers, which are due only at the last step of the fit's last epoch: how many steps of
            the epoch are unfinished when the handler runs. None for handlers that are due in the whole last epoch.
    """

    steps: int | None = None
    epochs: int | None = None
    remaining: int | None = field(default=None, compare=False)

    periodic: ClassVar[bool] = True

    def __str__(self) -> str:
        periods = [_period(self.steps, "step")] if self.steps is not None else []
        last = "in the fit's last epoch" if self.remaining is None else "at the fit's last step"
        periods += [_period(self.epochs, "epoch"), last] if self.epochs is not None else []
        return " and ".join(periods) or "never"

    def due(self, step: int, epoch: int, learner: LearnerView) -> bool:
        """Return whether one of the periods is over, or the fit ends (unknown if the fit counts steps)."""
        if self.steps is not None and step % self.steps == 0:
            return True
        if self.epochs is None or epoch == 0:
            return False
        if epoch % self.epochs == 0:
            return True
        progress = learner.progress
        if epoch != progress.epochs:
            return False
        return self.remaining is None or progress.steps_in_epoch - progress.step_in_epoch == self.remaining

    def next_due(self, step: int, epoch: int) -> int | None:
        """Return the next step at which a period may be over. Only a learner knows which epoch is the last one."""
        if self.epochs is not None:
            return step + 1
        return None if self.steps is None else (step // self.steps + 1) * self.steps


@dataclass(frozen=True)
class EverySeconds(Schedule):
    """Due when at least `seconds` have passed since it was last due, or since the start.

    Results that depend on a clock differ between runs. They are exempt from the guarantee that fused and unfused
    training give the same result.

    Args:
        seconds: Period (seconds, > 0).
    """

    seconds: float
    # The only schedule with state: the last time at which it was due, which cannot be computed from a step number.
    _last: list[float] = field(default_factory=list, repr=False, compare=False)

    def __post_init__(self) -> None:
        number = isinstance(self.seconds, int | float) and not isinstance(self.seconds, bool)
        if not number or not 0 < self.seconds < math.inf:
            raise DeclarationError(
                f"The period of `EverySeconds` (seconds) must be a number above 0, not {self.seconds!r}.",
                fix="pass a positive number of seconds",
            )

    def __str__(self) -> str:
        return _period(self.seconds, "second")

    def due(self, step: int, epoch: int, learner: LearnerView) -> bool:
        """Return whether the period has passed, and start the next period if so."""
        now = time.monotonic()
        if not self._last:
            self._last.append(now)
            return False
        if now - self._last[0] < self.seconds:
            return False
        self._last[0] = now
        return True

    def next_due(self, step: int, epoch: int) -> int | None:
        """Return the next step if the period has passed, else None. The first call starts the clock."""
        if not self._last:
            self._last.append(time.monotonic())
        return step + 1 if time.monotonic() - self._last[0] >= self.seconds else None

    def for_handler(self) -> EverySeconds:
        """Return a copy with its own clock."""
        return EverySeconds(self.seconds)

    def after_epoch(self) -> Schedule | None:
        """Return None, because the Triggers of this schedule are emitted at the end of a step."""
        return None


@dataclass(frozen=True)
class Predicate(Schedule):
    """Due when a function of the callback's protected learner returns true.

    Args:
        function: `function(learner) -> bool`. It may read the state that the callback may read.
    """

    function: Callable[[Any], bool]
    # For a pair of handlers: the moment at which the first predicate was called, and its result.
    _results: dict[tuple[int, ...], bool] | None = field(default=None, repr=False, compare=False)
    _ends: bool = field(default=False, repr=False, compare=False)
    _by_step: bool = field(default=True, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise DeclarationError(
                f"`when` takes a function of the learner, not {self.function!r}.",
                fix="write `when(callback, lambda learner: learner.progress.epoch > 3)`",
            )
        later = runs_later(self.function)
        if later or not accepts(self.function, 1):
            raise DeclarationError(
                f"The function of `when` is {later}."
                if later
                else f"The function of `when` must take one argument, the learner; it takes "
                f"{inspect.signature(self.function)}.",
                why="it is called with the learner whenever the callback may be due, and returns true or false",
                fix="write `when(callback, lambda learner: learner.progress.epoch > 3)`",
            )

    def __repr__(self) -> str:
        return f"Predicate({getattr(self.function, '__name__', repr(self.function))})"

    def __str__(self) -> str:
        name = getattr(self.function, "__qualname__", str(self.function))
        return "while a condition holds" if name.endswith("<lambda>") else f"while `{name}` holds"

    def pair(self, results: dict[tuple[int, ...], bool], *, by_step: bool) -> tuple[Predicate, Predicate]:
        """Return the predicates of two handlers of which the first begins something that the second ends.

        The second predicate returns the result of the first, so the second handler runs exactly if the first one did.

        Args:
            results: Stores the result, by moment.
            by_step: Whether the two are handlers of steps instead of epochs.
        """
        return Predicate(self.function, results, False, by_step), Predicate(self.function, results, True, by_step)

    def due(self, step: int, epoch: int, learner: LearnerView) -> bool:
        """Return the result of the function, or the stored result of the first predicate of a pair."""
        if self._results is None:
            return self._answer(learner)
        moment = (epoch, step) if self._by_step else (epoch,)
        if self._ends and moment in self._results:
            return self._results[moment]
        answer = self._answer(learner)
        self._results.clear()
        self._results[moment] = answer
        return answer

    def _answer(self, learner: LearnerView) -> bool:
        answer = self.function(learner)
        if answer is None:
            raise DeclarationError(
                "The function of `when` returned None instead of a bool.",
                where=source_of(self.function) if inspect.isfunction(self.function) else "",
                why="a function without `return` returns None, so the handlers would never run",
                fix="write `return` before the condition",
            )
        try:
            return bool(answer)
        except ValueError as error:
            raise DeclarationError(
                f"The function of `when` must return a bool, not {type(answer).__name__}: {error}",
                fix="reduce it: `when(callback, lambda learner: bool(values.any()))`",
            ) from error

    def next_due(self, step: int, epoch: int) -> int:
        """Return the next step, because the function must be called at every step."""
        return step + 1
