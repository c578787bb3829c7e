"""The record of a fit: where it began, why it ended, and where in an epoch the next one continues."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["FitRecord", "Position"]


@dataclass(frozen=True)
class Position:
    """The position within an epoch at which training continues.

    Attributes:
        phase: Name of the phase whose epoch is running.
        step_in_epoch: Finished steps of this epoch.
        outer: Finished steps of the training epoch that precedes or surrounds a validation epoch.
        in_turn: Finished steps of the epoch of the other phases of an `InTurn`, by name.
    """

    phase: str
    step_in_epoch: int
    outer: int
    in_turn: Mapping[str, int] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """Finished steps of the epoch, including the other phases of an `InTurn`."""
        return self.step_in_epoch + sum(self.in_turn.values())

    @property
    def phases(self) -> tuple[str, ...]:
        """The names of the phases that are within an epoch."""
        return self.phase, *self.in_turn

    def as_list(self) -> list[Any]:
        """Return the position in the form that checkpoints store and `Position(*position)` accepts."""
        # The last item is optional, so checkpoints of runs without an `InTurn` keep the format of earlier versions.
        return [self.phase, self.step_in_epoch, self.outer, *([dict(self.in_turn)] if self.in_turn else [])]


@dataclass
class FitRecord:
    """The record of the current fit, or of the last one.

    `run_fit`, `callbacks_as_hook`, and the restore of a checkpoint write it. A rewind keeps `rewinds` and `rewound_to`,
    which would otherwise be restored with the rest.

    Attributes:
        epoch: Number of the last epoch before the fit.
        step: Finished training steps before the fit.
        ended: The reason it ended early; None while it runs, and if it ran to its end.
        at: The position in an epoch at which the next fit continues; None between two epochs.
        restored: Whether this record comes from a checkpoint and no fit has begun since.
        replays: Whether the fit replays steps of a recorded run.
        steps_per_epoch: The argument of the running `fit` as a text, or None if none runs.
        rewinds: Number of times that the run has gone back to an earlier checkpoint.
        rewound_to: The step of the checkpoint to which the run last went back, or None.
        begun: Whether this Learner has begun a fit. A restore does not change it.
        within: The epoch after which the restored fit had begun, if it was not the first fit of its run, until another
            fit begins. A restore does not change it, but `fit(resume=True)` sets it.
        finished: Whether the last fit of this Learner ran to its end. A restore does not change it.
        assigned: What the program has assigned since this Learner last began a fit, such as `learner.params`.
    """

    epoch: int = 0
    step: int = 0
    ended: str | None = None
    at: Position | None = None
    restored: bool = False
    replays: bool = False
    steps_per_epoch: str | None = None
    rewinds: int = 0
    rewound_to: int | None = None
    begun: bool = False
    within: int | None = None
    finished: bool = False
    assigned: list[str] = field(default_factory=list)

    def assign(self, name: str) -> None:
        """Record that the program has assigned a part of the state."""
        # A list and not a set, because a warning of `resume` shows the names in the order of the assignments.
        if name not in self.assigned:
            self.assigned.append(name)
