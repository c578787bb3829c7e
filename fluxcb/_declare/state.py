"""The catalogue of state: every place in the Learner, what it means, and when it exists.

The docs' tables of paths and of "which step value may be written when" are compared with this
module by a test.
"""

from collections.abc import Iterable, Mapping

from fluxcb._declare.events import (
    BUILTIN_EVENTS,
    BackwardBegin,
    BackwardEnd,
    ComputeEnd,
    Event,
    FitBegin,
    FitEnd,
    FitStopping,
    ForwardBegin,
    LossBegin,
    StepBegin,
    StepEnd,
    TracedEvent,
    Trigger,
    UpdateEnd,
)
from fluxcb._declare.phases import Phase

__all__ = [
    "CARRY",
    "ENGINE_STEP_NAMES",
    "FIRST_LEVEL",
    "PROGRESS",
    "PROVIDERS",
    "STEP_FLAGS",
    "UNDECLARED",
    "available",
    "emits",
    "provided",
    "step_names",
    "writable_at",
]

FIRST_LEVEL: Mapping[str, str] = {
    "params": "the model's trainable parameters: a pytree of arrays, in the carry",
    "model_state": "what the model changes itself, e.g. batch statistics: a pytree, in the carry",
    "opt_state": "the optimizer's state: a pytree, in the carry",
    "key": "the random key; in a handler, one folded from the run's key, the step and the callback's name",
    "hyperparams": "device scalars that optax injected, by name; they live inside `opt_state`",
    "step": "what this step has and computes",
    "control": "the permission to raise a Cancel at StepBegin or StepEnd",
    "cbstate": "state that callbacks share, by name",
    "progress": "the engine's counters",
    "data": "batch sources, by phase name",
    "model": "the model as the user gave it",
    "loss_fn": "the loss function",
    "optimizer": "the optax optimizer",
    "callbacks": "the callbacks of this Learner",
    "evaluation": "computes a phase's step on any batch, and changes nothing (host only)",
    "snapshots": "takes the whole state between two steps, for checkpoints (host only)",
    "*": "everything",
}

CARRY = ("params", "model_state", "opt_state", "key")

# Only the engine writes these, so nothing is gained by declaring that one reads them.
UNDECLARED = ("progress", "key")

PROGRESS: Mapping[str, str] = {
    "step": "finished training steps since the Learner was built",
    "epoch": "number of the epoch at hand; 0 before the first",
    "step_in_epoch": "finished steps of the epoch at hand",
    "epochs": "number of the epoch this fit ends with, 0 where unknown (host only)",
    "steps_in_epoch": "steps this epoch will have, 0 where unknown (host only)",
    "batch_size": "examples in the batch of the step at hand, 0 between steps (host only)",
    "compiled": "whether the step was already compiled when the current epoch began or resumed (host only)",
}

ENGINE_STEP_NAMES: Mapping[str, str] = {
    "batch": "the batch",
    "skip": "bool; true keeps params, opt_state and model_state as they were",
    "hold": "bool; true keeps params and opt_state as they were: the step is good, but no update yet",
    "stop": "bool; true ends the window after this step",
}

STEP_FLAGS = (("step", "skip"), ("step", "hold"), ("step", "stop"))
"""Paths that the engine or-s over all who write them, and that are false where nobody does."""

# Who creates which shared state, for the text of a MissingStateError; a test compares it with the callbacks.
PROVIDERS: Mapping[str, str] = {
    "history": "Recorder",
    "metrics_step": "Metrics",
    "metrics_epoch": "Metrics",
    "metrics_now": "Metrics",
    "ema": "ParameterEMA",
    "inference": "InferenceRunner",
    "monitors": "Monitors",
    "histograms": "LogHistograms",
    "moving_average": "MovingAverage",
    "simple_moving_average": "SimpleMovingAverage",
    "summaries": "LogSummaries",
    "traces": "Traces",
    "profiler": "Profiler",
    "swa": "StochasticWeightAveraging",
    "accumulation": "AccumulateGradients",
    "non_finite": "SkipNonFinite",
    "loss_scale": "DynamicLossScale",
    "loss_spikes": "LossSpikeGuard",
}

_TRACED = tuple(event for event in BUILTIN_EVENTS if issubclass(event, TracedEvent))

_WRITABLE: Mapping[str, tuple[type[Event], ...]] = {
    "step.batch": (ForwardBegin,),
    "step.xs": (ForwardBegin,),
    "step.ys": (ForwardBegin,),
    "step.outputs": (LossBegin,),
    "step.loss": (BackwardBegin,),
    "step.aux": (BackwardBegin,),
    "step.grads": (BackwardEnd,),
    "step.updates": (),
    "step.skip": (ForwardBegin, LossBegin, BackwardBegin, BackwardEnd),
    "step.hold": (ForwardBegin, LossBegin, BackwardBegin, BackwardEnd),
    "params": (UpdateEnd, ComputeEnd),
    "model_state": (UpdateEnd, ComputeEnd),
    "opt_state": (BackwardEnd, UpdateEnd, ComputeEnd),
    "key": (),
}


def writable_at(path: tuple[str, ...]) -> tuple[type[Event], ...] | None:
    """Return the traced events at which a path may be written, or None for all of them.

    Written later, it would have no effect, or not the one that was meant.
    """
    return _WRITABLE.get(".".join(path[:2]) if path[0] == "step" else path[0])


def provided(phase: type[Phase]) -> dict[type[Event], tuple[str, ...]]:
    """Return the traced events of a phase in order, each with the step names it adds."""
    order: list[type[Event]] = list(_TRACED)
    previous: type[Event] | None = None
    for event in phase.provides:
        if event not in order:  # the user's own event stands behind the one named before it
            order.insert(0 if previous is None else order.index(previous) + 1, event)
        previous = event
    given: dict[type[Event], tuple[str, ...]] = {**phase.provides}
    return {event: tuple(given.get(event, ())) for event in order}


def emits(event: type[Event], phase: type[Phase]) -> bool:
    """Tell whether an event happens in a phase; events of the user's own may always do."""
    if event not in BUILTIN_EVENTS:
        return True
    if issubclass(event, TracedEvent):
        return event in phase.provides or event is ComputeEnd or (event is UpdateEnd and phase.trains)
    return phase.trains or event not in (FitBegin, FitEnd, FitStopping, Trigger)


def available(event: type[Event], phase: type[Phase]) -> set[str] | None:
    """Return the step names the phase itself has at an event, or None where that is not known.

    Host events other than StepBegin and StepEnd have no step values at all.
    """
    table = provided(phase)
    if event is StepBegin:
        return {"batch"}
    if event is StepEnd:
        return set(ENGINE_STEP_NAMES) | {name for names in table.values() for name in names}
    if event in table:
        known = set(ENGINE_STEP_NAMES)
        for at, names in table.items():
            known.update(names)
            if at is event:
                return known
    if issubclass(event, TracedEvent) or event not in BUILTIN_EVENTS:
        return None
    return set()


def step_names(phases: Iterable[type[Phase]]) -> set[str]:
    """Return every step name that some phase provides."""
    return {name for phase in phases for names in phase.provides.values() for name in names}
