"""Warnings about class numbers for which the model has no output.

JAX raises no error for an index that is out of range. The loss becomes NaN, an index from the end, or a row of zeros of
`jax.nn.one_hot`. Which of them depends on the loss function, so the loss function itself is called to find out. If it
leaves such examples out, metrics that count them are wrong.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fluxcb._compile.arrays import is_key
from fluxcb._compile.step import TracedStep
from fluxcb._declare.callback import unwrap
from fluxcb._declare.losses import takes_model
from fluxcb._declare.phases import Phase, TrainingPhase, ValidationPhase
from fluxcb._run.known_batches import known_batch
from fluxcb._run.learner_core import LearnerCore
from fluxcb._tracebacks import warn_user
from fluxcb.callbacks import Metric, Metrics

__all__ = ["warn_about_class_numbers"]


def warn_about_class_numbers(core: LearnerCore) -> None:
    """Warn if the targets of a data source are class numbers that the loss function or a metric cannot use.

    The targets are those in the arrays of an `ArrayLoader`, and in the first batch of a list. For other sources, they
    are those in the batch that was pulled to find the shapes of the step. No batch is pulled for this check.

    Args:
        core: A Learner whose step has been built.
    """
    loss_fn = core.state.loss_fn
    # Such a loss function computes the outputs itself, so it cannot be called with sample outputs.
    if core.adapter is None or loss_fn is None or takes_model(loss_fn):
        return
    for phase in core.phases:
        # A user's phase may call the loss function in another form, so only the library's own phases are checked.
        if type(phase) not in (TrainingPhase, ValidationPhase) or type(phase).name not in core.streams:
            continue
        step = core.traced(phase)  # first, because it may pull the batch
        targets = _targets(core, phase)
        form = None if step is None or targets is None else _form_of_outputs(step, targets)
        if targets is None or form is None:
            continue
        classes, _ = form
        if not _outside(targets, classes).any():
            continue
        sample = _sample(targets, *form)
        problem = _problem(loss_fn, targets, sample, classes)
        if problem:
            warn_user(f"The targets in `data.{type(phase).name}` are {problem}", UserWarning)
        elif _leaves_out(loss_fn, sample):
            _warn_about_metrics(core, phase, targets, sample, classes)


def _targets(core: LearnerCore, phase: Phase) -> np.ndarray | None:
    """Return the integer targets that are known without pulling a batch, or None."""
    batch = known_batch(core, phase)
    if batch is None:
        return None
    targets = core.split(batch)[1]
    if not hasattr(targets, "dtype") or is_key(targets) or not getattr(targets, "is_fully_addressable", True):
        return None
    return np.asarray(targets) if np.issubdtype(targets.dtype, np.integer) and targets.size else None


def _form_of_outputs(step: TracedStep, targets: np.ndarray) -> tuple[int, Any] | None:
    """Return the number of outputs for each target and their dtype, or None if the targets are not class numbers."""
    outputs: Any = step.step_specs.get("outputs")
    ys: Any = step.step_specs.get("ys")
    if not (hasattr(outputs, "shape") and hasattr(ys, "shape")) or outputs.shape[:-1] != ys.shape or not outputs.shape:
        return None
    # A handler may have replaced the targets in the step, for example by one-hot vectors.
    same = ys.shape[1:] == targets.shape[1:] and np.issubdtype(ys.dtype, np.integer)
    return (outputs.shape[-1], outputs.dtype) if same and outputs.shape[-1] > 1 else None


def _outside(targets: np.ndarray, classes: int) -> np.ndarray:
    return (targets < 0) | (targets >= classes)


def _sample(targets: np.ndarray, classes: int, dtype: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return random outputs and the targets for a few examples, with class numbers in and out of range."""
    has_outside = _outside(targets, classes).reshape(len(targets), -1).any(axis=1)
    # Also examples that the loss function uses, because a mean over those that it does not mask would be 0 / 0.
    rows = np.concatenate([np.flatnonzero(has_outside)[:4], np.flatnonzero(~has_outside)[:4]])
    ys = targets[rows]
    # Random, because with equal outputs for all classes, other targets would not change the loss.
    return np.random.default_rng(0).normal(size=(*ys.shape, classes)).astype(dtype), ys


def _problem(
    loss_fn: Callable[..., Any], targets: np.ndarray, sample: tuple[np.ndarray, np.ndarray], classes: int
) -> str:
    """Return the end of the warning, or an empty string."""
    outputs, ys = sample
    outside = _outside(ys, classes)
    least, largest = int(targets.min()), int(targets.max())

    def loss(ys: np.ndarray) -> float:
        return _number(loss_fn(outputs, ys))

    try:
        found, valid = loss(ys), loss(np.clip(ys, 0, classes - 1))
        from_the_end = loss(np.where(ys < 0, ys % classes, ys))
        # A loss that stays the same for another number without an output leaves out both numbers.
        replaced = loss(np.where(outside, classes + 1, ys).astype(ys.dtype))
    except Exception:  # the step itself reports an error of the loss function
        return ""
    # Otherwise, the loss is NaN for correct targets as well, so the targets are not the cause.
    if np.isnan(found) and np.isfinite(valid):
        effect = "the loss is NaN"
    elif least < 0 and found == from_the_end != valid:
        effect = "the loss counts negative ones from the last class"
    elif largest == classes and found == replaced != valid:
        # With other numbers, such as -1 or 255, examples are often left out on purpose.
        effect = f"the loss leaves out class {classes}"
    else:
        return ""
    fix = "Give the model an output for each class, or correct the targets."
    if (least, largest) == (1, classes):
        fix = "Subtract 1 from the targets, so that they begin at 0."
    elif largest > classes:
        fix += f" If {largest} marks examples to ignore, let the loss function mask them."
    elif least < 0:
        fix = "If negative numbers mark examples to ignore, let the loss function mask them."
    return (
        f"class numbers from {least} to {largest}, but the model has {classes} outputs, for the classes 0 to "
        f"{classes - 1}: {effect}. {fix}"
    )


def _number(returned: Any) -> float:
    return float(returned[0] if isinstance(returned, tuple) else returned)  # a loss function may return `(loss, aux)`


def _leaves_out(loss_fn: Callable[..., Any], sample: tuple[np.ndarray, np.ndarray]) -> bool:
    """Return whether the loss does not depend on the outputs whose targets are out of range."""
    outputs, ys = sample
    others = np.where(_outside(ys, outputs.shape[-1])[..., None], -outputs, outputs)
    try:
        return _number(loss_fn(outputs, ys)) == _number(loss_fn(others, ys))
    except Exception:  # the step itself reports an error of the loss function
        return False


def _warn_about_metrics(
    core: LearnerCore, phase: Phase, targets: np.ndarray, sample: tuple[np.ndarray, np.ndarray], classes: int
) -> None:
    """Warn about metrics that count as wrong what the loss leaves out."""
    ys = sample[1]
    in_range = np.clip(ys, 0, classes - 1)
    perfect = np.eye(classes, dtype=sample[0].dtype)[in_range]
    left_out = np.unique(targets[_outside(targets, classes)])
    metrics = [m for d in core.graph.declared if isinstance(c := unwrap(d.callback), Metrics) for m in c.given]
    for metric in metrics:
        # A weight may leave out the same targets, and only these two values are known here.
        if not isinstance(metric, Metric) or metric.weight is not None or metric.needs != ("outputs", "ys"):
            continue
        if not isinstance(phase, metric.phases):
            continue
        try:
            # With other outputs, an example could be wrong for both targets, which would hide that it counts.
            counted = bool(np.any(np.asarray(metric.fn(perfect, ys)) != np.asarray(metric.fn(perfect, in_range))))
        except Exception:  # the step itself reports an error of the metric
            continue
        if counted:
            numbers = " or ".join(map(str, left_out)) if len(left_out) < 3 else f"not in the range 0 to {classes - 1}"
            used = f"!= {left_out[0]}" if len(left_out) == 1 else ">= 0" if left_out[-1] < 0 else f"< {classes}"
            warn_user(
                f"The loss leaves out targets in `data.{type(phase).name}` that are {numbers}, but the metric "
                f"`{metric.name}` counts them. Let its function return one value per target, and pass `weight`. For "
                "the accuracy, write `Metric(lambda outputs, ys: outputs.argmax(-1) == ys, "
                f'"{metric.name}", weight=lambda ys: ys {used}, weight_needs=("ys",))`.',
                UserWarning,
            )
