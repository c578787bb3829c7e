"""The fit: epochs of the training phases, each followed by validation and Trigger, between FitBegin and FitEnd."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import dataclass

from fluxcb._declare.control import Cancel, CancelEpoch, CancelFitting, CancelStep, RewindFitting
from fluxcb._declare.events import FitBegin, FitEnd
from fluxcb._declare.phases import Phase
from fluxcb._declare.schedules import positive
from fluxcb._declare.turns import InTurn
from fluxcb._errors import DeclarationError
from fluxcb._run.ended_schedules import scheduled_rates, warn_of_ended_schedules
from fluxcb._run.engine import refuse_rewinds
from fluxcb._run.epochs import Epoch, run_epoch
from fluxcb._run.interrupts import PREEMPTED, Interrupt
from fluxcb._run.learner_core import LearnerCore
from fluxcb._run.preempted import warn_of_preemption
from fluxcb._run.repeated_iterators import refuse_repeated_iterators
from fluxcb._run.resume import warn_of_repeated
from fluxcb._run.rewind import Rewinding, RewindTarget
from fluxcb._run.switches import apply_switches, end_switches
from fluxcb._run.unended_epochs import warn_of_restarted_data, warn_of_single_epoch

__all__ = ["FitLength", "describe_error", "run_fit"]


@dataclass(frozen=True)
class FitLength:
    """How long a fit is.

    Attributes:
        epochs: Number of epochs to train, or None if `steps` determines the length.
        steps: Number of steps to train, or None if `epochs` determines the length.
        steps_per_epoch: Length of an epoch (steps), or None for one pass over the data.
        owner: What `fit` belongs to, for messages: `learner` or `population`.

    Raises:
        DeclarationError: Not exactly one of `epochs` and `steps` is given, or a number is not positive.
    """

    epochs: int | None
    steps: int | None
    steps_per_epoch: int | None
    owner: str = "learner"

    def __post_init__(self) -> None:
        if (self.epochs is None) == (self.steps is None):
            raise DeclarationError(
                "`fit` takes exactly one of epochs and steps.",
                fix=f"write `{self.owner}.fit(10)` or `{self.owner}.fit(steps=10_000)`",
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
            done: Steps of this fit before that epoch. The number is negative if the fit began in the middle of the
                epoch: an earlier fit then ran that many steps of the epoch.
        """
        bounds = [self.steps_per_epoch, self.steps - done if self.steps is not None else None]
        return min((b for b in bounds if b is not None), default=None)

    def has_more(self, epochs_done: int, steps_done: int) -> bool:
        """Return whether epochs or steps remain."""
        return epochs_done < self.epochs if self.epochs is not None else steps_done < (self.steps or 0)


def run_fit(core: LearnerCore, phases: tuple[Phase, ...], length: FitLength, *, resumes: bool) -> str | None:
    """Run a fit.

    Args:
        core: The core of the Learner.
        phases: The phases to train, in order.
        length: The length of the fit.
        resumes: Whether it continues the fit that wrote the restored checkpoint. Its steps then count toward the
            length.

    Returns:
        The reason it ended early, or None if it ran to its end.

    Raises:
        DataError: The fit has several epochs, and the data of a phase is a one-shot iterator. No event was emitted.
        Exception: An error of a handler or of the data, raised after FitEnd has run; or an error at FitEnd itself.
    """
    fit, progress = core.state.fit, core.state.progress
    # After a restore in the middle of an epoch, the rest of that epoch is the first of `length.epochs`.
    began = (fit.epoch, fit.step) if resumes else (_epochs_done(core, phases), progress.step)
    ended = fit.ended if resumes else None
    if length.epochs is not None and ended is None:
        refuse_repeated_iterators(core, progress.epoch - began[0], length.epochs, length.steps_per_epoch)
    fit.epoch, fit.step = began
    warn_of_repeated(fit, length.epochs, length.steps, resumes=resumes)
    if length.steps is not None and length.steps_per_epoch is None:
        warn_of_single_epoch(core, length.steps)
    # An epoch without a length is a complete pass, so it always begins with the first batch.
    if (per_epoch := length.steps_per_epoch or length.steps) is not None and _has_more(core, length):
        begin = f"{length.epochs}" if length.steps is None else f"steps={length.steps}"
        warn_of_restarted_data(core, phases, f"fit({begin}, steps_per_epoch={per_epoch})")
    fit.begun, fit.finished = True, False
    fit.assigned.clear()
    if length.epochs is not None:
        progress.epochs = fit.epoch + length.epochs
    if length.steps is not None:
        progress.last_step = fit.step + length.steps
    # A single object serves all attempts, because it remembers the checkpoint that did not help.
    rewinding = Rewinding(core, phases)
    core.engine.programs.initial.warn_if_edited()
    rates = scheduled_rates(core)
    while True:
        target, reason = _run(core, phases, length, rewinding, resumes=resumes, ended=ended)
        if target is None:
            core.engine.programs.warn_about_changed_fields()
            fit.finished = reason is None
            if reason == PREEMPTED:
                warn_of_preemption(core.graph, core.state.progress)
            else:
                warn_of_ended_schedules(core, rates)
            return reason
        # To handlers, a rewind looks like a fit that ends and another fit that resumes. A callback that resumes exactly
        # therefore also rewinds exactly, without extra code.
        rewinding.rewind(target)
        resumes, ended = True, None


def _run(
    core: LearnerCore,
    phases: tuple[Phase, ...],
    length: FitLength,
    rewinding: Rewinding,
    *,
    resumes: bool,
    ended: str | None,
) -> tuple[RewindTarget | None, str | None]:
    """Run from FitBegin to FitEnd.

    Returns:
        The checkpoint to go back to, or None; and the reason the fit ended early, or None.
    """
    engine, emitter, fit, phase = core.engine, core.engine.emitter, core.state.fit, phases[0]
    interrupt = emitter.interrupt
    reason: str | None = None
    advice = ""
    failure: BaseException | None = None
    target: RewindTarget | None = None
    fit.ended, fit.restored = None, False
    emitter.fit_phase, engine.stopped, engine.can_rewind = phase, False, rewinding.can_rewind
    engine.between_epochs = functools.partial(apply_switches, core)
    # This describes an epoch that the fit resumes, because EpochBegin is not emitted again for it.
    resumed = fit.at is not None and fit.at.phase in _names(core.phase_set.training_groups()[0])
    core.state.progress.compiled = not resumed or engine.step_loop(phase).compiled
    # If a finished run is started again, FitBegin and FitEnd are emitted, but no step runs.
    complete = ended is not None or not _has_more(core, length)
    try:
        try:
            with contextlib.suppress(CancelEpoch, CancelStep):  # these only skip the rest of the moment here
                within_epoch = fit.at is not None
                begin = FitBegin(resumes=resumes, within_epoch=within_epoch, complete=complete, replays=fit.replays)
                emitter.emit(begin, phase)
            emitter.run_between_steps(None)
            core.leave_out_batches()
            if ended is not None:  # the saved run was stopped early, and resuming it does not train further
                raise CancelFitting(ended)
            _train(core, phases, length)
        except RewindFitting as request:  # without a checkpoint to go back to, it ends the fit like CancelFitting
            target, advice = rewinding.target_of(request), request.advice
            fit.ended = reason = rewinding.refusal if target is None else None
        except CancelFitting as cancel:
            fit.ended = reason = str(cancel) or "CancelFitting"
            advice = cancel.advice
        # FitStopping is emitted only while the train state is consistent, so that savers can save it. FitEnd also runs
        # after an exception, when it may be inconsistent.
        if target is None:
            if interrupt.requested:
                engine.stop(interrupt.reason, None)
                if not interrupt.preempted:
                    pressed = KeyboardInterrupt()
                    emitter.agreed_on(pressed)
                    raise pressed
                reason = reason or interrupt.reason
            engine.stop(reason, None)
    except BaseException as error:
        failure = error  # raised again after FitEnd, at which callbacks close their files
        emitter.report(error)  # before handlers of FitEnd run, because other processes wait for this one
    emitter.fit_phase, engine.can_rewind = None, refuse_rewinds
    core.snapshots.forget()  # drop a request whose moment an exception prevented; the next fit must not deliver it
    failures = _end(core, phase, _end_event(interrupt, target, failure, reason, advice))
    end_switches(core)
    if target is not None and failure is None and not failures:
        return target, None
    # An exception that ends the program outranks all others: Ctrl-C first, then SystemExit.
    for error in [e for e in failures if not isinstance(e, Exception)]:
        if failure is None or isinstance(error, KeyboardInterrupt):
            failures.remove(error)
            error.__cause__, failure = failure, error
            break
    if failure is None and interrupt.requested and not interrupt.preempted:  # Ctrl-C during FitEnd
        failure = KeyboardInterrupt()
    if reason is None and interrupt.preempted:  # SIGTERM while the last handlers ran
        reason = interrupt.reason
    if failure is not None:
        for other in failures:
            failure.add_note(f"and at FitEnd: {type(other).__name__}: {other}")
        raise failure
    # A single error keeps its class, so that callers can catch it.
    if len(failures) == 1:
        raise failures[0]
    if failures:
        raise BaseExceptionGroup("several callbacks failed at FitEnd", failures)
    return None, reason


def _end_event(
    interrupt: Interrupt, target: RewindTarget | None, failure: BaseException | None, reason: str | None, advice: str
) -> FitEnd:
    """Return the `FitEnd` event, which describes how the fit ended."""
    if target is not None:
        return FitEnd("rewinding", str(target.request))
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


def _epochs_done(core: LearnerCore, phases: tuple[Phase, ...]) -> int:
    """Return the number of finished epochs, without one that the fit continues in a training phase."""
    state, at = core.state, core.state.fit.at
    return state.progress.epoch - (at is not None and at.phase in {type(phase).name for phase in phases})


def _first_step(core: LearnerCore, group: Phase | InTurn) -> int:
    """Return the number of training steps before the first step of the next epoch."""
    state, at = core.state, core.state.fit.at
    return state.progress.step - (at.steps if at is not None and at.phase in _names(group) else 0)


def _names(group: Phase | InTurn) -> tuple[str, ...]:
    return group.names if isinstance(group, InTurn) else (type(group).name,)


def _has_more(core: LearnerCore, length: FitLength) -> bool:
    """Return whether the fit has steps left, or continues an epoch in which a checkpoint was written."""
    state, fit = core.state, core.state.fit
    return fit.at is not None or length.has_more(state.progress.epoch - fit.epoch, state.progress.step - fit.step)


def _train(core: LearnerCore, phases: tuple[Phase, ...], length: FitLength) -> None:
    engine = core.engine
    while _has_more(core, length):
        _train_epoch(core, length)
        if engine.stopped:  # by a signal within the epoch; an unfinished epoch has no Trigger
            return
        _validate(core)
        if engine.stopped:
            return
        engine.trigger(phases[0])  # after validation, so that saved and printed values include its metrics
        if engine.emitter.interrupt.requested:
            return


def _train_epoch(core: LearnerCore, length: FitLength) -> None:
    """Run an epoch of each training phase or `InTurn`, except those that ran before a restored checkpoint."""
    engine, state, groups = core.engine, core.state, core.phase_set.training_groups()
    fit, at, before = state.fit, state.fit.at, state.progress.step
    first = 0
    if at is not None:
        found = [i for i, group in enumerate(groups) if at.phase in _names(group)]
        if not found:  # the checkpoint was written during validation, so the training of this epoch is done
            return
        first = found[0]
    for group in groups[first:]:
        limit = length.limit(_first_step(core, group) - fit.step)
        if limit is not None and limit <= 0:  # the preceding phases ran the remaining steps of the fit
            break
        phases, turns = (group.phases, group.steps) if isinstance(group, InTurn) else ((group,), ())
        # Callbacks may have replaced the data at Trigger, so the stream is looked up for each epoch.
        streams = {phase: core.stream(phase) for phase in phases}
        continues_stream, shares_epoch = length.steps_per_epoch is not None, group is not groups[0]
        run_epoch(
            engine,
            Epoch(engine, streams, turns, limit=limit, continues_stream=continues_stream, shares_epoch=shares_epoch),
        )
        if engine.stopped:
            return
    # Without this check, a fit whose handlers cancel every step would loop forever.
    if length.steps is not None and state.progress.step == before and at is None:
        raise CancelFitting("an epoch ran no step, so `steps` would never be reached")


def _validate(core: LearnerCore) -> None:
    """Run an epoch of each validation phase, except those that ran before a restored checkpoint."""
    at, state = core.state.fit.at, core.state
    for phase in core.phases:
        if type(phase).trains or type(phase).name not in core.streams:
            continue
        if state.fit.at is not None and state.fit.at.phase != type(phase).name:
            continue
        # A validation epoch is always one complete pass.
        run_epoch(core.engine, Epoch(core.engine, {phase: core.stream(phase)}, limit=None, continues_stream=False))
        if core.engine.stopped:
            return
    if at is not None:
        state.fit.at = None


def _end(core: LearnerCore, phase: Phase, event: FitEnd) -> list[BaseException]:
    """Run every FitEnd handler, even if others fail; return all exceptions, including KeyboardInterrupt."""
    failures = core.engine.emitter.deferred.finish()
    for call in core.engine.emitter.plan.calls(FitEnd, type(phase)):
        try:
            core.engine.emitter.run_calls((call,), event, phase)
        # A cancel at FitEnd has nothing left to cancel.
        except Cancel:
            continue
        except BaseException as error:
            failures.append(error)
    return failures
