"""`Checkpointer`: save the whole state of a run, so that it can resume with identical results."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from fluxcb._calls import entry_point
from fluxcb._declare.events import Event, FitStopping, Trigger
from fluxcb._declare.handlers import Handler, on
from fluxcb._declare.learner_view import LearnerView
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._declare.schedules import EveryEpochs, EverySeconds, EverySteps, Schedule, positive
from fluxcb._errors import CheckpointCorruptError, DeclarationError
from fluxcb.callbacks.keyword_fixes import CHECKPOINTER_FIXES
from fluxcb.callbacks.saving.snapshot_saver import SnapshotSaver, better, is_chief
from fluxcb.callbacks.watched import Watched, requested_mode, warn_if_contradictory
from fluxcb.checkpoints.manifest import Manifest
from fluxcb.checkpoints.run_folder import Entry
from fluxcb.checkpoints.savers import RunSaver, StoredCheckpoint
from fluxcb.checkpoints.snapshot import Snapshot
from fluxcb.checkpoints.verification import newest_good, verify_checkpoint

__all__ = ["Checkpointer", "ModelSaver"]


class Checkpointer(SnapshotSaver, RunSaver):
    """Save the whole state of a run after each epoch or on a schedule, and when the fit stops.

    A checkpoint contains the train state, all `cbstate`, the state of every callback, the counters, the random key and
    the position in the data, including the step within the epoch. `learner.fit(n, resume=True)` continues from the
    newest checkpoint. On CPU, the results are bit-for-bit identical to those of an uninterrupted run.

    Checkpoints are written with Orbax on a background thread. A checkpoint gets its name, the number of its step, only
    when it is complete and has checksums of all its files. If a write fails, the error is raised at the next event, and
    older checkpoints are not affected. A directory can hold only one run: it is an error if the directory contains
    checkpoints of another run, or if another process writes to it.

    The callback also saves a new run before its first step. Therefore, a run that is killed early can resume with its
    logs, and problems with saving appear immediately. A checkpoint contains the state after all handlers of the event
    have run. If a signal (Ctrl-C, SIGTERM) or a cancellation ends the fit, the state is saved first. If an exception
    ends the fit, it is not. If a parameter is NaN or infinite, the callback issues a warning and does not save.

    Args:
        folder: The directory of the run.
        steps: Period (steps), instead of after each epoch.
        epochs: Period (epochs).
        seconds: Period (seconds). Saves at the end of a window of steps.
        keep_last: Number of most recent checkpoints to keep.
        keep_best: Number of additional checkpoints to keep: those with the best values of `metric`. It cannot be
            combined with `steps` or `seconds`, because there is no value before the validation of an epoch; use
            `MinSaver` or `MaxSaver` instead.
        keep_every: Also keep the first checkpoint at or after each multiple of this number (steps).
        metric: The metric that decides which checkpoints are the best, e.g. `validation/loss`. A name without a phase,
            such as `loss`, means that of the validation. The default is `loss`. Only with `keep_best`.
        mode: `max` if high values of `metric` are good, `min` if low values are good. If None or `auto`, it is `max`
            for metrics with a name such as `accuracy`, `auc` or `score`, and `min` for all others, see
            `Watched.default_mode`. A UserWarning is issued for a mode that the name contradicts, and without a mode for
            a name that implies none (when the Learner is built). Only with `keep_best`.

    Access:
        *: Read.

    Runs:
        FitBegin, EpochBegin, EpochEnd, FitEnd x Phase (host).
        StepEnd x Phase (host, at the ends of windows).
        Trigger, FitStopping x AbstractTrainingPhase (host).

    Cost:
        Each save copies the train state to the host. The background thread takes about 1 ms per array (measured with
        Orbax 0.12.8). A save between two steps ends the window there.

    Raises:
        DeclarationError: `folder` is not a path, there is more than one period, a number is not positive, `keep_best`
            is combined with `steps` or `seconds`, `metric` or `mode` is given without `keep_best`, or `mode` is
            unknown.
        MissingStateError: With `keep_best`, no callback provides the metric, or its phase has no data (when the Learner
            is built).
        CheckpointError: The directory belongs to another run or is not writable (when a fit begins), or a save failed
            (at the next event).

    Example:
        >>> import tempfile, jax.numpy as jnp, optax, fluxcb
        >>> from fluxcb.callbacks import Checkpointer
        >>> folder = tempfile.mkdtemp()
        >>> def learner():
        ...     return fluxcb.Learner.from_loss(
        ...         {"w": jnp.ones(())},
        ...         lambda params, batch, key: jnp.mean((params["w"] - batch) ** 2),
        ...         optax.adam(0.1),
        ...         data=[jnp.zeros(1), jnp.ones(1)],
        ...         callbacks=[Checkpointer(folder, steps=3)],
        ...         default_callbacks=False,
        ...     )
        >>> history = learner().fit(2)  # four steps
        >>> resumed = learner()
        >>> history = resumed.fit(4, resume=True)  # from step 4, which was saved when the fit stopped
        >>> uninterrupted = learner()
        >>> uninterrupted.callbacks.remove(Checkpointer)
        >>> history = uninterrupted.fit(4)
        >>> resumed.step, bool(resumed.params["w"] == uninterrupted.params["w"])
        (8, True)

    Source:
        FluxTraining.jl, `Checkpointer`; tensorpack, `ModelSaver`. Uses orbax-checkpoint.
    """

    @entry_point(fixes=CHECKPOINTER_FIXES)
    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        steps: int | None = None,
        epochs: int | None = None,
        seconds: float | None = None,
        keep_last: int = 3,
        keep_best: int = 0,
        keep_every: int | None = None,
        metric: str | None = None,
        mode: Literal["min", "max", "auto"] | None = None,
    ) -> None:
        super().__init__(folder, type(self).__name__)
        self.schedule = _schedule(steps, epochs, seconds)
        self.keep_last = positive(keep_last, "`keep_last` of Checkpointer")
        self.keep_best = positive(keep_best, "`keep_best` of Checkpointer") if keep_best != 0 else 0
        self.keep_every = (
            positive(keep_every, "`keep_every` of Checkpointer (steps)") if keep_every is not None else None
        )
        requested = requested_mode(mode, "Checkpointer")
        self._watched = Watched.named("loss" if metric is None else metric, None, "Checkpointer")
        self.mode: Literal["min", "max"] = requested or self._watched.default_mode
        if requested is None:
            self._watched = self._watched.with_mode_warning()
        if keep_best and isinstance(self.schedule, EverySteps | EverySeconds):
            metric = "loss" if metric is None else metric
            saver = f'{self.mode.capitalize()}Saver(folder, "{metric}")'
            raise DeclarationError(
                "`keep_best` of Checkpointer only works with checkpoints at the end of epochs.",
                why=f"{self.schedule!r} saves within an epoch, when `{metric}` has no value",
                fix=["remove `steps` or `seconds`", f"add a callback that keeps the best checkpoint: `{saver}`"],
            )
        values = {"metric": metric, "mode": requested}
        arguments = {name: f'{name}="{value}"' for name, value in values.items() if value is not None}
        if arguments and not keep_best:
            names = " and ".join(f"`{name}`" for name in arguments)
            call = f'Checkpointer("runs/1", keep_best=1, {", ".join(arguments.values())})'
            raise DeclarationError(
                f"`Checkpointer` received {names} without `keep_best`.",
                why="these arguments only decide which checkpoints `keep_best` keeps",
                fix=[f"pass the number of best checkpoints to keep: `{call}`", f"remove {names}"],
            )
        warn_if_contradictory(self._watched, requested)
        self._metric = str(self._watched) if keep_best else None
        self._value: float | None = None
        self._verified: Path | None = None

    def stateaccess(self) -> dict[str, Any]:
        """Return the declared access: all state, so that the saver runs after every callback that writes."""
        access = super().stateaccess()
        return {**access, "cbstate": {"metrics_epoch": access["*"]}} if self.keep_best else access

    def watched_metrics(self) -> Iterable[Watched]:
        """Return the metric that decides which checkpoints are the best, if `keep_best` is set."""
        return (self._watched,) if self.keep_best else ()

    def handlers(self) -> list[Handler]:
        """Return the handlers. That of Trigger has the schedule of this instance."""
        handlers = super().handlers()
        if self.schedule is None:
            return handlers
        return [replace(handler, when=self.schedule) if handler.event is Trigger else handler for handler in handlers]

    @on(Trigger | FitStopping, AbstractTrainingPhase)
    def save(self, event: Event, phase: Phase, learner: LearnerView) -> None:
        """Request a snapshot, which is taken after all handlers of this event have run."""
        self._value = None
        if self.keep_best:
            self._value = self._value_of(event, learner)
        learner.snapshots.request(self._take, self._is_saved, prepare=self.wait)

    def request_save(self, snapshots: Any) -> None:
        """Save now, in addition to the schedule, with no value for `keep_best`.

        Args:
            snapshots: `learner.snapshots`.
        """
        self._value = None
        snapshots.request(self._take, prepare=self.wait)

    def _value_of(self, event: Event, learner: LearnerView) -> float | None:
        values, watched = learner.cbstate.metrics_epoch, self._watched
        if isinstance(event, FitStopping) and watched.metric not in values[watched.phase]:
            return None  # a signal ended the fit before the first value
        return watched.at(values, learner.progress.epoch)

    # A fit often stops where the last epoch has just been saved, and the state is then not copied again.
    def _is_saved(self, position: tuple[Any, ...]) -> bool:
        files = self._files
        found, files.found = files.found, None
        verified, self._verified = self._verified, None
        if found is not None and _position(found[1]) == position:
            path = found[0].path
            # Verifying hashes every file, so the checkpoint that the run resumed from is not verified again.
            if path == verified or _verified(path) is not None:
                files.last = position
        return position == files.last

    def _take(self, snapshot: Snapshot) -> None:
        self._files.last = snapshot.position
        self.write(snapshot, self._value)

    def prepare_fit(self, learner: LearnerView, kept: list[tuple[Entry, Manifest]]) -> None:
        """Save the beginning of a new run, and wait until it is saved."""
        # This finds problems with the directory now instead of after hours. A run that is killed early has a checkpoint
        # with the initial lengths of its logs.
        of_step = [(entry, manifest) for entry, manifest in kept if entry.step == learner.progress.step]
        # If the fit ends without a step, `_take` finds this checkpoint and does not save again.
        self._files.last, self._files.found = None, of_step[-1] if of_step else None
        if not kept and learner.progress.step == 0:
            learner.snapshots.request(self._take_first)

    # -- called by the engine -----------------------------------------------------------------

    def stored_checkpoints(self, last_step: int | None = None) -> Iterable[StoredCheckpoint]:
        """Yield the undamaged checkpoints, the newest first; see `RunSaver`."""
        from fluxcb.checkpoints.reading import FolderCheckpoint  # imported here, because it imports JAX

        self.wait()
        for entry in reversed(self.entries()):
            if last_step is not None and entry.step > last_step:
                continue
            manifest = _verified(entry.path)  # hashes every file, so only when the caller requests this entry
            if manifest is not None:
                yield FolderCheckpoint(entry.path, manifest)

    def newest_checkpoint(self) -> StoredCheckpoint | None:
        """Return the newest undamaged checkpoint, and warn about newer ones that are damaged.

        Raises:
            CheckpointError: There are checkpoints, but all are damaged.
        """
        from fluxcb.checkpoints.reading import FolderCheckpoint  # imported here, because it imports JAX

        found = newest_good(self.folder, together=True, damaged=self._files.damaged)
        return FolderCheckpoint(found[0].path, found[1]) if found is not None else None

    def resumed_from(self, checkpoint: StoredCheckpoint) -> None:
        """Record that the files of this checkpoint have been verified."""
        self._verified = Path(str(checkpoint))

    def discard_after(self, checkpoint: StoredCheckpoint) -> None:
        """Delete all checkpoints that are newer than this one."""
        entries = self.entries()
        if is_chief():
            position = [entry.path for entry in entries].index(Path(str(checkpoint)))
            for entry in entries[position + 1 :]:
                self._files.remove(entry)

    # -- retention ----------------------------------------------------------------------------

    def how_to_continue(self) -> str:
        """Return the call that continues the run in the directory."""
        return "`learner.fit(..., resume=True)`"

    def _take_first(self, snapshot: Snapshot) -> None:
        self._take(snapshot)
        self.wait()

    def to_delete(self, kept: list[tuple[Entry, Manifest]]) -> Iterable[Entry]:
        """Return the checkpoints that `keep_last`, `keep_best` and `keep_every` do not keep."""
        keep = {entry for entry, _ in kept[-self.keep_last :]}
        best = [(entry, value) for entry, value in self.values_of(kept) if better(value, None, self.mode)]
        best.sort(
            key=lambda pair: pair[1] if self.mode == "min" else -pair[1]
        )  # stable, so ties go to the earlier step
        keep |= {entry for entry, _ in best[: self.keep_best]}
        if self.keep_every is not None:
            multiple = 0
            for entry, _ in kept:
                if entry.step // self.keep_every > multiple:
                    multiple = entry.step // self.keep_every
                    keep.add(entry)
        return [entry for entry, _ in kept if entry not in keep]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._passed_folder!r})"


class ModelSaver(Checkpointer):
    """`Checkpointer` with the name and the default of tensorpack, which keeps ten checkpoints.

    Args:
        folder: The directory of the run.
        max_to_keep: Number of most recent checkpoints to keep.

    Access:
        *: Read.

    Runs:
        FitBegin, EpochBegin, EpochEnd, FitEnd x Phase (host).
        StepEnd x Phase (host, at the ends of windows).
        Trigger, FitStopping x AbstractTrainingPhase (host).

    Cost:
        See `Checkpointer`.

    Raises:
        DeclarationError: `folder` is not a path, or `max_to_keep` is not a positive integer.
        CheckpointError: See `Checkpointer`.

    Example:
        >>> from fluxcb.callbacks import ModelSaver, PeriodicTrigger
        >>> saver = PeriodicTrigger(ModelSaver("runs/1"), every_k_steps=1000)

    Source:
        tensorpack, `ModelSaver`, which only saves the variables, and logs errors instead of raising them.
    """

    def __init__(self, folder: str | os.PathLike[str], max_to_keep: int = 10) -> None:
        super().__init__(folder, keep_last=max_to_keep)


def _position(manifest: Manifest) -> tuple[Any, ...]:
    return (manifest.step, manifest.at, manifest.ended)


def _verified(path: Path) -> Manifest | None:
    """Return the manifest of a checkpoint, or None if it is damaged."""
    try:
        return verify_checkpoint(path, together=True)
    except CheckpointCorruptError:
        return None


def _schedule(steps: int | None, epochs: int | None, seconds: float | None) -> Schedule | None:
    periods = [
        name for name, value in (("steps", steps), ("epochs", epochs), ("seconds", seconds)) if value is not None
    ]
    if len(periods) > 1:
        raise DeclarationError(
            f"`Checkpointer` takes one period, not {' and '.join(periods)}.",
            fix='write e.g. `Checkpointer("runs/1", steps=1000)`, which also saves when the fit stops',
        )
    if steps is not None:
        return EverySteps(steps)
    if epochs is not None:
        return EveryEpochs(epochs)
    return EverySeconds(seconds) if seconds is not None else None
