"""Warnings about optimizers whose own state has a meaning that callbacks and validation do not see."""

from __future__ import annotations

from collections.abc import Collection

import jax
import optax

from fluxcb._check.graph import CallbackGraph
from fluxcb._declare.access import writes
from fluxcb._declare.phases import Phase
from fluxcb._run.averages import validated_average
from fluxcb._tracebacks import warn_user
from fluxcb._typing import PyTree

__all__ = ["warn_of_optimizer"]


def warn_of_optimizer(graph: CallbackGraph, phases: Collection[Phase], opt_state: PyTree) -> None:
    """Warn about `optax.MultiSteps` and `optax.contrib.schedule_free`, where they give other results than expected."""
    if _find(opt_state, optax.MultiStepsState):
        _warn_of_uncounted_updates(graph)
    found = _find(opt_state, optax.contrib.ScheduleFreeState)
    # With an average, validation does not use the trained parameters, so the warning would be wrong.
    if found and validated_average(graph, phases) is None:
        _warn_of_training_params(found[0])


def _find(opt_state: PyTree, kind: type) -> list[str]:
    """Return where the optimizer state has states of a type, as code such as `.inner_state[0]`."""
    leaves, _ = jax.tree.flatten_with_path(opt_state, is_leaf=lambda state: isinstance(state, kind))
    return [jax.tree_util.keystr(path) for path, leaf in leaves if isinstance(leaf, kind)]


def _warn_of_uncounted_updates(graph: CallbackGraph) -> None:
    # Callbacks read this flag to leave out the steps that only accumulate.
    for declared in graph.declared:
        if any(path == ("step", "hold") and not writes(permission) for path, permission, _ in declared.accesses()):
            warn_user(
                f"{declared.label} counts updates, but `optax.MultiSteps` accumulates gradients inside the optimizer, "
                "where callbacks do not see it. Every step counts as an update. Remove `optax.MultiSteps`, and add "
                "`AccumulateGradients(n)` to the callbacks.",
                UserWarning,
            )


def _warn_of_training_params(where: str) -> None:
    warn_user(
        "`optax.contrib.schedule_free` trains other parameters than the ones that are meant for evaluation. "
        "Validation, `learner.model` and `learner.predict` use the parameters that are trained. To use the others "
        "after a fit, write `learner.params = optax.contrib.schedule_free_eval_params("
        f"learner.opt_state{where}, learner.params)`. Further training needs the former parameters.",
        UserWarning,
    )
