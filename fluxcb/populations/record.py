"""`PopulationRecord`: which members have stopped, in the checkpoint of every member."""

from __future__ import annotations

from typing import Any

from fluxcb._declare.events import Event, Trigger
from fluxcb._declare.handlers import on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb.populations.callback import PopulationCallback

__all__ = ["PopulationRecord"]


class PopulationRecord(PopulationCallback):
    """Records which members have stopped, and why, so that a resumed population does not train them again.

    The checkpoints of a stopped member cannot tell this. A member whose loss was NaN, for example, saves nothing after
    that, and its newest checkpoint looks like that of a member that was killed.

    Attributes:
        stopped: The reason of each member that had stopped before the last epoch ended, by member.

    Runs:
        Trigger x AbstractTrainingPhase (host).
    """

    stopped: dict[int, str]

    def __init__(self) -> None:
        self.stopped = {}

    @on(Trigger, AbstractTrainingPhase)
    def record(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Record the members that no longer take part."""
        live = self.share(None)
        ended = self._meeting.ended if self._meeting is not None else {}
        self.stopped = {member: ended[member] for member in sorted(ended) if member not in live}

    def state_dict(self) -> dict[str, Any]:
        """Return the members that have stopped."""
        return {"stopped": [[member, reason] for member, reason in self.stopped.items()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the members that have stopped."""
        self.stopped = dict(state["stopped"])

    def __repr__(self) -> str:
        return "PopulationRecord()"
