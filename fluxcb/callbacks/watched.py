"""`Watched`: one metric of one phase, as callbacks look at it after each epoch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fluxcb._declare.phases import Phase
from fluxcb._errors import DeclarationError, did_you_mean

__all__ = ["Watched", "phase_name"]


@dataclass(frozen=True)
class Watched:
    """A metric that decides about something.

    Attributes:
        phase: The phase's name.
        metric: The metric's name.
        owner: Who looks at it, for messages.

    Raises:
        DeclarationError: `metric` is no name.
    """

    phase: str
    metric: str
    owner: str

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str) or not self.metric:
            raise DeclarationError(
                f"`{self.owner}` takes the name of a metric, not {self.metric!r}.",
                fix='e.g. "loss", or "accuracy" if there is a `Metrics(accuracy)`',
            )

    def at(self, metrics_epoch: Any, epoch: int) -> float | None:
        """Return the value of an epoch, or None in an epoch without one.

        Args:
            metrics_epoch: `cbstate.metrics_epoch`.
            epoch: Number of the epoch.

        Raises:
            DeclarationError: There has never been a value.
        """
        values = metrics_epoch[self.phase]
        if self.metric not in values:
            raise self._missing(list(values), [name for name in metrics_epoch if len(metrics_epoch[name])], epoch)
        return values.at(epoch).get(self.metric)

    def _missing(self, metrics: list[str], phases: list[str], epoch: int) -> DeclarationError:
        named = ", ".join(f"`{name}`" for name in metrics or phases) or "nothing"
        if metrics:
            where = f"{self.phase} has {named}"
            fix = ["name one of these", f'add it: `Metrics(Metric(fn, name="{self.metric}"))`']
        else:
            where = f"{self.phase} has no values at all; there are some of {named}"
            fix = ["give the Learner validation data: `data=(training, validation)`", "write `phase=TrainingPhase`"]
        return DeclarationError(
            f"{self.owner} watches `{self.metric}` of {self.phase}, which has no value in epoch {epoch}."
            f"{did_you_mean(self.metric, metrics)}",
            where=where,
            why="without it nothing would ever happen",
            fix=fix,
        )

    def __str__(self) -> str:
        return f"{self.phase} {self.metric}"


def phase_name(phase: Any, owner: str) -> str:
    """Return the name of a phase given as a class, an instance or a name.

    Raises:
        DeclarationError: It is none of these.
    """
    if isinstance(phase, str) and phase:
        return phase
    if (isinstance(phase, Phase) or (isinstance(phase, type) and issubclass(phase, Phase))) and phase.name:
        return phase.name
    raise DeclarationError(
        f"`{owner}` takes a phase class with a name, not {phase!r}.", fix="e.g. `phase=ValidationPhase`"
    )
