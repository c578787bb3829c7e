"""The steps of a hand-written loop: running callbacks before and after them."""

from __future__ import annotations

import types
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import jax
import optax

from fluxcb._compile.arrays import leading_axis, to_host
from fluxcb._compile.carry_paths import below, root_of
from fluxcb._compile.fetch import Fetch
from fluxcb._compile.traced import TraceState
from fluxcb._compile.windows import WindowPlan
from fluxcb._declare.access import writes
from fluxcb._declare.control import Cancel
from fluxcb._declare.declared import Declared
from fluxcb._declare.events import BackwardEnd, ComputeEnd, ForwardBegin, StepBegin, TracedEvent, UpdateEnd
from fluxcb._declare.phases import Emit, Phase, TrainingPhase
from fluxcb._run.emitter import Emitter
from fluxcb._run.engine import Engine
from fluxcb._run.external_state import TREES, ExternalTrainState, LoopBackend
from fluxcb._run.meter import Meter
from fluxcb._run.program_runner import ProgramRunner
from fluxcb._run.programs import Programs
from fluxcb._run.services import Services
from fluxcb._run.state import HostState
from fluxcb._run.step_loop import StepLoop
from fluxcb._run.window import Window
from fluxcb._typing import PyTree, StatePath

__all__ = ["AFTER_STEP", "ExternalStepLoop", "lent_trees", "loop_engine", "phase_of", "skips_updates"]

AFTER_STEP = (BackwardEnd, UpdateEnd, ComputeEnd)
"""The traced events that are emitted after a step of the loop, if callbacks have access to its state."""

_STEP_BEGIN = StepBegin()


class _LoopPhase(TrainingPhase):
    """A phase for steps that a loop has run: its step values are the reported ones."""

    provides = {}  # set by `phase_of`, which knows the names

    def step(self, learner: Any, emit: Emit) -> None:
        """Store the reported values as step values."""
        for name, value in learner.step.batch.items():
            setattr(learner.step, name, value)


class _StatePhase(_LoopPhase):
    """A phase for steps that a loop has run, with access to the train state."""

    def step(self, learner: Any, emit: Emit) -> None:
        """Store the reported values and the lent parts of the train state."""
        values, lent = learner.step.batch
        state: TraceState = learner._state
        # Handlers read gradients and updates that the loop has computed, so none are computed here.
        state.updates.by_loop = True
        for name, value in values.items():
            setattr(learner.step, name, value)
        for name, value in lent.items():
            state.lend(name, value)
        emit(BackwardEnd())
        emit(UpdateEnd())
        skip = state.values.get(("step", "skip"))
        # The decision is a device value. It is kept in the carry and read only by callbacks that can skip.
        if skip is not None:
            state.keep("model_state", {"skipped": skip})
            state.updates.honored("skip")


def phase_of(names: tuple[str, ...], *, with_state: bool) -> TrainingPhase:
    """Return the phase of a loop's steps, which provides these values."""
    # `provides` is an attribute of the class, and each hook has other names.
    provides = {ForwardBegin: (), BackwardEnd: names} if with_state else {ComputeEnd: names}
    body = {"provides": provides, "__module__": __name__}
    base = _StatePhase if with_state else _LoopPhase
    return types.new_class("LoopPhase", (base,), exec_body=lambda space: space.update(body))()


def lent_trees(callbacks: Iterable[Declared], phase: Phase) -> tuple[str, ...]:
    """Return the parts of the train state that traced handlers read after a step."""
    # Only these are arguments of the compiled program, because each array of a call takes time.
    roots = {root_of(path)[0] for handler in _traced(callbacks, phase, AFTER_STEP) for path in handler.access}
    return tuple(name for name in TREES if name in roots)


def skips_updates(callbacks: Iterable[Declared], phase: Phase) -> bool:
    """Return whether a traced handler can skip the update of a step."""
    return any(
        path == ("step", "skip") and writes(permission)
        for handler in _traced(callbacks, phase, AFTER_STEP)
        for path, permission in handler.access.items()
    )


def _traced(callbacks: Iterable[Declared], phase: Phase, events: Collection[type[TracedEvent]]) -> list[Any]:
    found = (declared.handler(event, type(phase)) for declared in callbacks for event in events)
    return [handler for handler in found if handler is not None]


class HandedWindow(Window):
    """A step of a loop without traced handlers; its values are read from the loop's arrays."""

    def __init__(self, values: Mapping[str, Any], meter: Meter) -> None:
        super().__init__([values], meter)
        self.live = True
        self._values = values
        self._on_host: dict[str, Any] = {}

    def has(self, path: StatePath) -> StatePath | None:
        """Return the path of the value that equals or contains a path, or None."""
        return path[:2] if path[0] == "step" and path[1] in self._values else None

    def value(self, path: StatePath) -> Any:
        """Return a value on the host, read-only; it waits for the value.

        Raises:
            KeyError: The loop has not reported it.
        """
        name = path[1]
        if name not in self._on_host:
            value = self._values[name]
            # Several handlers may read a value, which is then fetched once.
            self._on_host[name] = self._meter.fetched("step values", lambda: to_host(value))
        return below(self._on_host[name], path[2:])

    def names(self) -> list[str]:
        """Return the names of the values that may be read."""
        return ["batch", "stop", *self._values, *self.written]


class ExternalStepLoop(StepLoop):
    """Runs the handlers around the steps of a loop.

    Args:
        state: The state, with the train state of the loop.
        programs: The compiled programs, with the plan.
        emitter: Runs host handlers.
        runner: Calls the programs of the phase.
        phase: The phase.

    Attributes:
        skips: Whether a traced handler can skip the update of a step.
        acting_before: Labels of the callbacks that act before each step.
    """

    _train: ExternalTrainState
    _runs_ahead = False  # the loop's state belongs to the step that it has just reported

    def __init__(
        self, state: HostState, programs: Programs, emitter: Emitter, runner: ProgramRunner, phase: Phase
    ) -> None:
        super().__init__(state, programs, emitter, runner, phase)
        graph, plan = programs.plan.graph, self._plan
        self._traces = any(programs.plan.traced(event, type(phase)) for event in AFTER_STEP)
        self._lent = lent_trees(graph.declared, phase)
        # Only then does the hook keep the previous state, which takes the memory of a second one.
        self.skips = skips_updates(graph.declared, phase)
        # Without handlers around a step, a reported step is only counted.
        self._quiet = not (self._traces or plan.end or plan.trigger)
        # Every reported step is a window of one step.
        self._window_plan = WindowPlan((), plan.end, plan.end, plan.trigger, (), Fetch({}, {}), {}, False, 0)
        self._scheduled = self._hyperparams_before_step()
        self._begin_program = jax.jit(self._at_forward_begin) if self._scheduled else None
        # Computed once, because `after_step` tests it at every step.
        self.acting_before = self._acting_before()

    def _acting_before(self) -> list[str]:
        declared, phase = self._programs.plan.graph.declared, type(self._phase)
        # A handler for all host events does not need StepBegin, so only handlers of StepBegin itself count.
        found = [bound for one in declared if (bound := one.handler(StepBegin, phase)) is not None]
        labels = [bound.declared.label for bound in found if bound.handler.event is StepBegin]
        return [*labels, *(handler.declared.label for handler in _traced(declared, self._phase, (ForwardBegin,)))]

    def _hyperparams_before_step(self) -> tuple[str, ...]:
        handlers = _traced(self._programs.plan.graph.declared, self._phase, (ForwardBegin,))
        written = (path for handler in handlers for path, granted in handler.access.items() if writes(granted))
        return tuple(path[1] for path in written if path[0] == "hyperparams")

    # -- before the step ----------------------------------------------------------------------

    def begin_step(self) -> None:
        """Run the handlers of StepBegin, and the traced handlers that set hyperparameters for the step.

        Raises:
            CancelStep: A callback cancelled the step; the loop leaves it out.
        """
        progress, train = self._progress, self._train
        try:
            self._emitter.run_calls(self._plan.begin, _STEP_BEGIN, self._phase)
        except Cancel:
            progress.count_cancelled(trains=True)
            raise
        # In a Learner, a traced handler of ForwardBegin runs inside the step. A loop computes its step itself, so the
        # handler runs before it in a separate program, and only its hyperparameters can be used.
        if self._begin_program is not None:
            counters = train.counters([progress.step, progress.epoch, progress.step_in_epoch, 0])
            opt_state = train.live(("opt_state",))
            for name, value in self._begin_program(opt_state, counters).items():
                opt_state = train.hyperparams.set(opt_state, name, value)
            train.replace(("opt_state",), opt_state)

    def _at_forward_begin(self, opt_state: PyTree, counters: Any) -> dict[str, Any]:
        setup = self._programs.setup(self._phase)
        # The handlers at ForwardBegin may use only hyperparameters; `check_handlers` has refused everything else.
        carry = {"params": {}, "model_state": {}, "opt_state": opt_state, "cbstate": {}, "counters": counters}
        trace = TraceState(setup, self._phase, carry, {})
        trace.emit(ForwardBegin())
        return {name: setup.hyperparams.get(trace.values["opt_state",], name) for name in self._scheduled}

    # -- after the step -----------------------------------------------------------------------

    def run_one(self, batch: Mapping[str, Any]) -> Mapping[str, Any]:
        """Run the handlers of a step that the loop has finished.

        Args:
            batch: The values that the loop has reported.
        """
        if self._quiet:
            self._progress.count(1, trains=True)
            return {}
        if self._traces:
            loop = self._train.loop
            if loop is None:
                return super().run_one(batch)
            return super().run_one((batch, {name: loop.parts[name] for name in self._lent}))
        # Without traced handlers, nothing is compiled, and values are read from the loop's arrays.
        if not self._window_plan.batch_size:
            self._window_plan = replace(self._window_plan, batch_size=leading_axis(batch))
        window = HandedWindow(batch, self._meter)  # fetches a value when a handler reads it
        window.plan = self._window_plan
        self._replay(window)
        return {}

    def _begin_live(self, window: Window) -> bool:
        window.live = True  # the loop has already begun the step
        return True

    def _replay(self, window: Window) -> None:
        # Before the handlers run, so that they see the state without the skipped update.
        loop = self._train.loop
        if self.skips and loop is not None:
            loop.require_kept()
            if self._train.skipped:
                loop.undo()
        super()._replay(window)


class ExternalEmitter(Emitter):
    """Runs the host handlers around the steps of a loop."""

    def backend(self, declared: Declared, services: Services) -> LoopBackend:
        """Return what the proxies of one callback read and write."""
        return LoopBackend(self.state, declared, services)


class LoopEngine(Engine):
    """Runs callbacks around the steps of a loop."""

    def _new_step_loop(self, phase: Phase) -> ExternalStepLoop:
        return ExternalStepLoop(
            self.state, self.programs, self.emitter, ProgramRunner(self.state, self.programs, phase), phase
        )


def loop_engine(train: ExternalTrainState, window_bytes: int) -> LoopEngine:
    """Return the engine of a loop. With several processes, moments end in the same way on all of them."""
    state = HostState(model=None, loss_fn=None, optimizer=optax.identity(), train=train)
    programs = Programs(None, "auto", window_bytes, False, train, state.meter)
    if jax.process_count() == 1:
        return LoopEngine(state, programs, ExternalEmitter(state, programs))
    from fluxcb._run.processes import SynchronizedEmitter, make_peers

    # Created here, because `processes.py` imports a module of JAX that a single process never needs.
    emitter = types.new_class("MultiProcessExternalEmitter", (SynchronizedEmitter, ExternalEmitter))
    # The loop runs its steps itself, so no session of peers begins.
    return LoopEngine(state, programs, emitter(state, programs, peers=make_peers(float("inf"))))
