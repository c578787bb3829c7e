"""The compiled programs of a Learner: per phase and batch shape, one for single steps and one for windows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax

from fluxcb._compile.arrays import batch_differences, batch_spec, nbytes_of, signature_of
from fluxcb._compile.initial_arrays import InitialArrays
from fluxcb._compile.leaves import check_examples, check_leaves
from fluxcb._compile.plan import PhasePlan, Plan
from fluxcb._compile.program import Program, ProgramKind, compile_program
from fluxcb._compile.step import TracedStep, trace_step
from fluxcb._compile.step_setup import StepSetup
from fluxcb._compile.trace_effects import (
    TracedField,
    input_variables,
    loss_variables,
    phase_fields,
    traced_fields,
    unchanged_fields,
    warn_about_changed,
    warn_of_loss_effects,
)
from fluxcb._compile.windows import WindowPlan, plan_windows
from fluxcb._declare.events import TracedEvent
from fluxcb._declare.phases import Phase
from fluxcb._declare.schedules import positive
from fluxcb._errors import DataError, DeclarationError
from fluxcb._run.input_kinds import inputs_of_specs, warn_of_other_kind
from fluxcb._run.meter import Meter
from fluxcb._run.train_state import TrainState
from fluxcb._typing import Batch, PyTree, Rows, StatePath

__all__ = ["Programs", "StepsPerCall", "signature"]

StepsPerCall = int | Literal["auto"]

# How checkpoints record the kind of program of a phase whose kind is chosen by measurement, and the choice.
_RECORDED: dict[str, ProgramKind | None] = {
    "straight": None,  # not chosen yet
    "straight, measured": "straight",
    "loop, measured": "loop",
}


class _Key(NamedTuple):
    """What a program was compiled for.

    Attributes:
        step: The traced step.
        each: Paths that are fetched for each step.
        last: Paths that are fetched for the last step of a window.
        kind: The kind of program.
        steps: Length of the buffer (steps).
        unpacked: Names of the values that a single step outside an epoch returns; empty for the steps of an epoch.
        rows: Whether the batches are rows of arrays on the device.
        places: The layout of the carry, or the sharding of each of its arrays.
    """

    step: TracedStep
    each: tuple[StatePath, ...]
    last: tuple[StatePath, ...]
    kind: ProgramKind
    steps: int
    unpacked: tuple[str, ...]
    rows: bool
    places: Any


def signature(batch: Batch) -> Any:
    """Return a hashable key of a batch's structure, shapes and dtypes."""
    return signature_of(batch_spec(batch))


class Programs:
    """Traces and compiles steps when they are first needed, and caches them.

    Args:
        kind: `loop`, `straight`, or None to choose it by the operations of the step.
        steps_per_call: Maximum number of steps per call, or "auto".
        window_bytes: Maximum memory for the batches and fetched values of a window (bytes).
        exact_observers: Whether callbacks that only read must not change the bits of the training.
        train: The train state whose carry the programs take.
        meter: Records when steps are traced and compiled.

    Attributes:
        initial: The initial parameters, which a step must not use as constants.
        plan: Its host handlers decide what is fetched.
        setup: Returns the inputs of the trace for a phase.
        requested_kind: The kind of program that the user requested, or None.
        chosen: The kinds that a measurement has chosen, by phase name; see `awaits_choice`.
        traces: Number of traces.
        compiled: The cached programs, in the order in which they were compiled.
        compiles: Number of compilations.
    """

    plan: Plan
    setup: Callable[[Phase], StepSetup]

    def __init__(
        self,
        kind: ProgramKind | None,
        steps_per_call: StepsPerCall,
        window_bytes: int,
        exact_observers: bool,
        train: TrainState,
        meter: Meter,
    ) -> None:
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
        self.requested_kind: ProgramKind | None = kind
        self.steps_per_call: StepsPerCall = steps_per_call
        self.window_bytes = positive(window_bytes, "`window_bytes`")
        self.exact_observers = exact_observers
        self._train, self._meter = train, meter
        # A traced step is stored with the inputs of its trace: the model, the traced handlers, and the shapes of the
        # carry. It is traced again only if one of these has changed.
        self._steps: dict[Any, tuple[Any, TracedStep]] = {}
        self._windows: dict[TracedStep, tuple[PhasePlan, WindowPlan]] = {}
        self._compiled: dict[_Key, Program] = {}
        self._fields: dict[TracedStep, list[TracedField]] = {}
        self.initial = InitialArrays()
        self._first: dict[Phase, PyTree] = {}  # specs of the first batch, which later ones must have
        self._in_vectors: bool | None = None
        self.chosen: dict[str, ProgramKind] = {}
        self.compiled: list[Program] = []
        self.traces = self.compiles = 0

    def use(self, plan: Plan, setup: Callable[[Phase], StepSetup]) -> Callable[[], None]:
        """Use another plan.

        Returns:
            A function that restores the previous plan.
        """
        # Before the first call, the two attributes do not exist, so a fixed tuple of values cannot be saved.
        before = {name: value for name, value in vars(self).items() if name in ("plan", "setup")}
        self.plan, self.setup = plan, setup
        return lambda: vars(self).update(before)

    def traced(self, phase: Phase, batch: Batch, *, checked: bool = True) -> TracedStep:
        """Return the traced step for batches of this shape, tracing it if the traced handlers changed.

        Args:
            phase: The phase.
            batch: A batch, or its specs.
            checked: Whether the batch must be like the phase's first one.

        Raises:
            DataError: The batch differs from the phase's first in more than a shorter leading axis.
            FluxcbError: The step or a handler is wrong; see `trace_step`.
        """
        if not isinstance(batch, Rows):
            what = f"A batch of `data.{type(phase).name}`" if checked else f"A batch of {type(phase).__name__}"
            check_leaves(batch, what, "batch", DataError, lists=False)
            check_examples(batch, what)
        shape = signature(batch)
        if checked:
            self._check_batch(phase, batch)
        # All programs evaluate this trace, so the dry run covers the code that will run. Fetching other values compiles
        # again but runs no handler again.
        setup, plan, train = self.setup(phase), self.plan, self._train
        content = setup.model, _traced_content(plan, phase), train.signature
        known = self._steps.get((phase, shape))
        if known is not None and known[0] == content:
            return known[1]
        variables, inputs = loss_variables(setup.loss_fn), input_variables(setup.model, setup.split)
        before = [*phase_fields(phase), *variables, *inputs]
        with self._meter.span(f"trace the step of {type(phase).__name__}", "compile"), self.mesh():
            step = trace_step(setup, phase, train.carry, batch)
        self.traces += 1
        warn_of_loss_effects(variables)
        self.initial.warn_if_used(step)
        # A value that the step itself changes, such as a cache, is left out.
        self._fields[step] = [*traced_fields(step.touched), *unchanged_fields(before)]
        self._compare_inputs(phase, setup, step.batch_spec)
        self._first.setdefault(phase, step.batch_spec)  # `_check_batch` compares later batches with it
        # Tracing derives the moments of a phase that was not named at construction, so the content is computed again.
        self._steps[phase, shape] = (content[0], _traced_content(plan, phase), content[2]), step
        return step

    def windows(self, phase: Phase, step: TracedStep) -> WindowPlan:
        """Return the window plan of a phase: the bounds of its windows, and the values they fetch.

        Raises:
            MissingStateError: A host handler declares a step value that the step does not compute.
        """
        of, train = self.plan.phase(type(phase)), self._train
        known = self._windows.get(step)  # cached, because this runs for every window
        if known is None or known[0] is not of:
            known = self._windows[step] = of, plan_windows(of, phase, step, train.carry, train.hyperparams)
        return known[1]

    def step_program(self, phase: Phase, batch: Batch, *, manual: bool) -> Program:
        """Return the single-step program for batches of this shape.

        Args:
            phase: The phase.
            batch: A batch to call it with.
            manual: Whether the batch comes from `run_step`. It may then have any shape, and the values are returned
                unpacked.

        Raises:
            DataError: The batch differs from the phase's first in more than a shorter leading axis.
            FluxcbError: The step or a handler is wrong.
        """
        step = self.traced(phase, batch, checked=not manual)
        return self._program(phase, step, batch, 1, manual=manual)

    def window_program(self, phase: Phase, batch: Batch, buffer: Any, steps: int) -> Program:
        """Return the window program for batches of this shape.

        Args:
            phase: The phase.
            batch: A batch.
            buffer: A buffer of such batches.
            steps: Length of the buffer.
        """
        return self._program(phase, self.traced(phase, batch), buffer, steps)

    def peak_bytes(self, phase: Phase, step: TracedStep, batch: Batch) -> int | None:
        """Return the memory that a single step needs on each device, as XLA plans it (bytes); see `Program`.

        Args:
            phase: The phase.
            step: Its traced step.
            batch: The specs of a batch.
        """
        return self._program(phase, step, batch, 1, keeps=False).peak_bytes

    def _program(
        self,
        phase: Phase,
        step: TracedStep,
        batches: Any,
        steps: int,
        *,
        manual: bool = False,
        keeps: bool = True,
    ) -> Program:
        train = self._train
        # The fetched values are part of a program and follow from the host handlers. Other callbacks can therefore need
        # another program. The step is traced again only if the traced handlers differ.
        # Several steps in one call always run in a loop, also while they are measured and nothing has been chosen yet.
        fetch, kind = self.windows(phase, step).fetch, "loop" if steps > 1 else self.kind_of(step, train.platform)
        # A `straight` step is long, so packing would save nothing. It gives the bits of a hand-written step only if the
        # carry is passed as it is: packed, XLA rounds some last bits differently.
        layout = train.layout if kind == "loop" and self._takes_vectors() else None
        names: tuple[str, ...] = ()
        if manual:  # `run_step` returns the loss and the values that host handlers declare
            wanted = ["loss", *(path[1] for path in (*fetch.each, *fetch.last) if path[0] == "step")]
            names = tuple(name for name in dict.fromkeys(wanted) if name in step.step_specs)
        # A program is compiled for the placement of its arguments, which a callback may have changed.
        places = layout or tuple(leaf.sharding for leaf in jax.tree.leaves(train.carry))
        key = _Key(step, tuple(fetch.each), tuple(fetch.last), kind, steps, names, isinstance(batches, Rows), places)
        known = self._compiled.get(key)
        if known is not None:
            return known
        # Compiled ahead of time: a batch of another shape raises a TypeError before anything is donated, instead of
        # compiling again without notice.
        with (
            self._meter.span(
                f"compile the step of {type(phase).__name__}", "compile", program=kind, steps_per_call=steps
            ),
            self.mesh(),
        ):
            program = compile_program(
                step,
                train.lend(layout),
                batches,
                layout=layout,
                fetch=fetch,
                kind=kind,
                steps=steps,
                hyperparams=train.hyperparams,
                unpacked=names,
                pins_shardings=train.placement is not None,
                fuses=not self.exact_observers,
            )
        # Specs of a batch may lack the placement that the batches of an epoch have, so programs for specs are not kept.
        if keeps:
            self._compiled[key] = program
            self.compiled.append(program)
            self.compiles += 1
        return program

    def mesh(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which models can name the axes of the mesh, if there is one."""
        placement = self._train.placement
        return placement.context() if placement is not None else contextlib.nullcontext()

    def has(self, phase: Phase) -> bool:
        """Return whether a program for the steps of an epoch has been compiled, for batches of any shape."""
        content = self.setup(phase).model, _traced_content(self.plan, phase), self._train.signature
        # Batches of any shape count, because shapes are unknown before the first batch.
        for (of, _), (known, step) in self._steps.items():
            if of is phase and known == content:
                fetch = self.windows(phase, step).fetch
                wanted = step, tuple(fetch.each), tuple(fetch.last), ()
                if any((key.step, key.each, key.last, key.unpacked) == wanted for key in self._compiled):
                    return True
        return False

    def has_windows(self, step: TracedStep) -> bool:
        """Tell whether a window program of this step has been compiled already."""
        return any(program.step is step and program.steps > 1 for program in self.compiled)

    def prune(self) -> None:
        """Drop the window plans and programs of traced handlers that no longer exist."""
        # A program holds megabytes of compiled code, and notebook users replace callbacks many times.
        steps = {step for _, step in self._steps.values()}
        self._windows = {step: known for step, known in self._windows.items() if step in steps}
        self._fields = {step: fields for step, fields in self._fields.items() if step in steps}
        self._compiled = {key: program for key, program in self._compiled.items() if program.step in steps}
        self.compiled = [program for program in self.compiled if program.step in steps]

    def warn_about_changed_fields(self) -> None:
        """Warn about fields of callbacks and phases, and numbers of the module, that a traced step does not use."""
        self.initial.warn_if_edited()
        for _, step in self._steps.values():
            self._fields[step] = warn_about_changed(self._fields[step])

    def forget_shapes(self, name: str) -> None:
        """Accept any shape for the next batch of the phases with this name, because their data was replaced."""
        for phase in [p for p in self._first if type(p).name == name]:
            del self._first[phase]

    def kind_of(self, step: TracedStep, platform: str) -> ProgramKind:
        """Return the requested kind of program, or the one that suits the step's operations and the platform."""
        if self.requested_kind is not None:
            return self.requested_kind
        if platform == "cpu":
            # XLA on CPU runs convolutions in loop bodies 6 to 34 times slower (jax issue 12868). The model and the
            # phase decide and never the callbacks, because adding a callback must not change the kind of program.
            return "straight" if step.has_convolution else "loop"
        # On an accelerator, a loop may be slower than single steps: its condition is a run-time value, for which the
        # loop may wait at each iteration. With "auto", steps run one by one until a measurement has chosen windows.
        if self.steps_per_call == "auto":
            return self.chosen.get(type(step.phase).name, "straight")
        return "loop" if self.steps_per_call > 1 else "straight"

    def chooses(self, platform: str) -> bool:
        """Return whether measurements choose the kinds of programs on a platform.

        Several processes must run the same programs, but would measure different times, so they always run single
        steps.
        """
        automatic = self.requested_kind is None and self.steps_per_call == "auto"
        return automatic and platform != "cpu" and jax.process_count() == 1

    def awaits_choice(self, step: TracedStep, platform: str) -> bool:
        """Return whether the windows of a step are measured before they are used.

        The measurement repeats some steps on a copy of the carry. It therefore needs memory for the copy, and steps
        without side effects.
        """
        if not self.chooses(platform) or type(step.phase).name in self.chosen or step.jaxpr.effects:
            return False
        return nbytes_of(self._train.carry) <= self.window_bytes

    def recorded_kind(self, step: TracedStep, platform: str, recorded: str | None = None) -> str:
        """Return the kind of program that runs a step, as checkpoints record it.

        Args:
            step: The step.
            platform: The platform.
            recorded: What the checkpoint that is being restored has recorded. `adopt` will take over a choice from it.
        """
        if recorded in _RECORDED and self.chooses(platform):
            return recorded
        measured = self.chooses(platform) and type(step.phase).name in self.chosen
        text = self.kind_of(step, platform) + (", measured" if measured else "")
        return text + (", unfused" if self.exact_observers else "")

    def adopt(self, recorded: Mapping[str, str], platform: str) -> bool:
        """Take over the choices that a checkpoint has recorded, and return whether they differ from those before.

        A resumed run then runs the programs that the uninterrupted run would have run, also if it would measure other
        times.
        """
        if not self.chooses(platform):
            return False
        before, self.chosen = self.chosen, {}
        for name, text in recorded.items():
            kind = _RECORDED.get(text)
            if kind is not None:
                self.chosen[name] = kind
        return self.chosen != before

    def _takes_vectors(self) -> bool:
        """Return whether programs take the small arrays of the carry packed into vectors; see `CarryLayout`.

        Packing saves 1 us per array and call, which matters only for a small step. It has a cost: XLA compiles one
        kernel for all leaves of the same shape, but not if the leaves are slices of a vector. For a small GPT with 151
        leaves, vectors doubled the CPU time of the compilation (5 s to 10 s) and added 150 MiB to the peak memory, to
        save 0.1 ms of a 5 ms step. The steps that are traced before the first compilation decide for all programs,
        because a change would compile the training step again.
        """
        if self._in_vectors is None:
            self._in_vectors = all(step.small for _, step in self._steps.values())
        return self._in_vectors

    def _compare_inputs(self, phase: Phase, setup: StepSetup, batch: Batch) -> None:
        """Warn if a phase that does not train has inputs of another kind than the first phase that does."""
        trained = next((spec for other, spec in self._first.items() if type(other).trains), None)
        if not type(phase).trains and trained is not None and setup.model is not None:
            what = f"The data of {type(phase).__name__}"
            warn_of_other_kind(inputs_of_specs(setup.split, batch), inputs_of_specs(setup.split, trained), what)

    def _check_batch(self, phase: Phase, batch: Batch) -> None:
        first = self._first.get(phase)
        if first is None:
            return
        # A shorter last batch is normal and gets its own program. Other differences are errors, because each would
        # compile a program without notice.
        lines, shorter = batch_differences(first, batch)
        if lines and not shorter:
            fix = ["pad or drop what does not fit, or cast in the loader"]
            if batch_differences(batch_spec(batch), first)[1]:  # the batch only has a longer leading axis
                fix = [
                    "begin with a batch of the largest size",
                    "pass a batch of the largest size to the constructor: `Learner(..., example_batch=batch)`",
                ]
            raise DataError(
                f"A batch of `data.{type(phase).name}` differs from the one the step was compiled for: "
                f"{'; '.join(lines[:4])}{f'; and {len(lines) - 4} more' if len(lines) > 4 else ''}.",
                why="the step is compiled for batches of one shape; only a shorter leading axis is allowed",
                fix=fix,
            )


def _traced_content(plan: Plan, phase: Phase) -> Any:
    """Return the part of a trace's key that the callbacks determine: the traced handlers of each event, in order."""
    return plan.records_skips, *(
        (event, tuple((h.function, tuple(h.access.items()), h.schedules) for h in handlers))
        for (event, phase_type), handlers in plan.graph.orders.items()
        if phase_type is type(phase) and issubclass(event, TracedEvent)
    )
