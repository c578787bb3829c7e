"""The engine: it runs the steps of each phase, and ends a fit."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax

from fluxcb._compile.lent_values import LentValues
from fluxcb._compile.plan import Plan
from fluxcb._compile.program import ProgramKind
from fluxcb._compile.step_setup import StepSetup
from fluxcb._declare.control import Cancel, CancelEpoch, CancelFitting, CancelStep, RewindFitting
from fluxcb._declare.events import FitStopping, Trigger
from fluxcb._declare.phases import Phase
from fluxcb._errors import DeclarationError, StateLostError
from fluxcb._run.emitter import Emitter
from fluxcb._run.executors import Executor, SerialExecutor
from fluxcb._run.meter import Meter
from fluxcb._run.program_runner import ProgramRunner
from fluxcb._run.programs import Programs, StepsPerCall
from fluxcb._run.state import HostState
from fluxcb._run.step_loop import StepLoop
from fluxcb._run.threaded import LentByThread, SharedMeter, ThreadedEmitter
from fluxcb._run.train_state import TrainState
from fluxcb._typing import Batch

__all__ = ["Engine", "make_engine", "refuse_rewinds"]

_TRIGGER = Trigger()


class Engine:
    """Runs phases with a plan.

    Args:
        state: The state.
        programs: The compiled programs.
        emitter: Runs host handlers.
        runner: Creates the program runner of a phase.

    Attributes:
        running: Number of running epochs; an epoch can run inside another one. `run_epoch` counts them.
        stopped: Whether the current fit has ended and FitStopping has been emitted.
        can_rewind: Returns whether the current fit can go back to an earlier checkpoint. `run_fit` sets it.
        untriggered: The training phases of which a hand-written loop has run an epoch since the last Trigger.
        between_epochs: Called after the Trigger that follows a training epoch, before snapshots. `run_fit` sets it.
    """

    def __init__(
        self,
        state: HostState,
        programs: Programs,
        emitter: Emitter,
        *,
        runner: Callable[[HostState, Programs, Phase], ProgramRunner] = ProgramRunner,
    ) -> None:
        self.state = state
        self.programs = programs
        self.emitter = emitter
        self.running = 0
        self.stopped = False
        self.untriggered: set[Phase] = set()
        self.can_rewind: Callable[[RewindFitting], bool] = refuse_rewinds
        self.between_epochs: Callable[[], None] = _do_nothing
        self._single_steps = self._epochs = 0
        self._make_runner = runner
        self._loops: dict[Phase, StepLoop] = {}

    # -- steps --------------------------------------------------------------------------------

    def use(self, plan: Plan, setup: Callable[[Phase], StepSetup]) -> None:
        """Use another plan.

        Args:
            plan: The plan.
            setup: Returns the inputs of the trace for a phase.
        """
        self.programs.use(plan, setup)
        self._loops = {}  # the old step loops have bound the calls of the old plan

    def run_with(self, runner: Callable[[HostState, Programs, Phase], ProgramRunner]) -> None:
        """Create program runners with another function, as the members of a population do while they train."""
        self._make_runner = runner
        self._loops = {}

    def step_loop(self, phase: Phase) -> StepLoop:
        """Return the step loop of a phase."""
        loop = self._loops.get(phase)
        if loop is None:
            loop = self._loops[phase] = self._new_step_loop(phase)
        return loop

    def _new_step_loop(self, phase: Phase) -> StepLoop:
        runner = self._make_runner(self.state, self.programs, phase)
        return StepLoop(self.state, self.programs, self.emitter, runner, phase)

    def forget_programs(self) -> None:
        """Forget the programs of all phases, because the model was replaced."""
        for loop in self._loops.values():  # one of them may be running
            loop.runner.forget()

    def run_single(self, phase: Phase, batch: Batch) -> dict[str, Any]:
        """Run one step outside an epoch.

        Returns:
            The fetched values, including the loss; empty if the step was cancelled.
        """
        self._single_steps += 1
        try:
            values = dict(self.step_loop(phase).run_one(batch))
        except jax.errors.JaxRuntimeError:  # raised by a handler that read a value of the failed step
            # Marks the train state as lost. The original exception, with the note about the handler, is raised.
            with contextlib.suppress(jax.errors.JaxRuntimeError, StateLostError):
                self.wait_for_device()
            raise
        if _is_power_of_two(self._single_steps):  # because the check takes longer than a small step
            self.programs.warn_about_changed_fields()
        return values

    def look_after_epoch(self) -> None:
        """Warn about changed fields after an epoch, if the check is due."""
        self._epochs += 1
        # A fit checks at its end too, so its epochs need not all wait 0.4 ms for the check.
        if self.emitter.fit_phase is None or _is_power_of_two(self._epochs):
            self.programs.warn_about_changed_fields()

    def wait_for_device(self) -> None:
        """Wait for the last step, so that a failure of the device is raised here and not at a later read."""
        try:
            # One array is enough: all arrays of the carry come from the same call.
            self.emitter.wait_for(self.state.train.some_array)
        except jax.errors.JaxRuntimeError as error:
            self.state.train.lose(error)
            raise

    # -- the events between two epochs, and at the end ------------------------------------------

    def trigger(self, phase: Phase) -> None:
        """Emit the Trigger that follows a training epoch."""
        self.untriggered.clear()
        with contextlib.suppress(CancelEpoch, CancelStep):
            self.emitter.emit_after_epoch(_TRIGGER, phase)
        self.between_epochs()
        # Snapshots are taken after all Trigger handlers, whatever their order.
        self.emitter.run_between_steps(None)

    def stop(self, reason: str | None, at: Phase | None) -> None:
        """Emit FitStopping, at most once per fit.

        Args:
            reason: The reason that the fit ends early, or None.
            at: The phase whose epoch is running, or None between two epochs.
        """
        phase = self.emitter.fit_phase
        if self.stopped or phase is None:
            return
        self.stopped = True
        # FitStopping is separate from FitEnd, which also runs after an exception, when the state may be incomplete.
        # Within an epoch, the snapshot for a signal must also be taken before EpochEnd closes the epoch.
        with contextlib.suppress(Cancel):  # the fit is ending anyway
            self.emitter.emit(FitStopping(reason), phase)
        self.emitter.run_between_steps(at)

    def rewinds_after(self, cancel: CancelFitting) -> bool:
        """Return whether a cancel makes the run go back to an earlier checkpoint."""
        return isinstance(cancel, RewindFitting) and self.can_rewind(cancel)


def make_engine(
    executor: Any,
    programs: tuple[ProgramKind | None, StepsPerCall, int, bool],
    *,
    model: Any,
    loss_fn: Any,
    optimizer: Any,
    key: Any,
    peer_timeout: float,
) -> Engine:
    """Return an engine with a new state.

    Args:
        executor: The argument `executor` of the Learner; None for the default.
        programs: The arguments `program`, `steps_per_call`, `window_bytes`, and `exact_observers` of the Learner; see
            `Programs`.
        model: See `HostState`.
        loss_fn: See `HostState`.
        optimizer: See `HostState`.
        key: The run's random key.
        peer_timeout: Silence after which another process counts as lost (s).

    Raises:
        DeclarationError: `executor` is not an executor.
    """
    executor = SerialExecutor() if executor is None else executor
    if not isinstance(executor, Executor):
        shown = f"the class `{executor.__name__}`" if isinstance(executor, type) else repr(executor)
        raise DeclarationError(
            f"`executor` must be an executor, not {shown}.", fix="write e.g. `executor=fluxcb.ThreadExecutor(4)`"
        )
    serial = isinstance(executor, SerialExecutor)
    # Handlers on several threads count reads concurrently, and each thread verifies its own containers.
    meter, lent = (Meter(), LentValues()) if serial else (SharedMeter(), LentByThread())
    train = TrainState(key)
    state = HostState(model=model, loss_fn=loss_fn, optimizer=optimizer, train=train, meter=meter, lent=lent)
    compiled = Programs(*programs, train, meter)
    if jax.process_count() == 1:
        # The emitter is chosen once, when the Learner is built, so the code for a single process and thread has no
        # branches for the other cases.
        emitter = Emitter(state, compiled) if serial else ThreadedEmitter(state, compiled, executor)
        return Engine(state, compiled, emitter, runner=ProgramRunner)
    # `jax.experimental.multihost_utils` takes time to import, and a single process never needs it.
    from fluxcb._run.processes import (
        MultiProcessEmitter,
        MultiProcessRunner,
        MultiProcessThreadedEmitter,
        make_peers,
    )

    peers = make_peers(peer_timeout)
    if serial:
        emitter = MultiProcessEmitter(state, compiled, peers=peers)
    else:
        emitter = MultiProcessThreadedEmitter(state, compiled, executor, peers=peers)
    return Engine(state, compiled, emitter, runner=functools.partial(MultiProcessRunner, peers=peers))


def refuse_rewinds(request: RewindFitting) -> bool:
    """Return False: a run outside `fit` ends instead of going back to a checkpoint."""
    return False


def _do_nothing() -> None:
    """Take the place of `Engine.between_epochs` until a fit begins."""


def _is_power_of_two(number: int) -> bool:
    return number & (number - 1) == 0
