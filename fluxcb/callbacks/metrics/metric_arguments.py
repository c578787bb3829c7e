"""The arguments of `Metrics`: the metrics that they mean, clashes of their names, and their code in suggested fixes."""

from __future__ import annotations

from typing import Any

from fluxcb._declare.signatures import example_call
from fluxcb._errors import DeclarationError
from fluxcb.callbacks.metrics.metric import AbstractMetric, Metric

__all__ = ["as_code", "as_metric", "clash"]


def as_metric(metric: Any) -> AbstractMetric:
    """Return the metric that an argument of `Metrics` means.

    Raises:
        DeclarationError: The argument is neither a metric nor a function.
    """
    if isinstance(metric, AbstractMetric):
        if not isinstance(metric.phases, tuple):
            raise DeclarationError(
                f"`phases` of the metric `{metric.name}` must be a tuple of phase classes, not {metric.phases!r}.",
                fix="write e.g. `phases = (ValidationPhase,)`",
            )
        return metric
    if isinstance(metric, type) and issubclass(metric, AbstractMetric):
        raise DeclarationError(
            f"`Metrics` takes metrics, not the class {metric.__name__}.", fix=f"write `{example_call(metric)}`"
        )
    if callable(metric) and not isinstance(metric, type):
        return Metric(metric)
    raise DeclarationError(
        f"`Metrics` takes metrics and functions of outputs and targets, not {metric!r}.",
        fix="write e.g. `Metrics(accuracy)`",
    )


def clash(one: AbstractMetric, other: AbstractMetric) -> bool:
    """Return whether two metrics have the same name in some phase."""
    shared = any(issubclass(a, b) or issubclass(b, a) for a in one.phases for b in other.phases)
    return one.name == other.name and shared


def as_code(metric: AbstractMetric) -> str:
    """Return the code of a metric as an argument of `Metrics`."""
    if type(metric) is not Metric:
        return repr(metric)
    function = getattr(metric.fn, "__name__", "")
    function = function if function.isidentifier() else "fn"
    arguments = [function]
    if metric.name != function:
        arguments.append(f'name="{metric.name}"')
    if metric.fn_needs != ("outputs", "ys"):
        arguments.append(f"needs={metric.fn_needs!r}")
    arguments += metric.options()
    return function if len(arguments) == 1 else f"Metric({', '.join(arguments)})"
