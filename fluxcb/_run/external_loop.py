"""`CallbacksHook`: callbacks inside a training loop that fluxcb does not run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

from fluxcb._calls import entry_point
from fluxcb._declare.control import Cancel, CancelEpoch, CancelFitting, CancelStep, RewindFitting
from fluxcb._declare.events import EpochBegin, EpochEnd, Event, FitBegin, FitEnd
from fluxcb._errors import DeclarationError
from fluxcb._run.external_refusals import (
    check_step_number,
    not_begun,
    step_not_begun,
    warn_of_idle,
    warn_of_missed,
    warn_of_stale_state,
)
from fluxcb._run.external_state import ExternalTree
from fluxcb._run.external_steps import ExternalStepLoop
from fluxcb._run.external_values import checked_values
from fluxcb._run.fit_loop import describe_error
from fluxcb._run.learner import Learner
from fluxcb._run.resume import lock_run, resume_run, unlock_run
from fluxcb._run.rewind import Rewinding

__all__ = ["CallbacksHook"]


class CallbacksHook:
    """Callbacks as a hand-written training loop calls them; made by `callbacks_as_hook`.

    Args:
        learner: Runs the callbacks.
        values: The specs of the values, by name.
        loop: The loop's pytree, or None if callbacks do not see it.
        resume: Whether entering the `with` block resumes from a checkpoint.

    Attributes:
        stop_reason: The reason why a callback ended the training, or None. After `resume`, the reason why the saved run
            ended.
    """

    def __init__(
        self, learner: Learner, values: Mapping[str, Any], loop: ExternalTree | None, *, resume: bool = False
    ) -> None:
        self._learner, self._values, self._resumes = learner, values, resume
        self._core = learner._core
        self._phase = learner.phases[0]
        self._begun = self._in_epoch = self._step_begun = self._had_epoch = False
        self._missed = self._warned = False
        self._began_at = 0
        self._state, self._progress = self._core.state, self._core.state.progress
        self._emitter = self._core.engine.emitter
        self._loop = loop
        self._rewinding = Rewinding(self._core, (self._phase,))
        self.stop_reason: str | None = None

    @property
    def cbstate(self) -> Mapping[str, Any]:
        """The state that callbacks share, by name."""
        return self._learner.cbstate

    @property
    def step(self) -> int:
        """Number of finished steps."""
        return self._progress.step

    @property
    def epoch(self) -> int:
        """Number of finished epochs."""
        return self._progress.epoch - self._in_epoch

    @property
    def step_in_epoch(self) -> int:
        """Number of finished steps of the current epoch; 0 between epochs."""
        return self._progress.step_in_epoch if self._in_epoch else 0

    @entry_point
    def resume(self) -> bool:
        """Restore the newest checkpoint of the Checkpointer, before the training begins.

        `set_state` gets the saved train state, and the callbacks get theirs. The loop continues from `hook.step`,
        `hook.epoch`, and `hook.step_in_epoch`. The loop owns its data, so it has to skip the batches that it has
        already used.

        Returns:
            Whether there was a checkpoint.

        Raises:
            DeclarationError: The hook has no `set_state`.
            CheckpointError: There is not exactly one Checkpointer, or all checkpoints are damaged.
            ResumeError: It is the checkpoint of another run; the message shows what differs.
        """
        if self._loop is None or self._loop.put is None:
            raise DeclarationError(
                "`hook.resume()` needs a `set_state` function, and the hook has none.",
                why="a checkpoint holds the train state, which belongs to the loop",
                fix="write `callbacks_as_hook(callbacks, values, state=get, set_state=put)`",
            )
        self._loop.read_again()
        resume_run(self._core, of_hook=True)
        self._loop.write_back()
        self._take_over()
        return self._state.fit.restored

    def _take_over(self) -> None:
        """Continue where the restored checkpoint was written."""
        # Only a checkpoint from within an epoch has a position.
        self._in_epoch = self._state.fit.at is not None
        self.stop_reason = self._state.fit.ended

    @entry_point
    def before_training(self, step: int = 0, epoch: int = 0) -> None:
        """Emit FitBegin.

        Args:
            step: Finished steps, if the loop continues an earlier training. After `resume`, the hook knows them.
            epoch: Finished epochs.
        """
        # Before FitBegin, at which savers begin to write to the directory.
        lock_run(self._core)
        progress, fit = self._progress, self._state.fit
        resumes = fit.restored  # the counters then come from the checkpoint
        if not resumes:
            # A hook that begins a second training continues its own counters.
            self._set(step=max(step, progress.step), epoch=max(epoch, progress.epoch), step_in_epoch=0)
            self._in_epoch, self.stop_reason = False, None
            fit.step, fit.epoch = progress.step, progress.epoch
        self._begin_fit(resumes=resumes)

    def _begin_fit(self, *, resumes: bool) -> None:
        fit = self._state.fit
        fit.at, fit.ended, fit.restored = None, None, False
        self._begun, self._step_begun, self._had_epoch = True, False, False
        # These only skip the rest of the moment here, as in `run_fit`.
        with contextlib.suppress(CancelEpoch, CancelStep):
            self._emit(FitBegin(resumes=resumes))
        self._emitter.run_between_steps(self._phase if self._in_epoch else None)
        self._keep_previous()
        self._began_at = self._progress.step
        if self._loop is not None:
            self._loop.begin()

    @entry_point
    def before_epoch(self) -> None:
        """Emit EpochBegin. A loop that does not call this method begins its epochs with their first step."""
        if not self._begun:
            raise not_begun("before_epoch")
        self._read_again()
        self._set(epoch=self._progress.epoch + 1, step_in_epoch=0)
        self._in_epoch = True
        with contextlib.suppress(CancelStep):
            self._emit(EpochBegin())

    @entry_point
    def before_step(self) -> None:
        """Emit StepBegin, and set the hyperparameters of the step.

        A loop has to call this method before every step if a callback acts there: a `Scheduler`, or a `Profiler` with
        `steps`.

        Raises:
            CancelStep: A callback cancelled this step; the loop leaves it out.
            CancelEpoch: A callback ended the epoch.
            CancelFitting: A callback ended the training.
        """
        if not self._begun:
            raise not_begun("before_step")
        if not self._in_epoch:
            self.before_epoch()
        self._read_again()
        self._step_begun = True
        self._run_handlers(lambda: self._steps().begin_step())

    @entry_point
    def after_step(self, step: int, values: Mapping[str, Any]) -> None:
        """Emit the events of a step that the loop has finished.

        Args:
            step: The number of the step: increasing, from 1. Steps can be left out.
            values: The values of the step, with the announced names, shapes, and dtypes.

        Raises:
            CancelEpoch: A callback ended the epoch.
            CancelFitting: A callback ended the training.
            RewindFitting: A callback has restored an earlier checkpoint; the loop continues from `hook.step`.
            DeclarationError: The training has not begun, the step does not come after the last one, or the values are
                not those announced.
        """
        if not self._begun:
            raise not_begun("after_step")
        last = self._progress.step
        # The cheap test comes first, because this runs at every step.
        if type(step) is not int or step <= last:
            check_step_number(step, last)
        # Checked before any event is emitted, so that a wrong call changes nothing.
        checked = checked_values(values, self._values)
        # A forgotten `before_step` would silently turn these callbacks off.
        if not self._step_begun and self._steps().acting_before:
            raise step_not_begun(self._steps().acting_before)
        if not self._in_epoch:
            self.before_epoch()
        if step != last + 1:  # steps that the loop has not reported count as finished
            if not self._missed:
                self._missed = warn_of_missed(self._emitter.plan.phase(type(self._phase)), last, int(step))
            self._set(step=int(step) - 1, step_in_epoch=self._progress.step_in_epoch + int(step) - 1 - last)
        self._step_begun = False
        self._read_again()  # the step has replaced the loop's pytree
        # As `_run_handlers`, whose call would make a step without handlers a tenth slower.
        try:
            self._core.engine.run_single(self._phase, checked)
        except RewindFitting as request:
            self._rewind(request)
        finally:
            self._write_back()
        self._keep_previous()

    @entry_point
    def after_epoch(self) -> None:
        """Emit EpochEnd and Trigger.

        Raises:
            CancelFitting: A callback ended the training.
            RewindFitting: A callback has restored an earlier checkpoint; the loop continues from `hook.step`.
        """
        if not self._begun:
            raise not_begun("after_epoch")
        if not self._in_epoch:
            self.before_epoch()
        self._read_again()
        self._check_state()
        self._had_epoch = True
        self._in_epoch = False  # before the events: `hook.epoch` counts this epoch also if a callback cancels
        self._run_handlers(self._end_epoch)

    def _end_epoch(self) -> None:
        with contextlib.suppress(CancelEpoch, CancelStep):
            self._emit(EpochEnd())
        self._core.engine.trigger(self._phase)

    @entry_point
    def after_training(self) -> None:
        """Emit FitEnd. The failure of one callback does not stop the others.

        Raises:
            Exception: The exception of a callback that failed.
        """
        self._end(FitEnd())

    def _end(self, event: FitEnd) -> None:
        self._begun = False
        self._read_again()
        never_ended_an_epoch = event.outcome == "finished" and self._in_epoch and not self._had_epoch
        if event.error is None:
            self._check_state()
        failures: list[Exception] = []
        # FitStopping is for savers, so it needs a consistent train state.
        if self._loop is not None and event.error is None and event.outcome != "rewinding":
            self._collect_failure(failures, lambda: self._stop(event.reason))
        self._in_epoch = False
        for call in self._emitter.plan.calls(FitEnd, type(self._phase)):
            self._collect_failure(failures, lambda call=call: self._emitter.run_calls((call,), event, self._phase))
        if event.outcome != "rewinding":  # the run continues in the same directory
            unlock_run(self._core)
        self._write_back()
        if len(failures) == 1:
            raise failures[0]
        if failures:
            raise ExceptionGroup("several callbacks failed at FitEnd", failures)
        if never_ended_an_epoch:
            warn_of_idle(self._emitter.plan, type(self._phase))

    def _run_handlers(self, run: Callable[[], Any]) -> None:
        """Run handlers, and give the loop the state that they have changed."""
        try:
            run()
        except RewindFitting as request:
            self._rewind(request)
        finally:
            # Also after a `CancelFitting`, because the loop then ends with the state that its callbacks have left.
            self._write_back()
        self._keep_previous()

    def _collect_failure(self, failures: list[Exception], call: Callable[[], None]) -> None:
        try:
            call()
        except Cancel:
            pass
        except Exception as error:
            # All callbacks must be able to close their files.
            failures.append(error)

    def _stop(self, reason: str | None) -> None:
        """Emit FitStopping, at which callbacks save the state."""
        engine = self._core.engine
        self._state.fit.ended = reason
        # The engine emits FitStopping only within a fit, and `run_fit` does not run here.
        self._emitter.fit_phase, engine.stopped = self._phase, False
        try:
            engine.stop(reason, self._phase if self._in_epoch else None)
        finally:
            self._emitter.fit_phase = None

    def _rewind(self, request: RewindFitting) -> None:
        """Restore an earlier checkpoint, and tell the loop.

        Raises:
            RewindFitting: It is restored.
            CancelFitting: There is none, so the training ends.
        """
        target = self._rewinding.target_of(request) if self._loop is not None and self._loop.put is not None else None
        if target is None:
            reason = self._rewinding.refusal or f"{request} (the loop has no `set_state`)"
            # As in `fit`, a rewind without a checkpoint ends the training.
            raise CancelFitting(reason, advice=request.advice) from None
        # As in `run_fit`, handlers see a fit that ends and another that resumes.
        self._end(FitEnd("rewinding", str(request)))
        self._rewinding.rewind(target)
        self._take_over()
        self._begin_fit(resumes=True)
        # The loop has to learn of it, because it must continue from other counters.
        raise request

    def __enter__(self) -> CallbacksHook:
        try:
            if self._resumes:
                self.resume()
            self.before_training()
        except BaseException as error:
            # Python does not call `__exit__` after this, and callbacks may have opened files at FitBegin.
            self._end(_end_of(error))
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> bool:
        self._end(_end_of(error))
        if not isinstance(error, CancelFitting):
            return False
        # Returning True suppresses the exception: a callback has ended the training, which is no error.
        self.stop_reason = str(error) or "CancelFitting"
        return True

    # -- the loop's state ---------------------------------------------------------------------

    def _read_again(self) -> None:
        if self._loop is not None:
            self._loop.read_again()

    def _write_back(self) -> None:
        if self._loop is not None:
            self._loop.write_back()

    def _check_state(self) -> None:
        steps = self._progress.step - self._began_at
        # One step may leave the parameters as they are, for example if the loop accumulates gradients.
        if self._loop is not None and steps > 1 and not self._warned and self._loop.is_stale():
            self._warned = True
            warn_of_stale_state(steps)

    def _keep_previous(self) -> None:
        # Only for callbacks that can skip an update, because the arrays of the previous state take memory.
        if self._loop is not None and self._steps().skips:
            self._loop.keep()

    def _steps(self) -> ExternalStepLoop:
        return self._core.engine.step_loop(self._phase)  # pyright: ignore[reportReturnType]

    def _emit(self, event: Event) -> None:
        try:
            self._emitter.emit(event, self._phase)
        finally:
            self._write_back()

    def _set(self, **counters: int) -> None:
        self._progress.replace(**counters)
        self._state.train.set_counters(self._progress)


def _end_of(error: BaseException | None) -> FitEnd:
    """Return the event that ends the training when this exception leaves the hand-written loop."""
    if isinstance(error, CancelFitting):
        return FitEnd("stopped", str(error) or "CancelFitting", advice=error.advice)
    return FitEnd() if error is None else FitEnd("failed", describe_error(error), error=error)
