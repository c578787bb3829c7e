"""Checking, when a fit begins, that several processes run the same program, and that they train together."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, cast

import jax

from fluxcb._declare.callback import unwrap
from fluxcb._declare.declared import BoundHandler, Declared
from fluxcb._declare.events import StepBegin, StepEnd, Trigger
from fluxcb._declare.schedules import AtWindowEnds, EverySeconds, EverySteps, Schedule
from fluxcb._errors import DeclarationError
from fluxcb._run.host_writes import may_write_carry
from fluxcb._run.learner_core import LearnerCore
from fluxcb._run.process_differences import Difference, find_difference, key_text
from fluxcb._run.validate_callbacks import traced_entries
from fluxcb._tracebacks import warn_user
from fluxcb.checkpoints.savers import RunLock, RunSaver

if TYPE_CHECKING:
    from fluxcb._run.processes import SynchronizedEmitter

__all__ = ["check_same_program"]


def check_same_program(core: LearnerCore) -> None:
    """Check that all processes begin a fit with the same program and the same values.

    Without this check, arrays that count as replicated would differ between processes, or the processes would wait for
    each other forever. A single process needs no check.

    Args:
        core: A Learner that has been built.

    Raises:
        DeclarationError: The programs differ. Or the processes do not train together, and a callback saves checkpoints.

    Warns:
        UserWarning: The processes do not train together.
    """
    if jax.process_count() == 1:
        return
    # On a mesh of several processes, even a replicated array is not fully addressable.
    together = not all(leaf.is_fully_addressable for leaf in jax.tree.leaves(core.state.train.carry))

    def compare() -> Difference | None:
        # Inside the collective call, so that the other processes learn of an error.
        # The same row as in `_description`, so that a process with such a mesh differs from one without.
        return find_difference(_description(core) if together else {"mesh": "no mesh of several processes"})

    emitter = cast("SynchronizedEmitter", core.engine.emitter)
    if (found := emitter.before_fit(compare)) is not None:
        raise found.error()
    if not together:
        _report_separate(core)


def _report_separate(core: LearnerCore) -> None:
    """Warn that each process trains a model of its own, which the sum of their logs and files would not show."""
    what = "Each process trains its own model on its own data, because the Learner has no mesh of all processes."
    saver = next((d for d in core.graph.declared if isinstance(unwrap(d.callback), RunLock | RunSaver)), None)
    if saver is not None:
        raise DeclarationError(
            what,
            where=saver.label,
            why="the processes save one checkpoint together, which can contain only one model",
            fix="pass `mesh=fluxcb.mesh()` to the Learner",
        )
    # Later fits of the same training do not repeat the warning.
    if core.state.progress.step == 0:
        warn_user(f"{what} Pass `mesh=fluxcb.mesh()` to the Learner to train one model.", UserWarning)


def _description(core: LearnerCore) -> dict[str, str]:
    """Return what must be the same in all processes, by the name that a message shows."""
    train, programs, about = core.state.train, core.engine.programs, core.snapshots.about()
    placement = core.placement
    rows = {
        "mesh": about["devices"][-1],
        "sharding": repr(placement.sharding) if placement is not None else "none",
        "key": key_text(train.run_key),
        "phases": ", ".join(about["phases"]),
        "steps_per_call": repr(programs.steps_per_call),
        "window_bytes": repr(programs.window_bytes),
        "program": repr(programs.requested_kind),
        "exact_observers": repr(programs.exact_observers),
    }
    # The values of now, because a program can assign them between two fits.
    for name, values in train.hyperparams.numbers(train.live(("opt_state",))).items():
        rows[f"hyperparams.{name}"] = ", ".join(map(str, values))
    rows |= {f"optimizer.{name}".removesuffix("."): text for name, text in about["optimizer"].items()}
    return rows | _callback_rows(core, about["callbacks"], about["arguments"])


def _callback_rows(
    core: LearnerCore, classes: Mapping[str, str], arguments: Mapping[str, Mapping[str, str]]
) -> dict[str, str]:
    """Return the rows of the callbacks that determine the steps.

    A callback whose host handlers only read, such as `ProgressBar`, can be in the list of one process only. The
    arguments of host handlers can differ, because process 0 decides what they write.
    """
    # With "auto", several processes run single steps only, because each would measure other times.
    entries, fused = traced_entries(core.graph), core.engine.programs.steps_per_call not in ("auto", 1)
    found: dict[Declared, list[BoundHandler]] = {}
    for handler in dict.fromkeys(handler for handlers in core.graph.orders.values() for handler in handlers):
        if _determines_steps(handler, entries, fused=fused):
            found.setdefault(handler.declared, []).append(handler)
    rows: dict[str, str] = {}
    for declared, handlers in sorted(found.items(), key=lambda item: item[0].position):
        name = declared.name
        schedules = dict.fromkeys(_schedule_text(schedule) for handler in handlers for schedule in handler.schedules)
        # The carry contains a switch of each `switchable` callback, which must be the same in all processes.
        parts = [classes[name], *schedules, *["disabled"] * declared.disabled]
        rows[f"callbacks.{name}"] = ", ".join(parts)
        # Traced handlers use their arguments while the step is traced, so these become constants of the program.
        if any(handler.traced for handler in handlers):
            rows |= {f"callbacks.{name}.{path}": text for path, text in arguments.get(name, {}).items()}
    return rows


def _determines_steps(handler: BoundHandler, entries: Collection[str], *, fused: bool) -> bool:
    """Return whether a handler is a part of the steps, or makes the processes agree or end windows where it runs.

    Args:
        handler: The handler.
        entries: See `may_write_carry`.
        fused: Whether the program of a window contains several steps, so that all windows must have the same lengths.
    """
    if handler.traced or may_write_carry(handler.access, entries):
        return True
    if issubclass(handler.event, StepBegin | StepEnd):
        # `AtWindowEnds` is polled where a window ends for another reason.
        ends_windows = not any(isinstance(schedule, AtWindowEnds) for schedule in handler.schedules)
        return ("control",) in handler.access or (fused and ends_windows)
    # The events between epochs are agreed on without a handler.
    in_epoch = any(isinstance(schedule, EverySteps | EverySeconds) for schedule in handler.schedules)
    return issubclass(handler.event, Trigger) and in_epoch


def _schedule_text(schedule: Schedule) -> str:
    """Return a schedule in words, if it consists of numbers. Process 0 decides for conditions and clocks."""
    # Fields without comparison hold state, such as the time at which a clock was last due.
    parts = [getattr(schedule, field.name) for field in dataclasses.fields(schedule) if field.compare]
    numbers = isinstance(schedule, EverySeconds) or all(part is None or isinstance(part, int) for part in parts)
    return str(schedule) if numbers else type(schedule).__name__
