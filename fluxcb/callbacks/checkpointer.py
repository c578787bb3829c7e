"""`Checkpointer`: save everything a run needs to go on after a kill as if nothing had happened."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from fluxcb._declare.callback import Callback
from fluxcb._declare.dispatch import Entry as HandlerEntry
from fluxcb._declare.events import Event, FitStopping, Trigger
from fluxcb._declare.handlers import on
from fluxcb._declare.phases import AbstractTrainingPhase, Phase
from fluxcb._declare.schedules import EveryEpochs, EverySeconds, EverySteps, Schedule, positive
from fluxcb._declare.signatures import explained
from fluxcb._errors import CheckpointCorruptError, DeclarationError
from fluxcb.callbacks.snapshot_saver import SnapshotSaver, better
from fluxcb.callbacks.watched import Watched, requested_mode
from fluxcb.checkpoints.manifest import Manifest
from fluxcb.checkpoints.run_folder import Entry, whole
from fluxcb.checkpoints.snapshot import Snapshot

__all__ = ["Checkpointer", "ModelSaver"]


class Checkpointer(SnapshotSaver):
    """Save the whole state of a run to a directory: after each epoch, or on a schedule, and when the fit stops.

    A checkpoint has the train state, all `cbstate`, the state of every callback, the counters, the random key and the
    position in the data, down to the step in the epoch. `learner.fit(n, resume=True)` goes on from the newest one, and
    gives the same numbers, to the last bit on CPU, as a run that was never interrupted.

    A thread writes it with orbax while training goes on. It appears under its name (the number of its step) only when
    it is complete, with the checksums of all its files. An error in writing is raised at the next event; older
    checkpoints are as they were. One directory has one run: another one's checkpoints in it are an error, and so is
    another process that writes there.

    A new run's beginning is saved, too, before its first step: so a run that is killed early goes on with its logs, and
    what hinders saving is found at once. Saved is what is there when all handlers of the moment have run. Signals
    (Ctrl-C, SIGTERM) and cancels save before the fit ends, an exception does not. Parameters that are NaN or infinite
    are not saved, with a warning.

    Args:
        folder: The directory of the run.
        steps: Save every so many steps, instead of after each epoch.
        epochs: Save every so many epochs.
        seconds: Save every so many seconds, at the end of a window of steps.
        keep_last: How many of the newest checkpoints are kept.
        keep_best: How many of those with the best values of `metric` are kept, too. One that is written before the
            validation of its epoch has no value; with `steps` or `seconds` these are most, see `MinSaver`.
        keep_every: Keep one in so many steps, too: the first at or behind each multiple.
        metric: The metric that says which are the best: `validation/loss`, or `loss` for that of the validation. Only
            with `keep_best`.
        mode: `max` if high values of `metric` are good, `min` if low values are good. If None or `auto`, it is `max`
            for metrics with a name such as `accuracy`, `auc` or `f1`, and `min` for all others, see
            `Watched.default_mode`. Only with `keep_best`.

    Access:
        *: Read.

    Runs:
        FitBegin, EpochBegin, EpochEnd, FitEnd x Phase (host).
        StepEnd x Phase (host, at the ends of windows).
        Trigger, FitStopping x AbstractTrainingPhase (host).

    Cost:
        A copy of the train state on the host for each save; the thread takes about 1 ms per array (measured, orbax
        0.12.8). A save between two steps ends the window there.

    Raises:
        DeclarationError: No path, more than one period, a number that is not positive, `keep_best` with a period within
            epochs, `metric` or `mode` without `keep_best`, an unknown `mode`.
        MissingStateError: With `keep_best`, no callback provides the metric, or its phase has no data (when the Learner
            is built).
        CheckpointError: The directory is another run's, or cannot be written to (when a fit begins); a save failed
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
        >>> again = learner()
        >>> history = again.fit(4, resume=True)  # from step 4, which was saved when the fit stopped
        >>> straight = learner()
        >>> straight.callbacks.remove(Checkpointer)
        >>> history = straight.fit(4)
        >>> again.step, bool(again.params["w"] == straight.params["w"])
        (8, True)

    Source:
        FluxTraining.jl, `Checkpointer`; tensorpack, `ModelSaver`. On orbax-checkpoint.
    """

    @explained()
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
        metric: str = "loss",
        mode: Literal["min", "max", "auto"] | None = None,
    ) -> None:
        super().__init__(folder, type(self).__name__)
        self.schedule = _schedule(steps, epochs, seconds)
        self.keep_last = positive(keep_last, "`keep_last` of Checkpointer")
        self.keep_best = positive(keep_best, "`keep_best` of Checkpointer") if keep_best != 0 else 0
        self.keep_every = (
            positive(keep_every, "`keep_every` of Checkpointer (steps)") if keep_every is not None else None
        )
        if keep_best and isinstance(self.schedule, EverySteps | EverySeconds):
            raise DeclarationError(
                "`keep_best` of Checkpointer goes with saving after epochs.",
                why=f"in the middle of an epoch, where {self.schedule!r} saves, there is no value of {metric!r}",
                fix=["leave out `steps` or `seconds`", "keep the best beside them: `MinSaver(folder)`"],
            )
        requested = requested_mode(mode, "Checkpointer")
        self._watched = Watched.named(metric, None, "Checkpointer")
        self.mode: Literal["min", "max"] = requested or self._watched.default_mode
        values = {"metric": None if metric == "loss" else metric, "mode": requested}
        given = {name: f'{name}="{value}"' for name, value in values.items() if value is not None}
        if given and not keep_best:
            names = " and ".join(f"`{name}`" for name in given)
            call = f'Checkpointer("runs/1", keep_best=1, {", ".join(given.values())})'
            raise DeclarationError(
                f"`Checkpointer` was given {names} without `keep_best`.",
                why="these arguments only decide which checkpoints `keep_best` keeps",
                fix=[f"say how many of the best to keep: `{call}`", f"leave out {names}"],
            )
        self._value: float | None = None

    def stateaccess(self) -> dict[str, Any]:
        """Return what it reads: everything, so it runs after all who write."""
        access = super().stateaccess()
        return {**access, "cbstate": {"metrics_epoch": access["*"]}} if self.keep_best else access

    def watched_metrics(self) -> Iterable[Watched]:
        """Return the metric that decides which checkpoints are the best, if `keep_best` is set."""
        return (self._watched,) if self.keep_best else ()

    def entry_for(
        self, event: type[Event], phase: type[Phase]
    ) -> tuple[Callback, HandlerEntry, tuple[Schedule, ...]] | None:
        """Return who handles a moment, with its schedule at Trigger."""
        found = super().entry_for(event, phase)
        if found is None or self.schedule is None or not issubclass(event, Trigger):
            return found
        return found[0], found[1], (*found[2], self.schedule)

    @on(Trigger | FitStopping, AbstractTrainingPhase)
    def save(self, event: Event, phase: Phase, learner: Any) -> None:
        """Ask for a snapshot, to be taken when the other handlers of this moment have run."""
        self._value = None
        if self.keep_best:
            self._value = self._value_of(event, learner)
        learner.snapshots.request(self._take)

    def _value_of(self, event: Event, learner: Any) -> float | None:
        values, watched = learner.cbstate.metrics_epoch, self._watched
        if isinstance(event, FitStopping) and watched.metric not in values[watched.phase]:
            return None  # a signal came before the first
        return watched.at(values, learner.progress.epoch)

    def _take(self, snapshot: Snapshot) -> None:
        position, files = (snapshot.step, snapshot.host["at"], snapshot.host["fit"]["ended"]), self._files
        found, files.found = files.found, None
        if found is not None and _position(found[1]) == position and _is_whole(found[0].path):
            files.last = position
        if position != files.last:  # a fit often stops where the last epoch has just been saved
            files.last = position
            self.write(snapshot, self._value)

    def begun(self, learner: Any, kept: list[tuple[Entry, Manifest]]) -> None:
        """Save the beginning of a new run, and wait for that: what hinders saving shows now, and logs have a start."""
        here = [(entry, manifest) for entry, manifest in kept if entry.step == learner.progress.step]
        self._files.last, self._files.found = None, here[-1] if here else None  # if the fit ends at once
        if not kept and learner.progress.step == 0:
            learner.snapshots.request(self._take_first)

    def how_to_continue(self) -> str:
        """Return the call that continues the run in the directory."""
        return "`learner.fit(..., resume=True)`"

    def _take_first(self, snapshot: Snapshot) -> None:
        self._take(snapshot)
        self.wait()

    def dispensable(self, kept: list[tuple[Entry, Manifest]]) -> Iterable[Entry]:
        """Return all but the newest, the best and those kept for the record."""
        keep = {entry for entry, _ in kept[-self.keep_last :]}
        best: list[tuple[Entry, float]] = []
        for entry, manifest in kept:
            if manifest.value is not None and better(manifest.value, None, self.mode):
                best.append((entry, manifest.value))
        best.sort(key=lambda pair: pair[1] if self.mode == "min" else -pair[1])  # stable: of equals, the earlier
        keep |= {entry for entry, _ in best[: self.keep_best]}
        if self.keep_every is not None:
            crossed = 0
            for entry, _ in kept:
                if entry.step // self.keep_every > crossed:
                    crossed = entry.step // self.keep_every
                    keep.add(entry)
        return [entry for entry, _ in kept if entry not in keep]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({os.fspath(self.folder)!r})"


class ModelSaver(Checkpointer):
    """`Checkpointer` under tensorpack's name, with its ten kept checkpoints.

    Args:
        folder: The directory of the run.
        max_to_keep: How many of the newest checkpoints are kept.

    Access:
        *: Read.

    Runs:
        FitBegin, EpochBegin, EpochEnd, FitEnd x Phase (host).
        StepEnd x Phase (host, at the ends of windows).
        Trigger, FitStopping x AbstractTrainingPhase (host).

    Cost:
        See `Checkpointer`.

    Raises:
        DeclarationError: No path, or a number that is not positive.
        CheckpointError: See `Checkpointer`.

    Example:
        >>> from fluxcb.callbacks import ModelSaver, PeriodicTrigger
        >>> saver = PeriodicTrigger(ModelSaver("runs/1"), every_k_steps=1000)

    Source:
        tensorpack, `ModelSaver`, which saves the variables only, and logs errors instead of raising them.
    """

    def __init__(self, folder: str | os.PathLike[str], max_to_keep: int = 10) -> None:
        super().__init__(folder, keep_last=max_to_keep)


def _position(manifest: Manifest) -> tuple[Any, ...]:
    return (manifest.step, manifest.at, manifest.ended)


def _is_whole(path: Path) -> bool:
    try:
        return whole(path) is not None
    except CheckpointCorruptError:
        return False


def _schedule(steps: int | None, epochs: int | None, seconds: float | None) -> Schedule | None:
    given = [name for name, value in (("steps", steps), ("epochs", epochs), ("seconds", seconds)) if value is not None]
    if len(given) > 1:
        raise DeclarationError(
            f"`Checkpointer` takes one period, not {' and '.join(given)}.",
            fix='write e.g. `Checkpointer("runs/1", steps=1000)`; it saves when the fit stops, too',
        )
    if steps is not None:
        return EverySteps(steps)
    if epochs is not None:
        return EveryEpochs(epochs)
    return EverySeconds(seconds) if seconds is not None else None
