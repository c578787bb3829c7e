"""The compiled programs of a Learner: per phase and batch shape, one for single steps and one for windows."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax

from fluxcb._compile.arrays import batch_spec, signature_of
from fluxcb._compile.leaves import check_leaves
from fluxcb._compile.plan import PhasePlan, Plan
from fluxcb._compile.program import Program, ProgramKind, compile_program
from fluxcb._compile.step import TracedStep, trace_step
from fluxcb._compile.traced import StepSetup
from fluxcb._compile.windows import WindowPlan, plan_windows
from fluxcb._declare.events import TracedEvent
from fluxcb._declare.phases import Phase
from fluxcb._declare.schedules import positive
from fluxcb._errors import DataError, DeclarationError
from fluxcb._run.feed import batch_differences
from fluxcb._run.state import HostState
from fluxcb._typing import Batch, PyTree, Rows, StatePath

__all__ = ["Programs", "StepsPerCall", "signature"]

StepsPerCall = int | Literal["auto"]


class _Key(NamedTuple):
    """What a program was compiled for.

    Attributes:
        step: The traced step.
        each: Paths of what is fetched for each step.
        last: Paths of what is fetched for the last step of a window.
        steps: Length of the buffer (steps).
        by_hand: Names of the values that a step outside an epoch returns; empty for the steps of an epoch.
        rows: Whether the batches are rows of arrays on the device.
        places: How and where the carry lies.
    """

    step: TracedStep
    each: tuple[StatePath, ...]
    last: tuple[StatePath, ...]
    steps: int
    by_hand: tuple[str, ...]
    rows: bool
    places: Any


def signature(batch: Batch) -> Any:
    """Return a hashable key of a batch's structure, shapes and dtypes."""
    return signature_of(batch_spec(batch))


class Programs:
    """Traces and compiles steps when they are first needed, and keeps them.

    Args:
        kind: `loop`, `straight`, or None to decide by what the model does.
        steps_per_call: Steps of a call at most, or "auto".
        window_bytes: Bytes that a window's batches and fetched values may take.

    Attributes:
        asked_kind: The kind of program that the user asked for, or None.
        traces: How often a phase's step was traced.
        compiled: The programs at hand, in the order in which they were compiled.
        compiles: How often a program was compiled.
    """

    def __init__(self, kind: ProgramKind | None, steps_per_call: StepsPerCall, window_bytes: int) -> None:
        if kind not in (None, "loop", "straight"):
            raise DeclarationError(
                f"`program` is 'loop', 'straight' or None, not {kind!r}.", fix="leave it out: the model decides"
            )
        if isinstance(steps_per_call, str):
            if steps_per_call != "auto":
                raise DeclarationError(
                    f"`steps_per_call` is a number of steps or 'auto', not {steps_per_call!r}.", fix="write 'auto'"
                )
        else:
            steps_per_call = positive(steps_per_call, "`steps_per_call`")
        self.asked_kind: ProgramKind | None = kind
        self.steps_per_call: StepsPerCall = steps_per_call
        self.window_bytes = positive(window_bytes, "`window_bytes`")
        self._steps: dict[Any, tuple[Any, TracedStep]] = {}
        self._windows: dict[TracedStep, tuple[PhasePlan, WindowPlan]] = {}
        self._compiled: dict[_Key, Program] = {}
        self._first: dict[Phase, PyTree] = {}
        self.traces = 0
        self.compiled: list[Program] = []
        self.compiles = 0

    def traced(
        self, setup: StepSetup, plan: Plan, phase: Phase, state: HostState, batch: Batch, *, checked: bool = True
    ) -> TracedStep:
        """Return the traced step for batches of this shape, tracing it if the traced handlers changed.

        Raises:
            DataError: The batch differs from the phase's first in more than a shorter leading axis.
            FluxcbError: The step or a handler is wrong; see `trace_step`.
        """
        if not isinstance(batch, Rows):
            what = f"A batch of `data.{type(phase).name}`" if checked else f"A batch of {type(phase).__name__}"
            check_leaves(batch, what, "batch", DataError, lists=False)
        shape = signature(batch)
        if checked:
            self._check_batch(phase, batch)
        content = setup.model, _traced_content(plan, phase), state.signature
        held = self._steps.get((phase, shape))
        if held is not None and held[0] == content:
            return held[1]
        with state.meter.span(f"trace the step of {type(phase).__name__}", "compile"):
            step = trace_step(setup, phase, state.carry, batch)
        self.traces += 1
        self._first.setdefault(phase, step.batch_spec)
        # Tracing derives the moments of a phase that was not named at construction, so this is looked up again.
        self._steps[phase, shape] = (content[0], _traced_content(plan, phase), content[2]), step
        return step

    def windows(self, plan: Plan, phase: Phase, step: TracedStep, state: HostState) -> WindowPlan:
        """Return what bounds the windows of a phase, and what they fetch.

        Raises:
            MissingStateError: A host handler declares a step value that the step does not compute.
        """
        of = plan.phase(type(phase))
        held = self._windows.get(step)
        if held is None or held[0] is not of:
            held = self._windows[step] = of, plan_windows(of, phase, step, state.carry, state.hyperparams)
        return held[1]

    def single(
        self, setup: StepSetup, plan: Plan, phase: Phase, state: HostState, batch: Batch, *, by_hand: bool
    ) -> Program:
        """Return the single-step program for batches of this shape.

        Args:
            setup: Model, loss, optimizer, handlers.
            plan: Whose host handlers say what is fetched.
            phase: The phase.
            state: Whose carry it will be called with.
            batch: A batch it will be called with.
            by_hand: Whether the batch was given by hand: then it may have any shape, and values come back as they are.

        Raises:
            DataError: The batch differs from the phase's first in more than a shorter leading axis.
            FluxcbError: The step or a handler is wrong.
        """
        step = self.traced(setup, plan, phase, state, batch, checked=not by_hand)
        return self._program(plan, phase, step, state, batch, 1, by_hand=by_hand)

    def many(
        self,
        setup: StepSetup,
        plan: Plan,
        phase: Phase,
        state: HostState,
        batch: Batch,
        buffer: Any,
        steps: int,
    ) -> Program:
        """Return the window program for batches of this shape.

        Args:
            setup: Model, loss, optimizer, handlers.
            plan: Whose host handlers say what is fetched.
            phase: The phase.
            state: Whose carry it will be called with.
            batch: A batch.
            buffer: A buffer of such batches.
            steps: Length of the buffer.
        """
        step = self.traced(setup, plan, phase, state, batch)
        return self._program(plan, phase, step, state, buffer, steps)

    def _program(
        self,
        plan: Plan,
        phase: Phase,
        step: TracedStep,
        state: HostState,
        batches: Any,
        steps: int,
        *,
        by_hand: bool = False,
    ) -> Program:
        fetch, kind = self.windows(plan, phase, step, state).fetch, self.kind_of(step, state.platform)
        # A step that runs straight is long, and gives the bits of the step written by hand as long as nothing moves.
        layout = state.layout if kind == "loop" else None
        names: tuple[str, ...] = ()
        if by_hand:
            wanted = ["loss", *(path[1] for path in (*fetch.each, *fetch.last) if path[0] == "step")]
            names = tuple(name for name in dict.fromkeys(wanted) if name in step.step_specs)
        # Compiled for where the arrays are, too: a callback may have moved them.
        places = layout or tuple(leaf.sharding for leaf in jax.tree.leaves(state.carry))
        key = _Key(step, tuple(fetch.each), tuple(fetch.last), steps, names, isinstance(batches, Rows), places)
        if key not in self._compiled:
            with state.meter.span(
                f"compile the step of {type(phase).__name__}", "compile", program=kind, steps_per_call=steps
            ):
                self._compiled[key] = compile_program(
                    step,
                    state.laid_out(layout),
                    batches,
                    layout=layout,
                    fetch=fetch,
                    kind=kind,
                    steps=steps,
                    hyperparams=state.hyperparams,
                    by_hand=names,
                )
            self.compiled.append(self._compiled[key])
            self.compiles += 1
        return self._compiled[key]

    def has(self, setup: StepSetup, plan: Plan, phase: Phase, state: HostState) -> bool:
        """Return whether a program for the steps of an epoch has been compiled, for batches of any shape.

        Args:
            setup: Model, loss, optimizer, handlers.
            plan: The plan with the handlers of the program.
            phase: The phase.
            state: The state with the carry that the program takes.
        """
        content = setup.model, _traced_content(plan, phase), state.signature
        for (of, _), (held, step) in self._steps.items():
            if of is phase and held == content:
                fetch = self.windows(plan, phase, step, state).fetch
                wanted = step, tuple(fetch.each), tuple(fetch.last), ()
                if any((key.step, key.each, key.last, key.by_hand) == wanted for key in self._compiled):
                    return True
        return False

    def has_windows(self, step: TracedStep) -> bool:
        """Tell whether a window program of this step has been compiled already."""
        return any(program.step is step and program.steps > 1 for program in self.compiled)

    def prune(self) -> None:
        """Drop what was made for traced handlers that are gone."""
        steps = {step for _, step in self._steps.values()}
        self._windows = {step: held for step, held in self._windows.items() if step in steps}
        self._compiled = {key: program for key, program in self._compiled.items() if program.step in steps}
        self.compiled = [program for program in self.compiled if program.step in steps]

    def forget_shapes(self, name: str) -> None:
        """Let the next batch of the phases of this name have any shape: their data was exchanged."""
        for phase in [p for p in self._first if type(p).name == name]:
            del self._first[phase]

    def kind_of(self, step: TracedStep, platform: str) -> ProgramKind:
        """Return which program runs a step: what the user said, or what its operations call for on a platform."""
        if self.asked_kind is not None:
            return self.asked_kind
        if platform == "cpu":
            return "straight" if step.has_convolution else "loop"
        # The loop's condition is a run-time value, which an accelerator's while loop may wait for at each turn; nothing
        # was measured there, so windows are for those who ask for them.
        return "loop" if self.steps_per_call not in (1, "auto") else "straight"

    def _check_batch(self, phase: Phase, batch: Batch) -> None:
        first = self._first.get(phase)
        if first is None:
            return
        lines, shorter = batch_differences(first, batch)
        if lines and not shorter:
            raise DataError(
                f"A batch of `data.{type(phase).name}` differs from the one the step was compiled for: {lines[0]}.",
                where=lines[1:6],
                why="the step is compiled for batches of one shape; only the last may be shorter",
                fix="pad or drop what does not fit, or cast in the loader",
            )


def _traced_content(plan: Plan, phase: Phase) -> Any:
    """Return what a trace depends on beside shapes: which traced handlers run where, in which order."""
    return tuple(
        (event, tuple((h.function, tuple(h.access.items()), h.schedules) for h in handlers))
        for (event, phase_type), handlers in plan.graph.orders.items()
        if phase_type is type(phase) and issubclass(event, TracedEvent)
    )
