"""Events: the points in the loop at which handlers run.

Host events happen in Python, between calls of the compiled program; traced events happen while
the step is traced, so their handlers become part of the program. Both lists are open: subclass
`HostEvent` or `TracedEvent` and emit instances.
"""

from typing import Literal, TypeAlias

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


class Event:
    """A point in the training loop; use `HostEvent` or `TracedEvent` as the base of your own."""

    def __repr__(self) -> str:
        return type(self).__name__


class HostEvent(Event):
    """An event whose handlers run in Python, between calls of the compiled program."""


class TracedEvent(Event):
    """An event whose handlers are traced into the step and run on the device.

    Handlers see tracers: they cannot branch on values, print, or raise on a value.
    """


class FitBegin(HostEvent):
    """Emitted once per `fit`, before anything else; counters stand where the last fit left them.

    Where a fit goes on with one that was interrupted, it is emitted again, for handlers that open or start something;
    what they set or counted at the first is in the state that was restored. In the middle of an epoch, no `EpochBegin`
    follows for that one.

    Args:
        resumes: Whether the fit goes on.
    """

    def __init__(self, *, resumes: bool = False) -> None:
        self.resumes = resumes


class EpochBegin(HostEvent):
    """Emitted before an epoch's first step; `progress.epoch` already names this epoch."""


class StepBegin(HostEvent):
    """Emitted before a step; `step.batch` is there, `progress` counts the finished steps."""


class StepEnd(HostEvent):
    """Emitted after a step; all of `step.*` is there, `progress` counts this step as finished."""


class EpochEnd(HostEvent):
    """Emitted after an epoch's last step, also when the epoch was cancelled."""


class Trigger(HostEvent):
    """Asks callbacks to do their thing: save, validate, draw, send.

    Emitted once after every training epoch (behind that epoch's validation) and whenever a
    schedule wrapper such as `every(cb, steps=100)` says so. Heavy work belongs here.
    """


class FitStopping(HostEvent):
    """Emitted once per `fit` that no error ends, when no further step will run; `FitEnd` follows.

    The state is that between two steps or two epochs, from where the training can go on: this is the last chance to
    save. Where a signal ended the fit, the epoch at hand gets its `EpochEnd` only after this.

    Args:
        reason: What `learner.stop_reason` will be: None where the fit ran to its end.
    """

    def __init__(self, reason: str | None = None) -> None:
        self.reason = reason


class FitEnd(HostEvent):
    """Emitted once per `fit`, however the fit ended; an error in one handler does not stop the others.

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
    """Before the model is applied: `step.batch`, `xs`, `ys` are there and may be rewritten."""


class LossBegin(TracedEvent):
    """Inside the gradient, before the loss: adds `step.outputs`, which may be rewritten."""


class BackwardBegin(TracedEvent):
    """Inside the gradient, after the loss: adds `step.loss`, which may be rewritten (gradients follow)."""


class BackwardEnd(TracedEvent):
    """After the gradients: adds `step.grads`, which may be rewritten; parameters are not yet updated."""


class UpdateEnd(TracedEvent):
    """After the parameter update: adds `step.updates`; `params` and `opt_state` are the new ones."""


class ComputeEnd(TracedEvent):
    """The last traced event of every phase's step, also where there is no backward pass.

    Everything the step computes is known. Metrics accumulate here, in training and in validation.
    """


# In the order in which a training step meets them; the order of the docs' table, too.
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
    """Tell whether instances of this class are emitted (the three bases never are)."""
    return event not in _BASES
