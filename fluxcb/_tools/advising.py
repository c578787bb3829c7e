"""Advice from a training run: permissions that nothing used, and handlers that make the host wait for the device."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from fluxcb._check.ordering import moment_name
from fluxcb._declare.access import dotted, writes
from fluxcb._declare.declared import BoundHandler
from fluxcb._declare.events import StepBegin, StepEnd
from fluxcb._declare.schedules import Always
from fluxcb._errors import FluxcbError
from fluxcb._tools.recording import Recording, covers, permission_text, traced_handlers, unused
from fluxcb._tools.trials import Trial, steps_of

__all__ = ["early_end", "host_syncs", "unused_access"]

# One transfer for all steps of a window, for which no step has to wait.
_PER_WINDOW = ("step values", "large step values")


def early_end(trial: Trial, steps: int) -> Iterator[str]:
    """Yield advice about a training that ran fewer steps than requested."""
    if trial.steps < steps:
        yield _advice(
            f"The training ended after {trial.steps} of {steps_of(steps)}: {trial.learner.stop_reason}.",
            why="the remaining steps were not audited",
        )


def unused_access(trial: Trial, recording: Recording) -> Iterator[str]:
    """Yield a text for each permission that nothing used, although every handler that has it ran."""
    learner = trial.learner
    graph = learner._core.graph
    ran = {row.handler for row in learner.callbacks.timings()} | {_title(h) for h, _ in traced_handlers(learner)}
    handlers = list(itertools.chain.from_iterable(graph.orders.values()))
    for declared in graph.declared:
        own = [handler for handler in handlers if handler.declared is declared]
        for path, permission, how in unused(declared.access, recording.seen(declared.callback, learner)):
            # A handler that was not due, or whose event was not emitted, may be the one that needs it.
            if not all(_title(handler) in ran for handler in own if covers(path, handler.access)):
                continue
            # A handler that computes a new value, and forgets to assign it, only reads the earlier one.
            assign = [f"assign the new value, if a handler computes one: `learner.{dotted(path)} = ...`"]
            fix = "declare Read()" if how == "only reads" else f"remove it from {declared.access_owner}"
            yield _advice(
                f"{declared.label} declares {permission_text(path, permission)}, but {how} it in "
                f"{steps_of(trial.steps)}.",
                where=declared.where,
                why="declared access determines order, conflicts and device-to-host transfers, even if it is unused",
                fix=[*(assign if writes(permission) else []), f"{fix}, unless longer training needs it"],
            )


def host_syncs(trial: Trial) -> tuple[dict[str, dict[str, int]], list[str]]:
    """Return the device values that the host read, by handler, and advice about reads at every step."""
    graph = trial.learner._core.graph
    handlers = {
        (_title(handler), moment_name(moment)): handler for moment, of in graph.orders.items() for handler in of
    }
    syncs: dict[str, dict[str, int]] = {}
    advice = []
    for row in trial.learner.callbacks.timings():
        if row.reads:
            syncs[f"{row.handler} at {row.moment}"] = dict(row.reads)
        handler = handlers.get((row.handler, row.moment))
        if handler is not None and _at_every_step(handler):
            advice += _sync_advice(handler, row.moment, row.reads, row.calls)
    return syncs, advice


def _sync_advice(handler: BoundHandler, moment: str, reads: Mapping[str, int], calls: int) -> Iterator[str]:
    waited = {name: count for name, count in reads.items() if name not in _PER_WINDOW}
    if waited:
        names = " and ".join(f"`{name}`" for name in waited)
        who, count = _title(handler), sum(waited.values())
        yield _advice(
            f"{who} makes the host read {names} from the device, {count} times in {calls} calls, at {moment}.",
            where=handler.where,
            why="at each of these steps, the device waits for the host instead of running ahead",
            fix=[
                f"run it less often: `every({handler.declared.cls.__name__}(...), steps=100)`",
                "compute the values that it needs in a traced handler, and read only those",
            ],
        )


def _advice(what: str, *, where: str | Sequence[str] = (), why: str, fix: str | Sequence[str] = ()) -> str:
    return str(FluxcbError(what, where=where, why=why, fix=fix))


def _title(handler: BoundHandler) -> str:
    return f"{handler.declared.label}.{handler.name}"


def _at_every_step(handler: BoundHandler) -> bool:
    scheduled = any(not isinstance(schedule, Always) for schedule in handler.schedules)
    return issubclass(handler.event, StepBegin | StepEnd) and not scheduled
