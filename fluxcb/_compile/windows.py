"""Windows: how many steps may run before a host handler has to look, and what is fetched for those that look later."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from fluxcb._compile.arrays import is_key, leading_axis, nbytes_of, spec_of
from fluxcb._compile.carried import below, part_of
from fluxcb._compile.fetch import Fetch
from fluxcb._compile.hyperparams import HyperparamIndex
from fluxcb._compile.plan import AT_END, IN_SYNC, HostCall, PhasePlan
from fluxcb._compile.step import TracedStep
from fluxcb._declare.access import Append, Permission, dotted, overlap, writes
from fluxcb._declare.declared import Handler
from fluxcb._declare.events import StepBegin, Trigger
from fluxcb._declare.phases import Phase
from fluxcb._declare.schedules import AtWindowEnds, EverySeconds, EverySteps, Predicate
from fluxcb._errors import MissingStateError, did_you_mean
from fluxcb._typing import PyTree, StatePath

__all__ = ["Bound", "WindowPlan", "bound_at", "carry_reads", "must_look_before", "plan_windows"]

_EACH_BYTES = 4096  # parts of the carry up to this size are fetched for each step
_SPARSE_BYTES = 256  # ... up to this size also if their readers are due now and then only
_KEPT_BYTES = 65536  # up to this size, a copy is kept of what a due handler reads, and the device goes on meanwhile

# What the compiled step reads: who writes one of these between two steps has to run between them.
_STEP_READS = (("params",), ("model_state",), ("opt_state",), ("key",), ("hyperparams",), ("data",), ("model",))

_EVERYTHING = ("*",)
_HOST_ONLY = ("batch", "stop", "skip", "hold")


@dataclass(frozen=True, eq=False)
class Bound:
    """A handler at whose due steps a window ends.

    Attributes:
        call: The handler.
        why: What it does that needs the end.
        blocks: Whether the next window must not begin before it has run.
        keeps: Parts of the carry that are copied for it, so that the next window may begin.
    """

    call: HostCall
    why: str
    blocks: bool
    keeps: tuple[StatePath, ...] = ()


@dataclass(frozen=True, eq=False)
class WindowPlan:
    """What a phase's windows look like, once the shapes of a step are known.

    Attributes:
        begin: Host calls at StepBegin.
        end: Host calls at StepEnd.
        inner: Those of them that may be due at other steps of a window than its last one.
        trigger: Host calls at Trigger.
        bounds: Those at whose due steps a window ends.
        fetch: What leaves the device.
        readers: Which handlers read each fetched path.
        sparse: Whether none of the calls is due at every step.
        batch_size: Leading axis of a batch.
    """

    begin: tuple[HostCall, ...]
    end: tuple[HostCall, ...]
    inner: tuple[HostCall, ...]
    trigger: tuple[HostCall, ...]
    bounds: tuple[Bound, ...]
    fetch: Fetch
    readers: Mapping[StatePath, tuple[HostCall, ...]]
    sparse: bool
    batch_size: int


def bound_at(calls: Iterable[HostCall], step: int, epoch: int, cancelled: int) -> int | None:
    """Return the first step after `step` at which one of these calls may be due, or None if none ever is.

    Args:
        calls: The calls.
        step: Number of a step.
        epoch: Number of the epoch.
        cancelled: How many steps have begun and were cancelled so far. No further step is assumed to be cancelled.
    """
    first: int | None = None
    for call in calls:
        due: int | None = step + 1
        for schedule in call.schedules:  # due when all are: the latest of their next times bounds from below
            more = cancelled if call.begins and schedule.periodic else 0
            nearest = schedule.next_due(step + more, epoch)
            due = None if nearest is None or due is None else max(due, nearest - more)
        if due is not None and (first is None or due < first):
            first = due
    return first


def must_look_before(
    calls: Sequence[HostCall], carry: Mapping[str, Any], hyperparams: HyperparamIndex
) -> tuple[Bound, ...]:
    """Return the StepBegin calls that run before their step: they change it, may cancel it, or see its state."""
    bounds = []
    for call in calls:
        why = _why_blocks(call, carry)
        for path, _ in carry_reads(call.handler, carry, hyperparams):
            why = why or f"sees `{dotted(path)}` as it is before the step"
        if why:
            bounds.append(Bound(call, why, blocks=True))
    return tuple(bounds)


def plan_windows(
    plan: PhasePlan, phase: Phase, step: TracedStep, carry: Mapping[str, Any], hyperparams: HyperparamIndex
) -> WindowPlan:
    """Say what bounds a phase's windows and what they fetch.

    Args:
        plan: Its host calls.
        phase: The phase.
        step: Its traced step.
        carry: The carry, or its specs.
        hyperparams: Where the hyperparameters lie in it.

    Raises:
        MissingStateError: A host handler declares a step value that the step does not compute.
    """
    _require_computed(plan, phase, step)
    each: dict[StatePath, list[HostCall]] = {}
    last: dict[StatePath, list[HostCall]] = {}
    bounds: list[Bound] = []
    for call in (*plan.end, *plan.trigger):
        blocks = _why_blocks(call, carry)
        why, rare = blocks, _now_and_then(call)
        keeps: list[StatePath] = []
        for path, permission in carry_reads(call.handler, carry, hyperparams):
            if blocks:  # then it sees the carry itself
                break
            if getattr(permission, "borrow", False):
                blocks = why = f"borrows `{dotted(path)}` of the carry"
                break
            size = _bytes_at(carry, hyperparams, path)
            if size <= (_SPARSE_BYTES if rare else _EACH_BYTES) and not _has_keys(carry, hyperparams, path):
                each.setdefault(path, []).append(call)
                continue
            why = why or f"reads `{dotted(path)}`, {_size(size)} of the carry"
            blocks = why if size > _KEPT_BYTES or _has_clock(call) else ""
            keeps.append(path)
        if why:
            kept = () if blocks else tuple(dict.fromkeys(keeps))
            bounds.append(Bound(call, why, bool(blocks), kept))
        for path in _step_reads(call, step):
            size = nbytes_of(below(step.step_specs[path[1]], path[2:]))
            (last if rare and size > _SPARSE_BYTES else each).setdefault(path, []).append(call)
    for path in [p for p in last if _covered(p, each)]:
        each[_covered(path, each)[0]] += last.pop(path)
    for path, calls in last.items():
        size = nbytes_of(below(step.step_specs[path[1]], path[2:]))
        known = {id(b.call) for b in bounds}
        why = f"reads `{dotted(path)}`, {_size(size)} of the step, which is fetched at a window's end"
        bounds += [Bound(call, why, blocks=False) for call in calls if id(call) not in known]
    readers = {path: tuple(calls) for path, calls in {**_outermost(each), **_outermost(last)}.items()}

    def spec_at(path: StatePath) -> PyTree:
        if path[0] == "step":
            return below(step.step_specs[path[1]], path[2:])
        return spec_of(part_of(carry, hyperparams, path))

    fetch = Fetch({p: spec_at(p) for p in _outermost(each)}, {p: spec_at(p) for p in _outermost(last)})
    before = {id(bound.call) for bound in must_look_before(plan.begin, carry, hyperparams)}  # never behind their step
    late = replace(plan, begin=tuple(call for call in plan.begin if id(call) not in before))
    return _with_clocks(late, bounds, fetch, readers, leading_axis(step.batch_spec))


def _with_clocks(
    plan: PhasePlan,
    bounds: Sequence[Bound],
    fetch: Fetch,
    readers: Mapping[StatePath, tuple[HostCall, ...]],
    batch_size: int,
) -> WindowPlan:
    """Put the plan together; clocks are asked at the ends of windows only."""
    blocks = {id(b.call) for b in bounds if b.blocks}
    ends = {id(b.call) for b in bounds}

    def asks(call: HostCall) -> int:
        counts = any(isinstance(s, EverySteps | Predicate) for s in call.schedules)
        if not _has_clock(call) or (counts and id(call) not in ends):  # its other schedules ask for steps inside, too
            return 0
        return IN_SYNC if id(call) in blocks else AT_END

    asked = {id(c): replace(c, asks=asks(c)) for c in (*plan.begin, *plan.end, *plan.trigger)}

    def exchanged(calls: Iterable[HostCall]) -> tuple[HostCall, ...]:
        return tuple(asked[id(call)] for call in calls)

    def inside(call: HostCall) -> bool:
        ends_its_window = id(call) in ends and all(isinstance(s, EverySteps) for s in call.schedules)
        return not (asked[id(call)].asks or ends_its_window)

    calls = [*plan.begin, *plan.end, *plan.trigger]
    return WindowPlan(
        exchanged(plan.begin),
        exchanged(plan.end),
        exchanged(call for call in plan.end if inside(call)),
        exchanged(plan.trigger),
        tuple(replace(b, call=asked[id(b.call)]) for b in bounds),
        fetch,
        readers,
        all(any(isinstance(s, EverySteps) for s in call.schedules) and not _has_clock(call) for call in calls),
        batch_size,
    )


def _why_blocks(call: HostCall, carry: Mapping[str, Any]) -> str:
    """Return why the next step must not begin before this handler has run, or an empty string."""
    handler = call.handler
    if issubclass(handler.event, Trigger):
        return "is triggered inside the epoch, and may end it"
    if call.cancels:
        return "may cancel (`control`)"
    for path, permission in handler.access.items():
        if not writes(permission):
            continue
        appends = isinstance(permission, Append) and path[1:2] not in (("batch",), ("xs",), ("ys",))
        if path[0] == "step" and handler.event is StepBegin and not appends:
            return f"writes `{dotted(path)}` before the step"
        if any(overlap(path, p) for p in _STEP_READS):
            return f"writes `{dotted(path)}`, which the step reads"
        if path[0] == "cbstate" and (len(path) == 1 or path[1] in carry["cbstate"]):
            return f"writes `{dotted(path)}`, which is in the carry"
    return ""


def carry_reads(
    handler: Handler, carry: Mapping[str, Any], hyperparams: HyperparamIndex
) -> Iterator[tuple[StatePath, Permission]]:
    """Iterate over the parts of the carry that a handler may read; whole namespaces give each of their names."""
    for path, permission in handler.access.items():
        for root in ("params", "model_state", "opt_state"):
            if path == _EVERYTHING:
                yield (root,), permission
        if path[0] in ("params", "model_state", "opt_state"):
            yield path, permission
        if path[:1] in (("hyperparams",), _EVERYTHING):
            if len(path) > 1:
                yield path, permission
            else:
                yield from ((("hyperparams", name), permission) for name in hyperparams.names)
        if path[:1] in (("cbstate",), _EVERYTHING):
            for name in carry["cbstate"]:
                if len(path) == 1 or path[:2] == ("cbstate", name):
                    yield (path if len(path) > 1 else ("cbstate", name)), permission


def _bytes_at(carry: Mapping[str, Any], hyperparams: HyperparamIndex, path: StatePath) -> float:
    try:
        return nbytes_of(part_of(carry, hyperparams, path))
    except (LookupError, AttributeError, TypeError):  # not there yet; reading it will say so
        return float("inf")


def _has_keys(carry: Mapping[str, Any], hyperparams: HyperparamIndex, path: StatePath) -> bool:
    return any(map(is_key, jax.tree.leaves(part_of(carry, hyperparams, path))))


def _step_reads(call: HostCall, step: TracedStep) -> Iterator[StatePath]:
    """Iterate over the step values that a StepEnd handler may read."""
    if issubclass(call.handler.event, Trigger):  # between two steps there is none
        return
    for path in call.handler.access:
        if path in (("step",), _EVERYTHING):
            yield from (("step", name) for name in step.step_specs if name not in ("batch", "stop"))
        elif path[0] == "step" and path[1] in step.step_specs and path[1] not in ("batch", "stop"):
            yield path if _exists(step.step_specs[path[1]], path[2:]) else path[:2]


def _exists(spec: PyTree, rest: StatePath) -> bool:
    try:
        below(spec, rest)
    except (LookupError, AttributeError, TypeError):
        return False
    return True


def _covered(path: StatePath, paths: Iterable[StatePath]) -> list[StatePath]:
    return [p for p in paths if path[: len(p)] == p]


def _outermost(paths: Mapping[StatePath, list[HostCall]]) -> dict[StatePath, list[HostCall]]:
    """Return the paths that lie in no other, each with the readers of all that lie in it."""
    outer = [p for p in paths if not any(p != q and p[: len(q)] == q for q in paths)]
    return {q: [call for p, calls in paths.items() if p[: len(q)] == q for call in calls] for q in outer}


def _now_and_then(call: HostCall) -> bool:
    return _has_clock(call) or any(isinstance(s, EverySteps) and s.steps > 1 for s in call.schedules)


def _has_clock(call: HostCall) -> bool:
    return any(isinstance(s, EverySeconds | AtWindowEnds) for s in call.schedules)


def _size(count: float) -> str:
    if count == float("inf"):
        return "an unknown part"
    return f"{count:,} bytes" if count < 10_000 else f"{count / 1024:,.0f} KiB"


def _require_computed(plan: PhasePlan, phase: Phase, step: TracedStep) -> None:
    known = {*step.step_specs, *_HOST_ONLY, *_written_on_host(plan)}
    for call in plan.end:
        for path in call.handler.access:
            if path[0] == "step" and len(path) > 1 and path[1] not in known:
                raise MissingStateError(
                    f"{call.handler.declared.label} reads `step.{path[1]}` at StepEnd x {type(phase).__name__}, "
                    f"but the step does not compute it.{did_you_mean(path[1], step.step_specs)}",
                    where=call.handler.where,
                    why=f"the step computes {', '.join(step.step_specs)}",
                    fix="narrow the handler to a phase that computes it, or return it from the loss as aux",
                )


def _written_on_host(plan: PhasePlan) -> set[str]:
    """Return the step values that host handlers put there for the handlers behind them."""
    return {
        path[1]
        for call in (*plan.begin, *plan.end)
        for path, permission in call.handler.access.items()
        if path[0] == "step" and len(path) > 1 and writes(permission)
    }
