"""The core of a Learner: it builds the train state, checks and installs the callbacks, and plans the steps."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import jax

from fluxcb._check.graph import CallbackGraph
from fluxcb._check.preflight import checked_graph
from fluxcb._compile.arrays import spec_of
from fluxcb._compile.hyperparams import HyperparamIndex
from fluxcb._compile.initial_arrays import InitialArrays
from fluxcb._compile.leaves import check_leaves
from fluxcb._compile.lineage import LineageProbe
from fluxcb._compile.named_optimizers import refuse_unused
from fluxcb._compile.placement import Placement
from fluxcb._compile.plan import Plan
from fluxcb._compile.step import TracedStep
from fluxcb._compile.step_setup import StepSetup
from fluxcb._compile.traced import COUNTERS
from fluxcb._compile.windows import WindowPlan
from fluxcb._declare.batch_parts import BatchParts
from fluxcb._declare.callback import unwrap
from fluxcb._declare.losses import takes_model
from fluxcb._declare.phases import Phase
from fluxcb._declare.turns import InTurn
from fluxcb._errors import DataError, DeclarationError
from fluxcb._run.batch_placement import BatchPlacement
from fluxcb._run.batch_stream import BatchStream
from fluxcb._run.changing_state import warn_about_averaged_state
from fluxcb._run.data_sources import data_sources
from fluxcb._run.declared_parts import check_parts
from fluxcb._run.distributed_state import check_padding
from fluxcb._run.engine import Engine
from fluxcb._run.evaluation import Evaluator
from fluxcb._run.initial_state import initialized
from fluxcb._run.initialization import initialize, initialize_again
from fluxcb._run.new_state import new_opt_state, params_of_model, params_of_user, with_other_model
from fluxcb._run.optimizer_warnings import warn_of_optimizer
from fluxcb._run.phase_set import PhaseSet
from fluxcb._run.process_differences import check_same_key
from fluxcb._run.returned_copies import ReturnedCopies, read_ahead, used_while_running
from fluxcb._run.services import Services
from fluxcb._run.snapshots import Snapshots
from fluxcb._run.switches import flags, keep_switches, switched_names
from fluxcb._run.validate_callbacks import (
    check_hyperparams,
    check_watched_data,
    refuse_shared,
    refuse_useless,
    require_created,
    require_used,
    warn_ineffective,
)
from fluxcb._typing import Batch, ModelAdapter, PyTree
from fluxcb.models import adapt

__all__ = ["LearnerCore"]


class LearnerCore:
    """The parts of a Learner, and the operations on several of them.

    Args:
        adapter: The model's adapter, or None if a loss function computes everything.
        params: The parameters, if there is no adapter.
        model_state: The state of the loss function, if there is no adapter.
        split: Splits batches into inputs and targets.
        engine: Runs events and steps.
        phases: The phases of the Learner, or None for training and validation.
        data: The argument `data` of the Learner.
        example_batch: A batch, or its specs, or None.
        callbacks: Returns `learner.callbacks` for handlers.
        placement: The shardings of the train state and the batches, or None without a mesh.

    Attributes:
        phase_set: The phases, with the groups of an `InTurn`.
        phases: All phases, in order.
        graph: The checked graph of the installed callbacks.
        streams: The data, by phase name.
        fitting: Whether a fit is running.
        switching: Names of the callbacks that will be disabled after the current epoch; None if that changes nothing.
        returned: Copies that the properties of the Learner returned, to detect writes into them.
        evaluation: `learner.evaluation` for handlers.
        snapshots: `learner.snapshots` for handlers.
        lineage: Measures the writes to a path while steps are replayed, or None.
    """

    def __init__(
        self,
        *,
        adapter: ModelAdapter | None,
        params: PyTree | None,
        model_state: PyTree | None = None,
        split: BatchParts = BatchParts(),  # noqa: B008 - immutable
        engine: Engine,
        phases: Iterable[Phase | InTurn] | None,
        data: Any,
        example_batch: Batch | None,
        callbacks: Callable[[], Any],
        placement: Placement | None = None,
    ) -> None:
        self.adapter = adapter
        self.split = split
        self.lineage: LineageProbe | None = None
        self.state = state = engine.state
        self.engine = engine
        self.placement = state.train.placement = placement
        if placement is not None:
            check_padding(placement, state.loss_fn, adapter)
            check_same_key(placement, state.train.run_key)
        # Such a loss function computes its outputs itself, so the phase must pass it the batch.
        self.phase_set = PhaseSet(phases, of_batch=adapter is None or takes_model(state.loss_fn))
        self.phases = self.phase_set.phases
        state.progress.in_turn = self.phase_set.in_turn
        self.graph: CallbackGraph
        self.streams: dict[str, BatchStream] = {}
        self.fitting = False
        self.switching: frozenset[str] | None = None
        self.returned = ReturnedCopies()
        self._params, self._model_state = params, {} if model_state is None else model_state
        if example_batch is not None:
            check_leaves(example_batch, "`example_batch`", "example_batch", DataError, lists=False)
        self._example_batch: Batch | None = None
        self._waiting_for_batch = False
        self._items: list[Any] = []
        for name, source in data_sources(data, self.phases).items():
            self.set_data(name, source)
        # After the data, because `set_data` drops the example of the data that it replaces.
        self._example_batch = example_batch
        self.evaluation = Evaluator(state, engine.programs, self.phase_set.resolve)
        self.snapshots = Snapshots(self, engine.emitter.between_steps)
        self._services = Services(self.evaluation, self.snapshots, callbacks, self.set_data, self.exchange_model)
        self._build_carry()

    # -- building ---------------------------------------------------------------------------

    def _build_carry(self, batch: Batch | None = None) -> None:
        """Initialize the model and the optimizer, if the shape of a batch is known or not needed."""
        state, train = self.state, self.state.train
        # Parameters that the user has passed need no batch.
        if self.adapter is None:
            params, model_state = params_of_user(self.placement, self._params, self._model_state)
            self.engine.programs.initial = InitialArrays(self._params)
            self._params, self._model_state = None, {}  # release the caller's arrays, of which there are copies now
        else:
            batch = batch if batch is not None else self.example()
            made = params_of_model(self.placement, self.adapter, train.model_key(), batch, state.loss_fn, self.split)
            if made is None:  # `ensure_built` will try again with a batch
                return
            params, model_state = made
            self._release(state.model, self.adapter)
        opt_state = new_opt_state(self.placement, state.optimizer, params)
        train.hyperparams = HyperparamIndex(opt_state, state.optimizer)
        train.given_hyperparams = train.hyperparams.numbers(opt_state)
        train.carry = {
            "params": params,
            "model_state": model_state,
            "opt_state": opt_state,
            "cbstate": {},
            "counters": train.counters([0] * len(COUNTERS)),
        }
        # The platform is known from the arrays of the carry, so it is checked only here.
        if self.engine.programs.exact_observers and train.platform != "cpu":
            raise DeclarationError(
                f"`exact_observers=True` needs the CPU, and this Learner trains on {train.platform!r}.",
                why="on accelerators, XLA always fuses operations, and chooses them by all readers of a value",
                fix="leave it out; `learner.callbacks.disable` switches callbacks off without changing bits",
            )

    def example(self) -> Batch | None:
        """Return a batch, or its specs, if one is known without running anything."""
        if self._example_batch is not None:
            return self._example_batch
        for phase in self.phases:
            stream = self.streams.get(type(phase).name)
            if stream is not None:
                return stream.spec()
        return None

    def install(self, items: list[Any]) -> None:
        """Check and initialize callbacks, plan their calls, and dry-run the steps."""
        state, train = self.state, self.state.train
        graph = checked_graph(items, self.phases)
        refuse_shared(graph, self)
        refuse_useless(graph)
        check_watched_data(graph, self.streams)
        keep_switches(graph, getattr(self, "graph", None))
        if train.built:
            check_hyperparams(graph, train.hyperparams)
        self._items = items
        if not train.built:
            # Without the shape of a batch there are no parameters, which `init` may read. The graph has been checked;
            # `ensure_built` does the rest at the first batch.
            self.graph = graph
            self.snapshots.unsaved_fields.watch(graph)
            self._waiting_for_batch = True
            return
        backends = {d.position: self.engine.emitter.backend(d, self._services) for d in graph.declared}
        emitter = self.engine.emitter
        plan = Plan(graph, lambda d: backends[d.position].naming(d), state.meter.wrapper, emitter.adapt_call)
        moved = initialize(graph, plan, state, self.placement, graph.declared)
        # Before the steps are traced, because the number of switches is part of the shape of `counters`.
        if train.switches != flags(graph):
            train.switches = flags(graph)
            train.set_counters(state.progress)
        require_created(graph, {*state.cbstate, *moved})
        check_parts(graph, train.carry, state.cbstate)
        require_used(graph, moved, {*state.cbstate, *moved})
        warn_ineffective(graph)
        warn_of_optimizer(graph, self.phases, train.carry["opt_state"])
        self.engine.emitter.check(graph)
        # Tracing is the only way to find errors in traced handlers. It takes longest, so it comes last.
        self._dry_run(plan)
        for declared in graph.declared:
            # An instance belongs to one Learner, because its own attributes would mix two trainings.
            # `object.__setattr__` is needed for callbacks that are frozen dataclasses.
            object.__setattr__(unwrap(declared.callback), "_fluxcb_owner", weakref.ref(self))
        self.graph = graph
        self.snapshots.unsaved_fields.watch(graph)
        self._waiting_for_batch = False
        self._mark_positions()

    def _mark_positions(self) -> None:
        # Asking an iterator for its position at each window takes time, so it is done only if a callback saves
        # snapshots.
        saves = any(path[0] in ("*", "snapshots") for d in self.graph.declared for path in d.access)
        for stream in self.streams.values():
            stream.marks_positions = saves

    def _dry_run(self, plan: Plan) -> None:
        """Trace every phase whose batch shape is known. The compiled programs use these traces."""
        programs = self.engine.programs
        steps: dict[Phase, TracedStep] = {}

        def setup(phase: Phase) -> StepSetup:
            return self._setup_for(plan, phase)

        # The programs need the new plan while tracing. The engine gets it only after all traces have succeeded.
        undo = programs.use(plan, setup)
        try:
            for phase in self.phases:
                batch = self.batch_spec(phase)
                if batch is not None:
                    step = programs.traced(phase, batch)
                    programs.windows(phase, step)  # raises if a host handler declares a value that the step lacks
                    steps[phase] = step
            training = [phase for phase in self.phases if type(phase).trains]
            # Only if all of these phases were traced: another one may use the optimizer that seems unused.
            if training and steps.keys() >= set(training):
                refuse_unused(self.state.optimizer, frozenset().union(*(s.optimizers for s in steps.values())))
            warn_about_averaged_state(plan.graph, steps.values())
        except BaseException:  # keep the previous callbacks
            undo()
            raise
        programs.prune()
        self.engine.use(plan, setup)

    def program_kinds(self, recorded: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return the kind of program that each phase's steps run in, by phase name, as far as it is known.

        Args:
            recorded: The kinds in a checkpoint that is about to be restored; see `Programs.recorded_kind`.
        """
        steps = {type(phase).name: self.traced(phase) for phase in self.phases}
        programs, platform = self.engine.programs, self.state.train.platform
        return {
            name: programs.recorded_kind(step, platform, (recorded or {}).get(name))
            for name, step in steps.items()
            if step is not None
        }

    def adopt_kinds(self, recorded: Mapping[str, str]) -> None:
        """Run the kinds of programs that a restored checkpoint has recorded, where a measurement chooses them."""
        if self.engine.programs.adopt(recorded, self.state.train.platform):
            # Program runners hold programs of the previous kind.
            self.engine.forget_programs()

    def traced(self, phase: Phase) -> TracedStep | None:
        """Return a phase's traced step, or None if the shape of its batches is unknown."""
        batch = self.batch_spec(phase)
        return self.engine.programs.traced(phase, batch) if batch is not None else None

    def window_plan(self, phase: Phase) -> WindowPlan | None:
        """Return a phase's window plan, or None if the shape of its batches is unknown."""
        step = self.traced(phase)
        return self.engine.programs.windows(phase, step) if step is not None else None

    def _setup_for(self, plan: Plan, phase: Phase) -> StepSetup:
        state = self.state
        return StepSetup(
            self.adapter,
            state.loss_fn,
            state.optimizer,
            state.train.hyperparams,
            jax.random.key_impl(state.train.run_key),
            lambda event: plan.traced(event, type(phase)),
            self.split,
            switched_names(plan.graph),
            self.lineage,
            plan.records_skips,
        )

    def batch_spec(self, phase: Phase) -> Batch | None:
        """Return the specs of a phase's batches, or None if they are unknown."""
        stream = self.streams.get(type(phase).name)
        # The example is a batch of the first training phase. Other training phases may have batches of other shapes.
        is_example_of = type(phase).trains and (stream is None or phase == self.phase_set.training()[0])
        if is_example_of and self._example_batch is not None:
            return self._example_batch
        return stream.spec() if stream is not None else None

    def reinstall(self, items: list[Any]) -> None:
        """Install another set of callbacks. If that fails, everything stays as it was."""
        state = self.state
        if self.fitting or self.engine.running:
            raise DeclarationError(
                "The callbacks of a Learner cannot be replaced while it is fitting.",
                why="the plan of a running fit is fixed",
                fix="replace them between two calls of `fit`",
            )
        # `init` of the new callbacks can change both, so they are restored after an error.
        before = dict(state.cbstate), state.train.carry if state.train.built else None, state.train.switches
        old = list(self.graph.declared)
        try:
            self.install(items)
        except BaseException:
            state.cbstate, state.train.switches = before[0], before[2]
            if before[1] is not None:
                state.train.carry = before[1]
            raise
        kept = {id(unwrap(d.callback)) for d in self.graph.declared}  # the removed ones may join another Learner
        for declared in old:
            if id(unwrap(declared.callback)) not in kept:
                object.__setattr__(unwrap(declared.callback), "_fluxcb_owner", None)

    def initialize_again(self, restored: Collection[str]) -> None:
        """Initialize the entries of `cbstate` that a checkpoint does not have, after it was restored."""
        initialize_again(self.graph, self.engine.emitter.plan, self.state, self.placement, restored)

    def rewrap_handlers(self) -> None:
        """Wrap the handlers again, after measuring or tracing was turned on or off."""
        if not self._waiting_for_batch:  # otherwise `install` will use the new wrapper
            programs = self.engine.programs
            self.engine.use(programs.plan.with_timing(self.state.meter.wrapper), programs.setup)

    def exchange_model(self, model: Any) -> None:
        """Replace the parameters and the model state by those of another model.

        Raises:
            DeclarationError: There is no model, or its parameters have another structure, shape or dtype.
        """
        if self.adapter is None:
            raise DeclarationError("This Learner has no model.", fix="assign `learner.state` instead")
        state, train, adapter, batch = self.state, self.state.train, adapt(model), self.example()
        params, model_state = initialized(adapter, train.run_key, batch, state.loss_fn, self.split)
        train.carry = with_other_model(self.placement, train.carry, params, model_state)
        self._release(model, adapter)
        # The traced steps apply the old adapter.
        self.engine.forget_programs()

    def _release(self, model: Any, adapter: ModelAdapter) -> None:
        """Store a model without its initial arrays, because the carry has copies of them, which are trained."""
        held = getattr(adapter, "held", None)
        self.engine.programs.initial = InitialArrays(held[0] if held is not None else None, model)
        released = getattr(adapter, "released", None)
        self.adapter, self.state.model = (adapter, model) if released is None else released(model)

    # -- for the Learner --------------------------------------------------------------------------

    def schedule_of_phases(self) -> list[str]:
        """Return the training phases in the order in which `fit` runs them in an epoch; an `InTurn` counts as one."""
        return self.phase_set.schedule()

    def stream(self, phase: Phase) -> BatchStream:
        """Return a phase's data.

        Raises:
            DataError: There is none.
        """
        name = type(phase).name
        if name not in self.streams:
            raise self.phase_set.missing_data(phase)
        return self.streams[name]

    def refuse_while_running(self, what: str) -> None:
        """Refuse to change the train state during a running epoch or fit.

        Raises:
            DeclarationError: One is running.
        """
        if self.fitting or self.engine.running:
            raise used_while_running(what)

    def refuse_ahead(self, what: str) -> None:
        """Refuse to return the train state to a data source, or to a handler that did not declare to read it.

        Raises:
            DeclarationError: The device is ahead of the handler's step, or behind the batch of the source.
        """
        self.returned.verify()
        if (by_source := any(s.reading_ahead for s in self.streams.values())) or self.state.moment.ahead:
            raise read_ahead(what, by_source=by_source)

    def returned_copy(self, name: str, tree: PyTree) -> PyTree:
        """Return a copy that a property of the Learner returns, after registering it; see `ReturnedCopies`."""
        return tree if self.fitting or self.engine.running else self.returned.add(name, tree)

    def ensure_built(self, phase: Phase, batch: Batch | None = None) -> None:
        """Build the parts that waited for the shape of a batch, before the Learner runs anything."""
        # Here, because everything that runs a step comes through this method.
        self.returned.verify()
        if not self._waiting_for_batch:
            return
        if batch is None and type(phase).name in self.streams:
            batch = self.stream(phase).peek()
        if batch is None:
            _ = self.state.train.carry  # raises the error that explains what is missing
        check_leaves(batch, f"A batch of {type(phase).__name__}", "batch", DataError, lists=False)
        self._example_batch = spec_of(batch)
        self._build_carry(batch)
        self.install(self._items)

    def leave_out_batches(self) -> None:
        """Leave out the batches of the training data that callbacks name. A replay keeps those of the checkpoint."""
        left_out: dict[str, set[tuple[int, int]]] = {}
        for declared in self.graph.declared:
            for name, positions in declared.callback.left_out_batches().items() if not declared.disabled else ():
                left_out.setdefault(name, set()).update(positions)
        for name in left_out.keys() & self.streams.keys():
            self.streams[name].leave_out(left_out[name])

    def set_data(self, name: str, source: Any) -> None:
        """Use another data source for a phase from the next epoch on."""
        # A running epoch keeps its stream; the next epoch looks the stream up again.
        name_shown = f"data.{name}"
        placement = BatchPlacement(self.placement, name_shown) if self.placement is not None else None
        stream = BatchStream(source, name_shown, placement)
        if name in self.streams:
            stream.adopt(self.streams[name])
            stream.marks_positions = self.streams[name].marks_positions  # `_mark_positions` runs only in `install`
        self.streams[name] = stream
        # The new batches may have other shapes, which is no error.
        self.engine.programs.forget_shapes(name)
        if next((type(phase).name for phase in self.phases if type(phase).trains), None) == name:
            self._example_batch = None  # the new data may have another shape
        self.state.data[name] = source
