"""`StopAfter`, which ends a fit after a time limit, even in the middle of an epoch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from time import monotonic
from typing import Any

from fluxcb._calls import entry_point
from fluxcb._declare.access import Append
from fluxcb._declare.callback import Callback
from fluxcb._declare.control import PauseFitting
from fluxcb._declare.events import Event, FitBegin, FitEnd, StepEnd
from fluxcb._declare.handlers import Handler, on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._declare.schedules import EverySeconds
from fluxcb.callbacks.arguments import finite_number

__all__ = ["StopAfter"]

_PRECISION = 0.01  # time between two checks of the clock as a fraction of the limit; at most 1 s


class StopAfter(Callback):
    """End the fit after a time limit, such as that of a job queue.

    The fit ends between two training steps, as after SIGTERM, and `fit(..., resume=True)` continues from there. Each
    fit has the full time. To limit the total training time of a run, use `EarlyStopping(TimeLimit(seconds))`, which
    checks the time after each epoch.

    Args:
        seconds: The time limit of a fit (seconds).

    Access:
        control: Append.

    Runs:
        FitBegin, FitEnd x Phase (host).
        StepEnd x AbstractTrainingPhase (host, every hundredth of the time limit, at least once a second).

    Cost:
        Fetches nothing. A window ends whenever the clock is checked.

    Raises:
        DeclarationError: `seconds` is not a finite number above 0.

    Example:
        >>> import jax.numpy as jnp, optax, fluxcb
        >>> from fluxcb.callbacks import StopAfter
        >>> learner = fluxcb.Learner.from_loss(
        ...     {"w": jnp.ones(())},
        ...     lambda params, batch, key: jnp.mean(params["w"] * batch),
        ...     optax.sgd(0.1),
        ...     data=[jnp.ones(2)] * 3,
        ...     callbacks=[StopAfter(seconds=0.2)],
        ...     default_callbacks=False,
        ... )
        >>> history = learner.fit(1_000_000)
        >>> learner.stop_reason
        'the fit has taken ... s (limit 0.2 s)'

    Source:
        PyTorch Ignite, `TimeLimit`; Lightning, `Timer`.
    """

    @entry_point(
        fixes={
            "steps": "for a number of steps, write `learner.fit(steps=...)`; `StopAfter` takes `seconds`",
            "epochs": "for a number of epochs, write `learner.fit(epochs)`; `StopAfter` takes `seconds`",
        }
    )
    def __init__(self, seconds: float) -> None:
        finite_number(seconds, "`seconds` of `StopAfter`", above=0)
        self.seconds = seconds
        self._schedule = EverySeconds(min(_PRECISION * seconds, 1.0))
        self._began: float | None = None

    def stateaccess(self) -> Mapping[str, Any]:
        """Return the paths that the callback reads and writes."""
        return {"control": Append()}

    def handlers(self) -> list[Handler]:
        """Return the handlers, with a schedule for StepEnd that depends on the time limit."""
        return [replace(h, when=self._schedule) if h.event is StepEnd else h for h in super().handlers()]

    @on(FitBegin, Phase, access={})
    def begin(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Start the clock."""
        self._began = monotonic()

    @on(StepEnd, AbstractTrainingPhase)
    def look(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """End the fit if the time limit is exceeded."""
        now = monotonic()
        if self._began is None:  # a hand-written loop has no FitBegin, so the time counts from its first step
            self._began = now
        if now - self._began >= self.seconds:
            raise PauseFitting(f"the fit has taken {now - self._began:.3g} s (limit {self.seconds:g} s)")

    @on(FitEnd, Phase, access={})
    def end(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Stop the clock."""
        self._began = None

    def __repr__(self) -> str:
        return f"StopAfter({self.seconds!r})"
