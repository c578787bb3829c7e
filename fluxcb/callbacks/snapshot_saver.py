"""`SnapshotSaver`: what callbacks that write checkpoints have in common."""

from __future__ import annotations

import math
import os
import uuid
import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any

from fluxcb._declare.access import Read
from fluxcb._declare.callback import Callback
from fluxcb._declare.events import EpochBegin, EpochEnd, Event, FitBegin, FitEnd, StepEnd
from fluxcb._declare.handlers import on
from fluxcb._declare.phases import Phase
from fluxcb._declare.schedules import AtWindowEnds
from fluxcb._errors import CheckpointError, DeclarationError
from fluxcb.checkpoints.manifest import Manifest
from fluxcb.checkpoints.run_folder import Entry, RunFolder
from fluxcb.checkpoints.snapshot import Snapshot

__all__ = ["EVERYTHING", "SnapshotSaver"]

EVERYTHING = {"*": Read()}


class SnapshotSaver(Callback):
    """Base of callbacks that write checkpoints to a directory of their own, beside the training.

    A thread writes while training goes on; a save waits for the one before it. What fails is raised at the next event.
    A state whose parameters are not all finite is not saved, with a warning.

    Args:
        folder: The directory.
        owner: What messages call the callback.

    Raises:
        DeclarationError: `folder` is no path.
    """

    def __init__(self, folder: str | os.PathLike[str], owner: str) -> None:
        if not isinstance(folder, str | os.PathLike) or not os.fspath(folder):
            raise DeclarationError(f"`{owner}` takes a directory, not {folder!r}.", fix=f'e.g. `{owner}("runs/1")`')
        self.folder = Path(folder).absolute()
        if self.folder.exists() and not self.folder.is_dir():
            raise DeclarationError(
                f"`{owner}` writes to a directory, and {self.folder} is a file.",
                fix="name a directory of the run's own",
            )
        self._run = uuid.uuid4().hex
        self._fitting = False
        self._goes_on = False
        self._files = RunFolder(self.folder)
        self._thread: ThreadPoolExecutor | None = None
        self._pending: Future[None] | None = None

    def stateaccess(self) -> dict[str, Any]:
        """Return what it reads: everything, so it runs after all who write."""
        return EVERYTHING

    def state_dict(self) -> dict[str, Any]:
        """Return which run this is."""
        return {"run": self._run}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on with that run."""
        self._run, self._goes_on = state["run"], True

    def output_locations(self) -> Iterable[Path | str]:
        """Return the directory."""
        return (self.folder,)

    # -- a fit ------------------------------------------------------------------------------

    @on(FitBegin, Phase)
    def begin_fit(self, event: Event, phase: Phase, learner: Any) -> None:
        """Take the directory, or find that it is another run's."""
        self._fitting = True
        self.begun(learner, self._take_folder())

    def begun(self, learner: Any, kept: list[tuple[Entry, Manifest]]) -> None:
        """Do what else is to be done when a fit begins, with these checkpoints in the directory, oldest first."""

    def _take_folder(self) -> list[tuple[Entry, Manifest]]:
        self._run = _of_chief(self._run)
        if _is_chief():
            self._files.lock()
        try:
            kept, damaged = self._files.kept()  # all processes look, so that all save, or none
            self._refuse_others(kept, damaged)
        except BaseException:
            self._files.unlock()
            raise
        return kept

    def _refuse_others(self, kept: list[tuple[Entry, Manifest]], damaged: list[str]) -> None:
        why = "one directory has one run: its checkpoints are numbered by step, and old ones are deleted"
        if {manifest.run for _, manifest in kept} - {self._run}:
            raise CheckpointError(
                f"{self.folder} has the checkpoints of another run.",
                why=why,
                fix=["go on with it: `learner.fit(..., resume=True)`", "name another directory, or delete this one"],
            )
        if damaged and not kept and not self._goes_on:
            raise CheckpointError(
                f"{self.folder} has checkpoints, and it cannot be read whose they are.",
                where=damaged,
                why=why,
                fix="name another directory, or delete this one",
            )

    @on(StepEnd | EpochBegin | EpochEnd, Phase, access={}, when=AtWindowEnds())
    def look(self, event: Event, phase: Phase, learner: Any) -> None:
        """Raise what has failed since the last event."""
        if self._pending is not None and self._pending.done():
            self.wait()

    @on(FitEnd, Phase, access={})
    def end_fit(self, event: Event, phase: Phase, learner: Any) -> None:
        """Wait for what is being written, and leave the directory to others."""
        self._fitting = False
        try:
            self.wait()
        finally:
            if self._thread is not None:
                self._thread.shutdown()  # waits, after Ctrl-C too: what is half-written would be lost
                self._thread = None
            self._files.unlock()
            self.wait()  # where Ctrl-C ended the first wait

    # -- saving -----------------------------------------------------------------------------

    def write(self, snapshot: Snapshot, value: float | None = None) -> None:
        """Write a checkpoint: beside the training in a fit, at once outside of one and where several processes write.

        Raises:
            CheckpointError: The one before it could not be written, or this one where it is waited for.
        """
        import jax

        from fluxcb.checkpoints.saving import finite  # orbax, when it is needed

        self.wait()
        if not finite(snapshot.trees):
            self.unsaved()
            warnings.warn(
                f"{self!r} does not save the state after step {snapshot.step}: some parameters are NaN or infinite, "
                "and a run that went on from there would be lost.",
                stacklevel=2,
            )
            return
        if not self._fitting or jax.process_count() > 1:
            if not self._fitting:
                self._take_folder()
            try:
                self._settle(lambda: self._written(snapshot, value))
            finally:
                if not self._fitting:
                    self._files.unlock()
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="fluxcb-checkpoints")
        self._pending = self._thread.submit(self._written, snapshot, value)

    def _written(self, snapshot: Snapshot, value: float | None) -> None:
        """Write a checkpoint and delete what is not kept."""
        from fluxcb.checkpoints.saving import save

        save(self._files, snapshot, run=self._run, value=value)
        if _is_chief():
            for entry in self.dispensable(self._files.kept()[0]):
                try:
                    self._files.remove(entry)
                except OSError as error:
                    raise CheckpointError(
                        f"The old checkpoint {entry.path} could not be deleted: {error.strerror or error}.",
                        why=f"that of step {snapshot.step} has been written, and the directory would grow without end",
                    ) from error

    def wait(self) -> None:
        """Wait for what is being written.

        Raises:
            CheckpointError: It could not be written.
        """
        if self._pending is not None:
            wait([self._pending])  # where Ctrl-C may come; a failure is told the next time, then
            pending, self._pending = self._pending, None
            self._settle(pending.result)

    def _settle(self, outcome: Callable[[], None]) -> None:
        try:
            outcome()
        except Exception:
            self.unsaved()
            raise

    def unsaved(self) -> None:
        """Take back what was said of a snapshot that has not become a checkpoint."""
        self._files.last = None

    def entries(self) -> list[Entry]:
        """Return the checkpoints in the directory, oldest first; whether they are whole is another question."""
        return self._files.entries()

    def forget_after(self, last: Entry) -> None:
        """Delete the checkpoints that are later than one of them: the run has gone back to it."""
        if _is_chief():
            for entry in self.entries():
                if entry > last:
                    self._files.remove(entry)

    @abstractmethod
    def dispensable(self, kept: list[tuple[Entry, Manifest]]) -> Iterable[Entry]:
        """Return which checkpoints are to be deleted, of those in the directory, oldest first; never the last."""


def better(value: float | None, best: float | None, mode: str) -> bool:
    """Tell whether a value is better than the best so far; NaN never is, and neither is an equal one."""
    if value is None or math.isnan(value):
        return False
    return best is None or (value < best if mode == "min" else value > best)


def _is_chief() -> bool:
    import jax

    return jax.process_index() == 0


def _of_chief(run: str) -> str:
    """Return which run it is on process 0; each process has drawn its own name for a new one."""
    import jax

    if jax.process_count() == 1:
        return run
    import numpy as np
    from jax.experimental import multihost_utils

    told = multihost_utils.broadcast_one_to_all(np.frombuffer(run.encode(), np.uint8))
    return np.asarray(told).tobytes().decode()
