"""`Metrics`, which accumulates metrics inside the compiled step."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

from fluxcb._declare.access import Read, Write
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import ComputeEnd, EpochBegin, EpochEnd, Event, StepEnd
from fluxcb._declare.handlers import Handler, on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.padded_batch import mask_of
from fluxcb._declare.phases import AbstractTrainingPhase, LossTrainingPhase, LossValidationPhase, Phase
from fluxcb._declare.resolution import Resolution
from fluxcb._declare.schedules import EverySteps
from fluxcb._errors import ConflictError, DeclarationError
from fluxcb.callbacks.by_phase import ByPhase
from fluxcb.callbacks.metrics.gathered import AbstractGatheredMetric, Samples
from fluxcb.callbacks.metrics.means import initial_means, plain_means, updated_means
from fluxcb.callbacks.metrics.metric import AbstractMetric, Loss, Metric
from fluxcb.callbacks.metrics.metric_arguments import as_code, as_metric, clash
from fluxcb.callbacks.metrics.metric_errors import Computing, numbers_of, warn_about_changed_fields
from fluxcb.callbacks.metrics.metric_values import EpochValues, StepValues
from fluxcb.callbacks.metrics.padding import require_weights
from fluxcb.callbacks.metrics.recorder import leading_axis
from fluxcb.callbacks.metrics.running_sums import RunningSums

__all__ = ["Metrics"]

FLUSH_EVERY = 256
"""Number of steps after which step values are fetched. Windows end there."""

# The ring buffer has room for two intervals, so that no values are lost if a `CancelStep` of another callback prevents
# one of the fetches.
_RING = 2 * FLUSH_EVERY
# The layouts are created in `init`. They are not attributes of the callbacks, because they are not state to save.
_SUMS: WeakKeyDictionary[Callback, RunningSums] = WeakKeyDictionary()
_LOG = {"cbstate": {"metrics_now": Read(), "metrics_step": Write()}}


class Metrics(Callback):
    """Compute metrics: averages per epoch in every phase, and values per step in training.

    `cbstate.metrics_epoch[phase][name]` is a list of `(epoch, value)` pairs, and
    `cbstate.metrics_epoch[phase].last(name)` is the last value. `cbstate.metrics_step[phase]` has the attributes
    `steps` and `values`, which maps names to lists. The step values are complete at EpochEnd; before, the last 256
    steps may be missing.

    `Loss()` is added if it is not among the metrics. This `Loss()` ignores phases that do not compute a loss. A
    `Metric(fn, phase=ValidationPhase)` is computed and reported in that phase only.

    A step whose update is skipped (`step.skip`) does not count toward the epoch values, because a single NaN would
    make them NaN. Its own values are still in `metrics_step`. If a signal interrupts a validation, the epoch has no
    values of it.

    Batches are weighted by their number of samples. If they are padded or masked, pass `weight` to `Metric` and to
    `Loss`. A metric with a shape, such as `ConfusionMatrix`, has NumPy arrays as epoch values and no step values.
    Metrics that gather samples, such as `AUROC`, have no step values either.

    Args:
        *metrics: Metrics (`Metric(fn)`, `SmoothLoss()`, your own `AbstractMetric`) or functions of `(outputs, ys)`.

    Access:
        step.batch: Read.
        step.skip: Read.
        step.loss: Read. Also the other step values that the metrics need, such as step.outputs and step.ys.
        step.metrics: Write. The values of this step by name, float32[] each, for handlers at StepEnd.
        step.gathered: Write (traced), Read (host), if a metric gathers samples. The gathered arrays of the step.
        cbstate.metrics_now: Write. The running sums, which are part of the carry.
        cbstate.metrics_epoch: Write.
        cbstate.metrics_step: Write.

    Runs:
        ComputeEnd x Phase (traced).
        StepEnd x AbstractTrainingPhase (host, every 256 steps).
        StepEnd x Phase (host, in the phases of metrics that gather samples).
        EpochEnd x Phase (host).

    Cost:
        One array in the carry, which is read once per epoch and every 256 training steps; windows end there. Metrics
        that gather samples fetch them at each step of their phases, and keep them on the host until the epoch ends.
        This does not shorten windows.

    Raises:
        DeclarationError: An argument is not a metric, two metrics have the same name, or a phase does not compute a
            step value that a metric needs.

    Example:
        >>> from fluxcb.callbacks import Metrics, SmoothLoss, accuracy
        >>> Metrics(accuracy, SmoothLoss())
        Metrics(accuracy, smooth_loss)
        >>> [metric.name for metric in Metrics(accuracy).metrics]
        ['loss', 'accuracy']

    Source:
        FluxTraining.jl, `Metrics`, `Metric` and `AbstractMetric`; tensorpack's `InferenceRunner`, for weighted means.
    """

    needs_every_step = True  # a ring buffer holds the last values of steps, and is read before it is full

    def __init__(self, *metrics: Any) -> None:
        given = tuple(as_metric(metric) for metric in metrics)
        self._has_default_loss = not any(isinstance(metric, Loss) for metric in given)
        self.given = given
        self.metrics: tuple[AbstractMetric, ...] = (Loss(), *given) if self._has_default_loss else given
        for one, other in itertools.combinations(self.metrics, 2):
            if clash(one, other):
                raise DeclarationError(
                    f"Two metrics are called `{one.name}`.",
                    why="their values are stored by name",
                    fix='rename one: `Metric(fn, name="...")`',
                )
        self.carried_layout = ", ".join(metric.name for metric in self.metrics)
        self._means = plain_means(self.metrics)
        self._others = tuple(metric for metric in self.metrics if metric not in self._means)
        # In the order of their columns in the ring.
        others = (metric for metric in self._others if metric.has_step_values)
        self._step_metrics = (*self._means, *others)
        self._gathered = tuple(metric for metric in self.metrics if isinstance(metric, AbstractGatheredMetric))
        for metric in self._gathered:
            metric.refuse_training()
        self._samples = Samples() if self._gathered else None
        self._needs = tuple(dict.fromkeys(name for metric in self.metrics for name in metric.needs))

    def stateaccess(self) -> Mapping[str, Any]:
        """Return the paths that the callback reads and writes."""
        return {
            **self._traced_access(),
            "cbstate": {"metrics_now": Write(), "metrics_epoch": Write(), "metrics_step": Write()},
        }

    def provided_metrics(self, phase: type[Phase]) -> Collection[str]:
        """Return the names of the metrics that a phase computes."""
        return [metric.name for metric in self.metrics if issubclass(phase, metric.phases)]

    def array_metrics(self, phase: type[Phase]) -> Collection[str]:
        """Return the names of the metrics of a phase whose values are arrays."""
        return [metric.name for metric in self.metrics if metric.shape != () and issubclass(phase, metric.phases)]

    def resolveconflict(self, other: Callback) -> Resolution:
        """Refuse a second `Metrics`, because both would store their values in the same entries of `cbstate`."""
        if isinstance(other, Metrics):
            own = [metric for metric in other.given if not any(clash(metric, known) for known in self.given)]
            together = ", ".join(map(as_code, (*self.given, *own)))
            raise ConflictError(
                "The callbacks list contains more than one `Metrics`.",
                where=[repr(self), repr(other)],
                why="both would store their values in `cbstate.metrics_epoch` and `cbstate.metrics_step`",
                fix=f"use one: `Metrics({together})`",
            )
        return super().resolveconflict(other)

    def _traced_access(self) -> Mapping[str, Any]:
        step = dict.fromkeys(("batch", "skip", *self._needs), Read())
        written = {"metrics": Write(), **({"gathered": Write()} if self._gathered else {})}
        return {"step": {**step, **written}, "cbstate": {"metrics_now": Write()}}

    # The step values that the traced handler reads depend on the metrics, so its access is computed for each instance.
    # The handler `gather` exists only in the phases of metrics that gather samples, so that other phases fetch nothing.

    def handlers(self) -> list[Handler]:
        """Return the handlers, with the access and the phases that the metrics of this instance need."""
        handlers: list[Handler] = []
        for handler in super().handlers():
            if handler.name == "gather":
                phases = dict.fromkeys(phase for metric in self._gathered for phase in metric.phases)
                handlers += [replace(handler, phase=phase) for phase in phases]
            elif handler.traced and handler.access is None:
                handlers.append(replace(handler, access=self._traced_access()))
            else:
                handlers.append(handler)
        return handlers

    def init(self, learner: LearnerView) -> None:
        """Create `cbstate.metrics_now`, `metrics_epoch` and `metrics_step`."""
        sums = _SUMS[self] = RunningSums(self._state(), _RING, len(self._step_metrics), learner.progress.in_turn)
        fresh = sums.fresh()
        if "metrics_now" not in learner.cbstate or _shapes(learner.cbstate.metrics_now) != _shapes(fresh):
            learner.cbstate.metrics_now = fresh
        if "metrics_epoch" not in learner.cbstate:
            learner.cbstate.metrics_epoch = ByPhase(EpochValues)
        if "metrics_step" not in learner.cbstate:
            learner.cbstate.metrics_step = ByPhase(StepValues)
        for log in learner.cbstate.metrics_step.entries.values():
            log.cut(learner.progress.step)
            log.seen = learner.progress.step  # earlier steps without this callback have no row in the ring buffer

    def _state(self) -> Any:
        import numpy as np

        # For each metric, the steps in which it was computed, and these steps without skipped ones. Then the samples of
        # each plain mean.
        counts = np.zeros(2 * len(self.metrics) + len(self._means), np.float32)
        return counts, initial_means(len(self._means)), tuple(metric.init() for metric in self._others)

    @on(ComputeEnd, Phase)
    def accumulate(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Update the running sums with the values of a step."""
        import jax
        import numpy as np

        vectors, sums = learner.cbstate.metrics_now, _SUMS[self]
        packing, slot = sums.packing, sums.slot(phase)
        zero = self._zero_after_loss(learner)
        # The first step of an epoch replaces the sums of the previous epoch, so no host handler has to reset them.
        begins = learner.progress.step_in_epoch == 0
        old = {
            d: jax.lax.select(begins, packing.template[d], jax.lax.dynamic_slice(vectors[d], (slot * n + zero,), (n,)))
            for d, n in packing.sizes.items()
        }
        new, row = self._updated(packing.unpack(old), phase, learner)
        learner.step["metrics"] = {
            metric.name: row[i]
            for i, metric in enumerate(self._step_metrics)
            if self._is_computed(metric, phase, learner)
        }
        if self._gathered:
            counts = ~learner.step.skip if "skip" in learner.step else np.bool_(True)
            computed = [metric for metric in self._gathered if self._is_computed(metric, phase, learner)]
            values = {}
            for metric in computed:
                with Computing(metric.name):
                    values[metric.name] = metric.gathered(learner.step)
            learner.step["gathered"] = {"counts": counts, "values": values}
        new = packing.pack(new)
        if "skip" in learner.step:
            # A skipped step changes only the counts of computed steps, which come first in the vector.
            seen = {"float32": len(self.metrics)}
            new = {
                d: jax.lax.select(learner.step.skip & (np.arange(n) >= seen.get(d, 0)), old[d], new[d])
                for d, n in packing.sizes.items()
            }
        # Do not replace the slice updates by a selection by index. XLA would then compute the written values, including
        # the loss, again for each element of the vector (on CPU with jax 0.10.2, the step took 1.8 times as long).
        vectors = {
            d: jax.lax.dynamic_update_slice(vectors[d], new[d], (np.uint32(slot * n),))
            for d, n in packing.sizes.items()
        }
        if type(phase).trains:
            vectors = sums.put_row(vectors, learner.progress.step, slot, row)
        learner.cbstate.metrics_now = vectors

    def _zero_after_loss(self, learner: LearnerView) -> Any:
        """Return 0 (uint32[]), computed so that XLA treats it as dependent on the loss, if there is a loss.

        This delays reading the sums until the loss is known. Otherwise, these small kernels are ready at the start of
        the step, and XLA's CPU backend wakes a second thread when many kernels are ready at once. That added 30 us to a
        step of 28 us (jax 0.10.2, two cores).
        """
        import jax.numpy as jnp
        import numpy as np

        if "loss" not in self._needs or "loss" not in learner.step:
            return np.uint32(0)
        below_infinity = learner.step.loss < jnp.inf
        return (below_infinity & ~below_infinity).astype(np.uint32)

    def _updated(self, old: Any, phase: Phase, learner: LearnerView) -> tuple[Any, Any]:
        """Return the state after this step, and the values of this step alone as `float32[metrics]`."""
        import jax
        import jax.numpy as jnp
        import numpy as np

        mask = mask_of(learner.step.batch)
        if mask is not None:
            require_weights((metric for metric in self.metrics if not isinstance(metric, Metric)), phase)
        samples: Any = leading_axis(learner.step.batch) if mask is None else jnp.sum(mask)
        counts, means, others = old
        active = {metric: self._is_computed(metric, phase, learner) for metric in self.metrics}
        states, row = [], []
        for metric, state in zip(self._others, others, strict=True):
            # A metric that is not computed in this phase keeps its state, and its step value is NaN.
            value = jnp.float32(jnp.nan)
            if active[metric]:
                fields = numbers_of(metric)
                with Computing(metric.name):
                    state = _checked(metric, state, metric.update(state, learner.step, samples))
                    if metric.has_step_values:
                        value = jnp.asarray(metric.step_value(state, learner.step, samples), jnp.float32)
                        metric.check_shape(value.shape)
                    elif metric not in self._gathered:  # `compute` runs on the host, so only its shape is traced here
                        metric.check_shape(jax.eval_shape(metric.compute, state).shape)
                warn_about_changed_fields(metric, metric.name, fields)
            states.append(state)
            if metric.has_step_values:
                row.append(value)
        parts = [jnp.stack(row)] if row else []
        if self._means:
            values: list[Any] = []
            for metric in self._means:
                with Computing(metric.name):
                    values.append(metric.batch_value(learner.step) if active[metric] else None)
            means, of_means = updated_means(means, values, samples)
            parts.insert(0, of_means)
        steps = [float(active[metric]) for metric in self.metrics]
        counted = [*steps, *steps, *(samples * float(active[metric]) for metric in self._means)]
        added = np.array(counted, np.float32) if mask is None else jnp.stack([jnp.float32(x) for x in counted])
        new = counts + added, means, tuple(states)
        return new, jnp.concatenate(parts) if parts else jnp.zeros(0, jnp.float32)

    def _is_computed(self, metric: AbstractMetric, phase: Phase, learner: LearnerView) -> bool:
        if not isinstance(phase, metric.phases):
            return False
        missing = [name for name in metric.needs if name not in learner.step]
        if not missing:
            return True
        if self._has_default_loss and metric is self.metrics[0]:  # users did not ask for this metric
            return False
        names = " and ".join(f"`step.{name}`" for name in missing)
        aux = ", ".join(f'"{name}": ...' for name in missing)
        raise DeclarationError(
            f"The metric `{metric.name}` needs {names}, which {type(phase).__name__} does not compute.",
            why="metrics are updated at the end of each step of every phase, from the step values in their `needs`",
            fix=[
                f"return {'it' if len(missing) == 1 else 'them'} from the loss function: "
                + ("`return loss, aux`" if missing == ["aux"] else f"`return loss, {{{aux}}}`")
                if isinstance(phase, LossTrainingPhase | LossValidationPhase)
                else f"assign {names.replace('step.', 'learner.step.')} in the phase's `step`",
                "compute the metric only in other phases: `Metric(..., phase=...)`",
            ],
        )

    @on(
        EpochBegin,
        AbstractTrainingPhase,
        access={"cbstate": {"metrics_epoch": Write(), "metrics_step": Write()}},
    )
    def forget_the_future(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Drop values of later steps and epochs, which remain if the Learner returned to an earlier state."""
        step, steps = learner.progress.step, learner.cbstate.metrics_step
        own = steps.entry(phase)
        own.cut(step)
        # Mark the steps of other training phases as seen. Their rows in the ring buffer precede their last fetch.
        own.seen = max(own.seen, min(step, max(values.seen for values in steps.entries.values())))
        epochs = learner.cbstate.metrics_epoch
        shares_epoch = getattr(event, "shares_epoch", False)  # this epoch may have values of other training phases
        for values in [epochs[phase]] if shares_epoch else epochs.entries.values():
            values.cut(learner.progress.epoch - 1)

    @on(StepEnd, AbstractTrainingPhase, access=_LOG, when=EverySteps(FLUSH_EVERY))
    def fetch_step_values(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Fetch the values of the last steps before the ring buffer is full."""
        self._flush(phase, learner, _on_host(learner.cbstate.metrics_now))

    @on(StepEnd, Phase, access={"step": {"gathered": Read()}})
    def gather(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Store the samples of a step for metrics that are computed from all samples of the epoch."""
        if self._samples is not None:
            if learner.progress.step_in_epoch <= 1:
                self._samples.clear()  # samples remain from an epoch that an exception ended
            self._samples.add(learner.step["gathered"])

    def state_dict(self) -> dict[str, Any]:
        """Return the samples that have been gathered in the current epoch."""
        return {} if self._samples is None else self._samples.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the samples."""
        if self._samples is not None:
            self._samples.load_state_dict(state)

    @on(
        EpochEnd,
        Phase,
        access={"cbstate": {"metrics_now": Read(borrow=True), "metrics_epoch": Write(), "metrics_step": Write()}},
    )
    def end_epoch(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Compute the values of the epoch, and fetch the values of the remaining steps."""
        import numpy as np

        vectors = _on_host(learner.cbstate.metrics_now)
        if type(phase).trains:
            self._flush(phase, learner, vectors)
        if learner.progress.step_in_epoch == 0:
            return  # no step ran, so the sums are those of an earlier epoch
        if getattr(event, "interrupted", False) and not type(phase).trains:
            # A mean over a part of the validation data is no measure of the epoch. Interrupted training epochs keep
            # theirs, because all of their steps trained.
            return
        epoch = learner.progress.epoch
        sums = self._sums_of(phase, vectors)
        values, samples = learner.cbstate.metrics_epoch.entry(phase), self._samples
        counts, (totals, errors), others = sums
        _, used, counted = np.split(counts, [len(self.metrics), 2 * len(self.metrics)])
        states = dict(zip(self._means, zip(totals, errors, counted, strict=True), strict=True))
        states |= dict(zip(self._others, others, strict=True))
        for metric, steps in zip(self.metrics, used, strict=True):
            if steps:
                data = states[metric] if samples is None or metric not in self._gathered else samples.of(metric.name)
                with Computing(metric.name):
                    values.add(metric.name, epoch, metric.value_of(data))
        if samples is not None and not type(phase).trains:
            samples.clear()

    def _sums_of(self, phase: Phase, vectors: Mapping[str, Any]) -> Any:
        sums = _SUMS[self]
        return sums.packing.unpack(sums.read_slot(vectors, sums.slot(phase)))

    def _flush(self, phase: Phase, learner: LearnerView, vectors: Mapping[str, Any]) -> None:
        """Append the step values since the last flush to `cbstate.metrics_step`."""
        sums, step = _SUMS[self], learner.progress.step
        for name, slot in sums.together(phase).items():
            log = learner.cbstate.metrics_step.entry(name)
            first = max(min(log.seen, step), step - _RING)
            log.seen = step
            if first == step:
                continue
            steps, rows = sums.rows(vectors, first, step, slot)
            # The counts of computed steps come first in a slot.
            seen = dict(zip(self.metrics, sums.read_slot(vectors, slot)["float32"], strict=False))
            columns = {metric: i for i, metric in enumerate(self._step_metrics)}
            if steps:
                log.add(steps, {m.name: rows[:, columns[m]].tolist() for m in self.metrics if m in columns and seen[m]})

    def __repr__(self) -> str:
        return f"Metrics({', '.join(metric.name for metric in self.given)})"


def _checked(metric: AbstractMetric, old: Any, new: Any) -> Any:
    """Return the new state of a metric if its structure and shapes are those of the old state.

    Raises:
        DeclarationError: They differ.
    """
    import jax
    import jax.numpy as jnp

    fits = jax.tree.structure(old) == jax.tree.structure(new)
    if fits and all(jnp.shape(a) == jnp.shape(b) for a, b in zip(*map(jax.tree.leaves, (old, new)), strict=True)):
        return new
    before, after = (jax.tree.map(jnp.shape, state) for state in (old, new))
    raise DeclarationError(
        f"The metric `{metric.name}` changed the structure or shapes of its state: {before} became {after}.",
        why="the state is part of the carry of a compiled step, whose structure and shapes cannot change",
        fix=f"let `{type(metric).__name__}.update` return the structure and shapes that `init` returned",
    )


def _on_host(vectors: Mapping[str, Any]) -> dict[str, Any]:
    import numpy as np

    return {dtype: np.array(vector) for dtype, vector in vectors.items()}


def _shapes(vectors: Any) -> Any:
    return {dtype: vector.shape for dtype, vector in vectors.items()} if isinstance(vectors, Mapping) else None
