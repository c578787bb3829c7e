"""`FitSummary`: prints how a fit ended, which files were written, and what to do next."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from fluxcb._declare.access import Read
from fluxcb._declare.callback import Callback, unwrap
from fluxcb._declare.dispatch import shown_path
from fluxcb._declare.events import FitBegin, FitEnd
from fluxcb._declare.handlers import on
from fluxcb._declare.phases import Phase
from fluxcb.callbacks.checkpointer import Checkpointer
from fluxcb.callbacks.console import console_for, show_block
from fluxcb.callbacks.printer import MetricsPrinter
from fluxcb.callbacks.progress import ProgressBar
from fluxcb.logging.consoles import text_file

__all__ = ["FitSummary"]


class FitSummary(Callback):
    """Print at the end of a fit why it ended, which files the callbacks have written, and what to do next.

    The files are those that callbacks return from `output_locations`. The last line is the advice of the callback that
    ended the fit (`CancelFitting(reason, advice=...)`). Without such advice, it tells how to use the trained model or
    continue the training.

    Args:
        file: Where to print; standard output by default.

    Access:
        callbacks: Read.
        model: Read.

    Runs:
        FitBegin, FitEnd x Phase (host).

    Cost:
        Up to three lines per fit.

    Example:
        >>> import io, jax.numpy as jnp, optax, fluxcb
        >>> from fluxcb.callbacks import FitSummary
        >>> learner = fluxcb.Learner.from_loss(
        ...     {"w": jnp.ones(())},
        ...     lambda params, batch, key: jnp.mean(params["w"] * batch),
        ...     optax.sgd(0.1),
        ...     data=[jnp.ones(2)] * 3,
        ...     callbacks=[FitSummary(file := io.StringIO())],
        ...     default_callbacks=False,
        ... )
        >>> history = learner.fit(2)
        >>> print(file.getvalue().rstrip())
        Training finished after epoch 2, step 6 (... s).
        Next: `learner.params` has the trained parameters, `learner.fit(n)` trains further.
    """

    chief_only = True  # one process prints

    def __init__(self, file: IO[str] | None = None) -> None:
        self.file = text_file(file, "FitSummary")
        self._began: tuple[float, int] | None = None  # time (s) and finished steps at the beginning of the fit

    def stateaccess(self) -> Mapping[str, Any]:
        """Return the access; see the class."""
        return {"callbacks": Read(), "model": Read()}

    def runafter(self) -> tuple[type[Callback], ...]:
        """Return the other default callbacks that print, so that the summary is printed last."""
        return (MetricsPrinter, ProgressBar)

    @on(FitBegin, Phase, access={})
    def begin_fit(self, event: FitBegin, phase: Phase, learner: Any) -> None:
        """Record the time."""
        if self._began is None:  # FitBegin is emitted again when the run rewinds
            self._began = time.monotonic(), learner.progress.step

    @on(FitEnd, Phase)
    def end_fit(self, event: FitEnd, phase: Phase, learner: Any) -> None:
        """Print the summary."""
        began = self._began
        if event.outcome != "rewinding":
            self._began = None
        trained = began is not None and learner.progress.step > began[1]
        seconds = time.monotonic() - began[0] if began is not None else 0.0
        lines = [_ending(event, learner.progress, seconds, trained)]
        # The message of an error before the first step already tells what to do.
        if event.outcome != "rewinding" and (trained or event.outcome != "failed"):
            locations = list(_locations(learner.callbacks)) if trained else []
            lines += [f"Wrote {', '.join(locations)}."] if locations else []
            lines.append(f"Next: {_advice(event, learner)}.")
        show_block(console_for(self.file), lines)


def _ending(event: FitEnd, progress: Any, seconds: float, trained: bool) -> str:
    """Return how the fit ended, as one sentence."""
    end = f"epoch {progress.epoch}, step {progress.step}"
    if event.outcome == "finished":
        return f"Training finished after {end} ({seconds:.1f} s)." if trained else f"Training was complete at {end}."
    reason = (event.reason or "").partition("\n")[0].removesuffix(".")
    if event.outcome == "failed" and not trained:
        return f"Training failed before its first step: {reason}."
    of = f" of {progress.epochs}" if progress.epochs else ""
    where = f"in epoch {progress.epoch}{of}, after step {progress.step}"
    if event.outcome == "stopped" and not trained:
        return f"Training had stopped {where}: {reason}."
    if event.outcome == "interrupted":
        reason = {"KeyboardInterrupt": "Ctrl-C", "preempted": "SIGTERM"}.get(reason, reason)
    verb = {"interrupted": "was interrupted", "rewinding": "rewinds"}.get(event.outcome, event.outcome)
    return f"Training {verb} {where}: {reason}."


def _locations(callbacks: Any) -> Iterator[str]:
    """Yield the locations that the callbacks have written to, without duplicates."""
    seen: set[str] = set()
    for callback in callbacks:
        for place in callback.output_locations():
            shown = shown_path(str(place)) if isinstance(place, Path) else place
            if shown not in seen and (not isinstance(place, Path) or place.exists()):
                seen.add(shown)
                yield f"{shown} ({type(unwrap(callback)).__name__})"


def _advice(event: FitEnd, learner: Any) -> str:
    """Return what to do next, as a clause without a period."""
    if event.advice:
        return event.advice
    saves = any(isinstance(unwrap(callback), Checkpointer) for callback in learner.callbacks)
    if event.outcome in ("failed", "interrupted"):
        if saves:
            return "`learner.fit(..., resume=True)` continues from the last checkpoint, also in a new process"
        return (
            "`learner.fit(n)` continues in this process; with a `Checkpointer` among the callbacks, "
            "`learner.fit(..., resume=True)` continues in a new one"
        )
    if learner.model is None:  # built with `Learner.from_loss`
        return "`learner.params` has the trained parameters, `learner.fit(n)` trains further"
    return "`learner.predict(data)` applies the model, `learner.fit(n)` trains further"
