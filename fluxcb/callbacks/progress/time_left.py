"""`EstimatedTimeLeft`: estimate the remaining time of a fit."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from time import monotonic
from typing import IO, Any

from fluxcb._declare.callback import Callback
from fluxcb._declare.events import Event, FitBegin, FitEnd, Trigger
from fluxcb._declare.handlers import on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._declare.schedules import positive
from fluxcb.callbacks.progress.console import console_for, print_line
from fluxcb.logging.consoles import text_file

__all__ = ["EstimatedTimeLeft"]


class EstimatedTimeLeft(Callback):
    """Print an estimate of the remaining time after each epoch, based on the duration of the last epochs.

    The duration of an epoch is the time between two Triggers, which includes validation and callbacks. The first epoch
    is measured from the beginning of the fit. Nothing is printed after the last epoch, or if the number of epochs is
    unknown (`fit(steps=...)`). The first epoch includes compilation, which the median ignores from the third epoch on.

    Args:
        last_k_epochs: Number of recent epochs that the estimate uses.
        median: Whether to use the median of their durations instead of the mean.
        file: Where to print; standard output by default.

    Access:
        None.

    Runs:
        FitBegin, FitEnd x Phase, Trigger x AbstractTrainingPhase (host).

    Cost:
        Prints one line per epoch.

    Raises:
        DeclarationError: `last_k_epochs` is not a positive integer.

    Example:
        >>> import io, jax.numpy as jnp, optax, fluxcb
        >>> from fluxcb.callbacks import EstimatedTimeLeft
        >>> learner = fluxcb.Learner.from_loss(
        ...     {"w": jnp.ones(())},
        ...     lambda params, batch, key: jnp.mean(params["w"] * batch),
        ...     optax.sgd(0.1),
        ...     data=[jnp.ones(2)],
        ...     callbacks=[EstimatedTimeLeft(file=(file := io.StringIO()))],
        ...     default_callbacks=False,
        ... )
        >>> history = learner.fit(2)
        >>> print(file.getvalue().rstrip())
        Estimated Time Left: ... second...

    Source:
        tensorpack, `EstimatedTimeLeft`, which prints nothing inside a periodic wrapper.
    """

    def __init__(self, last_k_epochs: int = 5, median: bool = True, *, file: IO[str] | None = None) -> None:
        self.last_k_epochs = positive(last_k_epochs, "`last_k_epochs` of `EstimatedTimeLeft`")
        self.median = median
        self.file = text_file(file, "EstimatedTimeLeft")
        self.seconds: list[float] = []
        self._since: tuple[int, float] | None = None  # the epoch and the time of the last Trigger

    def state_dict(self) -> dict[str, Any]:
        """Return the durations of the last epochs, and the last epoch with the time since it ended (seconds)."""
        since = (self._since[0], monotonic() - self._since[1]) if self._since is not None else None
        return {"seconds": list(self.seconds), "since": since}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the durations. The clock continues from now."""
        self.seconds = list(state["seconds"])
        self._since = (state["since"][0], monotonic() - state["since"][1]) if state["since"] is not None else None

    @on(FitBegin, Phase)
    def begin(self, event: FitBegin, phase: Phase, learner: LearnerView) -> None:
        """Start the clock, unless the fit resumes and the clock was restored."""
        if not event.resumes:
            self._since = learner.progress.epoch, monotonic()

    @on(Trigger, AbstractTrainingPhase)
    def estimate(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Record the duration of the epoch, and print the remaining time."""
        epoch, now = learner.progress.epoch, monotonic()
        before, self._since = self._since, (epoch, now)
        if before is None or epoch == before[0]:
            return
        # Inside a periodic wrapper, several epochs may have passed.
        self.seconds = [*self.seconds, (now - before[1]) / (epoch - before[0])][-self.last_k_epochs :]
        typical = statistics.median(self.seconds) if self.median else statistics.fmean(self.seconds)
        left = (learner.progress.epochs - epoch) * typical
        if left > 0:
            print_line(console_for(self.file), f"Estimated Time Left: {_in_words(left)}")

    @on(FitEnd, Phase)
    def end(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Stop the clock."""
        self._since = None

    def __repr__(self) -> str:
        return f"EstimatedTimeLeft({self.last_k_epochs})"


def _in_words(seconds: float) -> str:
    """Return a time in words. Fractions of a second are only shown below one minute."""
    if seconds < 60:
        return _counted(seconds, "second")
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = zip((days, hours, minutes, rest), ("day", "hour", "minute", "second"), strict=True)
    return " ".join(_counted(number, unit) for number, unit in parts if number)


def _counted(number: float, unit: str) -> str:
    text = f"{number}" if isinstance(number, int) else f"{number:.3g}"
    return f"{text} {unit}{'s' if number > 1 else ''}"
