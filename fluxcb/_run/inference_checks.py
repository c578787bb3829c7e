"""Checking the step values that an `InferenceRunner` fetches, before the training."""

from __future__ import annotations

from collections.abc import Iterator

from fluxcb._check.graph import CallbackGraph
from fluxcb._declare.access import writes
from fluxcb._declare.callback import unwrap
from fluxcb._declare.phases import LossValidationPhase
from fluxcb._declare.state import ENGINE_STEP_NAMES, step_names
from fluxcb._errors import MissingStateError, did_you_mean
from fluxcb.callbacks import AbstractMetric, InferenceRunner, Metrics

__all__ = ["check_inference"]

_COMMON = frozenset({"loss", "outputs", "xs", "ys", "aux"})
"""The step values that an error names as examples."""


def check_inference(graph: CallbackGraph) -> None:
    """Check that the statistics of each `InferenceRunner` name step values that its phase or a callback provides.

    Raises:
        MissingStateError: One names something else.
    """
    accesses = [access for declared in graph.declared for access in declared.accesses()]
    written = {
        path[1] for path, permission, _ in accesses if path[0] == "step" and len(path) > 1 and writes(permission)
    }
    for declared in graph.declared:
        runner = unwrap(declared.callback)
        # Only the step of a user's phase shows which values it computes.
        if not isinstance(runner, InferenceRunner) or not type(runner.phase).__module__.startswith("fluxcb."):
            continue
        # A loss function of the batch replaces the phase, and names values in its aux.
        known = {*step_names((type(runner.phase), LossValidationPhase)), *ENGINE_STEP_NAMES, *written}
        for name in runner.names():
            if name not in known:
                metrics = {metric.name for metric in _metrics(graph)}
                raise MissingStateError(
                    f"{declared.label} fetches `step.{name}`, which {type(runner.phase).__name__} does not compute."
                    f"{did_you_mean(name, known)}",
                    where=declared.where,
                    why=f"statistics are computed from step values, such as {', '.join(sorted(known & _COMMON))}",
                    fix=[
                        *([f'for the metric, write "metrics.{name}"'] if name in metrics else []),
                        f'if a loss function of the batch returns it in its aux, write "aux.{name}"',
                        f"assign `learner.step.{name}` in a traced handler",
                    ],
                )


def _metrics(graph: CallbackGraph) -> Iterator[AbstractMetric]:
    for declared in graph.declared:
        callback = unwrap(declared.callback)
        if isinstance(callback, Metrics):
            yield from callback.metrics
