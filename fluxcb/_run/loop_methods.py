"""Methods of a Learner for hand-written loops: `run_epoch`, `run_step`, `emit` and `trigger`, in a base class of it."""

from __future__ import annotations

from typing import Any

from fluxcb._calls import entry_point
from fluxcb._declare.control import Cancel
from fluxcb._declare.events import Event, HostEvent, TracedEvent, Trigger
from fluxcb._declare.phases import Phase
from fluxcb._declare.schedules import positive
from fluxcb._errors import DeclarationError
from fluxcb._run.batch_placement import BatchPlacement
from fluxcb._run.epochs import Epoch, run_epoch
from fluxcb._run.interrupts import Interrupt, caught_interrupts
from fluxcb._run.learner_core import LearnerCore
from fluxcb._run.unended_epochs import warn_of_metrics_without_epochs, warn_of_missing_trigger
from fluxcb._typing import Batch

__all__ = ["LoopMethods"]


class LoopMethods:
    """Base class of `Learner`: runs the epochs, steps and events of a hand-written loop."""

    _core: LearnerCore

    @entry_point
    def run_epoch(self, phase: Phase, *, steps: int | None = None) -> int:
        """Run one epoch of a phase, in a hand-written loop; emits EpochBegin, the events of the steps, and EpochEnd.

        Args:
            phase: The phase; its data is `data.<phase.name>`.
            steps: Maximum number of steps, or None for all the data.

        Returns:
            The number of steps run.

        Raises:
            CancelFitting: A handler ended the training; EpochEnd has been emitted.
        """
        phase = self._core.phase_set.resolve(phase)
        if steps is not None:
            positive(steps, "`steps` of `run_epoch`")
        stream = self._core.stream(phase)
        self._core.ensure_built(phase)
        engine, emitter = self._core.engine, self._core.engine.emitter
        epoch = Epoch(engine, {phase: stream}, limit=steps, continues_stream=False)
        if self._core.fitting or engine.running:  # the surrounding epoch or fit handles Ctrl-C
            return run_epoch(engine, epoch, inside=True)
        warn_of_missing_trigger(self._core, phase)
        with caught_interrupts() as interrupt, emitter.threads():
            emitter.interrupt = interrupt
            try:
                ran = run_epoch(engine, epoch)
            # The caller handles a Cancel, so it is no failure that other processes have to learn of.
            except Cancel:
                raise
            except BaseException as error:
                # Other processes wait for this one at their next collective.
                emitter.report(error)
                raise
            finally:
                # The next epoch must not end because of this signal.
                emitter.interrupt = Interrupt()
        if interrupt.requested:  # the epoch has ended between two steps, and the caller's loop must end as well
            raise KeyboardInterrupt
        return ran

    @entry_point
    def run_step(self, phase: Phase, batch: Batch) -> dict[str, Any]:
        """Run one step of a phase on your own batch; emits StepBegin, the traced events, and StepEnd.

        Args:
            phase: The phase.
            batch: The batch.

        Returns:
            The loss of the step, and the step values that host handlers declare, by name, on the device. Empty if a
            handler cancelled the step.

        Raises:
            CancelEpoch: A handler ended the epoch.
            CancelFitting: A handler ended the training.
        """
        if isinstance(batch, Phase) and not isinstance(phase, Phase):
            raise DeclarationError(
                "`run_step` was given the batch first.", fix="write `learner.run_step(phase, batch)`"
            )
        phase = self._core.phase_set.resolve(phase)
        self._core.refuse_while_running("run_step")  # otherwise a handler could change the state of its own step
        if self._core.placement is not None:
            # Before `ensure_built`, because the step is traced for the batch of all processes.
            batch = BatchPlacement(self._core.placement, f"run_step({type(phase).__name__}(), batch)").place_one(batch)
        self._core.ensure_built(phase, batch)
        return self._core.engine.run_single(phase, batch)

    @entry_point
    def emit(self, event: Event, phase: Phase) -> None:
        """Emit your own host event from a hand-written loop.

        Args:
            event: The event instance, which handlers receive.
            phase: The phase.

        Raises:
            DeclarationError: `event` is not a host event.
        """
        if not isinstance(event, HostEvent):
            traced = isinstance(event, TracedEvent)
            raise DeclarationError(
                f"`learner.emit` emits host events, but {event!r} is {'a traced event' if traced else 'not an event'}.",
                fix="emit it in the `step` of a phase, with its argument `emit`"
                if traced
                else "emit an instance of a subclass of `HostEvent`",
            )
        phase = self._core.phase_set.resolve(phase)
        self._core.ensure_built(phase)
        if isinstance(event, Trigger):  # as in `trigger`, so that `run_epoch` does not warn
            self._core.engine.untriggered.clear()
        self._core.engine.emitter.emit(event, phase)

    @entry_point
    def trigger(self) -> None:
        """Emit the Trigger that follows a training epoch, in a hand-written loop."""
        phase = self._core.phase_set.training()[0]  # as in `fit`
        self._core.ensure_built(phase)
        warn_of_metrics_without_epochs(self._core)
        self._core.engine.trigger(phase)
