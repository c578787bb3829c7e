"""Programs, which are compiled from a traced step.

There are two programs per phase and batch shape. The single-step program takes a batch. The window program takes a
buffer of batches and runs a given number of steps. Both are loops of run-time length around the same body, so
their results agree bit for bit. A single step without a loop is used where a loop body would be slow.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from fluxcb._compile.arrays import is_key
from fluxcb._compile.carry_layout import CarryLayout
from fluxcb._compile.carry_paths import below, part_of
from fluxcb._compile.fetch import Fetch, empty_buffers, store
from fluxcb._compile.hyperparams import HyperparamIndex
from fluxcb._compile.step import TracedStep
from fluxcb._compile.traced_update import update_with_selection
from fluxcb._compile.updating import FLAG_SCOPE
from fluxcb._errors import DeclarationError
from fluxcb._memory import garbage_collection_paused, release_freed_memory
from fluxcb._typing import PyTree, Rows, StatePath

__all__ = ["FETCH_SCOPE", "Outputs", "Program", "ProgramKind", "compile_program", "compiled_for", "plain_program"]

ProgramKind = Literal["loop", "straight"]

FETCH_SCOPE = "fluxcb:fetch"
"""The scope in which the values that leave the device are packed."""

_LARGE = 64 << 20
"""Memory of a call from which freed memory is released before the first call (bytes)."""

_PADDED = 2  # a buffer of length 1 may give other bits than longer buffers, so a single step is padded inside jit


class Outputs(NamedTuple):
    """The results of one call of a program in addition to the carry.

    Attributes:
        rows: int32[steps, words] (int32[words] of a single step); see `Fetch`.
        buffers: The larger values of each step, stacked like the rows.
        last: Values of the last step that ran, by position of their path.
        values: Unpacked step values by name, if a hand-written loop runs the step.
    """

    rows: Any
    buffers: list[Any]
    last: list[PyTree]
    values: Mapping[str, PyTree]


@dataclass(frozen=True, eq=False)
class Program:
    """A compiled program.

    Attributes:
        call: `(carry, batch) -> (carry, Outputs)`, or `(carry, buffer, length)` with a uint32[] for a window. The
            carry is donated. With other shapes, it raises TypeError or ValueError, and donates nothing.
        layout: The layout of the carry in the arrays that it takes and returns, or None for the plain carry.
        step: The step that it runs.
        fetch: The values that it returns.
        steps: Length of the buffer (steps). 1 for the single-step program.
        seconds: The duration of its compilation (s).
        on_host: Whether its device is the host's CPU.
        rows_only: Whether it returns only the rows instead of `Outputs`, because the fetch needs nothing else. This
            makes a call 0.5 us cheaper.
        peak_bytes: The memory that a call needs on each device, as XLA has planned it (bytes). None if XLA does not
            report it on this platform.
    """

    call: Callable[..., tuple[PyTree, Any]]
    layout: CarryLayout | None
    step: TracedStep
    fetch: Fetch
    steps: int
    seconds: float
    on_host: bool
    rows_only: bool
    peak_bytes: int | None


def compile_program(
    step: TracedStep,
    carry: PyTree,
    batches: Any,
    *,
    layout: CarryLayout | None,
    fetch: Fetch,
    kind: ProgramKind,
    steps: int = 1,
    hyperparams: HyperparamIndex,
    unpacked: tuple[str, ...] = (),
    pins_shardings: bool = False,
    fuses: bool = True,
) -> Program:
    """Compile a program.

    Args:
        step: The traced step.
        carry: The carry for calls, or the arrays that hold it.
        batches: A batch, or a buffer of batches, for calls.
        layout: The layout of the carry in the arrays, or None for the plain carry.
        fetch: The values that it returns.
        kind: `loop`, or `straight` for the plain step.
        steps: Length of the buffer. 1 for a single batch.
        hyperparams: The positions of the hyperparameters in the carry.
        unpacked: Names of step values to return unpacked, in addition to the packed values.
        pins_shardings: Whether the new carry has the shardings of the old one. Otherwise, XLA chooses them.
        fuses: Whether XLA fuses operations (on CPU).
    """
    # Compiled ahead of time: a batch of another shape raises an error before the carry is donated. A jitted function
    # would compile again without notice.
    began = time.perf_counter()
    maker = _Maker(step, layout, fetch, hyperparams, unpacked, isinstance(batches, Rows))
    program = maker.straight if kind == "straight" else maker.loop if steps == 1 else maker.window
    program = _fetched_by_all(program, carry)
    # An argument instead of a constant, so that one program runs windows of all lengths up to the length of the buffer.
    length = () if steps == 1 else (np.uint32(1),)
    rows_only = not (fetch.buffers or fetch.last or unpacked)
    pinned: Any = {"out_shardings": (jax.tree.map(lambda x: x.sharding, carry), None)} if pins_shardings else {}
    jitted = jax.jit(_only_rows(program) if rows_only else program, donate_argnums=0, **pinned)
    with garbage_collection_paused():
        lowered = jitted.lower(carry, _arguments(batches), *length)
    # The platform of the arrays, because `jax.default_backend()` may differ from it.
    platform = next(iter(jax.tree.leaves(carry)[0].devices())).platform
    call = compiled = compiled_for(lowered, step, platform, fuses=fuses)
    if isinstance(batches, Rows):
        # `Rows` is not a pytree, so the program takes its two fields.
        def call(carry: PyTree, batch: Any, *length: Any) -> tuple[PyTree, Any]:
            return compiled(carry, _arguments(batch), *length)

    peak_bytes = _peak_bytes(compiled)
    if platform == "cpu" and (peak_bytes or 0) >= _LARGE:
        release_freed_memory()  # XLA allocates the memory of the step from the same heaps that it used for compiling
    seconds = time.perf_counter() - began
    return Program(call, layout, step, fetch, steps, seconds, platform == "cpu", rows_only, peak_bytes)


def plain_program(
    step: TracedStep, kind: ProgramKind, fetch: Fetch, hyperparams: HyperparamIndex
) -> Callable[[PyTree, Any], Any]:
    """Return the function of a carry and a batch that a program of this kind computes for each step."""
    maker = _Maker(step, None, fetch, hyperparams, (), False)
    return maker.straight if kind == "straight" else maker.one_step


def _fetched_by_all(program: Callable[..., tuple[PyTree, Outputs]], carry: PyTree) -> Callable[..., Any]:
    """Return a program that replicates fetched values to all processes, if the carry is distributed.

    Otherwise, XLA would leave values of examples, such as the model's outputs, on the processes of the examples.
    """
    arrays = (leaf for leaf in jax.tree.leaves(carry) if isinstance(leaf, jax.Array))
    spread = (array.sharding for array in arrays if not array.is_fully_addressable)
    # Only a NamedSharding has a mesh from which a replicated sharding can be made.
    mesh = next((sharding.mesh for sharding in spread if isinstance(sharding, NamedSharding)), None)
    if mesh is None:
        return program
    replicated = NamedSharding(mesh, PartitionSpec())

    def with_replicated_values(arrays: PyTree, *arguments: Any) -> tuple[PyTree, Outputs]:
        arrays, outputs = program(arrays, *arguments)
        fetched = (outputs.rows, outputs.buffers, outputs.last)
        rows, buffers, last = jax.lax.with_sharding_constraint(fetched, replicated)
        return arrays, Outputs(rows, buffers, last, outputs.values)

    return with_replicated_values


def _only_rows(program: Callable[..., tuple[PyTree, Outputs]]) -> Callable[..., Any]:
    def with_rows(arrays: PyTree, *arguments: Any) -> tuple[PyTree, Any]:
        arrays, outputs = program(arrays, *arguments)
        return arrays, outputs.rows

    return with_rows


def _arguments(batches: Any) -> Any:
    return (batches.arrays, batches.rows) if isinstance(batches, Rows) else batches


def _peak_bytes(compiled: jax.stages.Compiled) -> int | None:
    memory = compiled.memory_analysis()
    if memory is None:
        return None
    # Results that replace a donated argument share its memory.
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    return memory.argument_size_in_bytes + results + memory.temp_size_in_bytes


def compiled_for(lowered: Any, step: TracedStep, platform: str, *, fuses: bool) -> jax.stages.Compiled:
    """Compile a program of a step with the options that this version of XLA accepts.

    XLA may rename or remove an option in any release, and then raises an error. The options only make programs
    faster, so options that raise an error are dropped.
    """
    # JAX raises a ValueError about its AOT path when the program is called.
    if jax.config.jax_disable_jit:  # pyright: ignore[reportAttributeAccessIssue]
        raise DeclarationError(
            "`jax_disable_jit` is on, but fluxcb runs only compiled steps.",
            why="the step is traced once, and its program also runs the traced handlers",
            fix="call `fit` under `with jax.disable_jit(False):`, and print values in the step with `jax.debug.print`",
        )
    options = _options(step, platform, fuses=fuses)
    try:
        return lowered.compile(compiler_options=options or None)
    except jax.errors.JaxRuntimeError:
        # Each option is tried with a trivial program, because compiling the step again for each option would take
        # longer.
        accepted = {name: value for name, value in options.items() if _accepts(name, value)}
        if len(accepted) == len(options):
            raise  # the options are not the cause
        return lowered.compile(compiler_options=accepted or None)


@functools.cache
def _accepts(name: str, value: Any) -> bool:
    """Return whether a trivial program can be compiled for the CPU with an option."""
    # Only the CPU has options here; see `_options`.
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        lowered = jax.jit(lambda: 0).lower()
    try:
        lowered.compile(compiler_options={name: value})
    except jax.errors.JaxRuntimeError:
        return False
    return True


def _options(step: TracedStep, platform: str, *, fuses: bool) -> dict[str, Any]:
    """Return compiler options. On CPU, running the kernels of a small step in parallel would make it slower.

    XLA's CPU backend passes independent kernels to a thread pool. With a few dozen kernels of a microsecond each, this
    doubles the duration of a step (28 to 80 us for a 64-64-10 MLP with a guard, jax 0.10.2). The bits are the same.
    """
    if platform != "cpu":
        return {}
    # Without it, a while loop copies each part of the carry that a guard (`step.skip`) reads next to its new value.
    options: dict[str, Any] = {"xla_cpu_copy_insertion_use_region_analysis": True}
    if not fuses:
        # In a fused kernel, a multiplication and an addition are rounded once. Which operations are fused depends on
        # all readers of a value, so a callback that reads it can change the last bits of the training.
        options["xla_disable_hlo_passes"] = "fusion"
    if not step.small:
        return options
    # jaxlib before 0.9 does not have this option.
    return {**options, "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}


@dataclass(frozen=True)
class _Maker:
    """The functions that are compiled."""

    step: TracedStep
    layout: CarryLayout | None
    fetch: Fetch
    hyperparams: HyperparamIndex
    unpacked: tuple[str, ...]
    resident: bool

    # `arrays` are those that hold the carry. The loops carry them unchanged, and each step extracts the carry.

    def straight(self, arrays: PyTree, batch: Any) -> tuple[PyTree, Outputs]:
        """Run the plain step, outside any loop."""
        carry = self._carry(arrays)
        # An earlier step may have stopped the window while this call was already dispatched.
        is_running = carry["counters"][3] == 0
        gathered = self._gathered(batch)
        if "stop" in self.step.step_specs:  # after a stop, nothing changes, as with the condition of the loop
            new, values = self._run_unless_stopped(is_running, carry, gathered)
        else:
            new, values = self._run_step(carry, gathered)
        rows, buffers = self._packed(new, values, is_running)
        out = Outputs(rows, buffers, self._last(new, values), {name: values[name] for name in self.unpacked})
        return self._arrays(new), out

    def _run_unless_stopped(self, is_running: Any, carry: PyTree, batch: Any) -> tuple[PyTree, dict[str, Any]]:
        """Run the step, and keep the old carry if the window was stopped."""

        @jax.named_scope(FLAG_SCOPE)
        def select(old: Any, new: Any) -> Any:
            return jax.lax.select(is_running, new, old)

        def step(rest: PyTree, opt_state: PyTree, batch: Any) -> tuple[Any, PyTree]:
            new, values = self._run_step({**rest, "opt_state": opt_state}, batch)
            return ({name: new[name] for name in rest}, values), new["opt_state"]

        rest = {name: part for name, part in carry.items() if name != "opt_state"}
        (new, values), opt_state = update_with_selection(step, select, rest, carry["opt_state"], batch)
        return {**carry, **jax.tree.map(select, rest, new), "opt_state": opt_state}, values

    def one_step(self, carry: PyTree, batch: Any) -> tuple[PyTree, Any, list[PyTree]]:
        """Run one step as the loops do."""
        new, values = self._run_step(carry, batch)
        return new, self._packed(new, values, True), self._last(new, values)

    def loop(self, arrays: PyTree, batch: Any) -> tuple[PyTree, Outputs]:
        """Run one step inside the loop."""
        # XLA inlines a loop that certainly runs once, and the bits may differ, so the length depends on the carry.
        arrays, out = self._run(arrays, jax.tree.map(_padded, self._gathered(batch)), jnp.uint32(1), _PADDED)
        # The second entry belongs to the padding, which the loop never runs.
        first = jax.tree.map(lambda b: b[0], (out.rows, out.buffers))
        return arrays, Outputs(first[0], first[1], out.last, out.values)

    def window(self, arrays: PyTree, batches: Any, length: Any) -> tuple[PyTree, Outputs]:
        """Run the first `length` steps of a buffer."""
        # Rows are gathered for the whole window at once, because inside the loop it takes three times as long (on CPU).
        batches = self._gathered(batches)
        return self._run(arrays, batches, length, jax.tree.leaves(batches)[0].shape[0])

    @functools.cached_property
    def _run_step(self) -> Callable[[PyTree, Any], tuple[PyTree, dict[str, Any]]]:
        # All other step values are removed from the jaxpr before it is lowered.
        fetched = (path[1] for path in (*self.fetch.each, *self.fetch.last) if path[0] == "step")
        return self.step.computing({*fetched, *self.unpacked})

    def _run(self, arrays: PyTree, batches: Any, length: Any, steps: int) -> tuple[PyTree, Outputs]:
        # A while loop needs initial values. If no step runs, the caller ignores them.
        last = [_zeros(spec) for spec in self.fetch.last.values()]
        raw = {name: _zeros(self.step.step_specs[name]) for name in self.unpacked}

        def condition(state: Any) -> Any:
            i, arrays = state[:2]
            # A traced handler stops the window by setting this counter, without waiting for the host.
            return (i < length) & (self._counters(arrays)[3] == 0)

        def body(state: Any) -> Any:
            i, arrays, stored, _, _ = state
            batch = jax.tree.map(lambda b: jax.lax.dynamic_index_in_dim(b, i, keepdims=False), batches)
            carry, values = self._run_step(self._carry(arrays), batch)
            stored = store(stored, i, self._packed(carry, values, True))
            raw = {name: values[name] for name in self.unpacked}
            return i + 1, self._arrays(carry), stored, self._last(carry, values), raw

        # Unsigned, because a signed index would need an additional kernel at each use to check for negative values.
        state = (jnp.uint32(0), arrays, empty_buffers(self.fetch, steps), last, raw)
        _, arrays, (rows, buffers), last, raw = jax.lax.while_loop(condition, body, state)
        return arrays, Outputs(rows, buffers, last, raw)

    def _carry(self, arrays: PyTree) -> PyTree:
        return arrays if self.layout is None else self.layout.split(arrays)

    def _counters(self, arrays: PyTree) -> Any:
        layout = self.layout
        # Only the counters, because splitting the whole carry here would add kernels to each step.
        return arrays["counters"] if layout is None else layout.split(arrays, layout.indices["counters"])

    def _arrays(self, carry: PyTree) -> PyTree:
        # Joining the arrays once after the loop would need three kernels fewer per step of forty. But XLA then wakes a
        # second thread, and a step takes 70 us.
        return carry if self.layout is None else self.layout.join(carry)

    def _gathered(self, batches: Any) -> Any:
        if not self.resident:
            return batches
        arrays, rows = batches
        # Rows are in bounds. The other modes also check for negative rows, which takes twice as long (on CPU).
        return jax.tree.map(lambda a: jnp.take(a, rows, axis=0, mode="clip"), arrays)

    @jax.named_scope(FETCH_SCOPE)
    def _packed(self, carry: PyTree, values: Mapping[str, Any], ran: Any) -> tuple[Any, list[Any]]:
        return self.fetch.pack(self._value_at(carry, values), ran, carry["counters"][3])

    def _last(self, carry: PyTree, values: Mapping[str, Any]) -> list[PyTree]:
        return [self._value_at(carry, values)(path) for path in self.fetch.last]

    def _value_at(self, carry: PyTree, values: Mapping[str, Any]) -> Callable[[StatePath], PyTree]:
        def value_at(path: StatePath) -> PyTree:
            if path[0] == "step":
                return below(values[path[1]], path[2:])
            return part_of(carry, self.hyperparams, path)

        return value_at


def _zeros(spec: PyTree) -> PyTree:
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), spec)


def _padded(x: Any) -> Any:
    x = jnp.asarray(x)
    # The values of the padding do not matter, because the loop never runs it.
    return jnp.stack([x, x if is_key(x) else jnp.zeros_like(x)])
