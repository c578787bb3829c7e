"""Events: the points in the loop at which handlers run."""

from fluxcb._declare.events import (
    BackwardBegin,
    BackwardEnd,
    ComputeEnd,
    EpochBegin,
    EpochEnd,
    Event,
    FitBegin,
    FitEnd,
    ForwardBegin,
    HostEvent,
    LossBegin,
    StepBegin,
    StepEnd,
    TracedEvent,
    Trigger,
    UpdateEnd,
)

__all__ = [
    "BackwardBegin",
    "BackwardEnd",
    "ComputeEnd",
    "EpochBegin",
    "EpochEnd",
    "Event",
    "FitBegin",
    "FitEnd",
    "ForwardBegin",
    "HostEvent",
    "LossBegin",
    "StepBegin",
    "StepEnd",
    "TracedEvent",
    "Trigger",
    "UpdateEnd",
]
