"""`fluxcb.check`: the static check without a Learner and without JAX."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeGuard

from fluxcb._calls import entry_point
from fluxcb._check.graph import CallbackGraph
from fluxcb._check.preflight import checked_graph
from fluxcb._check.uncalled_handlers import uncalled_handlers
from fluxcb._declare.phases import Phase, TrainingPhase, ValidationPhase
from fluxcb._declare.turns import InTurn
from fluxcb._tracebacks import warn_user
from fluxcb.callbacks import with_defaults

if TYPE_CHECKING:
    from fluxcb._run.learner import Learner

__all__ = ["check", "is_learner"]


@entry_point
def check(
    callbacks: Iterable[Any] | Learner,
    *,
    phases: Iterable[Phase | InTurn | type[Phase]] = (TrainingPhase, ValidationPhase),
    default_callbacks: bool = True,
) -> CallbackGraph:
    """Check a set of callbacks in the same way as a Learner, before anything is computed.

    Args:
        callbacks: Callback instances, and `in_order(...)` groups of them. A Learner has checked its callbacks when
            it was built, so its graph is returned: `learner.callbacks.graph`.
        phases: The phases in which they will run (classes, instances, or `InTurn`).
        default_callbacks: Whether to add the default callbacks, as `Learner` does.

    Returns:
        The graph: `order(event, phase)`, `edges`, and `digraph` for networkx.

    Raises:
        DeclarationError: A declaration is invalid on its own.
        CheckError: The callbacks do not fit together. The error lists all problems.

    Warns:
        UserWarning: No phase emits the event of a handler.

    Example:
        >>> import fluxcb
        >>> from fluxcb.callbacks import CustomCallback, Metrics
        >>> from fluxcb.events import EpochEnd
        >>> from fluxcb.phases import TrainingPhase
        >>> access = {"cbstate": {"metrics_epoch": fluxcb.Read()}}
        >>> show = CustomCallback(print, EpochEnd, access=access)
        >>> graph = fluxcb.check([show, Metrics()], default_callbacks=False)
        >>> graph.order(EpochEnd, TrainingPhase)
        [Metrics(), CustomCallback(print, EpochEnd)]
    """
    if is_learner(callbacks):
        return callbacks.callbacks.graph
    items: Any = callbacks
    # The same functions that a Learner calls, so that both report the same problems.
    graph = checked_graph(with_defaults(items) if default_callbacks else items, phases)
    for _, text in uncalled_handlers(graph):
        warn_user(text, UserWarning)  # as a Learner does
    return graph


def is_learner(value: Any) -> TypeGuard[Learner]:
    """Return whether a value is a Learner, without importing the module that defines Learners."""
    module = sys.modules.get("fluxcb._run.learner")
    return module is not None and isinstance(value, module.Learner)
