"""`InTurn`: training phases that alternate within an epoch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from fluxcb._calls import Constructed
from fluxcb._declare.phases import Phase
from fluxcb._declare.schedules import positive
from fluxcb._errors import DeclarationError

__all__ = ["InTurn", "flat"]


class InTurn(Constructed):
    """Training phases that alternate within an epoch of `fit`, with some steps of each in turn.

    Pass it to a Learner in `phases=`. An epoch of the group runs `steps[0]` steps of the first phase, then `steps[1]`
    steps of the second phase, and so on. Then it starts again with the first phase. Each phase has its own
    data, metrics, and `progress.step_in_epoch`. All of them have the same `progress.epoch`, and `progress.step` counts
    the steps of all phases.

    The epoch ends when the data of the first phase ends, or after `steps_per_epoch` steps of all phases together if
    this argument was passed to `fit`. The other phases do not restart their data at each epoch. They continue where
    the last epoch ended, and start again when the data ends.
    `EpochBegin` is emitted for each phase before the first step, and `EpochEnd` for each phase after the last step.
    `CancelEpoch` ends the epoch of all phases.

    Args:
        *phases: At least two training phases, each with a name of its own.
        steps: The number of consecutive steps of each phase. The default is one step each.

    Attributes:
        phases: The phases.
        steps: The number of consecutive steps of each phase.

    Raises:
        DeclarationError: One of `phases` is not an instance of a training phase, there are fewer than two, or `steps`
            does not have one positive number for each phase.

    Example:
        >>> from fluxcb.phases import InTurn, TrainingPhase
        >>> class Other(TrainingPhase):
        ...     name = "other"
        >>> InTurn(TrainingPhase(), Other(), steps=(1, 5))
        InTurn(TrainingPhase(), Other(), steps=(1, 5))
    """

    def __init__(self, *phases: Phase, steps: Sequence[int] | None = None) -> None:
        for phase in phases:
            _check(phase, phases)
        if len(phases) < 2:
            raise DeclarationError(
                f"`InTurn` takes at least two phases, not {len(phases)}.",
                fix=f"write `phases=[{phases[0]!r}]`, without `InTurn`"
                if phases
                else "write `InTurn(A(), B())` with instances of two training phases",
            )
        if steps is None:
            steps = (1,) * len(phases)
        if not isinstance(steps, Sequence) or isinstance(steps, str) or len(steps) != len(phases):
            raise DeclarationError(
                f"`steps` of `InTurn` must have {len(phases)} numbers, one for each phase, not {steps!r}.",
                fix=f"write e.g. `steps={(1,) * (len(phases) - 1) + (5,)}`",
            )
        self.phases: tuple[Phase, ...] = phases
        self.steps = tuple(positive(number, "Each number in `steps` of `InTurn`") for number in steps)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the phases."""
        return tuple(type(phase).name for phase in self.phases)

    def __repr__(self) -> str:
        return self._text(map(repr, self.phases))

    @property
    def description(self) -> str:
        """The names of the phases and the number of steps of each, in the form that checkpoints store."""
        return self._text(self.names)

    def _text(self, phases: Iterable[str]) -> str:
        shown = ", ".join(phases)
        return f"InTurn({shown}, steps={self.steps})" if set(self.steps) != {1} else f"InTurn({shown})"


def flat(phases: Iterable[Any]) -> tuple[Any, ...]:
    """Return phases, with each `InTurn` replaced by its phases."""
    return tuple(phase for item in phases for phase in (item.phases if isinstance(item, InTurn) else (item,)))


def _check(phase: Any, phases: Sequence[Any]) -> None:
    if isinstance(phase, InTurn):
        raise DeclarationError(
            f"`InTurn` contains {phase!r}, and cannot be nested.",
            why="each turn of an `InTurn` consists of steps of one phase",
            fix=f"list all phases in one `InTurn`, e.g. `InTurn({', '.join(map(repr, flat(phases)))})`",
        )
    if not isinstance(phase, Phase):
        raise DeclarationError(
            f"`InTurn` contains {phase!r}, which is not a phase instance.",
            fix=f"write `{phase.__name__}()`" if isinstance(phase, type) else "write e.g. `InTurn(A(), B())`",
        )
    if not type(phase).trains:
        raise DeclarationError(
            f"`InTurn` contains {phase!r}, which does not train.",
            why="phases that do not train run after the training phases of an epoch",
            fix=f"move it out of `InTurn`: `phases=[InTurn(...), {phase!r}]`",
        )
