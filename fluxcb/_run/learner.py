"""The Learner: what users construct, train and look at."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from typing import Any

import networkx as nx
import optax

from fluxcb._compile.arrays import own_copy
from fluxcb._compile.program import ProgramKind
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import Event, HostEvent, TracedEvent
from fluxcb._declare.phases import Phase
from fluxcb._declare.schedules import positive
from fluxcb._declare.signatures import explained
from fluxcb._errors import DeclarationError
from fluxcb._run.assembly import Assembly
from fluxcb._run.callbackset import CallbackSet
from fluxcb._run.choosing import choose_engine
from fluxcb._run.executors import Executor
from fluxcb._run.explaining import explain_windows
from fluxcb._run.fitting import FitLength, describe_error, run_fit
from fluxcb._run.given import FIT_CURES, LEARNER_CURES, as_key, as_loss, as_optimizer
from fluxcb._run.history import History
from fluxcb._run.interrupts import Interrupt, caught_interrupts
from fluxcb._run.model_methods import ModelMethods
from fluxcb._run.programs import Programs, StepsPerCall
from fluxcb._run.resuming import restore_run, resume_run
from fluxcb._run.showing import learner_html
from fluxcb._run.state_view import StateView
from fluxcb._tracebacks import entry_point
from fluxcb._typing import Batch, LossFn, PyTree
from fluxcb.callbacks import with_defaults
from fluxcb.models import adapt

__all__ = ["Learner"]

WINDOW_BYTES = 64 * 2**20


class Learner(ModelMethods):
    """A model, a loss, an optimizer and data, trained by a loop that callbacks fill.

    Construction checks the callbacks against each other, runs their `init`, and dry-runs the
    compiled step; what is wrong is an error then. The model and the arrays you pass in are
    copied: training never changes them.

    Args:
        model: A Flax NNX or Linen module, an Equinox module, or a pair of functions
            `(init(key, xs) -> params, apply(params, xs) -> outputs)`.
        loss_fn: `loss_fn(outputs, ys) -> float[]`.
        optimizer: An optax optimizer; `fluxcb.inject(optax.adam, learning_rate=1e-3)` gives it
            hyperparameters that callbacks can change. Its `init` is compiled where it can be.
        data: Batches for training; a pair `(training, validation)`; or a mapping by phase name.
            A source is anything that yields batches again when iterated again.
        callbacks: Callback instances, and `in_order(...)` groups of them.
        key: Seed (int) or typed random key of the run.
        phases: The phases that will be run; their steps are checked at construction.
        default_callbacks: Whether to add Metrics, Recorder, ProgressBar, MetricsPrinter and
            StopOnNaNLoss where the list has none of their class.
        example_batch: A training batch (or its `jax.ShapeDtypeStruct`s), so that none is pulled from the training data
            to learn its shape. Batches of another shape are an error then.
        steps_per_call: How many steps one call of the compiled program runs at most: a number, or "auto". On CPU the
            results are the same bit for bit (see docs/concepts/windows.md).
        window_bytes: Memory that the batches and the fetched values of one call may take (bytes); two calls are under
            way at a time.
        program: `loop`, `straight`, or None to let the model decide (see docs/concepts/windows.md).
        executor: Where host handlers run: `SerialExecutor()` (the default), `ThreadExecutor(4)` or `DaskExecutor()`.

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
        >>> history = learner.fit(20)
        >>> bool(abs(learner.params["w"][0, 0] - 3) < 1e-3)
        True
    """

    @entry_point
    @explained(LEARNER_CURES)
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
        steps_per_call: StepsPerCall = "auto",
        window_bytes: int = WINDOW_BYTES,
        program: ProgramKind | None = None,
        executor: Executor | None = None,
    ) -> None:
        loss = as_loss(loss_fn, ("outputs", "ys"), phases)
        given = {"model": model, "loss_fn": loss, "optimizer": as_optimizer(optimizer), "key": as_key(key)}
        parts = Assembly(
            adapter=adapt(model),
            params=None,
            engine=choose_engine(executor, Programs(program, steps_per_call, window_bytes), **given),
            phases=phases,
            data=data,
            example_batch=example_batch,
        )
        self._begin(parts, callbacks, default_callbacks)

    @classmethod
    @entry_point
    @explained(LEARNER_CURES)
    def from_loss(
        cls,
        params: PyTree,
        loss_fn: LossFn | None,
        optimizer: optax.GradientTransformation,
        *,
        data: Any = None,
        callbacks: Iterable[Any] = (),
        key: Any = 0,
        phases: Iterable[Phase] | None = None,
        default_callbacks: bool = True,
        example_batch: Batch | None = None,
        steps_per_call: StepsPerCall = "auto",
        window_bytes: int = WINDOW_BYTES,
        program: ProgramKind | None = None,
        executor: Executor | None = None,
    ) -> Learner:
        """Build a Learner from parameters and a loss of them.

        Args:
            params: The parameters: a pytree of arrays; copied.
            loss_fn: `loss_fn(params, batch, key) -> loss`, or `-> (loss, aux)`; aux becomes `step.aux`.
                None if phases of yours have losses of their own.
            optimizer: As for `Learner`; so are the others.
            data: See `Learner`.
            callbacks: See `Learner`.
            key: See `Learner`.
            phases: See `Learner`.
            default_callbacks: See `Learner`.
            example_batch: See `Learner`.
            steps_per_call: See `Learner`.
            window_bytes: See `Learner`.
            program: See `Learner`.
            executor: See `Learner`.
        """
        loss = as_loss(loss_fn, ("params", "batch", "key"), phases)
        given = {"model": None, "loss_fn": loss, "optimizer": as_optimizer(optimizer), "key": as_key(key)}
        parts = Assembly(
            adapter=None,
            params=params,
            engine=choose_engine(executor, Programs(program, steps_per_call, window_bytes), **given),
            phases=phases,
            data=data,
            example_batch=example_batch,
        )
        learner = cls.__new__(cls)
        learner._begin(parts, callbacks, default_callbacks)
        return learner

    def _begin(self, parts: Assembly, callbacks: Iterable[Any], default_callbacks: bool) -> None:
        items: Any = callbacks
        if isinstance(callbacks, Iterable) and not isinstance(callbacks, str | Callback):
            items = list(callbacks)
            items = with_defaults(items) if default_callbacks else items
        self._parts = parts
        self._state = parts.state
        self._state.on_model = self._parts.exchange_model
        self._callbacks = CallbackSet(
            items if isinstance(items, list) else [],
            parts.reinstall,
            parts.measure,
            parts.state.meter.timings,
            parts.trace,
            lambda: parts.graph,
        )
        self._state.callbacks = self._callbacks
        parts.install(items)
        self.stop_reason: str | None = None

    # -- training ---------------------------------------------------------------------------

    @entry_point
    @explained(FIT_CURES)
    def fit(
        self,
        epochs: int | None = None,
        *,
        steps: int | None = None,
        steps_per_epoch: int | None = None,
        resume: bool = False,
    ) -> History:
        """Train.

        SIGTERM ends a fit after the window at hand, as Ctrl-C does: `FitStopping` and `FitEnd` are emitted, and `fit`
        returns with `stop_reason` "preempted" (after Ctrl-C it raises KeyboardInterrupt). A second signal ends the
        program at once.

        Args:
            epochs: How many epochs more to train.
            steps: How many steps more to train, instead of epochs.
            steps_per_epoch: Length of an epoch (steps), for streams without an end; the stream
                then runs on from epoch to epoch. Without it, an epoch is one pass over the data.
            resume: Go on with the run in the Checkpointer's directory, from its newest good checkpoint; begin one if
                there is none. `epochs` or `steps` then count from where that run began: the same program, started
                again, ends where it would have ended.

        Returns:
            The metrics of the whole training run, and the reason it ended; see `History`.

        Raises:
            DeclarationError: Not exactly one of epochs and steps, or one that is not positive.
            FluxcbError: Something that only the data or a handler could show.
            CheckpointError: With `resume`, there is no Checkpointer, all checkpoints are damaged, or they are those of
                a run that differs from this one.
            Exception: Whatever a handler raised, unchanged, with a note that says where.
        """
        length = FitLength(epochs, steps, steps_per_epoch)
        parts, state = self._parts, self._state
        phase = parts.training_phase()
        parts.feed(phase)
        if parts.fitting:
            raise DeclarationError(
                "`fit` was called while this Learner is fitting.", fix="call it after the other returned"
            )
        parts.ensure_built(phase)
        if resume:
            resume_run(parts)
        parts.fitting, self.stop_reason = True, None
        with caught_interrupts() as interrupt, state.meter.span("fit", "fit"), parts.engine.threads():
            parts.engine.interrupt = interrupt
            try:
                self.stop_reason = run_fit(parts, phase, length, resumes=resume and state.fit.restored)
            except BaseException as error:
                self.stop_reason = describe_error(error)
                raise
            finally:
                parts.fitting = False
                parts.engine.interrupt = Interrupt()
                state.epochs = state.last_step = state.steps_in_epoch = 0
        return self.history

    @entry_point
    def restore(self, path: str | os.PathLike[str], *, allow: Collection[str] = ()) -> None:
        """Go to where a checkpoint was written, in the middle of an epoch too; the next `fit` goes on from there.

        After `restore`, `fit(steps=n)` trains `n` more steps, and `fit(n)` trains `n` more epochs. The rest of an
        interrupted epoch counts as the first of these. With `resume=True`, both count from the beginning of the run.

        Args:
            path: The directory of a run, of which the newest good checkpoint is taken, or that of one checkpoint.
            allow: What may differ from the run that wrote it: "callbacks" (those that are new keep their first state,
                those that are gone are forgotten), "data" (the number of batches).

        Raises:
            CheckpointError: There is none, or none that is whole.
            ResumeError: It is the checkpoint of another run; the message shows what differs.
        """
        self._parts.refuse_while_running("restore(...)")
        self._parts.ensure_built(self._parts.training_phase())
        restore_run(self._parts, path, allow)

    @entry_point
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
        phase = self._parts.known_phase(phase)
        if steps is not None:
            positive(steps, "`steps` of `run_epoch`")
        feed = self._parts.feed(phase)
        self._parts.ensure_built(phase)
        engine = self._parts.engine
        if self._parts.fitting or engine.running:  # Ctrl-C is watched around it
            return engine.run_epoch(phase, feed, limit=steps, goes_on=False, inside=True)
        with caught_interrupts() as interrupt, engine.threads():
            engine.interrupt = interrupt
            try:
                ran = engine.run_epoch(phase, feed, limit=steps, goes_on=False)
            finally:
                engine.interrupt = Interrupt()
        if interrupt.requested:
            raise KeyboardInterrupt
        return ran

    @entry_point
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
        phase = self._parts.known_phase(phase)
        self._parts.refuse_while_running("run_step")
        self._parts.ensure_built(phase, batch)
        return self._parts.engine.run_single(phase, batch)

    @entry_point
    def emit(self, event: Event, phase: Phase) -> None:
        """Emit a host event of your own from a loop written by hand.

        Args:
            event: The event instance; handlers get it.
            phase: The phase.

        Raises:
            DeclarationError: It is no host event.
        """
        if not isinstance(event, HostEvent):
            traced = isinstance(event, TracedEvent)
            raise DeclarationError(
                f"`learner.emit` emits host events; {event!r} is {'a traced event' if traced else 'no event'}.",
                fix="emit it in a phase's step, by its argument `emit`"
                if traced
                else "emit an instance of a subclass of `HostEvent`",
            )
        phase = self._parts.known_phase(phase)
        self._parts.ensure_built(phase)
        self._parts.engine.emit(event, phase)

    @entry_point
    def trigger(self) -> None:
        """Emit the Trigger that follows a training epoch, for loops written by hand."""
        phase = self._parts.training_phase()
        self._parts.ensure_built(phase)
        self._parts.engine.trigger(phase)

    # -- looking ----------------------------------------------------------------------------

    @property
    def callbacks(self) -> CallbackSet:
        """The callbacks; has add, get, replace, remove and set."""
        return self._callbacks

    @property
    def graph(self) -> nx.DiGraph:
        """The callback graph: an edge goes from the earlier callback to the later one, with `reasons` and `moments`."""
        return self._parts.graph.digraph

    def explain(self) -> str:
        """Return a text that lists the handlers of each moment in order, with the reason for each position."""
        return self._parts.graph.explain()

    def explain_windows(self) -> str:
        """Return what bounds the windows of steps, what leaves the device for whom, and what has been compiled."""
        return explain_windows(self._parts)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases."""
        return self._parts.phases

    @property
    def params(self) -> PyTree:
        """A copy of the trained parameters. Averages of the parameters are in `cbstate`."""
        self._parts.refuse_ahead("params")
        return own_copy(self._state.live(("params",)))

    @property
    def state(self) -> PyTree:
        """The whole train state as one pytree (a copy): params, model_state, opt_state, key, cbstate, counters."""
        self._parts.refuse_ahead("state")
        return self._state.train_state()

    @state.setter
    def state(self, state: PyTree) -> None:
        self._parts.refuse_while_running("state = ...")
        self._state.set_train_state(state)

    @property
    def cbstate(self) -> StateView:
        """The state that callbacks share, as a read-only mapping whose entries are also attributes."""
        state = self._state
        if state.built and state.carry["cbstate"]:
            self._parts.refuse_ahead("cbstate")
        riding = own_copy(state.carry["cbstate"]) if state.built else {}
        return StateView("cbstate", {**state.cbstate, **riding})

    @property
    def history(self) -> History:
        """A copy of the metrics of the training run so far, and the reason the last fit ended."""
        state = self._state
        return History.of(state.cbstate, epoch=state.epoch, step=state.step, stop_reason=self.stop_reason)

    @property
    def step(self) -> int:
        """Finished training steps."""
        return self._state.step

    @property
    def epoch(self) -> int:
        """Number of the epoch at hand, or of the last one; 0 before the first."""
        return self._state.epoch

    @property
    def hyperparams(self) -> StateView:
        """The values of the injected hyperparameters, as a read-only mapping whose entries are also attributes."""
        state = self._state
        self._parts.refuse_ahead("hyperparams")
        opt_state = state.live(("opt_state",))
        values = {name: float(state.hyperparams.get(opt_state, name)) for name in state.hyperparams.names}
        return StateView("hyperparams", values)

    @property
    def compile_counts(self) -> dict[str, int]:
        """How often a step was traced and a program compiled: `{"traces": 2, "compiles": 2}`."""
        programs = self._parts.engine.programs
        return {"traces": programs.traces, "compiles": programs.compiles}

    def __repr__(self) -> str:
        stopped = f"; the last fit stopped: {self.stop_reason}" if self.stop_reason is not None else ""
        callbacks = f"{len(self._callbacks)} callback{'' if len(self._callbacks) == 1 else 's'}"
        return f"<Learner at epoch {self.epoch}, step {self.step}, with {callbacks}{stopped}>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/plain": repr(self), "text/html": learner_html(self._parts, self.stop_reason)}
