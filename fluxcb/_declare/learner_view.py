"""`LearnerView`: what handlers see of the Learner, for editors and type checkers.

The classes declare attributes and methods, and contain no code. At run time, the learner that a handler gets is an
instance of a generated subclass of `LearnerView` (`_compile/protect.py`). A test compares the attributes with the
catalogue in `state.py`, so a new state path needs an attribute here.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, ItemsView, Iterator, KeysView, Mapping, ValuesView
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from fluxcb._typing import Batch, PyTree

if TYPE_CHECKING:
    import jax
    import numpy as np

__all__ = ["EntriesView", "LearnerView", "ProgressView", "StepAttributes"]

# Traced handlers get JAX arrays, host handlers numpy arrays and scalars: what both have is safe in either.
Array: TypeAlias = "jax.Array | np.ndarray"

C = TypeVar("C")


class ProgressView:
    """`learner.progress`: the counters of the engine. In traced handlers, the integers are traced `int32[]`."""

    @property
    def step(self) -> int:
        """Finished training steps since the Learner was built."""
        raise NotImplementedError

    @property
    def epoch(self) -> int:
        """Number of the current epoch; 0 before the first."""
        raise NotImplementedError

    @property
    def step_in_epoch(self) -> int:
        """Finished steps of the current epoch."""
        raise NotImplementedError

    @property
    def epochs(self) -> int:
        """Number of the epoch this fit ends with, 0 if unknown (host only)."""
        raise NotImplementedError

    @property
    def steps_in_epoch(self) -> int:
        """Steps this epoch will have, 0 if unknown (host only)."""
        raise NotImplementedError

    @property
    def batch_size(self) -> int:
        """Number of examples in the batch of the current step, 0 between steps (host only)."""
        raise NotImplementedError

    @property
    def in_turn(self) -> tuple[tuple[str, ...], ...]:
        """Names of the training phases that run in turn, a tuple for each `InTurn` (host only)."""
        raise NotImplementedError

    @property
    def compiled(self) -> bool:
        """Whether the step was already compiled when the current epoch began or resumed (host only)."""
        raise NotImplementedError


class StepAttributes:
    """The values of a step that fluxcb and its phases define."""

    batch: Batch
    """The batch."""
    data_position: Mapping[str, Any] | None
    """The position of the batch in its data source: `source`, `pass`, `batch` (host only)."""
    xs: PyTree
    """The inputs of the model."""
    ys: PyTree
    """The targets."""
    outputs: PyTree
    """What the model returned for the inputs."""
    loss: Array
    """The loss: `float[]`."""
    earlier_losses: tuple[Array, ...]
    """The values of `step.loss` that the phase has replaced; empty if the step has one loss."""
    aux: PyTree
    """What the loss function returned besides the loss."""
    grads: PyTree
    """The gradients: a pytree like `params`."""
    updates: PyTree
    """What the optimizer adds to the parameters: a pytree like `params`."""
    skip: Array | bool
    """Whether the step keeps params, opt_state and model_state as they were: `bool[]`."""
    hold: Array | bool
    """Whether the step keeps params and opt_state as they were, because the update comes later: `bool[]`."""
    skips: Mapping[str, Any]
    """Which callbacks have set `step.skip`, and the values that they used (host only)."""
    stop: Array | bool
    """Whether the window ends after this step: `bool[]`."""


class PartView:
    """What `learner.step`, `learner.cbstate`, `learner.hyperparams` and `learner.data` have in common: a mapping."""

    if TYPE_CHECKING:

        def __contains__(self, name: Any) -> bool: ...
        def __iter__(self) -> Iterator[str]: ...
        def __len__(self) -> int: ...
        def get(self, name: Any, default: Any = None) -> Any: ...
        def keys(self) -> KeysView[str]: ...
        def values(self) -> ValuesView[Any]: ...
        def items(self) -> ItemsView[str, Any]: ...


class StepView(StepAttributes, PartView):
    """`learner.step` in handlers.

    A value that your own phase or handler adds has no attribute here. Write it as a subscript:
    `learner.step["gradient_norm"]`.
    """

    if TYPE_CHECKING:

        def __getitem__(self, name: str) -> Any: ...
        def __setitem__(self, name: str, value: Any) -> None: ...


class EntriesView(PartView):
    """The entries of `learner.cbstate`, as attributes and as subscripts. Your own entries can have any names."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...
        def __getitem__(self, name: str) -> Any: ...
        def __setitem__(self, name: str, value: Any) -> None: ...


class SharedView(EntriesView):
    """`learner.cbstate` in handlers: the state that callbacks share."""

    history: PhaseEntriesView
    """Epochs and steps of each phase. From `Recorder`."""
    metrics_step: PhaseEntriesView
    """The metrics of each step, by phase. From `Metrics`."""
    metrics_epoch: PhaseEntriesView
    """The metrics of each epoch, by phase. From `Metrics` and `InferenceRunner`."""
    metrics_now: PyTree
    """The sums of the metrics of the current epoch, in the carry. From `Metrics`."""
    ema: PyTree
    """`{"params": ..., "updates": int32[]}`: the average of the parameters. From `ParameterEMA`."""
    swa: PyTree
    """`{"params": ..., "updates": int32[]}`: the average. From `StochasticWeightAveraging`."""
    inference: dict[str, Any]
    """Statistics of other data by the name of the inference. From `InferenceRunner`."""
    monitors: MonitorsView
    """Where callbacks log values and look up logged values. From `Monitors`."""
    histograms: PyTree
    """The counts of `LogHistograms`, in the carry."""
    moving_average: PyTree
    """The averages of `MovingAverage`."""
    simple_moving_average: PyTree
    """The averages of `SimpleMovingAverage`."""
    summaries: PyTree
    """The values of `LogSummaries`."""
    traces: PhaseEntriesView
    """The recorded values of each phase. From `Traces`."""
    commands: list[dict[str, Any]]
    """The applied commands. From `ControlFile`."""
    profiler: str | None
    """The directory of the profile that is being recorded, or None. From `Profiler`."""
    accumulation: PyTree
    """The sum of the gradients since the last update. From `AccumulateGradients`."""
    non_finite: PyTree
    """`{"skipped": int32[], "in_a_row": int32[]}`. From `SkipNonFinite`."""
    loss_scale: PyTree
    """The scale of the loss, and counters. From `DynamicLossScale`."""
    loss_spikes: PyTree
    """The last losses, and counters. From `LossSpikeGuard`."""
    bad_steps: list[dict[str, Any]]
    """A record of each skipped step. From `BadSteps`."""


class HyperparamsView(PartView):
    """`learner.hyperparams`: the hyperparameters that the optimizer was given by `fluxcb.inject`, by name."""

    if TYPE_CHECKING:

        @property
        def learning_rate(self) -> Array:
            """The learning rate: `float[]`."""
            ...

        @learning_rate.setter
        def learning_rate(self, value: Array | float) -> None: ...

        def __getattr__(self, name: str) -> Array: ...
        def __setattr__(self, name: str, value: Array | float) -> None: ...
        def __getitem__(self, name: str) -> Array: ...
        def __setitem__(self, name: str, value: Array | float) -> None: ...


class DataView(PartView):
    """`learner.data`: the data sources by the name of their phase; a subscript can also be a phase."""

    training: Any
    """The data source of the training phase."""
    validation: Any
    """The data source of the validation phase."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...
        def __setattr__(self, name: str, value: Any) -> None: ...
        def __getitem__(self, phase: Any) -> Any: ...
        def __setitem__(self, phase: Any, value: Any) -> None: ...


class PhaseEntriesView(Protocol):
    """State of each phase, looked up by phase instance, phase class or name: `learner.cbstate.metrics_epoch[phase]`."""

    entries: dict[str, Any]
    """The entries by the name of the phase."""

    def entry(self, phase: Any) -> Any:
        """Return the entry of a phase to write into; it is created if there is none."""
        ...

    def items(self) -> ItemsView[str, Any]:
        """Return phase names with their entries."""
        ...

    def __getitem__(self, phase: Any) -> Any: ...
    def __getattr__(self, name: str) -> Any: ...
    def __contains__(self, phase: object) -> bool: ...
    def __iter__(self) -> Iterator[str]: ...
    def __len__(self) -> int: ...


class MonitorsView(Protocol):
    """`learner.cbstate.monitors`: where callbacks log values, and look up logged values."""

    def put_scalar(self, name: str, value: Any) -> None:
        """Log a number: a Python, numpy or JAX scalar."""
        ...

    def put_text(self, name: str, text: str) -> None:
        """Log a text."""
        ...

    def put_image(self, name: str, image: Any) -> None:
        """Log an image, or several of one size."""
        ...

    def put_histogram(self, name: str, values: Any, bins: int = 64) -> None:
        """Log the histogram of some numbers."""
        ...

    def put(self, name: str, loggable: Any) -> None:
        """Log any loggable."""
        ...

    def latest(self, name: str) -> Any:
        """Return the value that was logged last under a name."""
        ...

    def history(self, name: str) -> list[tuple[int, float]]:
        """Return the numbers that were logged under a name, each with its step, oldest first."""
        ...

    def names(self) -> list[str]:
        """Return the names under which values were logged."""
        ...

    def __getitem__(self, name: str) -> Any: ...
    def __getattr__(self, name: str) -> Any: ...
    def __contains__(self, name: object) -> bool: ...
    def __iter__(self) -> Iterator[str]: ...
    def __len__(self) -> int: ...


class CallbacksView(Protocol):
    """`learner.callbacks`: the callbacks of the Learner."""

    @property
    def graph(self) -> Any:
        """The callback graph."""
        ...

    def get(self, cls: type[C]) -> C:
        """Return the first callback of a class, looking inside wrappers."""
        ...

    def disable(self, *names: str) -> None:
        """Disable callbacks after the current epoch."""
        ...

    def enable(self, *names: str) -> None:
        """Enable callbacks after the current epoch."""
        ...

    def __contains__(self, callback: object) -> bool: ...
    def __iter__(self) -> Iterator[Any]: ...
    def __len__(self) -> int: ...


class EvaluationView(Protocol):
    """`learner.evaluation`: computes a phase's step on any batch."""

    def __call__(
        self, phase: Any, params: PyTree, model_state: PyTree, names: Collection[str]
    ) -> Callable[[Batch], dict[str, Any]]:
        """Return a function that computes the named step values of a batch."""
        ...


class SnapshotsView(Protocol):
    """`learner.snapshots`: takes the whole state between two steps."""

    def request(
        self,
        save: Callable[[Any], None],
        is_saved: Callable[[tuple[Any, ...]], bool] | None = None,
        prepare: Callable[[], None] | None = None,
    ) -> None:
        """Call `save(snapshot)` when all handlers of this moment have run."""
        ...


class LearnerView:
    """The Learner as handlers see it: the type to annotate `learner` with.

    The annotation changes nothing at run time. With it, editors complete state paths and show what they are, and type
    checkers such as pyright report misspelled ones. A path also needs a permission in `stateaccess`.

    Arrays are JAX arrays in traced handlers, and numpy arrays or scalars in host handlers. Attributes of `cbstate`,
    `hyperparams` and `data` can have any name, because callbacks, optimizers and phases define them.

    Example:
        >>> from fluxcb import Callback, LearnerView, Read, on
        >>> from fluxcb.events import StepEnd
        >>> from fluxcb.phases import TrainingPhase
        >>> from fluxcb.testing import testlearner
        >>> class LossPrinter(Callback):
        ...     def stateaccess(self):
        ...         return {"step": {"loss": Read()}}
        ...
        ...     @on
        ...     def show(self, event: StepEnd, phase: TrainingPhase, learner: LearnerView):
        ...         print(f"step {learner.progress.step}: {learner.step.loss:.3f}")
        >>> history = testlearner(LossPrinter()).fit(steps=1)
        step 1: 9.534
    """

    # The generated subclasses have slots, which a base class without this line would make useless.
    __slots__ = ()

    params: PyTree
    """The model's trainable parameters: a pytree of arrays."""
    model_state: PyTree
    """What the model changes itself, such as batch statistics: a pytree of arrays."""
    opt_state: PyTree
    """The optimizer's state, or the states of several optimizers by name: a pytree of arrays."""
    key: jax.Array
    """A random key of this callback's own, which differs between steps."""
    hyperparams: HyperparamsView
    """The hyperparameters that `fluxcb.inject` put on the device, by name."""
    step: StepView
    """The values of the current step."""
    cbstate: SharedView
    """The state that callbacks share, by name."""
    progress: ProgressView
    """The engine's counters. They need no permission."""
    data: DataView
    """The data sources by the name of their phase."""
    model: Any
    """The model as the user passed it; NNX and Equinox modules have shapes in place of their arrays."""
    loss_fn: Any
    """The loss function, or None."""
    optimizer: Any
    """The optax optimizer, or several by name."""
    callbacks: CallbacksView
    """The callbacks of the Learner (host only)."""
    evaluation: EvaluationView
    """Computes a phase's step on any batch, and changes nothing (host only)."""
    snapshots: SnapshotsView
    """Takes the whole state between two steps, for checkpoints (host only)."""
