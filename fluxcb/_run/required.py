"""What callbacks require of a Learner and its state beyond what the graph can check."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Collection, Mapping
from typing import Any

import jax

from fluxcb._check.graph import CallbackGraph
from fluxcb._check.metric_names import MetricNames
from fluxcb._compile.arrays import leaves_of
from fluxcb._compile.hyperparams import HyperparamIndex
from fluxcb._declare.access import Write, overlap, writes
from fluxcb._declare.callback import unwrap
from fluxcb._declare.events import TracedEvent
from fluxcb._declare.state import PROVIDERS
from fluxcb._errors import CheckError, DeclarationError, MissingStateError, did_you_mean
from fluxcb._tracebacks import stacklevel_of_user
from fluxcb.callbacks import Monitors

__all__ = ["check_hyperparams", "check_watched_data", "refuse_shared", "require_created", "riding", "warn_empty_log"]


def refuse_shared(graph: CallbackGraph, owner: object) -> None:
    """Check that no callback belongs to another than `owner`.

    Raises:
        DeclarationError: One does.
    """
    for declared in graph.declared:
        reference = getattr(unwrap(declared.callback), "_fluxcb_owner", None)
        if reference is not None and reference() not in (None, owner):
            gc.collect()  # a Learner that nobody holds any more may still wait for the collector
        if reference is not None and reference() not in (None, owner):
            raise DeclarationError(
                f"{declared.label} already belongs to another Learner.",
                why="a callback's own state would mix the two trainings",
                fix=[
                    "construct a new instance for each Learner",
                    "free it first: `other.callbacks.remove(callback)`",
                ],
            )


def check_hyperparams(graph: CallbackGraph, hyperparams: HyperparamIndex) -> None:
    """Check that the optimizer has the hyperparameters that callbacks declare.

    Raises:
        FluxcbError: It has not.
    """
    for declared in graph.declared:
        for path, permission in declared.access.items():
            if path[0] == "hyperparams" and len(path) > 1:
                writing = isinstance(permission, Write)
                hyperparams.require(path[1], writing=writing, declared=declared, where=declared.where)


def check_watched_data(graph: CallbackGraph, has_data: Collection[str]) -> None:
    """Check that the metrics that callbacks watch belong to phases with data, if the Learner has any data.

    Args:
        graph: The graph.
        has_data: Names of the phases that have data.

    Raises:
        CheckError: A phase has no data, and no callback can assign its data.
    """
    if not has_data:
        return  # a hand-written loop provides its own batches
    written = [path for d in graph.declared for path, permission in d.access.items() if writes(permission)]
    names = {phase.name for phase in graph.phases}
    filled = {name for name in names if any(overlap(path, ("data", name)) for path in written)}
    problems = list(MetricNames(graph.declared, graph.phases).without_data(has_data, filled))
    if problems:
        raise CheckError.of(problems)


def warn_empty_log(graph: CallbackGraph) -> None:
    """Warn if a `Monitors` has backends, but no callback logs anything."""
    for declared in graph.declared:
        monitors = unwrap(declared.callback)
        if not isinstance(monitors, Monitors) or not monitors.backends:
            continue
        others = [d for d in graph.declared if d is not declared]
        if any(
            writes(permission) and overlap(path, ("cbstate", "monitors"))
            for other in others
            for path, permission in other.access.items()
        ):
            continue
        warnings.warn(
            f"{declared.label} has backends, but no callback logs anything, so the log will be empty. "
            "Add `LogMetrics()` to the callbacks.",
            UserWarning,
            stacklevel=stacklevel_of_user(),
        )


def require_created(graph: CallbackGraph, exists: Collection[str]) -> None:
    """Check that the `cbstate` entries that callbacks declare exist, once all have been initialised.

    Raises:
        MissingStateError: One does not.
    """
    for declared in graph.declared:
        for path, permission in declared.access.items():
            if getattr(permission, "optional", False):
                continue
            if path[0] == "cbstate" and len(path) > 1 and path[1] not in exists:
                writers = dict.fromkeys(
                    d.label
                    for d in graph.declared
                    for p, granted in d.access.items()
                    if writes(granted) and (p[:2] == path[:2] or p == ("cbstate",))
                )
                init = f"assign `learner.cbstate.{path[1]}` in the `init` of {' or '.join(writers or [declared.label])}"
                known = PROVIDERS.get(path[1])
                raise MissingStateError(
                    f"{declared.label} declares `cbstate.{path[1]}`, which no callback's `init` creates."
                    f"{did_you_mean(path[1], exists)}",
                    where=declared.where,
                    why="shared state must exist before the first handler runs",
                    fix=f"add `{known}()` to the callbacks, which creates it" if known else init,
                )


def riding(graph: CallbackGraph, cbstate: Mapping[str, Any]) -> list[str]:
    """Return the `cbstate` entries that ride in the carry: JAX arrays that a traced handler declares."""
    declared: set[str] = set()
    everything = False
    for (event, _), handlers in graph.orders.items():
        if not issubclass(event, TracedEvent):
            continue
        for handler in handlers:
            for path in handler.access:
                if path[0] == "cbstate" and len(path) > 1:
                    declared.add(path[1])
                everything |= path in (("cbstate",), ("*",))
    return [
        name
        for name, value in cbstate.items()
        if (everything or name in declared)
        and (leaves := leaves_of(value))
        and all(isinstance(leaf, jax.Array) for leaf in leaves)
    ]
