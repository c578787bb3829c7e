"""Turning measuring and tracing of handlers on and off, between two fits."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from fluxcb._errors import DeclarationError
from fluxcb._run.learner_core import LearnerCore
from fluxcb._run.timeline import recorded_timeline

__all__ = ["measure", "trace"]


def measure(core: LearnerCore, on: bool) -> None:
    """Start measuring handlers from zero, or stop."""
    _refuse_fitting(core, "Measuring", "call `learner.callbacks.measure()` before `fit`")
    meter = core.state.meter
    if on:
        meter.start()
    meter.on = on
    # Plans call handlers directly as long as nothing measures them.
    core.rewrap_handlers()


@contextlib.contextmanager
def trace(core: LearnerCore, path: str | os.PathLike[str], max_events: int) -> Iterator[None]:
    """Record a timeline, and write it when the context is left."""
    _refuse_fitting(core, "Tracing", "enter `learner.callbacks.trace(...)` before `fit`")
    meter = core.state.meter
    if meter.timeline is not None:
        raise DeclarationError(
            "This Learner is already being traced.",
            why="a Learner has one timeline",
            fix="leave the other `with learner.callbacks.trace(...)` first",
        )
    with recorded_timeline(path, core.state.progress, max_events) as meter.timeline:
        try:
            # The wrapper of the handlers depends on the timeline, which has just been set.
            core.rewrap_handlers()
            yield
        finally:
            # Handlers lose their wrappers again, so that later fits pay nothing.
            meter.timeline = None
            core.rewrap_handlers()


def _refuse_fitting(core: LearnerCore, what: str, fix: str) -> None:
    if core.fitting or core.engine.running:
        raise DeclarationError(
            f"{what} cannot be turned on or off while the Learner is fitting.",
            why="the plan of a running fit is fixed",
            fix=fix,
        )
