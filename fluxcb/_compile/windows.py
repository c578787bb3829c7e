"""Windows: the number of steps until a host handler must run, and the values that are fetched for later handlers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from fluxcb._compile.arrays import is_key, leading_axis, nbytes_of, spec_of
from fluxcb._compile.carry_paths import below, part_of
from fluxcb._compile.fetch import Fetch
from fluxcb._compile.hyperparams import HyperparamIndex
from fluxcb._compile.plan import ClockPolicy, HostCall, PhasePlan
from fluxcb._compile.step import TracedStep
from fluxcb._declare.access import Append, Permission, dotted, overlap, writes
from fluxcb._declare.declared import BoundHandler
from fluxcb._declare.events import StepBegin, Trigger
from fluxcb._declare.phases import Phase
from fluxcb._declare.schedules import AtWindowEnds, EverySeconds, EverySteps, Predicate
from fluxcb._errors import MissingStateError, did_you_mean
from fluxcb._typing import PyTree, StatePath

__all__ = ["Bound", "WindowPlan", "bound_at", "bytes_at", "carry_reads", "must_look_before", "plan_windows"]

# At these limits, a copy costs as much as it saves: a few microseconds, or a pause of the device.
_EACH_BYTES = 4096  # maximum size of parts of the carry that are fetched for each step
_SPARSE_BYTES = 256  # the same if their readers are not due at each step
_KEPT_BYTES = 65536  # maximum size of values that are copied for a due handler so that the device can continue

# State that the compiled step reads. A handler that writes it between two steps has to run between them.
_STEP_READS = (("params",), ("model_state",), ("opt_state",), ("key",), ("hyperparams",), ("data",), ("model",))

_EVERYTHING = ("*",)
# Step values that host handlers can read although the compiled step does not return them.
_HOST_ONLY = ("batch", "data_position", "stop", "skip", "hold", "skips", "earlier_losses")


@dataclass(frozen=True, eq=False)
class Bound:
    """A handler that ends the window wherever it is due.

    Attributes:
        call: The handler.
        why: The reason why the window must end.
        blocks: Whether the next window must not begin before the handler has run.
        keeps: Parts of the carry that are copied for the handler, so that the next window may begin.
    """

    call: HostCall
    why: str
    blocks: bool
    keeps: tuple[StatePath, ...] = ()


@dataclass(frozen=True, eq=False)
class WindowPlan:
    """The windows of a phase, for given shapes of a step.

    Attributes:
        begin: Host calls at StepBegin.
        end: Host calls at StepEnd.
        inner: StepBegin and StepEnd calls that may be due before the last step of a window.
        trigger: Host calls at Trigger.
        bounds: The handlers that end a window when they are due.
        fetch: The values that are fetched from the device.
        readers: The handlers that read each fetched path.
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
    """Return the first step after `step` at which one of these calls may be due, or None if there is no such step.

    Args:
        calls: The calls.
        step: Number of a step.
        epoch: Number of the epoch.
        cancelled: How many steps have begun and were cancelled so far. No further step is assumed to be cancelled.
    """
    first: int | None = None
    for call in calls:
        due: int | None = step + 1
        for schedule in call.schedules:  # all must be due, so the latest of their next steps is a lower bound
            extra = cancelled if call.begins and schedule.periodic else 0
            nearest = schedule.next_due(step + extra, epoch)
            due = None if nearest is None or due is None else max(due, nearest - extra)
        if due is not None and (first is None or due < first):
            first = due
    return first


def must_look_before(
    calls: Sequence[HostCall], carry: Mapping[str, Any], hyperparams: HyperparamIndex
) -> tuple[Bound, ...]:
    """Return the StepBegin calls that must run before their step, because they change, cancel or inspect it."""
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
    """Return the handlers that end the windows of a phase, and the values that the windows fetch.

    Args:
        plan: Its host calls.
        phase: The phase.
        step: Its traced step.
        carry: The carry, or its specs.
        hyperparams: The positions of the hyperparameters in the carry.

    Raises:
        MissingStateError: A host handler declares a step value that the step does not compute.
    """
    _require_computed(plan, phase, step)
    each: dict[StatePath, list[HostCall]] = {}
    last: dict[StatePath, list[HostCall]] = {}
    bounds: list[Bound] = []
    # Handlers of StepBegin run before their step, so values of the step do not exist for them.
    for call in (*plan.end, *plan.trigger):
        blocks = _why_blocks(call, carry)
        why, rare = blocks, _now_and_then(call)
        keeps: list[StatePath] = []
        for path, permission in carry_reads(call.handler, carry, hyperparams):
            if blocks:  # the handler then reads the carry itself
                break
            # The handler gets the arrays of the carry themselves, which the next call would donate.
            if getattr(permission, "borrow", False):
                blocks = why = f"borrows `{dotted(path)}` of the carry"
                break
            size = bytes_at(carry, hyperparams, path)
            # Small values are fetched at each step, which costs less than ending the window. Keys cannot be fetched.
            if size <= (_SPARSE_BYTES if rare else _EACH_BYTES) and not _has_keys(carry, hyperparams, path):
                each.setdefault(path, []).append(call)
                continue
            why = why or f"reads `{dotted(path)}`, {_size(size)} of the carry"
            # A handler with a clock is due at an unknown step, so its values would have to be copied at the end of
            # every window.
            blocks = why if size > _KEPT_BYTES or _has_clock(call) else ""
            keeps.append(path)
        if why:
            copied = () if blocks else tuple(dict.fromkeys(keeps))
            bounds.append(Bound(call, why, bool(blocks), copied))
        for path in _step_reads(call, step):
            size = nbytes_of(below(step.step_specs[path[1]], path[2:]))
            # A large value of a rare handler is fetched only at the end of the window, which its handler then ends.
            (last if rare and size > _SPARSE_BYTES else each).setdefault(path, []).append(call)
    # A value that is fetched for each step is not fetched again at the end of the window.
    for path in [p for p in last if _covered(p, each)]:
        each[_covered(path, each)[0]] += last.pop(path)
    for path, calls in last.items():
        size = nbytes_of(below(step.step_specs[path[1]], path[2:]))
        # A handler that already ends its window needs no second reason.
        known = {b.call for b in bounds}
        why = f"reads `{dotted(path)}`, {_size(size)} of the step, which is fetched at a window's end"
        bounds += [Bound(call, why, blocks=False) for call in calls if call not in known]
    readers = {path: tuple(calls) for path, calls in {**_outermost(each), **_outermost(last)}.items()}

    def spec_at(path: StatePath) -> PyTree:
        if path[0] == "step":
            return below(step.step_specs[path[1]], path[2:])
        return spec_of(part_of(carry, hyperparams, path))

    fetch = Fetch({p: spec_at(p) for p in _outermost(each)}, {p: spec_at(p) for p in _outermost(last)})
    before = {bound.call for bound in must_look_before(plan.begin, carry, hyperparams)}  # always before their step
    # These handlers run before their step, and must not be replayed after it.
    late = replace(plan, begin=tuple(call for call in plan.begin if call not in before))
    return _with_clocks(late, bounds, fetch, readers, leading_axis(step.batch_spec))


def _with_clocks(
    plan: PhasePlan,
    bounds: Sequence[Bound],
    fetch: Fetch,
    readers: Mapping[StatePath, tuple[HostCall, ...]],
    batch_size: int,
) -> WindowPlan:
    """Return the plan. Clocks are read only at the ends of windows."""
    blocks = {b.call for b in bounds if b.blocks}
    ends = {b.call for b in bounds}

    def clock(call: HostCall) -> ClockPolicy:
        counts = any(isinstance(s, EverySteps | Predicate) for s in call.schedules)
        if not _has_clock(call) or (counts and call not in ends):  # its other schedules are due at steps inside
            return ClockPolicy.ANY_STEP
        # A blocking handler reads the carry, which is one window ahead unless the engine waits.
        return ClockPolicy.WINDOW_END_IN_SYNC if call in blocks else ClockPolicy.WINDOW_END

    with_clock = {c: replace(c, clock=clock(c)) for c in (*plan.begin, *plan.end, *plan.trigger)}

    def with_clocks(calls: Iterable[HostCall]) -> tuple[HostCall, ...]:
        return tuple(with_clock[call] for call in calls)

    def inside(call: HostCall) -> bool:
        # Such a handler is due only at the last step, so the replay of earlier steps need not check it.
        ends_its_window = call in ends and all(isinstance(s, EverySteps) for s in call.schedules)
        return with_clock[call].clock is ClockPolicy.ANY_STEP and not ends_its_window

    calls = [*plan.begin, *plan.end, *plan.trigger]
    return WindowPlan(
        with_clocks(plan.begin),
        with_clocks(plan.end),
        with_clocks(call for call in plan.end if inside(call)),
        with_clocks(plan.trigger),
        tuple(replace(b, call=with_clock[b.call]) for b in bounds),
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
        # Values that are appended do not change the step, unless they are parts of the batch.
        appends = isinstance(permission, Append) and path[1:2] not in (("batch",), ("xs",), ("ys",))
        if path[0] == "step" and handler.event is StepBegin and not appends:
            return f"writes `{dotted(path)}` before the step"
        # The next step must see the new value.
        if any(overlap(path, p) for p in _STEP_READS):
            return f"writes `{dotted(path)}`, which the step reads"
        if path[0] == "cbstate" and (len(path) == 1 or path[1] in carry["cbstate"]):
            return f"writes `{dotted(path)}`, which is in the carry"
    return ""


def carry_reads(
    handler: BoundHandler, carry: Mapping[str, Any], hyperparams: HyperparamIndex
) -> Iterator[tuple[StatePath, Permission]]:
    """Iterate over the parts of the carry that a handler may read. A whole namespace gives each of its names."""
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


def bytes_at(carry: Mapping[str, Any], hyperparams: HyperparamIndex, path: StatePath) -> float:
    """Return the size of a part of the carry (bytes), or infinity if it does not exist."""
    try:
        return nbytes_of(part_of(carry, hyperparams, path))
    except (LookupError, AttributeError, TypeError):  # it does not exist yet, and reading it will raise an error
        return float("inf")


def _has_keys(carry: Mapping[str, Any], hyperparams: HyperparamIndex, path: StatePath) -> bool:
    return any(map(is_key, jax.tree.leaves(part_of(carry, hyperparams, path))))


def _step_reads(call: HostCall, step: TracedStep) -> Iterator[StatePath]:
    """Iterate over the step values that a StepEnd handler may read."""
    if issubclass(call.handler.event, Trigger):  # there are no step values between two steps
        return
    for path in call.handler.access:
        # The host has the batch, and each row has a word for `stop`.
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
    """Return the paths that are not inside other paths, each with the readers of all paths inside it."""
    # A value and a part of it are fetched once.
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
    # Only now are the names known that the loss function returns in `aux`.
    known = {*step.step_specs, *_HOST_ONLY, *_written_on_host(plan)}
    for call in plan.end:
        for path in call.handler.access:
            if path[0] == "step" and len(path) > 1 and path[1] not in known:
                raise MissingStateError(
                    f"{call.handler.declared.label} reads `step.{path[1]}` at StepEnd x {type(phase).__name__}, "
                    f"but the step does not compute it.{did_you_mean(path[1], step.step_specs)}",
                    where=call.handler.where,
                    why=f"the step computes {', '.join(step.step_specs)}",
                    fix="narrow the handler to a phase that computes it, or return it as `aux` from the loss function",
                )


def _written_on_host(plan: PhasePlan) -> set[str]:
    """Return the step values that host handlers write for later handlers."""
    return {
        path[1]
        for call in (*plan.begin, *plan.end)
        for path, permission in call.handler.access.items()
        if path[0] == "step" and len(path) > 1 and writes(permission)
    }
