"""The step, traced once.

The Python code of the phase and its handlers runs once, and results in a jaxpr. Programs are built from this jaxpr, so
another set of fetched values, or another kind of program, needs another compilation but never traces a handler again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.core
import numpy as np
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun
from jax.interpreters.partial_eval import dce_jaxpr

from fluxcb._compile.arrays import batch_spec, is_key, leaves_of, spec_of
from fluxcb._compile.batch_loss_broadcasting import warn_of_pairs_in_batch
from fluxcb._compile.call_errors import HANDLER_NOTE
from fluxcb._compile.field_contents import objects_within
from fluxcb._compile.function_variables import variables_of
from fluxcb._compile.handler_backend import Touched
from fluxcb._compile.padded_state import warn_of_padded_state
from fluxcb._compile.step_learner import TracedLearner
from fluxcb._compile.step_setup import StepSetup
from fluxcb._compile.trace_effects import warn_of_clock
from fluxcb._compile.traced import TraceState
from fluxcb._declare.declared import BoundHandler
from fluxcb._declare.events import ComputeEnd, Event, UpdateEnd, is_concrete
from fluxcb._declare.losses import takes_model
from fluxcb._declare.phases import Phase
from fluxcb._errors import FluxcbError, TraceError
from fluxcb._memory import garbage_collection_paused
from fluxcb._tracebacks import warn_user
from fluxcb._traced_values import needs_value, needs_value_error, shapes
from fluxcb._typing import Batch, PyTree

__all__ = ["TracedStep", "flops_of", "jaxprs_in", "trace_step"]

# Above this number of operations, programs take the carry as it is. XLA compiles one kernel for all leaves of a shape,
# but not for slices of a vector. For a small GPT with 151 leaves, vectors doubled the CPU time of the compilation (from
# 5 to 10 s) and saved 0.1 ms of a step of 5 ms.
_SMALL_STEP_FLOPS = 2e7


@dataclass(frozen=True, eq=False)
class TracedStep:
    """One phase's step for batches of one shape, traced.

    Attributes:
        phase: The phase.
        jaxpr: From the leaves of `(carry, batch)` to those of the new carry and of all step values.
        structure: Structure of `(carry, step values)`.
        batch_spec: Shapes and dtypes of the batch.
        step_specs: Shapes and dtypes of the step's values, by name.
        touched: The state that each traced handler has used.
        has_convolution: Whether the model or phase (without callbacks) has convolutions.
        flops: Approximate number of floating-point operations.
        optimizers: Names of the optimizers that it uses.
    """

    phase: Phase
    jaxpr: ClosedJaxpr
    structure: Any
    batch_spec: PyTree
    step_specs: Mapping[str, PyTree]
    touched: Mapping[BoundHandler, Touched]
    has_convolution: bool
    flops: float
    optimizers: frozenset[str]

    @property
    def small(self) -> bool:
        """Whether calling a program costs a large share of the step's time (about 0.5 ms or less on CPU)."""
        return self.flops <= _SMALL_STEP_FLOPS

    def computing(self, names: Collection[str]) -> Callable[[PyTree, Batch], tuple[PyTree, dict[str, Any]]]:
        """Return a function `(carry, batch) -> (carry, step values)` that evaluates the jaxpr for some step values.

        Unneeded parts are removed here. XLA would remove them as well, but only after JAX has lowered them. A key that
        no model uses is a tenth of the lowered code of a small step.
        """
        carry, values = jax.tree.unflatten(self.structure, range(self.structure.num_leaves))
        # The leaves are numbered, so that flattening a subset of the values gives the outputs to keep.
        indices, structure = jax.tree.flatten((carry, {name: values[name] for name in names}))
        output_indices = set(indices)
        is_output = [at in output_indices for at in range(self.structure.num_leaves)]
        # `instantiate=True` keeps all inputs, so that the arguments of the jaxpr stay the same for every subset.
        # Effects such as `jax.debug.print` are kept as well.
        jaxpr, _ = dce_jaxpr(self.jaxpr.jaxpr, is_output, instantiate=True)
        evaluate = jaxpr_as_fun(ClosedJaxpr(jaxpr, self.jaxpr.consts))

        def run(carry: PyTree, batch: Batch) -> tuple[PyTree, dict[str, Any]]:
            computed = dict(zip(sorted(output_indices), evaluate(*jax.tree.leaves((carry, batch))), strict=True))
            return structure.unflatten(computed[at] for at in indices)

        return run


def _note_phase(error: Exception, phase: Phase, batch: Batch) -> None:
    """Add a note to an exception of the model or the loss in a phase that does not train, such as validation.

    Users look for the error in their training data first. The errors of fluxcb and of handlers name their phase.
    """
    of_handler = any(note.startswith(HANDLER_NOTE) for note in getattr(error, "__notes__", ()))
    if not type(phase).trains and not isinstance(error, FluxcbError) and not of_handler:
        error.add_note(f"in the step of {type(phase).__name__}, which does not train, for a batch {shapes(batch)}")


def trace_step(setup: StepSetup, phase: Phase, carry: PyTree, batch: Batch) -> TracedStep:
    """Trace a phase's step. Its result is used for checks and for all programs.

    Args:
        setup: Model, loss, optimizer, handlers.
        phase: The phase.
        carry: The carry, or its specs.
        batch: A batch, or its specs.

    Raises:
        FluxcbError: A traced handler uses undeclared state, needs a value, changes a shape, or leaks a tracer. Or
            the loss is not a scalar.
    """
    touched: dict[BoundHandler, Touched] = {}
    optimizers: set[str] = set()
    emitted: set[type[Event]] = set()

    def step(carry: PyTree, batch: Batch) -> tuple[PyTree, dict[str, Any]]:
        state = TraceState(setup, phase, carry, batch)
        state.touched = touched

        def emit(event: Event) -> None:
            if isinstance(event, type):
                raise TraceError(
                    f"`{type(phase).__name__}.step` emits the class `{event.__name__}`, not an instance of it.",
                    fix=f"write `emit({event.__name__}())`",
                )
            state.emit(event)
            emitted.add(type(event))

        try:
            phase.step(TracedLearner(state), emit)
        except Exception as error:  # errors in handlers have already been converted
            if not needs_value(error):
                _note_phase(error, phase, batch)
                raise
            raise needs_value_error(
                f"`{type(phase).__name__}.step`",
                error,
                where=(),
                why="the model and the loss run while the step is traced, when values are not known yet",
                fix=[
                    "use only jax.numpy: write `jnp.where(condition, a, b)` instead of `if`, and do not call float() "
                    "or numpy, or format values"
                ],
            ) from error
        # A jaxpr cannot hold Python values, so the names leave the trace through a closure.
        optimizers.update(state.updates.used)
        return state.finish()

    carry_spec, spec = spec_of(carry), batch_spec(batch)
    with garbage_collection_paused():
        traced = jax.jit(step).trace(carry_spec, spec)
    # JAX would report a leaked tracer only when it is used later, without the handler that stored it.
    _refuse_leaks(touched)
    closed = traced.jaxpr
    if setup.loss_fn is not None:
        warn_of_clock(setup.loss_fn)
        _check_stored(setup)
    _warn_of_missing_events(setup, type(phase), emitted)
    if type(phase).trains:
        _warn_of_constant_keys(type(phase), closed.jaxpr)
        warn_of_pairs_in_batch(setup, carry_spec, spec, _shapes_of_pairs(closed.jaxpr))
        warn_of_padded_state(setup, carry_spec, spec)
        _warn_of_no_update(type(phase), closed.jaxpr, carry_spec)
    step_specs = {name: spec_of(value) for name, value in traced.out_info[1].items()}
    return TracedStep(
        phase,
        closed,
        jax.tree.structure(traced.out_info),
        spec,
        step_specs,
        touched,
        _convolves(closed.jaxpr),
        flops_of(closed.jaxpr),
        frozenset(optimizers),
    )


def _warn_of_missing_events(setup: StepSetup, phase: type[Phase], emitted: Collection[type[Event]]) -> None:
    """Warn about events that a user's phase lists in `provides`, has traced handlers for, and does not emit."""
    if phase.__module__.startswith("fluxcb."):
        return
    for event in phase.provides:
        # fluxcb itself emits these two; UpdateEnd only after an update, and without one, there is another warning.
        if event in emitted or event in (UpdateEnd, ComputeEnd):
            continue
        # A handler of a base class, such as `TracedEvent`, is for whatever is emitted.
        handlers = [handler for handler in setup.handlers(event) if is_concrete(handler.handler.event)]
        if handlers:
            names = [f"{handler.declared.label}.{handler.name}" for handler in handlers]
            called = " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
            warn_user(
                f"`{phase.__name__}.step` does not emit {event.__name__}, which `{phase.__name__}.provides` lists, so "
                f"fluxcb does not call {called}. Call `emit({event.__name__}())` in `step`.",
                UserWarning,
            )


def _warn_of_constant_keys(phase: type[Phase], jaxpr: Any) -> None:
    """Warn if the step of a training phase creates a random key from a constant, such as `jax.random.key(0)`."""
    if _creates_keys(jaxpr):
        warn_user(
            f"The step of {phase.__name__} creates a random key from a constant, as `jax.random.key(0)` does, so every "
            "step draws the same numbers. In the loss function, use the key that a parameter `key` receives, and in a "
            "traced handler `learner.key`. If the same numbers are intended, draw them before the training.",
            UserWarning,
        )


def _creates_keys(jaxpr: Any) -> bool:
    return any(
        (
            equation.primitive.name == "random_seed"
            and isinstance(equation.invars[0], Literal)
            and not _is_of_model_library(equation)
        )
        or any(map(_creates_keys, jaxprs_in(equation)))
        for equation in jaxpr.eqns
    )


def _is_of_model_library(equation: Any) -> bool:
    """Return whether the code of a model library created an equation, such as the unused key of a Flax RNN."""
    traceback = equation.source_info.traceback
    # The innermost frame comes first, so the first frame outside of JAX has created the key.
    for frame in traceback.frames if traceback is not None else ():
        package = frame.file_name.replace("\\", "/").rpartition("/site-packages/")[2].partition("/")[0]
        if package not in ("jax", "jaxlib"):
            return package in ("flax", "equinox")
    return False


def _warn_of_no_update(phase: type[Phase], jaxpr: Any, carry: PyTree) -> None:
    """Warn if the step of a user's training phase returns all parameters and all state of the model as they were."""
    if phase.__module__.startswith("fluxcb."):
        return
    # The carry is the first argument and the first result, in the same order.
    indices = jax.tree.unflatten(jax.tree.structure(carry), range(len(jax.tree.leaves(carry))))
    # A phase without gradients may train only the state of the model, such as batch statistics.
    of_gradients = any("grads" in names for names in phase.provides.values())
    names = ("params", "opt_state") if of_gradients else ("params", "model_state", "opt_state")
    trained = jax.tree.leaves([indices[name] for name in names])
    if trained and all(jaxpr.outvars[index] is jaxpr.invars[index] for index in trained):
        warn_user(
            f"`{phase.__name__}.step` changes neither {' nor '.join(f'`{name}`' for name in names)}, so it trains "
            "nothing. Assign the gradients to `learner.step.grads`, call `emit(BackwardEnd())`, and then "
            "`learner.apply_updates()`.",
            UserWarning,
        )


def _shapes_of_pairs(jaxpr: Any) -> set[tuple[int, ...]]:
    """Return the shapes `[N, N]` of results in a jaxpr that an operation computes from N values."""
    found = set()
    for equation in jaxpr.eqns:
        shapes = (getattr(variable.aval, "shape", ()) for variable in equation.outvars)
        squares = {shape for shape in shapes if len(shape) == 2 and shape[0] == shape[1]}
        if squares:
            sizes = {math.prod(getattr(variable.aval, "shape", ())) for variable in equation.invars}
            found |= {shape for shape in squares if shape[0] in sizes}
        found = found.union(*map(_shapes_of_pairs, jaxprs_in(equation)))
    return found


def _convolves(jaxpr: Any) -> bool:
    """Return whether a jaxpr has convolutions outside callbacks' handlers.

    Convolutions inside loop bodies are 6 to 34 times slower on CPU (jax issue 12868, seen with
    0.10.2 to 0.12.0), so such a step runs without a loop there. Callbacks never change this decision.
    """
    for equation in jaxpr.eqns:
        # The scope of a handler; see `scope_of`. Adding a callback must not change the kind of the program.
        if "fluxcb:" in str(equation.source_info.name_stack):
            continue
        if equation.primitive.name == "conv_general_dilated" or any(map(_convolves, jaxprs_in(equation))):
            return True
    return False


def flops_of(jaxpr: Any) -> float:
    """Return the approximate number of floating-point operations of a jaxpr. A loop of unknown length counts once.

    XLA's own count takes as long as compiling a small step.
    """
    total = 0.0
    for equation in jaxpr.eqns:
        inside = jaxprs_in(equation)
        sizes = [math.prod(getattr(variable.aval, "shape", ())) for variable in equation.outvars]
        if inside:
            # Only `scan` has a `length`.
            total += equation.params.get("length", 1) * sum(map(flops_of, inside))
        elif equation.primitive.name == "dot_general":
            (contracted, _), _ = equation.params["dimension_numbers"]
            # A multiplication and an addition for each contracted element.
            total += 2 * sizes[0] * math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
        elif equation.primitive.name == "conv_general_dilated":
            # Each output element needs all elements of the kernel for one output channel.
            kernel, axis = equation.invars[1].aval.shape, equation.params["dimension_numbers"].rhs_spec[0]
            total += 2 * sizes[0] * math.prod(kernel) / kernel[axis]
        else:
            total += sum(sizes)
    return total


def jaxprs_in(equation: Any) -> list[Any]:
    """Return the jaxprs in an equation: the body of a loop, the branches of a condition, or a called function."""
    values = [v for value in equation.params.values() for v in (value if isinstance(value, tuple | list) else (value,))]
    return [inner for inner in (getattr(value, "jaxpr", value) for value in values) if hasattr(inner, "eqns")]


def _check_stored(setup: StepSetup) -> None:
    """Refuse random keys that a loss function has stored in a variable, to split them again. Warn of other tracers.

    Raises:
        TraceError: A variable of the loss function has a key that exists only while the step is traced.
    """
    for name, value in variables_of(setup.loss_fn).items():
        tracers = [part for part in objects_within(value) if isinstance(part, jax.core.Tracer)]
        # The keys of `jax.random.PRNGKey` are plain arrays of two words.
        if any(is_key(part) or (part.shape, part.dtype) == ((2,), np.uint32) for part in tracers):
            raise TraceError(
                f"The loss function has stored a random key of the traced step in the variable `{name}`.",
                why="the loss function runs once, while the step is traced, and the key exists only then",
                fix="take the key of the step as a parameter: `def loss_fn(model, batch, *, key):`, or "
                "`def loss_fn(params, batch, key):` for `Learner.from_loss`",
            )
        if tracers:
            # A loss function of the outputs returns no aux.
            of_batch = setup.model is None or takes_model(setup.loss_fn)
            advice = (
                'Return the value as aux, `return loss, {"name": value}`, which callbacks read as `step.aux`.'
                if of_batch
                else 'To record the value, compute it in a metric: `Metrics(Metric(lambda outputs, ys: ..., "name"))`.'
            )
            # Not an error, because the loss function itself may use what the model has stored.
            warn_user(
                f"The loss function has stored a traced value in the variable `{name}`. The function runs once, while "
                f"the step is traced, so `{name}` does not get the value of each step, and the stored object cannot be "
                f"used after the trace. {advice}",
                UserWarning,
            )


def _refuse_leaks(touched: Mapping[BoundHandler, Touched]) -> None:
    """Raise an error for callbacks that stored a tracer in one of their fields."""
    for handler in touched:
        instance = getattr(handler.function, "__self__", None)
        # Only what the fields of the callback hold. JAX itself reports all other leaks when the tracer is used.
        for name, value in vars(instance).items() if instance is not None else ():
            parts = itertools.chain(leaves_of(value), objects_within(value))
            if any(isinstance(part, jax.core.Tracer) for part in parts):
                raise TraceError(
                    f"{handler.declared.label} stores a traced value in `self.{name}`.",
                    where=handler.where,
                    why="a traced handler runs once, while the step is traced, and its values are invalid afterwards",
                    fix=[
                        "put it into `learner.cbstate` (created in `init`) to carry it from step to step",
                        "read it in a host handler, at StepEnd",
                    ],
                )
