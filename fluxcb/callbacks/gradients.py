"""`ClipGradients`: bound the gradients' norm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fluxcb._declare.access import Write
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import BackwardEnd, Event
from fluxcb._declare.handlers import on
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._errors import DeclarationError

__all__ = ["ClipGradients"]


class ClipGradients(Callback):
    """Scale the gradients down where their global norm exceeds a bound.

    `grads <- grads * max_norm / |grads|` if `|grads| >= max_norm`, with the Euclidean norm over all of them.

    Args:
        max_norm: The bound, above 0.

    Access:
        step.grads: Write.

    Runs:
        BackwardEnd x AbstractTrainingPhase (traced).

    Cost:
        One pass over the gradients, inside the step.

    Raises:
        DeclarationError: `max_norm` is not a number above 0.

    Example:
        >>> from fluxcb.callbacks import ClipGradients
        >>> ClipGradients(1.0)
        ClipGradients(1.0)

    Source:
        Pascanu, Mikolov and Bengio (2013), algorithm 1; `optax.clip_by_global_norm`, whose code runs.
    """

    def __init__(self, max_norm: float) -> None:
        if isinstance(max_norm, bool) or not isinstance(max_norm, int | float) or not max_norm > 0:
            raise DeclarationError(f"`max_norm` of ClipGradients must be a number above 0, not {max_norm!r}.")
        self.max_norm = max_norm

    def stateaccess(self) -> Mapping[str, Any]:
        """Return what it reads and writes; see the class."""
        return {"step": {"grads": Write()}}

    @on(BackwardEnd, AbstractTrainingPhase)
    def clip(self, event: Event, phase: Phase, learner: Any) -> None:
        """Clip."""
        import optax

        clipped, _ = optax.clip_by_global_norm(self.max_norm).update(learner.step.grads, optax.EmptyState())
        learner.step.grads = clipped

    def __repr__(self) -> str:
        return f"ClipGradients({self.max_norm})"
