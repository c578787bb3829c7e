"""`SnapshotSaver`: base class of callbacks that write checkpoints."""

from __future__ import annotations

import math
import os
import uuid
from abc import abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from fluxcb._declare.access import Read
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import EpochBegin, EpochEnd, Event, FitBegin, FitEnd, StepEnd
from fluxcb._declare.handlers import on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import Phase
from fluxcb._declare.schedules import AtWindowEnds
from fluxcb._errors import CheckpointError, DeclarationError, PeerError
from fluxcb._paths import fix_of_path, why_impossible
from fluxcb._tracebacks import warn_user
from fluxcb.checkpoints.agreement import Agreement
from fluxcb.checkpoints.manifest import Manifest
from fluxcb.checkpoints.run_folder import Entry, RunFolder, refuse_runs
from fluxcb.checkpoints.savers import RunLock
from fluxcb.checkpoints.snapshot import Snapshot

__all__ = ["EVERYTHING", "SnapshotSaver", "better", "is_chief"]

EVERYTHING = {"*": Read()}

_ABANDONED_AFTER = 5.0  # seconds that a save may take after another process has failed
_newest: Future[None] | None = None  # the save of any saver that was submitted last


_NOT_IN_URLS = "%?#|\\"


def _why_unreadable(path: str) -> str:
    """Return why orbax could not read a checkpoint from a directory, or an empty string.

    Orbax 0.12 writes to a path, but reads from a URL that contains the path without escaping.
    """
    if found := next((character for character in _NOT_IN_URLS if character in path), ""):
        return f"Orbax cannot read from a path with the character {found!r}"
    try:
        path.encode()
    except UnicodeEncodeError:
        return "Orbax requires paths that are valid UTF-8"
    return ""


class SnapshotSaver(Callback, RunLock):
    """Base class of callbacks that write checkpoints to their own directory in the background.

    A background thread writes one checkpoint at a time. If a write fails, the error is raised at the next event. If a
    parameter is not finite, the state is not saved, and a warning is issued.

    Args:
        folder: The directory.
        owner: Name of the callback, for messages.

    Raises:
        DeclarationError: `folder` is not a path, or Orbax cannot use it.
    """

    def __init__(self, folder: str | os.PathLike[str], owner: str) -> None:
        if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):
            raise DeclarationError(
                f"`{owner}` takes a directory, not {folder!r}.", fix=f'write e.g. `{owner}("runs/1")`'
            )
        self._passed_folder = os.fspath(folder)  # for labels
        self.folder = Path(folder).absolute()
        if why := why_impossible(self.folder) or _why_unreadable(self.folder.as_posix()):
            raise DeclarationError(
                f"`{owner}` cannot write checkpoints to {str(self.folder)!r}: {why}.",
                fix=fix_of_path(self.folder, f'use another directory, e.g. `{owner}("runs/1")`'),
            )
        if self.folder.exists() and not self.folder.is_dir():
            raise DeclarationError(
                f"`{owner}` writes to a directory, but {self.folder} is a file.",
                fix="use a separate directory for this run",
            )
        self._metric: str | None = None  # the metric whose values `write` gets
        self._run = uuid.uuid4().hex  # a directory holds one run, and a restored saver continues its run
        self._fitting = False
        self._resumed = False
        self._locked_by_run = False
        self._files = RunFolder(self.folder)
        self._thread: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None
        self._agreement: Agreement | None = None  # that of the save

    def stateaccess(self) -> dict[str, Any]:
        """Return the declared access: all state, so that the saver runs after every callback that writes."""
        return EVERYTHING

    def state_dict(self) -> dict[str, Any]:
        """Return the identifier of the run."""
        return {"run": self._run}

    def load_state_dict(self, state: dict[str, Any]) -> str | None:
        """Continue the run of the saved state."""
        self._run, self._resumed = state["run"], True

    def output_locations(self) -> Iterable[Path | str]:
        """Return the directory."""
        return (self.folder,)

    def has_checkpoint(self, *, after: int) -> bool:
        """Return whether the directory has a checkpoint of a step after this one, or one is being written."""
        return self._pending is not None or any(entry.step > after for entry in self.entries())

    # -- a fit ------------------------------------------------------------------------------

    def lock(self) -> None:
        """Lock the directory until `unlock`, before the run restores a checkpoint or a handler of FitBegin runs.

        Raises:
            CheckpointError: Another run writes to the directory, or it is not writable.
        """
        if is_chief():
            self._files.lock()
        self._locked_by_run = True

    def unlock(self) -> None:
        """Release the lock, after all handlers of FitEnd have run."""
        self._locked_by_run = False
        self._files.unlock()

    def _unlock_own(self) -> None:
        """Release the lock if the callback has taken it itself, as in a hand-written loop."""
        if not self._locked_by_run:
            self._files.unlock()

    @on(FitBegin, Phase)
    def begin_fit(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Claim the directory for this run, or raise an error if it belongs to another run."""
        self._fitting = True
        self.prepare_fit(learner, self._claim_folder())

    def prepare_fit(self, learner: LearnerView, kept: list[tuple[Entry, Manifest]]) -> None:
        """Prepare for a fit. Subclasses override this method.

        Args:
            learner: The Learner.
            kept: The checkpoints in the directory, oldest first.
        """

    # In a fit, the run has already locked the directory. A hand-written loop (`learner.run_epoch`) does not call
    # `lock`, so the saver locks the directory here, and releases it after FitEnd or after each save.
    def _claim_folder(self) -> list[tuple[Entry, Manifest]]:
        self._run = _of_chief(self._run)
        if is_chief():
            self._files.lock()
            self._files.clear_unfinished()  # not earlier, because a failed restore must not change the directory
        try:
            refuse_runs(self.folder)
            kept, damaged = self._files.kept()  # on all processes, so that all of them save or none
            self._refuse_other_run(kept, damaged)
        except BaseException:
            self._unlock_own()
            raise
        return kept

    def _refuse_other_run(self, kept: list[tuple[Entry, Manifest]], damaged: list[str]) -> None:
        why = "a directory can hold only one run: checkpoints are numbered by step, and old ones are deleted"
        new_run = "start a new run: use another directory, or delete this one"
        if {manifest.run for _, manifest in kept} - {self._run}:
            raise CheckpointError(
                f"{self.folder} contains checkpoints of another run.",
                why=why,
                fix=[f"continue that run: {self.how_to_continue()}", new_run],
            )
        # A damaged manifest does not name its run. A resumed run knows that the checkpoints are its own.
        if damaged and not kept and not self._resumed:
            raise CheckpointError(
                f"{self.folder} contains checkpoints, but their run is unknown because their manifests are damaged.",
                where=damaged,
                why=why,
                fix=new_run,
            )

    def how_to_continue(self) -> str:
        """Return the call that continues the run in the directory."""
        restore = (
            f"call `learner.restore({os.fspath(self.folder)!r})` before `fit`, with the argument "
            '`allow=("callbacks",)` if the list of callbacks has changed'
        )
        return f"if it has a `Checkpointer`, `learner.fit(..., resume=True)`; otherwise, {restore}"

    @on(StepEnd | EpochBegin | EpochEnd, Phase, access={}, when=AtWindowEnds())
    def check(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Raise the error of a write that has failed since the last event; with several processes, `write` does."""
        # Training must not wait for the disk here, and all processes must raise the error at the same step.
        if self._pending is not None and self._pending.done() and _is_single_process():
            self.wait()

    @on(FitEnd, Phase, access={})
    def end_fit(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Wait for the checkpoint that is being written, and unlock the directory unless the run has locked it."""
        self._fitting = False
        try:
            if isinstance(getattr(event, "error", None), PeerError) and self._pending is not None:
                # A process that was killed no longer writes its part. One that raised an error does.
                wait([self._pending], _ABANDONED_AFTER)
                if self._agreement is not None and not self._pending.done():
                    self._agreement.abandon()
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()  # waits, even after Ctrl-C, so that the last checkpoint is complete
                self._thread = None
            self._unlock_own()
            self.wait()  # raises the error of the write if Ctrl-C ended the first wait

    # -- saving -----------------------------------------------------------------------------

    def write(self, snapshot: Snapshot, value: float | None = None) -> None:
        """Write a checkpoint in the background. Outside a fit, wait until it is written.

        Raises:
            CheckpointError: The previous checkpoint could not be written, or this one if the method waits for it.
        """
        global _newest
        from fluxcb.checkpoints.saving import finite  # imported here, because it imports Orbax

        self.wait()
        if not finite(snapshot.trees):  # a run could not continue from this state
            self.forget_unsaved()
            warn_user(
                f"{self!r} does not save the state after step {snapshot.step}: some parameters are NaN or infinite, "
                "and training could not continue from them.",
                UserWarning,
            )
            return
        agreement, before = Agreement(), _newest
        if not self._fitting:
            self._claim_folder()
            try:
                self._settle(lambda: self._write_and_prune([snapshot], value, agreement))
            finally:
                self._unlock_own()
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="fluxcb-checkpoints")
        self._agreement = agreement
        self._pending = _newest = self._thread.submit(self._write_and_prune, [snapshot], value, agreement, before)

    def _write_and_prune(
        self,
        snapshots: list[Snapshot],
        value: float | None,
        agreement: Agreement,
        before: Future[None] | None = None,
    ) -> None:
        """Write a checkpoint, and delete those that are no longer kept.

        Args:
            snapshots: A list with the snapshot, which this method empties. The thread pool keeps the arguments of a
                call for a moment after its future is done, and the next snapshot may be taken then.
            value: The value that decides which checkpoints are the best, or None.
            agreement: How the processes agree.
            before: The save to wait for.
        """
        from fluxcb.checkpoints.saving import save

        snapshot = snapshots.pop()

        if before is not None:
            wait([before])  # otherwise, each process could write the checkpoints of several savers in another order
        save(
            self._files,
            snapshot,
            run=self._run,
            value=value,
            metric=self._metric,
            how_to_continue=self.how_to_continue(),
            agreement=agreement,
        )
        if is_chief():
            # Delete only when the new checkpoint is on disk, so that at least one exists if the run is killed.
            # A damaged checkpoint must not take the place of one to which the run can go back.
            undamaged = self._files.undamaged()
            deleted = list(self.to_delete(undamaged))
            oldest = next((entry for entry, _ in undamaged if entry not in deleted), None)
            older = self._files.older(oldest) if oldest is not None else []
            for entry in dict.fromkeys([*deleted, *older]):  # damaged ones are deleted with those of the same age
                try:
                    self._files.remove(entry)
                except OSError as error:
                    raise CheckpointError(
                        f"Cannot delete the old checkpoint {entry.path}: {error.strerror or error}.",
                        why=f"the checkpoint of step {snapshot.step} was written, but the directory would keep growing",
                    ) from error

    def wait(self) -> None:
        """Wait for the checkpoint that is being written.

        Raises:
            CheckpointError: The checkpoint could not be written.
        """
        if self._pending is not None:
            wait([self._pending])  # if Ctrl-C interrupts this call, the next `wait` raises a failure
            pending, self._pending, self._agreement = self._pending, None, None
            self._settle(pending.result)

    def _settle(self, outcome: Callable[[], None]) -> None:
        try:
            outcome()
        except Exception:
            self.forget_unsaved()
            raise

    def forget_unsaved(self) -> None:
        """Undo the bookkeeping for a snapshot that could not be saved."""
        self._files.last = None

    def entries(self) -> list[Entry]:
        """Return the checkpoints in the directory, oldest first, without verifying them."""
        return self._files.entries()

    def values_of(self, kept: Iterable[tuple[Entry, Manifest]]) -> list[tuple[Entry, float]]:
        """Return the checkpoints that have a value of this saver's metric, with the value.

        A resumed run can have another metric than before. Checkpoints of earlier versions do not name their metric.
        """
        return [
            (entry, manifest.value)
            for entry, manifest in kept
            if manifest.value is not None and manifest.metric in (None, self._metric)
        ]

    @abstractmethod
    def to_delete(self, kept: list[tuple[Entry, Manifest]]) -> Iterable[Entry]:
        """Return the checkpoints to delete. This never includes the newest one.

        Args:
            kept: The checkpoints in the directory, oldest first.
        """


def better(value: float | None, best: float | None, mode: str) -> bool:
    """Return whether a value is better than the best so far. NaN and equal values are not."""
    if value is None or math.isnan(value):
        return False
    return best is None or (value < best if mode == "min" else value > best)


def is_chief() -> bool:
    """Return whether this is the process that writes the files."""
    import jax

    return jax.process_index() == 0


def _is_single_process() -> bool:
    import jax

    return jax.process_count() == 1


def _of_chief(run: str) -> str:
    """Return the run identifier of process 0, because each process generates its own for a new run."""
    import jax

    if jax.process_count() == 1:
        return run
    import numpy as np
    from jax.experimental import multihost_utils

    of_chief = multihost_utils.broadcast_one_to_all(np.frombuffer(run.encode(), np.uint8))
    return np.asarray(of_chief).tobytes().decode()
