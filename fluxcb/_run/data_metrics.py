"""`learner.evaluate`: metrics of a phase's step over some data."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fluxcb._check.graph import CallbackGraph
from fluxcb._compile.arrays import leading_axis
from fluxcb._declare.batch_parts import BatchParts
from fluxcb._declare.callback import unwrap
from fluxcb._declare.phases import Phase, ValidationPhase
from fluxcb._errors import DataError, DeclarationError
from fluxcb._run.averages import params_with
from fluxcb._run.batch_progress import batch_progress
from fluxcb._run.inference_batches import BatchesOf, Pieces, innermost, is_arrays, rows_per_batch, shown_arrays
from fluxcb._run.learner_core import LearnerCore
from fluxcb._typing import Batch, PyTree
from fluxcb.callbacks import Metrics
from fluxcb.callbacks.metrics.gathered import AbstractGatheredMetric, Samples
from fluxcb.callbacks.metrics.metric import AbstractMetric, Loss
from fluxcb.callbacks.metrics.metric_errors import Computing

__all__ = ["Measure", "evaluate_metrics", "validating_phase"]

_WHAT = "`data` of `learner.evaluate`"


class Measure:
    """The metrics of a `learner.evaluate` call, kept between calls so that the same metrics are not compiled again.

    Args:
        metrics: The user's `metrics` argument, or None for the metrics of the Learner.
        graph: The Learner's callbacks.

    Raises:
        DeclarationError: An element of `metrics` is not a metric, or two metrics have the same name.
    """

    def __init__(self, metrics: Any, graph: CallbackGraph) -> None:
        # The user's objects identify the metrics, because compiled functions are cached with them.
        self._made_of = _parts_of(metrics, graph)
        own = self._made_of[0] if self._made_of else None
        chosen = own if isinstance(own, Metrics) and metrics is None else Metrics(*self._made_of)
        self._metrics = chosen.metrics
        self._sums: dict[type[Phase], MetricSums] = {}

    def sums(self, phase: Phase) -> MetricSums:
        """Return the metrics of a phase; a metric can be limited to other phases, with `Metric(fn, phase=...)`."""
        if type(phase) not in self._sums:
            self._sums[type(phase)] = MetricSums(tuple(m for m in self._metrics if isinstance(phase, m.phases)))
        return self._sums[type(phase)]

    def matches(self, metrics: Any, graph: CallbackGraph) -> bool:
        """Return whether these arguments select the same metrics."""
        parts = _parts_of(metrics, graph)
        return len(parts) == len(self._made_of) and all(a is b for a, b in zip(parts, self._made_of, strict=True))


def _parts_of(metrics: Any, graph: CallbackGraph) -> tuple[Any, ...]:
    """Return the metrics that the user passed, or those of the Learner's `Metrics`, or no metrics."""
    if metrics is None:
        return tuple(c for d in graph.declared if isinstance(c := unwrap(d.callback), Metrics))[:1]
    names = metrics if isinstance(metrics, list | tuple) else (metrics,)
    if wrong := [name for name in names if isinstance(name, str | Mapping)]:
        raise DeclarationError(
            f"`metrics` of `learner.evaluate` must be metrics or functions of outputs and targets, not {wrong[0]!r}.",
            fix="write `learner.evaluate(data)`, which always measures the loss"
            if wrong == ["loss"]
            else "write e.g. `learner.evaluate(data, metrics=[fluxcb.callbacks.accuracy])`",
        )
    if hasattr(metrics, "shape") and hasattr(metrics, "dtype"):
        raise DeclarationError(
            "`metrics` of `learner.evaluate` is an array.",
            why="the second argument has the metrics; the data is the first one",
            fix="for inputs and targets, write a tuple: `learner.evaluate((xs, ys))`",
        )
    given = metrics if isinstance(metrics, list | tuple) else (metrics,)
    # A `Metrics` is replaced by its metrics. The new `Metrics` adds the loss, unless it is among them.
    return tuple(part for one in given for part in (one.given if isinstance(one, Metrics) else (one,)))


def validating_phase(core: LearnerCore, phase: Phase | None) -> Phase:
    """Return the phase whose step is evaluated.

    Raises:
        DeclarationError: `phase` trains or is not a phase; or it is None, and all phases of the Learner train.
    """
    if phase is None:
        for own in core.phases:
            if not type(own).trains:  # also the phase whose average is the default, see `validated_average`
                return own
        raise DeclarationError(
            "None of this Learner's phases validates, so `learner.evaluate` has no step to compute.",
            fix="pass a phase that does not train: `learner.evaluate(data, phase=ValidationPhase())`",
        )
    known = core.phase_set.resolve(phase, measures=True)
    if type(known).trains:
        raise DeclarationError(
            f"`learner.evaluate` needs a phase that does not train, but {type(known).__name__} trains.",
            fix="pass a phase that does not train: `learner.evaluate(data, phase=ValidationPhase())`",
        )
    return known


def evaluate_metrics(
    core: LearnerCore, phase: Phase, data: Any, sums: MetricSums, average: str | None, batch_size: int | None
) -> dict[str, Any]:
    """Return the metrics by name; see `Learner.evaluate`."""
    state = core.state
    carry = state.train.carry
    batches, total = _batches(core, phase, data, batch_size)
    evaluation = functools.partial(core.evaluation, phase, params_with(state, average), carry["model_state"])
    compute: Any = None
    states: dict[str, Any] = {}
    gathered: list[Any] = []
    with batch_progress(core, "evaluate", total) as show:
        for number, batch in enumerate(batches, 1):
            try:
                if compute is None:
                    _check_structure(core, phase, batch)
                    # Known only after tracing: traced handlers can add step values.
                    computed = evaluation(()).computed(batch)
                    states = sums.begin(phase, computed)
                    compute = evaluation([name for name in (*sums.needs, "skip") if name in computed])
                before, (states, samples) = states, sums.update(states, compute(batch), leading_axis(batch))
                # They stay on the device until the end, because a transfer would wait for the batch.
                gathered.append(samples)
            except Exception as error:
                error.add_note(f"raised when `learner.evaluate` computed batch {number} of its data")
                raise
            jax.block_until_ready(before)  # at most one batch ahead, so that batches do not accumulate on the device
            show(number)
        return sums.values(states, gathered)


def _batches(core: LearnerCore, phase: Phase, data: Any, batch_size: int | None) -> tuple[Iterable[Batch], int | None]:
    """Return the batches, and their number if it is known."""
    if data is None:
        data = _own_data(core, phase)
    if is_arrays(data):
        # Each example counts once, so the last piece is shorter, whereas pieces for `predict` repeat examples.
        found = Pieces(data, batch_size, rows_per_batch(core), _WHAT, overlap=False)
        return (batch for batch, _ in found), len(found)
    if batch_size is not None:
        raise DeclarationError(
            f"`batch_size` of `learner.evaluate` is only for arrays, but the data is of type `{type(data).__name__}`.",
            why="a loader or a list of batches already determines the batch size",
            fix=["leave out `batch_size`", "pass the examples as arrays: `(xs, ys)`"],
        )
    batches = BatchesOf(data, _WHAT, max(core.state.progress.epoch, 1))  # the order that validation has in this epoch
    return batches, batches.length


def _check_structure(core: LearnerCore, phase: Phase, batch: Batch) -> None:
    """Check that a batch has the same structure as the phase's own batches.

    Raises:
        DataError: The structure differs, for example because the targets are missing.
    """
    stream = core.streams.get(type(phase).name)
    # A user's phase may take batches of another structure than the training.
    as_training = type(phase) is ValidationPhase
    expected = stream.spec() if stream is not None else core.example() if as_training else None
    split = BatchParts()  # treats a list of two like a tuple of two
    if expected is None or jax.tree.structure(split(batch)) == jax.tree.structure(split(expected)):
        return
    raise DataError(
        f"{_WHAT} has batches that are {shown_arrays(batch)}, and those of {type(phase).__name__} are "
        f"{shown_arrays(expected)}.",
        why="all batches of a phase must have the same structure",
        fix=[
            "for arrays of inputs and targets, or one batch, write a tuple: `learner.evaluate((xs, ys))`",
            "for several batches, write a list: `learner.evaluate([(xs1, ys1), (xs2, ys2)])`",
        ],
    )


def _own_data(core: LearnerCore, phase: Phase) -> Any:
    name = type(phase).name
    if name not in core.streams:
        raise DataError(
            f"`learner.evaluate()` has no data: `data.{name}` is not set.",
            fix=["pass data: `learner.evaluate(data)`", f'pass `data={{"{name}": batches, ...}}` to the Learner'],
        )
    # Not the stream, because its position belongs to the epochs of a fit.
    source = core.streams[name].source
    if isinstance(innermost(source), Iterator):
        raise DataError(
            f"`data.{name}` of the Learner is a one-shot iterator ({type(innermost(source)).__name__}).",
            why="`learner.evaluate()` would consume batches that the next epoch needs",
            fix="pass other data, `learner.evaluate(data)`, or build the Learner with data that can be iterated again",
        )
    return source


class MetricSums:
    """Updates metrics batch by batch, with one compiled program for each shape of a batch.

    Args:
        metrics: See Attributes.

    Attributes:
        metrics: The metrics.
        needs: The names of the step values that the metrics read.
    """

    def __init__(self, metrics: tuple[AbstractMetric, ...]) -> None:
        self.metrics = metrics
        self.needs = tuple(dict.fromkeys(name for metric in metrics for name in metric.needs))
        # `update` of a metric gets the number of samples as an int, so it is part of the program.
        self._update = jax.jit(self._updated, static_argnames="samples")

    def begin(self, phase: Phase, computed: Collection[str]) -> dict[str, PyTree]:
        """Return the states of the metrics before the first batch, by name.

        Args:
            phase: The phase.
            computed: The step values that the phase computes.

        Raises:
            DeclarationError: A metric needs a value that the phase does not compute, or no metric remains.
        """
        states = {}
        for metric in self.metrics:
            missing = [name for name in metric.needs if name not in computed]
            if not missing:
                # The count is 0 if all batches were skipped, and the metric then has no value.
                states[metric.name] = np.int32(0), metric.init()
            elif not isinstance(metric, Loss):  # `Metrics` always includes a `Loss`, which may not apply here
                raise DeclarationError(
                    f"The metric `{metric.name}` needs `step.{missing[0]}`, which {type(phase).__name__} does not "
                    "compute.",
                    why=f"its step has {', '.join(computed)}",
                    fix=[
                        "pass metrics that need only these values: `learner.evaluate(data, metrics=[...])`",
                        "pass another phase: `learner.evaluate(data, phase=...)`",
                    ],
                )
        if not states:
            raise DeclarationError(
                f"There is nothing to measure: {type(phase).__name__} computes no loss, and there is no other metric.",
                fix="pass metrics: `learner.evaluate(data, metrics=[...])`",
            )
        return states

    def update(
        self, states: Mapping[str, PyTree], values: Mapping[str, Any], samples: int
    ) -> tuple[dict[str, PyTree], dict[str, Any]]:
        """Return the states after a batch and the values that metrics gather from it, without waiting for them.

        Args:
            states: The states before.
            values: The step values of the batch, by name.
            samples: How many examples the batch has.
        """
        return self._update(dict(states), dict(values), samples=samples)

    def _updated(
        self, states: dict[str, PyTree], values: dict[str, Any], samples: int
    ) -> tuple[dict[str, PyTree], dict[str, Any]]:
        step, new = _Step(values), {}
        for metric in self.metrics:
            if metric.name in states:
                count, state = states[metric.name]
                with Computing(metric.name):
                    new[metric.name] = count + 1, metric.update(state, step, samples)
        gathered = {}
        for metric in self.metrics:
            # Gathered metrics need all values and not a running sum, for example an exact AUC.
            if isinstance(metric, AbstractGatheredMetric):
                with Computing(metric.name):
                    gathered[metric.name] = metric.gathered(step)
        # As in `Metrics`, a skipped step does not count.
        skip = values.get("skip")
        counts = np.bool_(True) if skip is None else ~skip
        kept = new if skip is None else jax.tree.map(lambda n, o: jnp.where(skip, o, n), new, states)
        return kept, {"counts": counts, "values": gathered}

    def values(self, states: Mapping[str, PyTree], gathered: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
        """Return the values of the metrics by name, in order, without metrics that were never updated.

        Args:
            states: The states after the last batch.
            gathered: The values that the metrics gathered from each batch.
        """
        # One transfer for the states of all metrics.
        held, all_samples = jax.device_get(dict(states)), Samples()
        for samples in gathered:
            all_samples.add(jax.device_get(samples))
        found = {}
        for metric in self.metrics:
            count, state = held.get(metric.name, (0, None))
            if count:
                of = all_samples.of(metric.name) if isinstance(metric, AbstractGatheredMetric) else state
                with Computing(metric.name):
                    found[metric.name] = metric.value_of(of)
        return found


class _Step:
    """Step values in the form that metrics read: `step.loss`, `"aux" in step`."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values

    def __getattr__(self, name: str) -> Any:
        if name not in self._values:
            raise AttributeError(name)  # so that `hasattr` and `getattr` with a default work
        return self._values[name]

    def __contains__(self, name: str) -> bool:
        return name in self._values
