"""`Learner`: the public class that users construct and train."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Set
from typing import TYPE_CHECKING, Any, Literal

import jax
import optax

from fluxcb._calls import entry_point
from fluxcb._compile.placement import make_placement
from fluxcb._compile.program import ProgramKind
from fluxcb._declare.callback import Callback
from fluxcb._declare.losses import OUTPUTS_FORM, PARAMS_FORM
from fluxcb._declare.phases import Phase
from fluxcb._declare.shardings import Sharding
from fluxcb._declare.turns import InTurn
from fluxcb._declare.uncopied import Uncopied
from fluxcb._errors import DeclarationError
from fluxcb._importing import refuse_while_importing
from fluxcb._run.argument_order import refuse_swapped
from fluxcb._run.arguments import as_key, as_loss, as_optimizer, as_parts
from fluxcb._run.borrow import Borrowing
from fluxcb._run.callbackset import CallbackSet
from fluxcb._run.costs import learner_costs
from fluxcb._run.engine import make_engine
from fluxcb._run.executors import Executor
from fluxcb._run.explain_costs import explain_costs
from fluxcb._run.explain_windows import explain_windows
from fluxcb._run.first_fit import warn_before_first_fit
from fluxcb._run.fit_loop import FitLength, describe_error, run_fit
from fluxcb._run.history import History
from fluxcb._run.interrupts import Interrupt, caught_interrupts
from fluxcb._run.keyword_fixes import EXPLAIN_FIXES, FIT_FIXES, LEARNER_FIXES
from fluxcb._run.learner_core import LearnerCore
from fluxcb._run.learner_display import learner_html
from fluxcb._run.loop_methods import LoopMethods
from fluxcb._run.model_methods import ModelMethods
from fluxcb._run.programs import StepsPerCall
from fluxcb._run.replay import Replaying
from fluxcb._run.resume import lock_run, restore_run, resume_run, unlock_run
from fluxcb._run.run_changes import check_allowed, check_resume
from fluxcb._run.same_program import check_same_program
from fluxcb._run.sharding_table import ShardingTable
from fluxcb._run.state_properties import StateProperties
from fluxcb._typing import Batch, LossFn, PyTree
from fluxcb.callbacks import with_defaults
from fluxcb.callbacks.arguments import flag
from fluxcb.models import adapt

if TYPE_CHECKING:
    import networkx as nx

__all__ = ["Learner"]

WINDOW_BYTES = 64 * 2**20
PEER_TIMEOUT = 30.0


class Learner(StateProperties, Borrowing, Replaying, LoopMethods, ModelMethods, Uncopied):
    """A model, a loss function, an optimizer, and data, trained by a loop that callbacks extend.

    Construction checks the callbacks against each other, runs their `init`, and dry-runs the compiled step, so errors
    appear before training. The model and the arrays that you pass are copied, and training never changes them.

    Args:
        model: A Flax NNX or Linen module, an Equinox module, or a pair of functions
            `(init(key, xs) -> params, apply(params, xs) -> outputs)`.
        loss_fn: `loss_fn(outputs, ys) -> float[]`, or `loss_fn(model, batch, *, key, train) -> loss | (loss, aux)`. Its
            signature decides: it gets the model if its first parameter is called `model`, or if it requires `key` or
            `train`, each of which is optional. See docs/reference/models-and-data.md.
        optimizer: An optax optimizer, or several by name, each for the part of the parameters that it is named after.
            `fluxcb.inject(optax.adam, learning_rate=1e-3)` has a learning rate that callbacks can change.
        data: Batches for training; a pair `(training, validation)`; or a mapping by phase name.
            A source is anything that yields batches again when iterated again, or a function that makes an iterable
            for each epoch.
        callbacks: Callback instances, and `in_order(...)` groups of them.
        key: Seed (int) or random key of the run.
        phases: The phases, each with its own name. Their steps are checked at construction. `fit` runs the training
            phases in this order, and then the others; see `fit`. Training phases in an `InTurn` alternate within an
            epoch.
        default_callbacks: Whether to add Metrics, Recorder, ProgressBar, MetricsPrinter, and StopOnNaNLoss, except
            those whose class is already in the list.
        example_batch: A training batch (or its `jax.ShapeDtypeStruct`s), so that the Learner does not pull one from the
            training data to learn its shape. Batches of another shape are then an error.
        inputs: `inputs(batch)` returns the inputs of the model. By default, the first of a pair, or the whole batch.
        targets: `targets(batch)` returns the targets `ys`. By default, the second of a pair, or None.
        steps_per_call: Maximum number of steps in one call of the compiled program, or "auto". On CPU, the results are
            the same bit for bit (see docs/concepts/windows.md).
        window_bytes: Maximum memory for the batches and the fetched values of one call in one process (bytes). Two
            calls are in flight at a time.
        program: `loop`, `straight`, or None to let the model decide (see docs/concepts/windows.md).
        executor: Where host handlers run: `SerialExecutor()` (the default), `ThreadExecutor(4)` or `DaskExecutor()`.
        mesh: The devices to train on, such as `fluxcb.mesh(data=-1)` or any `jax.sharding.Mesh`. Batches and the train
            state are placed on it. None uses one device.
        sharding: How arrays are divided over the mesh: `"replicated"`, `"fsdp"`, or a `fluxcb.Sharding`. By default,
            batches are divided, and parameters are divided as annotations of Flax modules declare.
        peer_timeout: With several processes, how long another process may be silent before `fit` raises a `PeerError`
            (s). A process is silent if it was killed or stopped, not if a step takes long.
        exact_observers: Whether callbacks that only read leave the training the same bit for bit (on CPU). The steps
            are slower, because XLA then does not fuse operations (see docs/how-to/replay.md).

    Raises:
        FluxcbError: Any error that can be found before the first step.

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

    @entry_point(fixes=LEARNER_FIXES)
    def __init__(
        self,
        model: Any,
        loss_fn: LossFn | None,
        optimizer: optax.GradientTransformation | Mapping[str, optax.GradientTransformation],
        *,
        data: Any = None,
        callbacks: Iterable[Any] = (),
        key: Any = 0,
        phases: Iterable[Phase | InTurn] | None = None,
        default_callbacks: bool = True,
        example_batch: Batch | None = None,
        inputs: Callable[[Batch], PyTree] | None = None,
        targets: Callable[[Batch], PyTree] | None = None,
        steps_per_call: StepsPerCall = "auto",
        window_bytes: int = WINDOW_BYTES,
        program: ProgramKind | None = None,
        executor: Executor | None = None,
        mesh: jax.sharding.Mesh | None = None,
        sharding: Literal["replicated", "fsdp"] | Sharding | None = None,
        peer_timeout: float = PEER_TIMEOUT,
        exact_observers: bool = False,
    ) -> None:
        refuse_swapped("Learner", model=model, loss_fn=loss_fn, optimizer=optimizer)
        loss = as_loss(loss_fn, OUTPUTS_FORM, phases)
        settings = {"model": model, "loss_fn": loss, "optimizer": as_optimizer(optimizer), "key": as_key(key)}
        core = LearnerCore(
            adapter=adapt(model),
            params=None,
            split=as_parts(inputs, targets),
            engine=make_engine(
                executor,
                (program, steps_per_call, window_bytes, flag(exact_observers, "`exact_observers` of `Learner`")),
                peer_timeout=peer_timeout,
                **settings,
            ),
            phases=phases,
            data=data,
            example_batch=example_batch,
            # A function, because the set of callbacks is created after the core, which it needs.
            callbacks=lambda: self._callbacks,
            placement=make_placement(mesh, sharding),
        )
        self._begin(core, callbacks, default_callbacks)

    @classmethod
    @entry_point(fixes=LEARNER_FIXES)
    def from_loss(
        cls,
        params: PyTree,
        loss_fn: LossFn | None,
        optimizer: optax.GradientTransformation | Mapping[str, optax.GradientTransformation],
        *,
        model_state: PyTree | None = None,
        data: Any = None,
        callbacks: Iterable[Any] = (),
        key: Any = 0,
        phases: Iterable[Phase | InTurn] | None = None,
        default_callbacks: bool = True,
        example_batch: Batch | None = None,
        steps_per_call: StepsPerCall = "auto",
        window_bytes: int = WINDOW_BYTES,
        program: ProgramKind | None = None,
        executor: Executor | None = None,
        mesh: jax.sharding.Mesh | None = None,
        sharding: Literal["replicated", "fsdp"] | Sharding | None = None,
        peer_timeout: float = PEER_TIMEOUT,
        exact_observers: bool = False,
    ) -> Learner:
        """Build a Learner from parameters and a loss function of the parameters.

        Args:
            params: The parameters: a pytree of arrays; copied.
            loss_fn: `loss_fn(params, batch, key, *, train, model_state) -> loss`, or `-> (loss, aux)`; aux becomes
                `step.aux`. The last three parameters are optional. With `model_state`, it also returns the new state:
                `-> (loss, new_model_state)`, or `-> (loss, aux, new_model_state)`. None if your own phases compute
                their losses.
            optimizer: See `Learner`.
            model_state: The initial state, a pytree of arrays, for a loss function that takes it; copied. Only training
                changes it.
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
            mesh: See `Learner`.
            sharding: See `Learner`.
            peer_timeout: See `Learner`.
            exact_observers: See `Learner`.
        """
        # `cls(...)` would require a model. Both constructors share `_begin`.
        learner = cls.__new__(cls)
        refuse_swapped("Learner.from_loss", params=params, loss_fn=loss_fn, optimizer=optimizer)
        loss = as_loss(loss_fn, PARAMS_FORM, phases, model_state)
        settings = {"model": None, "loss_fn": loss, "optimizer": as_optimizer(optimizer), "key": as_key(key)}
        core = LearnerCore(
            adapter=None,
            params=params,
            model_state=model_state,
            engine=make_engine(
                executor,
                (program, steps_per_call, window_bytes, flag(exact_observers, "`exact_observers` of `Learner`")),
                peer_timeout=peer_timeout,
                **settings,
            ),
            phases=phases,
            data=data,
            example_batch=example_batch,
            callbacks=lambda: learner._callbacks,
            placement=make_placement(mesh, sharding),
        )
        learner._begin(core, callbacks, default_callbacks)
        return learner

    def _begin(self, core: LearnerCore, callbacks: Iterable[Any], default_callbacks: bool) -> None:
        # A value that is not a list of callbacks is passed on as it is: the check of the graph explains it.
        items: Any = callbacks
        if isinstance(callbacks, Iterable) and not isinstance(callbacks, str | Callback | Set | Mapping):
            items = list(callbacks)
            items = with_defaults(items) if flag(default_callbacks, "`default_callbacks` of `Learner`") else items
        self._core = core
        self._state = core.state
        # Before `install`, because `init` of a callback may read `learner.callbacks`.
        self._callbacks = CallbackSet(items if isinstance(items, list) else [], core)
        core.install(items)
        self.stop_reason = None

    @entry_point
    def __setattr__(self, name: str, value: Any) -> None:
        self._check_assigned(name, in_subclass=type(self) is not Learner)
        object.__setattr__(self, name, value)

    # -- training ---------------------------------------------------------------------------

    @entry_point(fixes=FIT_FIXES)
    def fit(
        self,
        epochs: int | None = None,
        *,
        steps: int | None = None,
        steps_per_epoch: int | None = None,
        resume: bool = False,
        allow: Collection[str] = (),
    ) -> History:
        """Train.

        Every epoch runs one epoch of each training phase, in the order of `phases=` and each with its own data, then
        one epoch of each validation phase that has data, and then emits `Trigger`. All these epochs have the same
        number. Training steps are counted across the training phases. The phases of an `InTurn` alternate.

        SIGTERM and Ctrl-C end a fit after the current window: `FitStopping` and `FitEnd` are emitted. After SIGTERM,
        `fit` returns with `stop_reason` "preempted"; after Ctrl-C, it raises KeyboardInterrupt. A second signal ends
        the program immediately. After a fit that ended within an epoch, the next one begins the next epoch, without the
        remaining batches. With `resume=True` and a Checkpointer, it continues exactly.

        Args:
            epochs: Number of epochs to train, in addition to those before.
            steps: Number of steps to train, of all training phases together, instead of epochs.
            steps_per_epoch: Length of an epoch of each training phase (steps), for endless streams. The next epoch then
                continues the stream. By default, an epoch is one pass over the data. An `InTurn` counts as one phase.
            resume: Continue the run in the Checkpointer's directory from its newest good checkpoint, or begin a run if
                there is none. `epochs` or `steps` then count from the beginning of the call of `fit` that saved the
                checkpoint, so the same program, started again, ends where it would have ended.
            allow: With `resume`, the paths at which this program differs from the saved run on purpose; see `restore`.

        Returns:
            The metrics of the whole training run, and the reason it ended; see `History`.

        Raises:
            DeclarationError: Not exactly one of `epochs` and `steps` is given, a number is not positive, or `allow`
                names a part that does not exist.
            DataError: A training phase has no data.
            FluxcbError: An error that only the data or a handler can show.
            CheckpointError: With `resume`, there is no Checkpointer, all checkpoints are damaged, or they belong to a
                run that differs from this one.
            Exception: An exception of a handler, unchanged, with a note that names the handler.
        """
        refuse_while_importing()
        # The arguments are checked completely before a directory is locked or a checkpoint is read.
        length = FitLength(epochs, steps, steps_per_epoch)
        check_resume(resume)
        check_allowed(allow, 'learner.fit(10, resume=True, allow=("data",))')
        if allow and not resume:
            raise DeclarationError(
                "`fit` was given `allow` without `resume=True`.",
                why="`allow` names differences from the run that is resumed",
                fix=f"write `learner.fit(..., resume=True, allow={tuple(allow)!r})`",
            )
        core, state = self._core, self._state
        phases = core.phase_set.training()
        # Raises the error for missing data before anything has run.
        for phase in phases:
            core.stream(phase)
        if core.fitting:
            raise DeclarationError("`fit` was called while this Learner is fitting.", fix="call it after that fit ends")
        # A checkpoint can be restored only into a train state that exists.
        core.ensure_built(phases[0])
        check_same_program(core)  # also compares values of the train state
        warn_before_first_fit(core)
        try:
            state.fit.steps_per_epoch = str(steps_per_epoch)  # a text, because None means that no fit runs
            if resume:
                resume_run(core, allow=allow)
            else:
                lock_run(core)
            self._fit(phases, length, resumes=resume and state.fit.restored)  # a first start has no checkpoint
        finally:
            state.fit.steps_per_epoch = None
            # Also after an error, so that another process can resume the run.
            unlock_run(core)
        return self.history

    def _fit(self, phases: tuple[Phase, ...], length: FitLength, *, resumes: bool) -> None:
        core, state = self._core, self._state
        emitter = core.engine.emitter
        core.fitting, self.stop_reason = True, None
        # A signal only sets a flag: an exception in a call that donates the carry would lose the train state.
        with caught_interrupts() as interrupt, state.meter.span("fit", "fit"), emitter.threads():
            emitter.interrupt = interrupt
            try:
                self.stop_reason = run_fit(core, phases, length, resumes=resumes)
            except BaseException as error:
                self.stop_reason = describe_error(error)
                raise
            finally:
                core.fitting = False  # also after an exception, because the Learner can be trained further
                emitter.interrupt = Interrupt()  # a later epoch must not end because of this signal
                # These describe the plan of this fit, and would be wrong in a hand-written loop that follows.
                state.progress.replace(epochs=0, last_step=0, steps_in_epoch=0)

    @entry_point
    def restore(self, path: str | os.PathLike[str], *, allow: Collection[str] = ()) -> None:
        """Restore a checkpoint, including one from the middle of an epoch; the next `fit` continues from there.

        After `restore`, `fit(steps=n)` trains `n` more steps, and `fit(n)` trains `n` more epochs. The rest of an
        interrupted epoch counts as the first of these. With `resume=True`, both count from the beginning of the
        call of `fit` that saved the checkpoint.

        Args:
            path: The directory of a run, whose newest good checkpoint is restored, or the directory of one checkpoint.
            allow: Paths at which this program differs from the saved run on purpose. "hyperparams.learning_rate" and
                "key": use the program's value. "callbacks.ParameterEMA": the callback is new and keeps its initial
                state, or is missing and its state is ignored. "data.training": the data has another number of batches.
                "hyperparams", "callbacks" and "data" allow all differences of this kind.

        Warns:
            ResumeWarning: The program differs from the saved run in another way. A table shows the differences.

        Raises:
            CheckpointError: There is no checkpoint, or all checkpoints are damaged.
            ResumeError: The checkpoint belongs to another run; the message shows the differences.
        """
        # Within a fit, only a `RewindFitting` restores, because handlers must see the fit end before.
        self._core.refuse_while_running("restore(...)")
        self._core.ensure_built(self._core.phase_set.training()[0])
        restore_run(self._core, path, allow)

    # -- inspection ---------------------------------------------------------------------------

    @property
    def callbacks(self) -> CallbackSet:
        """The callbacks, with the methods `add`, `get`, `replace`, `remove`, and `set`."""
        return self._callbacks

    @property
    def graph(self) -> nx.DiGraph:
        """The callback graph: an edge goes from the earlier callback to the later one, with `reasons` and `moments`."""
        return self._core.graph.digraph

    @entry_point(fixes=EXPLAIN_FIXES)
    def explain(self, *, costs: bool = False) -> str:
        """Return a text that lists the handlers of each moment in order, with the reason for each position.

        Args:
            costs: Return a table of costs instead: what each traced handler computes in a step, what each host handler
                fetches, and the memory of the train state and of a step. See docs/how-to/costs.md. Nothing is run, but
                a step of each phase is compiled.

        Raises:
            DeclarationError: With `costs`, XLA cannot count the operations, because the mesh has accelerators.
            MissingStateError: With `costs`, the shape of a batch is unknown.
            StateLostError: With `costs`, the train state is lost.
        """
        costs = flag(costs, "`costs` of `learner.explain`")
        return explain_costs(learner_costs(self._core)) if costs else self._core.graph.explain()

    @entry_point
    def explain_windows(self) -> str:
        """Return a text about the limits of windows, the values that leave the device, and the compiled programs."""
        return explain_windows(self._core)

    @entry_point
    def shardings(self) -> ShardingTable:
        """Return a table of all arrays of the train state: path, spec, and bytes per device. It prints as text.

        Raises:
            MissingStateError: The train state does not exist yet, because the shape of a batch is not known.
        """
        return ShardingTable.of(self._state.train.carry)

    @property
    def phases(self) -> tuple[Phase, ...]:
        """The phases."""
        return self._core.phases

    @property
    def compile_counts(self) -> dict[str, int]:
        """The numbers of traces and compilations: `{"traces": 2, "compiles": 2}`."""
        programs = self._core.engine.programs
        return {"traces": programs.traces, "compiles": programs.compiles}

    def __repr__(self) -> str:
        stopped = f"; the last fit stopped: {self.stop_reason}" if self.stop_reason is not None else ""
        callbacks = f"{len(self._callbacks)} callback{'' if len(self._callbacks) == 1 else 's'}"
        return f"<Learner at epoch {self.epoch}, step {self.step}, with {callbacks}{stopped}>"

    def _repr_mimebundle_(self, include: Any = None, exclude: Any = None) -> dict[str, str]:
        return {"text/plain": repr(self), "text/html": learner_html(self._core, self.stop_reason)}
