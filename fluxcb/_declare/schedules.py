"""Schedules: when a handler is due, as data that can be asked "when next?".

Step schedules speak of step numbers: step 1 is the first step ever taken, so `EverySteps(10)` is
due at steps 10, 20, ... whatever was fused or resumed. Nothing here counts calls.

A handler of StepBegin may cancel its step, which is then not finished and has no number. Periods (`periodic`) at
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
from typing import Any, ClassVar

from fluxcb._declare.signatures import accepts, runs_later
from fluxcb._errors import DeclarationError

__all__ = [
    "Always",
    "AtWindowEnds",
    "EveryEpochs",
    "EverySeconds",
    "EverySteps",
    "Periodic",
    "Predicate",
    "Schedule",
    "StepsOrEpochs",
    "positive",
]


def positive(value: Any, what: str) -> int:
    """Return `value` if it is a whole number of at least 1, or raise a DeclarationError."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or operator.index(value) < 1:
        raise DeclarationError(
            f"{what} must be a whole number of at least 1, not {value!r}.",
            why="periods and counts are numbers of whole steps or epochs",
            fix="give a positive int",
        )
    return operator.index(value)


def _period(number: float, unit: str) -> str:
    return f"every {unit}" if number == 1 else f"every {number} {unit}s"


@dataclass(frozen=True)
class Schedule:
    """Base class of schedules, which determine when a handler is due.

    `str(schedule)` says it in words, for lists of callbacks; a subclass that has none is shown by its repr.

    Attributes:
        periodic: Whether the schedule counts steps. At StepBegin, it then counts the steps that have begun.
    """

    periodic: ClassVar[bool] = False

    def due(self, step: int, epoch: int, learner: Any) -> bool:
        """Tell whether it is due.

        Args:
            step: Number of the step at hand (1-based, counted over the whole training).
            epoch: Number of the epoch at hand (1-based).
            learner: The callback's own protected view, for predicates.
        """
        raise TypeError(f"{type(self).__name__} does not say when it is due")

    def next_due(self, step: int, epoch: int) -> int | None:
        """Return the first step number after `step` at which it is due, or None if that cannot be known."""
        del step, epoch
        return None

    def for_handler(self) -> Schedule:
        """Return the schedule that one handler asks; a clock shared by several would strike for the first to ask."""
        return self

    def after_epoch(self) -> Schedule | None:
        """Return the schedule of the Trigger that follows an epoch; None if Triggers come inside epochs only."""
        return self


@dataclass(frozen=True)
class Always(Schedule):
    """Due at every step and every epoch."""

    def __str__(self) -> str:
        return "always"

    def due(self, step: int, epoch: int, learner: Any) -> bool:
        """Return True."""
        return True

    def next_due(self, step: int, epoch: int) -> int:
        """Return the next step."""
        return step + 1


@dataclass(frozen=True)
class AtWindowEnds(Schedule):
    """Due at the last step of each window: that of an epoch is one, and one that was stopped, whatever the windows are.

    For handlers to which the steps in between do not matter.
    """

    def __str__(self) -> str:
        return "at the ends of windows"

    def due(self, step: int, epoch: int, learner: Any) -> bool:
        """Return True: it is asked where windows end, and no window ends for it."""
        return True


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

    def due(self, step: int, epoch: int, learner: Any) -> bool:
        """Tell whether `step` is a multiple of the period."""
        return step % self.steps == 0

    def next_due(self, step: int, epoch: int) -> int:
        """Return the next multiple of the period after `step`."""
        return (step // self.steps + 1) * self.steps

    def after_epoch(self) -> Schedule | None:
        """Return None: its Triggers come where their step ends."""
        return None


@dataclass(frozen=True)
class StepsOrEpochs(EverySteps):
    """For Trigger: due at every `steps`-th step, and after every `epochs`-th epoch that no due step has ended.

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
        """Return the other part."""
        return _EpochsBesideSteps(self.steps, self.epochs)


@dataclass(frozen=True)
class _EpochsBesideSteps(Schedule):
    steps: int
    epochs: int

    def __str__(self) -> str:
        return f"{_period(self.epochs, 'epoch')} but not behind {_period(self.steps, 'step')}"

    def due(self, step: int, epoch: int, learner: Any) -> bool:
        """Tell whether the epoch is due, and its last step was not."""
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

    def due(self, step: int, epoch: int, learner: Any) -> bool:
        """Tell whether `epoch` is a multiple of the period."""
        return epoch > 0 and epoch % self.epochs == 0

    def next_due(self, step: int, epoch: int) -> int | None:
        """Return the next step in a due epoch, None in the others (where it is never due)."""
        return step + 1 if self.due(step, epoch, None) else None


@dataclass(frozen=True)
class Periodic(Schedule):
    """Due at every `steps`-th step, in every `epochs`-th epoch and, with a period in epochs, in the fit's last epoch.

    Args:
        steps: Period (steps), or None.
        epochs: Period (epochs), or None.
        remaining: For handlers of steps: how many steps of the epoch remain when they run at the last step of the fit's
            last epoch. None for handlers that run in the whole epoch.
    """

    steps: int | None = None
    epochs: int | None = None
    remaining: int | None = field(default=None, compare=False)

    periodic: ClassVar[bool] = True

    def __str__(self) -> str:
        given = [_period(self.steps, "step")] if self.steps is not None else []
        last = "in the fit's last epoch" if self.remaining is None else "at the fit's last step"
        given += [_period(self.epochs, "epoch"), last] if self.epochs is not None else []
        return " and ".join(given) or "never"

    def due(self, step: int, epoch: int, learner: Any) -> bool:
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
        """Return the next step where any may be due: only a learner knows which epoch is the last one."""
        if self.epochs is not None:
            return step + 1
        return None if self.steps is None else (step // self.steps + 1) * self.steps


@dataclass(frozen=True)
class EverySeconds(Schedule):
    """Due when at least `seconds` have passed since it was last due; first due `seconds` after the start.

    A clock makes runs differ: what hangs on it is not the same from run to run, and is excepted
    from the promise that fused and unfused training agree.

    Args:
        seconds: Period (seconds, > 0).
    """

    seconds: float
    # The one schedule with a memory: the clock's last stroke, which no count can replace.
    _last: list[float] = field(default_factory=list, repr=False, compare=False)

    def __post_init__(self) -> None:
        number = isinstance(self.seconds, int | float) and not isinstance(self.seconds, bool)
        if not number or not 0 < self.seconds < math.inf:
            raise DeclarationError(
                f"The period of `EverySeconds` (seconds) must be a number above 0, not {self.seconds!r}.",
                fix="give a positive number of seconds",
            )

    def __str__(self) -> str:
        return _period(self.seconds, "second")

    def due(self, step: int, epoch: int, learner: Any) -> bool:
        """Tell whether the period has passed, and start the next one if so."""
        now = time.monotonic()
        if not self._last:
            self._last.append(now)
            return False
        if now - self._last[0] < self.seconds:
            return False
        self._last[0] = now
        return True

    def next_due(self, step: int, epoch: int) -> int | None:
        """Return the next step if the period has passed, None before; the first call starts the clock."""
        if not self._last:
            self._last.append(time.monotonic())
        return step + 1 if time.monotonic() - self._last[0] >= self.seconds else None

    def for_handler(self) -> EverySeconds:
        """Return a clock of the handler's own."""
        return EverySeconds(self.seconds)

    def after_epoch(self) -> Schedule | None:
        """Return None: its Triggers come where a step ends."""
        return None


@dataclass(frozen=True)
class Predicate(Schedule):
    """Due when a function of the callback's protected learner returns true.

    Args:
        function: `function(learner) -> bool`; it may read what the callback may read.
    """

    function: Callable[[Any], bool]
    # Of the two handlers of a pair: the moment for which the first was asked, and the answer.
    _held: dict[tuple[int, ...], bool] | None = field(default=None, repr=False, compare=False)
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
                why="it is called with the learner wherever the callback may be due, and says yes or no",
                fix="write `when(callback, lambda learner: learner.progress.epoch > 3)`",
            )

    def __str__(self) -> str:
        return f"while `{getattr(self.function, '__qualname__', self.function)}` holds"

    def pair(self, held: dict[tuple[int, ...], bool], *, by_step: bool) -> tuple[Predicate, Predicate]:
        """Return the predicate of a handler that begins something, and that of the one that ends it.

        What was begun is ended, and what was not is not: the second takes the answer that the first had.

        Args:
            held: Where the answer is kept, by its moment.
            by_step: Whether they are handlers of steps, and not of epochs.
        """
        return Predicate(self.function, held, False, by_step), Predicate(self.function, held, True, by_step)

    def due(self, step: int, epoch: int, learner: Any) -> bool:
        """Ask the function, or whoever was asked at the begin."""
        if self._held is None:
            return self._answer(learner)
        moment = (epoch, step) if self._by_step else (epoch,)
        if self._ends and moment in self._held:
            return self._held[moment]
        answer = self._answer(learner)
        self._held.clear()
        self._held[moment] = answer
        return answer

    def _answer(self, learner: Any) -> bool:
        answer = self.function(learner)
        try:
            return bool(answer)
        except ValueError as error:
            raise DeclarationError(
                f"The function of `when` must answer yes or no, not {type(answer).__name__}: {error}",
                fix="reduce it: `when(callback, lambda learner: bool(values.any()))`",
            ) from error

    def next_due(self, step: int, epoch: int) -> int:
        """Return the next step: it must be asked at each."""
        return step + 1
