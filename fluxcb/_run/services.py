"""The services that handlers reach through the learner, besides its state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fluxcb._run.evaluation import Evaluator
from fluxcb._run.snapshots import Snapshots

if TYPE_CHECKING:  # `callbackset.py` imports the core of the Learner, which imports this file
    from fluxcb._run.callbackset import CallbackSet

__all__ = ["Services"]


@dataclass(frozen=True)
class Services:
    """Services of the Learner for handlers.

    Attributes:
        evaluation: `learner.evaluation`.
        snapshots: `learner.snapshots`.
        callbacks: Returns `learner.callbacks`. A function, because the set is created after the core of the Learner.
        set_data: Replaces a data source, given the name of its phase.
        set_model: Replaces the model.
    """

    evaluation: Evaluator
    snapshots: Snapshots
    callbacks: Callable[[], CallbackSet]
    set_data: Callable[[str, Any], None]
    set_model: Callable[[Any], None]
