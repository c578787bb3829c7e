"""The step, traced once.

The phase's Python, handlers included, runs once and leaves a jaxpr. Programs are built around that jaxpr, so that
asking for other fetched values, or for another kind of program, compiles again but never traces a handler again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.core
from jax.extend.core import ClosedJaxpr, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr

from fluxcb._compile.arrays import batch_spec, leaves_of, spec_of
from fluxcb._compile.handler_backend import Touched
from fluxcb._compile.step_learner import StepLearner
from fluxcb._compile.traced import NEEDS_VALUE, StepSetup, TraceState
from fluxcb._declare.declared import Handler
from fluxcb._declare.phases import Phase
from fluxcb._errors import TraceError
from fluxcb._typing import Batch, PyTree

__all__ = ["TracedStep", "flops_of", "trace_step"]


@dataclass(frozen=True, eq=False)
class TracedStep:
    """One phase's step for batches of one shape, traced.

    Attributes:
        phase: The phase.
        jaxpr: From the leaves of `(carry, batch)` to those of the new carry and of all step values.
        structure: Structure of `(carry, step values)`.
        batch_spec: Shapes and dtypes of the batch.
        step_specs: Shapes and dtypes of the step's values, by name.
        touched: What each traced handler really accessed.
        has_convolution: Whether the model or phase (callbacks do not count) convolves.
        flops: About how many floating-point operations it takes.
    """

    phase: Phase
    jaxpr: ClosedJaxpr
    structure: Any
    batch_spec: PyTree
    step_specs: Mapping[str, PyTree]
    touched: Mapping[Handler, Touched]
    has_convolution: bool
    flops: float

    def computing(self, names: Collection[str]) -> Callable[[PyTree, Batch], tuple[PyTree, dict[str, Any]]]:
        """Return `(carry, batch) -> (carry, step values)`, which evaluates the jaxpr, for the values of these names.

        What nothing of it needs is left out here: XLA would drop it, too, but only after JAX has lowered it. A key that
        no model uses makes a tenth of what is lowered of a small step.
        """
        carry, values = jax.tree.unflatten(self.structure, range(self.structure.num_leaves))
        indices, structure = jax.tree.flatten((carry, {name: values[name] for name in names}))
        kept = set(indices)
        wanted = [at in kept for at in range(self.structure.num_leaves)]
        jaxpr, _ = dce_jaxpr(self.jaxpr.jaxpr, wanted, instantiate=True)
        evaluate = jaxpr_as_fun(ClosedJaxpr(jaxpr, self.jaxpr.consts))

        def run(carry: PyTree, batch: Batch) -> tuple[PyTree, dict[str, Any]]:
            computed = dict(zip(sorted(kept), evaluate(*jax.tree.leaves((carry, batch))), strict=True))
            return structure.unflatten(computed[at] for at in indices)

        return run


def trace_step(setup: StepSetup, phase: Phase, carry: PyTree, batch: Batch) -> TracedStep:
    """Trace a phase's step; this is the dry run, and what the programs are made of.

    Args:
        setup: Model, loss, optimizer, handlers.
        phase: The phase.
        carry: The carry, or its specs.
        batch: A batch, or its specs.

    Raises:
        FluxcbError: A traced handler touches what it did not declare, needs a value, changes a
            shape, leaks a tracer; or the loss is no scalar.
    """
    touched: dict[Handler, Touched] = {}

    def step(carry: PyTree, batch: Batch) -> tuple[PyTree, dict[str, Any]]:
        state = TraceState(setup, phase, carry, batch)
        state.touched = touched
        try:
            phase.step(StepLearner(state), state.emit)
        except NEEDS_VALUE as error:  # handlers have told theirs already
            raise TraceError(
                f"`{type(phase).__name__}.step` needs a value in Python: {str(error).splitlines()[0]}",
                why="model and loss run while the step is compiled, when values are not known yet",
                fix="stay in jax.numpy: `jnp.where(condition, a, b)` instead of `if`, no float(), no numpy",
            ) from error
        return state.finish()

    carry_spec, shapes = spec_of(carry), batch_spec(batch)
    traced = jax.jit(step).trace(carry_spec, shapes)
    _refuse_leaks(touched)
    closed = traced.jaxpr
    step_specs = {name: spec_of(value) for name, value in traced.out_info[1].items()}
    return TracedStep(
        phase,
        closed,
        jax.tree.structure(traced.out_info),
        shapes,
        step_specs,
        touched,
        _convolves(closed.jaxpr),
        flops_of(closed.jaxpr),
    )


def _convolves(jaxpr: Any) -> bool:
    """Tell whether a jaxpr convolves outside callbacks' handlers.

    Convolutions inside loop bodies are 6 to 34 times slower on CPU (jax issue 12868, seen with
    0.10.2 to 0.12.0), so such a step runs straight there. Callbacks never decide that.
    """
    for equation in jaxpr.eqns:
        if "fluxcb:" in str(equation.source_info.name_stack):
            continue
        if equation.primitive.name == "conv_general_dilated" or any(map(_convolves, _inside(equation))):
            return True
    return False


def flops_of(jaxpr: Any) -> float:
    """Return about how many floating-point operations a jaxpr takes; a loop of unknown length counts as one turn.

    XLA's own count takes as long as compiling a small step.
    """
    total = 0.0
    for equation in jaxpr.eqns:
        inside = _inside(equation)
        sizes = [math.prod(getattr(variable.aval, "shape", ())) for variable in equation.outvars]
        if inside:
            total += equation.params.get("length", 1) * sum(map(flops_of, inside))
        elif equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            total += 2 * sizes[0] * math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
        elif equation.primitive.name == "conv_general_dilated":
            kernel, axis = equation.invars[1].aval.shape, equation.params["dimension_numbers"].rhs_spec[0]
            total += 2 * sizes[0] * math.prod(kernel) / kernel[axis]
        else:
            total += sum(sizes)
    return total


def _inside(equation: Any) -> list[Any]:
    """Return the jaxprs in an equation: the body of a loop, the branches of a condition, what a call calls."""
    values = [v for value in equation.params.values() for v in (value if isinstance(value, tuple | list) else (value,))]
    return [inner for inner in (getattr(value, "jaxpr", value) for value in values) if hasattr(inner, "eqns")]


def _refuse_leaks(touched: Mapping[Handler, Touched]) -> None:
    """Refuse callbacks that kept a tracer in one of their fields."""
    for handler in touched:
        instance = getattr(handler.function, "__self__", None)
        for name, value in vars(instance).items() if instance is not None else ():
            if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves_of(value)):
                raise TraceError(
                    f"{handler.declared.label} keeps a traced value in `self.{name}`.",
                    where=handler.where,
                    why="traced handlers run once, while the step is compiled; outside it the value means nothing",
                    fix=[
                        "put it into `learner.cbstate` (created in `init`) to carry it from step to step",
                        "read it in a host handler, at StepEnd",
                    ],
                )
