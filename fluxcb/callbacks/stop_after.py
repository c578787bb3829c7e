"""`StopAfter`: end a fit after a time, also in the middle of an epoch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from time import monotonic
from typing import Any

from fluxcb._declare.access import Append
from fluxcb._declare.callback import Callback
from fluxcb._declare.control import PauseFitting
from fluxcb._declare.dispatch import Entry
from fluxcb._declare.events import Event, FitBegin, FitEnd, StepEnd
from fluxcb._declare.handlers import on
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._declare.schedules import EverySeconds, Schedule
from fluxcb._errors import DeclarationError

__all__ = ["StopAfter"]

_PRECISION = 0.01  # part of the limit between two looks at the clock, and 1 s at most


class StopAfter(Callback):
    """End the fit at the first training step after a time, as a queue's time limit asks for.

    The fit ends between two steps, as SIGTERM ends it: `fit(..., resume=True)` goes on from there, and has all of the
    time again. For a budget of training time that ends a run for good, use `EarlyStopping(TimeLimit(seconds))`, which
    looks after each epoch.

    Args:
        seconds: The time (seconds).

    Access:
        control: Append.

    Runs:
        FitBegin, FitEnd x Phase (host).
        StepEnd x AbstractTrainingPhase (host, every hundredth of the time, at least once a second).

    Cost:
        Fetches nothing. A window ends when it is time to look at the clock.

    Raises:
        DeclarationError: `seconds` is no finite number above 0.

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

    def __init__(self, seconds: float) -> None:
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
            raise DeclarationError(
                f"`seconds` of `StopAfter` must be a finite number above 0, not {seconds!r}.",
                fix="e.g. `StopAfter(seconds=3600)`",
            )
        self.seconds = seconds
        self._schedule = EverySeconds(min(_PRECISION * seconds, 1.0))
        self._began: float | None = None

    def stateaccess(self) -> Mapping[str, Any]:
        """Return what it reads and writes; see the class."""
        return {"control": Append()}

    def handlers(self) -> list[Entry]:
        """Return the handlers, that of StepEnd with this instance's schedule."""
        return [replace(e, when=self._schedule) if e.event is StepEnd else e for e in super().handlers()]

    def entry_for(self, event: type[Event], phase: type[Phase]) -> tuple[Callback, Entry, tuple[Schedule, ...]] | None:
        """Return who handles a moment, at StepEnd with this instance's schedule."""
        found = super().entry_for(event, phase)
        if found is None or found[1].event is not StepEnd:
            return found
        return self, replace(found[1], when=self._schedule), (self._schedule,)

    @on(FitBegin, Phase, access={})
    def begin(self, event: Event, phase: Phase, learner: Any) -> None:
        """Start the clock."""
        self._began = monotonic()

    @on(StepEnd, AbstractTrainingPhase)
    def look(self, event: Event, phase: Phase, learner: Any) -> None:
        """End the fit if the time is over; a loop written by hand has no fit, and counts from its first look."""
        now = monotonic()
        if self._began is None:
            self._began = now
        if now - self._began >= self.seconds:
            raise PauseFitting(f"the fit has taken {now - self._began:.3g} s (limit {self.seconds:g} s)")

    @on(FitEnd, Phase, access={})
    def end(self, event: Event, phase: Phase, learner: Any) -> None:
        """Stop the clock."""
        self._began = None

    def __repr__(self) -> str:
        return f"StopAfter({self.seconds!r})"
