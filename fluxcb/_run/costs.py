"""The costs of a Learner's callbacks, computed without running a step; see `Learner.explain`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fluxcb._check.graph import CallbackGraph
from fluxcb._compile.arrays import leading_axis, nbytes_of, spec_of
from fluxcb._compile.costs import Cost, CountedStep, count_step
from fluxcb._compile.plan import HostCall
from fluxcb._compile.program import FETCH_SCOPE, plain_program
from fluxcb._compile.step import TracedStep
from fluxcb._compile.traced import scope_of
from fluxcb._compile.updating import FLAG_SCOPE, OPTIMIZER_SCOPE
from fluxcb._compile.windows import WindowPlan, bytes_at, carry_reads
from fluxcb._declare.declared import BoundHandler
from fluxcb._declare.phases import Phase
from fluxcb._errors import MissingStateError
from fluxcb._run.learner_core import LearnerCore
from fluxcb._typing import StatePath

if TYPE_CHECKING:
    from fluxcb._check.pictures import HandlerCosts

__all__ = [
    "CarryEntry",
    "Costs",
    "HostReads",
    "Part",
    "PhaseCosts",
    "handler_name",
    "handler_notes",
    "learner_costs",
]

_NAMES = {
    "": "model and loss",  # operations outside all scopes
    OPTIMIZER_SCOPE: "optimizer",
    FLAG_SCOPE: "step.skip, hold and stop",
    FETCH_SCOPE: "packing of fetched values",
}
"""The parts of a step that are not handlers, in the order in which they are listed."""


@dataclass(frozen=True)
class Part:
    """A part of a step.

    Attributes:
        name: `callback.handler` with its schedules, or what else the part is.
        cost: Its cost.
        handlers: The traced handlers that it consists of.
    """

    name: str
    cost: Cost
    handlers: tuple[BoundHandler, ...] = ()


@dataclass(frozen=True)
class HostReads:
    """What a host handler reads from the device.

    Attributes:
        handler: The handler, which runs at a step.
        each: Size of the values that are fetched for each step (bytes).
        due: Size of the values that are fetched or copied when the handler is due (bytes).
    """

    handler: BoundHandler
    each: int
    due: int


@dataclass(frozen=True)
class PhaseCosts:
    """The costs of a phase.

    Attributes:
        phase: The phase.
        examples: Number of examples in a batch.
        step: The costs of a step.
        parts: The parts of a step. The handlers are sorted by their FLOPs.
        reads: The host handlers that read something from the device.
        fetched: Size of what leaves the device for each step (bytes). Values that several handlers read count once.
    """

    phase: type[Phase]
    examples: int
    step: CountedStep
    parts: tuple[Part, ...]
    reads: tuple[HostReads, ...]
    fetched: int


@dataclass(frozen=True)
class CarryEntry:
    """An entry of the carry.

    Attributes:
        path: Its path.
        owner: The callbacks that write it, or the other part of the Learner that it belongs to.
        bytes: Its size (bytes).
    """

    path: str
    owner: str
    bytes: int


@dataclass(frozen=True)
class Costs:
    """The costs of a Learner's callbacks.

    Attributes:
        phases: The costs of each phase whose batches are known.
        carry: The entries of the carry.
        peaks: For each phase, the memory that a step needs on each device, as XLA plans it (bytes), or None if XLA does
            not report it.
    """

    phases: tuple[PhaseCosts, ...]
    carry: tuple[CarryEntry, ...]
    peaks: Mapping[str, int | None]

    def to_json(self) -> dict[str, Any]:
        """Return the costs as JSON data."""

        def cost(cost: Cost) -> dict[str, float]:
            return {"flops": cost.flops, "bytes": cost.bytes}

        return {
            "phases": [
                {
                    "phase": phase.phase.__name__,
                    "examples": phase.examples,
                    "parts": [{"name": part.name, **cost(part.cost)} for part in phase.parts],
                    # With it, the parts add up to the step. Each part is counted as a program of its own, so their sum
                    # alone can differ.
                    "rest": cost(phase.step.remainder),
                    "step": cost(phase.step.whole),
                    "fetched": [
                        {"handler": handler_name(read.handler), "each_step": read.each, "when_due": read.due}
                        for read in phase.reads
                    ],
                    "fetched_each_step": phase.fetched,
                    "peak_bytes": self.peaks[phase.phase.__name__],
                }
                for phase in self.phases
            ],
            "carry": [{"path": entry.path, "owner": entry.owner, "bytes": entry.bytes} for entry in self.carry],
        }


def handler_name(handler: BoundHandler) -> str:
    """Return the name of a handler in tables, with its schedules."""
    due = f", {' and '.join(map(repr, handler.schedules))}" if handler.schedules else ""
    return f"{handler.declared.label}.{handler.name}{due}"


def learner_costs(core: LearnerCore) -> Costs:
    """Return the costs of a Learner's callbacks. Nothing is run, but the step of each phase is compiled.

    Raises:
        MissingStateError: The shape of a batch is unknown.
        StateLostError: The train state is lost.
    """
    train, programs = core.state.train, core.engine.programs
    return Costs(
        tuple(_phase(core, *known) for known in _steps(core)),
        tuple(_entries(core.graph, train.carry)),
        {
            # Only this call compiles: XLA plans the memory while it compiles a program, and counts operations before.
            type(phase).__name__: programs.peak_bytes(phase, step, core.batch_spec(phase))
            for phase, step in _steps(core)
        },
    )


def handler_notes(core: LearnerCore) -> HandlerCosts:
    """Return the cost of each handler of a step in a few words, for pictures.

    Raises:
        MissingStateError: The shape of a batch is unknown.
        StateLostError: The train state is lost.
    """
    notes: dict[tuple[str, str, type[Phase]], str] = {}
    for costs in (_phase(core, *known) for known in _steps(core)):
        whole = costs.step.whole.flops or 1.0  # a step without arithmetic has handlers without FLOPs
        named = [(h, f"{part.cost.flops / whole:.1%} of the FLOPs") for part in costs.parts for h in part.handlers]
        named += [(read.handler, f"fetches {read.each:,} bytes per step") for read in costs.reads if read.each]
        # `graph.render` looks up the costs of a handler by this key.
        notes |= {(handler.declared.label, handler.name, costs.phase): text for handler, text in named}
    return notes


def _steps(core: LearnerCore) -> list[tuple[Phase, TracedStep]]:
    # Raises the error that explains why there is no train state yet, or none any more.
    _ = core.state.train.carry
    steps = [(phase, step) for phase in core.phases if (step := core.traced(phase)) is not None]
    if not steps:
        raise MissingStateError(
            "The costs of a step are unknown, because the shape of a batch is unknown.",
            fix="pass `data=` or `example_batch=` to the Learner",
        )
    return steps


def _phase(core: LearnerCore, phase: Phase, step: TracedStep) -> PhaseCosts:
    programs, train = core.engine.programs, core.state.train
    windows = programs.windows(phase, step)
    scopes: dict[str, list[BoundHandler]] = {}
    for handler in step.touched:
        # The handlers of one method at several events share a scope, so they are one part.
        scopes.setdefault(scope_of(handler), []).append(handler)
    # The kind of program that training runs: a straight one also tests whether an earlier step has stopped the window.
    function = plain_program(step, programs.kind_of(step, train.platform), windows.fetch, train.hyperparams)
    with programs.mesh():
        counted = count_step(function, [*_NAMES, *scopes], spec_of(train.carry), step.batch_spec)
    # A step that does not train has no operations of the optimizer, for example.
    fixed = [Part(name, counted.parts[scope]) for scope, name in _NAMES.items() if scope in counted.parts]
    traced = [
        # A handler whose values nothing uses has no operations left, because they are removed before they are counted.
        Part(handler_name(handlers[0]), counted.parts.get(scope, Cost()), tuple(handlers))
        for scope, handlers in scopes.items()
    ]
    traced.sort(key=lambda part: -part.cost.flops)
    return PhaseCosts(
        type(phase),
        leading_axis(step.batch_spec),
        counted,
        (*fixed, *traced),
        tuple(_reads(core, phase, windows)),
        windows.fetch.bytes_each,
    )


def _reads(core: LearnerCore, phase: Phase, windows: WindowPlan) -> Iterator[HostReads]:
    plan, train = core.engine.programs.plan.phase(type(phase)), core.state.train
    fetch = windows.fetch
    for call in (*plan.begin, *plan.end, *plan.trigger):
        each = sum(nbytes_of(spec) for path, spec in fetch.each.items() if _is_read(call, path, windows))
        last = sum(nbytes_of(spec) for path, spec in fetch.last.items() if _is_read(call, path, windows))
        # The rest of what it declares is copied from the carry.
        copied = sum(
            # Finite: a path that does not exist has been refused when the callbacks were installed.
            int(bytes_at(train.carry, train.hyperparams, path))
            for path, _ in carry_reads(call.handler, train.carry, train.hyperparams)
            if fetch.covering(path) is None  # small parts of the carry are fetched with the values above
        )
        if each or last or copied:
            yield HostReads(call.handler, each, last + copied)


def _is_read(call: HostCall, path: StatePath, windows: WindowPlan) -> bool:
    return any(reader.handler is call.handler for reader in windows.readers[path])


def _entries(graph: CallbackGraph, carry: Mapping[str, Any]) -> Iterator[CarryEntry]:
    owners = {"params": "model", "model_state": "model", "opt_state": "optimizer", "counters": "fluxcb"}
    for name, owner in owners.items():
        if size := nbytes_of(carry[name]):  # many models have no state
            yield CarryEntry(name, owner, size)
    for name, value in carry["cbstate"].items():
        path = ("cbstate", name)
        writers = [declared.label for declared in graph.declared if declared.may_write(path)]
        yield CarryEntry(".".join(path), ", ".join(writers), nbytes_of(value))
