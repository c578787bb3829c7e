"""The fit: epochs of training, each followed by validation and Trigger, between FitBegin and FitEnd."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from fluxcb._declare.control import Cancel, CancelEpoch, CancelFitting, CancelStep, RewindFitting
from fluxcb._declare.events import FitBegin, FitEnd
from fluxcb._declare.phases import Phase
from fluxcb._declare.schedules import positive
from fluxcb._errors import DeclarationError
from fluxcb._run.assembly import Assembly
from fluxcb._run.engine import refuse_rewinds
from fluxcb._run.interrupts import Interrupt
from fluxcb._run.rewinding import Rewinding, WayBack

__all__ = ["FitLength", "describe_error", "run_fit"]


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
        """Return the maximum number of steps of the next epoch, counted from the first step of the epoch.

        Args:
            done: Steps of this fit that ran before that epoch. The number is negative if the fit began in the middle of
                the epoch: an earlier fit then ran that many steps of the epoch.
        """
        bounds = [self.steps_per_epoch, self.steps - done if self.steps is not None else None]
        return min((b for b in bounds if b is not None), default=None)

    def goes_on(self, epochs_done: int, steps_done: int) -> bool:
        """Tell whether there is more to train."""
        return epochs_done < self.epochs if self.epochs is not None else steps_done < (self.steps or 0)


def run_fit(parts: Assembly, phase: Phase, length: FitLength, *, resumes: bool) -> str | None:
    """Run a fit.

    Args:
        parts: The parts of the Learner.
        phase: The phase to train.
        length: How long it is.
        resumes: Whether it goes on with the fit that a checkpoint was written in, which counts to its length.

    Returns:
        Why it ended early, or None if it ran to its end.

    Raises:
        Exception: What a handler or the data raised, after FitEnd has run; failures at FitEnd itself.
        KeyboardInterrupt: Ctrl-C was pressed.
    """
    fit = parts.state.fit
    # After a restore in the middle of an epoch, the rest of that epoch is the first of `length.epochs`.
    began = (fit.epoch, fit.step) if resumes else (_epochs_done(parts, phase), parts.state.step)
    ended = fit.ended if resumes else None
    fit.epoch, fit.step = began
    if length.epochs is not None:
        parts.state.epochs = fit.epoch + length.epochs
    if length.steps is not None:
        parts.state.last_step = fit.step + length.steps
    rewinding = Rewinding(parts, phase)
    while True:
        way, reason = _run(parts, phase, length, rewinding, resumes=resumes, ended=ended)
        if way is None:
            return reason
        rewinding.go(way)
        resumes, ended = True, None


def _run(
    parts: Assembly, phase: Phase, length: FitLength, rewinding: Rewinding, *, resumes: bool, ended: str | None
) -> tuple[WayBack | None, str | None]:
    """Run from FitBegin to FitEnd.

    Returns:
        Where the run goes back to, or None; why the fit ended early, or None.
    """
    engine, fit = parts.engine, parts.state.fit
    reason: str | None = None
    advice = ""
    failure: BaseException | None = None
    way: WayBack | None = None
    fit.ended, fit.restored = None, False
    engine.fit_phase, engine.stopped, engine.accepts = phase, False, rewinding.accepts
    # This only announces an epoch that the fit resumes, because EpochBegin is not emitted again for it.
    resumed = fit.at is not None and fit.at.phase == type(phase).name
    parts.state.compiled = not resumed or engine.steps(phase).compiled
    try:
        try:
            with contextlib.suppress(CancelEpoch, CancelStep):  # where none runs, they skip the rest of the moment
                engine.emit(FitBegin(resumes=resumes), phase)
            engine.give_snapshots(None)
            if ended is not None:
                raise CancelFitting(ended)
            _train(parts, phase, length)
        except RewindFitting as asked:
            way, advice = rewinding.way_back(asked), asked.advice
            fit.ended = reason = rewinding.refusal if way is None else None
        except CancelFitting as cancel:
            fit.ended = reason = str(cancel) or "CancelFitting"
            advice = cancel.advice
        if way is None:
            if engine.interrupt.requested:
                engine.stop(engine.interrupt.reason, None)
                if not engine.interrupt.preempted:
                    raise KeyboardInterrupt
                reason = reason or engine.interrupt.reason
            engine.stop(reason, None)
    except BaseException as error:
        failure = error
    engine.fit_phase, engine.accepts = None, refuse_rewinds
    parts.state.snapshots.forget()
    failures = _end(parts, phase, _end_event(engine.interrupt, way, failure, reason, advice))
    if way is not None and failure is None and not failures:
        return way, None
    for error in [e for e in failures if not isinstance(e, Exception)]:  # Ctrl-C again, or sys.exit
        if failure is None or isinstance(error, KeyboardInterrupt):
            failures.remove(error)
            error.__cause__, failure = failure, error
            break
    if failure is None and engine.interrupt.requested and not engine.interrupt.preempted:  # during FitEnd
        failure = KeyboardInterrupt()
    if reason is None and engine.interrupt.preempted:  # while the last handlers ran
        reason = engine.interrupt.reason
    if failure is not None:
        for other in failures:
            failure.add_note(f"and at FitEnd: {type(other).__name__}: {other}")
        raise failure
    if len(failures) == 1:
        raise failures[0]
    if failures:
        raise BaseExceptionGroup("several callbacks failed at FitEnd", failures)
    return None, reason


def _end_event(
    interrupt: Interrupt, way: WayBack | None, failure: BaseException | None, reason: str | None, advice: str
) -> FitEnd:
    """Return the `FitEnd` event, which describes how the fit ended."""
    if way is not None:
        return FitEnd("rewinding", str(way.asked))
    if isinstance(failure, KeyboardInterrupt):
        return FitEnd("interrupted", KeyboardInterrupt.__name__, error=failure)
    if failure is None and interrupt.requested and reason == interrupt.reason:
        return FitEnd("interrupted", reason)
    if failure is not None:
        return FitEnd("failed", describe_error(failure), error=failure)
    return FitEnd("finished" if reason is None else "stopped", reason, advice=advice)


def describe_error(error: BaseException) -> str:
    """Return an exception's class and message in the form of `learner.stop_reason`."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _epochs_done(parts: Assembly, phase: Phase) -> int:
    """Return how many epochs have been finished: all but one that is to be gone on with."""
    state, at = parts.state, parts.state.fit.at
    return state.epoch - (at is not None and at.phase == type(phase).name)


def _first_step(parts: Assembly, phase: Phase) -> int:
    """Return how many training steps ran before the first step of the epoch that runs next."""
    state, at = parts.state, parts.state.fit.at
    return state.step - (at.step_in_epoch if at is not None and at.phase == type(phase).name else 0)


def _train(parts: Assembly, phase: Phase, length: FitLength) -> None:
    engine, state = parts.engine, parts.state
    fit, stream = state.fit, length.steps_per_epoch is not None
    while state.fit.at is not None or length.goes_on(state.epoch - fit.epoch, state.step - fit.step):
        at = state.fit.at
        if at is None or at.phase == type(phase).name:
            # The callbacks may have exchanged the data at Trigger, so it is looked up anew.
            done, before = _first_step(parts, phase) - fit.step, state.step
            engine.run_epoch(phase, parts.feed(phase), limit=length.limit(done), goes_on=stream)
            if engine.stopped:
                return
            if length.steps is not None and state.step == before and at is None:
                raise CancelFitting("an epoch ran no step, so `steps` would never be reached")
        _validate(parts, phase)
        if engine.stopped:
            return
        engine.trigger(phase)
        if engine.interrupt.requested:
            return


def _validate(parts: Assembly, phase: Phase) -> None:
    """Run an epoch of each phase that does not train; those that a checkpoint lies behind have been."""
    at, state = parts.state.fit.at, parts.state
    for other in parts.phases:
        if other is phase or type(other).trains or type(other).name not in parts.feeds:
            continue
        if state.fit.at is not None and state.fit.at.phase != type(other).name:
            continue
        parts.engine.run_epoch(other, parts.feed(other), limit=None, goes_on=False)
        if parts.engine.stopped:
            return
    if at is not None:
        state.fit.at = None


def _end(parts: Assembly, phase: Phase, event: FitEnd) -> list[BaseException]:
    """Run every FitEnd handler, whatever the others do; return what they raised, Ctrl-C as well."""
    failures: list[BaseException] = []
    for call in parts.engine.plan.calls(FitEnd, type(phase)):
        try:
            parts.engine.run_calls((call,), event, phase)
        except Cancel:
            continue
        except BaseException as error:
            failures.append(error)
    return failures
