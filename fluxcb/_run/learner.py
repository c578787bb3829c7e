"""The Learner: what users construct, train and look at."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import networkx as nx
import numpy as np
import optax

from fluxcb._check.graph import CallbackGraph
from fluxcb._check.preflight import build_graph
from fluxcb._check.render import explain
from fluxcb._compile.arrays import copy_tree, differences, is_key
from fluxcb._compile.hyperparams import HyperparamIndex
from fluxcb._compile.plan import Plan
from fluxcb._compile.step import ProgramKind
from fluxcb._compile.traced import StepSetup
from fluxcb._declare.callback import unwrap
from fluxcb._declare.control import CancelFitting
from fluxcb._declare.events import Event, FitBegin, FitEnd, HostEvent, TracedEvent
from fluxcb._declare.phases import (
    AbstractTrainingPhase,
    LossTrainingPhase,
    LossValidationPhase,
    Phase,
    TrainingPhase,
    ValidationPhase,
    split_batch,
)
from fluxcb._declare.schedules import positive
from fluxcb._errors import DataError, DeclarationError, FluxcbError, MissingStateError
from fluxcb._run.callbackset import CallbackSet
from fluxcb._run.engine import Engine
from fluxcb._run.feed import Feed
from fluxcb._run.interrupts import Interrupt, caught_interrupts
from fluxcb._run.programs import Programs
from fluxcb._run.state import HostBackend, HostState
from fluxcb._typing import Batch, LossFn, PyTree
from fluxcb.callbacks import with_defaults
from fluxcb.models import adapt

__all__ = ["Learner"]


class Learner:
    """A model, a loss, an optimizer and data, trained by a loop that callbacks fill.

    Construction checks the callbacks against each other, runs their `init`, and dry-runs the
    compiled step; what is wrong is an error then. The model and the arrays you pass in are
    copied: training never changes them.

    Args:
        model: A Flax NNX or Linen module, an Equinox module, or a pair of functions
            `(init(key, xs) -> params, apply(params, xs) -> outputs)`.
        loss_fn: `loss_fn(outputs, ys) -> float[]`.
        optimizer: An optax optimizer; `fluxcb.inject(optax.adam, learning_rate=1e-3)` gives it
            hyperparameters that callbacks can change.
        data: Batches for training; a pair `(training, validation)`; or a mapping by phase name.
            A source is anything that yields batches again when iterated again.
        callbacks: Callback instances, and `in_order(...)` groups of them.
        key: Seed (int) or typed random key of the run.
        phases: The phases that will be run; their steps are checked at construction.
        default_callbacks: Whether to add Metrics, Recorder, ProgressBar, MetricsPrinter and
            StopOnNaNLoss where the list has none of their class.
        example_batch: A batch (or its `jax.ShapeDtypeStruct`s), where the data cannot be peeked at.
        program: `loop`, `straight`, or None to let the model decide (see docs/host-and-traced.md).

    Raises:
        FluxcbError: Anything that can be known to be wrong before the first step.

    Example:
        >>> import jax.numpy as jnp, optax, fluxcb
        >>> from fluxcb.data import ArrayLoader
        >>> xs = jnp.linspace(-1, 1, 64)[:, None]
        >>> learner = fluxcb.Learner(
        ...     (lambda key, xs: {"w": jnp.zeros((1, 1))}, lambda params, xs: xs @ params["w"]),
        ...     lambda outputs, ys: jnp.mean((outputs - ys) ** 2),
        ...     optax.sgd(0.5),
        ...     data=ArrayLoader((xs, 3 * xs), batch_size=16),
        ...     default_callbacks=False,
        ... )
        >>> learner.fit(20)
        >>> bool(abs(learner.params["w"][0, 0] - 3) < 1e-3)
        True
    """

    def __init__(
        self,
        model: Any,
        loss_fn: LossFn | None,
        optimizer: optax.GradientTransformation,
        *,
        data: Any = None,
        callbacks: Iterable[Any] = (),
        key: Any = 0,
        phases: Iterable[Phase] | None = None,
        default_callbacks: bool = True,
        example_batch: Batch | None = None,
        program: ProgramKind | None = None,
    ) -> None:
        self._set_up(
            adapt(model), model, None, loss_fn, optimizer, data, callbacks, key, phases, default_callbacks,
            example_batch, program,
        )  # fmt: skip

    @classmethod
    def from_loss(
        cls,
        params: PyTree,
        loss_fn: LossFn,
        optimizer: optax.GradientTransformation,
        *,
        data: Any = None,
        callbacks: Iterable[Any] = (),
        key: Any = 0,
        phases: Iterable[Phase] | None = None,
        default_callbacks: bool = True,
        example_batch: Batch | None = None,
        program: ProgramKind | None = None,
    ) -> Learner:
        """Build a Learner from parameters and a loss of them.

        Args:
            params: The parameters: a pytree of arrays; copied.
            loss_fn: `loss_fn(params, batch, key) -> loss`, or `-> (loss, aux)`; aux becomes `step.aux`.
            optimizer: As for `Learner`; so are the others.
            data: See `Learner`.
            callbacks: See `Learner`.
            key: See `Learner`.
            phases: See `Learner`.
            default_callbacks: See `Learner`.
            example_batch: See `Learner`.
            program: See `Learner`.
        """
        learner = cls.__new__(cls)
        learner._set_up(
            None, None, params, loss_fn, optimizer, data, callbacks, key, phases, default_callbacks,
            example_batch, program,
        )  # fmt: skip
        return learner

    def _set_up(
        self,
        adapter: Any,
        model: Any,
        params: PyTree | None,
        loss_fn: LossFn | None,
        optimizer: Any,
        data: Any,
        callbacks: Iterable[Any],
        key: Any,
        phases: Iterable[Phase] | None,
        default_callbacks: bool,
        example_batch: Batch | None,
        program: ProgramKind | None,
    ) -> None:
        if not (hasattr(optimizer, "init") and hasattr(optimizer, "update")):
            raise DeclarationError(
                f"`optimizer` must be an optax optimizer, not {optimizer!r}.",
                fix="e.g. `fluxcb.inject(optax.adam, learning_rate=1e-3)`",
            )
        self._adapter, self._given_params = adapter, params
        self._phases = self._own_phases(phases)
        self._state = HostState(model=model, loss_fn=loss_fn, optimizer=optimizer, key=_as_key(key))
        self._state.on_data, self._state.on_model = self._set_data, self.set_model
        self._engine = Engine(self._state, Programs(program))
        self._feeds: dict[str, Feed] = {}
        self._fitting = False
        self.stop_reason: str | None = None
        for name, source in _sources(data, self._phases).items():
            self._set_data(name, source)
        self._example_batch = example_batch
        self._graph: CallbackGraph
        items = list(callbacks) if not isinstance(callbacks, str) and isinstance(callbacks, Iterable) else callbacks
        items = with_defaults(items) if default_callbacks else items
        self._build_carry()
        self._install(items)  # type: ignore[arg-type]  # what is no list is refused there
        self._callbacks = CallbackSet(items, self._reinstall)  # type: ignore[arg-type]
        self._state.callbacks = self._callbacks

    def _own_phases(self, phases: Iterable[Phase] | None) -> tuple[Phase, ...]:
        """Return the phases, with those of a plain loss in the place of the usual two if there is no model."""
        given = tuple(phases) if phases is not None else (TrainingPhase(), ValidationPhase())
        for phase in given:
            if not isinstance(phase, Phase):
                raise DeclarationError(
                    f"`phases` contains {phase!r}, which is no phase instance.",
                    fix=f"write `{phase.__name__}()`" if isinstance(phase, type) else "e.g. `phases=(TrainingPhase(),)`",
                )
        return tuple(self._own_phase(phase) for phase in given)

    def _own_phase(self, phase: Phase) -> Phase:
        if self._adapter is not None:
            return phase
        return {TrainingPhase: LossTrainingPhase(), ValidationPhase: LossValidationPhase()}.get(type(phase), phase)

    # -- building ---------------------------------------------------------------------------

    def _build_carry(self, batch: Batch | None = None) -> None:
        """Initialise the model and the optimizer, if the shape of a batch is known or not needed."""
        state = self._state
        if self._adapter is None:
            params, model_state = self._given_params, {}
        else:
            batch = batch if batch is not None else self._example()
            try:
                xs = split_batch(_concrete(batch))[0] if batch is not None else None
                params, model_state = self._adapter.init(jax.random.fold_in(state.run_key, 0), xs)
            except Exception:
                if batch is None:  # nothing tells a batch's shape; the first step will
                    return
                raise
        params = copy_tree(params)
        _check_params(params)
        opt_state = copy_tree(state.optimizer.init(params))
        state.hyperparams = HyperparamIndex(opt_state)
        state.carry = {
            "params": params,
            "model_state": copy_tree(model_state),
            "opt_state": opt_state,
            "key": jnp.copy(state.run_key),
            "cbstate": {},
            "counters": jnp.zeros(4, jnp.int32),
        }

    def _example(self) -> Batch | None:
        if self._example_batch is not None:
            return self._example_batch
        for phase in self._phases:
            feed = self._feeds.get(type(phase).name)
            if feed is not None:
                return feed.spec()
        return None

    def _install(self, items: list[Any]) -> None:
        """Check callbacks, initialise them, plan and dry-run the steps."""
        state = self._state
        graph = build_graph(items, self._phases)
        self._refuse_shared(graph)
        self._check_hyperparams(graph)
        if not state.built:  # without a batch's shape, the rest waits for the first one
            self._graph = graph
            self._waiting_for_batch = True
            return
        self._waiting_for_batch = False
        backends = {d.position: HostBackend(state, d) for d in graph.declared}
        in_carry_before = dict(state.carry["cbstate"])
        # Everything is on the host while callbacks initialise, then what traced handlers use moves back.
        state.cbstate = {**state.cbstate, **in_carry_before}
        state.carry = {**state.carry, "cbstate": {}}
        plan = Plan(graph, lambda d: backends[d.position], frozenset())
        for declared in graph.init_order():
            try:
                declared.callback.init(plan.proxy(declared, declared.access))
            except FluxcbError:
                raise
            except Exception as error:
                error.add_note(f"raised in the `init` of {declared.label}")
                raise
            if state.handed:
                state.verify_handed()
        riding = _riding(graph, state.cbstate)
        state.carry = {**state.carry, "cbstate": {name: copy_tree(state.cbstate.pop(name)) for name in riding}}
        self._require_created(graph)
        plan = Plan(graph, lambda d: backends[d.position], frozenset(riding))
        self._dry_run(plan)
        for declared in graph.declared:
            object.__setattr__(unwrap(declared.callback), "_fluxcb_learner", weakref.ref(self))
        self._graph = graph

    def _dry_run(self, plan: Plan) -> None:
        """Trace every phase whose batches' shape is known; the traces are what programs are made of."""
        for phase in self._phases:
            batch = self._batch_spec(phase)
            if batch is not None:
                self._engine.programs.traced(self._setup_for(plan, phase), plan, phase, self._state.carry, batch)
        self._engine.use(plan, lambda phase: self._setup_for(plan, phase))

    def _setup_for(self, plan: Plan, phase: Phase) -> StepSetup:
        state = self._state
        return StepSetup(
            self._adapter, state.loss_fn, state.optimizer, state.hyperparams, lambda event: plan.traced(event, type(phase))
        )

    def _batch_spec(self, phase: Phase) -> Batch | None:
        feed = self._feeds.get(type(phase).name)
        if feed is not None:
            return feed.spec()
        return self._example_batch if type(phase).trains else None

    def _reinstall(self, items: list[Any]) -> None:
        """Install another set of callbacks, or leave everything as it was."""
        state = self._state
        if self._fitting:
            raise DeclarationError(
                "The callbacks of a Learner cannot be exchanged while it is fitting.",
                why="the plan of a running fit is fixed",
                fix="exchange them between two calls of `fit`",
            )
        before = dict(state.cbstate), state.carry if state.built else None
        old = list(self._graph.declared)
        try:
            self._install(items)
        except BaseException:
            state.cbstate = before[0]
            if before[1] is not None:
                state.carry = before[1]
            raise
        kept = {id(unwrap(d.callback)) for d in self._graph.declared}
        for declared in old:
            if id(unwrap(declared.callback)) not in kept:
                object.__setattr__(unwrap(declared.callback), "_fluxcb_learner", None)

    def _refuse_shared(self, graph: CallbackGraph) -> None:
        for declared in graph.declared:
            reference = getattr(unwrap(declared.callback), "_fluxcb_learner", None)
            owner = reference() if reference is not None else None
            if owner is not None and owner is not self:
                raise DeclarationError(
                    f"{declared.label} already belongs to another Learner.",
                    why="a callback's own state would mix the two trainings",
                    fix=[
                        "construct a new instance for each Learner",
                        "or free it first: `other.callbacks.remove(callback)`",
                    ],
                )

    def _check_hyperparams(self, graph: CallbackGraph) -> None:
        if not self._state.built:
            return
        for declared in graph.declared:
            for path, permission in declared.access.items():
                if path[0] == "hyperparams" and len(path) > 1:
                    self._state.hyperparams.require(
                        path[1],
                        writing=type(permission).__name__ == "Write",
                        who=declared.label,
                        where=declared.where,
                    )

    def _require_created(self, graph: CallbackGraph) -> None:
        exists = {*self._state.cbstate, *self._state.carry["cbstate"]}
        for declared in graph.declared:
            for path in declared.access:
                if path[0] == "cbstate" and len(path) > 1 and path[1] not in exists:
                    writers = [d.label for d in graph.declared for p in d.access if p[:2] == path[:2]]
                    raise MissingStateError(
                        f"{declared.label} declares `cbstate.{path[1]}`, which no callback's `init` creates.",
                        where=declared.where,
                        why="shared state must exist before the first handler runs",
                        fix=f"assign `learner.cbstate.{path[1]} = ...` in the `init` of {' or '.join(dict.fromkeys(writers))}",
                    )

    # -- training ---------------------------------------------------------------------------

    def fit(
        self, epochs: int | None = None, *, steps: int | None = None, steps_per_epoch: int | None = None
    ) -> None:
        """Train.

        Args:
            epochs: How many epochs more to train.
            steps: How many steps more to train, instead of epochs.
            steps_per_epoch: Length of an epoch (steps), for streams without an end; the stream
                then runs on from epoch to epoch. Without it, an epoch is one pass over the data.

        Raises:
            DeclarationError: Not exactly one of epochs and steps, or one that is not positive.
            FluxcbError: Something that only the data or a handler could show.
            Exception: Whatever a handler raised, unchanged, with a note that says where.
        """
        if (epochs is None) == (steps is None):
            raise DeclarationError(
                "`fit` takes exactly one of epochs and steps.", fix="write `learner.fit(10)` or `learner.fit(steps=10_000)`"
            )
        if epochs is not None:
            positive(epochs, "The number of epochs of `fit`")
        if steps is not None:
            positive(steps, "`steps` of `fit`")
        if steps_per_epoch is not None:
            positive(steps_per_epoch, "`steps_per_epoch` of `fit`")
        phase = self._training_phase()
        self._feed(phase)
        if self._fitting:
            raise DeclarationError("`fit` was called while this Learner is fitting.", fix="call it after the other returned")
        self._ensure_built(phase)
        self._fitting, self.stop_reason = True, None
        self._state.epochs = self._state.epoch + epochs if epochs is not None else 0
        with caught_interrupts() as interrupt:
            self._engine.interrupt = interrupt
            try:
                self._run_fit(phase, epochs, steps, steps_per_epoch)
            finally:
                self._fitting = False
                self._engine.interrupt = Interrupt()
                self._state.epochs = self._state.steps_in_epoch = 0

    def _run_fit(self, phase: Phase, epochs: int | None, steps: int | None, steps_per_epoch: int | None) -> None:
        failure: BaseException | None = None
        try:
            self._engine.emit(FitBegin(), phase)
            self._loop(phase, epochs, steps, steps_per_epoch)
            if self._engine.interrupt.requested:
                raise KeyboardInterrupt
        except CancelFitting as cancel:
            self.stop_reason = str(cancel) or "CancelFitting"
        except BaseException as error:
            self.stop_reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            failure = error
        failures = self._end_fit(phase)
        if failure is not None:
            for other in failures:
                failure.add_note(f"and at FitEnd: {type(other).__name__}: {other}")
            raise failure
        if len(failures) == 1:
            raise failures[0]
        if failures:
            raise ExceptionGroup("several callbacks failed at FitEnd", failures)

    def _loop(self, phase: Phase, epochs: int | None, steps: int | None, steps_per_epoch: int | None) -> None:
        engine, state = self._engine, self._state
        goes_on = steps_per_epoch is not None
        last_step = state.step + steps if steps is not None else None
        done = 0
        while not engine.interrupt.requested and (done < epochs if epochs is not None else state.step < last_step):  # type: ignore[operator]
            limit = steps_per_epoch
            if last_step is not None:
                limit = min(last_step - state.step, limit) if limit is not None else last_step - state.step
            before = state.step
            engine.run_epoch(phase, self._feed(phase), limit=limit, goes_on=goes_on)
            if engine.interrupt.requested:
                return
            if steps is not None and state.step == before and self._feed(phase).used_up:
                self._feed(phase).begin_epoch(state.epoch + 1, goes_on=goes_on)  # says that it is used up
            self._validate(phase)
            if not engine.interrupt.requested:
                engine.trigger(phase)
            done += 1

    def _validate(self, phase: Phase) -> None:
        for other in self._phases:
            if other is not phase and not type(other).trains and type(other).name in self._feeds:
                self._engine.run_epoch(other, self._feed(other), limit=None, goes_on=False)

    def _end_fit(self, phase: Phase) -> list[Exception]:
        """Run every FitEnd handler, whatever the others do; return what they raised."""
        failures: list[Exception] = []
        event = FitEnd()
        for call in self._engine.plan.calls(FitEnd, type(phase)):
            try:
                self._engine.run_calls((call,), event, phase)
            except CancelFitting:
                continue
            except Exception as error:
                failures.append(error)
        return failures

    def run_epoch(self, phase: Phase, *, steps: int | None = None) -> int:
        """Run one epoch of a phase, for loops written by hand; emits EpochBegin, the steps' events and EpochEnd.

        Args:
            phase: The phase; its data is `data.<phase.name>`.
            steps: Steps at most, or None for all the data.

        Returns:
            The number of steps run.

        Raises:
            CancelFitting: A handler wants the training to end; EpochEnd has been emitted.
        """
        phase = self._known_phase(phase)
        if steps is not None:
            positive(steps, "`steps` of `run_epoch`")
        feed = self._feed(phase)
        self._ensure_built(phase)
        return self._engine.run_epoch(phase, feed, limit=steps, goes_on=False)

    def run_step(self, phase: Phase, batch: Batch) -> dict[str, Any]:
        """Run one step of a phase on a batch of yours; emits StepBegin, the traced events and StepEnd.

        Args:
            phase: The phase.
            batch: The batch.

        Returns:
            The step's loss, and the step values that host handlers declare, by name (on the
            device); empty if a handler cancelled the step.

        Raises:
            CancelEpoch: A handler wants the epoch to end.
            CancelFitting: A handler wants the training to end.
        """
        phase = self._known_phase(phase)
        self._ensure_built(phase, batch)
        return self._engine.run_single(phase, batch)

    def emit(self, event: Event, phase: Phase) -> None:
        """Emit a host event of your own from a loop written by hand.

        Args:
            event: The event instance; handlers get it.
            phase: The phase.

        Raises:
            DeclarationError: It is no host event.
        """
        if not isinstance(event, HostEvent):
            kind = "a traced event" if isinstance(event, TracedEvent) else "no event"
            raise DeclarationError(f"`learner.emit` emits host events; {event!r} is {kind}.")
        phase = self._known_phase(phase)
        self._ensure_built(phase)
        self._engine.emit(event, phase)

    def trigger(self) -> None:
        """Emit the Trigger that follows a training epoch, for loops written by hand."""
        phase = self._training_phase()
        self._ensure_built(phase)
        self._engine.trigger(phase)

    def _training_phase(self) -> Phase:
        for phase in self._phases:
            if isinstance(phase, AbstractTrainingPhase) or type(phase).trains:
                return phase
        raise DeclarationError("None of this Learner's phases trains.", fix="give `phases=(TrainingPhase(), ...)`")

    def _known_phase(self, phase: Phase) -> Phase:
        if not isinstance(phase, Phase):
            raise DeclarationError(f"{phase!r} is no phase instance.", fix="e.g. `learner.run_epoch(ValidationPhase())`")
        return self._own_phase(phase)

    def _feed(self, phase: Phase) -> Feed:
        name = type(phase).name
        if name not in self._feeds:
            raise DataError(
                f"There is no data for {type(phase).__name__}: `data.{name}` is not set.",
                fix=f'give the Learner `data={{"{name}": batches}}`',
            )
        return self._feeds[name]

    def _ensure_built(self, phase: Phase, batch: Batch | None = None) -> None:
        """Build what waited for the shape of a batch."""
        if not self._waiting_for_batch:
            return
        if batch is None and type(phase).name in self._feeds:
            batch = self._feed(phase).peek()
        self._example_batch = batch
        self._build_carry(batch)
        self._install(self._callbacks._items)

    # -- looking ----------------------------------------------------------------------------

    @property
    def callbacks(self) -> CallbackSet:
        """The callbacks; has add, get, replace, remove and set."""
        return self._callbacks

    @property
    def graph(self) -> nx.DiGraph:
        """The callback graph: an edge runs from the earlier callback to the later, with `reasons` and `moments`."""
        return self._graph.digraph

    def explain(self) -> str:
        """Return per moment who runs, in which order, and why."""
        return explain(self._graph)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases."""
        return self._phases

    @property
    def params(self) -> PyTree:
        """A copy of the parameters."""
        return copy_tree(self._state.carry["params"])

    @property
    def model(self) -> Any:
        """A fresh model of your kind with the trained parameters; the one you passed in is never changed."""
        if self._adapter is None:
            raise DeclarationError(
                "This Learner has no model: it was built with `Learner.from_loss`.", fix="use `learner.params`"
            )
        carry = self._state.carry
        return self._adapter.rebuild(copy_tree(carry["params"]), copy_tree(carry["model_state"]))

    def set_model(self, model: Any) -> None:
        """Train on with another model's parameters; it must have the same structure.

        Raises:
            DeclarationError: Its parameters have another structure, shape or dtype.
        """
        if self._adapter is None:
            raise DeclarationError("This Learner has no model.", fix="assign `learner.state` instead")
        adapter = adapt(model)
        batch = self._example()
        params, model_state = adapter.init(
            self._state.run_key, split_batch(_concrete(batch))[0] if batch is not None else None
        )
        carry = self._state.carry
        wrong = differences(carry["params"], params) + differences(carry["model_state"], model_state)
        if wrong:
            raise DeclarationError(
                f"The new model does not fit the Learner: {wrong[0]}.",
                where=wrong[1:5],
                fix="build a new Learner for a model of another structure",
            )
        self._state.carry = {**carry, "params": copy_tree(params), "model_state": copy_tree(model_state)}
        self._state.model = model

    @property
    def state(self) -> PyTree:
        """The whole train state as one pytree (a copy): params, model_state, opt_state, key, cbstate, counters."""
        return copy_tree(self._state.carry)

    @state.setter
    def state(self, state: PyTree) -> None:
        carry = self._state.carry
        wrong = differences(carry, state)
        if wrong:
            raise DeclarationError(
                f"The assigned state does not fit the Learner: {wrong[0]}.",
                where=wrong[1:5],
                fix="assign what `learner.state` returned, with other values",
            )
        self._state.carry = copy_tree(state)
        self._state.run_key = jnp.copy(self._state.carry["key"])
        self._state.step, self._state.epoch, self._state.step_in_epoch, _ = np.asarray(state["counters"]).tolist()

    @property
    def cbstate(self) -> Mapping[str, Any]:
        """What callbacks share, by name: for looking at, in notebooks and tests."""
        state = self._state
        riding = copy_tree(state.carry["cbstate"]) if state.built else {}
        return {**state.cbstate, **riding}

    @property
    def step(self) -> int:
        """Finished training steps."""
        return self._state.step

    @property
    def epoch(self) -> int:
        """Number of the epoch at hand, or of the last one; 0 before the first."""
        return self._state.epoch

    @property
    def hyperparams(self) -> dict[str, float]:
        """The injected hyperparameters' values."""
        state = self._state
        return {name: float(state.hyperparams.get(state.carry["opt_state"], name)) for name in state.hyperparams.names}

    @property
    def compile_counts(self) -> dict[str, int]:
        """How often a step was traced and a program compiled: `{"traces": 2, "compiles": 2}`."""
        programs = self._engine.programs
        return {"traces": programs.traces, "compiles": programs.compiles}

    def _set_data(self, name: str, source: Any) -> None:
        self._feeds[name] = Feed(source, f"data.{name}")
        self._state.data[name] = source

    def __repr__(self) -> str:
        return f"<Learner at epoch {self.epoch}, step {self.step}, with {len(self._callbacks)} callbacks>"


def _as_key(key: Any) -> Any:
    if isinstance(key, int) and not isinstance(key, bool):
        return jax.random.key(key)
    if is_key(key) and key.shape == ():
        return jnp.copy(key)
    raise DeclarationError(
        f"`key` must be an int or a typed random key, not {key!r}.", fix="write `key=0` or `key=jax.random.key(0)`"
    )


def _sources(data: Any, phases: tuple[Phase, ...]) -> dict[str, Any]:
    if data is None:
        return {}
    names = {type(p).name for p in phases}
    if isinstance(data, Mapping):
        for name in data:
            if name not in names:
                raise DataError(
                    f"`data` has {name!r}, but no phase is called so.", fix=f"use {' or '.join(map(repr, sorted(names)))}"
                )
        return dict(data)
    if isinstance(data, tuple) and len(data) == 2:
        return {name: source for name, source in zip(("training", "validation"), data, strict=True) if source is not None}
    return {"training": data}


def _concrete(batch: Batch) -> Batch:
    """Return zeros of the batch's shapes: models are initialised from shapes, not from values."""
    return jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else jnp.zeros_like(jnp.asarray(x)),
        batch,
    )


def _check_params(params: PyTree) -> None:
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    if not leaves:
        raise DeclarationError("The model has no parameters.", fix="check what its `init` returns")
    for path, leaf in leaves:
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise DeclarationError(
                f"The parameter `params{jax.tree_util.keystr(path)}` is {leaf.dtype}[{', '.join(map(str, leaf.shape))}]; "
                "parameters must be floating-point.",
                why="there is no gradient with respect to an integer",
                fix="keep it in `model_state`, or in the loss function's closure",
            )


def _riding(graph: CallbackGraph, cbstate: Mapping[str, Any]) -> list[str]:
    """Return the `cbstate` entries that ride in the carry: JAX arrays that a traced handler declares."""
    declared: set[str] = set()
    everything = False
    for (event, _), handlers in graph.orders.items():
        if not issubclass(event, TracedEvent):
            continue
        for handler in handlers:
            for path in handler.access:
                if path[0] == "cbstate" and len(path) > 1:
                    declared.add(path[1])
                everything |= path in (("cbstate",), ("*",))
    return [
        name
        for name, value in cbstate.items()
        if (everything or name in declared)
        and (leaves := jax.tree.leaves(value))
        and all(isinstance(leaf, jax.Array) for leaf in leaves)
    ]
