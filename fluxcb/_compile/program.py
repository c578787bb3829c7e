"""Programs: a traced step made into something that can be called.

There are two per phase and batch shape. The single-step program takes a batch; the window program takes a buffer of
batches and runs as many steps of it as it is told. Both are loops of run-time length around the same body, so that
their results agree bit for bit; the straight-line single step stands in where a loop body would be slow.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from fluxcb._compile.arrays import is_key
from fluxcb._compile.carried import below, part_of
from fluxcb._compile.carry_layout import CarryLayout
from fluxcb._compile.fetch import Fetch, empty_buffers, store
from fluxcb._compile.hyperparams import HyperparamIndex
from fluxcb._compile.step import TracedStep
from fluxcb._typing import PyTree, Rows, StatePath

__all__ = ["Outputs", "Program", "ProgramKind", "compile_program"]

ProgramKind = Literal["loop", "straight"]

_SMALL_STEP_FLOPS = 2e7
_PADDED = 2  # a buffer of one is not bit-safe against longer ones, so a single step is padded inside jit


class Outputs(NamedTuple):
    """What one call of a program brings back beside the carry.

    Attributes:
        rows: int32[steps, words] (int32[words] of a single step); see `Fetch`.
        buffers: The larger values of each step, stacked like the rows.
        last: Values of the last step that ran, by position of their path.
        values: Step values as they are, by name, where a step is run by hand.
    """

    rows: Any
    buffers: list[Any]
    last: list[PyTree]
    values: Mapping[str, PyTree]


@dataclass(frozen=True, eq=False)
class Program:
    """A compiled program.

    Attributes:
        call: `(carry, batch) -> (carry, Outputs)`, or `(carry, buffer, length)` with a uint32[] for a window; the
            carry is donated. Called with other shapes it raises TypeError or ValueError, and donates nothing.
        layout: How the carry lies in the arrays that it takes and returns, or None for the carry as it is.
        step: The step it runs.
        fetch: What it brings back.
        steps: Length of the buffer (steps); 1 for the single-step program.
        seconds: What compiling it took (s).
        on_host: Whether its device is the host's CPU.
        bare: Whether it brings back nothing but rows, and these by themselves instead of `Outputs`: a call is 0.5 us
            cheaper then.
    """

    call: Callable[..., tuple[PyTree, Any]]
    layout: CarryLayout | None
    step: TracedStep
    fetch: Fetch
    steps: int
    seconds: float
    on_host: bool
    bare: bool


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
    by_hand: tuple[str, ...] = (),
) -> Program:
    """Compile a program.

    Args:
        step: The traced step.
        carry: The carry it will be called with, or the arrays in which it lies.
        batches: A batch, or the buffer of batches, it will be called with.
        layout: How it lies in them; None for the carry as it is.
        fetch: What it brings back.
        kind: `loop`, or `straight` for the plain step.
        steps: Length of the buffer; 1 for a batch by itself.
        hyperparams: Where the hyperparameters lie in the carry.
        by_hand: Step values to bring back as they are, beside the packed ones.
    """
    began = time.perf_counter()
    maker = _Maker(step, layout, fetch, hyperparams, by_hand, isinstance(batches, Rows))
    program = maker.straight if kind == "straight" else maker.loop if steps == 1 else maker.window
    length = () if steps == 1 else (jnp.uint32(1),)
    bare = not (fetch.buffers or fetch.last or by_hand)
    lowered = jax.jit(_only_rows(program) if bare else program, donate_argnums=0).lower(
        carry, _arguments(batches), *length
    )
    platform = next(iter(jax.tree.leaves(carry)[0].devices())).platform
    call = lowered.compile(compiler_options=_options(step, platform))
    if isinstance(batches, Rows):
        compiled, call = call, lambda carry, batch, *length: compiled(carry, _arguments(batch), *length)
    return Program(call, layout, step, fetch, steps, time.perf_counter() - began, platform == "cpu", bare)


def _only_rows(program: Callable[..., tuple[PyTree, Outputs]]) -> Callable[..., Any]:
    def with_rows(arrays: PyTree, *arguments: Any) -> tuple[PyTree, Any]:
        arrays, outputs = program(arrays, *arguments)
        return arrays, outputs.rows

    return with_rows


def _arguments(batches: Any) -> Any:
    return (batches.arrays, batches.rows) if isinstance(batches, Rows) else batches


def _options(step: TracedStep, platform: str) -> dict[str, Any] | None:
    """Return compiler options; on CPU, a step may be too small for running its kernels in parallel.

    XLA's CPU backend hands independent kernels to a thread pool. With a few dozen kernels of a microsecond each, the
    handing over doubles the step's time (28 to 80 us for a 64-64-10 MLP with a guard, jax 0.10.2); bits are the same.
    """
    if platform != "cpu":
        return None
    # Without it, a while loop copies each part of the carry that a guard (`step.skip`) reads beside its new value.
    options = {"xla_cpu_copy_insertion_use_region_analysis": True}
    if step.flops > _SMALL_STEP_FLOPS:
        return options
    return {**options, "xla_cpu_scheduler_type": "CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED"}


@dataclass(frozen=True)
class _Maker:
    """The functions that are compiled."""

    step: TracedStep
    layout: CarryLayout | None
    fetch: Fetch
    hyperparams: HyperparamIndex
    by_hand: tuple[str, ...]
    resident: bool

    # `arrays` are those in which the carry lies; the loops carry them as they are, and each step takes its parts.

    def straight(self, arrays: PyTree, batch: Any) -> tuple[PyTree, Outputs]:
        """Run the plain step, outside any loop."""
        carry = self._carry(arrays)
        going = carry["counters"][3] == 0
        new, values = self._run_step(carry, self._gathered(batch))
        if "stop" in self.step.step_specs:  # once stopped, nothing moves any more, as the loop's condition has it
            new = jax.tree.map(lambda n, o: jax.lax.select(going, n, o), new, carry)
        rows, buffers = self._packed(new, values, going)
        out = Outputs(rows, buffers, self._last(new, values), {name: values[name] for name in self.by_hand})
        return self._arrays(new), out

    def loop(self, arrays: PyTree, batch: Any) -> tuple[PyTree, Outputs]:
        """Run one step inside the loop."""
        # A loop that runs once for sure is inlined, and the bits may differ. Whether this one runs, the carry says.
        arrays, out = self._run(arrays, jax.tree.map(_padded, self._gathered(batch)), jnp.uint32(1), _PADDED)
        first = jax.tree.map(lambda b: b[0], (out.rows, out.buffers))
        return arrays, Outputs(first[0], first[1], out.last, out.values)

    def window(self, arrays: PyTree, batches: Any, length: Any) -> tuple[PyTree, Outputs]:
        """Run the first `length` steps of a buffer."""
        # Resident rows are gathered for the whole window at once: in the loop it takes three times as long (on CPU).
        batches = self._gathered(batches)
        return self._run(arrays, batches, length, jax.tree.leaves(batches)[0].shape[0])

    @functools.cached_property
    def _run_step(self) -> Callable[[PyTree, Any], tuple[PyTree, dict[str, Any]]]:
        fetched = (path[1] for path in (*self.fetch.each, *self.fetch.last) if path[0] == "step")
        return self.step.computing({*fetched, *self.by_hand})

    def _run(self, arrays: PyTree, batches: Any, length: Any, steps: int) -> tuple[PyTree, Outputs]:
        last = [_zeros(spec) for spec in self.fetch.last.values()]
        raw = {name: _zeros(self.step.step_specs[name]) for name in self.by_hand}

        def condition(state: Any) -> Any:
            i, arrays = state[:2]
            return (i < length) & (self._counters(arrays)[3] == 0)

        def body(state: Any) -> Any:
            i, arrays, held, _, _ = state
            batch = jax.tree.map(lambda b: jax.lax.dynamic_index_in_dim(b, i, keepdims=False), batches)
            carry, values = self._run_step(self._carry(arrays), batch)
            held = store(held, i, self._packed(carry, values, True))
            raw = {name: values[name] for name in self.by_hand}
            return i + 1, self._arrays(carry), held, self._last(carry, values), raw

        # Unsigned, because a signed index is first checked for being negative: a kernel at each use.
        state = (jnp.uint32(0), arrays, empty_buffers(self.fetch, steps), last, raw)
        _, arrays, (rows, buffers), last, raw = jax.lax.while_loop(condition, body, state)
        return arrays, Outputs(rows, buffers, last, raw)

    def _carry(self, arrays: PyTree) -> PyTree:
        return arrays if self.layout is None else self.layout.split(arrays)

    def _counters(self, arrays: PyTree) -> Any:
        layout = self.layout
        return arrays["counters"] if layout is None else layout.split(arrays, layout.indices["counters"])

    def _arrays(self, carry: PyTree) -> PyTree:
        return carry if self.layout is None else self.layout.join(carry)

    def _gathered(self, batches: Any) -> Any:
        if not self.resident:
            return batches
        arrays, rows = batches
        # Rows are in bounds; the other modes look for negative ones, too, which takes twice as long (on CPU).
        return jax.tree.map(lambda a: jnp.take(a, rows, axis=0, mode="clip"), arrays)

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
    return jnp.stack([x, x if is_key(x) else jnp.zeros_like(x)])
