"""Phases: what is being done, and the traced step that does it."""

from fluxcb._declare.phase_learner import StepLearner
from fluxcb._declare.phases import (
    AbstractTrainingPhase,
    AbstractValidationPhase,
    LossTrainingPhase,
    LossValidationPhase,
    Phase,
    TrainingPhase,
    ValidationPhase,
)
from fluxcb._declare.turns import InTurn

__all__ = [
    "AbstractTrainingPhase",
    "AbstractValidationPhase",
    "InTurn",
    "LossTrainingPhase",
    "LossValidationPhase",
    "Phase",
    "StepLearner",
    "TrainingPhase",
    "ValidationPhase",
]
