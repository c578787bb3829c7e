"""A warning about metrics that compare classes, if the targets are neither one-hot vectors nor probabilities.

Such a metric takes the position of the largest number in each row as the class. If an example has several labels, or a
target is a real value, the result has no meaning.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from fluxcb._compile.arrays import is_key
from fluxcb._declare.callback import unwrap
from fluxcb._declare.phases import TrainingPhase, ValidationPhase
from fluxcb._run.known_batches import known_batch
from fluxcb._run.learner_core import LearnerCore
from fluxcb._tracebacks import warn_user
from fluxcb.callbacks import ConfusionMatrix, Metric, Metrics, PerClassAccuracy, accuracy

__all__ = ["warn_about_targets_without_class"]

_ROWS = 1000  # how many examples to look at; a row that is not one-hot is usually among the first


def warn_about_targets_without_class(core: LearnerCore) -> None:
    """Warn if a metric takes classes from targets that are neither one-hot nor probabilities of the classes.

    The targets are those of examples that are known without pulling a batch; see `known_batch`.

    Args:
        core: A Learner whose step has been built.
    """
    metrics = [
        metric
        for declared in core.graph.declared
        if isinstance(callback := unwrap(declared.callback), Metrics)
        for metric in callback.given
        if _takes_classes(metric)
    ]
    if not metrics or core.adapter is None:
        return
    for phase in core.phases:
        # A user's own phase may compute different outputs and targets.
        if type(phase) not in (TrainingPhase, ValidationPhase) or type(phase).name not in core.streams:
            continue
        step = core.traced(phase)  # first, because it may pull the batch
        rows = None if step is None else _rows(core, phase, step.step_specs)
        used = [metric for metric in metrics if isinstance(phase, metric.phases)]
        if rows is not None and used and (problem := _problem(rows)):
            _warn(type(phase).name, problem, used[0], labels=bool(np.isin(rows, (0, 1)).all()))
            return


def _takes_classes(metric: Any) -> bool:
    """Return whether a metric is one of fluxcb that compares classes, of the outputs and the targets of the step."""
    if not isinstance(metric, Metric | ConfusionMatrix | PerClassAccuracy) or metric.weight is not None:
        return False  # a weight may leave out the rows that have no class
    return metric.needs == ("outputs", "ys") and (not isinstance(metric, Metric) or metric.fn is accuracy)


def _rows(core: LearnerCore, phase: Any, specs: Any) -> np.ndarray | None:
    """Return known targets, `[examples, classes]`, if they have the shape of the outputs, or None."""
    outputs, ys, batch = specs.get("outputs"), specs.get("ys"), known_batch(core, phase)
    targets: Any = None if batch is None else core.split(batch)[1]
    if not all(hasattr(value, "shape") for value in (outputs, ys, targets)) or is_key(targets):
        return None
    classes = outputs.shape[-1:]
    if outputs.shape != ys.shape or targets.shape[1:] != ys.shape[1:] or len(ys.shape) < 2 or classes[0] < 2:
        return None
    # A handler may have replaced the targets in the step.
    if ys.dtype != targets.dtype or not getattr(targets, "is_fully_addressable", True):
        return None
    return np.asarray(targets[:_ROWS]).reshape(-1, *classes) if targets.size else None


def _problem(rows: np.ndarray) -> str:
    """Return what rows have that one-hot vectors and probabilities have not, or an empty string."""
    values = rows.astype(np.float64)
    if (values < 0).any():
        return "they contain negative numbers"
    # Label smoothing and MixUp in bfloat16 round the numbers of a row.
    precision = float(jnp.finfo(rows.dtype).eps) if jnp.issubdtype(rows.dtype, jnp.floating) else 0.0
    wrong = ~(np.abs(values.sum(-1) - 1) <= max(1e-3, precision))
    if not wrong.any():
        return ""
    return f"a row sums to {values[wrong][0].sum():.4g}, and not to 1"


def _warn(phase: str, problem: str, metric: Any, *, labels: bool) -> None:
    own = 'Metrics(Metric(lambda outputs, ys: {}, name="{}"))'
    if labels:
        several = own.format("jnp.mean((outputs > 0) == ys)", "accuracy")
        fix = f"For any number of labels per example, and logits as outputs, write `{several}`."
    else:
        fix = f"For regression, write `{own.format('jnp.mean(jnp.abs(outputs - ys))', 'mean_absolute_error')}`."
        if isinstance(metric, Metric):
            largest = own.format("accuracy(outputs, jnp.argmax(ys, axis=-1))", metric.name)
            fix += f" If the largest number of a row is at its class, write `{largest}`."
    warn_user(
        f"The targets in `data.{phase}` have the shape of the outputs, but are neither one-hot vectors nor "
        f"probabilities: {problem}. The metric `{metric.name}` compares only the positions of the largest numbers of "
        f"the outputs and the targets. {fix}",
        UserWarning,
    )
