"""The fit: epochs of training, each followed by validation and Trigger, between FitBegin and FitEnd."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from fluxcb._declare.control import Cancel, CancelEpoch, CancelFitting, CancelStep
from fluxcb._declare.events import FitBegin, FitEnd
from fluxcb._declare.phases import Phase
from fluxcb._declare.schedules import positive
from fluxcb._errors import DeclarationError
from fluxcb._run.assembly import Assembly

__all__ = ["FitLength", "run_fit"]


@dataclass(frozen=True)
class FitLength:
    """How long a fit is.

    Attributes:
        epochs: Epochs to train, or None if steps count.
        steps: Steps to train, or None if epochs count.
        steps_per_epoch: Length of an epoch (steps), or None for one pass over the data.

    Raises:
        DeclarationError: Not exactly one of epochs and steps, or one that is not positive.
    """

    epochs: int | None
    steps: int | None
    steps_per_epoch: int | None

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            raise DeclarationError(
                "`fit` takes exactly one of epochs and steps.",
                fix="write `learner.fit(10)` or `learner.fit(steps=10_000)`",
            )
        for value, what in (
            (self.epochs, "The number of epochs of `fit`"),
            (self.steps, "`steps` of `fit`"),
            (self.steps_per_epoch, "`steps_per_epoch` of `fit`"),
        ):
            if value is not None:
                positive(value, what)

    def limit(self, done: int) -> int | None:
        """Return how many steps the next epoch may have, with `done` steps of the fit finished."""
        bounds = [self.steps_per_epoch, self.steps - done if self.steps is not None else None]
        return min((b for b in bounds if b is not None), default=None)

    def goes_on(self, epochs_done: int, steps_done: int) -> bool:
        """Tell whether there is more to train."""
        return epochs_done < self.epochs if self.epochs is not None else steps_done < (self.steps or 0)


def run_fit(parts: Assembly, phase: Phase, length: FitLength) -> str | None:
    """Run a fit.

    Returns:
        Why it ended early, or None if it ran to its end.

    Raises:
        Exception: What a handler or the data raised, after FitEnd has run; failures at FitEnd itself.
        KeyboardInterrupt: Ctrl-C was pressed.
    """
    engine = parts.engine
    reason: str | None = None
    failure: BaseException | None = None
    try:
        with contextlib.suppress(CancelEpoch, CancelStep):  # where none runs, they skip the rest of the moment
            engine.emit(FitBegin(), phase)
        _train(parts, phase, length)
        if engine.interrupt.requested:
            raise KeyboardInterrupt
    except CancelFitting as cancel:
        reason = str(cancel) or "CancelFitting"
    except BaseException as error:
        failure = error
    failures = _end(parts, phase)
    if failure is None and engine.interrupt.requested:  # pressed beside a cancel, or during FitEnd
        failure = KeyboardInterrupt()
    if failure is not None:
        for other in failures:
            failure.add_note(f"and at FitEnd: {type(other).__name__}: {other}")
        raise failure
    if len(failures) == 1:
        raise failures[0]
    if failures:
        raise ExceptionGroup("several callbacks failed at FitEnd", failures)
    return reason


def _train(parts: Assembly, phase: Phase, length: FitLength) -> None:
    engine, state = parts.engine, parts.state
    first_step, epochs_done = state.step, 0
    stream = length.steps_per_epoch is not None
    while length.goes_on(epochs_done, state.step - first_step):
        # The callbacks may have exchanged the data at Trigger, so it is looked up anew.
        before = state.step
        engine.run_epoch(phase, parts.feed(phase), limit=length.limit(state.step - first_step), goes_on=stream)
        if length.steps is not None and state.step == before and not engine.interrupt.requested:
            raise CancelFitting("an epoch ran no step, so `steps` would never be reached")
        if not engine.interrupt.requested:
            _validate(parts, phase)
        if engine.interrupt.requested:
            return
        engine.trigger(phase)
        epochs_done += 1


def _validate(parts: Assembly, phase: Phase) -> None:
    for other in parts.phases:
        if other is not phase and not type(other).trains and type(other).name in parts.feeds:
            parts.engine.run_epoch(other, parts.feed(other), limit=None, goes_on=False)


def _end(parts: Assembly, phase: Phase) -> list[Exception]:
    """Run every FitEnd handler, whatever the others do; return what they raised."""
    failures: list[Exception] = []
    event = FitEnd()
    for call in parts.engine.plan.calls(FitEnd, type(phase)):
        try:
            parts.engine.run_calls((call,), event, phase)
        except Cancel:
            continue
        except Exception as error:
            failures.append(error)
    return failures
