"""Warnings about class numbers for which the model has no output.

JAX raises no error for an index that is out of range. The loss becomes NaN, an index from the end, or a row of zeros of
`jax.nn.one_hot`. Which of them depends on the loss function, so the loss function itself is called to find out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from fluxcb._compile.arrays import is_key
from fluxcb._compile.step import TracedStep
from fluxcb._declare.losses import takes_model
from fluxcb._declare.phases import Phase, TrainingPhase, ValidationPhase
from fluxcb._run.known_batches import known_batch
from fluxcb._run.learner_core import LearnerCore
from fluxcb._tracebacks import warn_user

__all__ = ["warn_about_class_numbers"]


def warn_about_class_numbers(core: LearnerCore) -> None:
    """Warn if the targets of a data source are class numbers that the loss function cannot use.

    The targets are those in the arrays of an `ArrayLoader`, and in the first batch of a list. For other sources, they
    are those in the batch that was pulled to find the shapes of the step. No batch is pulled for this check.

    Args:
        core: A Learner whose step has been built.
    """
    loss_fn = core.state.loss_fn
    if core.adapter is None or loss_fn is None or takes_model(loss_fn):
        return
    for phase in core.phases:
        if type(phase) not in (TrainingPhase, ValidationPhase) or type(phase).name not in core.streams:
            continue
        step = core.traced(phase)  # first, because it may pull the batch
        targets = _targets(core, phase)
        form = None if step is None or targets is None else _form_of_outputs(step, targets)
        if targets is not None and form is not None:
            problem = _problem(loss_fn, targets, form)
            if problem:
                warn_user(f"The targets in `data.{type(phase).name}` are {problem}", UserWarning)


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


def _problem(loss_fn: Callable[..., Any], targets: np.ndarray, form: tuple[int, Any]) -> str:
    """Return the end of the warning, or an empty string."""
    classes, dtype = form
    outside = (targets < 0) | (targets >= classes)
    if not outside.any():
        return ""
    least, largest = int(targets.min()), int(targets.max())
    has_outside = outside.reshape(len(outside), -1).any(axis=1)
    # Also examples that the loss function uses, because a mean over those that it does not mask would be 0 / 0.
    rows = np.concatenate([np.flatnonzero(has_outside)[:4], np.flatnonzero(~has_outside)[:4]])
    ys, outside = targets[rows], outside[rows]
    outputs = np.random.default_rng(0).normal(size=(*ys.shape, classes)).astype(dtype)

    def loss(ys: np.ndarray) -> float:
        returned = loss_fn(outputs, ys)
        return float(returned[0] if isinstance(returned, tuple) else returned)

    try:
        found, valid = loss(ys), loss(np.clip(ys, 0, classes - 1))
        from_the_end = loss(np.where(ys < 0, ys % classes, ys))
        replaced = loss(np.where(outside, classes + 1, ys).astype(ys.dtype))
    except Exception:  # the step itself reports an error of the loss function
        return ""
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
