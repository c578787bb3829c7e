"""Warnings about model state that the training changes, although its parameters are frozen or averaged."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from fluxcb._check.graph import CallbackGraph
from fluxcb._compile.step import TracedStep
from fluxcb._declare.callback import unwrap
from fluxcb._tracebacks import warn_user
from fluxcb.callbacks import Freeze, StochasticWeightAveraging

__all__ = ["warn_about_averaged_state", "warn_about_frozen_state"]


def warn_about_frozen_state(graph: CallbackGraph, steps: Iterable[TracedStep]) -> None:
    """Warn about each `Freeze` of a part whose model state the training changes, such as batch statistics."""
    freezing = [d for d in graph.declared if isinstance(unwrap(d.callback), Freeze)]
    if not freezing:
        return
    changing = list(_changing(steps))
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


def warn_about_averaged_state(graph: CallbackGraph, steps: Iterable[TracedStep]) -> None:
    """Warn about a `StochasticWeightAveraging` whose average is used with the model state of the trained parameters."""
    for declared in graph.declared:
        average = unwrap(declared.callback)
        # A moving average is close to the trained parameters, so their model state also fits `ParameterEMA`.
        if not isinstance(average, StochasticWeightAveraging) or not average.validate or declared.disabled:
            continue
        path = next(_changing(steps), None)
        if path is not None:
            name = type(average).__name__
            warn_user(
                f"{declared.label} averages the parameters, but not the model state that the training changes: "
                f"`model_state.{path}`. Batch statistics of the trained parameters do not fit the average, so "
                "validation and `learner.model` give worse results than the average can. Write "
                f"`{name}({average.start}, every={average.every}, validate=False)` to use the trained parameters "
                "there. After the training, recompute the statistics for the average, as in "
                "docs/how-to/average-the-parameters.md.",
                UserWarning,
            )


def _changing(steps: Iterable[TracedStep]) -> Iterator[str]:
    """Yield the path of each floating-point array of the model state that training steps compute anew."""
    for step in steps:
        if type(step.phase).trains:
            yield from _changing_in(step)


def _changing_in(step: TracedStep) -> Iterator[str]:
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
