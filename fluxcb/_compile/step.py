"""The step, traced once, and the programs made of it.

The phase's Python, handlers included, runs once and leaves a jaxpr. Programs are built around
that jaxpr: the loop program (a `while_loop` of run-time length over buffers of batches and
fetched values) or the straight-line one. Asking for other fetched values compiles again, but
never traces a handler again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.core
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from fluxcb._compile.arrays import is_key, spec_of
from fluxcb._compile.handler_backend import Touched
from fluxcb._compile.step_learner import StepLearner
from fluxcb._compile.traced import StepSetup, TraceState
from fluxcb._declare.declared import Handler
from fluxcb._declare.phases import Phase
from fluxcb._errors import TraceError
from fluxcb._typing import Batch, PyTree

__all__ = ["ProgramKind", "TracedStep", "compile_program", "trace_step"]

ProgramKind = Literal["loop", "straight"]

_SMALL_STEP_FLOPS = 2e7
_BUFFER = 2  # a buffer of one is not bit-safe against longer ones, so a window of one is padded inside jit


@dataclass(frozen=True, eq=False)
class TracedStep:
    """One phase's step for batches of one shape, traced.

    Attributes:
        phase: The phase.
        run: `(carry, batch) -> (carry, step values)`, evaluates the jaxpr.
        batch_spec: Shapes and dtypes of the batch.
        step_specs: Shapes and dtypes of the step's values, by name.
        touched: What each traced handler really accessed.
        has_convolution: Whether the model or phase (callbacks do not count) convolves.
    """

    phase: Phase
    run: Callable[[PyTree, Batch], tuple[PyTree, dict[str, Any]]]
    batch_spec: PyTree
    step_specs: Mapping[str, PyTree]
    touched: Mapping[Handler, Touched]
    has_convolution: bool


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
        phase.step(StepLearner(state), state.emit)
        return state.finish()

    carry_spec, batch_spec = spec_of(carry), spec_of(batch)
    traced = jax.jit(step).trace(carry_spec, batch_spec)
    _refuse_leaks(touched)
    closed = traced.jaxpr
    out_structure = jax.tree.structure(traced.out_info)
    flat = jaxpr_as_fun(closed)

    def run(carry: PyTree, batch: Batch) -> tuple[PyTree, dict[str, Any]]:
        return jax.tree.unflatten(out_structure, flat(*jax.tree.leaves((carry, batch))))

    step_specs = {name: spec_of(value) for name, value in traced.out_info[1].items()}
    return TracedStep(phase, run, batch_spec, step_specs, touched, _convolves(closed.jaxpr))


def compile_program(
    step: TracedStep, carry: PyTree, batch: Batch, length: Any, *, fetch: Sequence[str], kind: ProgramKind
) -> Callable[..., tuple[PyTree, dict[str, Any]]]:
    """Compile a window of one.

    Args:
        step: The traced step.
        carry: The carry it will be called with; it is donated at each call.
        batch: A batch it will be called with.
        length: int32[], the number of steps as a run-time value.
        fetch: Names of the step values that leave the device.
        kind: `loop`, or `straight` for the plain step.

    Returns:
        A compiled `(carry, batch, length) -> (carry, fetched values)`. Called with other shapes it
        raises TypeError, and donates nothing.
    """
    program = _loop(step, fetch) if kind == "loop" else _straight(step, fetch)
    lowered = jax.jit(program, donate_argnums=0).lower(carry, batch, length)
    return lowered.compile(compiler_options=_options(lowered, carry))


def _options(lowered: Any, carry: PyTree) -> dict[str, Any] | None:
    """Return compiler options; on CPU, a step may be too small for running its kernels in parallel.

    XLA's CPU backend hands independent kernels to a thread pool. With a few dozen kernels of a microsecond each, the
    handing over doubles the step's time (28 to 80 us for a 64-64-10 MLP with a guard, jax 0.10.2); bits are the same.
    """
    platform = next(iter(carry["counters"].devices())).platform
    flops = (lowered.cost_analysis() or {}).get("flops", float("inf"))
    if platform != "cpu":
        return None
    # Without it, a while loop copies each part of the carry that a guard (`step.skip`) reads beside its new value.
    options = {"xla_cpu_copy_insertion_use_region_analysis": True}
    if flops > _SMALL_STEP_FLOPS:
        return options
    return {**options, "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}


def _straight(step: TracedStep, fetch: Sequence[str]) -> Callable[..., Any]:
    def program(carry: PyTree, batch: Batch, length: Any) -> tuple[PyTree, dict[str, Any]]:
        del length
        new, values = step.run(carry, batch)
        if "stop" in step.step_specs:  # once stopped, nothing moves any more, as the loop's condition has it
            going = carry["counters"][3] == 0
            new = jax.tree.map(lambda n, o: jnp.where(going, n, o), new, carry)
        return new, {name: values[name] for name in fetch}

    return program


def _loop(step: TracedStep, fetch: Sequence[str]) -> Callable[..., Any]:
    def program(carry: PyTree, batch: Batch, length: Any) -> tuple[PyTree, dict[str, Any]]:
        buffers = jax.tree.map(_padded, batch)
        fetched = {name: jax.tree.map(_empty_buffer, step.step_specs[name]) for name in fetch}

        def condition(state: Any) -> Any:
            i, carry, _ = state
            return (i < length) & (carry["counters"][3] == 0)

        def body(state: Any) -> Any:
            i, carry, fetched = state
            batch = jax.tree.map(lambda b: jax.lax.dynamic_index_in_dim(b, i, keepdims=False), buffers)
            carry, values = step.run(carry, batch)
            fetched = {
                name: jax.tree.map(lambda buffer, v: buffer.at[i].set(v), buffer, values[name])
                for name, buffer in fetched.items()
            }
            return i + 1, carry, fetched

        _, carry, fetched = jax.lax.while_loop(condition, body, (jnp.int32(0), carry, fetched))
        return carry, jax.tree.map(lambda buffer: buffer[0], fetched)

    return program


def _padded(x: Any) -> Any:
    x = jnp.asarray(x)
    return jnp.stack([x, x if is_key(x) else jnp.zeros_like(x)])


def _empty_buffer(spec: jax.ShapeDtypeStruct) -> Any:
    if is_key(spec):
        raise TraceError(
            "A typed random key cannot be fetched as a step value.", fix="fetch `jax.random.key_data(key)`"
        )
    return jnp.zeros((_BUFFER, *spec.shape), spec.dtype)


def _convolves(jaxpr: Any) -> bool:
    """Tell whether a jaxpr convolves outside callbacks' handlers.

    Convolutions inside loop bodies are 6 to 34 times slower on CPU (jax issue 12868, seen with
    0.10.2 to 0.12.0), so such a step runs straight there. Callbacks never decide that.
    """
    for equation in jaxpr.eqns:
        if "fluxcb:" in str(equation.source_info.name_stack):
            continue
        if equation.primitive.name == "conv_general_dilated":
            return True
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns") and _convolves(inner):
                    return True
    return False


def _refuse_leaks(touched: Mapping[Handler, Touched]) -> None:
    """Refuse callbacks that kept a tracer in one of their fields."""
    for handler in touched:
        instance = getattr(handler.function, "__self__", None)
        for name, value in vars(instance).items() if instance is not None else ():
            if any(isinstance(leaf, jax.core.Tracer) for leaf in _leaves(value)):
                raise TraceError(
                    f"{handler.declared.label} keeps a traced value in `self.{name}`.",
                    where=handler.where,
                    why="traced handlers run once, while the step is compiled; outside it the value means nothing",
                    fix=[
                        "put it into `learner.cbstate` (created in `init`) to carry it from step to step",
                        "read it in a host handler, at StepEnd",
                    ],
                )


def _leaves(value: Any) -> list[Any]:
    """Return the leaves of whatever a user keeps in a field; JAX refuses dicts whose keys cannot be sorted."""
    try:
        return jax.tree.leaves(value)
    except ValueError:
        parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, list | tuple) else ()
        return [leaf for part in parts for leaf in _leaves(part)]
