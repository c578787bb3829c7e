"""Functions of step values, which users pass to metrics: checking and calling them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from fluxcb._declare.broadcasting import compares_all_pairs
from fluxcb._declare.padded_batch import mask_of
from fluxcb._declare.phases import Phase
from fluxcb._declare.signatures import accepts
from fluxcb._errors import DeclarationError
from fluxcb._tracebacks import warn_user
from fluxcb._traced_values import describe
from fluxcb.callbacks.arguments import require

__all__ = [
    "StepFunction",
    "needs_of",
    "options_shown",
    "phase_classes",
    "step_function",
    "warn_about_count",
    "warn_about_pairs",
    "warn_about_weights",
    "weight_function",
    "weights_of",
]


@dataclass(frozen=True)
class StepFunction:
    """A function, and the names of the step values to pass to it.

    Attributes:
        fn: The function.
        needs: The names of the step values, in the order of the parameters.
    """

    fn: Callable[..., Any]
    needs: tuple[str, ...]

    def __call__(self, step: Any) -> Any:
        """Call the function with the values of a step."""
        return self.fn(*[getattr(step, name) for name in self.needs])

    def __repr__(self) -> str:
        name = getattr(self.fn, "__name__", "")
        return name if name.isidentifier() else "..."


def step_function(fn: Callable[..., Any], needs: Any, what: str, owner: str, argument: str = "needs") -> StepFunction:
    """Check a function against the names of the step values to pass to it, and return both as a `StepFunction`.

    Args:
        fn: The function.
        needs: The names of the step values.
        what: The name of the function in messages, e.g. "The function of the metric `kl`".
        owner: The name of the class in messages.
        argument: The name of the constructor argument with `needs`.

    Raises:
        DeclarationError: `needs` is not a tuple of names of step values, or the function does not take that number of
            arguments.
    """
    fits = isinstance(needs, tuple | list) and bool(needs) and all(isinstance(need, str) for need in needs)
    example = 'needs=("outputs", "ys")' if argument == "needs" else f'{argument}=("batch",)'
    require(fits, needs, f"`{argument}` of `{owner}`", "a tuple of names of step values", example)
    for value, _, part in (need.partition(".") for need in needs if "." in need):
        raise DeclarationError(
            f"`{argument}` of `{owner}` contains `{value}.{part}`, a part of a step value.",
            why="the function is called with whole step values",
            fix=f'write `{argument}=("{value}",)`, and take the part in the function: `lambda {value}: '
            f'{value}["{part}"]`',
        )
    if not accepts(fn, len(needs)):
        raise DeclarationError(
            f"{what} takes {inspect.signature(fn)}, but is called with {', '.join(needs)}.",
            fix=f"change the parameters of the function, or pass the names of its arguments as `{argument}=`",
        )
    return StepFunction(fn, tuple(needs))


def warn_about_pairs(function: StepFunction, step: Any, metric: str) -> None:
    """Warn if the function of a metric broadcasts outputs and targets to all pairs.

    The mean over all pairs is a number, so nothing else would show the mistake.

    Args:
        function: The function. One of other step values is not checked.
        step: The values of the step, while it is traced.
        metric: The name of the metric in the warning.
    """
    if function.needs != ("outputs", "ys"):
        return
    outputs: tuple[int, ...] = getattr(step.outputs, "shape", ())
    ys: tuple[int, ...] = getattr(step.ys, "shape", ())
    # Tracing the function again takes time, so it is done only if a last axis has size 1.
    if not outputs or outputs[:1] != ys[:1] or outputs[0] < 2 or 1 not in (*outputs[-1:], *ys[-1:]):
        return
    if compares_all_pairs(function.fn, step.outputs, step.ys):
        count = outputs[0]
        warn_user(
            f"The metric `{metric}` broadcasts outputs {describe(step.outputs)} and targets {describe(step.ys)} to "
            f"[{count}, {count}], so that each output is compared with every target. Write `[:, 0]` after the value "
            "whose last axis has size 1. If all pairs are intended, write `[None, :]` after the other one.",
            UserWarning,
        )


def warn_about_count(value: Any, metric: str) -> None:
    """Warn if the value of a metric for a batch is an integer, whose average over batches is hardly intended.

    Args:
        value: What the function of the metric has returned for a batch.
        metric: The name of the metric in the warning.
    """
    import jax.numpy as jnp

    if hasattr(value, "dtype") and jnp.issubdtype(value.dtype, jnp.integer):
        warn_user(
            f"The metric `{metric}` is an integer for each batch, such as a number of correct examples, and its values "
            "are averaged over the batches. Return the mean over the batch, e.g. `jnp.mean(...)`. If the average of "
            "the integers is intended, return `jnp.float32(...)`.",
            UserWarning,
        )


def weight_function(weight: Any, needs: Any, metric: str, owner: str) -> StepFunction | None:
    """Return the function that computes the weights of a metric, or None if it has none.

    Args:
        weight: The function, or None.
        needs: The names of the step values to pass to it.
        metric: The name of the metric in messages.
        owner: The name of the class in messages.

    Raises:
        DeclarationError: `weight` is not a function, or does not take the values in `needs`.
    """
    if weight is None:
        return None
    example = 'weight=lambda batch: batch["mask"]'
    require(callable(weight), weight, f"`weight` of `{owner}`", "a function of step values", example)
    return step_function(weight, needs, f"The weight of the metric `{metric}`", owner, "weight_needs")


def weights_of(weight: StepFunction, step: Any, metric: str) -> Any:
    """Return the weights of one batch as float32, with NaN in place of negative ones; see `warn_about_weights`.

    Examples that were added to the batch have weight 0.

    Args:
        weight: The function that computes them.
        step: The values of the step.
        metric: The name of the metric in messages.

    Raises:
        DeclarationError: The function returns something else.
    """
    import jax.numpy as jnp

    weights = weight(step)
    if not hasattr(weights, "dtype") and not isinstance(weights, int | float):
        raise DeclarationError(
            f"The weight of the metric `{metric}` returned {describe(weights)} for one batch.",
            why="it is the weight of the batch, or an array with one weight per example",
            fix='return a number or an array, e.g. `batch["mask"]`',
        )
    weights = jnp.asarray(weights, jnp.float32)
    mask = mask_of(getattr(step, "batch", None))
    if mask is not None and weights.shape[:1] == mask.shape:
        weights = jnp.where(mask.reshape(*mask.shape, *(1 for _ in weights.shape[1:])) > 0, weights, 0)
    # A compiled step cannot raise an error that depends on a value. A sum that contains NaN stays NaN.
    return jnp.where(weights < 0, jnp.nan, weights)


def warn_about_weights(sums: Any, metric: str) -> bool:
    """Warn about weights of an epoch that were negative or NaN, and return whether there were any.

    Args:
        sums: Sums of what `weights_of` has returned. While a step is traced, they are not known, and nothing is found.
        metric: The name of the metric in the warning.
    """
    import numpy as np
    from jax.core import Tracer

    if isinstance(sums, Tracer) or not np.isnan(sums).any():
        return False
    warn_user(
        f"The metric `{metric}` is NaN, because some of its weights are negative or NaN. Let `weight` return a mask of "
        "zeros and ones, or other numbers of at least 0.",
        UserWarning,
    )
    return True


def needs_of(*functions: StepFunction | None) -> tuple[str, ...]:
    """Return the names of the step values that the functions need, without duplicates."""
    return tuple(dict.fromkeys(name for function in functions if function is not None for name in function.needs))


def phase_classes(phase: Any, owner: str, example: str) -> tuple[type[Phase], ...]:
    """Return the phase classes in a `phase` argument: a phase, a phase class, or a tuple of these.

    Args:
        phase: The argument.
        owner: The name of the class in messages.
        example: The first argument of that class in the suggested fix.

    Raises:
        DeclarationError: `phase` is something else.
    """
    members = phase if isinstance(phase, tuple) else (phase,)
    classes = tuple(type(member) if isinstance(member, Phase) else member for member in members)
    fits = bool(classes) and all(isinstance(member, type) and issubclass(member, Phase) for member in classes)
    expected = "a phase class, or a tuple of phase classes"
    require(fits, phase, f"`phase` of `{owner}`", expected, f"{owner}({example}, phase=ValidationPhase)")
    return classes


def options_shown(
    phases: tuple[type[Phase], ...], default: tuple[type[Phase], ...], weight: StepFunction | None
) -> list[str]:
    """Return the keyword arguments of a metric as code for its repr, except those with default values."""
    names = [phase.__name__ for phase in phases]
    shown = names[0] if len(names) == 1 else f"({', '.join(names)})"
    return [
        *([] if phases == default else [f"phase={shown}"]),
        *([] if weight is None else [f"weight={weight!r}"]),
        *([] if weight is None or weight.needs == ("batch",) else [f"weight_needs={weight.needs!r}"]),
    ]
