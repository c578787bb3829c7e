"""`Metrics`: what a training is measured by, accumulated inside the compiled step."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from fluxcb._declare.access import Read, Write
from fluxcb._declare.callback import Callback
from fluxcb._declare.dispatch import Entry
from fluxcb._declare.events import ComputeEnd, EpochBegin, EpochEnd, Event, StepEnd
from fluxcb._declare.handlers import on
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._declare.resolution import Resolution
from fluxcb._declare.schedules import EverySteps, Schedule
from fluxcb._declare.signatures import explained
from fluxcb._errors import ConflictError, DeclarationError
from fluxcb.callbacks.by_phase import ByPhase
from fluxcb.callbacks.metric import AbstractMetric, Loss, Metric
from fluxcb.callbacks.metric_values import EpochValues, StepValues
from fluxcb.callbacks.packing import Packing
from fluxcb.callbacks.recorder import leading_axis

__all__ = ["Metrics"]

FLUSH_EVERY = 256
"""Steps after which step values are fetched: a window ends there."""

_RING = 2 * FLUSH_EVERY  # one flush may fail to happen (another callback's CancelStep) and nothing is lost
_PACKINGS: WeakKeyDictionary[Callback, Packing] = WeakKeyDictionary()  # made in `init`; none of the callbacks' state
_LOG = {"cbstate": {"metrics_now": Read(), "metrics_step": Write()}}


class Metrics(Callback):
    """Measure: averages per epoch for every phase, and values per step for training.

    `cbstate.metrics_epoch[phase][name]` is a list of `(epoch, value)`, `cbstate.metrics_epoch[phase].last(name)` its
    last value. `cbstate.metrics_step[phase]` has `steps` and, by name, `values`; it is complete at EpochEnd, and in
    between as new as the last 256 steps. `Loss()` is always among the metrics.

    A step whose update was skipped (`step.skip`) does not count in the epoch's values, which one NaN would spoil; its
    own values are in `metrics_step`. The `Loss()` that is added automatically skips phases that do not compute a loss.
    A `Metric(fn, phase=ValidationPhase)` is computed and reported in that phase only.

    Args:
        *metrics: Metrics (`Metric(fn)`, `SmoothLoss()`, your own `AbstractMetric`) or functions of `(outputs, ys)`.

    Access:
        step.batch: Read.
        step.skip: Read.
        step.loss: Read; and whatever else the metrics need: step.outputs, step.ys for a `Metric`.
        step.metrics: Write; the step's own values by name, float32[] each, for those who read them at StepEnd.
        cbstate.metrics_now: Write; the running sums, in the carry.
        cbstate.metrics_epoch: Write.
        cbstate.metrics_step: Write.

    Runs:
        ComputeEnd x Phase (traced).
        StepEnd x AbstractTrainingPhase (host, every 256 steps).
        EpochEnd x Phase (host).

    Cost:
        One array in the carry, one read of it per epoch and per 256 training steps, where a window ends.

    Raises:
        DeclarationError: Something given is no metric, two have one name, or a phase lacks what a metric needs.

    Example:
        >>> from fluxcb.callbacks import Metrics, SmoothLoss, accuracy
        >>> Metrics(accuracy, SmoothLoss())
        Metrics(accuracy, smooth_loss)
        >>> [metric.name for metric in Metrics(accuracy).metrics]
        ['loss', 'accuracy']

    Source:
        FluxTraining.jl, `Metrics`, `Metric` and `AbstractMetric`; tensorpack's `InferenceRunner` for weighted means.
    """

    @explained()
    def __init__(self, *metrics: Any) -> None:
        given = tuple(_as_metric(metric) for metric in metrics)
        self._own_loss = not any(isinstance(metric, Loss) for metric in given)
        self.given = given
        self.metrics: tuple[AbstractMetric, ...] = (Loss(), *given) if self._own_loss else given
        for one, other in itertools.combinations(self.metrics, 2):
            if _clash(one, other):
                raise DeclarationError(
                    f"Two metrics are called `{one.name}`.",
                    why="their values are kept by name",
                    fix='rename one: `Metric(fn, name="...")`',
                )
        self._needs = tuple(dict.fromkeys(name for metric in self.metrics for name in metric.needs))

    def stateaccess(self) -> Mapping[str, Any]:
        """Return what it reads and writes; see the class."""
        return {
            **self._traced_access(),
            "cbstate": {"metrics_now": Write(), "metrics_epoch": Write(), "metrics_step": Write()},
        }

    def provided_metrics(self, phase: type[Phase]) -> Collection[str]:
        """Return the names of the metrics that a phase computes."""
        return [metric.name for metric in self.metrics if issubclass(phase, metric.phases)]

    def resolveconflict(self, other: Callback) -> Resolution:
        """Refuse a second `Metrics`: both keep their values in the same entries of `cbstate`."""
        if isinstance(other, Metrics):
            own = [metric for metric in other.given if not any(_clash(metric, known) for known in self.given)]
            together = ", ".join(map(_as_code, (*self.given, *own)))
            raise ConflictError(
                "The callbacks list contains more than one `Metrics`.",
                where=[repr(self), repr(other)],
                why="each would keep its values in `cbstate.metrics_epoch` and `cbstate.metrics_step`",
                fix=f"use one: `Metrics({together})`",
            )
        return super().resolveconflict(other)

    def _traced_access(self) -> Mapping[str, Any]:
        step = dict.fromkeys(("batch", "skip", *self._needs), Read())
        return {"step": {**step, "metrics": Write()}, "cbstate": {"metrics_now": Write()}}

    # What a metric needs differs from instance to instance, and so does the traced handler's access.

    def handlers(self) -> list[Entry]:
        """Return the handlers, the traced one with this instance's access."""
        return [self._own(entry) for entry in super().handlers()]

    def entry_for(self, event: type[Event], phase: type[Phase]) -> tuple[Callback, Entry, tuple[Schedule, ...]] | None:
        """Return who handles a moment, the traced handler with this instance's access."""
        found = super().entry_for(event, phase)
        return found if found is None else (found[0], self._own(found[1]), found[2])

    def _own(self, entry: Entry) -> Entry:
        return replace(entry, access=self._traced_access()) if entry.traced and entry.access is None else entry

    def init(self, learner: Any) -> None:
        """Create `cbstate.metrics_now`, `metrics_epoch` and `metrics_step`."""
        fresh = self._fresh()
        if "metrics_now" not in learner.cbstate or _shapes(learner.cbstate.metrics_now) != _shapes(fresh):
            learner.cbstate.metrics_now = fresh
        if "metrics_epoch" not in learner.cbstate:
            learner.cbstate.metrics_epoch = ByPhase(EpochValues)
        if "metrics_step" not in learner.cbstate:
            learner.cbstate.metrics_step = ByPhase(StepValues)
        for log in learner.cbstate.metrics_step.entries.values():
            log.cut(learner.progress.step)
            log.seen = learner.progress.step  # steps that ran while this callback was away have no row in the ring

    # `metrics_now` holds one vector per dtype, in practice one: the state of training, the state of everything else,
    # and (float32) a ring of the last steps' values, a row per step.

    def _state(self) -> Any:
        import numpy as np

        # `seen` counts steps a metric was there, `used` those that count in its epoch value.
        counts = np.zeros(len(self.metrics), np.float32)
        return {"seen": counts, "used": counts, "states": tuple(metric.init() for metric in self.metrics)}

    def _fresh(self) -> dict[str, Any]:
        import jax
        import jax.numpy as jnp
        import numpy as np

        packing = _PACKINGS[self] = Packing(self._state())
        ring = {"float32": _RING * len(self.metrics)}
        fresh = {d: np.zeros(2 * size + ring.get(d, 0), jnp.dtype(d)) for d, size in packing.sizes.items()}
        return jax.device_put(fresh)  # `jnp.zeros` would compile a program

    @on(ComputeEnd, Phase)
    def accumulate(self, event: Event, phase: Phase, learner: Any) -> None:
        """Take in a step's values."""
        import jax
        import numpy as np

        vectors, packing = learner.cbstate.metrics_now, _PACKINGS[self]
        part = 0 if type(phase).trains else 1
        late = self._zero_after_loss(learner)
        # Where an epoch's first step meets old sums it starts anew; no handler has to write between epochs.
        begins = learner.progress.step_in_epoch == 0
        held = {
            d: jax.lax.select(begins, packing.template[d], jax.lax.dynamic_slice(vectors[d], (part * n + late,), (n,)))
            for d, n in packing.sizes.items()
        }
        new, row = self._updated(packing.unpack(held), phase, learner)
        learner.step.metrics = {
            metric.name: row[i] for i, metric in enumerate(self.metrics) if self._is_computed(metric, phase, learner)
        }
        new = packing.pack(new)
        if "skip" in learner.step:
            # Steps are seen all the same; `seen` lies first, for of the names in `_state` it is the first in order.
            seen = {"float32": len(self.metrics)}
            new = {
                d: jax.lax.select(learner.step.skip & (np.arange(n) >= seen.get(d, 0)), held[d], new[d])
                for d, n in packing.sizes.items()
            }
        # Slice updates: selecting by index instead makes XLA compute what is written, the loss included, anew for every
        # element of the vector (measured on CPU, jax 0.10.2: 1.8 times the whole step).
        vectors = {
            d: jax.lax.dynamic_update_slice(vectors[d], new[d], (np.uint32(part * n),))
            for d, n in packing.sizes.items()
        }
        if type(phase).trains:
            step = jax.lax.rem(learner.progress.step.astype(np.uint32), np.uint32(_RING))
            at = np.uint32(2 * packing.sizes["float32"]) + step * np.uint32(len(self.metrics))
            vectors["float32"] = jax.lax.dynamic_update_slice(vectors["float32"], row, (at,))
        learner.cbstate.metrics_now = vectors

    def _zero_after_loss(self, learner: Any) -> Any:
        """Return a uint32[] 0 that the compiler believes to depend on the loss, where there is one.

        It holds the reading of the sums back until the loss is known. Otherwise these small kernels are ready at the
        step's start, and with that many ready at once XLA's CPU backend wakes a second thread at every step, which
        took 30 us of a step of 28 (jax 0.10.2, two cores).
        """
        import jax.numpy as jnp
        import numpy as np

        if "loss" not in self._needs or "loss" not in learner.step:
            return np.uint32(0)
        finite_or_low = learner.step.loss < jnp.inf
        return (finite_or_low & ~finite_or_low).astype(np.uint32)

    def _updated(self, held: Any, phase: Phase, learner: Any) -> tuple[Any, Any]:
        """Return the state after this step, and the step's own values as `float32[metrics]`."""
        import jax.numpy as jnp

        samples = leading_axis(learner.step.batch)
        states, there, row = [], [], []
        for metric, state in zip(self.metrics, held["states"], strict=True):
            active = self._is_computed(metric, phase, learner)
            value = jnp.float32(jnp.nan)
            if active:
                state = _checked(metric, state, metric.update(state, learner.step, samples))
                value = jnp.asarray(metric.step_value(state, learner.step, samples), jnp.float32)
                if value.shape != ():
                    raise DeclarationError(
                        f"The value of the metric `{metric.name}` is an array of shape {value.shape}, not one number.",
                        fix=f"return a scalar from `{type(metric).__name__}.compute`",
                    )
            states.append(state)
            there.append(float(active))
            row.append(value)
        counted = jnp.asarray(there, jnp.float32)
        new = {"seen": held["seen"] + counted, "used": held["used"] + counted, "states": tuple(states)}
        return new, jnp.stack(row)

    def _is_computed(self, metric: AbstractMetric, phase: Phase, learner: Any) -> bool:
        if not isinstance(phase, metric.phases):
            return False
        missing = [name for name in metric.needs if name not in learner.step]
        if not missing:
            return True
        if self._own_loss and metric is self.metrics[0]:
            return False
        raise DeclarationError(
            f"The metric `{metric.name}` needs `step.{missing[0]}`, which {type(phase).__name__} does not compute.",
            why="metrics are updated at the end of every phase's step, from the values that their `needs` name",
            fix=[
                f"assign `learner.step.{missing[0]}` in the phase's `step`",
                f"leave the metric out of `Metrics(...)`, or give it other `needs` than {metric.needs!r}",
            ],
        )

    @on(
        EpochBegin,
        AbstractTrainingPhase,
        access={"cbstate": {"metrics_epoch": Write(), "metrics_step": Write()}},
    )
    def forget_the_future(self, event: Event, phase: Phase, learner: Any) -> None:
        """Drop what was noted for steps and epochs to come, where `learner.state` was set back."""
        learner.cbstate.metrics_step.entry(phase).cut(learner.progress.step)
        for values in learner.cbstate.metrics_epoch.entries.values():
            values.cut(learner.progress.epoch - 1)

    @on(StepEnd, AbstractTrainingPhase, access=_LOG, when=EverySteps(FLUSH_EVERY))
    def fetch_step_values(self, event: Event, phase: Phase, learner: Any) -> None:
        """Fetch the last steps' values, before the ring is full."""
        self._flush(phase, learner, _on_host(learner.cbstate.metrics_now))

    @on(
        EpochEnd,
        Phase,
        access={"cbstate": {"metrics_now": Read(borrow=True), "metrics_epoch": Write(), "metrics_step": Write()}},
    )
    def end_epoch(self, event: Event, phase: Phase, learner: Any) -> None:
        """Compute the epoch's values, and fetch the remaining steps' values."""
        vectors = _on_host(learner.cbstate.metrics_now)
        if type(phase).trains:
            self._flush(phase, learner, vectors)
        if learner.progress.step_in_epoch == 0:
            return  # no step ran, so the sums are those of an earlier epoch
        epoch = learner.progress.epoch
        held = self._held(vectors, phase)
        values = learner.cbstate.metrics_epoch.entry(phase)
        for metric, used, state in zip(self.metrics, held["used"], held["states"], strict=True):
            if used:
                values.add(metric.name, epoch, float(metric.compute(state)))

    def _held(self, vectors: Mapping[str, Any], phase: Phase) -> Any:
        packing, part = _PACKINGS[self], 0 if type(phase).trains else 1
        return packing.unpack({d: vectors[d][part * size : (part + 1) * size] for d, size in packing.sizes.items()})

    def _flush(self, phase: Phase, learner: Any, vectors: Mapping[str, Any]) -> None:
        import numpy as np

        log, step, width = learner.cbstate.metrics_step.entry(phase), learner.progress.step, len(self.metrics)
        first = max(min(log.seen, step), step - _RING)
        log.seen = step
        if first == step:
            return
        ring = vectors["float32"][-_RING * width :].reshape(_RING, width)
        begin, end = first % _RING, step % _RING
        rows = ring[begin:end] if begin < end else np.concatenate((ring[begin:], ring[:end]))
        # `seen` lies first in training's stretch: of the names in `_state`, it is the first in sorted order.
        seen = vectors["float32"][:width]
        columns = {m.name: rows[:, i].tolist() for i, m in enumerate(self.metrics) if seen[i]}
        log.add(list(range(first + 1, step + 1)), columns)

    def __repr__(self) -> str:
        return f"Metrics({', '.join(metric.name for metric in self.given)})"


def _as_metric(metric: Any) -> AbstractMetric:
    if isinstance(metric, AbstractMetric):
        if not isinstance(metric.phases, tuple):
            raise DeclarationError(
                f"`phases` of the metric `{metric.name}` must be a tuple of phase classes, not {metric.phases!r}.",
                fix="e.g. `phases = (ValidationPhase,)`",
            )
        return metric
    if isinstance(metric, type) and issubclass(metric, AbstractMetric):
        raise DeclarationError(
            f"`Metrics` takes metrics, not the class {metric.__name__}.", fix=f"`{metric.__name__}()`"
        )
    if callable(metric) and not isinstance(metric, type):
        return Metric(metric)
    raise DeclarationError(
        f"`Metrics` takes metrics and functions of outputs and targets, not {metric!r}.", fix="e.g. `Metrics(accuracy)`"
    )


def _clash(one: AbstractMetric, other: AbstractMetric) -> bool:
    """Tell whether two metrics have one name in some phase."""
    shared = any(issubclass(a, b) or issubclass(b, a) for a in one.phases for b in other.phases)
    return one.name == other.name and shared


def _as_code(metric: AbstractMetric) -> str:
    """Return the argument of `Metrics` that gives a metric."""
    if type(metric) is not Metric:
        return repr(metric)
    function = getattr(metric.fn, "__name__", "")
    function = function if function.isidentifier() else "fn"
    plain = Metric(metric.fn, metric.name)
    arguments = [function]
    if metric.name != function:
        arguments.append(f'name="{metric.name}"')
    if metric.needs != plain.needs and metric.needs:
        arguments.append(f"needs={metric.needs!r}")
    if metric.phases != plain.phases:
        names = ", ".join(phase.__name__ for phase in metric.phases)
        arguments.append(f"phase={names}" if len(metric.phases) == 1 else f"phase=({names})")
    return function if len(arguments) == 1 else f"Metric({', '.join(arguments)})"


def _checked(metric: AbstractMetric, old: Any, new: Any) -> Any:
    """Return a metric's new state, if it is of the old one's kind."""
    import jax
    import jax.numpy as jnp

    fits = jax.tree.structure(old) == jax.tree.structure(new)
    if fits and all(jnp.shape(a) == jnp.shape(b) for a, b in zip(*map(jax.tree.leaves, (old, new)), strict=True)):
        return new
    before, after = (jax.tree.map(jnp.shape, state) for state in (old, new))
    raise DeclarationError(
        f"The metric `{metric.name}` changed the structure or shapes of its state: {before} became {after}.",
        why="it rides in the carry of a compiled step, which keeps them",
        fix=f"return from `{type(metric).__name__}.update` what `init` returned, with other values",
    )


def _on_host(vectors: Mapping[str, Any]) -> dict[str, Any]:
    import numpy as np

    return {dtype: np.array(vector) for dtype, vector in vectors.items()}


def _shapes(vectors: Any) -> Any:
    return {dtype: vector.shape for dtype, vector in vectors.items()} if isinstance(vectors, Mapping) else None
