"""Phases: what is being done, and the traced step that does it."""

from fluxcb._declare.phases import (
    AbstractTrainingPhase,
    AbstractValidationPhase,
    LossTrainingPhase,
    LossValidationPhase,
    Phase,
    TrainingPhase,
    ValidationPhase,
)

__all__ = [
    "AbstractTrainingPhase",
    "AbstractValidationPhase",
    "LossTrainingPhase",
    "LossValidationPhase",
    "Phase",
    "TrainingPhase",
    "ValidationPhase",
]
