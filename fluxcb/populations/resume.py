"""Resuming a population: all members continue from the same step, which each of them has saved."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from fluxcb._errors import CheckpointError
from fluxcb._run.learner_core import LearnerCore
from fluxcb._run.resume import lock_run, restore_checkpoint, run_savers, unlock_run
from fluxcb.checkpoints.savers import RunSaver, StoredCheckpoint
from fluxcb.populations.record import PopulationRecord

__all__ = ["resume_members"]


def resume_members(
    cores: Sequence[LearnerCore],
    labels: Sequence[str],
    records: Sequence[PopulationRecord],
    allow: Collection[str],
) -> None:
    """Lock the runs of all members, and restore the members to the newest step that all of them have saved.

    A process that is killed leaves the members with different newest checkpoints, because they save one after the
    other. A member that had stopped early needs no later checkpoint, and stays stopped.

    Args:
        cores: The cores of the members.
        labels: The names of the members, for messages.
        records: The callbacks of the members that know which ones had stopped.
        allow: The allowed differences; see `Learner.restore`.

    Raises:
        CheckpointError: A member has not exactly one Checkpointer, has no checkpoint or none of the common step, or all
            its checkpoints are damaged.
        ResumeError: A checkpoint belongs to another run.
    """
    try:
        for core in cores:
            lock_run(core)  # no other run can delete the checkpoints while they are compared
        _restore(cores, labels, records, allow)
    except BaseException:
        for core in cores:
            unlock_run(core)
        raise


def _restore(
    cores: Sequence[LearnerCore],
    labels: Sequence[str],
    records: Sequence[PopulationRecord],
    allow: Collection[str],
) -> None:
    savers = [_saver_of(core, label) for core, label in zip(cores, labels, strict=True)]
    found = [saver.newest_checkpoint() for saver in savers]
    _refuse_missing(cores, labels, found)
    for core, saver, newest in zip(cores, savers, found, strict=True):
        if newest is not None:  # otherwise the process was killed before this member had saved its beginning
            restore_checkpoint(core, newest, allow=allow)
            saver.resumed_from(newest)
    while True:  # each round lowers the step of a member
        stopped = {member: reason for record in records for member, reason in record.stopped.items()}
        stopped |= {member: core.state.fit.ended for member, core in enumerate(cores) if core.state.fit.ended}
        steps = [core.state.progress.step for core in cores]
        common = min((step for member, step in enumerate(steps) if member not in stopped), default=max(steps))
        later = [member for member, step in enumerate(steps) if step > common]
        if not later:
            break
        for member in later:
            earlier = next(iter(savers[member].stored_checkpoints(common)), None)
            if earlier is None or earlier.step != common:
                raise _not_saved(labels[member], common)
            restore_checkpoint(cores[member], earlier, allow=allow)
            savers[member].resumed_from(earlier)
    for member, reason in stopped.items():
        cores[member].state.fit.ended = reason  # its own checkpoint can be older than the stop


def _refuse_missing(
    cores: Sequence[LearnerCore], labels: Sequence[str], found: Sequence[StoredCheckpoint | None]
) -> None:
    """Refuse to resume if a member has no checkpoint, and others have trained since the beginning of the run.

    A run that was killed while the members saved its beginning has no later checkpoints.

    Raises:
        CheckpointError: A member has none.
    """
    missing = [member for member, newest in enumerate(found) if newest is None]
    saved = {member: newest.step for member, newest in enumerate(found) if newest is not None}
    if not missing or max(saved.values(), default=0) <= cores[missing[0]].state.progress.step:
        return
    member, other = missing[0], max(saved, key=saved.__getitem__)
    raise CheckpointError(
        f"{labels[member][0].upper()}{labels[member][1:]} has no checkpoint, but {labels[other]} has one of step "
        f"{saved[other]}.",
        why="all members resume from the same step, so the others would begin again and replace their checkpoints",
        fix=[
            "build the population with the members of the saved run, and restore the folders of their checkpoints",
            "begin a new run with other folders",
        ],
    )


def _not_saved(label: str, step: int) -> CheckpointError:
    return CheckpointError(
        f"{label[0].upper()}{label[1:]} has no checkpoint of step {step}, from which the population would resume.",
        why="all members continue from the newest step that each of them has saved",
        fix="let every member save at the same steps, and keep several checkpoints: `Checkpointer(..., keep_last=3)`",
    )


def _saver_of(core: LearnerCore, label: str) -> RunSaver:
    savers = run_savers(core)
    if len(savers) != 1:
        count = len(savers) or "none"
        raise CheckpointError(
            f"`fit(resume=True)` continues the run of a Checkpointer, and {label} has {count}.",
            fix="add one to the Learner that the factory returns, with a path of its own: "
            '`Checkpointer(f"runs/{member}")`',
        )
    return savers[0]
