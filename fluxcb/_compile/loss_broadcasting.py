"""Warnings about loss functions that broadcast targets, which compares outputs with targets of other examples."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from fluxcb._declare.broadcasting import compares_all_pairs
from fluxcb._tracebacks import warn_user
from fluxcb._traced_values import describe

__all__ = ["warning_of_pairs"]


def warning_of_pairs(loss_fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a loss function that warns if it broadcasts `[N, 1]` and `[N]` to `[N, N]`, when it is traced.

    A mean of `outputs - ys` with these shapes compares each output with every target. It is a number, so nothing fails,
    and the model learns the mean of the targets. The same holds for one target in a batch with N outputs.
    """

    @functools.wraps(loss_fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        # A phase of the user may call the function in another form, in which no argument is known to be the targets.
        # The shapes are checked first, because `compares_all_pairs` traces the loss function a second time.
        if len(args) == 2 and not kwargs and _are_columns(*args) and compares_all_pairs(loss_fn, *args):
            count = args[0].shape[0]
            warn_user(
                f"The outputs and the targets are {describe(args[0])} and {describe(args[1])}, but the loss function "
                f"removes the last axis of one of them. NumPy broadcasts [{count}] and [{count}, 1] to "
                f"[{count}, {count}]: each output is compared with every target. Remove this axis from both, or "
                f"from neither. If all pairs are intended, write `[None, :]` after the value without this axis.",
                UserWarning,
            )
        elif len(args) == 2 and not kwargs and _differ_by_one_axis(*args) and compares_all_pairs(loss_fn, *args):
            flat, count = ("outputs" if args[0].ndim == 1 else "ys"), args[0].shape[0]
            column = "ys" if flat == "outputs" else "outputs"
            warn_user(
                f"The loss function combines outputs {describe(args[0])} and targets {describe(args[1])}, which NumPy "
                f"broadcasts to [{count}, {count}]: each output is compared with every target. Write `{column}[:, 0]` "
                f"instead of `{column}` in the loss function. If all pairs are intended, write `{flat}[None, :]`.",
                UserWarning,
            )
        elif len(args) == 2 and not kwargs and _is_single_example(*args):
            warn_user(
                f"The model returns {describe(args[0])} for targets {describe(args[1])}, so the data seems to consist "
                "of single examples instead of batches. Pass the arrays of all examples as "
                "`data=fluxcb.data.ArrayLoader((xs, ys), batch_size=32)`, or add an axis of length 1 to each example.",
                UserWarning,
            )
        elif len(args) == 2 and not kwargs and _is_one_row(*args):
            warn_user(
                f"The model returns {describe(args[0])} for a batch with targets {describe(args[1])}. NumPy broadcasts "
                f"the only target: all {args[0].shape[0]} outputs are compared with it. Give the batch a target for "
                f"each example. If one target for all is intended, repeat it in the data, for example with "
                f"`np.repeat(ys, len(xs), axis=0)`.",
                UserWarning,
            )
        # After the warnings, because the loss function may raise an exception about these shapes.
        return loss_fn(*args, **kwargs)

    return call


def _differ_by_one_axis(outputs: Any, ys: Any) -> bool:
    shapes = sorted((getattr(value, "shape", ()) for value in (outputs, ys)), key=len)
    # With a single example, [1, 1] has the same values as [1], so no output is compared with another target.
    return len(shapes[0]) == 1 and shapes[1] == (*shapes[0], 1) and shapes[0][0] > 1


def _are_columns(outputs: Any, ys: Any) -> bool:
    shape = getattr(outputs, "shape", ())
    # Equal shapes do not broadcast by themselves. They do if the loss function squeezes only one of the two.
    return len(shape) == 2 and shape == getattr(ys, "shape", ()) and shape[1] == 1 and shape[0] > 1


def _is_single_example(outputs: Any, ys: Any) -> bool:
    # Targets without axes have no axis for the examples, as in `data=list(zip(xs, ys))`.
    return len(getattr(outputs, "shape", ())) > 0 and getattr(ys, "shape", None) == ()


def _is_one_row(outputs: Any, ys: Any) -> bool:
    rows, targets = getattr(outputs, "shape", ()), getattr(ys, "shape", ())
    return len(rows) > 0 and len(targets) > 0 and rows[0] > 1 and targets[0] == 1
