"""Putting a Learner together: the train state, the checked callbacks, the plan, the dry run."""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import jax

from fluxcb._check.graph import CallbackGraph
from fluxcb._check.preflight import build_graph
from fluxcb._compile.arrays import differences, own_copy, spec_of
from fluxcb._compile.hyperparams import HyperparamIndex
from fluxcb._compile.leaves import check_leaves
from fluxcb._compile.plan import Plan
from fluxcb._compile.step import TracedStep
from fluxcb._compile.traced import COUNTERS, StepSetup
from fluxcb._compile.windows import WindowPlan
from fluxcb._declare.callback import unwrap
from fluxcb._declare.phases import (
    LossTrainingPhase,
    LossValidationPhase,
    Phase,
    TrainingPhase,
    ValidationPhase,
    split_batch,
)
from fluxcb._errors import DataError, DeclarationError, FluxcbError
from fluxcb._run.engine import Engine
from fluxcb._run.evaluating import Evaluator
from fluxcb._run.feed import Feed
from fluxcb._run.given import as_list_of_phases, check_params, concrete, first_opt_state, own_params, sources, together
from fluxcb._run.required import (
    check_hyperparams,
    check_watched_data,
    refuse_shared,
    require_created,
    riding,
    warn_empty_log,
)
from fluxcb._run.snapshots import Snapshots
from fluxcb._run.timeline import recorded_timeline
from fluxcb._typing import Batch, ModelAdapter, PyTree
from fluxcb.models import adapt

__all__ = ["Assembly"]


class Assembly:
    """The parts of a Learner.

    Args:
        adapter: The model's adapter, or None if a loss function does everything.
        params: The parameters, if there is no adapter.
        engine: Runs events and steps.
        phases: The phases that will be run, or None for training and validation.
        data: What the user gave as data.
        example_batch: A batch, or its specs, or None.

    Attributes:
        phases: The phases.
        graph: The checked graph of the callbacks at work.
        feeds: The data, by phase name.
        fitting: Whether a fit is running.
    """

    def __init__(
        self,
        *,
        adapter: ModelAdapter | None,
        params: PyTree | None,
        engine: Engine,
        phases: Iterable[Phase] | None,
        data: Any,
        example_batch: Batch | None,
    ) -> None:
        self.adapter = adapter
        self.state = state = engine.state
        self.engine = engine
        self.phases = self._own_phases(phases)
        self.graph: CallbackGraph
        self.feeds: dict[str, Feed] = {}
        self.fitting = False
        self._params = params
        if example_batch is not None:
            check_leaves(example_batch, "`example_batch`", "example_batch", DataError, lists=False)
        self._example_batch: Batch | None = None
        self._waiting_for_batch = False
        self._items: list[Any] = []
        for name, source in sources(data, self.phases).items():
            self.set_data(name, source)
        self._example_batch = example_batch
        state.on_data = self.set_data
        state.evaluation = Evaluator(engine, self.known_phase)
        state.snapshots = Snapshots(self)
        self._build_carry()

    def _own_phases(self, phases: Iterable[Phase] | None) -> tuple[Phase, ...]:
        """Return the phases, with those of a plain loss in the place of the usual two if there is no model."""
        given = tuple(as_list_of_phases(phases)) if phases is not None else (TrainingPhase(), ValidationPhase())
        for phase in given:
            if not isinstance(phase, Phase):
                raise DeclarationError(
                    f"`phases` contains {phase!r}, which is no phase instance.",
                    fix=f"write `{phase.__name__}()`"
                    if isinstance(phase, type)
                    else "e.g. `phases=(TrainingPhase(),)`",
                )
        return tuple(self.own_phase(phase) for phase in given)

    def own_phase(self, phase: Phase) -> Phase:
        """Return the phase, or that of a plain loss in its place if there is no model."""
        if self.adapter is not None:
            return phase
        return {TrainingPhase: LossTrainingPhase(), ValidationPhase: LossValidationPhase()}.get(type(phase), phase)

    # -- building ---------------------------------------------------------------------------

    def _build_carry(self, batch: Batch | None = None) -> None:
        """Initialise the model and the optimizer, if the shape of a batch is known or not needed."""
        state = self.state
        if self.adapter is None:
            params, model_state = self._params, {}
        else:
            batch = batch if batch is not None else self.example()
            try:
                xs = split_batch(concrete(batch))[0] if batch is not None else None
                params, model_state = self.adapter.init(state.model_key(), xs)
            except Exception:
                if batch is None:  # nothing tells a batch's shape; the first step will
                    return
                raise
        params = own_params(params)
        check_params(params)
        opt_state = own_copy(first_opt_state(state.optimizer, params))
        state.hyperparams = HyperparamIndex(opt_state, state.optimizer)
        state.carry = {
            "params": params,
            "model_state": own_copy(model_state),
            "opt_state": opt_state,
            "cbstate": {},
            "counters": state.counters([0] * len(COUNTERS)),
        }

    def example(self) -> Batch | None:
        """Return a batch, or its specs, if any is known without running."""
        if self._example_batch is not None:
            return self._example_batch
        for phase in self.phases:
            feed = self.feeds.get(type(phase).name)
            if feed is not None:
                return feed.spec()
        return None

    def install(self, items: list[Any]) -> None:
        """Check callbacks, initialise them, plan and dry-run the steps."""
        state = self.state
        graph = build_graph(items, self.phases)
        refuse_shared(graph, self)
        check_watched_data(graph, self.feeds)
        if state.built:
            check_hyperparams(graph, state.hyperparams)
        self._items = items
        if not state.built:  # without a batch's shape, the rest waits for the first one
            self.graph = graph
            self._waiting_for_batch = True
            return
        backends = {d.position: self.engine.backend(d) for d in graph.declared}
        in_carry_before = dict(state.carry["cbstate"])
        # Everything is on the host while callbacks initialise, then what traced handlers use moves back.
        state.cbstate = {**state.cbstate, **in_carry_before}
        state.carry = {**state.carry, "cbstate": {}}
        plan = Plan(graph, lambda d: backends[d.position], state.meter.wrapper, self.engine.adapted)
        for declared in graph.init_order():
            try:
                declared.callback.init(plan.proxy(declared, declared.access))
            except FluxcbError:
                raise
            except BaseException as error:
                error.add_note(f"raised in the `init` of {declared.label}")
                raise
            if state.handed:
                state.verify_handed()
        moved = {name: own_copy(state.cbstate.pop(name)) for name in riding(graph, state.cbstate)}
        state.carry = together({**state.carry, "cbstate": moved})
        require_created(graph, {*state.cbstate, *moved})
        warn_empty_log(graph)
        self.engine.check(graph)
        self._dry_run(plan)
        for declared in graph.declared:
            object.__setattr__(unwrap(declared.callback), "_fluxcb_owner", weakref.ref(self))
        self.graph = graph
        self._waiting_for_batch = False
        self._mark_positions()

    def _mark_positions(self) -> None:
        saves = any(path[0] in ("*", "snapshots") for d in self.graph.declared for path in d.access)
        for feed in self.feeds.values():
            feed.marks_positions = saves

    def _dry_run(self, plan: Plan) -> None:
        """Trace every phase whose batches' shape is known; the traces are what programs are made of."""
        programs = self.engine.programs
        for phase in self.phases:
            batch = self._batch_spec(phase)
            if batch is not None:
                step = programs.traced(self._setup_for(plan, phase), plan, phase, self.state, batch)
                programs.windows(plan, phase, step, self.state)  # says which values host handlers would miss
        programs.prune()
        self.engine.use(plan, lambda phase: self._setup_for(plan, phase))

    def kinds(self) -> dict[str, str]:
        """Return the kind of program that each phase's steps run in, where it is known, by the phase's name."""
        steps = {type(phase).name: self.traced(phase) for phase in self.phases}
        programs, platform = self.engine.programs, self.state.platform
        return {name: programs.kind_of(step, platform) for name, step in steps.items() if step is not None}

    def traced(self, phase: Phase) -> TracedStep | None:
        """Return a phase's traced step, or None while the shape of its batches is unknown."""
        batch, engine = self._batch_spec(phase), self.engine
        if batch is None:
            return None
        return engine.programs.traced(engine.setup(phase), engine.plan, phase, self.state, batch)

    def window_plan(self, phase: Phase) -> WindowPlan | None:
        """Return what bounds a phase's windows, or None while the shape of its batches is unknown."""
        step = self.traced(phase)
        return self.engine.programs.windows(self.engine.plan, phase, step, self.state) if step is not None else None

    def _setup_for(self, plan: Plan, phase: Phase) -> StepSetup:
        state = self.state
        return StepSetup(
            self.adapter,
            state.loss_fn,
            state.optimizer,
            state.hyperparams,
            jax.random.key_impl(state.run_key),
            lambda event: plan.traced(event, type(phase)),
        )

    def _batch_spec(self, phase: Phase) -> Batch | None:
        if type(phase).trains and self._example_batch is not None:
            return self._example_batch
        feed = self.feeds.get(type(phase).name)
        return feed.spec() if feed is not None else None

    def reinstall(self, items: list[Any]) -> None:
        """Install another set of callbacks, or leave everything as it was."""
        state = self.state
        if self.fitting or self.engine.running:
            raise DeclarationError(
                "The callbacks of a Learner cannot be exchanged while it is fitting.",
                why="the plan of a running fit is fixed",
                fix="exchange them between two calls of `fit`",
            )
        before = dict(state.cbstate), state.carry if state.built else None
        old = list(self.graph.declared)
        try:
            self.install(items)
        except BaseException:
            state.cbstate = before[0]
            if before[1] is not None:
                state.carry = before[1]
            raise
        kept = {id(unwrap(d.callback)) for d in self.graph.declared}
        for declared in old:
            if id(unwrap(declared.callback)) not in kept:
                object.__setattr__(unwrap(declared.callback), "_fluxcb_owner", None)

    def measure(self, on: bool) -> None:
        """Turn the measuring of handlers on, from zero, or off."""
        self._refuse_fitting("Measuring", "call `learner.callbacks.measure()` before `fit`")
        meter = self.state.meter
        if on:
            meter.start()
        meter.on = on
        self._plan_again()

    @contextlib.contextmanager
    def trace(self, path: str | os.PathLike[str], max_events: int) -> Iterator[None]:
        """Record a timeline, and write it when the context is left."""
        fix = "enter `learner.callbacks.trace(...)` before `fit`"
        self._refuse_fitting("Tracing", fix)
        meter = self.state.meter
        if meter.timeline is not None:
            raise DeclarationError(
                "This Learner is being traced already.",
                why="each handler is recorded once",
                fix="leave the other `with learner.callbacks.trace(...)` first",
            )
        with recorded_timeline(path, self.state, max_events) as meter.timeline:
            try:
                self._plan_again()
                yield
            finally:
                meter.timeline = None
                self._plan_again()

    def _refuse_fitting(self, what: str, fix: str) -> None:
        if self.fitting or self.engine.running:
            raise DeclarationError(
                f"{what} cannot be turned on or off while the Learner is fitting.",
                why="the plan of a running fit is fixed",
                fix=fix,
            )

    def _plan_again(self) -> None:
        """Wrap the handlers anew, as the meter has it."""
        if not self._waiting_for_batch:
            self.engine.use(self.engine.plan.again(self.state.meter.wrapper), self.engine.setup)

    def exchange_model(self, model: Any) -> None:
        """Put another model's parameters into the carry.

        Raises:
            DeclarationError: There is no model, or its parameters have another structure, shape or dtype.
        """
        if self.adapter is None:
            raise DeclarationError("This Learner has no model.", fix="assign `learner.state` instead")
        state, adapter, batch = self.state, adapt(model), self.example()
        xs = split_batch(concrete(batch))[0] if batch is not None else None
        params, model_state = adapter.init(state.run_key, xs)
        wrong = differences(state.carry["params"], params) + differences(state.carry["model_state"], model_state)
        if wrong:
            raise DeclarationError(
                f"The new model does not fit the Learner: {wrong[0]}.",
                where=wrong[1:5],
                fix="build a new Learner for a model of another structure",
            )
        state.carry = {**state.carry, "params": own_copy(params), "model_state": own_copy(model_state)}
        state.model, self.adapter = model, adapter
        self.engine.forget_programs()

    # -- what a Learner asks ------------------------------------------------------------------

    def training_phase(self) -> Phase:
        """Return the first phase that trains.

        Raises:
            DeclarationError: There is none.
        """
        for phase in self.phases:
            if type(phase).trains:
                return phase
        raise DeclarationError("None of this Learner's phases trains.", fix="give `phases=(TrainingPhase(), ...)`")

    def known_phase(self, phase: Phase) -> Phase:
        """Return a phase given by the user, as this Learner runs it.

        Raises:
            DeclarationError: It is no phase instance.
        """
        if not isinstance(phase, Phase):
            raise DeclarationError(
                f"{phase!r} is no phase instance.", fix="e.g. `learner.run_epoch(ValidationPhase())`"
            )
        return self.own_phase(phase)

    def feed(self, phase: Phase) -> Feed:
        """Return a phase's data.

        Raises:
            DataError: There is none.
        """
        name = type(phase).name
        if name not in self.feeds:
            raise DataError(
                f"There is no data for {type(phase).__name__}: `data.{name}` is not set.",
                fix=f'give the Learner `data={{"{name}": batches}}`',
            )
        return self.feeds[name]

    def refuse_while_running(self, what: str) -> None:
        """Refuse to touch the train state from within a running epoch or fit.

        Raises:
            DeclarationError: One is running.
        """
        if self.fitting or self.engine.running:
            raise DeclarationError(
                f"`learner.{what}` was used while this Learner is running.",
                why="steps are dispatched ahead of their handlers, so the train state is not where the handler is",
                fix="write state in a handler that declares it, or between two calls of `fit`",
            )

    def refuse_ahead(self, what: str) -> None:
        """Refuse to show the train state to a handler that did not declare to read it.

        Raises:
            DeclarationError: The device is ahead of the handler's step.
        """
        if self.state.ahead:
            raise DeclarationError(
                f"A step's handler reads `learner.{what}` of the Learner itself, and not of the one it was given.",
                why="the device runs ahead of the handlers, so the train state is not that of the handler's step",
                fix="declare it in `stateaccess`, and read it from the handler's argument",
            )

    def ensure_built(self, phase: Phase, batch: Batch | None = None) -> None:
        """Build what waited for the shape of a batch."""
        if not self._waiting_for_batch:
            return
        if batch is None and type(phase).name in self.feeds:
            batch = self.feed(phase).peek()
        if batch is None:
            _ = self.state.carry  # says what is missing
        check_leaves(batch, f"A batch of {type(phase).__name__}", "batch", DataError, lists=False)
        self._example_batch = spec_of(batch)
        self._build_carry(batch)
        self.install(self._items)

    def set_data(self, name: str, source: Any) -> None:
        """Use another data source for a phase from the next epoch on."""
        feed = Feed(source, f"data.{name}")
        if name in self.feeds:
            feed.take_over(self.feeds[name])
            feed.marks_positions = self.feeds[name].marks_positions
        self.feeds[name] = feed
        self.engine.programs.forget_shapes(name)
        if any(type(phase).trains and type(phase).name == name for phase in self.phases):
            self._example_batch = None  # it told the shape of what was there before
        self.state.data[name] = source
