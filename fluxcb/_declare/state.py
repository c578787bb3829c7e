"""The catalogue of state: every path in the Learner, its meaning, and when it exists.

A test compares the docs' tables of paths, and of the events at which each step value may be written, with this
module.
"""

from collections.abc import Iterable, Mapping

from fluxcb._declare.access import Append, Permission, Read
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
    "ALIASES",
    "CARRY",
    "COUNTER_ALIASES",
    "ENGINE_STEP_NAMES",
    "FIRST_LEVEL",
    "MAPPING_METHODS",
    "METRICS",
    "MONITOR_ALIASES",
    "MONITOR_METHODS",
    "PROGRESS",
    "PROVIDERS",
    "RATE_FIX",
    "RATE_WHY",
    "STEP_PROVIDERS",
    "UNDECLARED",
    "available",
    "emits",
    "is_negative_rate",
    "provided",
    "step_names",
    "writable_at",
]

FIRST_LEVEL: Mapping[str, str] = {
    "params": "trainable parameters of the model: a pytree of arrays, in the carry",
    "model_state": "state that the model updates itself, such as batch statistics: a pytree, in the carry",
    "opt_state": "state of the optimizer, or of several optimizers by name: a pytree, in the carry",
    "key": "random key; in a handler, derived from the key of the run, the step and the name of the callback",
    "hyperparams": "hyperparameters that Optax injected, by name: scalars on the device, stored in `opt_state`",
    "step": "values of the current step",
    "control": "permission to raise a Cancel at StepBegin or StepEnd",
    "cbstate": "state that callbacks share, by name",
    "progress": "counters",
    "data": "data sources, by phase name",
    "model": "the model that the user passed; NNX and Equinox modules have shapes in place of their arrays",
    "loss_fn": "the loss function",
    "optimizer": "the optax optimizer, or several by name",
    "callbacks": "the callbacks of this Learner",
    "evaluation": "computes the step of a phase on any batch, without changing the state (host only)",
    "snapshots": "copies the whole state between two steps, for checkpoints (host only)",
    "*": "everything",
}

CARRY = ("params", "model_state", "opt_state", "key")

# Only the engine writes these, so neither an order nor a conflict would follow from a declaration. Handlers may read
# them without one.
UNDECLARED = ("progress", "key")

PROGRESS: Mapping[str, str] = {
    "step": "finished training steps since the Learner was built",
    "epoch": "number of the current epoch; 0 before the first one",
    "step_in_epoch": "finished steps of the current epoch",
    "epochs": "number of the last epoch of this fit; 0 if unknown (host only)",
    "steps_in_epoch": "number of steps that this epoch will have; 0 if unknown (host only)",
    "batch_size": "number of examples in the batch of the current step; 0 between steps (host only)",
    "in_turn": "names of the training phases that alternate, one tuple for each `InTurn` (host only)",
    "compiled": "whether the step was already compiled when the current epoch began or resumed (host only)",
}

# Names that a Learner has outside handlers, or that other libraries use, and where handlers find the value.
ALIASES: Mapping[str, tuple[str, ...]] = {
    "epoch": ("progress", "epoch"),
    "global_step": ("progress", "step"),
    "iteration": ("progress", "step"),
    "current_epoch": ("progress", "epoch"),
    "loss": ("step", "loss"),
    "grads": ("step", "grads"),
    "batch": ("step", "batch"),
    "learning_rate": ("hyperparams", "learning_rate"),
    "lr": ("hyperparams", "learning_rate"),
    "history": ("cbstate", "metrics_epoch"),
    "metrics": ("cbstate", "metrics_epoch"),
    "optimizer_state": ("opt_state",),
}

# Other names of the counters, which users try below `learner.progress` and `learner.step`.
COUNTER_ALIASES: Mapping[str, str] = {
    "global_step": "step",
    "index": "step",
    "iteration": "step",
    "global_epoch": "epoch",
    "current_epoch": "epoch",
    "batch_idx": "step_in_epoch",
    "batch_index": "step_in_epoch",
}

MAPPING_METHODS = ("get", "items", "keys", "values")
"""The methods of the parts of a learner, such as `learner.step`, unless an entry has the name."""

MONITOR_METHODS: Mapping[str, Permission] = {
    **dict.fromkeys(("put_scalar", "put_text", "put_image", "put_histogram", "put"), Append()),
    **dict.fromkeys(("latest", "history"), Read()),
}
"""The methods of the hub whose first argument is a name, and the permission on this name that a call needs."""

MONITOR_ALIASES: Mapping[str, str] = {
    **dict.fromkeys(("add", "log", "log_metric", "log_scalar", "record", "scalar", "write"), "put_scalar"),
    **{f"add_{kind}": f"put_{kind}" for kind in ("scalar", "text", "image", "histogram")},
}
"""Methods of other loggers, which users try on the hub."""

ENGINE_STEP_NAMES: Mapping[str, str] = {
    "batch": "the batch",
    "data_position": "position of the batch in its data source: `source`, `pass`, `batch`; None outside an epoch "
    "(host only)",
    "skip": "bool; if true, this step does not change params, opt_state and model_state",
    "hold": "bool; if true, this step does not change params and opt_state, but it counts: the update is postponed",
    "stop": "bool; if true, the window ends after this step",
    "skips": "which callbacks have set `step.skip`, and the values that they used (host only)",
    "earlier_losses": "earlier values of `step.loss`, if the phase assigns it several times",
}

"""Paths that are false by default, and that the engine combines with "or" over all their writers."""

# The callbacks that create shared state, for the text of a MissingStateError. A test compares it with the callbacks.
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
    "commands": "ControlFile",
    "swa": "StochasticWeightAveraging",
    "accumulation": "AccumulateGradients",
    "non_finite": "SkipNonFinite",
    "loss_scale": "DynamicLossScale",
    "loss_spikes": "LossSpikeGuard",
    "bad_steps": "BadSteps",
}

# The callbacks that write step values which other callbacks read.
STEP_PROVIDERS: Mapping[str, str] = {
    "metrics": "Metrics",
    "finite_grads": "CheckNumerics",
    "finite_params": "CheckNumerics",
}

# Metrics of the library that are numbers, for the text of a MissingStateError. A test compares it with the metrics.
METRICS: Mapping[str, str] = {"accuracy": "accuracy", "auroc": "AUROC()", "smooth_loss": "SmoothLoss()"}

_TRACED = tuple(event for event in BUILTIN_EVENTS if issubclass(event, TracedEvent))

_WRITABLE: Mapping[str, tuple[type[Event], ...]] = {
    "step.batch": (ForwardBegin,),
    "step.xs": (ForwardBegin,),
    "step.ys": (ForwardBegin,),
    "step.outputs": (LossBegin,),
    "step.loss": (BackwardBegin,),
    "step.earlier_losses": (),
    "step.aux": (BackwardBegin,),
    "step.grads": (BackwardEnd,),
    "step.updates": (),
    "step.data_position": (),
    "step.skips": (),
    "step.skip": (ForwardBegin, LossBegin, BackwardBegin, BackwardEnd),
    "step.hold": (ForwardBegin, LossBegin, BackwardBegin, BackwardEnd),
    "params": (UpdateEnd, ComputeEnd),
    "model_state": (UpdateEnd, ComputeEnd),
    "opt_state": (BackwardEnd, UpdateEnd, ComputeEnd),
    "key": (),
}


def writable_at(path: tuple[str, ...]) -> tuple[type[Event], ...] | None:
    """Return the traced events at which a path may be written, or None for all of them.

    A later write would have no effect, or a wrong one.
    """
    return _WRITABLE.get(".".join(path[:2]) if path[0] == "step" else path[0])


def provided(phase: type[Phase]) -> dict[type[Event], tuple[str, ...]]:
    """Return the traced events of a phase in order, each with the step names that it adds."""
    order: list[type[Event]] = list(_TRACED)
    previous: type[Event] | None = None
    for event in phase.provides:
        if event not in order:  # a user-defined event comes after the event named before it
            order.insert(0 if previous is None else order.index(previous) + 1, event)
        previous = event
    names: dict[type[Event], tuple[str, ...]] = {**phase.provides}
    return {event: tuple(names.get(event, ())) for event in order}


def emits(event: type[Event], phase: type[Phase]) -> bool:
    """Return whether an event is emitted in a phase. User-defined events may always be emitted."""
    if event not in BUILTIN_EVENTS:
        return True
    # Callbacks must not conflict at a moment that never occurs.
    if issubclass(event, TracedEvent):
        return event in phase.provides or event is ComputeEnd or (event is UpdateEnd and phase.trains)
    return phase.trains or event not in (FitBegin, FitEnd, FitStopping, Trigger)


def available(event: type[Event], phase: type[Phase]) -> set[str] | None:
    """Return the step names that the phase itself has at an event, or None if they are not known.

    Host events other than StepBegin and StepEnd have no step values.
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


RATE_WHY = "with a negative learning rate, each update would increase the loss; to maximize a value, negate the loss"
"""Why a negative learning rate is refused."""
RATE_FIX = "a number that is not negative"
"""What to use instead of one."""


def is_negative_rate(hyperparameter: str, value: float) -> bool:
    """Return whether a value is a negative learning rate. Negative values of other hyperparameters can be meant."""
    return value < 0 and hyperparameter.rpartition(".")[2] == "learning_rate"
