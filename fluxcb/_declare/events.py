"""Events: the points in the loop at which handlers run.

The handlers of a host event run in Python, between calls of the compiled program. The handlers of a traced
event run while the step is traced, so they become part of the compiled program. To add an event, subclass
`HostEvent` or `TracedEvent`, and emit instances of the subclass.
"""

from typing import Literal, TypeAlias

from fluxcb._calls import Constructed

__all__ = [
    "BUILTIN_EVENTS",
    "BackwardBegin",
    "BackwardEnd",
    "ComputeEnd",
    "EpochBegin",
    "EpochEnd",
    "Event",
    "FitBegin",
    "FitEnd",
    "FitStopping",
    "ForwardBegin",
    "HostEvent",
    "LossBegin",
    "StepBegin",
    "StepEnd",
    "TracedEvent",
    "Trigger",
    "UpdateEnd",
    "is_concrete",
]


Outcome: TypeAlias = Literal["finished", "stopped", "interrupted", "failed", "rewinding"]
"""How a fit ended; see `FitEnd`."""


class Event(Constructed):
    """A point in the training loop. Derive your own events from `HostEvent` or `TracedEvent`."""

    def __repr__(self) -> str:
        return type(self).__name__


class HostEvent(Event):
    """An event whose handlers run in Python, between calls of the compiled program."""


class TracedEvent(Event):
    """An event whose handlers are traced into the step and run on the device.

    Handlers receive tracers. They cannot branch on values, print values, or raise exceptions that depend on values.
    """


class FitBegin(HostEvent):
    """Emitted at the start of each `fit`, before all other events. Counters keep their values from the previous fit.

    When a fit resumes an interrupted one, `FitBegin` is emitted again, for handlers that open or start something. The
    restored state contains what the handlers set or counted at the first `FitBegin`. If the fit resumes within an
    epoch, no `EpochBegin` follows for that epoch.

    Args:
        resumes: Whether the fit resumes an interrupted fit.
        within_epoch: Whether the fit resumes within an epoch or its validation.
        complete: Whether no step will run, because the run that the fit resumes is complete or was stopped.
        replays: Whether `learner.replay` repeats steps of a recorded run. Handlers must not change its files then.
    """

    # A separate event for resuming would have to be handled by every callback that opens a file or starts a thread.

    def __init__(
        self, *, resumes: bool = False, within_epoch: bool = False, complete: bool = False, replays: bool = False
    ) -> None:
        self.resumes = resumes
        self.within_epoch = within_epoch
        self.complete = complete
        self.replays = replays


class EpochBegin(HostEvent):
    """Emitted before the first step of an epoch. `progress.epoch` is already the number of this epoch.

    Args:
        shares_epoch: Whether another training phase of the fit has already begun the epoch of this number.
    """

    def __init__(self, *, shares_epoch: bool = False) -> None:
        self.shares_epoch = shares_epoch


class StepBegin(HostEvent):
    """Emitted before a step. `step.batch` exists, and `progress` counts the finished steps."""


class StepEnd(HostEvent):
    """Emitted after a step. All of `step.*` exists, and `progress` counts this step as finished."""


class EpochEnd(HostEvent):
    """Emitted after the last step of an epoch, even if the epoch was cancelled.

    Args:
        interrupted: Whether a signal or `PauseFitting` ended the epoch early. A fit that resumes this one finishes the
            epoch, and emits `EpochEnd` for it again.
    """

    def __init__(self, *, interrupted: bool = False) -> None:
        self.interrupted = interrupted


class Trigger(HostEvent):
    """Emitted when callbacks should do heavy work, such as saving, validating, drawing or sending.

    It is emitted once after every training epoch. The validation of that epoch has already run, so saved and printed
    values include its metrics. Schedule wrappers such as
    `every(callback, steps=100)` change when it is emitted for their callback.
    """


class FitStopping(HostEvent):
    """Emitted when no further step of a `fit` will run, unless an error ended the fit. `FitEnd` follows.

    The training can be resumed from the state at this event, so this is the last chance to save. If a signal ended the
    fit, the `EpochEnd` of the current epoch is emitted after this event.

    Args:
        reason: The value that `learner.stop_reason` will have: None if the fit ran to its end.
    """

    # `FitEnd` cannot replace this event. It is also emitted after an exception, when the state may be half-written or
    # lost. In addition, a snapshot after a signal must be taken before `EpochEnd` closes the current epoch.

    def __init__(self, reason: str | None = None) -> None:
        self.reason = reason


class FitEnd(HostEvent):
    """Emitted at the end of each `fit`, however it ended. An error in one handler does not stop the other handlers.

    Args:
        outcome: How the fit ended. "finished": it ran to its end. "stopped": a callback raised `CancelFitting`.
            "interrupted": a signal or `PauseFitting` ended it, and it can be resumed. "failed": `error` was raised.
            "rewinding": the run returns to an earlier checkpoint, and `FitBegin` follows.
        reason: The value that `learner.stop_reason` will have: None if the fit ran to its end.
        advice: The advice of the callback that ended the fit, or an empty string.
        error: The exception that ended the fit and will be raised, or None.
    """

    def __init__(
        self,
        outcome: Outcome = "finished",
        reason: str | None = None,
        *,
        advice: str = "",
        error: BaseException | None = None,
    ) -> None:
        self.outcome = outcome
        self.reason = reason
        self.advice = advice
        self.error = error


class ForwardBegin(TracedEvent):
    """Emitted before the model is applied. `step.batch`, `xs` and `ys` exist and can be assigned."""


class LossBegin(TracedEvent):
    """Emitted inside the gradient, before the loss. Adds `step.outputs`, which can be assigned."""


class BackwardBegin(TracedEvent):
    """Emitted inside the gradient, after the loss. Adds `step.loss`. Assigning it changes the gradients."""


class BackwardEnd(TracedEvent):
    """Emitted after the gradients. Adds `step.grads`, which can be assigned. Parameters are not yet updated."""


class UpdateEnd(TracedEvent):
    """Emitted after the parameter update. Adds `step.updates`. `params` and `opt_state` have their new values.

    If `step.skip` or `step.hold` is true, `step.updates` is zero, and `params` and `opt_state` are unchanged.
    """


class ComputeEnd(TracedEvent):
    """The last traced event of a step. It is emitted in every phase, even in phases without a backward pass.

    All values that the step computes exist. Metrics accumulate at this event, in training and in validation.
    """

    # `UpdateEnd` would not be sufficient for metrics, because it does not exist in validation.


# In the order in which a training step emits them, which is also the order of the table in the docs.
BUILTIN_EVENTS: tuple[type[Event], ...] = (
    FitBegin,
    EpochBegin,
    StepBegin,
    ForwardBegin,
    LossBegin,
    BackwardBegin,
    BackwardEnd,
    UpdateEnd,
    ComputeEnd,
    StepEnd,
    EpochEnd,
    Trigger,
    FitStopping,
    FitEnd,
)

_BASES = (Event, HostEvent, TracedEvent)


def is_concrete(event: type[Event]) -> bool:
    """Return whether instances of this class are emitted, which is false for the three base classes."""
    return event not in _BASES
