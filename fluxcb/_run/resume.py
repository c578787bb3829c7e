"""Restoring a Learner from a checkpoint on disk, and locking its directory."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from fluxcb._declare.callback import unwrap
from fluxcb._errors import CheckpointCorruptError, CheckpointError, DeclarationError, ResumeError
from fluxcb._run.fit_record import FitRecord
from fluxcb._run.learner_core import LearnerCore
from fluxcb._run.run_changes import DIFFERENCES, Change, allows, check_allowed, explained, reordered
from fluxcb._run.switches import restored_switches, set_disabled
from fluxcb._terminal import escape_line
from fluxcb._tracebacks import warn_user
from fluxcb.checkpoints.agreement import Agreement
from fluxcb.checkpoints.reading import FolderCheckpoint, array_differences, part_differences, read_found
from fluxcb.checkpoints.run_folder import ResumeWarning
from fluxcb.checkpoints.savers import RunLock, RunSaver, StoredCheckpoint
from fluxcb.checkpoints.snapshot import Snapshot

__all__ = [
    "lock_run",
    "restore_checkpoint",
    "restore_run",
    "resume_run",
    "run_savers",
    "unlock_run",
    "warn_of_repeated",
]

T = TypeVar("T")

_IN_ANOTHER_ORDER = (
    "The run resumes within an epoch. The rest of it has the program's order, so that the epoch can have some examples "
    "twice, and others not at all."
)

_TO_KEEP = (
    "To train with the state of this Learner, call `fit` without `resume=True`, and give the Checkpointer a new "
    "directory if that call refuses the old one. The epochs or steps then count from the current step."
)


def _in_fit(allow: tuple[str, ...]) -> str:
    """Return the edit that allows differences in the call of `fit`."""
    return f"write `fit(..., resume=True, allow={allow!r})`"


def lock_run(core: LearnerCore) -> None:
    """Lock the directories of all checkpoints until `unlock_run`.

    A run locks them before it restores a checkpoint and before any handler of FitBegin runs. Otherwise a second start
    of a running program would truncate its logs and delete its files before it is refused.

    Raises:
        CheckpointError: Another run writes to one of the directories, or it cannot be written to.
    """
    try:
        for locked in _callbacks_of(core, RunLock):
            locked.lock()
    except BaseException:
        # Some of the locks may have been taken. Releasing one that is not held does nothing.
        unlock_run(core)
        raise


def unlock_run(core: LearnerCore) -> None:
    """Release the locks of `lock_run`."""
    for locked in _callbacks_of(core, RunLock):
        locked.unlock()


def resume_run(core: LearnerCore, *, allow: Collection[str] = (), of_hook: bool = False) -> None:
    """Lock the run and restore the newest good checkpoint of its `RunSaver`, if there is one.

    Args:
        core: The core of the Learner, or of the hook.
        allow: The allowed differences; see `run_changes`.
        of_hook: Whether a hook of `callbacks_as_hook` resumes, for the message of an error.

    Raises:
        CheckpointError: The run cannot be locked, there is not exactly one `RunSaver`, or all checkpoints are damaged.
        ResumeError: The checkpoint belongs to another run.
    """
    # Under the lock, no other run can delete the checkpoint that is read.
    lock_run(core)
    try:
        _restore_newest(core, allow, of_hook)
    except BaseException:
        unlock_run(core)
        raise


def _restore_newest(core: LearnerCore, allow: Collection[str], of_hook: bool) -> None:
    if core.state.fit.restored:  # `learner.restore` was called, and nothing has been trained since
        if allow:
            raise DeclarationError(
                "`fit` was given `allow` after `learner.restore`, which has already compared the program with the run.",
                fix=f"pass it to `restore`: `learner.restore(path, allow={tuple(allow)!r})`",
            )
        return
    savers = run_savers(core)
    if len(savers) != 1:  # with two savers, it is unclear from which checkpoint the run continues
        count = len(savers) or "none"
        fix = "keep one Checkpointer in the callbacks" if savers else 'add `Checkpointer("runs/1")` to the callbacks'
        if of_hook:
            raise CheckpointError(
                f"A hook resumes the run of a Checkpointer, and the callbacks of this hook contain {count}.", fix=fix
            )
        raise CheckpointError(
            f"`fit(resume=True)` continues the run of a Checkpointer, and this Learner has {count}.",
            fix=[fix, "to continue from an existing checkpoint, call `learner.restore(path)` before `fit`"],
        )
    # The saver verifies checksums and skips damaged checkpoints.
    newest = savers[0].newest_checkpoint()
    if newest is not None:
        # Before the restore, which replaces the counters that this function reads.
        discarded = [] if of_hook else _discarded(core, newest)
        fit = core.state.fit
        # A fit that failed before its first checkpoint continues from the last checkpoint of an earlier fit.
        failed = (fit.epoch, fit.step) if fit.begun and not fit.finished and fit.step == newest.step else None
        # `callbacks_as_hook` has no `allow`.
        restore_checkpoint(core, newest, allow=allow, allowing=None if of_hook else _in_fit)
        # Tells the saver which checkpoint the run continues from, so that it can retire later ones.
        savers[0].resumed_from(newest)
        if failed is not None and not of_hook:
            fit.epoch, fit.step = failed
            fit.ended = None
        if discarded:
            warn_user(
                f"`fit(resume=True)` has restored {newest} and discarded {' and '.join(discarded)}. {_TO_KEEP}",
                ResumeWarning,
            )


def _discarded(core: LearnerCore, newest: StoredCheckpoint) -> list[str]:
    """Return what a restore of a checkpoint discards that the program has set or trained, as phrases for a message.

    What a program assigns before its first fit is not included: a program that is started again assigns it again. Steps
    of a fit that has failed or ended early are not included either, because resuming is how to repeat them.
    """
    fit, step = core.state.fit, core.state.progress.step
    found = []
    if fit.begun and fit.assigned:
        found.append(f"the assigned {', '.join(f'`{name}`' for name in fit.assigned)}")
    if fit.finished and step > newest.step:
        found.append(f"the training from step {newest.step} to step {step}")
    return found


def warn_of_repeated(fit: FitRecord, epochs: int | None, steps: int | None, *, resumes: bool) -> None:
    """Warn about a fit that begins after the run was resumed within a later fit, which may have been the same one.

    Args:
        fit: The record of the last fit, or of the restored one.
        epochs: The number of epochs of the fit that begins, or None.
        steps: Its number of steps, or None.
        resumes: Whether it continues the restored fit.
    """
    # The saved fit began after other steps, so its program may call `fit` several times.
    if resumes and not fit.begun and fit.step:
        fit.within = fit.epoch
    elif fit.within is not None:
        warn_user(
            f"`fit({epochs if epochs is not None else f'steps={steps}'})` trains further, although the resumed run may "
            f"have trained it already: its checkpoint was saved by a fit that began after epoch {fit.within}. A "
            "program that can be resumed needs a single fit, e.g. `learner.fit(total, resume=True)`.",
            ResumeWarning,
        )
        fit.within = None


def run_savers(core: LearnerCore) -> list[RunSaver]:
    """Return the callbacks whose checkpoints can be restored. Resuming and rewinding need exactly one."""
    return _callbacks_of(core, RunSaver)


def _callbacks_of(core: LearnerCore, kind: type[T]) -> list[T]:
    # A wrapper such as `every(Checkpointer(...), epochs=2)` does not have the saver's methods.
    # Savers are recognized by a protocol and not by their class, so that the engine does not import the library, and
    # savers of third parties can resume and rewind.
    return [c for d in core.graph.declared if isinstance(c := unwrap(d.callback), kind) and not d.disabled]


def restore_run(core: LearnerCore, path: str | os.PathLike[str], allow: Collection[str]) -> None:
    """Verify and restore a checkpoint.

    Args:
        core: The core of the Learner.
        path: The directory of a run, or that of one checkpoint.
        allow: The allowed differences; see `run_changes`.

    Raises:
        CheckpointError: There is no checkpoint, or all checkpoints are damaged.
        ResumeError: The checkpoint belongs to another run.
    """
    check_allowed(allow, 'learner.restore(path, allow=("data",))')

    def allowing(allow: tuple[str, ...]) -> str:
        return f"call `learner.restore({str(path)!r}, allow={allow!r})`"

    def read(checkpoint: FolderCheckpoint) -> tuple[StoredCheckpoint, Snapshot, list[Change]]:
        return checkpoint, *_read(core, checkpoint, allow, path, allowing)

    _put_back(core, *read_found(path, read, together=True), allow, ())


def restore_checkpoint(
    core: LearnerCore,
    checkpoint: StoredCheckpoint,
    *,
    allow: Collection[str] = (),
    allowing: Callable[[tuple[str, ...]], str] | None = _in_fit,
    staying: Collection[str] = (),
) -> None:
    """Restore a checkpoint that a saver has returned.

    Args:
        core: The core of the Learner.
        checkpoint: The checkpoint.
        allow: The allowed differences; see `run_changes`.
        allowing: Returns the edit that allows differences. None if the caller cannot allow any.
        staying: Names of data sources that keep their position.

    Raises:
        CheckpointError: The checkpoint cannot be read.
        ResumeError: The checkpoint belongs to another run.
    """
    snapshot, changes = _read(core, checkpoint, allow, str(checkpoint), allowing)
    _put_back(core, checkpoint, snapshot, changes, allow, staying, can_allow=allowing is not None)


def _read(
    core: LearnerCore,
    checkpoint: StoredCheckpoint,
    allow: Collection[str],
    path: str | os.PathLike[str],
    allowing: Callable[[tuple[str, ...]], str] | None,
) -> tuple[Snapshot, list[Change]]:
    """Return the contents of a checkpoint, and how this program differs from its run.

    Messages show `path`, and what `allowing` returns as the fix of differences that can be allowed.
    """
    # The description of the run is compared before any array is read. All differences are then reported together, and
    # the shapes of the arrays are known from the Learner and not only from the file.
    snapshots = core.snapshots
    wrong, changes = snapshots.differences(checkpoint.about, allow)
    # Shapes and dtypes only; the arrays are read after all checks.
    saved = checkpoint.arrays()
    about = checkpoint.about
    compared, trees = _compared(core, saved, about, allow)
    wrong += array_differences(compared, trees)
    if wrong:
        fix = ["build the Learner as it was when the run began"]
        of_callbacks = any(line.startswith("cbstate: ") for line in wrong)  # `allow` names the callbacks of an entry
        kinds = tuple(
            kind
            for kind in DIFFERENCES
            if (of_callbacks and kind == "callbacks") or any(line.startswith(f"{kind}: ") for line in wrong)
        )
        more = (*allow, *kinds)
        # The fix is shown only if it works, so no difference may remain with it.
        rest, _ = snapshots.differences(checkpoint.about, more)
        if allowing and not rest and not array_differences(*_compared(core, saved, about, more)):
            fix.append(f"if the differences are intended, {allowing(more)}")
        load = f"load only the parameters: `fluxcb.checkpoints.load_params({str(path)!r})`"
        if saved.get("model_state"):
            load += f", and the model state that belongs to them: `fluxcb.checkpoints.load_model_state({str(path)!r})`"
        fix.append(load)
        raise ResumeError(
            f"{checkpoint} is a checkpoint of a different run.",
            where=[escape_line(line) for line in wrong],
            why="a run that continued from it would match neither of the two runs",
            # `learner.restore` and `load_params` read the folders of `Checkpointer` only.
            fix=fix if isinstance(checkpoint, FolderCheckpoint) else fix[:1],
        )
    snapshot = Agreement().on_all(lambda: checkpoint.read(trees))  # otherwise, some processes would wait for the others
    missing = snapshots.missing(snapshot.host, allow)
    if missing:
        raise CheckpointCorruptError(
            f"{checkpoint} lacks a part of the state: {', '.join(missing)}.",
            where=str(checkpoint),
            why="restoring only the rest would mix two states",
            fix="restore another checkpoint",
        )
    return snapshot, changes


def _put_back(
    core: LearnerCore,
    checkpoint: StoredCheckpoint,
    snapshot: Snapshot,
    changes: list[Change],
    allow: Collection[str],
    staying: Collection[str],
    *,
    can_allow: bool = True,
) -> None:
    # A rewind keeps the switches: who disabled a callback in this fit still wants it disabled.
    switches = restored_switches(core, snapshot.host) if not core.fitting else None
    names = [c.path.removeprefix("hyperparams.") for c in changes if c.path.startswith("hyperparams.")]
    changed = [name for name in names if allows(allow, f"hyperparams.{name}")]
    key = allows(allow, "key") and any(change.path == "key" for change in changes)
    # Other checkpoints may keep the arrays that they return.
    owned = isinstance(checkpoint, FolderCheckpoint)
    lines = core.snapshots.restore(snapshot, staying, adopt=owned, changed_hyperparams=changed, changed_key=key)
    if not core.state.fit.begun:  # a fit in this process has changed the fields
        again = core.snapshots.unsaved_fields.that_begin_again(snapshot.about.get("unsaved_fields", {}))
        lines += [f"callbacks.{name}: {clause}" for name, clause in again]
    core.initialize_again({*snapshot.trees["cbstate"], *snapshot.host["cbstate"]})
    if switches is not None:
        disabled, core.switching = switches
        set_disabled(core, disabled)
    at = core.state.fit.at
    # These differences are warnings and not errors: a run must be able to continue after an upgrade or on another
    # machine. An allowed difference is no surprise.
    unexpected = [change for change in changes if not allows(allow, change.path)]
    lines = [line for line in lines if not _expects_note(allow, line.partition(": ")[0])]
    if lines or unexpected:
        text = f"The run resumes from {checkpoint} with differences:"
        text += f" {escape_line('; '.join(lines))}" if lines else ""
        text += f"\n{explained(unexpected, can_allow=can_allow)}" if unexpected else ""
        text += f"\n  {_IN_ANOTHER_ORDER}" if at is not None and reordered(unexpected, at.phases) else ""
        if core.state.fit.ended:
            text += (
                f"\n  The run was stopped ({escape_line(core.state.fit.ended)}), so `fit` with `resume=True` trains "
                "nothing. To train further, call `learner.fit(n)` after it."
            )
        warn_user(text, ResumeWarning)


def _expects_note(allow: Collection[str], path: str) -> bool:
    """Return whether the user allows a difference that explains a note about a callback, e.g. of one of its arguments.

    Notes about data are shown in any case, because reading a source again can take long.
    """
    if not path.startswith("callbacks."):
        return False
    return allows(allow, path) or any(name.startswith(f"{path}.") for name in allow)


def _compared(
    core: LearnerCore, saved: Mapping[str, Mapping[str, str]], about: Mapping[str, Any], allow: Collection[str]
) -> tuple[Mapping[str, Mapping[str, str]], dict[str, Any]]:
    """Return the arrays of the checkpoint and the trees that must match, without entries of callbacks that may differ.

    These are the entries of callbacks that were added or removed, and those that a callback with other arguments
    creates in another form, such as the sums of other metrics. The entries of the program keep their initial state.
    """
    trees = core.snapshots.trees()
    if not any(name.partition(".")[0] == "callbacks" for name in allow):
        return saved, trees
    then: dict[str, dict[str, str]] = {}
    for name, text in saved["cbstate"].items():
        then.setdefault(name.split(".")[0], {})[name] = text
    entries = {
        name: entry
        for name, entry in trees["cbstate"].items()
        if name in then and not _differs(core, name, entry, then[name], about, allow)
    }
    arrays = {name: text for entry in entries for name, text in then[entry].items()}
    return {**saved, "cbstate": arrays}, {**trees, "cbstate": entries}


def _differs(
    core: LearnerCore, name: str, entry: Any, then: Mapping[str, str], about: Mapping[str, Any], allow: Collection[str]
) -> bool:
    """Return whether an entry of `cbstate` has another form than in the checkpoint, and the user allows this."""
    writers = [declared for declared in core.graph.declared if declared.may_write(("cbstate", name))]
    if not writers or not all(allows(allow, f"callbacks.{declared.name}") for declared in writers):
        return False
    saved, layouts = about.get("layouts", {}), core.snapshots.about()["layouts"]
    other = any(saved.get(d.name, layouts.get(d.name)) != layouts.get(d.name) for d in writers)
    return other or bool(part_differences("", then, {name: entry}))
