"""The program that runs the steps of all members of a population: `vmap` of their step, in a loop."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fluxcb._compile.fetch import Fetch, empty_buffers, store
from fluxcb._compile.hyperparams import HyperparamIndex
from fluxcb._compile.joint_step import JointStep
from fluxcb._compile.program import Outputs, ProgramKind, compiled_for, plain_program

__all__ = ["JointProgram", "compile_joint", "joint_function"]


@dataclass(frozen=True, eq=False)
class JointProgram:
    """A compiled program for all members.

    Attributes:
        call: `(arrays, batches, lengths) -> (arrays, Outputs)`. `arrays` are the leaves of the carry, with the members
            as their leading axis. They are donated. `lengths` (uint32[members]) is the number of steps of each member.
        step: The step that it runs.
        fetch: The values that it returns.
        steps: Length of the buffer (steps); 1 for a program without a loop.
        seconds: The duration of its compilation (s).
    """

    call: Callable[[list[Any], Any, Any], tuple[list[Any], Outputs]]
    step: JointStep
    fetch: Fetch
    steps: int
    seconds: float


def joint_function(
    joint: JointStep, fetch: Fetch, hyperparams: HyperparamIndex, structure: Any, *, kind: ProgramKind, shared: bool
) -> Callable[[list[Any], Any, list[Any], Any], tuple[list[Any], Outputs]]:
    """Return the function that a joint program computes.

    Args:
        joint: The step.
        fetch: The values to return.
        hyperparams: The positions of the hyperparameters in the carry.
        structure: The structure of the carry.
        kind: `loop`, or `straight` for one step without a loop.
        shared: Whether all members get the same batches, which then have no axis for the members.

    Returns:
        A function of the arrays, the batches, the own values of the members, and the lengths.
    """
    # The program of a `straight` step would select between old and new values itself, as `step` does below.
    one_step = plain_program(joint.step, "loop", fetch, hyperparams)
    steps = jax.vmap(one_step, in_axes=(0, (None if shared else 0, 0)))

    def step(arrays: list[Any], batch: Any, own: list[Any], active: Any) -> tuple[list[Any], Any, Any]:
        new, (rows, buffers), last = steps(structure.unflatten(arrays), (batch, own))
        # A member that is not active keeps its values bit for bit. Its row says that the step did not run.
        kept = [_select(active, a, b) for a, b in zip(jax.tree.leaves(new), arrays, strict=True)]
        rows = rows.at[:, 0].set(active.astype(rows.dtype))
        return kept, (rows, buffers), last

    def is_active(arrays: list[Any], i: Any, lengths: Any) -> Any:
        # `counters[3]` is the flag with which a traced handler stops the window.
        return (i < lengths) & (structure.unflatten(arrays)["counters"][:, 3] == 0)

    def run_one(arrays: list[Any], batches: Any, own: list[Any], lengths: Any) -> tuple[list[Any], Outputs]:
        arrays, (rows, buffers), last = step(arrays, batches, own, is_active(arrays, 0, lengths))
        return arrays, Outputs(rows, buffers, last, {})

    def run_many(arrays: list[Any], batches: Any, own: list[Any], lengths: Any) -> tuple[list[Any], Outputs]:
        members, length = lengths.shape[0], jax.tree.leaves(batches)[0].shape[0]
        # The steps are the first axis, because `store` writes one step of all members at once.
        stored = jax.vmap(lambda _: empty_buffers(fetch, length), out_axes=1)(lengths)
        last = [jax.tree.map(lambda s: jnp.zeros((members, *s.shape), s.dtype), spec) for spec in fetch.last.values()]

        def condition(state: Any) -> Any:
            # The loop runs until the last member has ended or stopped. The others keep their values in `step`.
            return is_active(state[1], state[0], lengths).any()

        def body(state: Any) -> Any:
            i, arrays, stored, last = state
            batch = jax.tree.map(lambda b: jax.lax.dynamic_index_in_dim(b, i, keepdims=False), batches)
            active = is_active(arrays, i, lengths)
            arrays, packed, new = step(arrays, batch, own, active)
            # The last step differs between the members, if one of them stops.
            last = jax.tree.map(functools.partial(_select, active), new, last)
            return i + 1, arrays, store(stored, i, packed), last

        # Unsigned, because a signed index would need an additional kernel at each use to check for negative values.
        first = (jnp.uint32(0), arrays, stored, last)
        _, arrays, (rows, buffers), last = jax.lax.while_loop(condition, body, first)
        return arrays, Outputs(rows, buffers, last, {})

    return run_one if kind == "straight" else run_many


def _select(active: Any, new: Any, old: Any) -> Any:
    return jnp.where(active.reshape(-1, *[1] * (jnp.ndim(new) - 1)), new, old)


def compile_joint(
    joint: JointStep,
    arrays: list[Any],
    batches: Any,
    *,
    structure: Any,
    fetch: Fetch,
    kind: ProgramKind,
    steps: int,
    hyperparams: HyperparamIndex,
    shared: bool,
    resident: bool,
    fuses: bool,
) -> JointProgram:
    """Compile a joint program.

    Args:
        joint: The step.
        arrays: The leaves of the carry, with the members as their leading axis.
        batches: The batches for a call.
        structure: The structure of the carry.
        fetch: The values to return.
        kind: `loop`, or `straight` for one step without a loop.
        steps: Length of the buffer (steps).
        hyperparams: The positions of the hyperparameters in the carry.
        shared: Whether all members get the same batches.
        resident: Whether `batches` are arrays on the device and row numbers.
        fuses: Whether XLA fuses operations (on CPU).
    """
    began = time.perf_counter()
    function = joint_function(joint, fetch, hyperparams, structure, kind=kind, shared=shared)
    # On the device once, because all calls use the same values.
    own = [jax.device_put(np.stack(values)) for values in zip(*joint.own, strict=True)]

    def run(arrays: list[Any], batches: Any, own: list[Any], lengths: Any) -> tuple[list[Any], Outputs]:
        if resident:  # rows are gathered for the whole window at once; see `_Maker.window`
            of, rows = batches
            batches = jax.tree.map(lambda a: jnp.take(a, rows, axis=0, mode="clip"), of)
        return function(arrays, batches, own, lengths)

    # Only the shape and the dtype matter for lowering.
    lengths = np.ones(arrays[0].shape[0], np.uint32)
    lowered = jax.jit(run, donate_argnums=0).lower(arrays, batches, own, lengths)
    platform = next(iter(arrays[0].devices())).platform
    # The kernels of all members together decide whether it pays off to run them in parallel.
    whole = replace(joint.step, flops=len(joint.own) * joint.step.flops)
    compiled = compiled_for(lowered, whole, platform, fuses=fuses)
    return JointProgram(
        lambda arrays, batches, lengths: compiled(arrays, batches, own, lengths),
        joint,
        fetch,
        steps,
        time.perf_counter() - began,
    )
