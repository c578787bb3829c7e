"""Warnings about frozen parts of a model whose model state still changes in training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from fluxcb._compile.step import TracedStep
from fluxcb._declare.callback import unwrap
from fluxcb._run.learner_core import LearnerCore
from fluxcb._tracebacks import warn_user
from fluxcb.callbacks import Freeze

__all__ = ["warn_about_frozen_state"]


def warn_about_frozen_state(core: LearnerCore) -> None:
    """Warn about each `Freeze` of a part whose model state the training changes, such as batch statistics."""
    freezing = [d for d in core.graph.declared if isinstance(unwrap(d.callback), Freeze)]
    if not freezing:
        return
    steps = [core.traced(phase) for phase in core.phases if type(phase).trains]
    changing = [path for step in steps if step is not None for path in _changing(step)]
    for declared in freezing:
        freeze: Any = unwrap(declared.callback)
        # The model state of a Linen module begins with the name of a collection, such as `batch_stats`.
        found = [path for path in changing if freeze.selects(path) or freeze.selects(path.partition(".")[2])]
        if found:
            warn_user(
                f"{declared.label} keeps parameters constant, but the training changes the model state of the same "
                f"part: `model_state.{found[0]}`. To keep the model state as well, call these layers in evaluation "
                "mode, for example with `use_running_average=True` for batch normalization.",
                UserWarning,
            )


def _changing(step: TracedStep) -> Iterator[str]:
    """Yield the path of each floating-point array of the model state that a step computes anew."""
    jaxpr = step.jaxpr.jaxpr
    carry, _ = jax.tree.unflatten(step.structure, jaxpr.outvars)
    # The carry is the first argument and the first result of the step.
    before = jax.tree.unflatten(jax.tree.structure(carry), jaxpr.invars[: len(jax.tree.leaves(carry))])
    made_by = {variable: equation for equation in jaxpr.eqns for variable in equation.outvars}
    new = jax.tree_util.tree_flatten_with_path(carry["model_state"])[0]
    # An array that the step passes through is the same variable in both, so no step has to run.
    for (path, variable), old in zip(new, jax.tree.leaves(before["model_state"]), strict=True):
        equation = made_by.get(variable)
        # A callback that can skip a step selects between the old and the new array.
        selected = equation.invars[1:] if equation and equation.primitive.name == "select_n" else [variable]
        if jnp.issubdtype(variable.aval.dtype, jnp.floating) and any(one is not old for one in selected):
            yield jax.tree_util.keystr(path, simple=True, separator=".")
