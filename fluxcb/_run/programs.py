"""The compiled programs of a Learner: one per phase, batch shape and set of fetched values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fluxcb._compile.arrays import spec_of
from fluxcb._compile.plan import PhasePlan, Plan
from fluxcb._compile.step import ProgramKind, TracedStep, compile_program, trace_step
from fluxcb._compile.traced import StepSetup
from fluxcb._declare.access import writes
from fluxcb._declare.events import TracedEvent
from fluxcb._declare.phases import Phase
from fluxcb._errors import DataError, DeclarationError, MissingStateError, did_you_mean
from fluxcb._run.feed import batch_differences
from fluxcb._typing import Batch, PyTree

__all__ = ["Programs", "signature"]

Program = Callable[[PyTree, Batch, Any], tuple[PyTree, dict[str, Any]]]


def signature(batch: Batch) -> Any:
    """Return a hashable key of a batch's structure, shapes and dtypes."""
    spec = spec_of(batch)
    return jax.tree.structure(spec), tuple((s.shape, str(s.dtype)) for s in jax.tree.leaves(spec))


class Programs:
    """Traces and compiles steps when they are first needed, and keeps them.

    Args:
        kind: `loop`, `straight`, or None to decide by what the model does.

    Attributes:
        traces: How often a phase's step was traced.
        compiles: How often a program was compiled.
    """

    def __init__(self, kind: ProgramKind | None) -> None:
        if kind not in (None, "loop", "straight"):
            raise DeclarationError(f"`program` is 'loop', 'straight' or None, not {kind!r}.")
        self._kind: ProgramKind | None = kind
        self._steps: dict[Any, tuple[Any, TracedStep]] = {}
        self._compiled: dict[Any, tuple[TracedStep, Program]] = {}
        self._first: dict[Phase, PyTree] = {}
        self._one = jnp.int32(1)
        self.traces = 0
        self.compiles = 0

    @property
    def one(self) -> Any:
        """The length of a window of one, int32[] on the device."""
        return self._one

    def traced(
        self, setup: StepSetup, plan: Plan, phase: Phase, carry: PyTree, batch: Batch, *, checked: bool = True
    ) -> TracedStep:
        """Return the traced step for batches of this shape, tracing it if the traced handlers changed.

        Raises:
            DataError: The batch differs from the phase's first in more than a shorter leading axis.
            FluxcbError: The step or a handler is wrong; see `trace_step`.
        """
        shape = signature(batch)
        if checked:
            self._check_batch(phase, batch)
        content = setup.model, _traced_content(plan, phase), signature(carry)
        held = self._steps.get((phase, shape))
        if held is not None and held[0] == content:
            return held[1]
        step = trace_step(setup, phase, carry, batch)
        self.traces += 1
        self._first.setdefault(phase, step.batch_spec)
        self._steps[phase, shape] = content, step
        return step

    def program(
        self,
        setup: StepSetup,
        plan: Plan,
        phase: Phase,
        carry: PyTree,
        batch: Batch,
        *,
        fetch: Sequence[str] = (),
        checked: bool = True,
    ) -> Program:
        """Return the compiled program for batches of this shape.

        Args:
            setup: Model, loss, optimizer, handlers.
            plan: Whose host handlers say what is fetched.
            phase: The phase.
            carry: The carry it will be called with.
            batch: A batch it will be called with.
            fetch: Step values to fetch beside those the handlers declare, if the phase has them.
            checked: Whether the batch comes from a data source, all of whose batches have one shape.
        """
        step = self.traced(setup, plan, phase, carry, batch, checked=checked)
        names = self.fetched(step, plan, phase, fetch)
        # Compiled for where the arrays are, too: a callback may have moved them.
        key = (phase, signature(batch), names, tuple(leaf.sharding for leaf in jax.tree.leaves(carry)))
        held = self._compiled.get(key)
        if held is not None and held[0] is step:
            return held[1]
        program = compile_program(step, carry, batch, self._one, fetch=names, kind=self.kind_of(step, carry))
        self.compiles += 1
        self._compiled[key] = step, program
        return program

    def forget_shapes(self, name: str) -> None:
        """Let the next batch of the phases of this name have any shape: their data was exchanged."""
        for phase in [p for p in self._first if type(p).name == name]:
            del self._first[phase]

    def kind_of(self, step: TracedStep, carry: PyTree) -> ProgramKind:
        """Return which program runs a step: what the user said, or what its operations call for."""
        if self._kind is not None:
            return self._kind
        # The loop's condition is a run-time value, which accelerators' while loops wait for at each turn;
        # for windows of one the plain step is right there. What was measured, was measured on CPU.
        platform = next(iter(carry["counters"].devices())).platform
        return "loop" if platform == "cpu" and not step.has_convolution else "straight"

    def _check_batch(self, phase: Phase, batch: Batch) -> None:
        first = self._first.get(phase)
        if first is None:
            return
        lines, shorter = batch_differences(first, batch)
        if lines and not shorter:
            raise DataError(
                f"A batch of `data.{type(phase).name}` differs from the first one: {lines[0]}.",
                where=lines[1:6],
                why="the step is compiled for batches of one shape; only the last may be shorter",
                fix="pad or drop what does not fit, or cast in the loader",
            )

    def fetched(self, step: TracedStep, plan: Plan, phase: Phase, extra: Sequence[str] = ()) -> tuple[str, ...]:
        """Return the names of the step values that leave the device.

        Raises:
            MissingStateError: A host handler declares one that the step does not compute.
        """
        phase_plan = plan.phase(type(phase))
        if phase_plan.everything_fetched:
            return tuple(step.step_specs)
        known = {*step.step_specs, *_HOST_ONLY, *_written_on_host(phase_plan)}
        for call in phase_plan.end:
            for path in call.handler.access:
                if path[0] == "step" and len(path) > 1 and path[1] not in known:
                    raise MissingStateError(
                        f"{call.handler.declared.label} reads `step.{path[1]}` at StepEnd x {type(phase).__name__}, "
                        f"but the step does not compute it.{did_you_mean(path[1], step.step_specs)}",
                        where=call.handler.where,
                        why=f"the step computes {', '.join(step.step_specs)}",
                        fix="narrow the handler to a phase that computes it, or return it from the loss as aux",
                    )
        names = dict.fromkeys(n for n in phase_plan.fetch if n in step.step_specs)
        names |= dict.fromkeys(n for n in extra if n in step.step_specs)
        return tuple(names)


_HOST_ONLY = ("batch", "stop", "skip")


def _written_on_host(plan: PhasePlan) -> set[str]:
    """Return the step values that host handlers put there for the handlers behind them."""
    return {
        path[1]
        for call in (*plan.begin, *plan.end)
        for path, permission in call.handler.access.items()
        if path[0] == "step" and len(path) > 1 and writes(permission)
    }


def _traced_content(plan: Plan, phase: Phase) -> Any:
    """Return what a trace depends on beside shapes: which traced handlers run where, in which order."""
    return tuple(
        (event, tuple((h.function, tuple(h.access.items()), h.schedules) for h in handlers))
        for (event, phase_type), handlers in plan.graph.orders.items()
        if phase_type is type(phase) and issubclass(event, TracedEvent)
    )
